"""The registry client: names, logins by token, and what an error may say."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from scripts.pipeline import attest, oci, pins, push, sink, verify
from scripts.pipeline.say import Stop

SECRET = "hunter2-8846"
Asked = list[tuple[str, dict[str, list[str]], str]]  # method, query or form, authorization
Service = tuple[str, Asked]


@pytest.mark.parametrize(
    ("place", "parts"),
    [
        ("registry.example/team", ("registry.example", "team")),
        ("localhost", ("localhost", "")),
        ("127.0.0.1:5000/a/b", ("127.0.0.1:5000", "a/b")),
        ("[::1]:5000/a", ("[::1]:5000", "a")),
        ("docker.io/me/", ("docker.io", "me")),
    ],
)
def test_a_place_is_a_host_and_a_path(place: str, parts: tuple[str, str]) -> None:
    assert oci.split(place) == parts


@pytest.mark.parametrize("place", ["team", "https://r.example/a", "r.example/A", "r.example/a//b", "", "r.example/a:1"])
def test_what_is_no_place_is_one_line(place: str) -> None:
    with pytest.raises(Stop) as stop:
        oci.split(place)
    assert "\n" not in str(stop.value)


def test_this_machine_is_known_by_name_and_address() -> None:
    assert all(map(oci.local, ("localhost:5000", "127.0.0.1", "127.9.9.9:1", "[::1]:5000")))
    assert not any(map(oci.local, ("registry.example", "10.0.0.1:5000", "localhost.example", "127.0.0.1.example")))


def test_an_image_is_named_by_digest_or_tag() -> None:
    digest = f"sha256:{'0' * 64}"
    assert verify.parse(f"r.example:1/a/b@{digest}") == ("r.example:1", "a/b", digest)
    assert verify.parse(f"r.example/a/b:1@{digest}") == ("r.example", "a/b", digest)
    assert verify.parse("r.example:1/a/b:0.16.0-eagle3-0") == ("r.example:1", "a/b", "0.16.0-eagle3-0")


def test_the_fixed_tag_has_version_series_and_inputs_and_the_repository_the_engine() -> None:
    labels = {"kimi-eagle3.series": "0123456789abcdef" * 4}
    assert push.fixed_tag("0.16.0", labels) == f"0.16.0-eagle3-0123456789ab-{attest.inputs(labels)[:8]}"
    all_pins = pins.load()
    assert push.repository(all_pins, "team", "sglang") == "team/kimi-k2.5-eagle3-sglang"
    assert push.repository(all_pins, "", "vllm") == "kimi-k2.5-eagle3-vllm"


def test_the_policy_is_that_of_the_longest_prefix_cut_at_a_slash() -> None:
    policy = pins.Policy("S3", (("r.example", "S4"), ("r.example/try", "S3"), ("r.example/try/hard", "S4")))
    found = {place: policy.level(place) for place in ("r.example", "r.example/try/it", "r.example/try/hard/a")}
    assert found == {"r.example": "S4", "r.example/try/it": "S3", "r.example/try/hard/a": "S4"}
    assert policy.level("r.example/trying") == "S4"
    assert policy.level("r.example.org") == policy.level("other") == "S3"


@pytest.mark.parametrize("entry", ['level = "S5"', 'level = "S2"', 'prefix = "r.example"\n'])
def test_a_policy_that_is_not_whole_is_one_line(tmp_path: Path, entry: str) -> None:
    path = tmp_path / "pins.toml"
    path.write_text(f'{pins.PINS.read_text()}\n[[push.registry]]\nprefix = "x"\n{entry}'.replace('"x"\nprefix = ', ""))
    with pytest.raises(Stop, match=r"pins\.toml"):
        pins.load(path)


def test_an_engine_finds_the_sink_of_a_registry_at_the_same_address_each_time() -> None:
    assert sink.address("r.example") == sink.address("r.example") != sink.address("r.example:1")
    assert sink.address("r.example").startswith("127.")


class _Tokens(BaseHTTPRequestHandler):
    """A registry that wants a token, and the service that gives it."""

    asked: Asked

    def do_GET(self) -> None:
        parts, authorization = urlsplit(self.path), self.headers.get("Authorization", "")
        form = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        if parts.path == "/token":
            self.asked.append((self.command, parse_qs(parts.query) | parse_qs(form), authorization))
            good = authorization.startswith("Basic ") or "refresh_token" in form
            self._say(200 if good else 401, {"token": f"t-{SECRET}"} if good else {})
        elif authorization == f"Bearer t-{SECRET}":
            self._say(200, {"tags": ["1"]})
        else:
            self.send_response(401)
            realm = f"http://{self.headers['Host']}/token"
            scope = "repository:team/a:pull"
            self.send_header("WWW-Authenticate", f'Bearer realm="{realm}",service="here",scope="{scope}"')
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_POST = do_GET

    def _say(self, status: int, content: dict[str, object]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Service]:
    asked: Asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Tokens,), {"asked": asked}))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setattr(oci, "WAITS", ())
    yield f"127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()
    server.server_close()


def log_in(folder: Path, host: str, entry: dict[str, str]) -> None:
    (folder / "config.json").write_text(json.dumps({"auths": {host: entry}}))


def test_a_token_is_asked_for_with_the_login_and_kept(tokens: Service, tmp_path: Path) -> None:
    host, asked = tokens
    log_in(tmp_path, host, {"auth": "a2ltaTpodW50ZXIy"})
    registry = oci.connect(host)
    before = len(asked)
    assert registry.tags("team/a") == registry.tags("team/a") == ["1"]
    ((method, query, authorization),) = asked[before:]
    assert (method, query["scope"], query["service"]) == ("GET", ["repository:team/a:pull"], ["here"])
    assert authorization == "Basic a2ltaTpodW50ZXIy"


def test_an_identity_token_is_exchanged_in_the_body_and_not_in_the_address(tokens: Service, tmp_path: Path) -> None:
    host, asked = tokens
    log_in(tmp_path, host, {"identitytoken": SECRET})
    assert oci.connect(host).tags("team/a") == ["1"]
    method, form, authorization = asked[-1]
    assert (method, form["grant_type"], form["refresh_token"], authorization) == (
        "POST",
        ["refresh_token"],
        [SECRET],
        "",
    )


def test_without_a_login_the_answer_is_one_line(
    tokens: Service,
) -> None:
    with pytest.raises(
        Stop, match=r"401: there is no Docker login for it, or may not do this: run `docker login"
    ) as stop:
        oci.connect(tokens[0]).tags("team/a")
    assert "\n" not in str(stop.value)


def test_a_login_is_not_sent_to_a_service_without_tls_unless_the_registry_has_none(
    tokens: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, asked = tokens
    log_in(tmp_path, host, {"auth": "a2ltaTpodW50ZXIy"})
    registry = oci.Registry(host, plain=True)
    monkeypatch.setattr(registry._logins, "_base", f"https://{host}")
    with pytest.raises(Stop, match=r"wants the login sent to http://\S+/token, without TLS: it isn't sent"):
        registry.tags("team/a")
    assert asked == []


def test_no_proxy_is_asked_for_a_registry_of_this_machine(
    tokens: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    log_in(tmp_path, tokens[0], {"auth": "a2ltaTpodW50ZXIy"})
    assert oci.connect(tokens[0]).tags("team/a") == ["1"]


def test_a_registry_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oci, "WAITS", (0.0,))
    with pytest.raises(
        Stop, match=r"127\.0\.0\.1:1: GET /v2/: connection refused, 2 times: run it again later"
    ) as stop:
        oci.connect("127.0.0.1:1")
    assert "\n" not in str(stop.value)
