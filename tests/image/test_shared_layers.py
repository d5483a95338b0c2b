"""What two engines on the same torch share: the very layers, up to torch.

With two small stand-ins for engines the layers are built here; those of real releases are compared where both were.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

from scripts.pipeline import base, containers, image_build, lock, network, pins

PINS = pins.load()
TAGS = ("kimi-eagle3-test:first", "kimi-eagle3-test:second")
# Below this the engine's own layers begin: the base, Debian's packages, the installer, torch.
SHARED = 4
PAIRS = [
    (one, two)
    for one, two in combinations([r for r in PINS.releases if r.variant == "cuda"], 2)
    if one.torch == two.torch and one.engine != two.engine
]

pytestmark = pytest.mark.image


def layers(engine: containers.ContainerEngine, tag: str) -> list[str]:
    with containers.client(engine) as api:
        return list(api.images.get(tag).attrs["RootFS"]["Layers"])


def own_bytes(engine: containers.ContainerEngine, tag: str) -> int:
    """Bytes of the layers that another engine on the same torch doesn't have."""
    with containers.client(engine) as api:
        sizes = [int(layer["Size"]) for layer in api.images.get(tag).history() if layer["Size"]]
    return sum(sizes[:-SHARED])


@pytest.fixture
def clean(engine: containers.ContainerEngine) -> Iterator[None]:
    yield
    subprocess.run([engine.client, "image", "rm", "--force", *TAGS], capture_output=True)


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("no_cache", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_second_engine_adds_its_own_layers_alone(
    engine: containers.ContainerEngine, origin: base.Base, tmp_path: Path, no_cache: bool
) -> None:
    for tag, package in zip(TAGS, ("six==1.17.0", "idna==3.11"), strict=True):
        context = tmp_path / tag.rpartition(":")[2]
        (context / "locks").mkdir(parents=True)
        for name in ("debian", "tools"):
            shutil.copy(pins.ROOT / "locks" / f"{name}.txt", context / "locks")
        lock.compile_lock(PINS, ["uvloop==0.22.1"], context / "locks" / "torch.txt")
        lock.compile_lock(PINS, [package], context / "locks" / "engine.txt")
        for name in ("in_image", "layers"):
            shutil.copytree(pins.ROOT / "scripts" / name, context / name)
        release = {"arch": PINS.arch, "variant": "cpu", "serving_objects": ["uvloop/loop.*.so"]}
        (context / "release.json").write_text(json.dumps(release))
        args = {"SOURCE_DATE_EPOCH": str(PINS.source_date_epoch), "BASE_IMAGE": origin.reference}
        with network.secrets() as given:
            image_build.build(
                engine, dockerfile=pins.ROOT / "Dockerfile.stack", context=context, tag=tag, target="engine", args=args,
                secrets=given, no_cache=no_cache,
            )  # fmt: skip
    first, second = (layers(engine, tag) for tag in TAGS)
    assert first[:SHARED] == second[:SHARED] and first[SHARED] != second[SHARED]
    assert 0 < own_bytes(engine, TAGS[1]) < 2_000_000


@pytest.mark.parametrize(("one", "two"), PAIRS, ids=lambda release: release.name)
def test_real_releases_on_the_same_torch_share_it_by_digest(
    engine: containers.ContainerEngine, one: pins.Release, two: pins.Release
) -> None:
    images = [PINS.image(release) for release in (one, two)]
    for image in images:
        if not containers.image_id(engine, image):
            pytest.skip(f"{image} was not built here")
    first, second = (layers(engine, image) for image in images)
    assert first[:SHARED] == second[:SHARED] and first[SHARED] != second[SHARED]
    sizes = [own_bytes(engine, image) / 1e9 for image in images]
    print(f"{images[1]} adds {sizes[1]:.2f} GB to the layers of {images[0]}, which adds {sizes[0]:.2f} GB to them")
    assert sizes[1] < 5


def test_there_is_such_a_pair() -> None:
    assert PAIRS, "no two engines are on the same torch, so nothing is compared"
