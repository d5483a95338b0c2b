"""Two builds of small images without a cache, by each builder of this machine: same digest, or the file is named."""

import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.pipeline import base, containers, image_build, pins, reproduce
from scripts.pipeline.say import Stop

pytestmark = pytest.mark.image
PINS = pins.load()
EPOCH = str(PINS.source_date_epoch)
# What a step does that ends as those of the Dockerfiles do, with all that they set in an image.
STEADY = """RUN --mount=type=bind,source=layers,target=/dev/shm/layers --mount=type=tmpfs,target=/tmp \\
    mkdir /opt/new && echo same > /opt/new/file && echo log >> /var/log/x.log && sh /dev/shm/layers/seal.sh
ENV A=1
WORKDIR /opt/new
EXPOSE 8000
HEALTHCHECK --start-period=1h CMD ["true"]
ENTRYPOINT ["cat"]
"""


@pytest.fixture(scope="module")
def engine(each_engine: containers.ContainerEngine) -> containers.ContainerEngine:
    return each_engine


@pytest.fixture(scope="module")
def origin(engine: containers.ContainerEngine) -> base.Base:
    return base.resolve(engine, PINS)


@pytest.fixture
def name(engine: containers.ContainerEngine) -> Iterator[str]:
    name = f"kimi-eagle3-test-{uuid.uuid4().hex[:8]}"
    yield name
    containers.forget(engine, name)


def twice(engine: containers.ContainerEngine, origin: base.Base, folder: Path, name: str, steps: str) -> str:
    """The verdict on two builds of the same Dockerfile."""
    (folder / "Dockerfile").write_text(f"ARG BASE_IMAGE\nFROM $BASE_IMAGE\nARG SOURCE_DATE_EPOCH\n{steps}")
    if not (folder / "layers").exists():
        subprocess.run(["cp", "-r", pins.ROOT / "scripts" / "layers", folder / "layers"], check=True)
    for tag in ("1", "2"):
        image_build.build(
            engine, dockerfile=folder / "Dockerfile", context=folder, tag=f"{name}:{tag}", no_cache=True,
            args={"SOURCE_DATE_EPOCH": EPOCH, "BASE_IMAGE": origin.reference}, labels={"a": "b"},
        )  # fmt: skip
    return reproduce.compare(engine, f"{name}:1", f"{name}:2")


def test_the_same_image_has_the_same_digest(
    engine: containers.ContainerEngine, origin: base.Base, tmp_path: Path, name: str
) -> None:
    verdict = twice(engine, origin, tmp_path, name, STEADY)
    assert verdict.startswith(f"same digest twice: {containers.image_id(engine, f'{name}:1')}")


def test_what_the_dockerfile_sets_is_in_an_image_whose_config_was_written_anew(
    engine: containers.ContainerEngine, origin: base.Base, tmp_path: Path, name: str
) -> None:
    twice(engine, origin, tmp_path, name, STEADY)
    told = containers.description(engine, f"{name}:1")
    config = told["Config"]
    assert "A=1" in config["Env"] and config["WorkingDir"] == "/opt/new" and config["Entrypoint"] == ["cat"]
    assert list(config["ExposedPorts"]) == ["8000/tcp"] and config["Labels"]["a"] == "b"
    health = config.get("Healthcheck") or told["Healthcheck"]
    assert health["Test"] == ["CMD", "true"] and health["StartPeriod"] == 3600 * 10**9
    assert containers.run(engine, f"{name}:1", ["file"]) == (0, "same\n")


VARIES = """RUN head -c 8 /dev/urandom > /opt/random && touch /opt/x-$(od -An -N4 -tx4 /dev/urandom | tr -d ' ')
RUN echo a > /opt/f && chown $(od -An -N2 -tu2 /dev/urandom | tr -d ' ') /opt/f && date +%N > /opt/now
RUN echo same > /opt/same && touch -d @1 /opt/same /opt
"""


def test_what_differs_is_found_and_named(
    engine: containers.ContainerEngine, origin: base.Base, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Stop, match=r"^2 of \d+ layers differ, in \d+ files"):
        twice(engine, origin, tmp_path, name, VARIES)
    out = capsys.readouterr().out
    assert "/opt/random: content: 8 bytes, sha256" in out and "/opt/f: owner: " in out and "/opt/now: content" in out
    assert out.count("missing in the first") == out.count("missing in the second") == 1
    assert "/opt/same" not in out.partition("layer by layer")[2].partition("\n==> ")[2]


def test_a_time_in_the_files_is_found_where_the_builder_does_not_set_it(
    engine: containers.ContainerEngine, origin: base.Base, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    step = "RUN echo a > /opt/f && sleep 1.1\n"
    if engine.kind == "podman":
        assert twice(engine, origin, tmp_path, name, step).startswith("same digest twice")
        return
    with pytest.raises(Stop, match="1 of "):
        twice(engine, origin, tmp_path, name, step)
    assert "/opt/f: time: " in capsys.readouterr().out


def test_another_label_is_named_where_all_layers_are_the_same(
    engine: containers.ContainerEngine, origin: base.Base, tmp_path: Path, name: str
) -> None:
    twice(engine, origin, tmp_path, name, STEADY)
    image_build.build(
        engine, dockerfile=tmp_path / "Dockerfile", context=tmp_path, tag=f"{name}:2", labels={"a": "c"},
        args={"SOURCE_DATE_EPOCH": EPOCH, "BASE_IMAGE": origin.reference}, no_cache=True,
    )  # fmt: skip
    with pytest.raises(Stop, match=r"same \d+ layers, and the configs differ in Config.Labels.a"):
        reproduce.compare(engine, f"{name}:1", f"{name}:2")


def test_an_image_that_is_not_there_is_an_error(engine: containers.ContainerEngine) -> None:
    with pytest.raises(Stop, match="has no image kimi-eagle3-test-none:1"):
        reproduce.compare(engine, "kimi-eagle3-test-none:1", "kimi-eagle3-test-none:2")


@pytest.mark.parametrize("steady", [True, False])
def test_the_job_builds_twice_under_names_of_its_own_and_leaves_none(
    engine: containers.ContainerEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    steady: bool,
) -> None:
    """The release's own build is replaced by one of a file; all around it is real."""
    built: list[str] = []

    def build(
        engine: containers.ContainerEngine, all_pins: pins.Pins, release: pins.Release, *_: object, no_cache: bool
    ) -> str:
        assert no_cache
        built.append(all_pins.image(release))
        (tmp_path / "f").write_text(
            "x" if steady else "x" * len(built)
        )  # the size: BuildKit compares that, and the time
        os.utime(tmp_path / "f", (1700000000, 1700000000))
        (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY f /\n")
        image_build.build(
            engine, dockerfile=tmp_path / "Dockerfile", context=tmp_path, tag=built[-1], no_cache=True,
            args={"SOURCE_DATE_EPOCH": EPOCH},
        )  # fmt: skip
        return built[-1]

    monkeypatch.setattr(reproduce.build, "build", build)
    monkeypatch.setattr(containers, "require_disk", lambda *_: None)
    if steady:
        reproduce.job(["vllm", "0.16.0", "--base", "bootstrap"])
        assert "==> vllm 0.16.0: same digest twice: sha256:" in capsys.readouterr().out
    else:
        with pytest.raises(Stop, match="1 of 1 layers differ, in 1 files"):
            reproduce.job(["vllm", "0.16.0", "--base", "bootstrap"])
        assert "/f: content: 1 bytes" in capsys.readouterr().out
    assert built == ["kimi-k2.5-eagle3-reproduce-vllm:0.16.0"] * 2
    assert not containers.image_id(engine, built[0]) and not containers.image_id(engine, f"{built[0]}-first")
