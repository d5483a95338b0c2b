"""Pushing to a registry with TLS and a login: who we are is known to it, and shows nowhere else."""

import base64
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import registries
from pushing import MOVING, NAME, pushed

from scripts.pipeline import oci, receipt, verify
from scripts.pipeline.say import Stop

pytestmark = [pytest.mark.image, pytest.mark.usefixtures("quick")]


def log_in(folder: Path, address: str, password: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `docker login` leaves it."""
    folder.mkdir(exist_ok=True)
    auth = base64.b64encode(f"{registries.USER}:{password}".encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {address: {"auth": auth}}}))
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))


@pytest.fixture
def guarded(registry_program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A registry with TLS of an authority of its own, and a login."""
    pair = registries.certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(pair[0]))
    with registries.serve(registry_program, tmp_path, certificate=pair, login=True) as place:
        yield place


def test_tls_of_ones_own_authority_and_the_docker_login_work_and_the_password_shows_nowhere(
    guarded: str, image: receipt.Image, proof: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    log_in(tmp_path / "login", guarded, registries.PASSWORD, monkeypatch)
    seen, ended = set(), threading.Event()

    def watch() -> None:
        while not ended.is_set():
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    seen.add(path.read_bytes())
                except OSError:
                    continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        pushed(guarded, image, "--receipt", proof)
        verify.job([f"{guarded}/{NAME}:{MOVING}"])
    finally:
        ended.set()
        watcher.join()
    shown = capfd.readouterr()
    auth = (tmp_path / "login" / "config.json").read_text().split('"')[-2]
    assert any(b"push" in line for line in seen), "the push's processes weren't seen: this shows nothing"
    for secret in (registries.PASSWORD, auth):
        assert secret not in shown.out + shown.err
        assert not any(secret.encode() in line for line in seen)


def test_a_credential_helper_is_asked(
    guarded: str, image: receipt.Image, proof: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "login"
    folder.mkdir()
    helper = folder / "docker-credential-mine"
    answer = f'{{"ServerURL": "", "Username": "{registries.USER}", "Secret": "{registries.PASSWORD}"}}'
    helper.write_text(f'#!/bin/sh\nread host\n[ "$1 $host" = "get {guarded}" ] && echo \'{answer}\'\n')
    helper.chmod(0o755)
    (folder / "config.json").write_text(f'{{"credHelpers": {{"{guarded}": "mine"}}}}')
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    pushed(guarded, image, "--receipt", proof)
    helper.write_text(f"#!/bin/sh\necho secret-of-{registries.PASSWORD}\nexit 1\n")
    with pytest.raises(Stop, match=r"the Docker login for \S+ can't be read: run `docker login") as stop:
        pushed(guarded, image, "--receipt", proof)
    assert registries.PASSWORD not in str(stop.value)


@pytest.mark.parametrize("password", ["wrong-battery-9035", None], ids=["wrong", "none"])
def test_wrong_credentials_are_one_line_without_them(
    guarded: str, image: receipt.Image, proof: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    password: str | None,
) -> None:  # fmt: skip
    why = "there is no Docker login for it"
    if password:
        log_in(tmp_path / "login", guarded, password, monkeypatch)
        why = "the Docker login isn't accepted"
    with pytest.raises(
        Stop, match=rf"401 \(UNAUTHORIZED .*\): {why}.*: run `docker login {re.escape(guarded)}`"
    ) as stop:
        pushed(guarded, image, "--receipt", proof)
    assert "\n" not in str(stop.value) and (password or "wrong") not in str(stop.value)
    log_in(tmp_path / "login", guarded, registries.PASSWORD, monkeypatch)
    assert oci.connect(guarded).tags(NAME) == []


def test_tls_that_is_not_trusted_is_refused(guarded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(
        Stop, match=r"no TLS that can be trusted \(self.signed certificate\): name your CA with SSL_CERT"
    ):
        oci.connect(guarded)


def test_http_is_for_this_machine_or_by_an_explicit_flag(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oci, "local", lambda host: False)
    with pytest.raises(Stop, match=r"no TLS that can be trusted .*--plain-http"):
        oci.connect(address)
    assert oci.connect(address, plain_http=True).tags(NAME) == []
