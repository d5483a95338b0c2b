"""Write the oracle, a tiny target and drafter that show whether an engine hands over the right hidden states.

It needs torch, so it runs inside an image that was built here; no GPU, no network. What is said of OUT, and the options
that aren't listed here, are those of scripts/in_image/oracle.py: --layers, --drafter, --no-attention,
--partial-vocabulary, --experts, --ids.
"""

import argparse
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from scripts.pipeline import containers, docker_or_podman, pins
from scripts.pipeline.say import Stop, main

SCRIPTS = pins.ROOT / "scripts" / "in_image"


def command(engine: containers.ContainerEngine, image: str, folder: Path, arguments: Sequence[str]) -> list[str]:
    """The container engine's command line that runs oracle.py with `arguments`; it may write to `folder` alone."""
    line = [str(engine.client), "run", "--rm", "--network", "none"]
    line += ["--userns", "keep-id"] if engine.kind == "podman" else []
    line += ["--user", f"{os.getuid()}:{os.getgid()}", "--env", "HOME=/tmp"]
    line += ["--env", "OMP_NUM_THREADS=1", "--env", "PYTHONDONTWRITEBYTECODE=1"]
    line += ["--volume", f"{SCRIPTS}:/in_image:ro", "--volume", f"{folder}:{folder}"]
    return [*line, "--entrypoint", "python3", image, "/in_image/oracle.py", *arguments]


def find_image(engine: containers.ContainerEngine) -> str:
    """The first image of pins.toml that is on this machine. Raises Stop where there is none."""
    all_pins = pins.load()
    for release in all_pins.releases:
        if containers.image_id(engine, all_pins.image(release)):
            return all_pins.image(release)
    raise Stop("no image of pins.toml is on this machine, and the oracle needs torch: run `nox -s build-ENGINE` first")


def job(argv: list[str]) -> None:
    """Write the oracle to OUT, and check it if that is asked. Exits with the script's status where that fails."""
    parser = argparse.ArgumentParser(
        prog="nox -s oracle --", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; it comes first")
    parser.add_argument("--image", help="image to run in (default: one of pins.toml that was built here)")
    parser.add_argument("--check", action="store_true", help="then prove it without an engine, with transformers")
    options, rest = parser.parse_known_args(argv)
    out: Path = options.out.resolve()
    engine = docker_or_podman.find()
    image = options.image or find_image(engine)
    out.parent.mkdir(parents=True, exist_ok=True)
    for arguments in [[str(out), *rest], *([["check", str(out)]] if options.check else [])]:
        status = subprocess.run(command(engine, image, out.parent, arguments)).returncode
        if status:
            raise SystemExit(status)  # the script has said why, in one line


if __name__ == "__main__":
    main(job)
