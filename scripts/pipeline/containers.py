"""Images and containers of the container engine (docker_or_podman.py finds it, image_build.py builds with it).

Images are asked about through the command line; running goes through Docker's API, which podman speaks too.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from scripts.pipeline import builders
from scripts.pipeline.say import Stop, note

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

PROBE_S = 60.0  # deadline of one short command, seconds: a remote daemon may be slow, a dead one must not hang us
STOP_S = 20.0  # how long what was told to stop, or to start, may take, seconds


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


def ask(command: Sequence[str | Path], stdin: str = "", **env: str) -> tuple[int, str, str]:
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


def parsed(text: str) -> dict[str, Any]:
    """The object that a client printed, or the first of its list; empty where it printed something else."""
    with suppress(json.JSONDecodeError):
        data = json.loads(text)
        data = data[0] if isinstance(data, list) and data else data
        return data if isinstance(data, dict) else {}
    return {}


def last_line(text: str) -> str:
    """The last line that isn't empty, cut to 300 characters: where a client says why."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it says nothing"


def ulimits() -> list[tuple[str, int]]:
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


def image_id(engine: ContainerEngine, ref: str) -> str | None:
    """The id (`sha256:...`) of an image, or None where there's no such image."""
    found = str(inspect(engine, ref).get("Id", ""))
    return f"sha256:{found.removeprefix('sha256:')}" if found else None


def remove(engine: ContainerEngine, ref: str) -> None:
    """Take an image's tag away, and the image with its last one; its layers stay where another has them."""
    if image_id(engine, ref):
        with client(engine) as api:
            api.images.remove(ref, force=True)


def labels(engine: ContainerEngine, ref: str) -> dict[str, str]:
    """The labels of an image. Raises Stop where there's no such image."""
    if not (image := inspect(engine, ref)):
        raise Stop(f"{engine} has no image {ref}: build it first")
    return dict(image["Config"].get("Labels") or {})


def names(engine: ContainerEngine, ref: str) -> list[str]:
    """The names with a tag that an image has; none where there's no such image."""
    return list(inspect(engine, ref).get("RepoTags") or ())


def layers(engine: ContainerEngine, ref: str) -> list[str]:
    """The digests of the content of an image's layers, the lowest first; none where there's no such image."""
    return list((inspect(engine, ref).get("RootFS") or {}).get("Layers") or ())


def inspect(engine: ContainerEngine, ref: str) -> dict[str, Any]:
    """An image in the engine's words; empty where there's no such image. Raises Stop where there's no answer."""
    code, text, error = ask([engine.client, "image", "inspect", ref])
    if code and not any(absent in error.lower() for absent in ("no such image", "not known", "no such object")):
        raise Stop(f"{engine} can't look at the image {ref}: {last_line(error)}")
    return parsed(text)


def at_hand(engine: ContainerEngine, ref: str) -> bool:
    """Whether an image is there for a build to start from."""
    known = engine.own is None or builders.digest(builders.layout(ref)) is not None
    return known and image_id(engine, ref) is not None


def description(engine: ContainerEngine, ref: str) -> dict[str, Any]:
    """An image in the engine's words. Raises Stop where there's no such image."""
    if image := inspect(engine, ref):
        return image
    raise Stop(f"{engine} has no image {ref}: build or pull it first")


def name(engine: ContainerEngine, ref: str, tag: str) -> None:
    """Give an image another name. Raises Stop."""
    code, _, error = ask([engine.client, "tag", ref, tag])
    if code:
        raise Stop(f"{ref} can't be named {tag}: {last_line(error)}")


def forget(engine: ContainerEngine, prefix: str) -> None:
    """Take away every name of an image that begins with `prefix`; what nothing else needs goes with it."""
    _, text, _ = ask([engine.client, "image", "ls", "--format", "{{.Repository}}:{{.Tag}}"])
    if names := [name for name in text.split() if name.removeprefix("localhost/").startswith(prefix)]:
        ask([engine.client, "image", "rm", "--force", *names])


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
                raise Stop(f"{engine} doesn't answer at {engine.endpoint}: {last_line(str(error))}") from None
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
        options.setdefault("ulimits", [Ulimit(name=limit, soft=n, hard=n) for limit, n in ulimits()])
    with client(engine) as api:
        try:
            container = api.containers.create(ref, list(args), name=name, **options)
            container.start()
            yield container
        except APIError as error:
            raise Stop(f"{ref} {' '.join(args)} can't be run: {last_line(str(error.explanation or error))}") from None
        except (DockerException, RequestException) as error:
            raise Stop(f"{ref} {' '.join(args)} can't be run: {last_line(str(error))}") from None
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
            last = last_line(container.logs(tail=1).decode(errors="replace"))
            raise Stop(f"{ref} {' '.join(args)} didn't end within {timeout:g} s; its last line: {last}") from None
        return code, container.logs().decode(errors="replace")
