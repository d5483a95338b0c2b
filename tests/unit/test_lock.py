"""Locks: what `uv` resolves for the image, and how a stack and an engine share it. Uses the real package index."""

import re
from pathlib import Path

import pytest

from scripts.pipeline import lock, lockfile, pins
from scripts.pipeline.say import Stop

PINS = pins.load()


def test_every_wheel_of_every_lock_has_a_hash_and_none_is_in_two_layers() -> None:
    for release in PINS.releases:
        stack, own = lockfile.packages(release.torch.lock), lockfile.packages(release.lock)
        assert stack["torch"] == release.torch.version and own[release.package] == release.version
        assert not set(stack) & set(own)
    for path in (pins.ROOT / "locks").glob("*.txt"):
        if path.name != "debian.txt":
            entries = re.split(r"^(?=\S+==)", path.read_text(), flags=re.MULTILINE)[1:]
            assert entries and all("--hash=sha256:" in entry for entry in entries), path.name


def test_every_lock_says_which_session_wrote_it() -> None:
    assert all("nox -s lock" in path.read_text().splitlines()[0] for path in (pins.ROOT / "locks").glob("*.txt"))


def test_an_engine_is_locked_on_top_of_a_stack_and_without_it(tmp_path: Path) -> None:
    stack = tmp_path / "stack.txt"
    lock.compile_lock(PINS, ["markupsafe==3.0.2"], stack)
    lock.compile_lock(PINS, ["jinja2==3.1.6"], tmp_path / "engine.txt", on=stack)
    assert lockfile.packages(tmp_path / "engine.txt") == {"jinja2": "3.1.6"}


def test_a_stack_that_an_engine_cannot_use_is_refused_and_leaves_the_old_lock(tmp_path: Path) -> None:
    stack, engine = tmp_path / "stack.txt", tmp_path / "engine.txt"
    lock.compile_lock(PINS, ["typing-extensions==4.0.0"], stack)
    engine.write_text("old")
    with pytest.raises(Stop, match=r"locks/engine.txt can't be resolved"):
        lock.compile_lock(PINS, ["pydantic==2.12.0"], engine, on=stack)
    assert engine.read_text() == "old"


def test_a_twin_is_locked_to_one_wheel(tmp_path: Path) -> None:
    lock.compile_lock(PINS, ["jinja2==3.1.6"], tmp_path / "twin.txt", alone=True)
    assert lockfile.packages(tmp_path / "twin.txt") == {"jinja2": "3.1.6"}
    for release in PINS.releases:
        if release.variant == "cpu":
            assert lockfile.packages(release.lock) == {release.package: release.version}


def test_source_packages_are_never_locked(tmp_path: Path) -> None:
    with pytest.raises(Stop, match=r"can't be resolved"):
        lock.compile_lock(PINS, ["docopt==0.6.2"], tmp_path / "lock.txt")
