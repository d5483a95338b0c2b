"""Write locks/: every wheel by hash, for the image's Python and platform; every Debian package by version.

`locks/torch-<version>.txt` is a torch stack, shared by all engines on it. `locks/<engine>-<tag>.txt` is what
an engine adds to its stack, and never touches it; a twin's is one wheel. `locks/tools.txt` is the installer.
"""

import argparse
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from scripts.pipeline import base, lockfile, network, pins, say


def compile_lock(
    all_pins: pins.Pins,
    requirements: list[str],
    out: Path,
    on: Path | None = None,
    alone: bool = False,
) -> None:
    """Resolve `requirements` into `out`, on top of the lock `on` and without what it holds already.

    What an engine asks for must agree with the stack. `alone` leaves out what the requirements ask for. The result
    replaces `out` only when it is whole. Raises Stop when there is no solution.
    """
    with tempfile.TemporaryDirectory() as tmp:
        source, result = Path(tmp, "requirements.in"), Path(tmp, "lock.txt")
        source.write_text("\n".join(requirements) + "\n")
        command = [
            *("uv", "pip", "compile", str(source), "--output-file", str(result), "--quiet", "--no-header"),
            *("--generate-hashes", "--only-binary", ":all:", "--no-annotate", "--no-config", "--system-certs"),
            *("--python-version", all_pins.python, "--python-platform", all_pins.platform),
        ]
        command += ["--no-deps"] if alone else []
        if on is not None:
            stack = lockfile.packages(on)
            held = Path(tmp, "constraints")
            held.write_text("".join(f"{name}=={version}\n" for name, version in sorted(stack.items())))
            command += ["--constraint", str(held), *(arg for name in stack for arg in ("--no-emit-package", name))]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | network.index())
        if done.returncode:
            raise say.Stop(f"locks/{out.name} can't be resolved: {' '.join(done.stderr.split())[:600]}")
        body = result.read_text()
    lockfile.write(out, body)


def job(argv: list[str]) -> None:
    """Write all locks, or those that are named."""
    parser = argparse.ArgumentParser(prog="nox -s lock --", description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="*", help="names in locks/, e.g. vllm-0.32.0 (default: all)")
    only = parser.parse_args(argv).only
    all_pins = pins.load()
    if shutil.which("uv") is None:
        raise say.Stop("uv is not on the PATH: run this as `nox -s lock`, which installs it")
    locks = pins.ROOT / "locks"
    jobs: dict[str, Callable[[], None]] = {
        "tools": partial(compile_lock, all_pins, [all_pins.installer], locks / "tools.txt")
    }
    for torch in {r.torch.version: r.torch for r in all_pins.releases}.values():
        jobs[torch.lock.stem] = partial(compile_lock, all_pins, list(torch.requirements), torch.lock)
    for r in all_pins.releases:
        wanted = [f"{r.package}=={r.version}"]
        # A twin takes files of one wheel, and all else from its image.
        own = {"alone": True} if r.swapped else {"on": r.torch.lock}
        jobs[r.lock.stem] = partial(compile_lock, all_pins, wanted, r.lock, **own)
    jobs["debian"] = partial(base.lock, all_pins)
    unknown = set(only) - set(jobs)
    if unknown:
        raise say.Stop(f"no such lock: {', '.join(sorted(unknown))}; there are {', '.join(jobs)}")
    locks.mkdir(exist_ok=True)
    for name, write in jobs.items():
        if not only or name in only:
            with say.timed(f"lock {name}"):
                write()


if __name__ == "__main__":
    say.main(job)
