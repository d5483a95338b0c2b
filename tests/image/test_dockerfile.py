"""Dockerfile.stack itself, on a small stand-in for an engine: the package `six`, with a series that changes one line.
The stand-in for a torch stack is uvloop, which has a shared object large enough to be measured.

Everything is real: the builder, the base, the wheels by hash, the series. Only the stage `verified` needs an engine.
"""

import hashlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.pipeline import base, containers, image_build, lock, network, pins
from scripts.pipeline.say import Stop

PINS = pins.load()
TAG = "kimi-eagle3-test:small"
OLD, NEW = '__version__ = "1.17.0"', '__version__ = "patched"'

pytestmark = pytest.mark.image


def write_series(folder: Path, six: bytes, new: str = NEW) -> None:
    """A series of one patch on six.py."""
    lines = six.decode().splitlines()
    at = lines.index(OLD)
    header = "Description: a version of our own\nOrigin: vendor\nBug: none\nForwarded: no\n"
    header += "Applied-Upstream: no\nLast-Update: 2026-11-30\n---\n"
    diff = f"--- a/six.py\n+++ b/six.py\n@@ -{at},3 +{at},3 @@\n {lines[at - 1]}\n-{OLD}\n+{new}\n {lines[at + 1]}\n"
    folder.mkdir(exist_ok=True)
    (folder / "series").write_text("# test\n0001-version.patch\n")
    (folder / "0001-version.patch").write_text(header + diff)
    after = six.replace(OLD.encode(), new.encode())
    (folder / "tree").write_text(
        f"# test\nsix.py {hashlib.sha256(six).hexdigest()} {hashlib.sha256(after).hexdigest()}\n"
    )


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("six")
    subprocess.run(["uv", "pip", "install", "--quiet", "--target", folder, "six==1.17.0"], check=True)
    return (folder / "six.py").read_bytes()


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory, six: bytes) -> Path:
    folder = tmp_path_factory.mktemp("context")
    (folder / "locks").mkdir()
    for name in ("debian", "tools"):
        shutil.copy(pins.ROOT / "locks" / f"{name}.txt", folder / "locks")
    lock.compile_lock(PINS, ["uvloop==0.22.1"], folder / "locks" / "torch.txt")
    lock.compile_lock(PINS, ["six==1.17.0"], folder / "locks" / "engine.txt")
    for name in ("in_image", "layers"):
        shutil.copytree(pins.ROOT / "scripts" / name, folder / name)
    release = {"arch": PINS.arch, "variant": "cpu", "serving_objects": ["uvloop/loop.*.so"]}
    (folder / "release.json").write_text(json.dumps(release))
    write_series(folder / "series", six)
    return folder


@pytest.fixture
def copy(context: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(context, tmp_path / "context"))


@pytest.fixture(autouse=True)
def clean(engine: containers.ContainerEngine) -> Iterator[None]:
    yield
    subprocess.run([engine.client, "image", "rm", "--force", TAG, f"{TAG}-engine"], capture_output=True)


def make(
    engine: containers.ContainerEngine,
    origin: base.Base,
    context: Path,
    secrets: dict[str, Path] | None = None,
    no_cache: bool = False,
) -> None:
    """Build up to `patched` as the pipeline does: the engine with the network, the rest without."""
    args = {"SOURCE_DATE_EPOCH": str(PINS.source_date_epoch), "BASE_IMAGE": origin.reference}
    common = {"dockerfile": pins.ROOT / "Dockerfile.stack", "context": context, "no_cache": no_cache}
    with network.secrets() as given:
        image_build.build(
            engine, **common, tag=f"{TAG}-engine", target="engine", args=args, secrets=given | (secrets or {})
        )
    args["ENGINE_IMAGE"] = f"{TAG}-engine"
    image_build.build(engine, **common, tag=TAG, target="patched", args=args, network="none")


def layers(engine: containers.ContainerEngine, tag: str = TAG) -> list[str]:
    with containers.client(engine) as api:
        return list(api.images.get(tag).attrs["RootFS"]["Layers"])


def test_the_patched_file_is_the_one_that_runs(
    engine: containers.ContainerEngine, origin: base.Base, context: Path
) -> None:
    make(engine, origin, context)
    program = "import six, uvloop; print(six.__version__, six.__cached__ is not None)"
    assert containers.run(engine, TAG, ["python3", "-c", program]) == (0, "patched True\n")


def test_an_edited_patch_rebuilds_one_small_layer_in_seconds(
    engine: containers.ContainerEngine, origin: base.Base, copy: Path, six: bytes
) -> None:
    make(engine, origin, copy)
    before = layers(engine)
    write_series(copy / "series", six, '__version__ = "edited"')
    start = time.monotonic()
    make(engine, origin, copy)
    seconds = time.monotonic() - start
    after = layers(engine)
    assert before[:-1] == after[:-1] and before[-1] != after[-1]
    with containers.client(engine) as api:
        size = api.images.get(TAG).history()[0]["Size"]
    assert 0 < size < 1_000_000 and seconds < 10
    assert containers.run(engine, TAG, ["python3", "-c", "import six; print(six.__version__)"]) == (0, "edited\n")


def test_a_reverted_patch_gives_the_same_layers_again(
    engine: containers.ContainerEngine, origin: base.Base, copy: Path, six: bytes
) -> None:
    make(engine, origin, copy)
    first = layers(engine)
    (copy / "series" / "0001-version.patch").write_bytes((copy / "series" / "0001-version.patch").read_bytes())
    subprocess.run([engine.client, "image", "rm", "--force", TAG], check=True, capture_output=True)
    make(engine, origin, copy)
    assert layers(engine) == first


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("locks/engine.txt", "sha256:", "sha256:0", "(?i)hash"),
        ("series/0001-version.patch", "+__version__", "+__versiom__", r"six\.py"),
        ("series/tree", "six.py ", "six.py 0", "tree|six"),
        (
            "locks/debian.txt",
            "ca-certificates=",
            "ca-certificates=9",
            "locks/debian.txt|no longer served|ca-certificates",
        ),
    ],
)
def test_a_tampered_input_fails_by_name_and_leaves_no_tag(
    engine: containers.ContainerEngine, origin: base.Base, copy: Path, file: str, old: str, new: str, says: str
) -> None:
    path = copy / file
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(Stop, match=says) as stop:
        make(engine, origin, copy)
    assert "\n" not in str(stop.value)
    assert containers.image_id(engine, TAG) is None


def test_a_secret_is_in_no_layer_and_in_no_history(
    engine: containers.ContainerEngine, origin: base.Base, copy: Path, tmp_path: Path
) -> None:
    marker = f"a-secret-of-this-test-{time.time_ns()}"
    secret = tmp_path / "network"
    with network.secrets() as given:
        secret.write_text(given["network"].read_text() + f"export KIMI_MARKER={marker}\n")
    lock.compile_lock(PINS, ["uvloop==0.21.0"], copy / "locks" / "torch.txt")  # no layer from the cache
    make(engine, origin, copy, {"network": secret})
    archive = tmp_path / "image.tar"
    with archive.open("wb") as out:
        subprocess.run([engine.client, "save", TAG], stdout=out, check=True)
    data = archive.read_bytes()
    assert b"patched" in data and marker.encode() not in data


@pytest.mark.slow
def test_every_layer_is_the_same_bytes_when_it_is_built_anew(
    engine: containers.ContainerEngine, origin: base.Base, context: Path
) -> None:
    make(engine, origin, context, no_cache=True)
    first = layers(engine)
    time.sleep(2)
    make(engine, origin, context, no_cache=True)
    assert layers(engine) == first
