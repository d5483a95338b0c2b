"""The front door. `nox -l` lists the sessions; `nox -s SESSION -- --help` explains one."""

import sys
from pathlib import Path

import nox

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"error: nox runs on Python {sys.version.split()[0]} here, and the pipeline needs 3.11 or later")

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "typecheck", "check-patches", "tests"]


def job(session: nox.Session, name: str, *args: str) -> None:
    """Run one job of the pipeline; it works without nox too."""
    session.install("-r", "requirements.txt")
    # A build that is stopped needs time to end its step and to leave nothing behind.
    session.run("python", "-m", f"scripts.pipeline.{name}", *args, *session.posargs, interrupt_timeout=30)


@nox.session
def setup(session: nox.Session) -> None:
    """Install and start a container engine, where there is none and you are root."""
    job(session, "setup")


@nox.session(name="build-vllm")
def build_vllm(session: nox.Session) -> None:
    """Build a vLLM image, patched and verified inside the build."""
    job(session, "build", "vllm")


@nox.session(name="build-sglang")
def build_sglang(session: nox.Session) -> None:
    """Build an SGLang image, patched and verified inside the build."""
    job(session, "build", "sglang")


@nox.session(name="smoke-vllm")
def smoke_vllm(session: nox.Session) -> None:
    """Test a vLLM image, or a server that is up: start, health, drafts, acceptance length; write the receipt."""
    job(session, "smoke", "vllm")


@nox.session(name="smoke-sglang")
def smoke_sglang(session: nox.Session) -> None:
    """Test an SGLang image on GPUs, or a server that is up: start, health, drafts, acceptance length; the receipt."""
    job(session, "smoke", "sglang")


@nox.session
def reproduce(session: nox.Session) -> None:
    """Build a release twice without any cache, and show which layer, and which file in it, differs."""
    job(session, "reproduce")


@nox.session
def fetch(session: nox.Session) -> None:
    """Fill a folder with all that a build needs, by hash; builds with --offline then need no network."""
    job(session, "fetch")


@nox.session(name="push-vllm")
def push_vllm(session: nox.Session) -> None:
    """Push a vLLM image that has a receipt: by digest, with what is attached to it, then its tags."""
    job(session, "push", "vllm")


@nox.session(name="push-sglang")
def push_sglang(session: nox.Session) -> None:
    """Push an SGLang image that has a receipt: by digest, with what is attached to it, then its tags."""
    job(session, "push", "sglang")


@nox.session
def verify(session: nox.Session) -> None:
    """Check an image from its registry alone: manifest, labels, tags, receipt, provenance, SBOM, signature."""
    job(session, "verify")


@nox.session
def report(session: nox.Session) -> None:
    """Write one page of all receipts: what was tested, acceptance beside the published figures, what is open."""
    job(session, "report")


@nox.session(name="check-patches")
def check_patches(session: nox.Session) -> None:
    """Lint every series and apply it, exactly, to the pristine wheel it was made for."""
    job(session, "check_patches")


@nox.session(name="new-series")
def new_series(session: nox.Session) -> None:
    """Try the patches of a release on another version, and leave a series to work on."""
    job(session, "new_series")


@nox.session
def lock(session: nox.Session) -> None:
    """Write locks/ from pins.toml: every wheel by hash, every Debian package by version."""
    job(session, "lock")


@nox.session
def oracle(session: nox.Session) -> None:
    """Write a tiny target and drafter that are right if, and only if, an engine's hidden states are."""
    job(session, "oracle")


@nox.session
def bench(session: nox.Session) -> None:
    """Time a cold build against a plain pip install of the same locks, and a rebuild after a patch edit."""
    job(session, "bench")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests: units, series on pristine wheels, small images on the real container engine."""
    session.install("-r", "requirements.txt", "-r", "tests/requirements.txt")
    session.run("pytest", "tests/unit", "tests/series", "tests/image", "-m", "not slow", *session.posargs)


@nox.session(name="tests-slow")
def tests_slow(session: nox.Session) -> None:
    """Run the tests that take minutes: everything built twice, byte for byte; each fault on the twin's real server."""
    session.install("-r", "requirements.txt", "-r", "tests/requirements.txt")
    session.run("pytest", "tests/image", "-m", "slow", *session.posargs)


@nox.session(name="tests-engine")
def tests_engine(session: nox.Session) -> None:
    """Run the tests that need the real engines, inside the images that were built here."""
    job(session, "engine_tests")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style: ruff for Python, shellcheck for the shell scripts, jactionlint for the workflows."""
    session.install("-r", "tests/requirements.txt")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    steps = sorted(map(str, Path("scripts").glob("*/*.sh")))
    session.run("shellcheck", "--shell=sh", "--severity=warning", *steps)
    session.run("jactionlint", *sorted(map(str, Path(".github/workflows").glob("*.yml"))))


@nox.session
def typecheck(session: nox.Session) -> None:
    """Check types with mypy, strictly."""
    session.install("-r", "requirements.txt", "-r", "tests/requirements.txt")
    session.run("mypy")
