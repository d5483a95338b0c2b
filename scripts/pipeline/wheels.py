"""The pristine wheel of a release, by the hash in its lock: fetched once, verified at each use, read in place.

Wheels are kept in $XDG_CACHE_HOME (or ~/.cache) under kimi-eagle3/wheels/SHA256/.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from scripts.pipeline import files, network, pins, say
from scripts.pipeline.say import Stop


@dataclass(frozen=True)
class Wheel:
    """A verified wheel. Paths in it are relative to site-packages."""

    path: Path
    sha256: str

    def read(self, path: str) -> bytes | None:
        """The content of one file, or None if the wheel has no such file."""
        with zipfile.ZipFile(self.path) as archive:
            try:
                return archive.read(path)
            except KeyError:
                return None

    def extract(self, paths: Iterable[str], into: Path) -> None:
        """Write the files of `paths` that the wheel has under the folder `into`."""
        with zipfile.ZipFile(self.path) as archive:
            for path in set(paths) & set(archive.namelist()):
                target = into / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(path))


def cache() -> Path:
    """The folder that keeps wheels between runs."""
    return files.cache() / "wheels"


def locked(lock: str, package: str, version: str) -> tuple[str, ...]:
    """The sha256 hashes of a package in the text of a lock: one for each platform; none if it isn't there."""
    requirement = re.escape(f"{package}=={version}")
    match = re.search(rf"^{requirement}((?: *\\\n +--hash=sha256:[0-9a-f]{{64}})+)", lock, re.MULTILINE)
    return tuple(re.findall(r"sha256:([0-9a-f]{64})", match[1])) if match else ()


def platforms(platform: str) -> tuple[str, ...]:
    """The wheel platform tags that suit a pinned platform such as x86_64-manylinux_2_36, the newest first."""
    match = re.fullmatch(r"(\w+?)-manylinux_2_(\d+)", platform)
    if not match:
        raise Stop(f"pins.toml: python.platform {platform!r}: write ARCHITECTURE-manylinux_2_MINOR")
    newer = (f"manylinux_2_{minor}_{match[1]}" for minor in range(int(match[2]), 16, -1))
    return (*newer, f"manylinux2014_{match[1]}", "any")


def suits(name: str, platform: str) -> bool:
    """Whether a wheel's file name is for the pinned platform."""
    try:
        return any(tag.platform in platforms(platform) for tag in parse_wheel_filename(name)[3])
    except InvalidWheelFilename:
        return False


def pip() -> list[str]:
    """The command for pip, of this Python or else on the PATH. Raises Stop where there is none."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    if found := shutil.which("pip3") or shutil.which("pip"):
        return [found]
    raise Stop("pip is needed to fetch a wheel and isn't there: run this through nox, which installs it")


def download(release: pins.Release, hashes: tuple[str, ...], all_pins: pins.Pins) -> Wheel:
    """Fetch the wheel of a release into the cache; it appears there whole or not at all. Raises Stop."""
    wanted = f"{release.package}=={release.version}"
    cache().mkdir(parents=True, exist_ok=True)
    with (
        say.timed(f"downloading the wheel of {wanted} (once; kept in {cache()})"),
        tempfile.TemporaryDirectory(prefix=".download-", dir=cache()) as tmp,
    ):
        requirement = Path(tmp, "requirements.txt")
        requirement.write_text(wanted + "".join(f" --hash=sha256:{h}" for h in hashes) + "\n")
        command = [*pip(), "download", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-cache-dir"]
        command += ["--python-version", all_pins.python, "--requirement", str(requirement), "--dest", tmp]
        command += [arg for tag in platforms(all_pins.platform)[:-1] for arg in ("--platform", tag)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=os.environ | network.index())
        found = list(Path(tmp).glob("*.whl"))
        if done.returncode or len(found) != 1:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR") or "No space left" in line]
            why = "the disk is full" if "No space left" in " ".join(said) else " ".join(said)[:400]
            raise Stop(
                f"the wheel of {wanted} can't be fetched: {why or 'pip found none'}: check the network and "
                f"locks/{release.lock.name}, then run it again"
            )
        sha256 = files.sha256(found[0])
        if sha256 not in hashes:
            raise Stop(f"{found[0].name} has sha256 {sha256}, not in locks/{release.lock.name}: run it again")
        target = cache() / sha256 / found[0].name
        target.parent.mkdir(exist_ok=True)
        os.replace(found[0], target)
        return Wheel(target, sha256)


def pristine(release: pins.Release, all_pins: pins.Pins) -> Wheel:
    """The wheel of a release by its lock, from the cache or else fetched.

    A cached wheel that has changed is named and fetched again. Raises Stop.
    """
    try:
        lock = release.lock.read_text()
    except OSError:
        raise Stop(f"locks/{release.lock.name}: is missing, and the wheel's hash is there: run `nox -s lock`") from None
    hashes = locked(lock, release.package, release.version)
    if not hashes:
        wanted = f"{release.package}=={release.version}"
        raise Stop(f"locks/{release.lock.name}: has no hash for {wanted}: run `nox -s lock`")
    return fetched(release, hashes, all_pins)


def fetched(release: pins.Release, hashes: tuple[str, ...], all_pins: pins.Pins) -> Wheel:
    """The wheel of a release by one of these hashes, from the cache or else downloaded. As `pristine`."""
    for sha256 in hashes:
        for path in sorted((cache() / sha256).glob("*.whl")):
            if not suits(path.name, all_pins.platform):
                continue
            if files.sha256(path) == sha256:
                return Wheel(path, sha256)
            say.note(f"{path}: isn't the wheel that its folder names (changed or cut off); fetching it again")
            path.unlink()
    return download(release, hashes, all_pins)
