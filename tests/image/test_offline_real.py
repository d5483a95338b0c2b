"""A folder that was fetched, and a build from it: the same layers as with a network, and all comes from the folder."""

import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest
from test_dockerfile import TAG, clean, context, copy, layers, make, six  # noqa: F401

from scripts.pipeline import base, containers, docker_or_podman, fetch, network, offline, pins

pytestmark = pytest.mark.image
PINS = pins.load()


RELEASE = PINS.release("vllm", "0.16.0")


@pytest.fixture(scope="module")
def folder(
    engine: containers.ContainerEngine,
    context: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Path]:
    """What `nox -s fetch` leaves. The locks are those of the stand-in for a release; all else is the job's own."""
    folder = tmp_path_factory.mktemp("fetched")
    locks = [context / "locks" / f"{name}.txt" for name in ("tools", "torch", "engine")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline, "locks", lambda releases: locks)
        fetch.job([str(folder), RELEASE.lock.stem])
        yield folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are asked of the folder's server, with the answer's status."""
    paths: list[str] = []

    def log(self: SimpleHTTPRequestHandler, code: object = "-", size: object = "-") -> None:
        paths.append(f"{getattr(code, 'value', code)} {self.path}")

    monkeypatch.setattr(offline._Quiet, "log_request", log)
    return paths


def test_a_build_from_the_folder_has_the_layers_of_a_build_with_the_network(
    engine: containers.ContainerEngine,
    context: Path,  # noqa: F811
    folder: Path,
    asked: list[str],
) -> None:
    make(engine, base.resolve(engine, PINS, "bootstrap"), context)
    online = layers(engine)
    with offline.sources(engine, PINS, "auto", folder, [RELEASE], []) as origin:
        assert network.mode() == "host"
        make(engine, origin, context, no_cache=True)
    assert layers(engine) == online
    served = {line.removeprefix("200 ").rsplit("/", 1)[-1] for line in asked if line.startswith("200 ")}
    wheels = {path.name for path in folder.glob("wheels/*/*.whl")}
    assert len(wheels) == 3 and wheels <= served
    assert sum(name.endswith(".deb") for name in served) > 50


def test_a_changed_package_in_the_folder_is_refused(
    engine: containers.ContainerEngine,
    copy: Path,  # noqa: F811
    folder: Path,
    tmp_path: Path,
) -> None:
    mine = Path(shutil.copytree(folder, tmp_path / "mine", copy_function=os.link))
    wheel = next(mine.glob("wheels/*/six-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    wheel.unlink()  # a link to the folder's own
    with zipfile.ZipFile(wheel, "w") as archive:  # the same files, and other bytes
        for name, data in content.items():
            archive.writestr(name, data)
    lock = copy / "locks" / "engine.txt"
    lock.write_text(lock.read_text() + "# so that this one step isn't taken from the cache\n")
    origin = base.resolve(engine, PINS, "bootstrap")
    with offline.served(mine), pytest.raises(containers.Stop, match=r"Hash mismatch for `six==1\.17\.0`"):
        make(engine, origin, copy)
    assert containers.image_id(engine, TAG) is None


def test_a_fetch_that_was_stopped_fetches_only_what_is_missing(
    engine: containers.ContainerEngine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = sorted(folder.glob("debian/pool/**/*.deb"))[7]
    content = gone.read_bytes()
    gone.unlink()
    (folder / "debian" / "new").mkdir()
    (folder / "debian" / "new" / "half_1_amd64.deb").write_bytes(b"half")
    fetch.debian(engine, base.resolve(engine, PINS, "bootstrap"), folder)
    out = capsys.readouterr().out
    assert gone.read_bytes() == content and out.count("Get:1 ") == 1 and "Get:2 " not in out
    assert not (folder / "debian" / "new").exists()


ALONE = """
    import sys
    from pathlib import Path
    sys.path[:0] = [{root!r}, {tests!r}]
    from test_dockerfile import layers, make
    from scripts.pipeline import base, docker_or_podman, offline, pins
    folder = Path({folder!r})
    engine = docker_or_podman.find()
    with offline.served(folder):
        origin = base.from_tarball(engine, pins.load(), next(folder.glob("base/*.tar")))
        make(engine, origin, Path({context!r}), no_cache=True)
    print("LAYERS", *layers(engine, "localhost/" + {tag!r}))
"""


@pytest.fixture
def podman(monkeypatch: pytest.MonkeyPatch) -> Iterator[containers.ContainerEngine]:
    monkeypatch.setenv(docker_or_podman.FORCE, "podman")
    try:
        engine = docker_or_podman.find()
    except containers.Stop as stop:
        pytest.skip(str(stop))
    yield engine
    containers.forget(engine, TAG.partition(":")[0])


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can take the network away")
def test_in_a_network_of_loopback_alone_podman_builds_the_same_layers(
    podman: containers.ContainerEngine,
    context: Path,  # noqa: F811
    folder: Path,
) -> None:
    make(podman, base.resolve(podman, PINS, "bootstrap"), context)
    online = layers(podman, f"localhost/{TAG}")
    tests = str(Path(__file__).parent)
    code = ALONE.format(root=str(pins.ROOT), tests=tests, folder=str(folder), context=str(context), tag=TAG)
    shell = 'ip link set lo up && ! ip route get 192.0.2.1 2> /dev/null && exec "$@"'
    command = ["unshare", "-n", "sh", "-c", shell, "sh", sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=pins.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.rpartition("LAYERS ")[2].split() == online
