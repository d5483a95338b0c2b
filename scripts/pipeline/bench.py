"""Measure a build: cold, against a plain Dockerfile that pip-installs the same locks; and again after a patch edit.

Cold means no cached layer; both start from the same base image, and reach the package index the same way. The edit is
to the last patch's words, so that it applies as before; the layers that follow the engine are then made anew.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from scripts.pipeline import base, build, containers, docker_or_podman, image_build, network, pins, say, series

PLAIN_TAG, EDITED = "kimi-eagle3-bench:plain", "kimi-eagle3-bench:edited"
PLAIN = """\
FROM {base}
COPY locks /locks
RUN --mount=type=secret,id=ca,target=/dev/shm/ca --mount=type=secret,id=network,target=/dev/shm/network \\
    if [ -s /dev/shm/network ]; then . /dev/shm/network; fi; \\
    if [ -s /dev/shm/ca ]; then export PIP_CERT=/dev/shm/ca; fi; \\
    apt-get update -qq && apt-get install -qq -y --no-install-recommends {packages} \\
    && python3 -m venv /opt/venv \\
    && /opt/venv/bin/pip install --no-cache-dir --no-deps --require-hashes -r /locks/torch.txt -r /locks/engine.txt
"""


def seconds(work: Callable[[], object]) -> float:
    start = time.monotonic()
    work()
    return time.monotonic() - start


def plain(engine: containers.ContainerEngine, all_pins: pins.Pins, context: Path, origin: base.Base) -> None:
    """Build the comparison: the same packages and wheels, by pip, in one layer."""
    with tempfile.TemporaryDirectory() as tmp, network.secrets() as given:
        dockerfile = Path(tmp, "Dockerfile")
        dockerfile.write_text(PLAIN.format(base=origin.reference, packages=" ".join(all_pins.debian.packages)))
        image_build.build(engine, dockerfile=dockerfile, context=context, tag=PLAIN_TAG, secrets=given, no_cache=True,
                         args={"SOURCE_DATE_EPOCH": str(all_pins.source_date_epoch)})  # fmt: skip


def patch_bytes(engine: containers.ContainerEngine, tag: str) -> int:
    """Bytes of the layer of stage `patched`."""
    with containers.client(engine) as api:
        return next(
            int(layer["Size"]) for layer in api.images.get(tag).history() if "apply_series.py" in layer["CreatedBy"]
        )


def edited(release: pins.Release, folder: Path) -> pins.Release:
    """The release with a series in `folder` whose last patch has other words and the same effect.

    Raises Stop where the series is empty.
    """
    names = series.entries((release.series / "series").read_bytes())
    if not names:
        raise say.Stop(f"the series of {release.name} is empty, so there's no patch to edit: name another --version")
    shutil.copytree(release.series, folder)
    last = folder / names[-1]
    last.write_bytes(last.read_bytes().replace(b"Description: ", b"Description: (edited) ", 1))

    class Edited(pins.Release):
        series = folder

    return Edited(**vars(release))


def job(argv: list[str]) -> None:
    """Print both figures of the release that is chosen, and remove what was built for them."""
    parser = argparse.ArgumentParser(
        prog="nox -s bench --", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", nargs="?", default="vllm", help="default: %(default)s")
    parser.add_argument("--version", help="the engine's version (default: the release that pins.toml marks)")
    parser.add_argument("--warm", action="store_true", help="only the rebuild after a patch edit")
    options = parser.parse_args(argv)
    all_pins = pins.load()
    release = all_pins.release(options.engine, options.version)
    engine = docker_or_podman.find()
    origin = base.resolve(engine, all_pins)
    scratch = tempfile.TemporaryDirectory()
    context = build.prepare_context(all_pins, release, origin, Path(scratch.name))
    figures: list[tuple[str, str]] = []
    try:
        if not options.warm:
            containers.require_disk(engine, 2 * all_pins.disk_gb)
            baseline = seconds(lambda: plain(engine, all_pins, context, origin))
            containers.remove(engine, PLAIN_TAG)
            ours = seconds(lambda: build.build(engine, all_pins, release, origin, no_cache=True))
            figures.append(("plain pip install, cold", f"{baseline:.0f} s"))
            figures.append(("this project, cold, verified", f"{ours:.0f} s"))
            figures.append(("ratio", f"{ours / baseline:.2f}"))
        build.build(engine, all_pins, release, origin)
        with tempfile.TemporaryDirectory() as tmp:
            changed = edited(release, Path(tmp, "series"))
            context = build.prepare_context(all_pins, changed, origin, Path(tmp))
            step = build.steps(all_pins, changed, origin, context)[1]
            for target in ("patched", "verified"):
                again = build.what(context, replace(step, target=target, tag=EDITED), {}, False)
                took = seconds(partial(image_build.build, engine, **again))
                figures.append((f"after a patch edit, stage {target}", f"{took:.1f} s"))
        figures.append(("layer of stage patched", f"{patch_bytes(engine, EDITED) / 1e3:.0f} kB"))
    finally:
        for image in (PLAIN_TAG, EDITED):
            containers.remove(engine, image)
    say.step(f"{release.name} on {engine}")
    for name, value in figures:
        print(f"    {name:<40}{value:>10}")


if __name__ == "__main__":
    say.main(job)
