"""Run tests/engine inside the unpatched images of this machine: the very engines that the patches go on.

A release is tested where its image was built; none at all is an error. pytest comes from outside, so the image stays
what it is; nothing in it is changed, and there is no network.
"""

import argparse
import subprocess
import sys

from scripts.pipeline import build, containers, docker_or_podman, files, pins, say

TOOLS = ("pytest", "nvidia-cuda-cuobjdump==13.5.37")


def job(argv: list[str]) -> None:
    """Run the tests for each release that was built, and fail if any of them fails."""
    parser = argparse.ArgumentParser(
        prog="nox -s tests-engine --", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", help="only releases of this engine")
    parser.add_argument("--version", action="append", help="only this release (may be repeated)")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest (after another --)")
    options = parser.parse_args(argv)
    all_pins = pins.load()
    engine = docker_or_podman.find()
    chosen = [
        r
        for r in all_pins.releases
        if r.variant == "cuda" and r.version in (options.version or [r.version]) and options.engine in (None, r.engine)
    ]
    built = [r for r in chosen if containers.image_id(engine, build.unpatched(all_pins, r))]
    for release in (r for r in chosen if r not in built):
        cure = f"`nox -s build-{release.engine} -- --version {release.version}` comes first"
        say.note(f"{release.name} is not tested: {cure}")
    if not built:
        raise say.Stop("no image of an unpatched engine is on this machine: run `nox -s build-ENGINE` first")
    tools = files.cache() / "pytest"
    install = ["uv", "pip", "install", "--quiet", "--upgrade", "--only-binary", ":all:"]
    install += ["--constraint", str(pins.ROOT / "tests" / "requirements.txt")]
    subprocess.run([*install, "--python-version", all_pins.python, "--target", tools, *TOOLS], check=True)
    failed = []
    for release in built:
        image = build.unpatched(all_pins, release)
        say.step(f"{release.name}: tests/engine in {image}")
        env = {
            "PYTHONPATH": "/pytest:/repo",
            "KIMI_EAGLE3_CUOBJDUMP": "/pytest/nvidia/cu13/bin/cuobjdump",
            f"KIMI_EAGLE3_VENV_{release.version.replace('.', '_')}": "/opt/venv/bin/python",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "HOME": "/tmp",
        }
        command = [str(engine.client), "run", "--rm", "--network", "none", "--workdir", "/repo"]
        command += ["--volume", f"{pins.ROOT}:/repo:ro", "--volume", f"{tools}:/pytest:ro"]
        command += [arg for name, value in env.items() for arg in ("--env", f"{name}={value}")]
        command += [image, "python3", "-m", "pytest", "-p", "no:cacheprovider", "tests/engine", *options.pytest]
        if subprocess.run(command).returncode:
            failed.append(release.name)
    if failed:
        print(f"error: the engine's tests failed for {', '.join(failed)}; the lines above say which", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    say.main(job)
