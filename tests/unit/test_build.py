"""What is decided before the builder starts: locks, the context, the steps, the secrets."""

import dataclasses
import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.pipeline import attest, base, build, files, network, pins, series
from scripts.pipeline.say import Stop

PINS = pins.load()
RELEASE = PINS.release("vllm", "0.16.0")
ORIGIN = base.Base("bootstrapped", "base:1", "0" * 64)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_locks_of_every_release_are_those_that_pins_names() -> None:
    for release in PINS.releases:
        build.check_locks(PINS, release)


def test_a_lock_of_another_version_is_refused_before_anything_is_built() -> None:
    with pytest.raises(
        Stop, match=r"locks/vllm-0.16.0.txt has vllm 0.16.0, pins.toml wants vllm==0.16.1: run `nox -s lock`"
    ):

        class Moved(pins.Release):
            lock = RELEASE.lock

        build.check_locks(PINS, Moved(**{**vars(RELEASE), "version": "0.16.1"}))


def test_a_missing_lock_is_refused_by_name() -> None:
    with pytest.raises(Stop, match=r"vllm-0.0.1.txt is missing in locks/: run `nox -s lock`"):
        build.check_locks(PINS, dataclasses.replace(RELEASE, version="0.0.1"))


def test_a_series_that_is_not_whole_is_refused_by_the_name_of_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "series"
    shutil.copytree(RELEASE.series, folder)
    (folder / "stray.patch").write_text("")

    class Elsewhere(pins.Release):
        series = folder

    with pytest.raises(Stop, match=r"stray.patch"):
        build.check_series(Elsewhere(**vars(RELEASE)))


def test_the_context_holds_this_release_alone_under_fixed_names(tmp_path: Path) -> None:
    context = build.prepare_context(PINS, RELEASE, ORIGIN, tmp_path)
    assert sorted(p.name for p in context.iterdir()) == [
        "base.json",
        "in_image",
        "layers",
        "locks",
        "release.json",
        "series",
    ]
    assert sorted(p.name for p in (context / "locks").iterdir()) == [
        "debian.txt",
        "engine.txt",
        "tools.txt",
        "torch.txt",
    ]
    assert (context / "locks/engine.txt").read_bytes() == RELEASE.lock.read_bytes()
    assert json.loads((context / "release.json").read_text())["version"] == "0.16.0"
    assert json.loads((context / "base.json").read_text())["kind"] == "bootstrapped"
    assert not list(context.rglob("__pycache__"))


def test_nothing_of_an_earlier_context_stays(tmp_path: Path) -> None:
    context = build.prepare_context(PINS, RELEASE, ORIGIN, tmp_path)
    (context / "series" / "left-over.patch").touch()
    assert not (build.prepare_context(PINS, RELEASE, ORIGIN, tmp_path) / "series" / "left-over.patch").exists()


def test_the_engine_is_built_with_the_network_and_the_rest_without_it_and_without_secrets(tmp_path: Path) -> None:
    steps = first, between, last = build.steps(PINS, RELEASE, ORIGIN, tmp_path)
    assert [(step.target, step.network) for step in steps] == [
        ("engine", "default"), ("verified", "none"), ("image", "none"),
    ]  # fmt: skip
    assert between.args["ENGINE_IMAGE"] == first.tag and last.args["VERIFIED_IMAGE"] == between.tag
    assert last.tag == "kimi-k2.5-eagle3-vllm:0.16.0" and len({step.tag for step in steps}) == 3
    given = {"ca": Path("ca")}
    secrets = [build.what(Path(), step, given, False)["secrets"] for step in steps]
    assert secrets == [given, {}, {}]


@pytest.mark.parametrize("release", PINS.releases, ids=lambda release: release.name)
def test_only_the_last_step_is_an_engines_own(release: pins.Release, tmp_path: Path) -> None:
    files = [step.dockerfile for step in build.steps(PINS, release, ORIGIN, tmp_path)]
    assert files == ["Dockerfile.stack", "Dockerfile.stack", f"Dockerfile.{release.engine}"]
    stages = (pins.ROOT / files[2]).read_text()
    assert "RUN" not in stages and "\nFROM ${VERIFIED_IMAGE} AS image\n" in stages
    assert f"\nEXPOSE {release.serve.port}\n" in stages


@pytest.mark.parametrize("release", PINS.releases, ids=lambda release: release.name)
def test_the_labels_name_every_dockerfile_that_the_image_is_built_with(release: pins.Release, tmp_path: Path) -> None:
    steps = build.steps(PINS, release, ORIGIN, tmp_path)
    built_with = {files.sha256(pins.ROOT / step.dockerfile) for step in steps}
    assert built_with == {steps[-1].labels[name] for name in attest.dockerfiles(release)}
    assert set(attest.dockerfiles(release)) < set(attest.INPUTS) <= steps[-1].labels.keys()


def test_the_series_label_is_the_hash_that_the_image_records(tmp_path: Path) -> None:
    listing = subprocess.run(
        ["sha256sum", "series", *series.entries((RELEASE.series / "series").read_bytes()), "tree"],
        cwd=RELEASE.series,
        capture_output=True,
        check=True,
    )
    label = build.steps(PINS, RELEASE, ORIGIN, tmp_path)[-1].labels["kimi-eagle3.series"]
    assert label == hashlib.sha256(listing.stdout).hexdigest()


def test_mirrors_and_proxies_go_through_a_secret_and_survive_the_shell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in (*network.PROXIES, *network.INDEXES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:pa'ss@mirror.example/simple")
    with network.secrets() as given:
        text = given["network"].read_text()
    assert not given["network"].exists()
    assert "export UV_DEFAULT_INDEX=" in text and "'\"'\"'" in text
    assert "mirror.example" not in str(build.steps(PINS, RELEASE, ORIGIN, tmp_path))
