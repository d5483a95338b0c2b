"""The base image: Debian by digest from its registry, or bootstrapped from the distribution's packages.

Either way the Dockerfile then brings every package to the version in locks/debian.txt, so an image of either kind
holds the same packages. Which of the two it is, stands in the image's labels and in `docker run IMAGE about`.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.pipeline import containers, files, image_build, lockfile, network, pins, say

LOCK = pins.ROOT / "locks" / "debian.txt"
ROOM = 10**9  # bytes that bootstrapping needs
CLEANUP_S = 60  # seconds that mmdebstrap may take to take down what it mounted
CHOICES = ("auto", "registry", "bootstrap")
# What a registry says when it is there, but the image is not.
ABSENT = (
    "manifest unknown",
    "not found",
    "no such manifest",
    "name unknown",
    "access denied",
    "does not exist",
    "invalid reference format",
)


@dataclass(frozen=True)
class Base:
    """A base image on this machine: how it came to be, its reference, and the sha256 that pins its content."""

    kind: str
    reference: str
    sha256: str


def recipe(debian: pins.Debian, epoch: int, out: Path, include: tuple[str, ...] = ()) -> list[str]:
    """The command that bootstraps `out`, a tar of the minimal system.

    The bytes depend on the packages alone: times are clamped to `epoch`, and the files that would be copied from the
    build machine are emptied (they must exist, since container engines mount over them).
    """
    chosen, sources = network.debian(), []
    if chosen:
        main, security = chosen
        sources = [
            f"deb {main} {debian.suite} main",
            f"deb {main} {debian.suite}-updates main",
            f"deb {security} {debian.suite}-security main",
        ]
    empty = "for f in hostname resolv.conf hosts; do : > $1/etc/$f; done; rm -f $1/etc/apt/apt.conf.d/99mmdebstrap"
    if chosen:
        empty += "; : > $1/etc/apt/sources.list"  # a mirror's address is the build machine's own matter
    return [
        *("env", f"SOURCE_DATE_EPOCH={epoch}", "mmdebstrap", "--variant=minbase"),
        # An archive's lists are past their time by design; what they list is held against the lock.
        '--aptopt=Acquire::Check-Valid-Until "false"',
        *([f"--include={','.join(include)}"] if include else []),
        f"--customize-hook={empty}",
        # _apt owns these only where it could reach the folder that this is made in.
        '--customize-hook=chroot "$1" chown _apt:root /var/cache/apt/archives/partial /var/lib/apt/lists/partial',
        f"--customize-hook=copy-out /var/lib/dpkg/status {out.parent}",
        *(debian.suite, str(out), *sources),
    ]


def installed(status: str) -> list[str]:
    """`name=version`, sorted, of each package in a dpkg status file."""
    fields = [
        dict(line.split(": ", 1) for line in block.splitlines() if line.startswith(("Package: ", "Version: ")))
        for block in status.split("\n\n")
        if block.strip()
    ]
    return sorted(f"{field['Package']}={field['Version']}" for field in fields)


@contextmanager
def _workshop() -> Iterator[Path]:
    """A folder to bootstrap in. Package management drops privileges, so it must be open to all down from the root."""
    with tempfile.TemporaryDirectory(prefix="kimi-eagle3-base-") as tmp:
        Path(tmp).chmod(0o755)
        if (free := shutil.disk_usage(tmp).free) < ROOM:
            raise say.Stop(f"{tmp} has {free / 1e9:.1f} GB free, bootstrapping needs {ROOM / 1e9:.0f}: set TMPDIR")
        yield Path(tmp)


def _run(command: list[str], folder: Path) -> None:
    """Run mmdebstrap in `folder`. It is in a group of its own, and gets the time to take down what it mounted."""
    if shutil.which("mmdebstrap") is None:
        raise say.Stop("mmdebstrap, which bootstraps the base, is not on the PATH: run `nox -s setup`")
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=folder,
        env=os.environ | {"TMPDIR": str(folder)}, process_group=0,
    )  # fmt: skip
    try:
        _, said = child.communicate()
    except BaseException:
        os.killpg(child.pid, signal.SIGINT)
        child.communicate(timeout=CLEANUP_S)
        raise
    if child.returncode:
        errors = [line for line in said.splitlines() if line.startswith("E:")] or said.splitlines()[-1:]
        raise say.Stop(f"mmdebstrap failed: {' '.join(errors)[:400]}; is the Debian mirror reachable (DEBIAN_MIRROR)?")


def lock(all_pins: pins.Pins) -> None:
    """Write locks/debian.txt: what the pinned suite gives today for the minimal system and the pinned packages."""
    with _workshop() as tmp:
        _run(recipe(all_pins.debian, all_pins.source_date_epoch, tmp / "base.tar", all_pins.debian.packages), tmp)
        packages = installed((tmp / "status").read_text())
    lockfile.write(LOCK, "\n".join(packages))


def _bootstrap(all_pins: pins.Pins, locked: set[str]) -> Path:
    """The tarball of the minimal system: from the cache, or made now. Raises Stop if it isn't what the lock says."""
    what = repr(recipe(all_pins.debian, all_pins.source_date_epoch, Path("base.tar"))) + "\n".join(sorted(locked))
    tarball = files.cache() / "base" / f"{hashlib.sha256(what.encode()).hexdigest()[:16]}.tar"
    record = tarball.with_suffix(".sha256")
    if tarball.is_file() and record.is_file():
        if record.read_text() == files.sha256(tarball):
            say.note(f"bootstrapped before: {tarball}")
            return tarball
        say.note(f"{tarball} is not what was bootstrapped; making it anew")
    tarball.parent.mkdir(parents=True, exist_ok=True)
    with _workshop() as tmp, say.timed("bootstrap the base (about a minute)"):
        _run(recipe(all_pins.debian, all_pins.source_date_epoch, tmp / "base.tar"), tmp)
        moved = sorted(set(installed((tmp / "status").read_text())) - locked)
        if moved:
            raise say.Stop(
                f"the Debian mirror has moved on from locks/debian.txt ({', '.join(moved[:3])}...): "
                f"run `nox -s lock -- debian`, or set DEBIAN_MIRROR to an archive of {all_pins.debian.snapshot}"
            )
        new = tarball.with_suffix(".new")
        shutil.copyfile(tmp / "base.tar", new)
        new.replace(tarball)
        record.write_text(files.sha256(tarball))
    return tarball


def keep(all_pins: pins.Pins, folder: Path) -> None:
    """Copy the tarball of the minimal system into `folder` as SHA256.tar, whole or not at all, and only that one."""
    locked = {f"{name}={version}" for name, version in lockfile.packages(LOCK).items()}
    tarball = _bootstrap(all_pins, locked)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{files.sha256(tarball)}.tar"
    new = target.with_suffix(".new")
    shutil.copyfile(tarball, new)
    new.replace(target)
    for other in set(folder.iterdir()) - {target}:
        other.unlink()


def from_tarball(engine: containers.ContainerEngine, all_pins: pins.Pins, tarball: Path) -> Base:
    """The base from a tarball that `keep` left, without any network. Its folder may be one that can't be written."""
    parent = files.cache() / "base"
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as tmp:
        return _import(engine, all_pins, Path(shutil.copyfile(tarball, Path(tmp, tarball.name))))


def _import(engine: containers.ContainerEngine, all_pins: pins.Pins, tarball: Path) -> Base:
    digest = files.sha256(tarball)
    reference = f"{all_pins.image_name}-base:{digest[:16]}"
    if not containers.at_hand(engine, reference):
        with tempfile.TemporaryDirectory(dir=tarball.parent) as tmp:
            os.link(tarball, Path(tmp, "base.tar"))
            Path(tmp, "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
            image_build.build(
                engine,
                dockerfile=Path(tmp, "Dockerfile"),
                context=Path(tmp),
                tag=reference,
                args={"SOURCE_DATE_EPOCH": str(all_pins.source_date_epoch)},
            )
    return Base("bootstrapped", reference, digest)


def _pull(engine: containers.ContainerEngine, image: str) -> Base | str:
    """The image by digest, or, where its registry can't be reached, why. Raises Stop where it has no such digest.

    One that is on this machine already is not asked for again: a digest doesn't change.
    """
    if containers.image_id(engine, image):
        return Base("registry", image, image.rpartition("sha256:")[2])
    done = subprocess.run([str(engine.client), "pull", "--quiet", image], capture_output=True, text=True)
    if done.returncode == 0:
        return Base("registry", image, image.rpartition("sha256:")[2])
    why = " ".join(done.stderr.split())
    if any(word in why.lower() for word in ABSENT) and "no such host" not in why.lower():
        raise say.Stop(f"the registry has no {image} (pins.toml, debian.image): {why[-200:]}")
    return why[-200:]


def resolve(engine: containers.ContainerEngine, all_pins: pins.Pins, choice: str = "auto") -> Base:
    """The base image, by `choice` of CHOICES; `auto` bootstraps only where the registry can't be reached.

    Raises Stop when the choice can't be had.
    """
    locked = {f"{name}={version}" for name, version in lockfile.packages(LOCK).items()}
    if choice != "bootstrap":
        say.step(f"base: {all_pins.debian.image}")
        base = _pull(engine, all_pins.debian.image)
        if isinstance(base, Base):
            return base
        if choice == "registry":
            raise say.Stop(f"the base's registry can't be reached: {base}; try --base bootstrap")
        say.note(f"its registry can't be reached ({base}); bootstrapping instead")
    base = _import(engine, all_pins, _bootstrap(all_pins, locked))
    say.note(f"base: {base.reference}, bootstrapped")
    return base
