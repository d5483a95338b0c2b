"""Build a release twice without any cache, and compare: digest by digest, layer by layer.

Where a layer differs, each file that differs is named, and in what: content, mode, owner, time, order, or missing.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import IO, Any, cast

from scripts.pipeline import base, build, containers, docker_or_podman, image_config, layer_diff, pins, say
from scripts.pipeline.say import Stop

SHOWN = 20  # files that are named for each layer
CHUNK = 2**20  # bytes of an image that the engine hands over at a time
# What an engine tells of an image that isn't part of it.
ASIDE = ("Id", "Digest", "RepoTags", "RepoDigests", "Metadata", "GraphDriver", "Parent", "NamesHistory", "Size",
         "VirtualSize", "RootFS", "History", "Comment", "Container", "ContainerConfig", "Descriptor")  # fmt: skip


@dataclass(frozen=True)
class Image:
    """What is compared: the id, the layers in order with the steps that made them, and the rest of the config."""

    id: str
    layers: tuple[str, ...]
    steps: tuple[str, ...]
    config: dict[str, Any]


def image(engine: containers.ContainerEngine, ref: str) -> Image:
    """Raises Stop where there's no such image."""
    told = containers.description(engine, ref)
    if engine.kind == "podman":
        history = told["History"]
        steps, times = image_config.podman_steps(history), [step.get("created") for step in history]
    else:
        with containers.client(engine) as api:
            history = api.images.get(ref).history()
        steps, times = image_config.docker_steps(history), [step["Created"] for step in reversed(history)]
    made = tuple(step["created_by"] for step in steps if "empty_layer" not in step)
    config = {key: value for key, value in told.items() if key not in ASIDE}
    config |= {"history": [step["created_by"] for step in steps], "times of the history": times}
    diff_ids = told["RootFS"].get("Layers") or []
    return Image(f"sha256:{told['Id'].removeprefix('sha256:')}", tuple(diff_ids), made, config)


def files(engine: containers.ContainerEngine, ref: str, wanted: frozenset[str]) -> dict[str, list[layer_diff.Entry]]:
    """The files of the layers of an image whose diff ids are `wanted`."""
    with say.timed(f"reading the layers of {ref}"), containers.client(engine) as api:
        pieces = api.images.get(ref).save(chunk_size=CHUNK)
        return layer_diff.layers(cast(IO[bytes], layer_diff.Stream(pieces)), wanted)


def config_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """The keys of two configs that differ, dotted."""
    found = []
    for key in sorted(first.keys() | second.keys()):
        a, b = first.get(key), second.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += [f"{key}.{inner}" for inner in config_differences(a, b)]
        elif a != b:
            found.append(key)
    return found


def compare(engine: containers.ContainerEngine, one: str, two: str) -> str:
    """Compare two images, say what differs, and return the verdict. Raises Stop where they aren't the same."""
    first, second = image(engine, one), image(engine, two)
    if not first.layers:
        raise Stop(f"{one} has no layer: nothing was compared")
    say.step(f"{one} and {two}, layer by layer")
    places = max(len(first.layers), len(second.layers))
    pairs = [(_at(first.layers, n), _at(second.layers, n)) for n in range(places)]
    for n, (a, b) in enumerate(pairs):
        step = " ".join((_at(first.steps, n) or _at(second.steps, n) or "?").split())
        say.note(f"{'same  ' if a == b else 'DIFFER'} {(a or 'none')[7:19]} {(b or 'none')[7:19]}  {step[:80]}")
    wrong = [(n, a, b) for n, (a, b) in enumerate(pairs) if a != b]
    if wrong:
        there = [frozenset(pair[i] for _, *pair in wrong if pair[i]) for i in (0, 1)]
        left, right = files(engine, one, there[0]), files(engine, two, there[1])
        named = 0
        for n, a, b in wrong:
            found = layer_diff.compare(left.get(a, []), right.get(b, []))
            named += len(found)
            say.step(f"layer {n + 1}: {len(found)} differences" + ("" if found else ": in the headers of the archive"))
            for difference in found[:SHOWN]:
                say.note(str(difference))
            if len(found) > SHOWN:
                say.note(f"... and {len(found) - SHOWN} more")
        raise Stop(f"{len(wrong)} of {places} layers differ, in {named} files or their order, named above")
    if first.id == second.id:
        return f"same digest twice: {first.id}, {places} layers"
    keys = config_differences(first.config, second.config)
    if set(keys) <= {"Created", "times of the history"}:
        return (
            f"same {places} layers; the ids differ, in {' and '.join(keys) or 'what the builder notes of itself'} only"
        )
    raise Stop(f"same {places} layers, and the configs differ in {', '.join(keys)}: {json.dumps(first.id)} {second.id}")


def _at(items: tuple[str, ...], n: int) -> str:
    return items[n] if n < len(items) else ""


def job(argv: list[str]) -> None:
    """Build twice and compare, or compare two images that are there."""
    parser = argparse.ArgumentParser(
        prog="nox -s reproduce --", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", nargs="?", default="vllm", help="default: %(default)s")
    parser.add_argument("version", nargs="?", help="default: the release that pins.toml marks")
    parser.add_argument("--variant", choices=("cuda", "cpu"), default="cuda", help="cpu: the twin")
    parser.add_argument("--base", choices=base.CHOICES, default="auto", help="as for the build")
    parser.add_argument("--keep", action="store_true", help="keep the two images")
    parser.add_argument("--compare", nargs=2, metavar="IMAGE", help="build nothing: compare two images that are there")
    options = parser.parse_args(argv)
    engine = docker_or_podman.find()
    if options.compare:
        say.step(compare(engine, *options.compare))
        return
    all_pins = pins.load()
    release = all_pins.release(options.engine, options.version, options.variant)
    build.check_locks(all_pins, release)
    build.check_series(release)
    containers.require_disk(engine, 2 * all_pins.disk_gb)
    origin = base.resolve(engine, all_pins, options.base)
    # Names of their own: no image of this machine is moved.
    own = replace(all_pins, image_name=f"{all_pins.image_name}-reproduce")
    first = f"{own.image(release)}-first"
    try:
        built = build.build(engine, own, release, origin, no_cache=True)
        containers.name(engine, built, first)
        built = build.build(engine, own, release, origin, no_cache=True)
        say.step(f"{release.name}: {compare(engine, first, built)}")
    finally:
        if not options.keep:
            containers.forget(engine, f"{own.image_name}-")


if __name__ == "__main__":
    say.main(job)
