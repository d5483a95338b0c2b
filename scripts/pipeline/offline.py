"""Build from a folder that `nox -s fetch` filled: it is served on loopback, as the only index and mirror there is."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from scripts.pipeline import base, containers, files, lockfile, network, pins, say, wheels
from scripts.pipeline.say import Stop


def present(folder: Path, sha256: str) -> Path | None:
    """The wheel with this hash in the folder; it was held against its hash when it came there."""
    return next((folder / "wheels" / sha256).glob("*.whl"), None)


def lacking(folder: Path, lock: Path) -> list[str]:
    """The packages of a lock (`name==version`) of which no wheel is in the folder. Raises Stop for a broken lock."""
    text = lock.read_text() if lock.is_file() else ""
    return [
        f"{name}=={version}"
        for name, version in lockfile.packages(lock).items()
        if not any(present(folder, sha256) for sha256 in wheels.locked(text, name, version))
    ]


def locks(releases: Iterable[pins.Release]) -> list[Path]:
    """The locks of wheels that these releases are built from, each once."""
    own = [path for release in releases for path in (release.torch.lock, release.lock)]
    return list(dict.fromkeys([pins.ROOT / "locks" / "tools.txt", *own]))


def whole(folder: Path, releases: Iterable[pins.Release]) -> Path:
    """The base's tarball, where a folder has all that these releases need. Raises Stop with what is lacking."""
    cure = f"run `nox -s fetch -- {folder} {' '.join(release.lock.stem for release in releases)}` with a network"
    for lock in locks(releases):
        if left := lacking(folder, lock):
            raise Stop(f"{folder} lacks {len(left)} wheels of locks/{lock.name} ({', '.join(left[:3])}): {cure}")
    recorded = folder / "debian" / "lock.sha256"
    if not recorded.is_file() or recorded.read_text() != files.sha256(base.LOCK):
        raise Stop(f"{folder} lacks the packages of this locks/debian.txt: {cure}")
    tarballs = [path for path in folder.glob("base/*.tar") if files.sha256(path) == path.stem]
    if len(tarballs) != 1 or not (folder / "simple").is_dir():
        raise Stop(f"{folder}/base holds {len(tarballs)} whole tarballs instead of one: {cure}")
    return tarballs[0]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[Mapping[str, str]]:
    """The folder, served on loopback for the time of a `with` block; the environment names it as the only mirror."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    mirrors = dict.fromkeys(network.INDEXES, f"{address}/simple/")
    mirrors |= dict.fromkeys(("DEBIAN_MIRROR", "DEBIAN_SECURITY_MIRROR"), f"{address}/debian")
    before = dict(os.environ)
    for name in network.PROXIES:
        os.environ.pop(name, None)
    os.environ.update(mirrors)
    try:
        yield mirrors
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.shutdown()
        server.server_close()


@contextmanager
def sources(
    engine: containers.ContainerEngine, all_pins: pins.Pins, choice: str, folder: Path | None,
    built: Iterable[pins.Release], proven: Iterable[pins.Release],
) -> Iterator[base.Base]:  # fmt: skip
    """The base, for the time in which wheels and packages can be fetched: from the network, or from a folder.

    The smoke test of what is `proven` builds the twin, where there is no GPU. Raises Stop where the folder lacks
    anything that these releases need.
    """
    if folder is None:
        yield base.resolve(engine, all_pins, choice)
        return
    names = {(release.engine, release.version) for release in proven}
    twins = [release for release in all_pins.releases if (release.engine, release.version) in names]
    tarball = whole(folder.resolve(), list({release.name: release for release in [*built, *twins]}.values()))
    with served(folder.resolve()):
        say.step(f"without a network: all comes from {folder}")
        yield base.from_tarball(engine, all_pins, tarball)
