"""The container engine: found by what works, then used to build and to run images.

Docker (with buildx, or with BuildKit inside its client) and podman. Building goes through the command line, which
knows contexts, builders and secrets; running goes through Docker's API, which podman speaks too.
"""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict, Unpack

from scripts.pipeline import builders, image_config, network
from scripts.pipeline.say import Stop, note

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

FORCE = "KIMI_EAGLE3_CONTAINER_ENGINE"
SETUP = "run `nox -s setup`"
PROBE_S = 60.0  # deadline of one probing command, seconds: a remote daemon may be slow, a dead one must not hang us
WIDTH = 160  # of a line of the builder's that is shown; failures are read from the whole line
DENIED = 3  # the rank of an engine that works, and that this user may not use
STOP_S = 20.0  # how long a build that was told to stop may take before it is killed, seconds
CONTAINERD_ROOT = Path("/var/lib/containerd")
# Only a builder with BuildKit's syntax and exporters gets through this. Nothing runs, nothing is fetched or kept.
PROBE = "FROM scratch AS unused\nRUN --mount=type=secret,id=probe /probe\nFROM scratch\nENV PROBE=1\n"
PROBE_PODMAN = "FROM scratch\nENV PROBE=1\n"  # buildah builds unused stages, too


@dataclass(frozen=True)
class ContainerEngine:
    """A client whose engine answers and which can build."""

    client: Path
    kind: Literal["docker", "podman"]
    builder: Literal["buildx", "buildkit", "buildah"]
    version: str  # of the server
    endpoint: str  # where the engine listens; empty: podman on this machine, which has no daemon
    context: str  # docker's name for that endpoint
    storage: Path | None  # where images are stored; None: not on this machine
    own: builders.Builder | None = None  # a builder beside the engine, which gets what is built

    def __str__(self) -> str:
        return f"{self.kind} {self.version} ({self.client}, {self.builder})"


class Unusable(Exception):
    """Why a client is passed over, and the cure. `rank` orders reasons: the highest is nearest to working."""

    def __init__(self, reason: str, cure: str, rank: int) -> None:
        super().__init__(reason)
        self.cure, self.rank = cure, rank


def find() -> ContainerEngine:
    """The first client on the PATH that works: all of docker's in the PATH's order, then all of podman's.

    The environment variable KIMI_EAGLE3_CONTAINER_ENGINE forces one: a path to a client, or `docker` or `podman`.
    Raises Stop where none works, with what to run.
    """
    forced = os.environ.get(FORCE, "")
    # A user who names a Docker engine wants that one, and no podman in its place.
    named = ["docker"] if os.environ.get("DOCKER_HOST") or os.environ.get("DOCKER_CONTEXT") else ["docker", "podman"]
    clients = [Path(forced)] if "/" in forced else _on_path([forced] if forced else named)
    if not clients:
        raise Stop(f"no {forced or 'docker or podman'} client on the PATH: {SETUP}, which installs Docker")
    passed: list[tuple[Path, Unusable]] = []
    for client in clients:
        try:
            engine = _probe(client)
        except Unusable as why:
            passed.append((client, why))
            if why.rank == DENIED and not forced:
                break  # there is an engine, and another in its place would be no choice of the user's
            continue
        over = "; ".join(f"{c}: {why}" for c, why in passed)
        note(f"container engine: {engine}" + (f"; passed over {over}" if over else ""))
        return engine
    nearest = max((why for _, why in passed), key=lambda why: why.rank)
    reasons = "; ".join(f"{client} {why}" for client, why in passed)
    raise Stop(f"no container engine that works: {reasons}: {nearest.cure}" + (f" ({FORCE} is set)" if forced else ""))


def with_builder(engine: ContainerEngine, builder: builders.Builder) -> ContainerEngine:
    """The same engine, with a builder of the user's own. Raises Stop where that isn't to be had."""
    if engine.kind != "docker":
        raise Stop(
            f"--builder {builder.name} is one of Docker's buildx, and the engine here is {engine}: {FORCE}=docker"
        )
    builders.require(engine.client, builder)
    return replace(engine, builder="buildx", own=builder)


def _on_path(names: Sequence[str]) -> list[Path]:
    """Executables called `names`, each file once, in the order of names, then of the PATH."""
    found: dict[Path, Path] = {}
    for name in names:
        for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
            if client := shutil.which(name, path=folder or "."):
                found.setdefault(Path(client).resolve(), Path(client))
    return list(found.values())


def _ask(command: Sequence[str | Path], stdin: str = "", **env: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a short command. 127 where it can't be run, 124 past its deadline."""
    try:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_S,
            env={**os.environ, **env},
        )
    except OSError as error:
        return 127, "", f"can't be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return 124, "", f"gave no answer in {PROBE_S:.0f} s"
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def _probe(client: Path) -> ContainerEngine:
    """The engine behind a client. Told by its answer: podman also goes by the name of docker. Raises Unusable."""
    code, version, error = _ask([client, "--version"])
    if code:
        raise Unusable(f"doesn't work ({_last_line(error)})", SETUP, 0)
    return _probe_podman(client) if "podman" in version.lower() else _probe_docker(client)


def _probe_docker(client: Path) -> ContainerEngine:
    _, text, _ = _ask([client, "context", "inspect", "--format", "{{.Name}} {{.Endpoints.docker.Host}}"])
    context, _, endpoint = text.partition(" ")
    local = endpoint.startswith("unix://") or not endpoint
    _, text, error = _ask([client, "info", "--format", "{{json .}}"])
    info = _json(text)
    error = "; ".join(info.get("ServerErrors") or ()) or error
    if not info.get("ServerVersion"):
        if "permission denied" in error and local:
            cure = "join the group docker (`sudo usermod -aG docker $USER`, then log in again) or use sudo"
            raise Unusable(f"may not use the daemon's socket {endpoint} (permission denied)", cure, DENIED)
        if not local:
            cure = "check that host, and DOCKER_HOST or `docker context ls`"
            raise Unusable(f"gets no answer from the daemon at {endpoint} ({_last_line(error)})", cure, 1)
        raise Unusable(f"finds no daemon at {endpoint} (is it down?)", f"{SETUP}, which starts it", 1)
    storage = _docker_storage(info) if local else None
    build = ["build", "--output", "type=tar,dest=/dev/null", "-"]
    version = str(info["ServerVersion"])
    if _ask([client, "buildx", *build], PROBE, BUILDX_BUILDER=_buildx_builder(context))[0] == 0:
        return ContainerEngine(client, "docker", "buildx", version, endpoint, context, storage)
    if _ask([client, *build], PROBE, DOCKER_BUILDKIT="1")[0] == 0:
        return ContainerEngine(client, "docker", "buildkit", version, endpoint, context, storage)
    cure = f"install the package docker-buildx (docker-buildx-plugin in Docker's own packages), or {SETUP}"
    raise Unusable("has no builder (neither buildx nor BuildKit)", cure, 2)


def _probe_podman(client: Path) -> ContainerEngine:
    code, text, error = _ask([client, "info", "--format", "json"])
    info = _json(text)
    if code or not info:
        raise Unusable(f"doesn't work ({_last_line(error)})", f"see `{client} info`", 1)
    if info["store"].get("graphDriverName") == "vfs":
        cure = "set up fuse-overlayfs (see containers-storage.conf), or use Docker"
        raise Unusable("stores images with vfs, which copies the whole image for each layer", cure, 2)
    remote = bool(info["host"].get("serviceIsRemote"))
    with tempfile.TemporaryDirectory() as empty:
        options = ["--quiet", "--no-cache", "--secret", "id=probe,src=/dev/null", "--file", "-"]
        code, image, error = _ask([client, "build", *options, empty], PROBE_PODMAN)
    if code:
        raise Unusable(f"can't build ({_last_line(error)})", f"see `{client} info`; podman 4 or later is needed", 2)
    _ask([client, "rmi", image])
    endpoint = os.environ.get("CONTAINER_HOST", "podman's remote connection") if remote else ""
    storage = None if remote else Path(info["store"]["graphRoot"])
    return ContainerEngine(client, "podman", "buildah", info["version"]["Version"], endpoint, "", storage)


def _docker_storage(info: Mapping[str, Any]) -> Path | None:
    """The folder of images: Docker's own, or containerd's where Docker leaves images to it (Docker 29 does)."""
    root = Path(info.get("DockerRootDir") or "/nonexistent")
    address = str((info.get("Containerd") or {}).get("Address", ""))
    snapshotter = ["driver-type", "io.containerd.snapshotter.v1"] in (info.get("DriverStatus") or [])
    if snapshotter and "/docker/" not in address and CONTAINERD_ROOT.exists():
        return CONTAINERD_ROOT
    return root if root.exists() else None  # Docker Desktop: the folder is in its virtual machine


def _buildx_builder(context: str) -> str:
    """The builder inside the daemon, which has the name of the context, unless the user chose one.

    A builder in a container of its own knows none of the daemon's images.
    """
    return os.environ.get("BUILDX_BUILDER") or context or "default"


def _json(text: str) -> dict[str, Any]:
    """The object that a client printed, or the first of its list; empty where it printed something else."""
    with suppress(json.JSONDecodeError):
        data = json.loads(text)
        data = data[0] if isinstance(data, list) and data else data
        return data if isinstance(data, dict) else {}
    return {}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it says nothing"


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
    image = _inspect(engine, tag)
    try:
        if engine.kind == "podman":
            config = image_config.normal(image, image_config.podman_steps(image["History"]), epoch)
            pinned = _pull_config(engine, config, tag) if config and not engine.endpoint else None
        else:
            pinned = _load_config(engine, image, tag, epoch)
    except (Stop, KeyError, OSError) as why:
        note(f"{tag}: its config stays as the builder wrote it ({_last_line(str(why))})")
        return built
    if pinned is None:
        note(f"{tag}: its config stays as the builder wrote it: its layers are the same in each build, its id is not")
    return pinned or built


def _load_config(engine: ContainerEngine, image: Mapping[str, Any], tag: str, epoch: int) -> str | None:
    """Docker: the id of the image with the config of every build; None where it isn't to be had."""
    from docker.errors import DockerException

    with client(engine) as api:
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
            raise Stop(_last_line(str(error))) from None
    return pinned


def _pull_config(engine: ContainerEngine, config: bytes, tag: str) -> str | None:
    """podman: the same. The image as built stays, without a name: podman's cache is made of such images."""
    with tempfile.TemporaryDirectory(prefix="podman-") as folder:
        image_config.podman_folder(config, Path(folder))
        code, _, error = _ask([engine.client, "pull", "--quiet", f"dir:{folder}"])
    if code:
        raise Stop(_last_line(error))
    pinned = image_config.image_id(config)
    name(engine, pinned.removeprefix("sha256:"), tag)
    return pinned if image_id(engine, tag) == pinned else None


def build_environment(engine: ContainerEngine) -> dict[str, str]:
    """The environment variables that a build's command needs beside the user's."""
    if engine.builder == "buildx":
        builder = engine.own.name if engine.own else _buildx_builder(engine.context)
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
        command += [] if engine.endpoint else [f"--ulimit={name}={n}:{n}" for name, n in _ulimits()]
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


def _ulimits() -> list[tuple[str, int]]:
    """Limits that podman may set here: it asks for higher ones than the shell's, and can't raise them everywhere.

    It lowers its own number of processes to the kernel's pid_max before it starts a container.
    """
    limits = {
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "nproc": resource.getrlimit(resource.RLIMIT_NPROC)[1],
    }
    pid_max = int(Path("/proc/sys/kernel/pid_max").read_text())
    if not 0 < limits["nproc"] < pid_max:
        limits["nproc"] = pid_max
    return [(name, n) for name, n in limits.items() if n != resource.RLIM_INFINITY]


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
            return set(subprocess.run(command, capture_output=True, text=True, timeout=STOP_S).stdout.split())
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
        child.wait(STOP_S if steps else 0.0)
    child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(STOP_S)
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


def image_id(engine: ContainerEngine, ref: str) -> str | None:
    """The id (`sha256:...`) of an image, or None where there's no such image."""
    found = str(_inspect(engine, ref).get("Id", ""))
    return f"sha256:{found.removeprefix('sha256:')}" if found else None


def remove(engine: ContainerEngine, ref: str) -> None:
    """Take an image's tag away, and the image with its last one; its layers stay where another has them."""
    if image_id(engine, ref):
        with client(engine) as api:
            api.images.remove(ref, force=True)


def labels(engine: ContainerEngine, ref: str) -> dict[str, str]:
    """The labels of an image. Raises Stop where there's no such image."""
    if not (image := _inspect(engine, ref)):
        raise Stop(f"{engine} has no image {ref}: build it first")
    return dict(image["Config"].get("Labels") or {})


def names(engine: ContainerEngine, ref: str) -> list[str]:
    """The names with a tag that an image has; none where there's no such image."""
    return list(_inspect(engine, ref).get("RepoTags") or ())


def layers(engine: ContainerEngine, ref: str) -> list[str]:
    """The digests of the content of an image's layers, the lowest first; none where there's no such image."""
    return list((_inspect(engine, ref).get("RootFS") or {}).get("Layers") or ())


def _inspect(engine: ContainerEngine, ref: str) -> dict[str, Any]:
    """An image in the engine's words; empty where there's no such image. Raises Stop where there's no answer."""
    code, text, error = _ask([engine.client, "image", "inspect", ref])
    if code and not any(absent in error.lower() for absent in ("no such image", "not known", "no such object")):
        raise Stop(f"{engine} can't look at the image {ref}: {_last_line(error)}")
    return _json(text)


def at_hand(engine: ContainerEngine, ref: str) -> bool:
    """Whether an image is there for a build to start from."""
    known = engine.own is None or builders.digest(builders.layout(ref)) is not None
    return known and image_id(engine, ref) is not None


def description(engine: ContainerEngine, ref: str) -> dict[str, Any]:
    """An image in the engine's words. Raises Stop where there's no such image."""
    if image := _inspect(engine, ref):
        return image
    raise Stop(f"{engine} has no image {ref}: build or pull it first")


def name(engine: ContainerEngine, ref: str, tag: str) -> None:
    """Give an image another name. Raises Stop."""
    code, _, error = _ask([engine.client, "tag", ref, tag])
    if code:
        raise Stop(f"{ref} can't be named {tag}: {_last_line(error)}")


def forget(engine: ContainerEngine, prefix: str) -> None:
    """Take away every name of an image that begins with `prefix`; what nothing else needs goes with it."""
    _, text, _ = _ask([engine.client, "image", "ls", "--format", "{{.Repository}}:{{.Tag}}"])
    if names := [name for name in text.split() if name.removeprefix("localhost/").startswith(prefix)]:
        _ask([engine.client, "image", "rm", "--force", *names])


def disk_free(engine: ContainerEngine) -> int | None:
    """Free bytes where images are stored, or None where the engine's disk isn't this machine's."""
    return shutil.disk_usage(engine.storage).free if engine.storage else None


def require_disk(engine: ContainerEngine, gb: float) -> None:
    """Raises Stop where less than `gb` (10^9 bytes) are free for images. An unknown disk passes, and that is said."""
    free = disk_free(engine)
    if free is None:
        note(f"the images of {engine} are on another machine: not checked that {gb:g} GB are free there")
    elif free < gb * 1e9:
        cure = f"free some (`{engine.kind} system prune`, and `{engine.kind} image ls` shows what is big)"
        raise Stop(f"{engine.storage} has {free / 1e9:.1f} GB free and the build needs {gb:g} GB: {cure}")


@contextmanager
def client(engine: ContainerEngine, timeout: int = 600) -> Iterator["DockerClient"]:
    """The same engine through Docker's API, for the time of a `with` block. `timeout` in seconds, of each request.

    podman's API is served on a socket of our own meanwhile. Raises Stop where the API isn't reached.
    """
    from docker import DockerClient
    from docker.context import Context
    from docker.errors import DockerException

    if engine.endpoint and "://" not in engine.endpoint:
        raise Stop(f"{engine} is on another machine: set CONTAINER_HOST to the address of its socket")
    with tempfile.TemporaryDirectory(prefix="podman-") as folder:
        service: subprocess.Popen[bytes] | None = None
        options: dict[str, Any] = {"base_url": engine.endpoint or "unix:///var/run/docker.sock"}
        try:
            if engine.kind == "podman" and not engine.endpoint:
                options["base_url"] = f"unix://{folder}/api.sock"
                service = subprocess.Popen(
                    [engine.client, "system", "service", "--time=0", options["base_url"]],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )  # fmt: skip
                _await_socket(Path(folder, "api.sock"), service)
            elif engine.endpoint.startswith("ssh://"):
                options["use_ssh_client"] = True
            elif engine.endpoint.startswith("tcp://") and "DOCKER_HOST" in os.environ:
                options = {}  # the environment has the certificates, too
            elif engine.context not in ("", "default") and (found := Context.load_context(engine.context)):
                options["tls"] = found.TLSConfig
            try:
                api = DockerClient(timeout=timeout, **options) if options else DockerClient.from_env(timeout=timeout)
            except DockerException as error:
                raise Stop(f"{engine} doesn't answer at {engine.endpoint}: {_last_line(str(error))}") from None
            try:
                yield api
            finally:
                api.close()
        finally:
            if service:
                service.terminate()
                service.wait()


def _await_socket(socket: Path, service: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + STOP_S
    while not socket.exists():
        if service.poll() is not None or time.monotonic() > deadline:
            raise Stop(f"podman's API doesn't come up: try `podman system service --time=5 unix://{socket}`")
        time.sleep(0.05)


@contextmanager
def started(engine: ContainerEngine, ref: str, args: Sequence[str] = (), **options: Any) -> Iterator["Container"]:
    """A container that runs for the time of a `with` block. It is always removed, also after Ctrl-C.

    `options` are those of the Docker SDK's `containers.create` (environment, volumes, network_mode, entrypoint, ...).
    Raises Stop where it can't be started, or where the engine fails inside the block.
    """
    from docker.errors import APIError, DockerException, NotFound
    from docker.types import Ulimit
    from requests.exceptions import RequestException

    name = f"kimi-eagle3-{uuid.uuid4().hex[:12]}"
    if engine.kind == "podman" and not engine.endpoint:
        options.setdefault("ulimits", [Ulimit(name=limit, soft=n, hard=n) for limit, n in _ulimits()])
    with client(engine) as api:
        try:
            container = api.containers.create(ref, list(args), name=name, **options)
            container.start()
            yield container
        except APIError as error:
            raise Stop(f"{ref} {' '.join(args)} can't be run: {_last_line(str(error.explanation or error))}") from None
        except (DockerException, RequestException) as error:
            raise Stop(f"{ref} {' '.join(args)} can't be run: {_last_line(str(error))}") from None
        finally:
            with _to_the_end(), suppress(NotFound, RequestException):
                # By name: Ctrl-C may come before we have the answer to `create`.
                api.containers.get(name).remove(force=True, v=True)


@contextmanager
def _to_the_end() -> Iterator[None]:
    """A second Ctrl-C or SIGTERM waits until the block has ended: it would leave a container behind."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread alone
        return
    came: list[int] = []
    before = {one: signal.signal(one, lambda number, _: came.append(number)) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler or signal.SIG_DFL)
        for number in came:
            signal.raise_signal(number)


def run(
    engine: ContainerEngine, ref: str, args: Sequence[str] = (), *, timeout: float = 600.0, **options: Any
) -> tuple[int, str]:
    """Run a container to its end: its exit code and its output (standard output and errors together).

    `options` as for `started`. Raises Stop where it can't be started or doesn't end within `timeout` seconds.
    """
    from requests.exceptions import ConnectionError, ReadTimeout

    with started(engine, ref, args, **options) as container:
        try:
            code = int(container.wait(timeout=timeout)["StatusCode"])
        except (ReadTimeout, ConnectionError):
            last = _last_line(container.logs(tail=1).decode(errors="replace"))
            raise Stop(f"{ref} {' '.join(args)} didn't end within {timeout:g} s; its last line: {last}") from None
        return code, container.logs().decode(errors="replace")
