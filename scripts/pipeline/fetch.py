"""Fill a folder with all that a build needs: wheels and Debian packages by hash, and the base. Then no network is.

    nox -s fetch -- DIR [RELEASE...]
    nox -s build-vllm -- --offline DIR

A stopped fetch goes on where it was when it runs again; a file has its name only once its hash was right. The folder is
a package index (simple/), a Debian mirror (debian/) and the base (base/): any web server can serve it to others.
"""

import argparse
import json
import os
import shutil
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from html import escape
from http.client import HTTPException
from pathlib import Path

from packaging.utils import canonicalize_name

from scripts.pipeline import base, containers, docker_or_podman, files, network, offline, pins, say, wheels
from scripts.pipeline.say import Stop

PIECE = 2**20  # bytes read at a time
SAY_S = 10.0  # seconds between two lines on one file
TIMEOUT_S = 60.0  # without a byte


def report_command(lock: Path, all_pins: pins.Pins, target: Path, report: Path) -> list[str]:
    """The command that makes pip tell where each wheel of a lock is, for the image's Python and platform."""
    command = [*wheels.pip(), "install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps", "--require-hashes"]
    command += ["--only-binary", ":all:", "--python-version", all_pins.python, "--target", str(target)]
    command += [arg for tag in wheels.platforms(all_pins.platform)[:-1] for arg in ("--platform", tag)]
    return [*command, "--report", str(report), "--requirement", str(lock)]


def addresses(lock: Path, all_pins: pins.Pins) -> list[tuple[str, str]]:
    """Address and sha256 of the wheel of each package in a lock. Raises Stop with what pip says."""
    with tempfile.TemporaryDirectory() as tmp:
        report = Path(tmp, "report.json")
        command = report_command(lock, all_pins, Path(tmp, "none"), report)
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=os.environ | network.index())
        if done.returncode:
            said = " ".join(line for line in done.stderr.splitlines() if line.startswith("ERROR"))
            raise Stop(f"locks/{lock.name}: pip finds no wheel for each package: {said[:400]}: check the network")
        told = [item["download_info"] for item in json.loads(report.read_text())["install"]]
    return [(info["url"], info["archive_info"]["hashes"]["sha256"]) for info in told]


def download(url: str, sha256: str, folder: Path, context: ssl.SSLContext) -> None:
    """Fetch one wheel into the folder, from where an earlier try ended. Raises Stop; a part stays for the next one."""
    name = urllib.request.url2pathname(url.rsplit("/", 1)[-1].partition("#")[0])
    part = folder / "wheels" / f".{sha256}.part"
    kept = next((wheels.cache() / sha256).glob("*.whl"), None)
    if kept and not part.exists() and files.sha256(kept) == sha256:
        shutil.copyfile(kept, part)
    else:
        at = part.stat().st_size if part.exists() else 0
        request = urllib.request.Request(url, headers={"Range": f"bytes={at}-"} if at else {})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as source:
                whole = int(source.headers.get("Content-Length") or 0) + (at if source.status == 206 else 0)
                with part.open("ab" if source.status == 206 else "wb") as file:
                    said = time.monotonic()
                    while piece := source.read(PIECE):
                        file.write(piece)
                        if time.monotonic() - said > SAY_S:
                            said = time.monotonic()
                            say.note(f"{name}: {file.tell() / 1e6:.0f} of {whole / 1e6:.0f} MB")
            if part.stat().st_size < whole:
                raise OSError(f"ended after {part.stat().st_size} of {whole} bytes")
        except urllib.error.HTTPError as error:
            if error.code != 416:  # asked for more than there is: the part is whole, or is not of this file
                raise Stop(f"{name} can't be fetched (HTTP {error.code} {error.reason}): run it again") from None
        except (OSError, HTTPException) as error:
            raise Stop(f"{name} can't be fetched ({error}): run it again; it goes on where it was") from None
    if (found := files.sha256(part)) != sha256:
        part.unlink()
        raise Stop(f"{name} came with sha256 {found[:12]}, and the lock says {sha256[:12]}: run it again")
    target = folder / "wheels" / sha256
    target.mkdir(exist_ok=True)
    os.replace(part, target / name)


def drop_changed(folder: Path) -> None:
    """Remove each wheel of the folder that isn't what its folder names, so that it is fetched again. It is named."""
    for path in sorted((folder / "wheels").glob("*/*.whl")):
        if files.sha256(path) != path.parent.name:
            say.note(f"{path}: isn't the wheel that its folder names (changed or cut off); fetching it again")
            path.unlink()


def wheels_of(folder: Path, lock: Path, all_pins: pins.Pins) -> None:
    """All wheels of a lock. Raises Stop."""
    if not offline.lacking(folder, lock):
        say.note(f"locks/{lock.name}: all wheels are there")
        return
    with say.timed(f"locks/{lock.name}: where its wheels are"):
        wanted = [(url, sha256) for url, sha256 in addresses(lock, all_pins) if not offline.present(folder, sha256)]
    bundle = network.ca_bundle()
    context = ssl.create_default_context(cafile=str(bundle) if bundle else None)
    with say.timed(f"locks/{lock.name}: {len(wanted)} wheels"):
        for number, (url, sha256) in enumerate(wanted, 1):
            download(url, sha256, folder, context)
            path = offline.present(folder, sha256)
            assert path
            say.note(f"{number}/{len(wanted)} {path.name} ({path.stat().st_size / 1e6:.1f} MB)")
    if left := offline.lacking(folder, lock):
        raise Stop(
            f"locks/{lock.name}: pip names no wheel of {', '.join(left[:3])} with a hash of the lock: `nox -s lock`"
        )


def index_pages(names: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The pages of a package index (PEP 503) by package, for wheels of which sha256 and file name are given."""
    pages: dict[str, list[str]] = {}
    for sha256, name in sorted(names, key=lambda wheel: wheel[1]):
        link = f'<a href="../../wheels/{sha256}/{escape(name)}#sha256={sha256}">{escape(name)}</a><br>'
        pages.setdefault(canonicalize_name(name.split("-")[0]), []).append(link)
    return {package: "<!DOCTYPE html>\n" + "\n".join(links) + "\n" for package, links in pages.items()}


def write_index(folder: Path) -> None:
    """Write the index of all wheels that are in the folder, whole or not at all."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".simple-") as tmp:
        new = Path(tmp, "simple")
        for package, page in index_pages((p.parent.name, p.name) for p in folder.glob("wheels/*/*.whl")).items():
            (new / package).mkdir(parents=True)
            (new / package / "index.html").write_text(page)
        shutil.rmtree(folder / "simple", ignore_errors=True)
        new.rename(folder / "simple")


def debian(engine: containers.ContainerEngine, origin: base.Base, folder: Path) -> None:
    """All Debian packages of the lock, fetched by apt in the base image, which holds them against Debian's signature.

    Raises Stop.
    """
    if engine.storage is None:
        raise Stop(f"{engine} is on another machine and can't write into {folder}: run the fetch where it is")
    command = ["sh", "/dev/shm/fetch_debian.sh", "/dev/shm/lock.txt", "/out/debian"]
    scripts = pins.ROOT / "scripts"
    mounts = {str(scripts / "layers"): "layers", str(base.LOCK): "lock.txt"}
    mounts[str(scripts / "pipeline" / "fetch_debian.sh")] = "fetch_debian.sh"
    with network.secrets() as given, say.timed("the Debian packages of locks/debian.txt"):
        mounts |= {str(path.resolve()): name for name, path in given.items()}
        volumes = {path: {"bind": f"/dev/shm/{name}", "mode": "ro"} for path, name in mounts.items()}
        volumes |= {str(folder): {"bind": "/out", "mode": "rw"}}
        mode = {"network_mode": "host"} if network.mode() == "host" else {}
        with containers.started(engine, origin.reference, command, volumes=volumes, **mode) as container:
            last = ""
            for line in container.logs(stream=True, follow=True):
                last = line.decode(errors="replace").strip() or last
                say.note(last)
            if container.wait()["StatusCode"]:
                raise Stop(f"the Debian packages can't be fetched: {last.removeprefix('error: ')}")


def chosen(all_pins: pins.Pins, names: list[str]) -> list[pins.Release]:
    """The releases that are named as their locks are (`vllm-0.32.0`, `vllm-0.32.0-cpu`); none: the default ones.

    Raises Stop for an unknown name.
    """
    known = {release.lock.stem: release for release in all_pins.releases}
    if unknown := sorted(set(names) - set(known)):
        raise Stop(f"pins.toml has no release {', '.join(unknown)}; it has {', '.join(known)}")
    return [known[name] for name in names] or [release for release in all_pins.releases if release.default]


def job(argv: list[str]) -> None:
    """Fill the folder."""
    parser = argparse.ArgumentParser(
        prog="nox -s fetch --", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="is made where it isn't there")
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help="e.g. vllm-0.16.0, vllm-0.32.0-cpu (default: "
                        "the default release of each engine, in each variant)")  # fmt: skip
    options = parser.parse_args(argv)
    all_pins = pins.load()
    releases = chosen(all_pins, options.releases)
    folder = options.folder.resolve()
    (folder / "wheels").mkdir(parents=True, exist_ok=True)
    engine = docker_or_podman.find()
    origin = base.resolve(engine, all_pins, "bootstrap")
    with say.timed("the base"):
        base.keep(all_pins, folder / "base")
    debian(engine, origin, folder)
    (folder / "debian" / "lock.sha256").write_text(files.sha256(base.LOCK))
    with say.timed("the wheels that are there: their hashes"):
        drop_changed(folder)
    for lock in offline.locks(releases):
        wheels_of(folder, lock, all_pins)
    write_index(folder)
    offline.whole(folder, releases)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    names = " ".join(release.lock.stem for release in releases)
    say.step(f"{folder} has all of {names}: {size / 1e9:.1f} GB; build with `--offline {options.folder}`")


if __name__ == "__main__":
    say.main(job)
