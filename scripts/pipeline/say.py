"""What the pipeline says to people: steps with their time, one-line errors with the cure.

Plain lines, so that a log file and a terminal show the same.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stop(Exception):
    """The job can't go on. The message is one line: what is wrong, where, and the cure."""


def step(text: str) -> None:
    """Say what is being done now."""
    print(f"==> {text}", flush=True)


def note(text: str) -> None:
    """Say a detail of the current step."""
    print(f"    {text}", flush=True)


@contextmanager
def timed(text: str) -> Iterator[None]:
    """Say what is being done, then how long it took in seconds."""
    step(text)
    start = time.monotonic()
    yield
    note(f"done in {time.monotonic() - start:.1f} s")


def main(job: Callable[[list[str]], None]) -> None:
    """Run a job as a command: exit 0, or 1 with one line on standard error, or 130 when it is told to stop."""
    for ending in (signal.SIGTERM, signal.SIGHUP):  # what Ctrl-C cleans up, these do
        signal.signal(ending, signal.default_int_handler)
    try:
        job(sys.argv[1:])
    except Stop as stop:
        print(f"error: {stop}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    except (OSError, UnicodeDecodeError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("stopped: nothing half-made is left; run it again to go on", file=sys.stderr)
        raise SystemExit(130) from None
