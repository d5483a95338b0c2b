"""What a workflow has to build, as JSON from pins.toml; or the id of an image that was built.

Needs no installed package, so that a workflow can ask before it installs any.
"""

import argparse
import json
import sys
from contextlib import redirect_stdout

from scripts.pipeline import containers, docker_or_podman, pins, say


def matrix(all_pins: pins.Pins) -> dict[str, list[dict[str, str]]]:
    """A job for each release that is served: GitHub's `strategy.matrix`."""
    served = [release for release in all_pins.releases if release.variant == "cuda"]
    return {"include": [{"engine": release.engine, "version": release.version} for release in served]}


def job(argv: list[str]) -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(prog="python3 -m scripts.pipeline.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--id", nargs=2, metavar=("ENGINE", "VERSION"), help="the id of this release's image")
    options = parser.parse_args(argv)
    all_pins = pins.load()
    if not options.id:
        print(json.dumps(matrix(all_pins)))
        return
    image = all_pins.image(all_pins.release(*options.id))
    with redirect_stdout(sys.stderr):
        found = containers.image_id(docker_or_podman.find(), image)
    if not found:
        raise say.Stop(f"no image {image} is here: build it first")
    print(found)


if __name__ == "__main__":
    say.main(job)
