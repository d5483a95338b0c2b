"""The smoke test: start an image (or take a server that is up), climb the ladder S0 to S4, write the receipt.

Without --target it tests the oracle, a tiny pair whose acceptance length is exactly K + 1 if, and only if, the engine
hands over the right hidden states; with --gpus the pinned target and drafter come after it. What it started is always
removed, also after Ctrl-C.
"""

import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from scripts.pipeline import (
    adapters,
    climb,
    containers,
    docker_or_podman,
    ladder,
    pins,
    receipt,
    say,
    server,
    trials,
    twin,
)
from scripts.pipeline.adapters import Adapter
from scripts.pipeline.ladder import Rung
from scripts.pipeline.trials import Trial

CACHE = "kimi-cache"
VERSION_LABEL = "org.opencontainers.image.version"
RUNNING_DEADLINE = 60.0  # seconds; for a server that is already up


def about(engine: containers.ContainerEngine, image: str) -> tuple[dict[str, Any], str]:
    """What an image says of itself, and the one line that says why it doesn't; empty where all is well."""
    code, output = containers.run(engine, image, ["about", "--json"], network_mode="none")
    try:
        data, end = json.JSONDecoder().raw_decode(output, output.index("{"))
    except ValueError:
        return {}, f"`about --json` says {output.strip()[-200:] or 'nothing'!r}"
    errors = [line for line in output[end:].splitlines() if line.startswith("error: ")]
    return data, (errors[0].removeprefix("error: ") if errors else f"`about` ended with {code}") if code else ""


def require_gpus(engine: containers.ContainerEngine) -> None:
    """Raises Stop where containers can't get at GPUs: before anything is started, with one line."""
    specs = [path for folder in ("/etc/cdi", "/var/run/cdi") for path in Path(folder).glob("*nvidia*")]
    with containers.client(engine) as api:
        info = api.info()
    devices = [str(device.get("ID", "")) for device in info.get("DiscoveredDevices") or ()]
    hook = shutil.which("nvidia-container-runtime-hook") or "nvidia" in (info.get("Runtimes") or {})
    if not specs and not any("nvidia" in device for device in devices) and (engine.kind == "podman" or not hook):
        raise say.Stop(
            f"{engine} has no NVIDIA runtime, so --gpus can't work: install the NVIDIA container toolkit on this"
            " machine, or leave --gpus out and test the twin (--variant cpu)"
        )


def has_gpus(engine: containers.ContainerEngine) -> bool:
    """Whether there are GPUs on this machine, and containers can get at them."""
    try:
        require_gpus(engine)
    except say.Stop:
        return False
    return any(Path("/dev").glob("nvidia[0-9]*"))


def launch(options: argparse.Namespace, adapter: Adapter, image: str, cpu: bool, trial: Trial) -> server.Launch:
    """How the image is started for a trial."""
    environment: dict[str, str | None] = {**adapter.environment, **(adapter.on_cpu if cpu else {})}
    mounts: dict[str, tuple[str, str]] = {}
    named = []
    for name, inside in ((trial.target, "/target"), (trial.drafter, "/drafter")):
        if name.startswith(("/", ".")):
            mounts[server.mounted(Path(name))] = (inside, "ro")
            named.append(inside)
        else:
            named.append(name)
    if len(mounts) == 2:
        environment["HF_HUB_OFFLINE"] = "1"
    if options.cache or len(mounts) < 2:
        mounts[options.cache or CACHE] = ("/cache", "rw")
    flags = adapter.oracle_flags if trial.pair == "oracle" and not cpu else ()
    if options.gpus and options.gpus != "all":
        flags = (adapter.split, str(len(options.gpus.split(","))), *flags)
    for pair in options.env:
        name, equals, value = pair.partition("=")
        environment[name] = value if equals else None
    arguments = ("serve", "--target", named[0], "--drafter", named[1], "--draft-tokens", str(trial.k), *flags)
    return server.Launch(image, (*arguments, *options.flags), environment, mounts, options.gpus or "")


def plain(command: server.Launch) -> server.Launch:
    """The same without a drafter."""
    arguments, left = [], iter(command.arguments)
    for argument in left:
        if argument in ("--drafter", "--draft-tokens"):
            next(left)
        else:
            arguments.append(argument)
    return replace(command, arguments=(*arguments, "--no-speculation"))


def run_image(
    engine: containers.ContainerEngine, adapter: Adapter, trial: Trial, command: server.Launch, installed: str,
    pinned: str, compare: bool,
) -> receipt.Run:  # fmt: skip
    """One trial on a container of its own; with `compare`, one without speculation comes before it."""
    line = command.line(engine.kind)
    hardware = "not known: no container was up"

    def run(rungs: Sequence[Rung]) -> receipt.Run:
        return receipt.Run(trial.pair, *trial.models, trial.k, line, hardware, ladder.whole(rungs))

    try:
        if compare:
            say.step(f"{trial.name}: without speculation\n    {plain(command).line(engine.kind)}")
            with server.contained(engine, plain(command)) as up:
                found = climb.without(up, adapter, trial)
            if isinstance(found, Rung):
                return run([climb.report(found)])
            trial = replace(trial, expected=replace(trial.expected, plain=found))
        say.step(f"{trial.name}\n    {line}")
        with server.contained(engine, command) as up:
            hardware = server.hardware(up)
            return run(climb.climb(up, adapter, trial, pinned, installed))
    except say.Stop as stop:
        return run([climb.report(ladder.failed("S0", "cannot-start", str(stop)))])


def skipped(trial: Trial, why: str) -> receipt.Run:
    """A run that wasn't tried."""
    rungs = tuple(ladder.not_climbed(name, why) for name in ladder.RUNGS)
    return receipt.Run(trial.pair, *trial.models, trial.k, "", "none", rungs)


def arguments(engine_name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"nox -s smoke-{engine_name} --", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_argument_group("what is tested")
    what.add_argument("--version", help="the engine's version (default: the release that pins.toml marks)")
    what.add_argument("--variant", choices=("cuda", "cpu"), help="default: cuda with --gpus, else cpu, the twin")
    what.add_argument("--image", metavar="REF", help="another image of the release (default: its own name)")
    what.add_argument("--base-url", metavar="URL", help="a server that is already up, e.g. http://127.0.0.1:8000")
    what.add_argument("--gpus", metavar="WHICH", nargs="?", const="all", help="all (default), or numbers: 0,1")
    pair = parser.add_argument_group("with which models")
    pair.add_argument("--target", metavar="NAME_OR_DIR", help="default: the oracle")
    pair.add_argument("--drafter", metavar="NAME_OR_DIR", help="default: the oracle's, or the pinned one")
    pair.add_argument("--k", type=int, nargs="+", help="draft tokens; several: one run each (default: as pinned)")
    pair.add_argument("--oracle", metavar="OPTIONS", help="options of oracle.py, e.g. '--drafter llama --layers 61'")
    pair.add_argument("--oracle-only", action="store_true", help="with --gpus: not the pinned pair after it")
    hold = parser.add_argument_group("what it is held against")
    hold.add_argument("--expect-acceptance", type=float, metavar="LENGTH", help="acceptance length, exactly")
    hold.add_argument("--compare-plain", action="store_true", help="start it without speculation, too, and compare")
    hold.add_argument("--deadline", type=float, metavar="SECONDS", help="for the server to get healthy")
    how = parser.add_argument_group("how")
    how.add_argument("--cache", metavar="NAME_OR_DIR", help=f"mounted at /cache (default: {CACHE}; none for folders)")
    how.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="for the server; a name alone, e.g. HF_TOKEN, takes the value from here unshown",
    )
    how.add_argument(
        "--receipt",
        type=Path,
        metavar="FILE",
        help="default: by the image's id in this user's cache, but for a pair of your own",
    )
    how.add_argument("flags", nargs="*", metavar="FLAG", help="after another --: more flags for the engine")
    return parser


def chosen_release(engine_name: str, all_pins: pins.Pins, options: argparse.Namespace, tag: str = "") -> pins.Release:
    """The release that is tested. What isn't said is read from `tag`, the version that an image's label gives it."""
    version, _, variant = tag.partition("-")
    default = "cuda" if options.gpus or options.base_url else "cpu"
    variant = options.variant or (variant or "cuda" if tag else default)
    if variant == "cpu" and not any((r.engine, r.variant) == (engine_name, "cpu") for r in all_pins.releases):
        raise say.Stop(
            f"{engine_name} has no twin, so its server needs GPUs: add --gpus, or --base-url for one that is up;"
            f" without a GPU, `nox -s build-{engine_name}` runs the oracle in a process"
        )
    return all_pins.release(engine_name, options.version or version or None, variant)


def planned_trials(
    all_pins: pins.Pins, release: pins.Release, options: argparse.Namespace, oracle: Path | None
) -> tuple[Trial, ...]:
    """What to run, in order. `oracle` is a folder with the oracle that we made, None where another pair is tested."""
    pinned_too = bool(oracle and options.gpus and not options.oracle_only)
    found = []
    chats = bool(adapters.adapter(release.engine, release.version).chat)
    for k in options.k or [release.drafter.draft_tokens]:
        if k < 1:
            raise say.Stop(f"--k {k}: give 1 or more; without a drafter there's nothing to test")
        if oracle:
            found.append(trials.oracle_trial(oracle, k, f"oracle.py {shlex.join(oracle_options(release, options))}"))
        else:
            target = options.target or all_pins.target.repo
            own = release.drafter.model.repo
            found.append(trials.trial_for(all_pins, target, options.drafter, own, k, chats))
    if pinned_too:
        revision = f"@{all_pins.target.revision}" if all_pins.target.revision else ""
        target, drafter = all_pins.target.repo + revision, release.drafter
        found.append(trials.pinned_trial(all_pins, target, drafter.model.repo, drafter.draft_tokens, chats))
    if options.expect_acceptance is not None:
        if pinned_too:
            raise say.Stop("--expect-acceptance is for one pair: give --target and --drafter, or --oracle-only")
        found = [replace(t, expected=replace(t.expected, acceptance=options.expect_acceptance)) for t in found]
    if options.deadline is not None:
        found = [replace(trial, deadline=options.deadline) for trial in found]
    return tuple(found)


def try_server(engine_name: str, all_pins: pins.Pins, options: argparse.Namespace) -> dict[str, Any]:
    """Climb with a server that is already up, and return the receipt."""
    release = chosen_release(engine_name, all_pins, options)
    adapter = adapters.adapter(engine_name, release.version)
    url = options.base_url.rstrip("/")
    (trial, *more) = planned_trials(all_pins, release, options, None)
    if more or options.compare_plain:
        raise say.Stop("--base-url takes one --k, the one it was started with, and no --compare-plain")
    deadline = RUNNING_DEADLINE if options.deadline is None else options.deadline
    say.step(f"{trial.name}: {url}")
    up = server.Running(url)
    rungs = climb.climb(up, adapter, replace(trial, deadline=deadline), release.version, None)
    run = receipt.Run(trial.pair, *trial.models, trial.k, "", server.hardware(up), rungs)
    return receipt.make(release, None, url, {}, [run])


def try_image(engine_name: str, all_pins: pins.Pins, options: argparse.Namespace) -> dict[str, Any]:
    """Climb with an image, and return the receipt."""
    if bool(options.target) != bool(options.drafter):
        raise say.Stop("--target and --drafter belong together: give both, or none to test the oracle")
    if options.target and options.oracle:
        raise say.Stop("--oracle and --target exclude each other")
    release = None if options.image else chosen_release(engine_name, all_pins, options)
    if options.variant == "cuda" and not options.gpus:
        raise say.Stop("--variant cuda is for GPUs: add --gpus, or test the twin (--variant cpu)")
    engine = docker_or_podman.find()
    if options.gpus:
        require_gpus(engine)
    image = inspect(engine, all_pins.image(release) if release else options.image)
    release = release or chosen_release(engine_name, all_pins, options, image.labels.get(VERSION_LABEL, ""))
    adapter = adapters.adapter(engine_name, release.version)
    if release.variant == "cuda" and not options.gpus:
        raise say.Stop(f"{image.reference} is for GPUs: add --gpus, or test the twin (--variant cpu)")
    if release.swapped and not options.image:
        twin.require_of(engine, all_pins, release)
    with oracle_folder(engine, image.id, release, options) as oracle:
        planned = planned_trials(all_pins, release, options, oracle)
        # By its id: the tag may be moved while this runs, and what is tested is what the receipt is about.
        commands = [launch(options, adapter, image.id, release.variant == "cpu", trial) for trial in planned]
        say.step(f"{image.reference}: what it is")
        record, incomplete = about(engine, image.id)
        installed = str((record.get("installed") or {}).get(release.engine) or "not told")
        first = ladder.version(release.version, installed, None)
        first = ladder.failed("S0", "image-incomplete", incomplete) if incomplete else first
        runs: list[receipt.Run] = []
        for trial, command in zip(planned, commands, strict=True):
            broken = next((run for run in runs if not ladder.ok(run.rungs)), None)
            if broken:
                runs.append(skipped(trial, f"a run before it failed ({broken.name})"))
            elif first.status == "failed":
                runs.append(replace(skipped(trial, ""), rungs=ladder.whole([climb.report(first)])))
            else:
                version = release.version
                compare = options.compare_plain and not runs  # once: the output without a drafter is the same for any K
                runs.append(run_image(engine, adapter, trial, command, installed, version, compare))
    return receipt.make(release, image, None, record, runs)


def inspect(engine: containers.ContainerEngine, reference: str) -> receipt.Image:
    """An image of this machine. Raises Stop where there's no such image."""
    image_id = containers.image_id(engine, reference)
    if image_id is None:
        raise say.Stop(f"{engine} has no image {reference}: `nox -s build-ENGINE` makes it (--variant cpu: a twin)")
    with containers.client(engine) as api:
        digests = api.images.get(image_id).attrs.get("RepoDigests") or ()
    return receipt.Image(reference, image_id, tuple(digests), containers.labels(engine, image_id))


def oracle_options(release: pins.Release, options: argparse.Namespace) -> list[str]:
    """What oracle.py is told: as asked, or a drafter with the attention of the pinned one."""
    if options.oracle is not None:
        return shlex.split(options.oracle)
    return ["--drafter", "mla" if "Deepseek" in release.drafter.architecture else "llama"]


@contextmanager
def oracle_folder(
    engine: containers.ContainerEngine, image: str, release: pins.Release, options: argparse.Namespace
) -> Iterator[Path | None]:
    """A folder with the oracle, for the time of a `with` block; None where --target names another pair."""
    if options.target:
        yield None
        return
    given = oracle_options(release, options)
    with tempfile.TemporaryDirectory(prefix="oracle-") as tmp:
        say.step(f"the oracle ({' '.join(given)})")
        yield trials.make_oracle(engine, image, Path(tmp), given)


def own_receipt(made: Mapping[str, Any]) -> Path | None:
    """Where a receipt goes by itself: to its image. Somebody's own pair does not speak for an image."""
    if not made["image"] or any(run["pair"] == "own" for run in made["runs"]):
        return None
    return receipt.path_for(made["image"]["id"])


def terminate(*_: object) -> NoReturn:
    """SIGTERM ends the test as Ctrl-C does: what it started is removed."""
    print("stopped by SIGTERM: what was started is removed", file=sys.stderr)
    raise SystemExit(143)


def job(argv: list[str]) -> None:
    """Test what the arguments choose, write the receipt, and fail with the first rung that failed."""
    engine_name, *rest = argv
    options = arguments(engine_name).parse_args(rest)
    # What is no number differs from nothing by more than the tolerance, so it would pass.
    if options.expect_acceptance is not None and not 1 < options.expect_acceptance < math.inf:
        raise say.Stop(f"--expect-acceptance {options.expect_acceptance:g}: give a number above 1, e.g. 4.0")
    for name in options.env:
        if "=" not in name and name not in os.environ:
            raise say.Stop(f"--env {name}: there is no such variable here; set it, or write {name}=VALUE")
    if options.base_url and (options.image or options.gpus):
        raise say.Stop("--base-url is a server that is already up: --image and --gpus don't go with it")
    if options.base_url and not re.fullmatch(r"https?://[^/\s:]+(:\d+)?(/\S*)?", options.base_url):
        raise say.Stop(f"{options.base_url} is no address of a server: write http://HOST:PORT")
    signal.signal(signal.SIGTERM, terminate)
    all_pins = pins.load()
    made = (try_server if options.base_url else try_image)(engine_name, all_pins, options)
    if path := options.receipt or own_receipt(made):
        receipt.write(path, made)
        say.step(f"receipt: {path}")
    for run in made["runs"]:
        for rung in run["rungs"]:
            if rung["status"] == "failed":
                cure = ladder.FAILURES[rung["failure"]]
                where = f"{run['pair']}, K = {run['k']}: {rung['name']} {rung['failure']}"
                raise say.Stop(f"smoke test failed: {where}: {rung['detail']}: {cure}")
    if not made["ok"]:
        raise say.Stop("smoke test failed: a rung up to S3 was not climbed, and what isn't measured doesn't pass")
    for run in made["runs"]:
        length = next(rung["numbers"]["acceptance"] for rung in run["rungs"] if rung["name"] == "S3")
        say.step(f"passed: {run['pair']}, K = {run['k']}: acceptance length {length:g}, on {run['hardware']}")


if __name__ == "__main__":
    say.main(job)
