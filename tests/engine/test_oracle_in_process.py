"""The oracle in a real engine's own Python, in one process: exact where the series is right, and named where it isn't.

Whoever changes a series sees here what its drafter would be handed, without a GPU.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_help as vllm
import pytest
import sglang_faults as sglang
from engine_help import SCRIPTS, SGLANG, VERSIONS, Engine

PAIRS = {
    "llama": (),
    "llama-other-ids": ("--ids", "3", "5", "7"),
    "mla": ("--drafter", "mla"),
    "llama-partial": ("--partial-vocabulary",),
    "mla-partial": ("--drafter", "mla", "--partial-vocabulary", "--layers", "12"),
}
IDS = "eagle_aux_hidden_state_layer_ids"
# The release, the file and the change of each wrong capture. 0.5.23 copies a state at once, so none is a reference.
FAULTS = [
    *((v, vllm.MODEL, f) for v in VERSIONS for f in (vllm.after_the_layer, vllm.without_residual, vllm.by_reference)),
    *(("0.5.9", sglang.MODEL, f) for f in (sglang.next_layer, sglang.without_residual, sglang.by_reference)),
    ("0.5.23", sglang.MODEL, sglang.next_layer),
    ("0.5.23", sglang.BOUNDARY, sglang.behind_the_norm),
]
COUNTS = ("drafts", "draft_tokens", "accepted", "accepted_per_position", "acceptance_length")

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each pair of PAIRS, written once."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("oracle")
    for name, arguments in PAIRS.items():
        subprocess.run([sys.executable, SCRIPTS / "oracle.py", folder / name, *arguments], check=True)
    return {name: folder / name for name in PAIRS}


@pytest.fixture(scope="module", params=[*VERSIONS, *SGLANG])
def patched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A release with its series, for tests that leave it as it is."""
    engine = Engine(request.param, tmp_path_factory.mktemp("patched"))
    engine.apply()
    return engine


def run(engine: Engine, pair: Path, *arguments: str) -> dict[str, Any]:
    """What the script prints; a failure has its name in one line on standard error too."""
    done = engine.run("oracle_in_process.py", pair, *arguments)
    found = json.loads(done.stdout)
    failure = found["failure"]
    said = done.stderr.splitlines()
    assert said == ([f"{failure['name']}: {failure['detail']}"] if failure else [])
    return dict(found)


def name_layers(config: dict[str, Any], ids: list[int] | None) -> None:
    """Set or drop the layer ids in a drafter's config, where vLLM reads them and where SGLang does."""
    for place in (config, config["eagle_config"]):
        place.update({IDS: ids}) if ids else place.pop(IDS)


def copy(pair: Path, folder: Path, file: str, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A pair with one JSON file changed."""
    shutil.copytree(pair, folder / "pair")
    path = folder / "pair" / file
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return folder / "pair"


@pytest.mark.parametrize("name", PAIRS)
def test_the_counts_are_exactly_those_predicted(name: str, patched: Engine, pairs: dict[str, Path]) -> None:
    found = run(patched, pairs[name])
    oracle = json.loads((pairs[name] / "oracle.json").read_text())
    assert found["ok"] and found["layers"] == oracle["oracle"]["ids"]
    assert found["models"][0] == "KimiK25ForConditionalGeneration" and "Eagle3" in found["models"][1]
    for counts, k in zip(found["runs"], (1, 3, 5), strict=True):
        assert counts == {"k": k} | {count: oracle["k"][str(k)][count] for count in COUNTS}
        assert (counts["acceptance_length"] == k + 1) != ("partial" in name)


@pytest.mark.parametrize("less", [0, 1])
def test_layers_named_in_eagle_config_are_honoured(less: int, patched: Engine, tmp_path: Path) -> None:
    """As inputs of layers, and as outputs: numbers that are one less, and begin with 1. Not the default ones."""
    pytest.importorskip("torch")
    name, ids, pair = "eagle_aux_hidden_state_layer_ids", [2, 5, 7], tmp_path / "pair"
    command = [sys.executable, SCRIPTS / "oracle.py", pair, "--ids", *map(str, ids)]
    subprocess.run(command, check=True)
    file = pair / "drafter/config.json"
    config = json.loads(file.read_text())
    assert config.pop(name) == ids
    file.write_text(json.dumps(config | {"eagle_config": {name: [i - less for i in ids]}}))
    found = run(patched, pair, "--k", "3")
    assert found["ok"] and found["layers"] == ids


def test_a_drafter_that_names_no_layers_gets_the_default_ones(
    patched: Engine, pairs: dict[str, Path], tmp_path: Path
) -> None:
    pair = copy(pairs["llama"], tmp_path, "drafter/config.json", lambda c: name_layers(c, None))
    found = run(patched, pair, "--k", "3")
    assert found["layers"] == [2, 4, 6] and found["runs"][0]["acceptance_length"] == 4.0


@pytest.mark.parametrize("by", [-1, 1])
def test_layer_ids_moved_by_one_are_seen(by: int, patched: Engine, pairs: dict[str, Path], tmp_path: Path) -> None:
    wrong = [i + by for i in (3, 5, 7)]
    pair = copy(pairs["llama-other-ids"], tmp_path, "drafter/config.json", lambda c: name_layers(c, wrong))
    found = run(patched, pair, "--k", "3")
    assert found["failure"]["name"] == "acceptance-is-one" and found["layers"] == wrong


@pytest.mark.parametrize("version", SGLANG)
def test_ids_of_outputs_mean_the_same_layers_in_sglang(version: str, pairs: dict[str, Path], tmp_path: Path) -> None:
    engine = Engine(version, tmp_path)
    engine.apply()
    pair = copy(pairs["llama"], tmp_path, "drafter/config.json", lambda c: name_layers(c, [1, 3, 5]))
    found = run(engine, pair, "--k", "3")
    assert found["ok"] and found["layers"] == [2, 4, 6]


@pytest.mark.parametrize(("version", "file", "fault"), FAULTS)
def test_a_wrong_capture_ends_at_an_acceptance_length_of_one(
    version: str, file: str, fault: Callable[[str], str], pairs: dict[str, Path], tmp_path: Path
) -> None:
    engine = Engine(version, tmp_path)
    engine.apply()
    engine.edit(file, fault)
    found = run(engine, pairs["llama"], "--k", "3")
    assert found["failure"]["name"] == "acceptance-is-one" and not found["ok"]
    (counts,) = found["runs"]
    assert counts["acceptance_length"] == 1.0 and counts["draft_tokens"] == 3 * 96


@pytest.mark.parametrize(("version", "lacks"), [("0.16.0", ""), ("0.5.9", "set_eagle3_layers_to_capture")])
def test_an_engine_without_its_series_does_not_get_by(
    version: str, lacks: str, pairs: dict[str, Path], tmp_path: Path
) -> None:
    found = run(Engine(version, tmp_path), pairs["llama"])
    assert found["failure"]["name"] == "does-not-load" and found["runs"] == []
    assert lacks in found["failure"]["detail"]


def test_draft_steps_at_wrong_positions_are_seen(pairs: dict[str, Path], tmp_path: Path) -> None:
    engine = Engine("0.5.9", tmp_path)
    engine.apply(without="0009")
    found = run(engine, pairs["llama"], "--k", "3")
    assert found["failure"]["name"] == "acceptance-differs"
    assert found["runs"][0]["accepted_per_position"] == [48, 0, 0]


def wrong_count(oracle: dict[str, Any]) -> None:
    oracle["k"]["1"]["accepted"] -= 1


def wrong_token(oracle: dict[str, Any]) -> None:
    oracle["output"][7] += 1


def no_round(oracle: dict[str, Any]) -> None:
    oracle["k"]["1"]["max_tokens"] = 1


@pytest.mark.parametrize("version", ["0.16.0", "0.5.9"])
@pytest.mark.parametrize(
    ("change", "name"),
    [(wrong_count, "acceptance-differs"), (wrong_token, "output-differs"), (no_round, "nothing-measured")],
)
def test_each_difference_has_its_name(
    change: Callable[[dict[str, Any]], None], name: str, version: str, pairs: dict[str, Path], tmp_path: Path
) -> None:
    engine = Engine(version, tmp_path)
    engine.apply()
    found = run(engine, copy(pairs["llama"], tmp_path, "oracle.json", change), "--k", "1")
    assert found["failure"]["name"] == name


def test_another_version_than_the_pinned_one_is_not_measured(pairs: dict[str, Path], tmp_path: Path) -> None:
    engine = Engine("0.16.0", tmp_path)
    engine.release["version"] = "0.16.1"
    found = run(engine, pairs["llama"])
    assert found["failure"] == {"name": "wrong-version", "detail": "vllm 0.16.0 is installed, 0.16.1 is pinned"}


@pytest.mark.parametrize(
    ("arguments", "problem"), [(("--k", "99"), "predicts nothing for K = 99"), ((), "no-such-oracle/oracle.json")]
)
def test_an_oracle_that_cannot_be_used_is_one_line(
    arguments: tuple[str, ...], problem: str, pairs: dict[str, Path], tmp_path: Path
) -> None:
    release = tmp_path / "release.json"
    release.write_text('{"engine": "vllm", "version": "0.16.0"}')
    pair = pairs["llama"] if arguments else tmp_path / "no-such-oracle"
    command = [sys.executable, SCRIPTS / "oracle_in_process.py", pair, "--release", release, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and problem in done.stderr
    assert done.stdout == ""
