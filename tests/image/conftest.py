"""The container engine of this machine, the base image, and a registry of our own."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import registries

from scripts.pipeline import base, containers, pins


@pytest.fixture(scope="session")
def engine() -> containers.ContainerEngine:
    return containers.find()


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
