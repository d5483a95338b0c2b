"""Install what building needs on this machine, and start it: a container engine (Docker), and mmdebstrap.

Changes nothing where a container engine works and mmdebstrap is there. Otherwise, as root on Debian, Ubuntu and their
relatives, it installs the distribution's own packages (docker.io, a builder for it, mmdebstrap and
debian-archive-keyring), and starts Docker's daemon: through systemd, or by itself where none runs. It says each thing
that it does, and removes no package. No other session installs anything on the machine.
"""

import argparse
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.pipeline import docker_or_podman, say
from scripts.pipeline.say import Stop, note, step

DOCKER = "docker.io"
BUILDERS = ("docker-buildx", "docker-buildx-plugin")  # the distribution's name, and the one in Docker's own packages
# Each package of the bootstrapped base, and a file that shows that it is there.
BOOTSTRAP = {
    "mmdebstrap": Path("/usr/bin/mmdebstrap"),
    "debian-archive-keyring": Path("/usr/share/keyrings/debian-archive-keyring.gpg"),
}
LOG = Path("/var/log/dockerd.log")
DEADLINE_S = 90.0  # of the daemon's start, seconds: containerd, the network and iptables come first
SBIN = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))  # su keeps a user's PATH
OS_RELEASE = Path("/etc/os-release")
SYSTEMD = Path("/run/systemd/system")


def job(argv: list[str]) -> None:
    """Make this machine able to build, or say in one line what its owner has to do."""
    parser = argparse.ArgumentParser(
        prog="nox -s setup --", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(argv)
    step("look for a container engine that works")
    why = _engine_trouble()
    missing = [package for package, file in BOOTSTRAP.items() if not file.exists()]
    if not why and not missing:
        note("nothing to do: it works, and mmdebstrap is there for the base image; nothing was changed")
        return
    host = os.environ.get("DOCKER_HOST", "")
    if why and host and not host.startswith("unix://"):
        raise why  # installing an engine here would not make that one answer
    if os.geteuid():
        _not_root(why, missing)
        return
    if why:
        note(str(why))
        _make_engine_work()
    if missing:
        step(f"install {' '.join(missing)}, for the base image where no registry is reached")
        apt_install(missing)
    step(f"ready: {docker_or_podman.find()}")


def _engine_trouble() -> Stop | None:
    """Why no container engine works, or None."""
    try:
        docker_or_podman.find()
    except Stop as stop:
        return stop
    return None


def _not_root(why: Stop | None, missing: Sequence[str]) -> None:
    if not why:
        note("nothing was changed: the container engine works. Not root, so not installed: " + " ".join(missing))
        note(f"only needed where no registry is reached: sudo apt-get install {' '.join(missing)}")
    elif "permission denied" in str(why):
        raise why  # it tells what to do, and there is nothing to install
    else:
        note(str(why))
        install = "" if shutil.which("dockerd", path=SBIN) else f"sudo apt-get install --yes {DOCKER} && "
        raise Stop(
            f"setup needs root: run `{install}sudo systemctl start docker && sudo usermod -aG docker $USER`, "
            "then log in again; or `sudo` this session"
        )


def _require_debian() -> None:
    """Raises Stop where packages don't come through apt from Debian or a relative of it."""
    lines = OS_RELEASE.read_text().splitlines() if OS_RELEASE.exists() else []
    facts = {key: value.strip('"') for key, _, value in (line.partition("=") for line in lines)}
    if "debian" not in f"{facts.get('ID', '')} {facts.get('ID_LIKE', '')}".split() or not shutil.which("apt-get"):
        raise Stop(
            f"setup installs on Debian and its relatives only, and this is {facts.get('PRETTY_NAME', 'unknown')}: "
            "install Docker with buildx, or podman 4 or later, with its own package manager"
        )


def _make_engine_work() -> None:
    """Install and start what is missing, the least first. Raises Stop where the engine still doesn't work then."""
    if not shutil.which("dockerd", path=SBIN):
        packages = [DOCKER, *_known(BUILDERS[:1])]
        step(f"install {' '.join(packages)}")
        apt_install(packages)
    if not daemon_answers():
        start_daemon()
    if _engine_trouble() and (builder := _known(BUILDERS)[:1]):
        step(f"install {builder[0]}, because the client has no builder")
        apt_install(builder)


def _known(packages: Sequence[str]) -> list[str]:
    """Those of `packages` that the configured sources have."""
    _require_debian()
    if _quiet("apt-cache", "show", DOCKER):
        _loud("apt-get", "update")
    return [package for package in packages if _quiet("apt-cache", "show", package) == 0]


def apt_install(packages: Sequence[str]) -> None:
    """Install packages and remove none. Tried again after `apt-get update` once. Raises Stop."""
    _require_debian()
    install = ["apt-get", "install", "--yes", "--no-remove", *packages]
    if _loud(*install) == 0:
        return
    note("it failed; once more after an update of the package lists")
    if _loud("apt-get", "update") or _loud(*install):
        raise Stop(f"`{' '.join(install)}` failed: its lines above say why; mend that and run `nox -s setup` again")


def daemon_answers() -> bool:
    """Whether Docker's daemon answers its client, at DOCKER_HOST or at its default place."""
    return _quiet("docker", "version") == 0


def start_daemon(options: Sequence[str] = (), log: Path = LOG, deadline: float = DEADLINE_S) -> None:
    """Start Docker's daemon and wait until it answers: by systemd where it runs, or detached, with its output in `log`.

    `options` are dockerd's own, and mean that systemd is not asked. `deadline` in seconds.
    Raises Stop where it dies or doesn't answer in time, after showing the last lines of the log.
    """
    if SYSTEMD.is_dir() and not options:
        step("start Docker: systemctl start docker")
        if _loud("systemctl", "start", "docker"):
            raise Stop("systemd can't start Docker: `journalctl --unit docker` says why")
        return
    command = ["dockerd", *options]
    step(f"start Docker (no systemd here): {' '.join(command)}, detached, its log in {log}")
    try:
        with log.open("ab") as output:
            start = output.tell()
            daemon = subprocess.Popen(
                command,
                env={**os.environ, "PATH": SBIN},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
    except OSError as error:
        raise Stop(f"dockerd can't be started with its log in {log}: {error.strerror}") from None
    begun = time.monotonic()
    while not daemon_answers():
        dead = daemon.poll() is not None
        if dead or time.monotonic() - begun > deadline:
            lines = log.read_bytes()[start:].decode(errors="replace").splitlines()[-5:]
            for line in lines:
                note(line)
            if not dead:
                daemon.terminate()
                daemon.wait()
            what = (
                f"died (exit code {daemon.returncode})" if dead else f"didn't answer in {deadline:g} s and was stopped"
            )
            raise Stop(f"dockerd {what}: its last lines are above, the rest is in {log}; mend that and run setup again")
        time.sleep(0.5)
    note(f"it answers after {time.monotonic() - begun:.1f} s (process {daemon.pid})")


def _quiet(*command: str) -> int:
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60).returncode
    except (OSError, subprocess.TimeoutExpired):
        return 127


def _loud(*command: str) -> int:
    """Run a command whose output is shown, and show the command first."""
    note("$ " + " ".join(command))
    try:
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        return subprocess.run(command, stdin=subprocess.DEVNULL, env=env).returncode
    except OSError:
        return 127


if __name__ == "__main__":
    say.main(job)
