"""The base image: Debian by digest from its registry, or bootstrapped from the distribution's packages.

Either way the Dockerfile then brings every package to the version in locks/debian.txt, so an image of either kind
holds the same packages. Which of the two it is, stands in the image's labels and in `docker run IMAGE about`.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from scripts.pipeline import containers, pins, say

LOCK = pins.ROOT / "locks" / "debian.txt"
HEADER = "# Written by `nox -s lock` from pins.toml: every Debian package of an image. Do not edit.\n"
CHOICES = ("auto", "registry", "bootstrap")
# What a registry says when it is there, but the image is not.
ABSENT = ("manifest unknown", "not found", "no such manifest", "name unknown", "access denied", "does not exist")


@dataclass(frozen=True)
class Base:
    """A base image on this machine: how it came to be, its reference, and the sha256 that pins its content."""

    kind: str
    reference: str
    sha256: str


def cache() -> Path:
    """The folder of this machine that keeps what is slow to make or to fetch."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kimi-eagle3"


def recipe(debian: pins.Debian, epoch: int, out: Path, include: tuple[str, ...] = ()) -> list[str]:
    """The command that bootstraps `out`, a tar of the minimal system.

    The bytes depend on the packages alone: times are clamped to `epoch`, and the files that would be copied from the
    build machine are emptied (they must exist, since container engines mount over them).
    """
    mirror = os.environ.get("DEBIAN_MIRROR", "")
    sources = []
    if mirror:
        security = os.environ.get("DEBIAN_SECURITY_MIRROR", f"{mirror}-security")
        sources = [
            f"deb {mirror} {debian.suite} main",
            f"deb {mirror} {debian.suite}-updates main",
            f"deb {security} {debian.suite}-security main",
        ]
    empty = "for f in hostname resolv.conf hosts; do : > $1/etc/$f; done"
    return [
        *("env", f"SOURCE_DATE_EPOCH={epoch}", "mmdebstrap", "--variant=minbase"),
        *([f"--include={','.join(include)}"] if include else []),
        f"--customize-hook={empty}",
        *("--customize-hook=copy-out /var/lib/dpkg/status " + str(out.parent),),
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


def _run(command: list[str], cwd: Path) -> None:
    if shutil.which("mmdebstrap") is None:
        raise say.Stop("mmdebstrap, which bootstraps the base, is not on the PATH: run `nox -s setup`")
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("E:")] or done.stderr.splitlines()[-1:]
        raise say.Stop(f"mmdebstrap failed: {' '.join(errors)[:400]}; is the Debian mirror reachable (DEBIAN_MIRROR)?")


def lock(all_pins: pins.Pins) -> None:
    """Write locks/debian.txt: what the pinned suite gives today for the minimal system and the pinned packages."""
    with tempfile.TemporaryDirectory() as tmp:
        os.chmod(tmp, 0o755)
        out = Path(tmp, "base.tar")
        _run(recipe(all_pins.debian, all_pins.source_date_epoch, out, all_pins.debian.packages), Path(tmp))
        packages = installed(Path(tmp, "status").read_text())
    LOCK.write_text(HEADER + "\n".join(packages) + "\n")
    say.note(f"locks/{LOCK.name}: {len(packages)} packages")


def _bootstrap(all_pins: pins.Pins, locked: set[str]) -> Path:
    """The tarball of the minimal system: from the cache, or made now. Raises Stop if it isn't what the lock says."""
    what = repr(recipe(all_pins.debian, all_pins.source_date_epoch, Path("base.tar"))) + "\n".join(sorted(locked))
    tarball = cache() / "base" / f"{hashlib.sha256(what.encode()).hexdigest()[:16]}.tar"
    if tarball.is_file():
        say.note(f"bootstrapped before: {tarball}")
        return tarball
    tarball.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tarball.parent) as tmp, say.timed("bootstrap the base (about a minute)"):
        os.chmod(tmp, 0o755)
        out = Path(tmp, "base.tar")
        _run(recipe(all_pins.debian, all_pins.source_date_epoch, out), Path(tmp))
        moved = sorted(set(installed(Path(tmp, "status").read_text())) - locked)
        if moved:
            raise say.Stop(
                f"the Debian mirror has moved on from locks/debian.txt ({', '.join(moved[:3])}...): "
                f"run `nox -s lock -- debian`, or set DEBIAN_MIRROR to an archive of {all_pins.debian.snapshot}"
            )
        out.replace(tarball)
    return tarball


def _import(engine: containers.ContainerEngine, all_pins: pins.Pins, tarball: Path) -> Base:
    digest = hashlib.sha256(tarball.read_bytes()).hexdigest()
    reference = f"{all_pins.image_name}-base:{digest[:16]}"
    if containers.image_id(engine, reference) is None:
        with tempfile.TemporaryDirectory(dir=tarball.parent) as tmp:
            os.link(tarball, Path(tmp, "base.tar"))
            Path(tmp, "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
            containers.build(
                engine,
                dockerfile=Path(tmp, "Dockerfile"),
                context=Path(tmp),
                tag=reference,
                args={"SOURCE_DATE_EPOCH": str(all_pins.source_date_epoch)},
            )
    return Base("bootstrapped", reference, digest)


def _pull(engine: containers.ContainerEngine, image: str) -> Base | str:
    """The image by digest, or, where its registry can't be reached, why. Raises Stop where it has no such digest."""
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
    locked = set(LOCK.read_text().splitlines()) if LOCK.is_file() else set()
    if not locked:
        raise say.Stop("locks/debian.txt is missing: run `nox -s lock -- debian`")
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
