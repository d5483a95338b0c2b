"""A registry over its HTTP API (OCI distribution spec 1.1): blobs, manifests, tags.

What fails for a moment is tried again; what fails for good is one line, without a header or a query, where secrets
travel.
"""

import hashlib
import ipaddress
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode, urljoin, urlsplit

import requests

from scripts.pipeline import network
from scripts.pipeline.logins import Again, Logins, content, nobody, reason
from scripts.pipeline.say import Stop, note

T = TypeVar("T")
WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each further try
TIMEOUT = (10, 300)  # seconds: to connect, and without a byte from the other side
SMALL = 8 << 20  # bytes; a manifest, a config or an attestation is never as big
HUB = "docker.io"
HUB_API = "registry-1.docker.io"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PATH = re.compile(r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*)*")
_FULL = ("no space left", '"err":28', "quota", "storage limit")  # 28: ENOSPC, as Debian's registry says it


@dataclass(frozen=True)
class Manifest:
    """A manifest or an index, byte for byte."""

    data: bytes
    media_type: str

    @property
    def digest(self) -> str:
        return digest(self.data)

    def json(self) -> dict[str, Any]:
        """Its content. Raises Stop where it is none."""
        try:
            found = json.loads(self.data)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise Stop(f"the manifest {self.digest} is no JSON object: push the image again")
        return found

    def descriptor(self, **more: Any) -> dict[str, Any]:
        return {"mediaType": self.media_type, "digest": self.digest, "size": len(self.data), **more}


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def canonical(content: Mapping[str, Any]) -> bytes:
    """JSON of which there is one form: the same content gives the same bytes."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def split(place: str) -> tuple[str, str]:
    """Host and path of `HOST[:PORT][/PATH]`. Raises Stop where it is none; a name alone would mean Docker Hub."""
    host, _, path = place.strip("/").partition("/")
    if "://" in place or not re.fullmatch(r"(?:[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?::\d+)?", host):
        raise Stop(f"{place!r} is no registry: write HOST/PATH, e.g. registry.example/team")
    if "." not in host and ":" not in host and host != "localhost":
        raise Stop(f"{place!r} doesn't begin with a host: write {HUB}/{place} if you mean Docker Hub")
    if path and not _PATH.fullmatch(path):
        raise Stop(f"{place!r} is no place in a registry: its path is in small letters, digits, and . _ - between them")
    return host, path


def local(host: str) -> bool:
    """Whether a host is this machine, by its name alone."""
    name = urlsplit(f"//{host}").hostname or ""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Registry:
    """A registry that answers. `plain` is http without TLS."""

    def __init__(self, host: str, plain: bool) -> None:
        self.host, self.plain = host, plain
        self._base = f"{'http' if plain else 'https'}://{HUB_API if host == HUB else host}"
        self._session = requests.Session()
        self._session.trust_env = not local(host)  # no proxy leads to this machine
        self._verify: str | bool = _bundle(host)
        self._logins = Logins(host, self._base, self._session, self._verify)

    # --- blobs
    def has(self, name: str, blob: str) -> int | None:
        """The size of a blob in bytes; None where it isn't there."""
        response = self._call("HEAD", f"/v2/{name}/blobs/{blob}", name, (200, 404))
        return int(response.headers.get("Content-Length", 0)) if response.status_code == 200 else None

    def blob(self, name: str, blob: str) -> bytes:
        """A small blob. Raises Stop where it isn't there, or its bytes aren't those of its digest."""
        data = self._call("GET", f"/v2/{name}/blobs/{blob}", name, (200,)).content
        if digest(data) != blob:
            raise Stop(f"{self.host} gives other bytes for {name}@{blob} than its digest says: the registry is broken")
        return data

    def mount(self, name: str, blob: str, source: str) -> bool:
        """Take a blob over from another repository of the same registry; False where it isn't there, or may not be."""
        path = f"/v2/{name}/blobs/uploads/?{urlencode({'mount': blob, 'from': source})}"
        response = self._call("POST", path, name, None, also=source)
        if response.status_code == 202 and (session := response.headers.get("Location")):
            self._call("DELETE", session, name, None)  # an upload that nobody wants
        return response.status_code == 201

    def upload(self, name: str, blob: str, content: Path | bytes) -> None:
        """Send a blob. An upload that broke off is begun anew: what the registry has of it can't be known."""
        size = len(content) if isinstance(content, bytes) else content.stat().st_size

        def once() -> None:
            begun = self._once("POST", f"/v2/{name}/blobs/uploads/", name, (202,))
            where = urljoin(begun.url, begun.headers["Location"])
            where += ("&" if urlsplit(where).query else "?") + urlencode({"digest": blob})
            headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
            if isinstance(content, bytes):
                self._once("PUT", where, name, (201,), content, headers)
            else:
                with content.open("rb") as file:
                    # An empty file has no length for requests, which would send it in chunks.
                    self._once("PUT", where, name, (201,), file if size else b"", headers)

        self._persist(f"{name}: sending {blob[:19]} ({size} bytes)", once)

    # --- manifests and tags
    def manifest(self, name: str, reference: str) -> Manifest | None:
        """The manifest at a tag or digest; None where there is none. Raises Stop where it isn't that digest's."""
        accept = {"Accept": ", ".join((MANIFEST, DOCKER_MANIFEST, INDEX, DOCKER_INDEX))}
        response = self._call("GET", f"/v2/{name}/manifests/{reference}", name, (200, 404), headers=accept)
        if response.status_code == 404:
            return None
        found = Manifest(response.content, response.headers.get("Content-Type", "").partition(";")[0].strip())
        if DIGEST.fullmatch(reference) and found.digest != reference:
            raise Stop(f"{self.host} gives another manifest for {name}@{reference}: the registry is broken")
        return found

    def put(self, name: str, reference: str, manifest: Manifest) -> bool:
        """Store a manifest under a digest or tag. True: the registry has entered it as a referrer of its subject."""
        headers = {"Content-Type": manifest.media_type}
        path = f"/v2/{name}/manifests/{reference}"
        return "OCI-Subject" in self._call("PUT", path, name, (200, 201), manifest.data, headers).headers

    def tags(self, name: str) -> list[str]:
        """The tags of a repository, sorted; none where there is no such repository."""
        path = f"/v2/{name}/tags/list"
        found: list[str] = []
        while path:
            response = self._call("GET", path, name, (200, 404))
            if response.status_code == 404:
                break
            found += content(response).get("tags") or []
            path = urljoin(response.url, response.links["next"]["url"]) if "next" in response.links else ""
        return sorted(set(found))

    def referrers(self, name: str, subject: str) -> list[dict[str, Any]] | None:
        """Descriptors of what refers to a manifest; None: this registry has no such API."""
        path = f"/v2/{name}/referrers/{subject}"
        found: list[dict[str, Any]] = []
        while path:
            response = self._call("GET", path, name, None)
            if response.status_code != 200 or INDEX not in response.headers.get("Content-Type", ""):
                return None
            found += content(response).get("manifests") or []
            path = urljoin(response.url, response.links["next"]["url"]) if "next" in response.links else ""
        return found

    # --- one request
    def _call(
        self, method: str, path: str, name: str, expected: tuple[int, ...] | None, body: bytes | None = None,
        headers: Mapping[str, str] | None = None, also: str = "",
    ) -> requests.Response:  # fmt: skip
        """A request that may be repeated. `expected`: the answers that are meant; None: all but a passing failure."""
        what = f"{method} {urlsplit(path).path}"
        return self._persist(what, lambda: self._once(method, path, name, expected, body, headers, also))

    def _persist(self, what: str, once: Callable[[], T]) -> T:
        for wait in (*WAITS, None):
            try:
                return once()
            except Again as why:
                if wait is None:
                    tries = len(WAITS) + 1
                    raise Stop(f"{self.host}: {what}: {why}, {tries} times: run it again later, it goes on") from None
                note(f"{self.host}: {what}: {why}; again in {wait:g} s")
                time.sleep(wait)
        raise AssertionError

    def _once(
        self, method: str, path: str, name: str, expected: tuple[int, ...] | None, body: Any = None,
        headers: Mapping[str, str] | None = None, also: str = "",
    ) -> requests.Response:  # fmt: skip
        url = urljoin(self._base, path)
        for attempt in (1, 2):
            try:
                response = self._session.request(
                    method, url, data=body, headers=dict(headers or {}), auth=self._logins.sign(name + also),
                    timeout=TIMEOUT, verify=self._verify,
                )  # fmt: skip
            except requests.exceptions.SSLError as error:
                if "EOF" in str(error):  # a connection that was cut
                    raise Again("connection cut") from None
                raise Stop(_untrusted(self.host, error)) from None
            except requests.exceptions.RequestException as error:
                raise Again(reason(error)) from None
            if response.status_code != 401 or attempt == 2 or not self._logins.answer(response, name, also):
                break
            if hasattr(body, "seek"):
                body.seek(0)
        return self._judged(response, method, expected)

    def _judged(self, response: requests.Response, method: str, expected: tuple[int, ...] | None) -> requests.Response:
        status = response.status_code
        if expected and status in expected:
            return response
        said = _said(response)
        what = f"{self.host}: {method} {urlsplit(response.url).path}: {status}{said}"
        if status == 429:
            raise Again(f"429{said}")
        if status in (413, 507) or (status >= 400 and any(word in response.text.lower() for word in _FULL)):
            raise Stop(f"{what}: the registry is full or has a limit: make room there, then run it again, it goes on")
        if status >= 500 and status not in (501, 505):
            raise Again(f"{status}{said}")
        if expected is None:
            return response
        if status in (401, 403):
            who = "the Docker login isn't accepted" if self._logins.given else "there is no Docker login for it"
            raise Stop(f"{what}: {who}, or may not do this: run `docker login {self.host}`")
        raise Stop(f"{what}: not what the distribution spec has: is {self.host} a registry?")


def connect(host: str, plain_http: bool = False) -> Registry:
    """The registry at a host. http is for this machine's own, and for `plain_http`.

    Raises Stop where nothing answers, or something else than a registry.
    """
    registry = Registry(host, plain_http)
    if local(host) and not plain_http:
        # Asked without a login. A server that speaks TLS gives no 200 or 401 to http.
        with _quiet():
            asked = f"http://{host}/v2/"
            answer = registry._session.get(asked, auth=nobody, timeout=TIMEOUT, allow_redirects=False)
            registry = Registry(host, answer.status_code in (200, 401))
    registry._call("GET", "/v2/", "", (200, 401))
    return registry


@contextmanager
def _quiet() -> Iterator[None]:
    try:
        yield
    except requests.exceptions.RequestException:
        return


def _bundle(host: str) -> str | bool:
    """The CA bundle for a host: the one that Docker has for it, or this machine's."""
    for folder in (Path("/etc/docker/certs.d"), Path("/etc/containers/certs.d")):
        own = folder / host / "ca.crt"
        if own.is_file():
            return str(own)
    bundle = network.ca_bundle()
    return str(bundle) if bundle else True


def _untrusted(host: str, error: requests.exceptions.SSLError) -> str:
    why = re.search(r"certificate verify failed: ([^(]+?) \(", str(error))
    cure = "name your CA with SSL_CERT_FILE, or say --plain-http for a registry without TLS"
    return f"{host}: no TLS that can be trusted ({why[1] if why else 'it speaks something else'}): {cure}"


def _said(response: requests.Response) -> str:
    """What the registry says is wrong."""
    errors = content(response).get("errors")
    first = errors[0] if isinstance(errors, list) and errors and isinstance(errors[0], dict) else {}
    words = " ".join(str(first.get(key) or "") for key in ("code", "message")).split()
    return f" ({' '.join(words)[:200]})" if words else ""
