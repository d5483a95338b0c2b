"""Write locks/: every wheel by hash, for the image's Python and platform; every Debian package by version.

`locks/torch-<version>.txt` is a torch stack, shared by all engines on it. `locks/<engine>-<tag>.txt` is what
an engine adds to its stack, and never touches it. `locks/tools.txt` is the installer.
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
    override: tuple[str, ...] = (),
    like: Path | None = None,
) -> None:
    """Resolve `requirements` into `out`, on top of the lock `on` and without what it holds already.

    What an engine asks for must agree with the stack, but for the packages named in `override`, where the
    stack wins. What it shares with the lock `like` has the same version there and here. The result replaces `out` only when it is whole. Raises Stop when there is no solution.
    """
    with tempfile.TemporaryDirectory() as tmp:
        source, result = Path(tmp, "requirements.in"), Path(tmp, "lock.txt")
        source.write_text("\n".join(requirements) + "\n")
        command = [
            *("uv", "pip", "compile", str(source), "--output-file", str(result), "--quiet", "--no-header"),
            *("--generate-hashes", "--only-binary", ":all:", "--no-annotate", "--no-config", "--system-certs"),
            *("--python-version", all_pins.python, "--python-platform", all_pins.platform),
        ]
        if on is not None:
            stack = lockfile.packages(on)
            held = (lockfile.packages(like) if like else {}) | stack
            for option, names in (("--constraint", set(held) - set(override)), ("--override", set(override))):
                file = Path(tmp, option.strip("-"))
                file.write_text("".join(f"{name}=={held[name]}\n" for name in sorted(names)))
                command += [option, str(file)]
            command += [arg for name in stack for arg in ("--no-emit-package", name)]
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
        # A twin has what the image it stands for has, wherever it can; that one's lock is written before it.
        like = None if r.variant == "cuda" else all_pins.release(r.engine, r.version).lock
        jobs[r.lock.stem] = partial(
            compile_lock, all_pins, wanted, r.lock, on=r.torch.lock, override=r.override, like=like
        )
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
