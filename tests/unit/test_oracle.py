"""The oracle's plan, without torch: what it refuses, the cycle of tokens, and the counts that it promises."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.pipeline import containers, pins
from scripts.pipeline import oracle as pipeline
from scripts.pipeline.say import Stop

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "in_image" / "oracle.py"
sys.path.insert(0, str(SCRIPT.parent))

import oracle  # noqa: E402
import oracle_files  # noqa: E402
import oracle_plan as plan  # noqa: E402

PAIR = plan.Oracle(layers=9, ids=(2, 4, 6))
PARTIAL = replace(PAIR, partial=True)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--layers", "6"], "--layers 6"),
        (["--layers", "62"], "--layers 62"),
        (["--experts", "3"], "--experts 3"),
        (["--ids", "0", "4", "6"], "can't capture 0"),
        (["--ids", "2", "4", "9"], "from 1 to 8"),
        (["--ids", "4", "2", "6"], "ascending"),
        (["--ids", "2", "2", "6"], "ascending"),
        (["--drafter", "gpt"], "invalid choice: 'gpt'"),
    ],
)
def test_an_oracle_that_can_not_be_is_refused_and_nothing_is_written(
    arguments: list[str], what: str, tmp_path: Path
) -> None:
    done = subprocess.run([sys.executable, SCRIPT, tmp_path / "out", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert what in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layers", [7, 9, 61])
def test_default_ids_are_the_engines_own(layers: int) -> None:
    out, fields = oracle.parse(["out", "--layers", str(layers)])
    assert fields["ids"] == (2, layers // 2, layers - 3)
    assert out.is_absolute()


def test_a_check_of_a_folder_without_an_oracle_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, "check", tmp_path], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error:") and len(done.stderr.splitlines()) == 1


def test_the_target_walks_one_cycle_through_every_ordinary_token() -> None:
    token, seen = 0, []
    for _ in range(plan.PLACES):
        seen.append(token)
        token = plan.following(token)
    assert token == 0 and sorted(seen) == list(range(plan.PLACES))


def test_no_two_layers_show_the_same_clock() -> None:
    assert len({j * plan.STEP % plan.PLACES for j in range(62)}) == 62


@pytest.mark.parametrize("modulus", plan.MODULI)
def test_the_place_of_a_fault_leaves_the_room_that_the_weights_need(modulus: int) -> None:
    fault, step = plan.FAULT % modulus, plan.STEP % modulus
    assert fault not in (modulus - 1, 0, 1, 2)
    assert 2 * fault % modulus not in (0, 1)
    assert (fault + step) % modulus not in (0, 1)
    assert step != 0


@pytest.mark.parametrize("k", [1, 3, 5, 16])
def test_a_whole_vocabulary_promises_k_plus_1(k: int) -> None:
    promised = oracle.expectations(PAIR)["k"][str(k)]
    assert promised["acceptance_length"] == k + 1
    assert promised["max_tokens"] == 1 + promised["drafts"] * (k + 1)
    assert promised["accepted"] == promised["draft_tokens"] == promised["drafts"] * k


def simulated(sequence: list[int], writable: set[int], k: int, max_tokens: int) -> list[int]:
    """Accepted drafts of each round, counted token by token."""
    written, rounds = 1, []
    while written < max_tokens:
        accepted = 0
        while accepted < k and sequence[written + accepted] in writable:
            accepted += 1
        rounds.append(accepted)
        written += accepted + 1
    assert written == max_tokens, "the last round isn't a full one"
    return rounds


@pytest.mark.parametrize("k", [1, 3, 5, 8])
def test_a_partial_vocabulary_promises_rejections_that_a_count_by_hand_finds(k: int) -> None:
    said = oracle.expectations(PARTIAL)
    promised = said["k"][str(k)]
    rounds = simulated(said["output"], set(plan.draft_vocabulary(PARTIAL)), k, promised["max_tokens"])
    assert promised["accepted"] == sum(rounds)
    assert promised["accepted_per_position"] == [sum(n > i for n in rounds) for i in range(k)]
    assert 1 < promised["acceptance_length"] < k + 1


def test_the_output_follows_the_prompt_on_the_cycle() -> None:
    said = oracle.expectations(PAIR)
    for before, after in zip([said["prompt"][-1], *said["output"]], said["output"], strict=False):
        assert after == plan.following(before)
    assert said["output_text"].split()[0] == f"t{said['output'][0]}"


def test_configs_name_the_media_token_that_the_tokenizer_has() -> None:
    files = oracle_files.configs(PAIR)
    vocabulary = files["target/tokenizer.json"]["model"]["vocab"]
    config = files["target/config.json"]
    assert config["media_placeholder_token_id"] == config["image_token_id"] == vocabulary["<|media_pad|>"]
    assert vocabulary["t503"] == 503 and max(vocabulary.values()) < plan.VOCAB
    assert json.loads(json.dumps(files)) == files


@pytest.mark.parametrize("kind", ["llama", "mla"])
def test_a_drafter_says_its_layer_ids_where_each_release_reads_them(kind: str) -> None:
    config = oracle_files.drafter_config(replace(PARTIAL, drafter=kind))
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert config["draft_vocab_size"] == plan.VOCAB - 56


def engine(client: Path, kind: str = "docker") -> containers.ContainerEngine:
    fields: dict[str, Any] = dict.fromkeys(containers.ContainerEngine.__dataclass_fields__)
    return containers.ContainerEngine(**fields | {"client": client, "kind": kind})


def test_the_pipeline_runs_the_script_without_network_as_the_user(tmp_path: Path) -> None:
    line = pipeline.command(engine(Path("/bin/docker")), "image:1", tmp_path, ["out", "--layers", "7"])
    assert line[-4:] == ["/in_image/oracle.py", "out", "--layers", "7"]
    assert line[line.index("--network") + 1] == "none"
    assert f"{tmp_path}:{tmp_path}" in line and f"{SCRIPT.parent}:/in_image:ro" in line
    assert "keep-id" not in line
    assert "keep-id" in pipeline.command(engine(Path("/bin/podman"), "podman"), "image:1", tmp_path, [])


def test_without_an_image_the_cure_is_one_line(tmp_path: Path) -> None:
    client = tmp_path / "docker"
    client.write_text("#!/bin/sh\necho 'Error: No such image' >&2\nexit 1\n")
    client.chmod(0o755)
    with pytest.raises(Stop, match="nox -s build-ENGINE"):
        pipeline.find_image(engine(client))
    assert pins.load().releases
