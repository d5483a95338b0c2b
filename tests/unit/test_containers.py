"""Finding and using a container engine, with clients that are shell scripts on a PATH of the test's own."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.pipeline import containers, docker_or_podman, image_build
from scripts.pipeline.say import Stop

ROOT = Path(__file__).resolve().parents[2]
EPOCH = {"SOURCE_DATE_EPOCH": "1700000000"}
DOWN = "Cannot connect to the Docker daemon at unix:///run/d.sock. Is the docker daemon running?"
DENIED = "permission denied while trying to connect to the Docker daemon socket at unix:///run/d.sock"


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def docker(
    folder: Path, *, error: str = "", buildx: bool = False, buildkit: bool = False, host: str = "unix:///run/d.sock"
) -> Path:
    """A docker client. It writes each of its command lines, and the variables that matter, to `calls` next to it."""
    info = f'{{"ServerErrors": ["{error}"]}}' if error else '{"ServerVersion": "1.2", "DockerRootDir": "/tmp"}'
    body = f"""echo "$DOCKER_BUILDKIT|$BUILDX_BUILDER|$*" >> "{folder}/calls"
case "$*" in
--version) echo "Docker version 1.2, build 3" ;;
"context inspect "*) echo "here {host}" ;;
"info "*) echo '{info}' ;;
"buildx build "*) {"exit 0" if buildx else 'echo "docker: unknown command: docker buildx" >&2; exit 1'} ;;
"build "*) {'test "$DOCKER_BUILDKIT" = 1' if buildkit else "echo no BuildKit >&2; exit 1"} ;;
"image inspect absent") echo "Error: No such image: absent" >&2; exit 1 ;;
"image inspect "*) echo '[{{"Id": "sha256:12", "Config": {{"Labels": null}}}}]' ;;
*) exit 1 ;;
esac"""
    return script(folder / "docker", body)


def podman(folder: Path, *, works: bool = True, name: str = "podman") -> Path:
    info = '{"host": {"serviceIsRemote": false}, "store": {"graphRoot": "/tmp"}, "version": {"Version": "4.5"}}'
    body = f"""echo "$*" >> "{folder}/calls"
case "$*" in
--version) echo "podman version 4.5" ;;
"info "*) {f"echo '{info}'" if works else "echo 'Error: no subuid ranges' >&2; exit 125"} ;;
"build "*) echo 34 ;;
"rmi "*) ;;
"image inspect "*) echo '[{{"Id": "34", "Config": {{}}}}]' ;;
*) exit 1 ;;
esac"""
    return script(folder / name, body)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        docker_or_podman.FORCE,
        "DOCKER_HOST",
        "DOCKER_CONTEXT",
        "CONTAINER_HOST",
        "BUILDX_BUILDER",
        "DOCKER_BUILDKIT",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")


def path(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, folders)))


def stop() -> str:
    """The one line with which `find` gives up."""
    with pytest.raises(Stop) as caught:
        docker_or_podman.find()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_first_client_that_can_build_is_taken_and_the_others_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare_client, with_buildkit = docker(tmp_path / "a"), docker(tmp_path / "b", buildkit=True)
    docker(tmp_path / "c", buildx=True)
    path(monkeypatch, tmp_path / "a", tmp_path / "b", tmp_path / "c")
    assert docker_or_podman.find() == containers.ContainerEngine(
        with_buildkit, "docker", "buildkit", "1.2", "unix:///run/d.sock", "here", Path("/tmp")
    )
    assert f"passed over {bare_client}: has no builder" in capsys.readouterr().out


def test_where_the_first_client_can_build_nothing_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = docker(tmp_path / "a", buildkit=True)
    docker(tmp_path / "b", buildx=True)
    path(monkeypatch, tmp_path / "a", tmp_path / "b")
    assert docker_or_podman.find().client == first
    assert "passed over" not in capsys.readouterr().out
    assert not (tmp_path / "b" / "calls").exists()


def test_buildx_is_preferred_and_is_given_the_builder_of_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker(tmp_path, buildx=True, buildkit=True)
    path(monkeypatch, tmp_path)
    assert docker_or_podman.find().builder == "buildx"
    assert any(call.startswith("|here|buildx build ") for call in calls(tmp_path))
    monkeypatch.setenv("BUILDX_BUILDER", "mine")
    docker_or_podman.find()
    assert calls(tmp_path)[-1].startswith("|mine|buildx build ")


def test_docker_comes_before_podman_wherever_they_are_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    podman(tmp_path / "a")
    docker(tmp_path / "b", buildkit=True)
    path(monkeypatch, tmp_path / "a", tmp_path / "b")
    assert docker_or_podman.find().kind == "docker"
    docker(tmp_path / "b", error=DOWN)
    assert docker_or_podman.find().kind == "podman"


def test_podman_is_known_by_its_answer_where_it_is_called_docker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = podman(tmp_path, name="docker")
    path(monkeypatch, tmp_path)
    assert docker_or_podman.find() == containers.ContainerEngine(
        client, "podman", "buildah", "4.5", "", "", Path("/tmp")
    )
    assert calls(tmp_path)[-1] == "rmi 34", "the image of the probe is left behind"


def test_a_client_that_is_twice_on_the_path_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker(tmp_path / "a")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    path(monkeypatch, tmp_path / "a", tmp_path / "b")
    assert stop().count("has no builder") == 1


def test_a_client_that_hangs_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "a" / "docker", "exec /bin/sleep 30")
    docker(tmp_path / "b", buildkit=True)
    path(monkeypatch, tmp_path / "a", tmp_path / "b")
    monkeypatch.setattr(containers, "PROBE_S", 0.5)
    assert docker_or_podman.find().client.parent.name == "b"


def test_one_client_can_be_forced_by_path_or_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker(tmp_path / "a", buildkit=True)
    second = docker(tmp_path / "b", buildkit=True)
    podman(tmp_path / "a")
    path(monkeypatch, tmp_path / "a", tmp_path / "b")
    monkeypatch.setenv(docker_or_podman.FORCE, str(second))
    assert docker_or_podman.find().client == second
    monkeypatch.setenv(docker_or_podman.FORCE, "podman")
    assert docker_or_podman.find().kind == "podman"


def test_a_forced_client_that_does_not_work_is_an_error_though_another_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = docker(tmp_path / "a")
    docker(tmp_path / "b", buildkit=True)
    path(monkeypatch, tmp_path / "a", tmp_path / "b")
    monkeypatch.setenv(docker_or_podman.FORCE, str(first))
    assert "has no builder" in stop()
    assert docker_or_podman.FORCE in stop()
    monkeypatch.setenv(docker_or_podman.FORCE, str(tmp_path / "absent"))
    assert "can't be run: No such file or directory" in stop()
    monkeypatch.setenv(docker_or_podman.FORCE, "podman")
    assert "no podman client on the PATH" in stop()


def test_no_client_at_all_says_to_run_setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path(monkeypatch, tmp_path)
    assert stop() == "no docker or podman client on the PATH: run `nox -s setup`, which installs Docker"


def test_a_daemon_that_is_down_says_that_setup_starts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker(tmp_path, error=DOWN, buildkit=True)
    path(monkeypatch, tmp_path)
    assert "finds no daemon at unix:///run/d.sock" in stop()
    assert stop().endswith("run `nox -s setup`, which starts it")


def test_a_socket_that_may_not_be_used_says_to_join_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker(tmp_path / "a", error=DENIED)
    docker(tmp_path / "b", error=DOWN)
    path(monkeypatch, tmp_path / "a", tmp_path / "b")
    assert "permission denied" in stop()
    assert "join the group docker" in stop()
    assert "nox" not in stop()


def test_a_client_without_a_builder_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker(tmp_path / "a", error=DOWN)
    docker(tmp_path / "b")
    path(monkeypatch, tmp_path / "a", tmp_path / "b")
    assert "install the package docker-buildx" in stop()


def test_a_remote_daemon_without_an_answer_is_not_a_matter_of_setup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker(tmp_path, error="error during connect: exit status 255", host="ssh://far")
    path(monkeypatch, tmp_path)
    assert "no answer from the daemon at ssh://far" in stop()
    assert "DOCKER_HOST" in stop()
    assert "nox" not in stop()


def test_a_podman_that_does_not_work_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    podman(tmp_path, works=False)
    path(monkeypatch, tmp_path)
    assert "no subuid ranges" in stop()


def test_the_disk_of_a_remote_daemon_is_unknown_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docker(tmp_path, buildkit=True, host="tcp://far:2376")
    path(monkeypatch, tmp_path)
    engine = docker_or_podman.find()
    assert containers.disk_free(engine) is None
    containers.require_disk(engine, 1e9)
    assert "on another machine" in capsys.readouterr().out


def test_too_little_disk_is_one_line_with_the_numbers_and_the_cure(tmp_path: Path) -> None:
    engine = containers.ContainerEngine(tmp_path, "docker", "buildx", "1", "", "", tmp_path)
    containers.require_disk(engine, 1e-6)
    with pytest.raises(Stop, match=r"has \d+\.\d GB free and the build needs 1e\+07 GB: .*docker system prune"):
        containers.require_disk(engine, 1e7)


def build(folder: Path, monkeypatch: pytest.MonkeyPatch, **more: object) -> str:
    path(monkeypatch, folder)
    what = {"dockerfile": Path("Dockerfile.x"), "context": Path("ctx"), "tag": "name:1", "args": EPOCH, **more}
    image_build.build(docker_or_podman.find(), **what)  # type: ignore[arg-type]
    return next(call for call in reversed(calls(folder)) if "name:1" in call and "inspect" not in call)


def test_each_builder_gets_its_own_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("hush")
    more = {
        "target": "engine",
        "args": {**EPOCH, "A": "b c"},
        "secrets": {"ca": tmp_path / "secret"},
        "labels": {"org.x": "y"},
        "network": "none",
        "no_cache": True,
    }
    common = (
        "--file Dockerfile.x --tag name:1 --target engine --build-arg SOURCE_DATE_EPOCH=1700000000 --build-arg A=b c "
        f"--secret id=ca,src={tmp_path}/secret --label org.x=y --no-cache --network none "
    )
    docker(tmp_path / "a", buildkit=True)
    assert build(tmp_path / "a", monkeypatch, **more) == f"1||build {common}--progress plain ctx"
    docker(tmp_path / "b", buildx=True)
    assert build(tmp_path / "b", monkeypatch, **more) == f"1|here|buildx build {common}--progress plain --load ctx"
    podman(tmp_path / "c")
    line = build(tmp_path / "c", monkeypatch, **more)
    assert line.startswith(f"build {common}--timestamp 1700000000 --format docker --ulimit=nofile=")
    assert "hush" not in line


def test_what_is_not_asked_for_is_not_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker(tmp_path, buildkit=True)
    line = build(tmp_path, monkeypatch, network="default")
    assert line == (
        "1||build --file Dockerfile.x --tag name:1 --build-arg SOURCE_DATE_EPOCH=1700000000 --progress plain ctx"
    )


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"secrets": {"ca": Path("/nonexistent")}}, "the secret ca is to be read from /nonexistent, which is no file"),
        ({"args": {}}, "SOURCE_DATE_EPOCH is '': give a number of seconds"),
        ({"args": {"SOURCE_DATE_EPOCH": "today"}}, "SOURCE_DATE_EPOCH is 'today'"),
    ],
)
def test_a_build_with_a_hole_in_it_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, object], says: str
) -> None:
    docker(tmp_path, buildkit=True)
    with pytest.raises(Stop, match=f"build of name:1: .*{says}"):
        build(tmp_path, monkeypatch, **more)
    assert not any("name:1" in call for call in calls(tmp_path))


def test_limits_are_never_above_the_shells() -> None:
    limits = dict(containers.ulimits())
    shell = subprocess.run(["/bin/sh", "-c", "ulimit -Hn"], capture_output=True, text=True, check=True).stdout.strip()
    assert shell == "unlimited" or limits["nofile"] == int(shell)
    assert 0 < limits["nproc"] <= int(Path("/proc/sys/kernel/pid_max").read_text())


def test_an_image_has_an_id_and_an_absent_one_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker(tmp_path, buildkit=True)
    path(monkeypatch, tmp_path)
    engine = docker_or_podman.find()
    assert containers.image_id(engine, "there") == "sha256:12"
    assert containers.labels(engine, "there") == {}
    assert containers.image_id(engine, "absent") is None
    with pytest.raises(Stop, match="has no image absent"):
        containers.labels(engine, "absent")


def test_an_engine_that_does_not_answer_is_not_an_absent_image(tmp_path: Path) -> None:
    gone = containers.ContainerEngine(tmp_path / "docker", "docker", "buildx", "1", "", "", None)
    with pytest.raises(Stop, match="can't look at the image name:1: can't be run"):
        containers.image_id(gone, "name:1")


BUILDKIT = """#1 [internal] load build definition from Dockerfile
#1 sha256:e4542d395151a6042637781c4b4826705ba28b7ba707088c13b2e3be3a24d1dd
#1 DONE 0.0s

#5 [torch 2/4] RUN fetch torch
#5 0.120 fetching

#6 [engine 3/5] RUN install engine
#6 sha256:67839a7818955852b173b53b1a4c2fac889cdea45d7ed206c9c807bbe9759318
#6 0.144 resolving
#5 0.220 still fetching
#6 0.301 E: no such version
#6 0.302
#6 ERROR: executor failed running [/bin/sh -c install engine]: exit code: 1
#5 CANCELED
------
 > [engine 3/5] RUN install engine:
------
executor failed running [/bin/sh -c install engine]: exit code: 1"""
OTHER_BYTES = """#9 [engine 1/2] RUN install engine
#9 1.124 error: Failed to download `six==1.17.0`
#9 1.125   cause: Hash mismatch for `six==1.17.0`
#9 1.126
#9 1.126          Expected:
#9 1.126            sha256:ff70335d468e7eb6ec65b95b99d3a2836546063f63acc5171de367e834932a81
#9 1.127
#9 1.127          Computed:
#9 1.127            sha256:52208f76a3958e1bfdf80fe777ec407c81afc66b6d6ce4a9667f7c06bf1825ae
#9 ERROR: executor failed running [/bin/sh -c install engine]: exit code: 1"""
BUILDKIT_SILENT = """#4 [1/1] COPY nofile /x
#4 ERROR: "/nofile" not found: not found
------
failed to compute cache key: "/nofile" not found: not found"""
BUILDAH = """[1/2] STEP 1/2: FROM scratch AS base
[1/2] STEP 2/2: COPY a /
--> 5d06a55bee5
[2/2] STEP 3/3: RUN install engine
resolving
E: no such version
time="2023-11-14T22:13:20Z" level=error msg="did not get container create message from subprocess: EOF"
Error: building at STEP "RUN install engine": while running runtime: exit status 1"""
SYNTAX = """#2 DONE 0.0s
ERROR: failed to solve with frontend dockerfile.v0: failed to create LLB definition: target nil could not be found"""


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (BUILDKIT, "at `[engine 3/5] RUN install engine`: E: no such version"),
        (OTHER_BYTES, "at `[engine 1/2] RUN install engine`: cause: Hash mismatch for `six==1.17.0`"),
        (BUILDKIT_SILENT, 'at `[1/1] COPY nofile /x`: "/nofile" not found: not found'),
        (BUILDAH, "at `[2/2] STEP 3/3: RUN install engine`: E: no such version"),
        (SYNTAX, "before its first step: target nil could not be found"),
        ("", "before its first step: the builder says nothing"),
    ],
    ids=["BuildKit, parallel steps", "BuildKit, a hash", "BuildKit, no output", "buildah", "no step", "silence"],
)
def test_a_failure_is_told_by_its_step_and_its_last_words(output: str, says: str) -> None:
    assert image_build.failure(output.splitlines()) == says


def test_a_full_disk_is_told_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = docker(tmp_path, buildkit=True)
    path(monkeypatch, tmp_path)
    engine = docker_or_podman.find()
    script(client, "echo '#4 [1/1] COPY x /'; echo '#4 ERROR: write /x: no space left on device'; exit 1")
    with pytest.raises(Stop, match="the disk is full: `docker system prune`"):
        image_build.build(engine, dockerfile=tmp_path, context=tmp_path, tag="name:1", args=EPOCH)


def test_a_build_that_leaves_no_image_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker(tmp_path, buildkit=True)
    path(monkeypatch, tmp_path)
    with pytest.raises(Stop, match="says that it built absent and has no such image"):
        image_build.build(docker_or_podman.find(), dockerfile=tmp_path, context=tmp_path, tag="absent", args=EPOCH)


@pytest.mark.parametrize("kind", ["docker", "podman"])
def test_ctrl_c_ends_the_client_even_where_it_ignores_the_signal(tmp_path: Path, kind: str) -> None:
    client = script(tmp_path / kind, "trap '' TERM INT\necho pid $$\nwhile :; do /bin/sleep 0.2; done")
    engine = f"containers.ContainerEngine(Path({str(client)!r}), {kind!r}, 'buildkit', '1', '', '', None)"
    code = (
        "from pathlib import Path\nfrom scripts.pipeline import containers, image_build, say\n"
        "containers.STOP_S = 0.5\n"
        f"say.main(lambda argv: image_build.build({engine}, dockerfile=Path('x'), context=Path('.'), tag='name:1',\n"
        f"    args={EPOCH!r}) and None)"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    pid = int(job.stdout.readline().split()[-1])
    os.kill(pid, 0)
    job.send_signal(signal.SIGINT)
    _, errors = job.communicate(timeout=20)
    assert job.returncode == 130
    assert "Traceback" not in errors
    time.sleep(0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_images_are_where_containerd_keeps_them_when_docker_leaves_them_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_or_podman, "CONTAINERD_ROOT", tmp_path)
    plain = {"DockerRootDir": "/tmp", "DriverStatus": [["Backing Filesystem", "extfs"]]}
    snapshotter = {"DockerRootDir": "/tmp", "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]]}
    own = {**snapshotter, "Containerd": {"Address": "/var/run/docker/containerd/containerd.sock"}}
    assert docker_or_podman.docker_storage(plain) == Path("/tmp")
    assert docker_or_podman.docker_storage(snapshotter) == tmp_path
    assert docker_or_podman.docker_storage(own) == Path("/tmp")
    assert docker_or_podman.docker_storage({"DockerRootDir": "/in/a/virtual/machine"}) is None


def test_an_engine_on_another_machine_needs_an_address_for_its_api() -> None:
    engine = containers.ContainerEngine(
        Path("podman"), "podman", "buildah", "4", "podman's remote connection", "", None
    )
    with pytest.raises(Stop, match="set CONTAINER_HOST"), containers.client(engine):
        pass
    nowhere = replace(engine, kind="docker", endpoint="unix:///nonexistent.sock")
    with pytest.raises(Stop, match=r"doesn't answer at unix:///nonexistent\.sock"), containers.client(nowhere):
        pass
