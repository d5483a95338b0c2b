"""The base image: by digest from a real registry, bootstrapped, and every way in which either can't be had."""

import dataclasses
import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.pipeline import base, containers, pins
from scripts.pipeline.say import Stop

PINS = pins.load()
NOWHERE = f"127.0.0.1:1/debian:x@sha256:{'0' * 64}"

pytestmark = pytest.mark.image


def with_image(image: str) -> pins.Pins:
    return dataclasses.replace(PINS, debian=dataclasses.replace(PINS.debian, image=image))


@pytest.fixture
def pushed(engine: containers.ContainerEngine, registry: str, origin: base.Base) -> Iterator[str]:
    """An image in the registry, by digest, and no longer on this machine under that name."""
    tag = f"{registry}/debian:x"
    with containers.client(engine) as api:
        api.images.get(origin.reference).tag(tag)
        last = list(api.images.push(tag, stream=True, decode=True))
        digest = next(line["aux"]["Digest"] for line in last if "aux" in line)
        api.images.remove(tag)
    yield f"{tag}@{digest}"


def test_the_registry_is_preferred_and_gives_the_very_digest(engine: containers.ContainerEngine, pushed: str) -> None:
    got = base.resolve(engine, with_image(pushed))
    assert got == base.Base("registry", pushed, pushed.rpartition(":")[2])
    with containers.client(engine) as api:
        assert pushed.replace(":x@", "@") in api.images.get(pushed).attrs["RepoDigests"]
        api.images.remove(pushed)


def test_a_digest_that_does_not_exist_is_an_error_and_never_replaced(
    engine: containers.ContainerEngine, pushed: str
) -> None:
    wrong = pushed.rpartition(":")[0] + ":" + "0" * 64
    with pytest.raises(Stop, match=r"the registry has no .*debian.image"):
        base.resolve(engine, with_image(wrong))


def test_without_the_registry_the_base_is_bootstrapped_and_says_so(
    engine: containers.ContainerEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    got = base.resolve(engine, with_image(NOWHERE))
    assert got.kind == "bootstrapped" and got.reference.startswith("kimi-k2.5-eagle3-base:")
    assert "can't be reached" in capsys.readouterr().out


def test_the_registry_can_be_forced(engine: containers.ContainerEngine) -> None:
    with pytest.raises(Stop, match=r"can't be reached.*try --base bootstrap"):
        base.resolve(engine, with_image(NOWHERE), "registry")


def test_the_bootstrap_can_be_forced(engine: containers.ContainerEngine, pushed: str) -> None:
    assert base.resolve(engine, with_image(pushed), "bootstrap").kind == "bootstrapped"


def test_what_was_bootstrapped_is_what_the_lock_lists(engine: containers.ContainerEngine, origin: base.Base) -> None:
    base.resolve(engine, PINS, "bootstrap")
    code, status = containers.run(
        engine, base.resolve(engine, PINS, "bootstrap").reference, ["cat", "/var/lib/dpkg/status"]
    )
    assert code == 0
    packages = set(base.installed(status))
    assert len(packages) > 50
    assert packages <= set(base.LOCK.read_text().splitlines())


def test_a_mirror_that_has_moved_on_is_named_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: containers.ContainerEngine
) -> None:
    """The bootstrap itself is replaced by the status that it would have written: only what follows is under test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def bootstrapped(command: list[str], cwd: Path) -> None:
        (cwd / "base.tar").touch()
        (cwd / "status").write_text("Package: libc6\nVersion: 9.9\n")

    monkeypatch.setattr(base, "_run", bootstrapped)
    with pytest.raises(Stop, match=r"moved on from locks/debian.txt \(libc6=9.9\.\.\.\): run `nox -s lock"):
        base.resolve(engine, PINS, "bootstrap")
    assert not list((tmp_path / "kimi-eagle3" / "base").iterdir())


def test_no_mirror_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: containers.ContainerEngine
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("DEBIAN_MIRROR", "http://127.0.0.1:1/debian")
    with pytest.raises(Stop, match=r"mmdebstrap failed: .*is the Debian mirror reachable") as stop:
        base.resolve(engine, PINS, "bootstrap")
    assert "\n" not in str(stop.value)


@pytest.mark.slow
def test_the_bootstrap_gives_the_same_bytes_again(engine: containers.ContainerEngine, tmp_path: Path) -> None:
    first = base.resolve(engine, PINS, "bootstrap")
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents[:2]:
        folder.chmod(0o755)
    subprocess.run(base.recipe(PINS.debian, PINS.source_date_epoch, tmp_path / "base.tar"), check=True)
    assert hashlib.sha256((tmp_path / "base.tar").read_bytes()).hexdigest() == first.sha256
