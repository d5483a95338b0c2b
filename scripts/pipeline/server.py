"""A server under test: a container that we start, or one that is already up; and what is asked of it over HTTP."""

import http.client
import json
import os
import re
import shlex
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from scripts.pipeline import adapters, containers
from scripts.pipeline.adapters import Adapter
from scripts.pipeline.ladder import Answer
from scripts.pipeline.say import Stop

if TYPE_CHECKING:
    from docker.models.containers import Container

PORT = 8000  # inside a container
POLL_S = 0.5
SAY_S = 5.0  # between two lines of progress where there's no terminal
ASK_S = 5.0  # for an answer that costs the server nothing
GENERATE_S = 300.0  # for an answer that has to be generated
SETTLE_S = 10.0  # how long counters may lag behind an answer
WHOLE = 100_000  # lines of a log that count as all of it
LINE = 110  # characters of a log line that are shown as progress


class Server(Protocol):
    """Where a server answers, and what is known of its process."""

    @property
    def url(self) -> str:
        """http://HOST:PORT."""

    def ended(self) -> str | None:
        """How its process ended, in a few words; None while it runs, or where it isn't ours."""

    def log(self, lines: int) -> list[str]:
        """The last lines of its log, without empty ones; none where it isn't ours."""


@dataclass(frozen=True)
class Running:
    """A server that somebody else started."""

    url: str

    def ended(self) -> str | None:
        return None

    def log(self, lines: int) -> list[str]:
        return []


@dataclass(frozen=True)
class Launch:
    """A container that serves: as the Docker SDK wants it, and as the `docker run` line that does the same.

    `mounts` maps a folder of this machine, or the name of a volume, to (path inside, `ro` or `rw`). A variable whose
    value is None gets the one that it has here, and the line doesn't show it.
    """

    image: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str | None] = field(default_factory=dict)
    mounts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    gpus: str = ""  # empty, or `all`, or the numbers of some

    def line(self, client: str) -> str:
        """The command for a shell. docker and podman differ in how they name GPUs."""
        command = [client, "run", "--rm", "--publish", f"127.0.0.1::{PORT}"]
        if self.gpus:
            devices = self.gpus if self.gpus == "all" else f'"device={self.gpus}"'
            command += ["--device", f"nvidia.com/gpu={self.gpus}"] if client == "podman" else ["--gpus", devices]
            command += ["--ipc=host"]
        else:
            command += ["--shm-size", "1g"]
        for name, value in self.environment.items():
            command += ["--env", name if value is None else f"{name}={value}"]
        command += [part for at, (to, mode) in self.mounts.items() for part in ("--volume", f"{at}:{to}:{mode}")]
        return shlex.join([*command, self.image, *self.arguments])

    def options(self, kind: str) -> dict[str, Any]:
        """Options for `containers.started`, with an engine of that kind."""
        from docker.types import DeviceRequest

        options: dict[str, Any] = {
            "ports": {f"{PORT}/tcp": ("127.0.0.1", None)},
            "environment": {n: os.environ.get(n, "") if v is None else v for n, v in self.environment.items()},
            "volumes": {at: {"bind": to, "mode": mode} for at, (to, mode) in self.mounts.items()},
        }
        if not self.gpus:
            return options | {"shm_size": "1g"}
        if kind == "podman":
            return options | {"ipc_mode": "host", "devices": [f"nvidia.com/gpu={one}" for one in self.gpus.split(",")]}
        which = {"count": -1} if self.gpus == "all" else {"device_ids": self.gpus.split(",")}
        return options | {"ipc_mode": "host", "device_requests": [DeviceRequest(capabilities=[["gpu"]], **which)]}


@dataclass(frozen=True)
class Contained:
    """A server in a container of ours."""

    url: str
    container: "Container"

    def ended(self) -> str | None:
        self.container.reload()
        state = self.container.attrs["State"]
        if state["Running"]:
            return None
        memory = ", out of memory" if state.get("OOMKilled") else ""
        return f"its process ended with exit code {state['ExitCode']}{memory}"

    def log(self, lines: int) -> list[str]:
        return tidy(self.container.logs(tail=lines * 2).decode(errors="replace"))[-lines:]

    def run(self, *command: str) -> str:
        """The output of a command inside the container; empty where it fails."""
        code, output = self.container.exec_run(list(command))
        return output.decode(errors="replace").strip() if code == 0 and isinstance(output, bytes) else ""


def tidy(log: str) -> list[str]:
    """Lines as a terminal would show them at last: no colours, of a progress bar its last state, none empty."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", log)
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in plain.split("\n")]
    return [line for line in lines if line]


_CAUSE = re.compile(r"(?:^|\s)((?:\w+\.)*[A-Z]\w*(?:Error|Exception): \S.*)")


def cause(lines: Sequence[str]) -> str:
    """What a log says went wrong: its first exception. The last one only says that another process has failed."""
    found = [match[1] for line in lines if (match := _CAUSE.search(line))]
    return found[0] if found else lines[-1].strip() if lines else ""


@contextmanager
def contained(engine: containers.ContainerEngine, launch: Launch) -> Iterator[Contained]:
    """A container that serves for the time of a `with` block, on a port of loopback that was free.

    Raises Stop where it can't be started.
    """
    with containers.started(engine, launch.image, launch.arguments, **launch.options(engine.kind)) as container:
        container.reload()
        bound = (container.attrs["NetworkSettings"]["Ports"] or {}).get(f"{PORT}/tcp")
        # Where the process has ended already there is no port; whoever waits for it finds out why.
        yield Contained(f"http://127.0.0.1:{bound[0]['HostPort'] if bound else 0}", container)


def ask(server: Server, path: str, body: Mapping[str, Any] | None = None, key: str = "", timeout: float = ASK_S) -> str:
    """GET, or POST of JSON. Never through a proxy of the environment. Raises OSError for any answer but success,
    TimeoutError among them for none at all.
    """
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode() if body else None, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as answer:
            return str(answer.read().decode(errors="replace"))
    except urllib.error.HTTPError as error:
        said = " ".join(error.read().decode(errors="replace").split())
        raise OSError(f"{path} answers {error.code}: {said[:300] or error.reason}") from None
    except TimeoutError:
        raise TimeoutError(f"{path} gave no answer in {timeout:g} s") from None
    except urllib.error.URLError as error:
        raise OSError(f"{path} doesn't answer ({error.reason})") from None
    except http.client.HTTPException as error:
        raise OSError(f"{path}: no HTTP came back ({type(error).__name__})") from None


@dataclass(frozen=True)
class Waited:
    """How waiting for a server went; `last` is what its log says: why it ended, else its last line."""

    seconds: float
    ended: str | None
    healthy: bool
    last: str


def wait(server: Server, health: str, deadline: float) -> Waited:
    """Wait until `health` answers, the process ends, or `deadline` seconds have passed; progress is shown meanwhile."""
    start = time.monotonic()
    said = -SAY_S
    terminal = sys.stdout.isatty()
    try:
        while True:
            ended = server.ended()
            healthy = False
            if ended is None:
                try:
                    ask(server, health)
                    healthy = True
                except OSError:
                    pass
            seconds = time.monotonic() - start
            last = next(iter(reversed(server.log(1))), "").strip()
            if ended is not None or healthy or seconds >= deadline:
                return Waited(seconds, ended, healthy, cause(server.log(WHOLE)) if ended else last)
            if terminal or seconds - said >= SAY_S:
                said = seconds
                line = f"    {seconds:.0f} s of {deadline:.0f} s: {last[:LINE] or 'no answer yet'}"
                print(f"\r\x1b[K{line}" if terminal else line, end="" if terminal else "\n", flush=True)
            time.sleep(min(POLL_S, max(0.0, deadline - seconds)))
    finally:
        if terminal:
            print("\r\x1b[K", end="", flush=True)


class Garbled(Exception):
    """What came back is no answer of this interface. The message is one line."""


def generate(server: Server, adapter: Adapter, model: str, prompt: Mapping[str, Any], max_tokens: int) -> Answer:
    """Ask for a greedy answer of exactly `max_tokens`; `prompt` is {"prompt": ...} or {"messages": ...}.

    Raises OSError where the request fails, Garbled where what comes back can't be read.
    """
    path, body = adapters.request(adapter, model, prompt, max_tokens)
    text = ask(server, path, body, os.environ.get(adapter.api_key, ""), GENERATE_S)
    try:
        answer = adapters.answer(adapter, json.loads(text))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Garbled(f"{path} answers {text[:80]!r}, which can't be read ({type(error).__name__}: {error})") from None
    if answer.generated != max_tokens or (answer.tokens is not None and len(answer.tokens) != answer.generated):
        raise Garbled(
            f"{path} gave {answer.generated if answer.tokens is None else len(answer.tokens)} tokens and counted"
            f" {answer.generated}; {max_tokens} were asked for"
        )
    return answer


def served_version(server: Server, adapter: Adapter) -> str | None:
    """The version that the server answers; None where it says none."""
    try:
        text = ask(server, adapter.version, key=os.environ.get(adapter.api_key, ""))
        found = json.loads(text).get(adapter.version_key)
    except (OSError, ValueError, AttributeError):
        return None
    return str(found) if found else None


def model_name(server: Server, adapter: Adapter) -> str:
    """The name that requests have to give. Raises OSError, or Garbled."""
    text = ask(server, adapter.models, key=os.environ.get(adapter.api_key, ""))
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise Garbled(f"{adapter.models} answers {text[:80]!r} ({type(error).__name__})") from None


def hardware(server: Server) -> str:
    """What the server runs on: its GPUs, or its processor, as its container sees them."""
    if not isinstance(server, Contained):
        return f"not known: {server.url} was not started by this test"
    if gpus := server.run("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"):
        names = gpus.splitlines()
        return "; ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    info = server.run("cat", "/proc/cpuinfo")
    models = re.findall(r"^model name\s*: (.*)$", info, re.MULTILINE)
    return f"{len(models)} x {models[0]} (CPU)" if models else f"not known ({os.uname().machine})"


def mounted(folder: Path) -> str:
    """A folder as a mount. Raises Stop where it is none, or where a model can't be read by another user."""
    folder = folder.resolve()
    if not folder.is_dir():
        raise Stop(
            f"no folder {folder}: a folder with config.json is needed, or a model's name without a leading / or ."
        )
    if not (folder / "config.json").is_file():
        raise Stop(f"{folder} has no config.json, so it holds no model")
    return str(folder)
