"""health.py against a real server: the verdict, and where it asks."""

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.in_image import health

SCRIPT = Path(health.__file__)


class Server(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    Server.status = 200
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def check(proc: Path, arguments: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    proc.mkdir(exist_ok=True)
    (proc / "cmdline").write_bytes(b"\0".join(argument.encode() for argument in arguments) + b"\0")
    done = subprocess.run([sys.executable, SCRIPT, "--proc", proc], capture_output=True, text=True, env=env)
    assert done.stdout.count("\n") == 1 and done.stderr == ""
    return done


def test_a_server_that_answers_is_healthy(tmp_path: Path, port: int) -> None:
    assert check(tmp_path / "1", ["python", "/opt/venv/bin/vllm", "serve", "m", "--port", str(port)]).returncode == 0


def test_an_engine_that_stopped_is_unhealthy(tmp_path: Path, port: int) -> None:
    Server.status = 503
    done = check(tmp_path / "1", ["vllm", "--port", str(port)])
    assert done.returncode == 1 and "503" in done.stdout


def test_no_server_is_unhealthy(tmp_path: Path) -> None:
    done = check(tmp_path / "1", ["vllm", "--port", "1"])
    assert done.returncode == 1 and "doesn't answer" in done.stdout


def test_a_port_that_is_no_number_is_unhealthy(tmp_path: Path) -> None:
    assert check(tmp_path / "1", ["vllm", "--port", "x"]).returncode == 1


def test_a_proxy_of_the_environment_is_not_asked(tmp_path: Path, port: int) -> None:
    proxy = "http://127.0.0.1:1"
    assert check(tmp_path / "1", ["vllm", "--port", str(port)], http_proxy=proxy, HTTP_PROXY=proxy).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "url"),
    [
        ([], "http://127.0.0.1:8000/health"),
        (["docker-init", "--", "python3", "entrypoint.py", "--port=9000"], "http://127.0.0.1:9000/health"),
        (["vllm", "--port", "8000", "--port", "9000"], "http://127.0.0.1:9000/health"),
        (["python3", "-m", "sglang.launch_server", "--port", "30000"], "http://127.0.0.1:30000/health"),
        (["vllm", "--ssl_certfile", "c.pem", "--port", "9000"], "https://127.0.0.1:9000/health"),
        (["vllm", "--data-parallel-rpc-port", "9000"], "http://127.0.0.1:8000/health"),
    ],
)
def test_it_asks_where_the_server_was_told_to_listen(arguments: list[str], url: str) -> None:
    assert health.address(arguments, 8000) == url


def test_without_a_process_to_read_it_asks_the_default_port(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--proc", tmp_path], capture_output=True, text=True)
    assert ":8000/health" in done.stdout
