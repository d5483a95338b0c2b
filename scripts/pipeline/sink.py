"""The way of an image from the container engine into a registry, layer by layer, and with no tag.

An engine's own push ends with a tag, and its `save` copies the whole image to a disk first. So the engine pushes to a
registry of ours on a loopback address, where it compresses, and leaves out what it knows to be there, as always. That
one keeps nothing: a layer that the real registry has isn't taken, any other goes on to it at once, and the manifest is
handed to the caller, who decides what it is stored as.
"""

import hashlib
import io
import re
import shutil
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import IO
from urllib.parse import parse_qs, urlsplit

from scripts.pipeline import containers, files, oci
from scripts.pipeline.say import Stop, note

PORT = 20517
AT_ONCE = 2  # layers that lie in the cache folder, compressed, on their way
HELD_S = 900.0  # how long a layer waits for another to get out of the way, seconds
PIECE = 1 << 20
Headers = Mapping[str, str]
NONE: Headers = MappingProxyType({})
V2 = {"Docker-Distribution-Api-Version": "registry/2.0"}


@dataclass
class Sink:
    """Where the engine's requests end. `sent` and `there` are bytes by layer; `failure` is the first that is final."""

    registry: oci.Registry
    name: str
    siblings: Sequence[str]
    tag: str
    folder: Path
    manifest: oci.Manifest | None = None
    failure: Stop | None = None
    sent: dict[str, int] = field(default_factory=dict)
    there: dict[str, int] = field(default_factory=dict)
    _held: set[str] = field(default_factory=set)
    _room: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(AT_ONCE))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def known(self, blob: str) -> int | None:
        """The size of a blob that the registry has, here or in a repository beside this one; None where it has none."""
        with self._lock:
            if blob in self.there or blob in self.sent:
                return self.there.get(blob, self.sent.get(blob))
            size = self.registry.has(self.name, blob)
            if size is None and (size := self._taken_over(blob)) is None:
                return None
            self.there[blob] = size
            return size

    def _taken_over(self, blob: str) -> int | None:
        for other in self.siblings:
            if self.registry.mount(self.name, blob, other):
                size = self.registry.has(self.name, blob)
                note(f"layer {blob[7:19]}: taken over from {other} ({size} bytes)")
                return size
        return None

    def pass_on(self, blob: str, path: Path) -> None:
        """Send a blob that the engine has handed over, unless the registry has it."""
        if self.known(blob) is None:
            self.registry.upload(self.name, blob, path)
            self.sent[blob] = path.stat().st_size
            note(f"layer {blob[7:19]}: sent ({self.sent[blob]} bytes)")

    def begin(self, session: str) -> Path:
        """The file of an upload. Waits while others are on their way: the engine hands over many at once."""
        if session not in self._held:
            self._room.acquire(timeout=HELD_S)
            self._held.add(session)
        return self.folder / session

    def end(self, session: str) -> None:
        """An upload is done, or given up."""
        (self.folder / session).unlink(missing_ok=True)
        if session in self._held:
            self._held.remove(session)
            self._room.release()


class Handler(BaseHTTPRequestHandler):
    """As much of the distribution spec as a push needs."""

    protocol_version = "HTTP/1.1"
    sink: Sink  # set in `serving`

    def do_GET(self) -> None:
        self._do(self._get)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        where = f"{urlsplit(self.path).path.rstrip('/')}/{uuid.uuid4().hex}"
        self._do(lambda: self._say(202, headers={"Location": where, "Range": "0-0"}))

    def do_PATCH(self) -> None:
        self._do(self._patch)

    def do_PUT(self) -> None:
        self._do(self._put_manifest if "/manifests/" in self.path else self._put_blob)

    def do_DELETE(self) -> None:
        self.sink.end(self._session())
        self._say(204)

    def _do(self, work: Callable[[], None]) -> None:
        """What fails for good is kept for the caller; the engine is told `denied`, which it doesn't try again."""
        try:
            if self.sink.failure:
                raise self.sink.failure
            work()
        except Stop as stop:
            self.sink.failure = self.sink.failure or stop
            self._refuse()
        except (ConnectionError, ValueError):
            self.sink.end(self._session())  # the engine went away
            self.close_connection = True
        except OSError as error:
            cure = "make room there"
            self.sink.failure = self.sink.failure or Stop(f"{self.sink.folder}: {error.strerror}: {cure}")
            self._refuse()

    def _refuse(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self._say(403, b'{"errors":[{"code":"DENIED","message":"see the push that started this"}]}', headers=V2)

    def _get(self) -> None:
        path = urlsplit(self.path).path
        blob = re.fullmatch(r"/v2/.+/blobs/(sha256:[0-9a-f]{64})", path)
        if path.rstrip("/") == "/v2":
            self._say(200, b"{}", headers=V2)
        elif blob and self.command == "HEAD" and (size := self.sink.known(blob[1])) is not None:
            self._say(200, length=size, headers={"Docker-Content-Digest": blob[1]})
        else:
            self._say(404, b'{"errors":[{"code":"BLOB_UNKNOWN","message":"not here"}]}')

    def _patch(self) -> None:
        path = self.sink.begin(self._session())
        with path.open("ab") as file:
            self._receive(file)
        last = max(path.stat().st_size - 1, 0)
        self._say(202, headers={"Location": urlsplit(self.path).path, "Range": f"0-{last}"})

    def _put_blob(self) -> None:
        session, blob = self._session(), parse_qs(urlsplit(self.path).query).get("digest", [""])[0]
        path = self.sink.begin(session)
        try:
            with path.open("a+b") as file:
                self._receive(file)
                file.seek(0)
                same = blob == f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
            if same:
                self.sink.pass_on(blob, path)
        finally:
            self.sink.end(session)
        if same:
            self._say(201, headers={"Docker-Content-Digest": blob})
        else:
            self._say(400, b'{"errors":[{"code":"DIGEST_INVALID","message":"other bytes than its digest"}]}')

    def _put_manifest(self) -> None:
        received = io.BytesIO()
        self._receive(received)
        manifest = oci.Manifest(received.getvalue(), self.headers.get("Content-Type", ""))
        if urlsplit(self.path).path.endswith(f"/manifests/{self.sink.tag}"):
            self.sink.manifest = manifest
        self._say(201, headers={"Docker-Content-Digest": manifest.digest})

    def _session(self) -> str:
        return re.sub(r"[^0-9a-f]", "", urlsplit(self.path).path.rpartition("/")[2])

    def _receive(self, file: IO[bytes]) -> None:
        """The request's body, of known length or in chunks."""
        if "chunked" not in self.headers.get("Transfer-Encoding", "").lower():
            self._copy(file, int(self.headers.get("Content-Length", 0)))
            return
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            self._copy(file, size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass

    def _copy(self, file: IO[bytes], size: int) -> None:
        while size:
            piece = self.rfile.read(min(size, PIECE))
            if not piece:
                raise ConnectionError
            file.write(piece)
            size -= len(piece)

    def _say(self, status: int, body: bytes = b"", length: int | None = None, headers: Headers = NONE) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: the sink says what matters."""


def address(host: str) -> str:
    """The loopback address for a registry: always the same one, since an engine remembers by it what it has sent."""
    a, b, c = (1 + byte % 254 for byte in hashlib.sha256(host.encode()).digest()[:3])
    return f"127.{a}.{b}.{c}"


@contextmanager
def serving(sink: Sink) -> Iterator[str]:
    """Serve a sink for the time of a `with` block: `ADDRESS:PORT`. Raises Stop where another push has the place."""
    where = (address(sink.registry.host), PORT)
    try:
        server = ThreadingHTTPServer(where, type("Bound", (Handler,), {"sink": sink}))
    except OSError as error:
        busy = f"{':'.join(map(str, where))} can't be listened on ({error.strerror})"
        raise Stop(f"{busy}: another push to {sink.registry.host} runs on this machine? wait for its end") from None
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield ":".join(map(str, where))
    finally:
        server.shutdown()
        server.server_close()


def hand_over(
    engine: containers.ContainerEngine, image_id: str, registry: oci.Registry, name: str, siblings: Sequence[str]
) -> tuple[oci.Manifest, Sink]:
    """Bring an image's layers and config into a repository, and return its manifest, which is not stored yet.

    `siblings` are repositories of the same registry that may have some of its layers. Raises Stop.
    """
    if engine.endpoint and not engine.endpoint.startswith("unix://"):
        raise Stop(f"{engine} is on another machine ({engine.endpoint}): push from that one")
    # Who doesn't know the tag, as another user of this machine, can't put a manifest in the engine's place.
    folder = files.cache() / "push" / address(registry.host)
    sink = Sink(registry, name, siblings, uuid.uuid4().hex, folder)
    with serving(sink) as where:
        # The address is ours alone now: what is in its folder was left by a push that was killed.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            said = _push(engine, image_id, where, f"{where}/{name}:{sink.tag}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    if sink.failure:
        raise sink.failure
    if said or sink.manifest is None:
        raise Stop(f"{engine} can't hand over {image_id[:19]}: {said or 'it sent no manifest'}")
    return sink.manifest, sink


def _push(engine: containers.ContainerEngine, image_id: str, where: str, reference: str) -> str:
    """Let the engine push an image. Returns what it says is wrong; empty where nothing is.

    The name that this takes is removed, and one that a push that was killed has left behind.
    """

    def ask(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [str(engine.client), *arguments]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")

    insecure = ["--tls-verify=false"] if engine.kind == "podman" else []
    tagged = ask("tag", image_id, reference)
    if tagged.returncode:
        return tagged.stderr.strip()[-300:]
    try:
        done = ask("push", *insecure, reference)
    finally:
        listed = ask("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()
        for ours in (name for name in listed if name.startswith(f"{where}/")):
            # The name alone: an image that has no other would go with it.
            if any(not name.startswith(f"{where}/") for name in containers.names(engine, ours)):
                ask("rmi", ours)
    lines = done.stderr.strip().splitlines() or ["it says nothing"]
    return lines[-1][-300:] if done.returncode else ""
