"""`nox -s setup`, with apt-get, docker and dockerd that are shell scripts on a PATH of the test's own."""

import os
import time
from pathlib import Path

import pytest

from scripts.pipeline import docker_or_podman, setup
from scripts.pipeline.say import Stop

WORKS = """case "$*" in
--version) echo "Docker version 1.2" ;;
"context inspect "*) echo "default unix:///run/d.sock" ;;
"info "*) echo '{"ServerVersion": "1.2", "DockerRootDir": "/tmp"}' ;;
esac"""
DOWN = """case "$*" in
--version) echo "Docker version 1.2" ;;
"context inspect "*) echo "default unix:///run/d.sock" ;;
"info "*) echo '{"ServerErrors": ["Cannot connect"]}' ;;
*) exit 1 ;;
esac"""


def script(folder: Path, name: str, body: str) -> None:
    """A program that notes its command line in `calls`."""
    (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >> "{folder}/calls"\n{body}\n')
    (folder / name).chmod(0o755)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []


def apt(folder: Path, body: str = "") -> None:
    script(folder, "apt-get", body)
    script(folder, "apt-cache", 'test "$2" = docker.io')


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Debian machine with root, with mmdebstrap, without a container engine and without systemd."""
    for name in (docker_or_podman.FORCE, "DOCKER_HOST", "DOCKER_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "os-release").write_text('PRETTY_NAME="Ubuntu 99"\nID=ubuntu\nID_LIKE=debian\n')
    (tmp_path / "there").touch()
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(setup, "SBIN", str(tmp_path / "bin"))
    monkeypatch.setattr(setup, "OS_RELEASE", tmp_path / "os-release")
    monkeypatch.setattr(setup, "SYSTEMD", tmp_path / "absent")
    monkeypatch.setattr(setup, "LOG", tmp_path / "dockerd.log")
    monkeypatch.setattr(setup, "BOOTSTRAP", {"mmdebstrap": tmp_path / "there"})
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return tmp_path / "bin"


def stop(argv: list[str] | None = None) -> str:
    with pytest.raises(Stop) as caught:
        setup.job(argv or [])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nothing_is_changed_where_everything_is_there(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script(machine, "docker", WORKS)
    apt(machine)
    setup.job([])
    assert "nothing was changed" in capsys.readouterr().out
    assert not any(call.startswith("apt") for call in calls(machine))


def test_docker_is_installed_and_its_daemon_started_where_there_is_none(machine: Path, tmp_path: Path) -> None:
    apt(machine)
    script(machine, "later", WORKS)
    started = f'/bin/cp "{machine}/later" "{machine}/docker"; exec /bin/sleep 3'
    script(machine, "dockerd", started)
    (machine / "dockerd").rename(tmp_path / "dockerd")
    apt(machine, f'case "$*" in *docker.io*) /bin/mv "{tmp_path}/dockerd" "{machine}/dockerd" ;; esac')
    setup.job([])
    done = [call for call in calls(machine) if call.startswith(("apt-get", "dockerd"))]
    assert done == ["apt-get install --yes --no-remove docker.io", "dockerd "]


def test_a_daemon_that_is_down_is_started_and_nothing_is_installed(machine: Path) -> None:
    apt(machine)
    script(machine, "docker", DOWN)
    script(machine, "later", WORKS)
    script(machine, "dockerd", f'/bin/mv "{machine}/later" "{machine}/docker"; exec /bin/sleep 3')
    setup.job([])
    assert not any(call.startswith("apt-get") for call in calls(machine))


def test_systemd_starts_the_daemon_where_it_runs(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "SYSTEMD", tmp_path)
    script(machine, "docker", DOWN)
    script(machine, "dockerd", "exit 1")
    script(machine, "later", WORKS)
    script(machine, "systemctl", f'/bin/mv "{machine}/later" "{machine}/docker"')
    setup.job([])
    assert "systemctl start docker" in calls(machine)
    assert "dockerd " not in calls(machine)


def test_a_missing_builder_is_installed_by_the_name_that_apt_knows(machine: Path) -> None:
    script(machine, "docker", WORKS.replace("esac", "*build*) exit 1 ;;\nesac"))
    script(machine, "dockerd", "exit 1")
    script(machine, "later", WORKS)
    script(machine, "apt-get", f'/bin/mv "{machine}/later" "{machine}/docker"')
    script(machine, "apt-cache", 'test "$2" != docker-buildx')
    setup.job([])
    assert "apt-get install --yes --no-remove docker-buildx-plugin" in calls(machine)


def test_mmdebstrap_is_installed_beside_an_engine_that_works(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(machine, "docker", WORKS)
    apt(machine)
    monkeypatch.setattr(setup, "BOOTSTRAP", {"mmdebstrap": machine / "absent"})
    setup.job([])
    assert [call for call in calls(machine) if call.startswith("apt-get")] == [
        "apt-get install --yes --no-remove mmdebstrap"
    ]


def test_an_installation_is_tried_again_once_after_an_update(machine: Path) -> None:
    apt(machine, f'case "$*" in *install*) test -e "{machine}/updated" ;; update) echo >"{machine}/updated" ;; esac')
    setup.apt_install(["a", "b"])
    install = "apt-get install --yes --no-remove a b"
    assert calls(machine) == [install, "apt-get update", install]


def test_an_installation_that_fails_twice_is_one_line(machine: Path) -> None:
    apt(machine, 'test "$1" = update')
    with pytest.raises(Stop, match="`apt-get install --yes --no-remove a` failed"):
        setup.apt_install(["a"])


def test_without_root_the_commands_are_told_and_nothing_is_done(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    apt(machine)
    line = stop()
    assert "sudo apt-get install --yes docker.io && sudo systemctl start docker" in line
    assert not calls(machine)
    script(machine, "dockerd", "exit 1")
    script(machine, "docker", DOWN)
    assert "apt-get" not in stop()
    assert "sudo systemctl start docker" in stop()


def test_another_distribution_is_one_line(machine: Path, tmp_path: Path) -> None:
    (tmp_path / "os-release").write_text('PRETTY_NAME="Fedora 99"\nID=fedora\n')
    apt(machine)
    assert "this is Fedora 99: install Docker" in stop()
    assert not calls(machine)


def test_a_remote_daemon_that_is_down_installs_nothing_here(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "ssh://far")
    script(machine, "docker", DOWN.replace("unix:///run/d.sock", "ssh://far"))
    apt(machine)
    assert "ssh://far" in stop()
    assert not any(call.startswith("apt") for call in calls(machine))


def test_a_daemon_that_dies_is_noticed_at_once_and_its_last_words_are_shown(
    machine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text("of an earlier daemon\n")
    script(machine, "docker", DOWN)
    script(machine, "dockerd", "echo failed to start: no iptables; exit 3")
    begun = time.monotonic()
    with pytest.raises(Stop, match=r"dockerd died \(exit code 3\): its last lines are above"):
        setup.start_daemon(log=tmp_path / "log", deadline=30)
    assert time.monotonic() - begun < 10
    out = capsys.readouterr().out
    assert "failed to start: no iptables" in out
    assert "earlier" not in out


def test_a_daemon_that_does_not_answer_is_stopped(machine: Path, tmp_path: Path) -> None:
    script(machine, "docker", DOWN)
    script(machine, "dockerd", f'echo $$ > "{tmp_path}/pid"; exec /bin/sleep 60')
    with pytest.raises(Stop, match=r"didn't answer in 0\.5 s and was stopped"):
        setup.start_daemon(log=tmp_path / "log", deadline=0.5)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_log_that_cannot_be_written_is_one_line(machine: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop, match=r"can't be started with its log in .*absent/log: No such file"):
        setup.start_daemon(log=tmp_path / "absent" / "log")


def test_help_explains_what_it_installs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        setup.job(["--help"])
    out = capsys.readouterr().out
    assert done.value.code == 0
    assert "docker.io" in out
    assert "mmdebstrap" in out
    assert "nox -s setup" in out
