"""The lint of a drafter's config for SGLang: each fault is named, and a sound drafter has none."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

IN_IMAGE = Path(__file__).parents[2] / "scripts/in_image"
sys.path.append(str(IN_IMAGE))

from contract_sglang_config import KEY, problems  # noqa: E402

SOUND: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 7168,
    "vocab_size": 163840,
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
}
TENSORS = ["fc.weight", "lm_head.weight", "norm.weight"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
        {"target_hidden_size": 7168},
        {KEY: [2, 30, 58]},
        {"eagle_config": {KEY: [1, 29, 57]}},
        {"eagle_config": {"use_aux_hidden_state": True}, KEY: [2, 30, 58]},
        {"eagle_config": None, KEY: None},
    ],
)
def test_a_sound_drafter_has_no_problem(changes: dict[str, Any]) -> None:
    assert problems(SOUND | changes, TENSORS) == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures is ['LlamaForCausalLM']"),
        ({"architectures": None}, "architectures is []"),
        ({"hidden_size": 4096}, "hidden_size is 4096"),
        ({"vocab_size": 129280}, "vocab_size is 129280"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"target_hidden_size": None}, "target_hidden_size is None: the embedding is not shared"),
        ({KEY: [2, 30, 61]}, "of a target with 61 layers"),
        ({KEY: [1, 29, 60]}, "of a target with 61 layers"),
        ({KEY: [0, 30, 58]}, "of a target with 61 layers"),
        ({KEY: [58, 30, 2]}, "three that ascend"),
        ({KEY: [2, 30]}, "three that ascend"),
        ({KEY: []}, "three that ascend"),
        ({KEY: [2, 30, 58], "eagle_config": {KEY: [2, 4, 6]}}, "in eagle_config and [2, 30, 58] at the top level"),
    ],
)
def test_each_fault_is_named_alone(changes: dict[str, Any], named: str) -> None:
    (problem,) = problems(SOUND | changes, TENSORS)
    assert named in problem


def test_a_vocabulary_that_is_not_stated_is_named_and_null_means_the_targets() -> None:
    without = {key: value for key, value in SOUND.items() if key != "draft_vocab_size"}
    assert "draft_vocab_size is missing" in problems(without, TENSORS)[0]
    assert problems(SOUND | {"draft_vocab_size": None}, ["fc.weight"]) == []


def test_a_vocabulary_without_its_head_is_named() -> None:
    (problem,) = problems(SOUND, ["fc.weight"])
    assert "no lm_head" in problem


def run(tmp_path: Path, folder: Path, engine: str = "sglang") -> subprocess.CompletedProcess[str]:
    release = tmp_path / "release.json"
    release.write_text(json.dumps({"engine": engine, "version": "1.0"}))
    command = [sys.executable, IN_IMAGE / "contract.py", "--release", release, "--drafter", folder]
    return subprocess.run([*command, "--only", "drafter-config"], capture_output=True, text=True, timeout=120)


def write(folder: Path, config: dict[str, Any], names: list[str]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({name: {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]} for name in names}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


def test_a_folder_is_checked_from_the_command_line(tmp_path: Path) -> None:
    good = run(tmp_path, write(tmp_path / "good", SOUND, TENSORS))
    assert (good.returncode, good.stdout) == (0, "drafter-config  true   LlamaForCausalLMEagle3 fits Kimi-K2.5\n")
    bad = run(tmp_path, write(tmp_path / "bad", SOUND | {"vocab_size": 1}, ["fc.weight"]))
    assert bad.returncode == 1
    assert "vocab_size is 1" in bad.stdout and "no lm_head" in bad.stdout and "cure: " in bad.stdout


@pytest.mark.parametrize("config", ["", "{", "[]", "{}"])
def test_a_folder_that_is_no_drafter_is_false_and_no_crash(config: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(config)
    done = run(tmp_path, folder)
    assert done.returncode == 1
    assert done.stdout.startswith("drafter-config  FALSE")
    assert done.stderr == ""


def test_an_engine_without_such_a_check_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, tmp_path, engine="vllm")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: --drafter: no check of a drafter's config is written for this engine\n"
