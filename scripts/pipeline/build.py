"""Build images: check what goes in, build with the network up to the engine, patch and verify without it, test.

An image gets its tag only when its contract and coverage held inside the build.
"""

import argparse
import fcntl
import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.pipeline import (
    attest,
    base,
    builders,
    containers,
    docker_or_podman,
    files,
    image_build,
    in_process,
    lockfile,
    network,
    offline,
    pins,
    say,
    series,
    smoke,
    twin,
)

# Numbers of draft tokens that the smoke test after a build tries; the pinned one first.
PROOF = (3, 1, 5)
# Room for the layers of the last stages alone, in GB.
REBUILD_GB = 2


@dataclass(frozen=True)
class Step:
    """One call of the builder: its Dockerfile, the stage it ends at, the tag of its result, its network."""

    dockerfile: str
    target: str
    tag: str
    args: dict[str, str]
    labels: dict[str, str]
    network: str


def check_locks(all_pins: pins.Pins, release: pins.Release) -> None:
    """Hold the locks of a release against pins.toml before anything is downloaded.

    Raises Stop where a lock is missing, cut off or for another version, or where two layers would overwrite each other.
    """
    tools = pins.ROOT / "locks" / "tools.txt"
    wanted = {
        tools: [all_pins.installer],
        release.torch.lock: list(release.torch.requirements),
        release.lock: [f"{release.package}=={release.version}"],
    }
    for path, requirements in wanted.items():
        held = lockfile.packages(path)
        for requirement in map(Requirement, requirements):
            version = held.get(canonicalize_name(requirement.name))
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                has = f"has {requirement.name} {version}" if version else f"lacks {requirement.name}"
                raise say.Stop(f"locks/{path.name} {has}, pins.toml wants {requirement}: run `nox -s lock`")
    missing = sorted(set(all_pins.debian.packages) - set(lockfile.packages(base.LOCK)))
    if missing:
        raise say.Stop(f"locks/debian.txt lacks {', '.join(missing)} of pins.toml: run `nox -s lock -- debian`")
    both = sorted(set(lockfile.packages(release.torch.lock)) & set(lockfile.packages(release.lock)))
    if both:
        raise say.Stop(
            f"locks/{release.lock.name} installs again what locks/{release.torch.lock.name} has "
            f"({', '.join(both[:3])}): run `nox -s lock`"
        )


def check_series(release: pins.Release) -> None:
    """Raises Stop, before anything is downloaded, where the series of a release isn't whole. It is applied later."""
    errors = series.lint(series.load(release.series), release.version)
    if errors:
        raise say.Stop(
            f"patches/{release.engine}/{release.version}/{errors[0]}"
            + (f" (and {len(errors) - 1} more: `nox -s check-patches`)" if errors[1:] else "")
        )


def prepare_context(all_pins: pins.Pins, release: pins.Release, origin: base.Base, parent: Path) -> Path:
    """A folder in `parent` with what the builder gets: this release's files alone, under fixed names and modes.

    The builder's cache knows files by content and mode, so the modes don't depend on who checked them out.
    """
    context = parent / f"{release.engine}-{release.tag}"
    parent.mkdir(parents=True, exist_ok=True)
    scripts = pins.ROOT / "scripts"
    with tempfile.TemporaryDirectory(dir=parent) as tmp:
        new = Path(tmp, "context")
        (new / "locks").mkdir(parents=True)
        for name, source in (
            ("debian", base.LOCK),
            ("tools", pins.ROOT / "locks" / "tools.txt"),
            ("torch", release.torch.lock),
            ("engine", release.lock),
        ):
            shutil.copyfile(source, new / "locks" / f"{name}.txt")
        # What isn't there can't change a layer: the twin's own step isn't one of the image's.
        ignore = shutil.ignore_patterns("__pycache__", "twin.sh")
        shutil.copytree(release.series, new / "series")
        shutil.copytree(scripts / "in_image", new / "in_image", ignore=ignore)
        shutil.copytree(scripts / "layers", new / "layers", ignore=ignore)
        (new / "base.json").write_text(json.dumps(asdict(origin), indent=1, sort_keys=True) + "\n")
        (new / "release.json").write_text(json.dumps(pins.record(all_pins, release), indent=1, sort_keys=True) + "\n")
        for path in [new, *new.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        shutil.rmtree(context, ignore_errors=True)
        new.rename(context)
    return context


def _git_revision() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        cwd=pins.ROOT,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or "unknown"


def unpatched(all_pins: pins.Pins, release: pins.Release) -> str:
    """The reference of the engine as published, in the same layers: what the series goes on."""
    return f"{all_pins.image_name}-{release.engine}-unpatched:{release.tag}"


def verified(all_pins: pins.Pins, release: pins.Release) -> str:
    """The reference of what every engine's image is made of, before its own Dockerfile. It goes with the build."""
    return f"{all_pins.image_name}-{release.engine}-verified:{release.tag}"


def steps(all_pins: pins.Pins, release: pins.Release, origin: base.Base, context: Path) -> tuple[Step, Step, Step]:
    """The calls of the builder that make an image: with the network, without it, and what only this engine has.

    The labels of the image name every input by hash.
    """
    image, engine_image, whole = all_pins.image(release), unpatched(all_pins, release), verified(all_pins, release)
    stack, own = (path.name for path in attest.dockerfiles(release).values())
    time = {"SOURCE_DATE_EPOCH": str(all_pins.source_date_epoch)}
    args = {**time, "BASE_IMAGE": origin.reference}
    labels = {
        "org.opencontainers.image.title": f"{release.engine} with the Kimi-K2.5 EAGLE-3 patches",
        "org.opencontainers.image.version": release.tag,
        "org.opencontainers.image.revision": _git_revision(),
        "org.opencontainers.image.base.name": origin.reference,
        "org.opencontainers.image.base.digest": f"sha256:{origin.sha256}",
        "kimi-eagle3.base": origin.kind,
        **attest.input_labels(release, context),
    }
    return (
        Step(stack, "engine", engine_image, args, {"kimi-eagle3.base": origin.kind}, "default"),
        Step(stack, "verified", whole, {**args, "ENGINE_IMAGE": engine_image}, {}, "none"),
        Step(own, "image", image, {**time, "VERIFIED_IMAGE": whole}, labels, "none"),
    )


def what(context: Path, step: Step, given: dict[str, Path], no_cache: bool) -> image_build.What:
    """A step as the container engine wants it."""
    return {
        "dockerfile": pins.ROOT / step.dockerfile, "context": context, "target": step.target,
        "tag": step.tag, "args": step.args, "labels": step.labels, "network": step.network,
        "secrets": given if step.network == "default" else {}, "no_cache": no_cache,
    }  # fmt: skip


@contextmanager
def alone(release: pins.Release) -> Iterator[None]:
    """One build of a release at a time on this machine: two would hand each other contexts and engines."""
    path = files.cache() / "context" / f"{release.engine}-{release.tag}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say.step(f"{release.name}: another build of it is running; waiting for its end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(
    engine: containers.ContainerEngine,
    all_pins: pins.Pins,
    release: pins.Release,
    origin: base.Base,
    no_cache: bool = False,
) -> str:
    """Build one image and return its reference.

    Raises Stop where any stage fails; the tag then stays where it was, on an image that passed, or on none.
    """
    contexts = files.cache() / "context"
    with alone(release), network.secrets() as given, tempfile.TemporaryDirectory(dir=contexts) as own:
        context = prepare_context(all_pins, release, origin, Path(own))
        first, between, last = steps(all_pins, release, origin, context)
        needed = REBUILD_GB if containers.image_id(engine, first.tag) and not no_cache else all_pins.disk_gb
        containers.require_disk(engine, needed)
        try:
            for step in (first, between, last):
                with say.timed(f"{release.name}: build up to stage {step.target} (network: {step.network})"):
                    image_build.build(engine, **what(context, step, given, no_cache))
        finally:
            containers.remove(engine, between.tag)
        confirm(engine, last.tag)
    return last.tag


def confirm(engine: containers.ContainerEngine, image: str) -> None:
    """Show what an image is, and hold what it says of itself against its labels.

    Raises Stop, and takes the tag away, where they differ: another build had its hands in this one.
    """
    say.step(f"{image}: what it is")
    print(containers.run(engine, image, ["about"])[1])
    about, incomplete = smoke.about(engine, image)
    about = {} if incomplete else about
    labels = containers.labels(engine, image)
    found = {
        "kimi-eagle3.series": (about.get("series") or {}).get("series_sha256"),
        "kimi-eagle3.lock.torch": (about.get("locks") or {}).get("torch.txt"),
        "kimi-eagle3.lock.engine": (about.get("locks") or {}).get("engine.txt"),
    }
    if wrong := [name for name, value in found.items() if labels.get(name) != value]:
        containers.remove(engine, image)
        raise say.Stop(f"{image} holds something else than its labels say ({', '.join(wrong)}): build it again, alone")


def prove(engine: containers.ContainerEngine, all_pins: pins.Pins, release: pins.Release) -> None:
    """The smoke test of a release that was built, with the oracle: on GPUs, or on the twin, which is built for it.

    A release that has no twin goes through the oracle in a process of its image, without a server.
    """
    which = [release.engine, "--version", release.version]
    if smoke.has_gpus(engine):
        smoke.job([*which, "--gpus", "--oracle-only", "--k", *map(str, PROOF)])
        return
    twins = [r for r in all_pins.releases if (r.engine, r.version, r.variant) == (*which[::2], "cpu")]
    if twins:
        if release.variant == "cuda":
            twin.build(engine, all_pins, twins[0])
        smoke.job([*which, "--variant", "cpu", "--compare-plain", "--k", *map(str, PROOF)])
    else:
        in_process.prove(engine, all_pins, release, PROOF)


def show_commands(engine: containers.ContainerEngine, all_pins: pins.Pins, release: pins.Release, origin: base.Base,
                  no_cache: bool) -> None:  # fmt: skip
    """Print the builder's commands for a context that is left in place. They run as they are."""
    checkout = hashlib.sha256(str(pins.ROOT).encode()).hexdigest()[:8]
    context = prepare_context(all_pins, release, origin, files.cache() / "context" / f"print-{checkout}")
    given = {"ca": bundle} if (bundle := network.ca_bundle()) else {}
    if values := network.values():
        print(f"# also: --secret id=network,src=FILE, with a line `export NAME=VALUE` for each of {', '.join(values)}")
    environment = [f"{name}={value}" for name, value in image_build.build_environment(engine).items()]
    for step in steps(all_pins, release, origin, context):
        command = image_build.build_command(engine, **what(context, step, given, no_cache))
        print(shlex.join([*environment, *command]))


def farewell(engine: containers.ContainerEngine, release: pins.Release, image: str) -> str:
    """What to do with an image that was built."""
    run = f"{engine.kind} run"
    gpus = "--gpus all" if engine.kind == "docker" else "--device nvidia.com/gpu=all"
    port = release.serve.port
    serve = f"\n    serve:  {run} {gpus} --ipc=host -p {port}:{port} -v kimi-cache:/cache {image}"
    return f"ready: {image}{serve if release.variant == 'cuda' else ''}\n    check:  {run} --rm {image} contract"


def find(options: argparse.Namespace) -> containers.ContainerEngine:
    """The engine, with the builder that the options name. Raises Stop."""
    if not options.builder and (options.cache_from or options.cache_to):
        raise say.Stop("--cache-from and --cache-to are those of a builder of your own: name it with --builder")
    engine = docker_or_podman.find()
    if not options.builder:
        return engine
    own = builders.Builder(options.builder, tuple(options.cache_from), options.cache_to)
    return docker_or_podman.with_builder(engine, own)


def job(argv: list[str]) -> None:
    """Build the images that the arguments choose, and show the contract of each."""
    parser = argparse.ArgumentParser(
        prog="nox -s build-ENGINE --", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", metavar="ENGINE", help="given by the session")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--version", help="the engine's version (default: the release that pins.toml marks)")
    parser.add_argument(
        "--variant",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cuda (default), or cpu: the twin, which runs the engine where there is no GPU",
    )
    one.add_argument("--all", action="store_true", help="every release of the engine, in every variant")
    parser.add_argument(
        "--base",
        choices=base.CHOICES,
        default="auto",
        help="the base: registry (Debian's image by digest), bootstrap (from packages), or auto "
        "(default): bootstrap only where the registry can't be reached",
    )
    parser.add_argument(
        "--offline",
        type=Path,
        metavar="DIR",
        help="build from what `nox -s fetch -- DIR` left there, without a network",
    )
    parser.add_argument("--no-cache", action="store_true", help="build every layer anew")
    parser.add_argument("--builder", metavar="NAME", help="a buildx builder of your own (`docker buildx ls`)")
    parser.add_argument("--cache-from", metavar="HOST/PATH", action="append", default=[],
                        help="with --builder: a registry to read its cache from (may be repeated)")  # fmt: skip
    parser.add_argument(
        "--cache-to", metavar="HOST/PATH", default="", help="with --builder: where to write its cache to"
    )
    parser.add_argument("--no-smoke", action="store_true", help="build only; `nox -s smoke-ENGINE` tests it later")
    parser.add_argument("--print", action="store_true", help="make base and context ready, and show the commands")
    options = parser.parse_args(argv)
    all_pins = pins.load()
    if options.all:
        chosen = [r for r in all_pins.releases if r.engine == options.engine]
    else:
        # A twin is made of its image.
        variants = ("cuda", "cpu") if options.variant == "cpu" else ("cuda",)
        chosen = [all_pins.release(options.engine, options.version, variant) for variant in variants]
    images = [release for release in chosen if release.variant == "cuda"]
    for release in chosen:
        check_locks(all_pins, release)
        check_series(release)
        twin.check(release)
    if options.print:
        with redirect_stdout(sys.stderr):
            engine = find(options)
            origin = base.resolve(engine, all_pins, options.base)
        for release in images:
            show_commands(engine, all_pins, release, origin, options.no_cache)
        for release in chosen:
            if release.swapped:
                print(f"# {release.name}: made of {twin.of(all_pins, release)} by {twin.DOCKERFILE.name}")
        return
    engine = find(options)
    proven = [] if options.no_smoke else list({(r.engine, r.version): r for r in chosen}.values())
    with offline.sources(engine, all_pins, options.base, options.offline, chosen, proven) as origin:
        for release in chosen:
            if release in images:
                build(engine, all_pins, release, origin, options.no_cache)
            else:
                twin.build(engine, all_pins, release, options.no_cache)
        for release in proven:
            prove(engine, all_pins, release)
    for release in chosen:
        say.step(farewell(engine, release, all_pins.image(release)))


if __name__ == "__main__":
    say.main(job)
