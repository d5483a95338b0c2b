"""preflight.py: each rule finds what it is for, and a good start passes in silence."""

import json
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "in_image"))

from preflight import ALLOW, examine, look, remember
from preflight_facts import Facts, compiled_by, flags_of, gather, speculation_of
from preflight_rules import RULES

HIDDEN, LAYERS, VOCABULARY = 7168, 61, 163840
TARGET: dict[str, Any] = {
    "text_config": {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 262144,
    }
}
DRAFTER: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": HIDDEN,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": 32000,
    "max_position_embeddings": 262144,
    "eagle_aux_hidden_state_layer_ids": [2, 30, 58],
}
GOOD = {
    "vllm": Facts(
        engine="vllm",
        version="0.16.0",
        gpu=True,
        flags={
            "target": "moonshotai/Kimi-K2.5",
            "tensor-parallel-size": "8",
            "max-model-len": "131072",
            "max-num-seqs": "64",
            "gpu-memory-utilization": "0.93",
        },
        speculation={"method": "eagle3", "model": "a/drafter", "num_speculative_tokens": 3},
        target_name="moonshotai/Kimi-K2.5",
        target=TARGET,
        drafter=DRAFTER,
        fc_width=3 * HIDDEN,
        series="abc",
    ),
    "sglang": Facts(
        engine="sglang",
        version="0.5.23",
        gpu=True,
        flags={"target": "moonshotai/Kimi-K2.5", "attention-backend": "triton"},
        speculation={"method": "EAGLE3", "model": "a/drafter"},
        target_name="moonshotai/Kimi-K2.5",
        target=TARGET,
        drafter=DRAFTER,
        fc_width=3 * HIDDEN,
    ),
}
IDS = "eagle_aux_hidden_state_layer_ids"
YARN = {"rope_type": "yarn", "factor": 64, "original_max_position_embeddings": 4096}
# By rule: changes to a good start that it must find. `drafter` and `flags` are merged, the rest replaces.
CASES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "config": [
        (engine, {"broken": ("drafter /d: its config.json is no object",), "no_drafter": True})
        for engine in ("vllm", "sglang")
    ],
    "method": [
        ("vllm", {"speculation": {"method": "eagle", "model": "a/b"}}),
        ("sglang", {"speculation": {"method": "EAGLE", "model": "a/b"}}),
        ("sglang", {"speculation": {"method": "EAGLE", "model": "a/kimi-eagle3"}, "no_drafter": True}),
    ],
    "vocabulary": [("vllm", {"drafter": {"vocab_size": 128256}}), ("sglang", {"drafter": {"vocab_size": 128256}})],
    "hidden-size": [
        ("vllm", {"drafter": {"hidden_size": 4096}}),
        ("vllm", {"drafter": {"target_hidden_size": 4096}}),
        ("sglang", {"drafter": {"hidden_size": 4096}}),
    ],
    "layer-ids": [
        ("vllm", {"drafter": {IDS: ids}})
        for ids in ([2, 30, 62], [2, 2, 58], [30, 2, 58], [0, 30, 58], ["2", "30", "58"])
    ]
    + [
        ("vllm", {"drafter": {IDS: [2, 30, 61]}}),
        ("vllm", {"drafter": {IDS: None, "eagle_config": {IDS: [2, 30, 99]}}}),
        ("vllm", {"version": "0.32.0", "drafter": {IDS: None, "eagle_config": {IDS: [1, 29, 61]}}}),
        ("sglang", {"drafter": {IDS: [2, 30, 99]}}),
        ("sglang", {"drafter": {IDS: [2, 30, 61]}}),
        ("sglang", {"drafter": {IDS: [1, 29, 60]}}),
        ("sglang", {"drafter": {"eagle_config": {IDS: [1, 29, 60]}}}),
    ],
    "states": [
        ("vllm", {"drafter": {IDS: [2, 20, 30, 58]}}),
        ("vllm", {"drafter": {"num_aux_hidden_states": 4}}),
        ("vllm", {"drafter": {IDS: None, "eagle_config": {"num_aux_hidden_states": 4}}}),
    ],
    "numbering": [("vllm", {"drafter": {IDS: [1, 29, 57]}})],
    "context": [
        ("vllm", {"drafter": {"max_position_embeddings": 4096}}),
        ("vllm", {"drafter": {"rope_scaling": YARN | {"factor": 16}}}),
        ("vllm", {"drafter": {"max_position_embeddings": 4096}, "flags": {"max-model-len": "32k"}}),
    ],
    "long-context": [("vllm", {"version": "0.32.0", "drafter": {"max_position_embeddings": 4096}})],
    "dtype": [("vllm", {"flags": {"dtype": "half"}}), ("vllm", {"flags": {"dtype": "float16"}})],
    "pipeline-parallel": [("vllm", {"flags": {"pipeline-parallel-size": "2"}})],
    "context-parallel": [("vllm", {"flags": {"decode-context-parallel-size": "8"}})],
    "attention-backend": [
        ("vllm", {"flags": {"attention-backend": "FLASHMLA"}}),
        ("vllm", {"env": {"VLLM_ATTENTION_BACKEND": "CUTLASS_MLA"}}),
        *(
            ("sglang", {"flags": {"attention-backend": name}})
            for name in ("trtllm_mla", "cutlass_mla", "cutedsl_mla", "fa3")
        ),
        ("sglang", {"flags": {"speculative-draft-attention-backend": "trtllm_mla"}}),
        ("sglang", {"flags": {"decode-attention-backend": "fa3"}}),
    ],
    "inherited-backend": [("vllm", {"flags": {"attention-backend": "TRITON_MLA"}})],
    "memory": [("vllm", {"flags": {"gpu-memory-utilization": "0.95"}})],
    "scratch": [
        ("vllm", {"version": "0.32.0", "flags": {"max-num-seqs": "1024"}}),
        ("vllm", {"version": "0.32.0", "without": "max-num-seqs"}),
    ],
    "slow-fp8": [("sglang", {"flags": {"kv-cache-dtype": "fp8_e4m3"}})],
    "drafter-quantization": [("sglang", {"flags": {"quantization": "modelopt_fp4"}})],
    "experts": [("sglang", {"flags": {"moe-runner-backend": "flashinfer_trtllm"}})],
    "draft-vocabulary": [("sglang", {"bare_drafter": "draft_vocab_size"})],
    "sharing": [("sglang", {"drafter": {"target_hidden_size": None}})],
    "trained-for": [
        ("vllm", {"speculation": {"method": "eagle3", "model": "AQ-MedAI/Kimi-K2-Instruct-eagle3"}}),
        ("sglang", {"speculation": {"method": "EAGLE3", "model": "AQ-MedAI/Kimi-K2-Instruct-eagle3"}}),
    ],
}
# Starts that are near to a bad one, and good.
NEAR: list[tuple[str, dict[str, Any]]] = [
    ("vllm", {}),
    ("sglang", {}),
    ("vllm", {"version": "0.32.0"}),
    ("vllm", {"no_drafter": True, "fc_width": None}),
    ("vllm", {"target": None, "no_drafter": True}),
    ("vllm", {"drafter": {IDS: None, "eagle_config": {IDS: [1, 29, 57]}}}),
    ("vllm", {"version": "0.32.0", "drafter": {IDS: [2, 30, 61]}}),
    ("vllm", {"drafter": {IDS: [2, 20, 30, 58]}, "fc_width": 4 * HIDDEN}),
    ("vllm", {"drafter": {"rope_scaling": YARN}}),
    ("vllm", {"drafter": {"max_position_embeddings": 4096}, "flags": {"max-model-len": "4K"}}),
    (
        "vllm",
        {
            "drafter": {"max_position_embeddings": 4096},
            "speculation": {"method": "eagle3", "model": "a/b", "max_model_len": 4096},
        },
    ),
    ("vllm", {"flags": {"dtype": "bfloat16", "pipeline-parallel-size": "1", "decode-context-parallel-size": "1"}}),
    ("vllm", {"version": "0.32.0", "flags": {"attention-backend": "triton_mla"}}),
    ("vllm", {"flags": {"pipeline-parallel-size": "2", "dtype": "half"}, "speculation": {}}),
    (
        "vllm",
        {"flags": {"pipeline-parallel-size": "2"}, "speculation": {"method": "ngram", "num_speculative_tokens": 3}},
    ),
    (
        "vllm",
        {"gpu": False, "flags": {"attention-backend": "CPU_ATTN"}, "without": "max-num-seqs", "version": "0.32.0"},
    ),
    ("vllm", {"version": "0.32.0", "drafter": {IDS: None, "eagle_config": {IDS: [1, 29, 60]}}}),
    ("sglang", {"version": "0.5.9", "drafter": {IDS: [1, 29, 57]}}),
    ("sglang", {"version": "0.5.9"}),
    ("sglang", {"version": "0.5.9", "drafter": {"draft_vocab_size": None}}),
    ("sglang", {"version": "0.5.9", "drafter": {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}}),
    ("sglang", {"drafter": {IDS: [1, 29, 59]}}),
    ("sglang", {"flags": {"attention-backend": "flashinfer", "kv-cache-dtype": "auto"}}),
    ("sglang", {"flags": {"quantization": "x", "speculative-draft-model-quantization": "unquant"}}),
]


def changed(engine: str, change: dict[str, Any]) -> Facts:
    """A good start of an engine with something else about it."""
    good, rest = GOOD[engine], dict(change)
    flags = {**good.flags, **rest.pop("flags", {})}
    flags.pop(rest.pop("without", ""), None)
    drafter = None if rest.pop("no_drafter", False) else DRAFTER | rest.pop("drafter", {})
    if lacking := rest.pop("bare_drafter", ""):
        drafter = {key: value for key, value in DRAFTER.items() if key != lacking}
    return replace(good, flags=flags, drafter=drafter, **rest)


def found_by(facts: Facts) -> set[str]:
    """The names of the rules that find something, by asking each of them alone."""
    found = examine(facts)
    by_text = {rule.check(facts): rule.name for rule in RULES if facts.engine in rule.engines}
    return {
        name for text, name in by_text.items() if text and any(text in line for line in found.refusals + found.warnings)
    }


@pytest.mark.parametrize(("name", "engine", "change"), [(n, e, c) for n, cases in CASES.items() for e, c in cases])
def test_a_rule_finds_what_it_is_for_and_no_other_does(name: str, engine: str, change: dict[str, Any]) -> None:
    facts = changed(engine, change)
    assert found_by(facts) == {name}
    refuses = next(rule for rule in RULES if rule.name == name).refuses
    found = examine(facts)
    assert (len(found.refusals), len(found.warnings)) == ((1, 0) if refuses else (0, 1))
    for line in found.refusals + found.warnings:
        assert line.splitlines() == [line] and len(line) < 320


@pytest.mark.parametrize(("engine", "change"), NEAR)
def test_a_good_start_passes_in_silence(engine: str, change: dict[str, Any]) -> None:
    found = examine(changed(engine, change))
    assert found.refusals == found.warnings == ()


def test_each_rule_has_a_source_and_a_case() -> None:
    assert {rule.name for rule in RULES} == set(CASES) | {"compile-cache"}
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.source and rule.engines for rule in RULES)
    for rule in RULES:
        assert {engine for engine, _ in CASES.get(rule.name, [])} <= set(rule.engines)


def test_a_refusal_can_be_overruled_by_name_and_that_is_said() -> None:
    bad = changed("vllm", {"flags": {"dtype": "half", "pipeline-parallel-size": "2"}})
    assert len(examine(bad).refusals) == 2 and f"{ALLOW}=dtype" in examine(bad).refusals[0]
    found = examine(replace(bad, env={ALLOW: "dtype"}))
    assert len(found.refusals) == 1 and "pipeline" in found.refusals[0]
    assert len(found.warnings) == 1 and f"{ALLOW} allows dtype" in found.warnings[0]
    assert examine(replace(bad, env={ALLOW: "all"})).refusals == ()
    assert "names no rule: dtpye" in examine(replace(bad, env={ALLOW: "dtpye"})).refusals[0]


# What is looked at.


def test_the_command_line_is_read_as_the_engine_reads_it() -> None:
    line = [
        "vllm",
        "serve",
        "a/b",
        "-tp=8",
        "-pp",
        "2",
        "--max_model_len",
        "1",
        "--max-model-len=2",
        "--trust-remote-code",
    ]
    assert flags_of([*line, "--dtype", "half"]) == {
        "target": "a/b",
        "tensor-parallel-size": "8",
        "pipeline-parallel-size": "2",
        "max-model-len": "2",
        "trust-remote-code": "true",
        "dtype": "half",
    }
    assert flags_of(["python3", "-m", "sglang.launch_server", "--model-path", "c/d", "--tp", "8"])["target"] == "c/d"


@pytest.mark.parametrize(
    "given",
    [
        ["--speculative-config", '{"method": "eagle3", "model": "x/y", "num_speculative_tokens": 3}'],
        ["-sc", '{"method": "eagle3", "model": "x/y", "num_speculative_tokens": 3}'],
        ["-sc.method", "eagle3", "--speculative-config.model=x/y", "--speculative-config.num_speculative_tokens", "3"],
        ["--spec-method", "eagle3", "--spec-model", "x/y", "--spec-tokens", "3"],
    ],
)
def test_a_drafter_is_found_in_each_spelling(given: list[str]) -> None:
    found = speculation_of("vllm", flags_of(["vllm", "serve", *given]))
    assert found == {"method": "eagle3", "model": "x/y", "num_speculative_tokens": 3}


def test_sglangs_words_for_a_drafter() -> None:
    flags = flags_of(["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", "x/y"])
    assert speculation_of("sglang", flags) == {"method": "EAGLE", "model": "x/y"}
    assert speculation_of("sglang", {}) == {}


RELEASE = {"engine": "vllm", "version": "0.16.0", "variant": "cuda"}


def model(folder: Path, config: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def command(target: str, drafter: str, **more: str) -> tuple[str, ...]:
    config = json.dumps({"method": "eagle3", "model": drafter, "num_speculative_tokens": 3} | more)
    return ("vllm", "serve", target, "--speculative-config", config)


def test_models_are_read_from_folders_and_from_the_cache(tmp_path: Path) -> None:
    target = model(tmp_path / "target", TARGET)
    cached = tmp_path / "hf/hub/models--a--drafter"
    model(cached / "snapshots/0123", DRAFTER)
    model(cached / "snapshots/4567", DRAFTER | {"vocab_size": 1})
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("4567\n")
    env = {"HF_HOME": str(tmp_path / "hf")}
    facts = gather(RELEASE, command(str(target), "a/drafter"), env)
    assert facts.target == TARGET and facts.drafter and facts.drafter["vocab_size"] == 1 and facts.unread == ()
    facts = gather(RELEASE, command(str(target), "a/drafter", revision="0123"), env)
    assert facts.drafter == DRAFTER


def test_what_is_not_there_yet_is_said_and_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "hub/models--a--part/snapshots/main").mkdir(parents=True)  # a download that was stopped
    facts = gather(RELEASE, command("a/part", "a/missing"), {"HF_HOME": str(tmp_path)})
    assert facts.target is None and facts.drafter is None
    assert [line.split()[0] for line in facts.unread] == ["target", "drafter"]
    found = examine(facts)
    assert found.notes == facts.unread and found.refusals == ()


@pytest.mark.parametrize("config", ["{", "[]", "", "null", None])
def test_a_folder_that_no_engine_can_read_is_refused(tmp_path: Path, config: str | None) -> None:
    drafter = model(tmp_path / "drafter", config or "")
    if config is None:
        (drafter / "config.json").unlink()
    found = examine(gather(RELEASE, command(str(model(tmp_path / "target", TARGET)), str(drafter)), {}))
    assert len(found.refusals) == 1 and f"drafter {drafter}: its config.json" in found.refusals[0]
    assert found.notes == found.warnings == ()


def test_a_folder_that_is_not_mounted_is_refused(tmp_path: Path) -> None:
    found = examine(gather(RELEASE, command("/nope/target", "a/missing"), {"HF_HOME": str(tmp_path)}))
    assert found.refusals == (
        f"no folder /nope/target in this container: mount it with -v ({ALLOW}=config starts it all the same)",
    )


def test_a_config_of_another_form_stops_no_start() -> None:
    found = examine(changed("vllm", {"drafter": {IDS: None, "eagle_config": "none", "rope_scaling": "yarn"}}))
    assert found.refusals == ()
    assert {"layer-ids", "states", "context"} <= {word.strip(",") for note in found.notes for word in note.split()}


def test_flags_in_a_file_are_said_not_to_be_checked(tmp_path: Path) -> None:
    facts = gather(RELEASE, ("vllm", "serve", "--config", "c.yaml"), {})
    assert "c.yaml" in facts.unread[0]


def test_the_checkpoint_says_how_many_states_fc_takes(tmp_path: Path) -> None:
    drafter, target = model(tmp_path / "drafter", DRAFTER), model(tmp_path / "target", TARGET)
    for name, width in {"a": None, "b": 4 * HIDDEN}.items():
        header = {"other": {"shape": [1]}} | ({"fc.weight": {"shape": [HIDDEN, width]}} if width else {})
        data = json.dumps(header).encode()
        (drafter / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(data)) + data)
    facts = gather(RELEASE, command(str(target), str(drafter)), {})
    assert facts.fc_width == 4 * HIDDEN
    assert any("fc takes" in line for line in examine(facts).refusals)
    (drafter / "b.safetensors").write_bytes(b"broken")
    assert gather(RELEASE, command(str(target), str(drafter)), {}).fc_width is None


# The compile cache.


def test_graphs_of_other_patches_are_warned_of_and_ones_own_are_not(tmp_path: Path) -> None:
    root, cache = tmp_path / "root", tmp_path / "cache"
    (root / "series").mkdir(parents=True)
    (root / "series/tree").write_text("one")
    env, line = {"VLLM_CACHE_ROOT": str(cache)}, ("vllm", "serve", "a/b")

    def warned() -> bool:
        return any("other patches" in warning for warning in look(RELEASE, line, env, root).warnings)

    assert not warned()
    remember(RELEASE, env, root)
    (cache / "torch_compile_cache/x").mkdir(parents=True)
    assert not warned()
    (root / "series/tree").write_text("two")
    assert warned()
    remember(RELEASE, env, root)
    assert warned(), "the graphs are still those of the first series"
    assert not look(RELEASE, line, env | {"VLLM_DISABLE_COMPILE_CACHE": "1"}, root).warnings
    file = compiled_by(env, "0.16.0")
    assert file and not look(RELEASE | {"version": "0.32.0"}, line, env, tmp_path / "no series").warnings
    file.unlink()
    assert warned(), "nobody knows who made them"
