"""The ladder against the real engine in its twin: each fault that EAGLE-3 hides fails at its rung, with its own name.

Six starts of a server. Faults that need none of their own are switched on and off in one that runs, so that the same
server passes without them.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.pipeline import adapters, climb, containers, ladder, pins, server, smoke, trials

pytestmark = [pytest.mark.image, pytest.mark.slow]
PINS = pins.load()
TWIN = PINS.release("vllm", variant="cpu")
IDS = "eagle_aux_hidden_state_layer_ids"

# The capture of hidden states in the image's own Python, and what takes its place: what the file /fault/name says, now.
CAPTURE = "vllm/model_executor/models/deepseek_v2.py"
EDITS = {
    "aux_hidden_state = hidden_states + residual": "aux_hidden_state = _captured(hidden_states, residual)",
    "            return hidden_states, aux_hidden_states\n": (
        "            return hidden_states, aux_hidden_states[:: -1 if _fault() == 'order reversed' else 1]\n"
    ),
}
FAULTS = """

def _fault():
    return open("/fault/name").read()


def _captured(hidden_states, residual):
    if _fault() == "residual missing":
        return hidden_states.clone()
    return residual.clone() if _fault() == "hidden missing" else hidden_states + residual
"""


def edited(text: str) -> str:
    """The image's file with the faults in it. Fails where a piece that is replaced isn't there exactly once."""
    for old, new in EDITS.items():
        assert text.count(old) == 1, f"{CAPTURE} has {old.strip()!r} {text.count(old)} times: fit EDITS to the release"
        text = text.replace(old, new)
    return text + FAULTS


@pytest.fixture(scope="module")
def image(engine: containers.ContainerEngine) -> str:
    found = containers.image_id(engine, PINS.image(TWIN))
    if found is None:
        pytest.skip(f"no {PINS.image(TWIN)} on this machine: `nox -s build-vllm` makes it")
    return found


@pytest.fixture(scope="module")
def oracle(engine: containers.ContainerEngine, image: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = trials.make_oracle(engine, image, tmp_path_factory.mktemp("twin"), ["--drafter", "mla"])
    for parent in (folder.parent, *folder.parent.parents[:2]):
        parent.chmod(0o755)
    return folder


def command(image: str, trial: trials.Trial) -> server.Launch:
    options = smoke.arguments("vllm").parse_args([])
    return smoke.launch(options, adapters.VLLM, image, True, trial)


def verdict(rungs: tuple[ladder.Rung, ...]) -> tuple[str, str]:
    failed = ladder.failure(rungs)
    return (failed.name, failed.failure) if failed else ("", "passed" if ladder.ok(rungs) else "not climbed")


@pytest.fixture(scope="module")
def try_drafter(
    engine: containers.ContainerEngine, image: str, oracle: Path
) -> Callable[[Path, bool], tuple[ladder.Rung, ...]]:
    """A server of its own with a drafter, or without one at all: its rungs."""

    def climbed(drafter: Path, speculation: bool = True) -> tuple[ladder.Rung, ...]:
        trial = replace(trials.oracle_trial(oracle, 3), drafter=str(drafter))
        start = command(image, trial)
        start = start if speculation else smoke.plain(start)
        run = smoke.run_image(engine, adapters.VLLM, trial, start, TWIN.version, TWIN.version, False)
        print(run.rungs)
        return run.rungs

    return climbed


def test_an_edit_that_finds_nothing_to_change_fails() -> None:
    text = "".join(EDITS)
    assert "_captured" in edited(text)
    with pytest.raises(AssertionError, match="fit EDITS to the release"):
        edited(text.replace("aux_hidden_state = ", "state = "))


@pytest.mark.parametrize("off", [(1, 1, 1), (-1, -1, -1), (0, 1, 0)], ids=["plus-one", "minus-one", "one-swapped"])
def test_wrong_layer_ids_in_the_drafters_config_fail(
    try_drafter: Callable[..., tuple[ladder.Rung, ...]], oracle: Path, off: tuple[int, int, int]
) -> None:
    drafter = Path(shutil.copytree(oracle / "drafter", oracle.parent / f"drafter{sum(off)}"))
    config = json.loads((drafter / "config.json").read_text())
    ids = [layer + by for layer, by in zip(config[IDS], off, strict=True)]
    (drafter / "config.json").write_text(json.dumps(config | {IDS: ids}))
    rungs = try_drafter(drafter)
    assert verdict(rungs) == ("S3", "acceptance-is-one") and rungs[3].numbers["acceptance"] == 1.0


def test_a_server_without_a_drafter_fails(try_drafter: Callable[..., tuple[ladder.Rung, ...]], oracle: Path) -> None:
    assert verdict(try_drafter(oracle / "drafter", speculation=False)) == ("S2", "counters-missing")


def test_a_server_that_dies_while_it_loads_is_noticed_with_its_reason(
    try_drafter: Callable[..., tuple[ladder.Rung, ...]], oracle: Path
) -> None:
    drafter = Path(shutil.copytree(oracle / "drafter", oracle.parent / "weightless"))
    (drafter / "model.safetensors").unlink()
    rungs = try_drafter(drafter)
    assert verdict(rungs) == ("S1", "died") and "weights" in rungs[1].detail


@pytest.fixture(scope="module")
def switched(
    engine: containers.ContainerEngine, image: str, oracle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., tuple[ladder.Rung, ...]]]:
    """One server whose capture of hidden states has the fault that it is told; it climbs anew each time."""
    folder = tmp_path_factory.mktemp("fault")
    (folder / "fault").mkdir()
    inside = f"/opt/venv/lib/python{PINS.python}/site-packages/{CAPTURE}"
    code, text = containers.run(engine, image, ["cat", inside], network_mode="none")
    assert code == 0, text
    (folder / "capture.py").write_text(edited(text))
    for path in (*folder.parents[:2], folder, *folder.iterdir()):
        path.chmod(0o755)
    trial = trials.oracle_trial(oracle, 3)
    start = command(image, trial)
    mounts = {str(folder / "capture.py"): (inside, "ro"), str(folder / "fault"): ("/fault", "ro")}
    with server.contained(engine, replace(start, mounts={**start.mounts, **mounts})) as up:

        def climbed(
            fault: str = "", pinned: str = TWIN.version, deadline: float = trial.deadline
        ) -> tuple[ladder.Rung, ...]:
            (folder / "fault" / "name").write_text(fault)
            (folder / "fault" / "name").chmod(0o644)
            return climb.climb(up, adapters.VLLM, replace(trial, deadline=deadline), pinned, None)

        yield climbed


def test_a_server_that_is_not_healthy_in_time_is_given_up(switched: Callable[..., tuple[ladder.Rung, ...]]) -> None:
    assert verdict(switched(deadline=1.0)) == ("S1", "never-healthy")


@pytest.mark.parametrize("fault", ["residual missing", "hidden missing", "order reversed"])
def test_wrong_hidden_states_fail_where_the_same_server_passes_without_the_fault(
    switched: Callable[..., tuple[ladder.Rung, ...]], fault: str
) -> None:
    rungs = switched(fault)
    assert verdict(rungs) == ("S3", "acceptance-is-one")
    numbers = rungs[3].numbers
    assert numbers["acceptance"] == 1.0 and str(numbers["output"]).startswith("as "), "the output is right throughout"
    assert verdict(switched("")) == ("", "passed")


def test_another_version_than_the_pinned_one_is_refused(switched: Callable[..., tuple[ladder.Rung, ...]]) -> None:
    assert verdict(switched(pinned="0.31.0")) == ("S0", "wrong-version")
