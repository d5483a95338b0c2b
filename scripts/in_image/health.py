"""Ask the server in this container whether it is healthy: the image's HEALTHCHECK.

`python3 health.py [--proc FOLDER]`. The port and the scheme come from the arguments of the container's first process,
as the user may have changed them; without any, from release.json.
Exit status: 0 or 1, with one line on standard output.
"""

import argparse
import http.client
import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path

SECONDS = 8  # below the time that the Dockerfile gives the check


def option(arguments: list[str], name: str) -> str | None:
    """The last value of `--name VALUE` or `--name=VALUE`, with underscores or dashes; None if it isn't given."""
    value = None
    for this, following in zip(arguments, [*arguments, ""][1:], strict=True):
        flag, equals, inline = this.partition("=")
        if flag.startswith("--") and flag[2:].replace("_", "-") == name:
            value = inline if equals else following
    return value


def address(arguments: list[str], default_port: int) -> str:
    """Where the server with these arguments answers."""
    scheme = "https" if option(arguments, "ssl-certfile") else "http"
    return f"{scheme}://127.0.0.1:{option(arguments, 'port') or default_port}/health"


def ask(url: str) -> tuple[bool, str]:
    """Whether the server answers with success, and one line that says what it answered."""
    # Never through a proxy of the environment. The certificate names the outside, not 127.0.0.1.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
    )
    try:
        with opener.open(url, timeout=SECONDS) as answer:
            return True, f"healthy: {url} answers {answer.status}"
    except urllib.error.HTTPError as error:
        return False, f"unhealthy: {url} answers {error.code}; the engine has stopped: see the container's log"
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        return False, f"unhealthy: {url} doesn't answer ({reason}); loading the model can take an hour: see the log"


def main() -> int:
    """Run as a command."""
    parser = argparse.ArgumentParser(description="Ask the server in this container whether it is healthy.")
    parser.add_argument("--proc", type=Path, default=Path("/proc/1"), help="the server's process; default: %(default)s")
    proc = parser.parse_args().proc
    try:
        arguments = (proc / "cmdline").read_text().split("\0")
    except OSError:
        arguments = []  # another user's process: the default port is the best guess
    try:
        port = json.loads(Path(__file__).resolve().parents[1].joinpath("release.json").read_text())["serve"]["port"]
    except (OSError, ValueError, KeyError):
        port = 8000
    healthy, line = ask(address(arguments, port))
    print(line)
    return 0 if healthy else 1


if __name__ == "__main__":
    raise SystemExit(main())
