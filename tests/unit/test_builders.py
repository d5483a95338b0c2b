"""A buildx builder of the user's own: its command lines. None is at hand: a shell script stands for Docker."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_containers import EPOCH, docker, script

from scripts.pipeline import build, builders, containers, docker_or_podman, image_build
from scripts.pipeline.say import Stop

OWN = builders.Builder("team", ("reg.example/cache",), "reg.example/cache")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def engine(client: Path = Path("/bin/docker"), kind: str = "docker") -> containers.ContainerEngine:
    return containers.ContainerEngine(client, kind, "buildkit", "1.2", "unix:///run/d.sock", "here", None)  # type: ignore[arg-type]


def built(image: str, *digests: str) -> Path:
    """An OCI layout as a builder leaves it."""
    folder = builders.layout(image)
    folder.mkdir(parents=True)
    (folder / "index.json").write_text(json.dumps({"manifests": [{"digest": digest} for digest in digests]}))
    return folder


def command(image: str = "kimi-vllm:1", **more: object) -> list[str]:
    given = {"dockerfile": Path("D"), "context": Path("C"), "tag": image, "args": EPOCH, **more}
    mine = replace(engine(), builder="buildx", own=OWN)
    assert image_build.build_environment(mine)["BUILDX_BUILDER"] == "team"
    return image_build.build_command(mine, **given)  # type: ignore[arg-type]


def test_the_result_goes_to_the_engine_and_to_a_folder_with_the_times_rewritten() -> None:
    line = command()
    assert line[:3] == ["/bin/docker", "buildx", "build"] and "--load" not in line
    assert [line[i + 1] for i, word in enumerate(line) if word == "--output"] == [
        "type=docker,rewrite-timestamp=true",
        f"type=oci,tar=false,dest={builders.layout('kimi-vllm:1')},rewrite-timestamp=true",
    ]


def test_a_build_starts_from_the_folder_of_the_image_that_its_argument_names() -> None:
    folder = built("kimi-base:1", "sha256:12")
    assert not [word for word in command(args=EPOCH | {"BASE_IMAGE": "debian@sha256:1"}) if "build-context" in word]
    line = command(args=EPOCH | {"BASE_IMAGE": "kimi-base:1"})
    assert f"--build-context=kimi-base:1=oci-layout://{folder}@sha256:12" in line


def test_a_folder_that_is_not_whole_is_not_used() -> None:
    built("two:1", "sha256:1", "sha256:2")
    builders.layout("none:1").mkdir(parents=True)
    assert builders.contexts({"A": "two:1", "B": "none:1", "C": "absent:1"}) == []


def test_each_stage_of_each_image_has_a_cache_of_its_own() -> None:
    line = command(target="engine")
    assert "--cache-from=type=registry,ref=reg.example/cache:kimi-vllm-1-engine" in line
    assert "--cache-to=type=registry,ref=reg.example/cache:kimi-vllm-1-engine,mode=max,ignore-error=true" in line
    other = {word for word in command(target="verified") if word.startswith("--cache")}
    assert other.isdisjoint(line) and len(other) == 2
    assert builders.caches(builders.Builder("team"), "a:1", "x") == []


def test_a_mirror_on_loopback_is_refused_since_the_builder_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEBIAN_MIRROR", "http://127.0.0.1:1/debian")
    with pytest.raises(Stop, match="out of reach for --builder team: serve it under an address"):
        command()
    assert "none" in command(network="none")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (
            "test $2 = version || { echo 'ERROR: no builder \"team\" found' >&2; exit 1; }",
            r'team can.t be used \(no builder "team" found\): `.*docker buildx ls`',
        ),
        ("exit 125", "has no buildx: install docker-buildx"),
        ("echo 'Name: default'; echo 'Driver:   docker'", "is the one inside Docker"),
    ],
)
def test_a_builder_that_is_not_there_is_one_clear_line(tmp_path: Path, answer: str, says: str) -> None:
    client = script(tmp_path / "docker", answer)
    with pytest.raises(Stop, match=says) as stop:
        docker_or_podman.with_builder(engine(client), OWN)
    assert "\n" not in str(stop.value)


def test_a_builder_that_is_there_is_used(tmp_path: Path) -> None:
    client = script(tmp_path / "docker", "echo 'Name: team'; echo 'Driver: kubernetes'")
    assert docker_or_podman.with_builder(engine(client), OWN).own == OWN


def test_podman_has_no_such_builders() -> None:
    with pytest.raises(Stop, match="--builder team is one of Docker's buildx"):
        docker_or_podman.with_builder(engine(kind="podman"), OWN)


def test_a_cache_without_a_builder_is_refused_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker(tmp_path, buildkit=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Stop, match="name it with --builder"):
        build.job(["vllm", "--cache-to", "reg.example/cache"])
    assert not (tmp_path / "calls").exists()
