"""Build images: check what goes in, build with the network up to the engine, patch and verify without it.

An image gets its tag only when its contract and coverage held inside the build.
"""

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.pipeline import base, containers, lock, pins, say, series

# What a build may need from the environment of the build machine to reach mirrors and proxies. It is handed over as
# a secret, so it is in no layer and in no history.
NETWORK = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "DEBIAN_MIRROR",
           "DEBIAN_SECURITY_MIRROR", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")  # fmt: skip
CA_BUNDLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
SYSTEM_CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
# Room for the layers of the last stages alone, in GB.
REBUILD_GB = 2


@dataclass(frozen=True)
class Step:
    """One call of the builder: the stage it ends at, the tag of its result, and whether it may use the network."""

    target: str
    tag: str
    args: dict[str, str]
    labels: dict[str, str]
    network: str


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_locks(release: pins.Release) -> None:
    """Hold the locks of a release against pins.toml before anything is downloaded.

    Raises Stop where a lock is missing, is for another version, or where the two layers would overwrite each other.
    """
    stack, own = lock.packages(release.torch.lock), lock.packages(release.lock)
    for name, version, where, path in (
        ("torch", release.torch.version, stack, release.torch.lock),
        (release.package, release.version, own, release.lock),
    ):
        if where.get(name) != version:
            raise say.Stop(
                f"locks/{path.name} has {name} {where.get(name, 'not at all')}, pins.toml has {version}: "
                "run `nox -s lock`"
            )
    both = sorted(set(stack) & set(own))
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


def prepare_context(all_pins: pins.Pins, release: pins.Release, origin: base.Base) -> Path:
    """The folder that the builder gets: this release's files alone, under fixed names. Replaced at each build."""
    context = base.cache() / "context" / f"{release.engine}-{release.tag}"
    context.parent.mkdir(parents=True, exist_ok=True)
    scripts = pins.ROOT / "scripts"
    with tempfile.TemporaryDirectory(dir=context.parent) as tmp:
        new = Path(tmp, "context")
        (new / "locks").mkdir(parents=True)
        for name, source in (
            ("debian", base.LOCK),
            ("tools", pins.ROOT / "locks" / "tools.txt"),
            ("torch", release.torch.lock),
            ("engine", release.lock),
        ):
            shutil.copyfile(source, new / "locks" / f"{name}.txt")
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(release.series, new / "series")
        shutil.copytree(scripts / "in_image", new / "in_image", ignore=ignore)
        shutil.copytree(scripts / "layers", new / "layers")
        (new / "base.json").write_text(json.dumps(asdict(origin), indent=1, sort_keys=True) + "\n")
        (new / "release.json").write_text(json.dumps(pins.record(all_pins, release), indent=1, sort_keys=True) + "\n")
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


def steps(all_pins: pins.Pins, release: pins.Release, origin: base.Base) -> tuple[Step, Step]:
    """The two calls of the builder that make an image."""
    image = all_pins.image(release)
    engine_image = unpatched(all_pins, release)
    args = {"SOURCE_DATE_EPOCH": str(all_pins.source_date_epoch), "BASE_IMAGE": origin.reference}
    labels = {
        "org.opencontainers.image.title": f"{release.engine} with the Kimi-K2.5 EAGLE-3 patches",
        "org.opencontainers.image.version": release.tag,
        "org.opencontainers.image.revision": _git_revision(),
        "org.opencontainers.image.base.name": origin.reference,
        "org.opencontainers.image.base.digest": f"sha256:{origin.sha256}",
        "kimi-eagle3.base": origin.kind,
        "kimi-eagle3.series": series.digest(series.load(release.series)),
        "kimi-eagle3.lock.torch": sha256(release.torch.lock),
        "kimi-eagle3.lock.engine": sha256(release.lock),
    }
    return (
        Step("engine", engine_image, args, {"kimi-eagle3.base": origin.kind}, "default"),
        Step("verified", image, {**args, "ENGINE_IMAGE": engine_image}, labels, "none"),
    )


@contextmanager
def secrets() -> Iterator[dict[str, Path]]:
    """The secrets of a build: `ca`, the CA bundle of this machine, and `network`, its proxies and mirrors."""
    chosen = next((Path(os.environ[name]) for name in CA_BUNDLES if os.environ.get(name)), SYSTEM_CA_BUNDLE)
    index = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("UV_INDEX_URL") or os.environ.get("PIP_INDEX_URL")
    values = {name: os.environ[name] for name in NETWORK if os.environ.get(name)}
    if index:
        values |= {"UV_DEFAULT_INDEX": index, "PIP_INDEX_URL": index}
    with tempfile.TemporaryDirectory() as tmp:
        network = Path(tmp, "network")
        network.write_text("".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items()))
        yield {"network": network} | ({"ca": chosen} if chosen.is_file() else {})


def what(release: pins.Release, context: Path, step: Step, given: dict[str, Path], no_cache: bool) -> containers.What:
    """A step as the container engine wants it."""
    return {
        "dockerfile": pins.ROOT / f"Dockerfile.{release.engine}", "context": context, "target": step.target,
        "tag": step.tag, "args": step.args, "labels": step.labels, "network": step.network,
        "secrets": given if step.network == "default" else {}, "no_cache": no_cache,
    }  # fmt: skip


def build(
    engine: containers.ContainerEngine,
    all_pins: pins.Pins,
    release: pins.Release,
    origin: base.Base,
    no_cache: bool = False,
) -> str:
    """Build one image and return its reference. Raises Stop, with no tag left, where any stage fails."""
    context = prepare_context(all_pins, release, origin)
    first, second = steps(all_pins, release, origin)
    needed = REBUILD_GB if containers.image_id(engine, first.tag) and not no_cache else all_pins.disk_gb
    containers.require_disk(engine, needed)
    with secrets() as given:
        for step in (first, second):
            with say.timed(f"{release.name}: build up to stage {step.target} (network: {step.network})"):
                containers.build(engine, **what(release, context, step, given, no_cache))
    return second.tag


def job(argv: list[str]) -> None:
    """Build the images that the arguments choose, and show the contract of each."""
    engine_name, *rest = argv
    parser = argparse.ArgumentParser(
        prog=f"nox -s build-{engine_name} --", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", help="the engine's version (default: the release that pins.toml marks)")
    parser.add_argument(
        "--variant",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cuda (default), or cpu: the twin, which runs the engine where there is no GPU",
    )
    parser.add_argument("--all", action="store_true", help="every release of the engine, in every variant")
    parser.add_argument(
        "--base",
        choices=base.CHOICES,
        default="auto",
        help="the base: registry (Debian's image by digest), bootstrap (from packages), or auto "
        "(default): bootstrap only where the registry can't be reached",
    )
    parser.add_argument("--no-cache", action="store_true", help="build every layer anew")
    parser.add_argument("--print", action="store_true", help="prepare the context, show the commands, build nothing")
    options = parser.parse_args(rest)
    all_pins = pins.load()
    if options.all:
        chosen = [r for r in all_pins.releases if r.engine == engine_name]
    else:
        chosen = [all_pins.release(engine_name, options.version, options.variant)]
    for release in chosen:
        check_locks(release)
        check_series(release)
    engine = containers.find()
    origin = base.resolve(engine, all_pins, options.base)
    for release in chosen:
        if options.print:
            context = prepare_context(all_pins, release, origin)
            for step in steps(all_pins, release, origin):
                command = containers.build_command(engine, **what(release, context, step, {}, options.no_cache))
                print(shlex.join(command))
            continue
        image = build(engine, all_pins, release, origin, options.no_cache)
        say.step(f"{image}: what it is")
        print(containers.run(engine, image, ["about"])[1])
        say.step(
            f"ready: {image}\n    serve:  docker run --gpus all --ipc=host -p 8000:8000 -v kimi-cache:/cache {image}"
            f"\n    check:  docker run --rm {image} contract"
        )


if __name__ == "__main__":
    say.main(job)
