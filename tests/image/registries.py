"""Registries to push to: Debian's, started as asked; and a proxy in front of one that counts, fails and meddles."""

import http.client
import json
import os
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

USER, PASSWORD = "kimi", "correct-horse-5309"
# The bcrypt of PASSWORD, with the lowest cost.
HTPASSWD = "kimi:$2b$04$abcdefghijklmnopqrstuunIztbjf6Q8fSARZIzimb5lI53jzYlrC\n"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve(
    program: Path, folder: Path, storage: Path | None = None, certificate: tuple[Path, Path] | None = None,
    login: bool = False,
) -> Iterator[str]:  # fmt: skip
    """`HOST:PORT` of a real registry on loopback, for the time of a `with` block."""
    address = f"127.0.0.1:{free_port()}"
    config: dict[str, Any] = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(storage or folder / "data")}},
        "http": {"addr": address},
    }
    if certificate:
        config["http"]["tls"] = {"certificate": str(certificate[0]), "key": str(certificate[1])}
    if login:
        (folder / "htpasswd").write_text(HTPASSWD)
        config["auth"] = {"htpasswd": {"realm": "test", "path": str(folder / "htpasswd")}}
    (folder / "config.yml").write_text(json.dumps(config))  # YAML has JSON in it
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([program, "serve", folder / "config.yml"], stdout=log, stderr=log, env=os.environ)
    try:
        for _ in range(100):
            with suppress(OSError), socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 1):
                break
            assert server.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
        yield address
    finally:
        server.terminate()
        server.wait()


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of its own authority for 127.0.0.1, and its key."""
    pair = folder / "ca.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(pair[0]), "-keyout", str(pair[1])]
    subprocess.run(command, check=True, capture_output=True)
    return pair


def tags(address: str, name: str) -> list[str]:
    """The tags of a repository, asked past the code under test."""
    try:
        with urllib.request.urlopen(f"http://{address}/v2/{name}/tags/list") as answer:
            return sorted(json.load(answer)["tags"] or [])
    except urllib.error.HTTPError as error:
        assert error.code == 404
        return []


@dataclass
class Proxy:
    """A proxy in front of a registry.

    `fault` is asked before each request: None lets it pass, a status answers it, `cut` drops the connection before the
    registry has heard of it, and `lost` after. `received` counts bytes of request heads and bodies.
    """

    backend: str
    address: str
    fault: Callable[[str, str], int | str | None] = lambda method, path: None
    referrers: bool = False
    received: int = 0
    requests: list[str] = field(default_factory=list)
    listed: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def _do(self) -> None:
        proxy = self.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        assert "chunked" not in self.headers.get("Transfer-Encoding", "")
        proxy.received += len(self.requestline) + len(str(self.headers)) + len(body)
        proxy.requests.append(f"{self.command} {self.path}")
        fault = proxy.fault(self.command, self.path)
        if fault == "cut":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if isinstance(fault, int):
            self._answer(fault, {}, b"{}")
            return
        if proxy.referrers and "/referrers/" in self.path:
            entries = proxy.listed.get(self.path.rpartition("/")[2], [])
            found = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}
            self._answer(200, {"Content-Type": OCI_INDEX}, json.dumps(found).encode())
            return
        backend = http.client.HTTPConnection(proxy.backend, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
        backend.request(self.command, self.path, body or None, headers)
        answer = backend.getresponse()
        data = answer.read()
        headers = {k: v for k, v in answer.getheaders() if k.lower() not in ("connection", "transfer-encoding")}
        backend.close()
        if fault == "lost":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if proxy.referrers and self.command == "PUT" and answer.status == 201 and "/manifests/" in self.path:
            content = json.loads(body)
            if subject := content.get("subject"):
                headers["OCI-Subject"] = subject["digest"]
                entry = {"mediaType": content["mediaType"], "digest": headers["Docker-Content-Digest"]}
                entry |= {"size": len(body), "artifactType": content["artifactType"]}
                proxy.listed.setdefault(subject["digest"], []).append(entry)
        self._answer(answer.status, headers, data)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _do

    def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def proxied(backend: str) -> Iterator[Proxy]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {}))
    server.daemon_threads = True
    proxy = server.RequestHandlerClass.proxy = Proxy(backend, f"127.0.0.1:{server.server_address[1]}")  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
