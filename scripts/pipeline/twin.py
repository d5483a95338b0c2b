"""The twin of an image: the very image, with a few files of the CPU build of the same version laid over it.

So the Python that runs where there is no GPU is the Python that ships, patches and all. Which files are swapped, and
why, stands in pins.toml, in the twin itself (`about`) and in its receipt.
"""

import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.pipeline import containers, files, image_build, pins, receipt, say, series, wheels
from scripts.pipeline.say import Stop

DOCKERFILE = pins.ROOT / "Dockerfile.twin"
LOCK = "kimi-eagle3.lock.twin"
# Below the engine's package: what the contract is about. A twin in which these are swapped shows nothing of its image.
SHIPPED = ("config/", "model_executor/", "models/", "transformers_utils/", "v1/", "entrypoints/")


@dataclass(frozen=True)
class Swapped:
    """A file of the CPU build that a twin has instead of its image's, or in addition; relative to site-packages."""

    path: str
    sha256: str
    why: str


def of(all_pins: pins.Pins, twin: pins.Release) -> str:
    """The reference of the image that a twin stands for."""
    return all_pins.image(all_pins.release(twin.engine, twin.version))


def check(twin: pins.Release) -> None:
    """Raises Stop where a swapped file is patched, or is of the code that the contract is about."""
    patched = set(series.touched(series.load(twin.series)))
    shipped = tuple(f"{twin.engine}/{folder}" for folder in SHIPPED)
    if wrong := [path for path in twin.swapped if path in patched or path.startswith(shipped)]:
        raise Stop(
            f"{twin.name}: {wrong[0]} is to be swapped, and a patch or the contract is about it: the twin would show"
            f" nothing of the image: take it out of `swapped` in pins.toml"
        )


def unpack(all_pins: pins.Pins, twin: pins.Release, into: Path) -> tuple[wheels.Wheel, list[Swapped]]:
    """Write the swapped files into a folder, out of the locked wheel of the CPU build.

    Raises Stop where the wheel lacks one, or where `check` does.
    """
    check(twin)
    wheel = wheels.pristine(twin, all_pins)
    wheel.extract(twin.swapped, into)
    if lacking := [path for path in twin.swapped if not (into / path).is_file()]:
        raise Stop(f"{wheel.path.name} has no {lacking[0]}: mend `swapped` of {twin.name} in pins.toml")
    return wheel, [Swapped(path, files.sha256(into / path), why) for path, why in sorted(twin.swapped.items())]


def prepare_context(all_pins: pins.Pins, twin: pins.Release, context: Path) -> None:
    """Fill a folder with what the builder gets, under fixed names and modes."""
    own = context / "twin"
    wheel, swapped = unpack(all_pins, twin, own / "files")
    record = {"wheel": wheel.path.name, "sha256": wheel.sha256, "swapped": [asdict(one) for one in swapped]}
    for name, data in (("twin", record), ("release", pins.record(all_pins, twin))):
        (own / f"{name}.json").write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    shutil.copyfile(twin.lock, own / "lock.txt")
    (context / "layers").mkdir()
    for name in ("twin.sh", "seal.sh"):
        shutil.copyfile(pins.ROOT / "scripts" / "layers" / name, context / "layers" / name)
    for path in [context, *context.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def build(engine: containers.ContainerEngine, all_pins: pins.Pins, twin: pins.Release, no_cache: bool = False) -> str:
    """Build the twin of an image that is on this machine, and return its reference.

    Raises Stop where its image isn't there, or where what was built doesn't have all of the image's layers.
    """
    tag, image = all_pins.image(twin), of(all_pins, twin)
    image_id = containers.image_id(engine, image)
    if image_id is None:
        raise Stop(f"{engine} has no image {image}, and its twin is made of it: build it first")
    labels = {
        "org.opencontainers.image.title": f"the CPU twin of {image}",
        "org.opencontainers.image.version": twin.tag,
        receipt.TWIN_OF: image_id,
        LOCK: files.sha256(twin.lock),
    }
    parent = files.cache() / "context"
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as tmp, say.timed(f"{twin.name}: {len(twin.swapped)} files swapped"):
        prepare_context(all_pins, twin, Path(tmp))
        image_build.build(
            engine, dockerfile=DOCKERFILE, context=Path(tmp), tag=tag, target="twin",
            args={"SOURCE_DATE_EPOCH": str(all_pins.source_date_epoch), "IMAGE": image},
            labels=labels, network="none", no_cache=no_cache,
        )  # fmt: skip
    mine, its = containers.layers(engine, tag), containers.layers(engine, image_id)
    if mine[: len(its)] != its:
        with containers.client(engine) as api:
            api.images.remove(tag, force=True)
        raise Stop(f"{tag} was not built on {image_id}: another build has moved {image}: build it again, alone")
    return tag


def require_of(engine: containers.ContainerEngine, all_pins: pins.Pins, twin: pins.Release) -> None:
    """Raises Stop where the twin on this machine stands for another image than the one that is there."""
    image, mine = of(all_pins, twin), containers.labels(engine, all_pins.image(twin)).get(receipt.TWIN_OF)
    now = containers.image_id(engine, image)
    if now is not None and mine != now:
        raise Stop(
            f"{all_pins.image(twin)} is the twin of {(mine or 'an unknown image')[:19]}, and {image} is {now[:19]}:"
            f" `nox -s build-{twin.engine} -- --version {twin.version}` builds both"
        )
