"""The container engine of this machine, the base image, and a registry of our own."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pushing
import pytest
import registries

from scripts.pipeline import base, containers, docker_or_podman, oci, pins, push, receipt
from scripts.pipeline.say import Stop


@pytest.fixture(scope="session")
def engine() -> containers.ContainerEngine:
    return docker_or_podman.find()


@pytest.fixture(scope="module", params=["docker", "podman"])
def each_engine(request: pytest.FixtureRequest) -> Iterator[containers.ContainerEngine]:
    """Docker, then podman, each where this machine has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(docker_or_podman.FORCE, request.param)
        try:
            yield docker_or_podman.find()
        except Stop as stop:
            pytest.skip(str(stop))


@pytest.fixture(scope="session")
def origin(engine: containers.ContainerEngine) -> base.Base:
    return base.resolve(engine, pins.load())


@pytest.fixture(scope="session")
def registry_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Debian's registry server: the installed one, or the package's program, unpacked and not installed."""
    if found := shutil.which("docker-registry"):
        return Path(found)
    folder = tmp_path_factory.mktemp("registry-program")
    subprocess.run(
        ["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", "docker-registry"], cwd=folder, check=True
    )
    subprocess.run(["dpkg-deb", "-x", next(folder.glob("*.deb")), folder], check=True)
    return folder / "usr/bin/docker-registry"


@pytest.fixture(scope="session")
def registry(registry_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`HOST:PORT` of a real registry, alive for the session, on loopback alone."""
    with registries.serve(registry_program, tmp_path_factory.mktemp("registry")) as address:
        yield address


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, engine: containers.ContainerEngine, tmp_path: Path) -> None:
    """No waiting between tries, this user's login and receipts out of the way, and the engine looked for once."""
    monkeypatch.setattr(oci, "WAITS", (0.01,) * 5)
    monkeypatch.setattr(docker_or_podman, "find", lambda: engine)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "no-login"))
    for name in ("COSIGN_KEY", "COSIGN_PUBLIC_KEY", *push.IDENTITIES):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def image(engine: containers.ContainerEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[receipt.Image]:
    folder = tmp_path_factory.mktemp("image")
    with pushing.image(engine, folder / "context", pushing.LAYERS, pushing.labels(folder)) as built:
        yield built


@pytest.fixture
def proof(image: receipt.Image, tmp_path: Path) -> Path:
    """The receipt of the image."""
    return pushing.written(tmp_path / "receipt.json", pushing.receipt_of(image))


@pytest.fixture
def address(registry_program: Path, tmp_path: Path) -> Iterator[str]:
    """A registry that nobody has used."""
    with registries.serve(registry_program, tmp_path) as place:
        yield place
