"""release.json: what an image gets of pins.toml, and nothing else."""

from pathlib import Path
from typing import Any

import pytest

from scripts.pipeline import pins
from scripts.pipeline.say import Stop

TEXT = pins.PINS.read_text()


def made(tmp_path: Path, version: str, variant: str = "cuda", text: str = TEXT) -> dict[str, Any]:
    path = tmp_path / "pins.toml"
    path.write_text(text)
    all_pins = pins.load(path)
    return pins.record(all_pins, all_pins.release("vllm", version, variant))


def test_a_release_carries_its_pins(tmp_path: Path) -> None:
    release = made(tmp_path, "0.16.0")
    assert (release["engine"], release["version"], release["variant"]) == ("vllm", "0.16.0", "cuda")
    assert release["target"]["repo"] == "moonshotai/Kimi-K2.5" and len(release["target"]["revision"]) == 40
    assert release["drafter"]["revision"] or release["drafter"]["unpinned"]
    assert release["serve"]["flags"]["tensor-parallel-size"] == release["gpu"]["count"] == 8


def test_a_default_for_one_release_is_not_in_another(tmp_path: Path) -> None:
    text = TEXT.replace('version = "0.16.0"', 'version = "0.16.0"\nenv = { NCCL_PROTO = "LL" }')
    assert made(tmp_path, "0.16.0", text=text)["serve"]["env"]["NCCL_PROTO"] == "LL"
    assert "NCCL_PROTO" not in made(tmp_path, "0.32.0", text=text)["serve"]["env"]


def test_the_twin_gets_none_of_the_defaults_for_gpus(tmp_path: Path) -> None:
    twin = made(tmp_path, "0.32.0", "cpu")
    assert not {"tensor-parallel-size", "gpu-memory-utilization"} & twin["serve"]["flags"].keys()


def test_a_change_of_another_release_changes_nothing(tmp_path: Path) -> None:
    old = 'engine = "vllm"\nversion = "0.16.0"'
    assert TEXT.count(old) == 1
    other = TEXT.replace(old, '# new\nversion = "0.16.1"\nengine = "vllm"')
    assert made(tmp_path, "0.32.0", text=other) == made(tmp_path, "0.32.0")


def test_a_change_of_its_own_pins_changes_it(tmp_path: Path) -> None:
    other = TEXT.replace("draft_tokens = 3", "draft_tokens = 4")
    assert made(tmp_path, "0.32.0", text=other) != made(tmp_path, "0.32.0")


@pytest.mark.parametrize("line", ["unpinned = ", "architecture = ", "size_gb = ", "port = "])
def test_a_missing_fact_is_one_line(tmp_path: Path, line: str) -> None:
    assert f"\n{line}" in TEXT
    with pytest.raises(Stop, match=r"pins.toml") as stop:
        made(tmp_path, "0.32.0", text=TEXT.replace(f"\n{line}", f"\nother_{line}"))
    assert "\n" not in str(stop.value)
