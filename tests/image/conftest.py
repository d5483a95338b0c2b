"""The container engine of this machine, the base image, and a registry of our own."""

import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    folder = tmp_path_factory.mktemp("registry")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = folder / "config.yml"
    config.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder / 'data'}}}}}\nhttp: {{addr: '{address}'}}\n"
    )
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([registry_program, "serve", config], stdout=log, stderr=log, env=os.environ)
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(f"http://{address}/v2/", timeout=1).close()
                break
            except OSError:
                assert server.poll() is None, (folder / "log").read_text()
                time.sleep(0.1)
        yield address
    finally:
        server.terminate()
        server.wait()
