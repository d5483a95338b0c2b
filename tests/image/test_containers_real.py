"""The container engine on this machine: real builds and runs of images made of one hand-assembled program each."""

import json
import os
import signal
import struct
import subprocess
import sys
import tarfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.pipeline import containers, docker_or_podman, image_build
from scripts.pipeline.say import Stop

pytestmark = pytest.mark.image

ROOT = Path(__file__).resolve().parents[2]
EPOCH = {"SOURCE_DATE_EPOCH": "1700000000"}
SECRET = b"hush-9f2c51"
BUILT: list[str] = []  # ids of the images of a test, to be removed after it


def program(code: bytes) -> bytes:
    """A static x86-64 Linux program of one loaded segment: no image can be pulled here, and none is needed."""
    size = 64 + 56 + len(code)
    base = 0x400000
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, base + 120, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    return header + struct.pack("<IIQQQQQQ", 1, 7, 0, base, base, size, size, 0x1000) + code


def says(text: bytes, code: int) -> bytes:
    """write(1, text); exit(code)."""
    before = b"\xbf\x01\x00\x00\x00" + b"\x48\x8d\x35" + struct.pack("<i", 5 + 5 + 2 + 5 + 5 + 2)
    after = b"\xba" + struct.pack("<i", len(text)) + b"\xb8\x01\x00\x00\x00\x0f\x05"
    return program(before + after + b"\xbf" + struct.pack("<i", code) + b"\xb8\x3c\x00\x00\x00\x0f\x05" + text)


def shows(path: bytes) -> bytes:
    """open(path), read, write what was read to standard output; exit(0)."""
    rest = b"\x31\xf6\xb8\x02\x00\x00\x00\x0f\x05\x89\xc7\x48\x81\xec\x00\x10\x00\x00\x48\x89\xe6\xba\x00\x10\x00\x00"
    rest += (
        b"\x31\xc0\x0f\x05\x89\xc2\xbf\x01\x00\x00\x00\xb8\x01\x00\x00\x00\x0f\x05\x31\xff\xb8\x3c\x00\x00\x00\x0f\x05"
    )
    return program(b"\x48\x8d\x3d" + struct.pack("<i", len(rest)) + rest + path + b"\0")


WAITS = program(b"\xb8\x22\x00\x00\x00\x0f\x05\xeb\xf7")  # pause() for ever


@pytest.fixture(scope="module")
def engine(each_engine: containers.ContainerEngine) -> containers.ContainerEngine:
    return each_engine


@pytest.fixture
def tag(engine: containers.ContainerEngine) -> Iterator[str]:
    name = f"kimi-eagle3-test-{uuid.uuid4().hex[:8]}:1"
    yield name
    subprocess.run([engine.client, "rmi", "--force", *BUILT], capture_output=True)
    BUILT.clear()


def context(folder: Path, dockerfile: str, **programs: bytes) -> Path:
    """A build context with a Dockerfile and programs. Their times get into layers, and are no part of a cache's key."""
    (folder / "Dockerfile").write_text(dockerfile)
    for name, content in programs.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o755)
        os.utime(folder / name, (1700000000, 1700000000))
    return folder


def build(engine: containers.ContainerEngine, folder: Path, tag: str, **more: object) -> str:
    what = {"dockerfile": folder / "Dockerfile", "context": folder, "tag": tag, "args": EPOCH, **more}
    BUILT.append(image_build.build(engine, **what))  # type: ignore[arg-type]
    return BUILT[-1]


def containers_left(engine: containers.ContainerEngine) -> str:
    """The containers of images that were built here: others on this machine are not ours to count."""
    command = [engine.client, "ps", "--all", "--quiet"]
    ours = [[*command, "--filter", f"ancestor={image}"] for image in {*BUILT} if containers.image_id(engine, image)]
    assert ours, "no image of this test is there, so nothing would be counted"
    return "".join(subprocess.run(one, capture_output=True, text=True, check=True).stdout for one in ours)


def test_finding_leaves_no_image_behind(engine: containers.ContainerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(docker_or_podman.FORCE, str(engine.client))
    listed = [engine.client, "image", "ls", "--all", "--quiet", "--filter", "dangling=true"]
    before = set(subprocess.run(listed, capture_output=True, text=True).stdout.split())
    assert docker_or_podman.find() == engine
    assert set(subprocess.run(listed, capture_output=True, text=True).stdout.split()) <= before


def test_a_client_without_a_builder_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Path("/usr/local/bin/docker")
    plugins = subprocess.run([first, "buildx", "version"], capture_output=True) if first.exists() else None
    if plugins is None or plugins.returncode == 0:
        pytest.skip("this machine has no /usr/local/bin/docker without buildx in front of another client")
    monkeypatch.delenv(docker_or_podman.FORCE, raising=False)
    found = docker_or_podman.find()
    assert found.client != first
    monkeypatch.setenv(docker_or_podman.FORCE, str(first))
    with pytest.raises(Stop, match=f"{first} has no builder"):
        docker_or_podman.find()


def test_a_secret_is_seen_by_its_step_and_is_in_no_layer(
    engine: containers.ContainerEngine, tag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "context"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(SECRET)
    step = 'RUN --mount=type=secret,id=token ["/show"]'
    context(folder, f"FROM scratch\nCOPY show /show\n{step}\n", show=shows(b"/run/secrets/token"))
    build(engine, folder, tag, secrets={"token": tmp_path / "secret"}, no_cache=True)
    assert SECRET.decode() in capsys.readouterr().out, "the step did not see its secret, so this shows nothing"
    assert not _holds(engine, tag, tmp_path / "image.tar", SECRET)


def test_what_is_copied_is_in_a_layer(engine: containers.ContainerEngine, tag: str, tmp_path: Path) -> None:
    """The negative control of the search through layers."""
    folder = tmp_path / "context"
    folder.mkdir()
    build(engine, context(folder, "FROM scratch\nCOPY token /token\n", token=SECRET), tag)
    assert _holds(engine, tag, tmp_path / "image.tar", SECRET)


def _holds(engine: containers.ContainerEngine, tag: str, saved: Path, content: bytes) -> bool:
    """Whether any file of the saved image, or of a layer in it, has the content."""
    subprocess.run([engine.client, "save", "--output", saved, tag], check=True, capture_output=True)
    with tarfile.open(saved) as image:
        parts = [file.read() for member in image.getmembers() if (file := image.extractfile(member))]
    return any(content in part for part in parts)


def test_a_build_has_its_labels_its_id_and_the_same_layers_again(
    engine: containers.ContainerEngine, tag: str, tmp_path: Path
) -> None:
    dockerfile = "FROM scratch AS unused\nCOPY no /no\nFROM scratch AS good\nARG WORD\nENV WORD=$WORD\nCOPY say /\n"
    context(tmp_path, dockerfile, say=says(b"hello\n", 0))
    more = {"target": "good", "labels": {"org.test": "a b"}, "network": "none"}
    built = build(engine, tmp_path, tag, args={**EPOCH, "WORD": "x y"}, no_cache=True, **more)
    assert built.startswith("sha256:")
    assert built == containers.image_id(engine, tag)
    assert containers.labels(engine, tag)["org.test"] == "a b"
    layers = layers_of(engine, tag)
    # Layers, because the config isn't the same with every builder: Docker 20.10 writes the time into it, and podman 4.3
    # the ids of its working containers (in Docker's format).
    build(engine, tmp_path, tag, args={**EPOCH, "WORD": "x y"}, no_cache=True, **more)
    assert layers_of(engine, tag) == layers
    assert len(layers) == 1
    context(tmp_path, dockerfile, say=says(b"another\n", 0))
    assert build(engine, tmp_path, tag, args={**EPOCH, "WORD": "x y"}, **more) != built
    assert layers_of(engine, tag) != layers


def layers_of(engine: containers.ContainerEngine, tag: str) -> list[str]:
    """The digests of the content of an image's layers."""
    command = [engine.client, "image", "inspect", "--format", "{{json .RootFS.Layers}}", tag]
    return list(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))


def test_an_image_that_is_not_there_is_none(engine: containers.ContainerEngine) -> None:
    assert containers.image_id(engine, "kimi-eagle3-test-absent:1") is None
    with pytest.raises(Stop, match="has no image kimi-eagle3-test-absent:1"):
        containers.labels(engine, "kimi-eagle3-test-absent:1")


def test_a_failed_build_is_one_line_with_the_step_and_its_last_words(
    engine: containers.ContainerEngine, tag: str, tmp_path: Path
) -> None:
    context(tmp_path, 'FROM scratch\nCOPY fail /fail\nRUN ["/fail"]\n', fail=says(b"first\nE: no such thing\n", 3))
    with pytest.raises(Stop) as stop:
        build(engine, tmp_path, tag)
    line = str(stop.value)
    assert "\n" not in line
    assert tag in line
    assert "RUN" in line
    assert "/fail" in line
    assert "E: no such thing" in line
    assert containers.image_id(engine, tag) is None


def test_a_run_gives_the_exit_code_and_the_output_and_leaves_no_container(
    engine: containers.ContainerEngine, tag: str, tmp_path: Path
) -> None:
    build(engine, context(tmp_path, 'FROM scratch\nCOPY say /\nENTRYPOINT ["/say"]\n', say=says(b"hello\n", 7)), tag)
    assert containers.run(engine, tag) == (7, "hello\n")
    assert containers_left(engine) == ""


def test_a_run_that_does_not_end_or_start_is_one_line_and_leaves_no_container(
    engine: containers.ContainerEngine, tag: str, tmp_path: Path
) -> None:
    build(engine, context(tmp_path, "FROM scratch\nCOPY wait /\n", wait=WAITS), tag)
    with pytest.raises(Stop, match="didn't end within 1 s"):
        containers.run(engine, tag, ["/wait"], timeout=1)
    with pytest.raises(Stop, match=r"can't be run: .*absent"):
        containers.run(engine, tag, ["/absent"])
    assert containers_left(engine) == ""


def interrupted(code: str, sign: str, everyone: bool = False) -> tuple[int, str]:
    """Run Python code, send SIGINT to it once it printed `sign`, and give its exit code and the rest of its output.

    To it alone, or to `everyone` in its process group, as a terminal does.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    seen = []
    for line in child.stdout:
        seen.append(line)
        if sign in line:
            break
    else:
        pytest.fail("it ended before it could be interrupted:\n" + "".join(seen))
    time.sleep(1.0)  # into the step, past the line that announces it
    (os.killpg if everyone else os.kill)(child.pid, signal.SIGINT)
    rest, _ = child.communicate(timeout=60)
    return child.returncode, rest


def running(name: str) -> bool:
    return any(name.encode() in path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _readable(path))


def _readable(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return False
    return True


def gone(name: str, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while running(name) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not running(name)


HEAD = "from pathlib import Path\nfrom scripts.pipeline import containers, docker_or_podman, image_build, say\n"


@pytest.mark.parametrize("everyone", [False, True], ids=["to us alone", "as from a terminal"])
def test_ctrl_c_in_a_build_stops_it_and_leaves_no_tag_and_the_next_build_works(
    engine: containers.ContainerEngine, tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, everyone: bool
) -> None:
    monkeypatch.setenv(docker_or_podman.FORCE, str(engine.client))
    name = f"wait-{uuid.uuid4().hex[:8]}"
    dockerfile = f'FROM scratch AS slow\nCOPY {name} /\nRUN ["/{name}"]\nFROM scratch AS quick\nCOPY {name} /\n'
    context(tmp_path, dockerfile, **{name: WAITS})
    code = (
        f"{HEAD}folder = Path({str(tmp_path)!r})\n"
        "say.main(lambda argv: image_build.build(\n"
        "    docker_or_podman.find(), dockerfile=folder / 'Dockerfile', context=folder,\n"
        f"    tag={tag!r}, args={EPOCH!r}, target='slow') and None)"
    )
    exit_code, rest = interrupted(code, f'RUN ["/{name}"]', everyone)
    assert exit_code == 130, rest
    assert "stopped: " in rest
    assert "Traceback" not in rest
    assert gone(f"/{name}"), "the build's step still runs"
    assert containers.image_id(engine, tag) is None
    assert build(engine, tmp_path, tag, target="quick") == containers.image_id(engine, tag)


def test_ctrl_c_in_a_run_leaves_no_container(
    engine: containers.ContainerEngine, tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(docker_or_podman.FORCE, str(engine.client))
    name = f"wait-{uuid.uuid4().hex[:8]}"
    build(engine, context(tmp_path, f"FROM scratch\nCOPY {name} /\n", **{name: WAITS}), tag)
    code = (
        f"{HEAD}def job(argv: list[str]) -> None:\n    engine = docker_or_podman.find()\n"
        "    print('run now', flush=True)\n"
        f"    containers.run(engine, {tag!r}, ['/{name}'])\nsay.main(job)"
    )
    exit_code, rest = interrupted(code, "run now")
    assert exit_code == 130, rest
    assert containers_left(engine) == ""
    assert gone(f"/{name}")


def test_the_free_disk_is_a_number_and_a_need_beyond_it_is_one_line(engine: containers.ContainerEngine) -> None:
    free = containers.disk_free(engine)
    assert free is not None
    assert free > 0
    containers.require_disk(engine, 0.001)
    with pytest.raises(Stop, match=r"GB free and the build needs 1e\+06 GB: .*system prune") as stop:
        containers.require_disk(engine, 1e6)
    assert "\n" not in str(stop.value)


def test_the_api_is_that_of_the_same_engine(engine: containers.ContainerEngine, tag: str, tmp_path: Path) -> None:
    built = build(engine, context(tmp_path, "FROM scratch\nLABEL a=b\n"), tag)
    with containers.client(engine) as api:
        assert f"sha256:{api.images.get(tag).id.removeprefix('sha256:')}" == built
        assert api.version()["Version"] == engine.version
    if engine.kind == "podman":
        left = [
            p for p in Path("/proc").glob("[0-9]*/cmdline") if _readable(p) and b"system\0service" in p.read_bytes()
        ]
        assert not left, "podman's service outlives the block"
    assert os.environ.get("DOCKER_HOST", "") == "" or engine.endpoint
