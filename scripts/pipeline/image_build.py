"""Build an image with Docker (with buildx, or with BuildKit inside its client) or podman, and say why where it fails.

Building goes through the command line, which knows contexts, builders and secrets.
"""

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NotRequired, TypedDict, Unpack

from scripts.pipeline import builders, containers, image_config, network
from scripts.pipeline.containers import ContainerEngine, ask, image_id, last_line, ulimits
from scripts.pipeline.docker_or_podman import buildx_builder
from scripts.pipeline.say import Stop, note

WIDTH = 160  # of a line of the builder's that is shown; failures are read from the whole line


class What(TypedDict):
    """What to build. `args` must have SOURCE_DATE_EPOCH (seconds), with podman also the time of every file."""

    dockerfile: Path
    context: Path
    tag: str
    args: Mapping[str, str]
    target: NotRequired[str]  # a stage; the last one where absent
    secrets: NotRequired[Mapping[str, Path]]  # files by id, for `RUN --mount=type=secret,id=ID`
    labels: NotRequired[Mapping[str, str]]
    network: NotRequired[str]  # `none`, or `default`: what this machine's mirrors need (network.py); for every RUN
    no_cache: NotRequired[bool]


def build(engine: ContainerEngine, **what: Unpack[What]) -> str:
    """Build an image and return its id (`sha256:...`). The builder's output is shown as it comes, in plain lines.

    The tag is set when the whole image is there: a failure or Ctrl-C leaves it as it was.
    Raises Stop with the step that failed and its last line.
    """
    tag = what["tag"]
    env = {**os.environ, **build_environment(engine)}
    with _swept(engine):
        code, lines = _stream(build_command(engine, **what), env, engine.kind == "podman")
    if code:
        raise Stop(f"build of {tag} failed {failure(lines)}" + _cure(lines, engine))
    if built := image_id(engine, tag):
        return _without_times(engine, tag, built, int(what["args"]["SOURCE_DATE_EPOCH"]))
    raise Stop(f"{engine} says that it built {tag} and has no such image: `{engine.kind} image ls` shows what it has")


def _without_times(engine: ContainerEngine, tag: str, built: str, epoch: int) -> str:
    """Give an image that was built the config of image_config.py, and return its id: the same for the same layers.

    Where that can't be done, the image stays as it is, and this is said.
    """
    image = containers.inspect(engine, tag)
    try:
        if engine.kind == "podman":
            config = image_config.normal(image, image_config.podman_steps(image["History"]), epoch)
            pinned = _pull_config(engine, config, tag) if config and not engine.endpoint else None
        else:
            pinned = _load_config(engine, image, tag, epoch)
    except (Stop, KeyError, OSError) as why:
        note(f"{tag}: its config stays as the builder wrote it ({last_line(str(why))})")
        return built
    if pinned is None:
        note(f"{tag}: its config stays as the builder wrote it: its layers are the same in each build, its id is not")
    return pinned or built


def _load_config(engine: ContainerEngine, image: Mapping[str, Any], tag: str, epoch: int) -> str | None:
    """Docker: the id of the image with the config of every build; None where it isn't to be had."""
    from docker.errors import DockerException

    with containers.client(engine) as api:
        try:
            history = api.images.get(tag).history()
            if all(step["Created"] <= epoch for step in history):
                return str(image["Id"])  # a builder that knows SOURCE_DATE_EPOCH
            config = image_config.normal(image, image_config.docker_steps(history), epoch)
            if config is None:
                return None
            api.images.load(image_config.docker_archive(config, tag))
            if image_id(engine, tag) != (pinned := image_config.image_id(config)):
                return None
            with suppress(DockerException):  # the image as built: nothing else may need it
                if image["Id"] != pinned and not api.images.get(image["Id"]).tags:
                    api.images.remove(image["Id"])
        except DockerException as error:
            raise Stop(last_line(str(error))) from None
    return pinned


def _pull_config(engine: ContainerEngine, config: bytes, tag: str) -> str | None:
    """podman: the same. The image as built stays, without a name: podman's cache is made of such images."""
    with tempfile.TemporaryDirectory(prefix="podman-") as folder:
        image_config.podman_folder(config, Path(folder))
        code, _, error = ask([engine.client, "pull", "--quiet", f"dir:{folder}"])
    if code:
        raise Stop(last_line(error))
    pinned = image_config.image_id(config)
    containers.name(engine, pinned.removeprefix("sha256:"), tag)
    return pinned if image_id(engine, tag) == pinned else None


def build_environment(engine: ContainerEngine) -> dict[str, str]:
    """The environment variables that a build's command needs beside the user's."""
    if engine.builder == "buildx":
        builder = engine.own.name if engine.own else buildx_builder(engine.context)
        return {"DOCKER_BUILDKIT": "1", "BUILDX_BUILDER": builder, "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
    return {"DOCKER_BUILDKIT": "1"} if engine.builder == "buildkit" else {}


def build_command(engine: ContainerEngine, **what: Unpack[What]) -> list[str]:
    """The command line of a build. Raises Stop where a secret is not a file or SOURCE_DATE_EPOCH is missing."""
    tag, args = what["tag"], what["args"]
    epoch = args.get("SOURCE_DATE_EPOCH", "")
    if not epoch.isdecimal():
        raise Stop(f"build of {tag}: the build argument SOURCE_DATE_EPOCH is {epoch!r}: give a number of seconds")
    command = [str(engine.client), *(["buildx"] if engine.builder == "buildx" else []), "build"]
    command += ["--file", str(what["dockerfile"]), "--tag", tag]
    command += ["--target", what["target"]] if what.get("target") else []
    for key, value in args.items():
        command += ["--build-arg", f"{key}={value}"]
    for key, path in what.get("secrets", {}).items():
        if not path.is_file():
            raise Stop(f"build of {tag}: the secret {key} is to be read from {path}, which is no file")
        command += ["--secret", f"id={key},src={path.resolve()}"]
    for key, value in what.get("labels", {}).items():
        command += ["--label", f"{key}={value}"]
    command += ["--no-cache"] if what.get("no_cache") else []
    mode = what.get("network", "default")
    mode = network.mode() if mode == "default" else mode
    command += ["--network", mode] if mode != "default" else []
    if engine.kind == "podman":
        # Docker's format, because OCI's has no health check.
        command += ["--timestamp", epoch, "--format", "docker"]
        command += [] if engine.endpoint else [f"--ulimit={name}={n}:{n}" for name, n in ulimits()]
    elif engine.own:
        if mode == "host":
            raise Stop(
                f"a mirror on this machine's loopback is out of reach for --builder {engine.own.name}: serve it under "
                "an address of this machine, and name that (UV_DEFAULT_INDEX, DEBIAN_MIRROR)"
            )
        command += ["--progress", "plain", *builders.outputs(tag), *builders.contexts(args)]
        command += builders.caches(engine.own, tag, what.get("target", ""))
    else:
        command += ["--progress", "plain", *(["--load"] if engine.builder == "buildx" else [])]
    return [*command, str(what["context"])]


def _stream(command: Sequence[str], env: Mapping[str, str], podman: bool) -> tuple[int, list[str]]:
    """Run a command, show its lines as they come, and return its exit code and lines. On Ctrl-C it is stopped, too.

    Docker's client hears a terminal's Ctrl-C as we do, and its daemon ends the step. podman would leave its step
    running (see `_stop`), so it has a process group of its own and hears from us alone.
    """
    try:
        child = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0 if podman else None,
        )
    except OSError as error:
        raise Stop(f"{command[0]} can't be run: {error.strerror}") from None
    lines: list[str] = []
    try:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line.rstrip())
            if not _DETAIL.match(lines[-1]):
                print(f"    {lines[-1][:WIDTH]}", flush=True)
        return child.wait(), lines
    except BaseException:
        _stop(child)
        raise


@contextmanager
def _swept(engine: ContainerEngine) -> Iterator[None]:
    """Remove the working containers that a podman build leaves behind where it is stopped or fails."""

    def podman(*arguments: str) -> set[str]:
        with suppress(subprocess.TimeoutExpired):
            command = [str(engine.client), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=containers.STOP_S)
            return set(done.stdout.split())
        return set()

    if engine.kind != "podman":
        yield
        return
    ask = ("ps", "--all", "--external", "--quiet")
    before = podman(*ask)
    try:
        yield
    finally:
        if left := podman(*ask) - before:
            podman("rm", "--force", *sorted(left))


def _stop(child: "subprocess.Popen[str]") -> None:
    """End a build. podman's running step first: it is left behind where podman ends before it (seen with 4.3)."""
    steps = [pid for pid in _descendants(child.pid) if _command(pid).startswith("buildah-")]
    for pid in steps:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        child.wait(containers.STOP_S if steps else 0.0)
    child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(containers.STOP_S)
    child.kill()
    child.wait()


def _descendants(pid: int) -> list[int]:
    with suppress(OSError):
        found = [int(c) for file in Path(f"/proc/{pid}/task").glob("*/children") for c in file.read_text().split()]
        return found + [below for one in found for below in _descendants(one)]
    return []


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    return ""


_DETAIL = re.compile(r"#\d+ (sha256:|transferring |DONE 0\.\d+s$)|#\d+ \d+\.\d+ $|$")  # what helps nobody who waits
_NOISE = re.compile(r"^(-+|sha256:\S+|Expected:|Computed:|: exit status.*|time=.*|)$")
_WRAPPING = re.compile(
    r"^(error: |failed to build: |failed to solve( with frontend \S+)?: |rpc error: code = \w+ desc = "
    r"|failed to create LLB definition: )+",
    re.IGNORECASE,
)


def failure(lines: Sequence[str]) -> str:
    """`at STEP: LAST LINE`, read from a builder's plain output (BuildKit's or buildah's)."""
    titles: dict[str, str] = {}
    last: dict[str, str] = {}
    podman_step, said = "", ""
    for line in lines:
        if buildkit := re.match(r"#(\d+) (.*)", line):
            number, text = buildkit.groups()
            if text.startswith("ERROR"):
                title = titles.get(number, "a step")
                return f"at `{title[:120]}`: {last.get(number) or _WRAPPING.sub('', text)}"[:600]
            titles.setdefault(number, text)
            if (output := re.match(r"\d+\.\d+ (.*\S)", text)) and not _NOISE.match(output[1].strip()):
                last[number] = output[1].strip()
        elif step := re.match(r"(\[\S+\] )?STEP \d+/\d+: .*", line):
            podman_step, said = step[0], ""
        elif podman_step and line.startswith("Error: "):
            return f"at `{podman_step[:120]}`: {said or _WRAPPING.sub('', line)}"[:600]
        elif not _NOISE.match(line.strip()):
            said = line.strip()
    return f"before its first step: {_WRAPPING.sub('', said) or 'the builder says nothing'}"[:600]


def _cure(lines: Sequence[str], engine: ContainerEngine) -> str:
    if any("no space left on device" in line.lower() for line in lines):
        return f": the disk is full: `{engine.kind} system prune` frees what no image uses"
    return "; the lines above say more"
