"""Run tests/engine inside the unpatched images of this machine: the very engines that the patches go on.

A release is tested where its image was built; none at all is an error. pytest comes from outside, so the image stays
what it is; nothing in it is changed, and there is no network.
"""

import argparse
import subprocess
import sys

from scripts.pipeline import base, build, containers, pins, say

TOOLS = ("pytest", "pytest-timeout")


def job(argv: list[str]) -> None:
    """Run the tests for each release that was built, and fail if any of them fails."""
    parser = argparse.ArgumentParser(
        prog="nox -s tests-engine --", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="append", help="only this release (may be repeated)")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest (after another --)")
    options = parser.parse_args(argv)
    all_pins = pins.load()
    engine = containers.find()
    chosen = [r for r in all_pins.releases if r.variant == "cuda" and r.version in (options.version or [r.version])]
    built = [r for r in chosen if containers.image_id(engine, build.unpatched(all_pins, r))]
    for release in set(chosen) - set(built):
        cure = f"`nox -s build-{release.engine} -- --version {release.version}` comes first"
        say.note(f"{release.name} is not tested: {cure}")
    if not built:
        raise say.Stop("no image of an unpatched engine is on this machine: run `nox -s build-vllm` first")
    tools = base.cache() / "pytest"
    subprocess.run(["uv", "pip", "install", "--quiet", "--upgrade", "--target", tools, "--python-version", all_pins.python,
                    "--only-binary", ":all:", *TOOLS], check=True)  # fmt: skip
    failed = []
    for release in built:
        say.step(f"{release.name}: tests/engine in {build.unpatched(all_pins, release)}")
        interpreter = f"KIMI_EAGLE3_VENV_{release.version.replace('.', '_')}=/opt/venv/bin/python"
        done = subprocess.run(
            [engine.client, "run", "--rm", "--network", "none", "--volume", f"{pins.ROOT}:/repo:ro", "--workdir", "/repo",
             "--volume", f"{tools}:/pytest:ro", "--env", "PYTHONPATH=/pytest:/repo", "--env", interpreter,
             "--env", "PYTHONDONTWRITEBYTECODE=1", "--env", "OMP_NUM_THREADS=1", "--env", "HOME=/tmp",
             build.unpatched(all_pins, release), "python3", "-m", "pytest", "-p", "no:cacheprovider", "tests/engine",
             *options.pytest],
        )  # fmt: skip
        if done.returncode:
            failed.append(release.name)
    if failed:
        print(f"error: the engine's tests failed for {', '.join(failed)}; the lines above say which", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    say.main(job)
