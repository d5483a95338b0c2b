"""Servers in real containers: one that dies is noticed at once, and none is left behind, however the test ends."""

import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_containers_real import WAITS, build, context, says

from scripts.pipeline import containers, pins, server

pytestmark = pytest.mark.image
CODE = """
import signal
from scripts.pipeline import docker_or_podman, say, server, smoke

def job(argv):
    signal.signal(signal.SIGTERM, smoke.terminate)
    with server.contained(docker_or_podman.find(), server.Launch({tag!r}, ("/wait",))) as up:
        print("it is up", flush=True)
        server.wait(up, "/health", 60)

say.main(job)
"""


def left(engine: containers.ContainerEngine, image: str) -> str:
    """The ids of all containers of an image."""
    command = [engine.client, "ps", "--all", "--quiet", "--filter", f"ancestor={image}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def image(engine: containers.ContainerEngine, tmp_path: Path) -> Iterator[str]:
    """An image with two programs: /wait waits for ever, /die says why and ends with exit code 3."""
    tag = f"kimi-eagle3-test-{uuid.uuid4().hex[:8]}:1"
    programs = {"wait": WAITS, "die": says(b"Loading\nValueError: no such layer\n", 3)}
    build(engine, context(tmp_path, "FROM scratch\nCOPY wait die /\n", **programs), tag)
    yield tag
    subprocess.run([engine.client, "rmi", "--force", tag], capture_output=True, check=False)


def test_a_container_that_dies_is_noticed_at_once_with_its_last_line(
    engine: containers.ContainerEngine, image: str
) -> None:
    start = time.monotonic()
    with server.contained(engine, server.Launch(image, ("/die",))) as up:
        waited = server.wait(up, "/health", 60)
    assert time.monotonic() - start < 20
    assert waited.ended == "its process ended with exit code 3" and waited.last == "ValueError: no such layer"
    assert left(engine, image) == ""


def test_a_container_that_never_answers_is_given_up_at_the_deadline(
    engine: containers.ContainerEngine, image: str
) -> None:
    with server.contained(engine, server.Launch(image, ("/wait",))) as up:
        waited = server.wait(up, "/health", 2)
    assert waited.ended is None and not waited.healthy and waited.seconds >= 2
    assert left(engine, image) == ""


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT, signal.SIGTERM, signal.SIGINT]])
def test_a_stop_while_the_server_loads_leaves_no_container(
    engine: containers.ContainerEngine, image: str, signals: list[signal.Signals]
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CODE.format(tag=image)],
        cwd=pins.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    assert any("it is up" in line for line in child.stdout) and left(engine, image) != ""
    for one in signals:
        child.send_signal(one)
        time.sleep(0.1)
    rest = child.communicate(timeout=60)[0]
    assert child.returncode == (143 if signals[0] == signal.SIGTERM else 130) or len(signals) > 1
    assert "stopped" in rest and left(engine, image) == ""
