"""What an engine makes of drafters' configs: rotary embedding, layer ids, context, compile cache. Runs in an engine.

    python3 drafter_configs.py IN_IMAGE    (the folder scripts/in_image)

The engine's own configuration classes and runners' functions on tiny checkpoints; the last line is JSON, by the name of
the case. A refusal is {"refused": the engine's words}.
"""

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, sys.argv[1])

import contract_vllm
import tiny_models
from contract_check import Context
from contract_vllm_bench import Bench

sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(sys.argv[1]).resolve()]

# Kimi-K2.5's own YaRN, which Llama drafters for it carry; that of Kimi-K2; and what else transformers reads.
YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
ROPES: dict[str, dict[str, Any] | None] = {
    "kimi-k2.5": YARN,
    "kimi-k2": YARN | {"factor": 32.0, "beta_fast": 1.0},
    "unequal": YARN | {"mscale_all_dim": 0.5},
    "attention factor": YARN | {"attention_factor": 1.25},
    "no mscale": {key: value for key, value in YARN.items() if not key.startswith("mscale")},
    "plain": None,
}
NAME = "eagle_aux_hidden_state_layer_ids"
TOP = {"top": [2, 4, 6], "top, from 1": [1, 3, 5], "three others": [3, 5, 7]}
BAD = {
    "beyond": [2, 4, 10],
    "zero": [0, 4, 6],
    "twice": [2, 4, 4],
    "unordered": [4, 2, 6],
    "no integers": ["2", "4", "6"],
}
folders = itertools.count()


class Cases:
    """Writes drafters, makes the engine's configuration of each, and collects what came of it."""

    def __init__(self, work: Path) -> None:
        self.work, self.found = work, dict[str, Any]()
        self.bench = Bench(work)

    def drafter(self, **changes: Any) -> Path:
        """A Llama drafter; the change None takes a key away."""
        folder = tiny_models.write_llama_drafter(self.work / f"drafter-{next(folders)}", **changes)
        config = json.loads((folder / "config.json").read_text())
        text = json.dumps({key: value for key, value in config.items() if value is not None})
        (folder / "config.json").write_text(text)
        return folder

    def speculative(self, drafter: Path, **options: Any) -> Any:
        """A real SpeculativeConfig of the tiny Kimi target, whose max_model_len is 128."""
        from vllm.config import ParallelConfig, SpeculativeConfig

        return SpeculativeConfig(
            method="eagle3",
            model=str(drafter),
            num_speculative_tokens=3,
            target_model_config=self.bench.model_config(self.bench.target),
            target_parallel_config=ParallelConfig(),
            **options,
        )

    def collect(self, name: str, make: Callable[[], Any]) -> None:
        try:
            self.found[name] = make()
        except (ValueError, TypeError) as error:
            self.found[name] = {"refused": str(error)}


def rotary(spec: Any, head: int) -> Any:
    """The engine's table for a drafter, [positions, head]: cosines beside sines."""
    from vllm.model_executor.layers.rotary_embedding import get_rope

    config = spec.draft_model_config.hf_config
    named = {"rope_parameters": config.rope_parameters}
    return get_rope(head, max_position=config.max_position_embeddings, **named).cos_sin_cache


def rope(cases: Cases, scaling: dict[str, Any] | None) -> dict[str, float]:
    """The largest difference between the engine's table and transformers', and of transformers' from a plain one."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from vllm.config import set_current_vllm_config

    settings = {"head_dim": 128, "max_position_embeddings": 262144, "rope_theta": 50000.0, "rope_scaling": scaling}
    spec = cases.speculative(cases.drafter(**settings))
    with set_current_vllm_config(cases.bench.config):
        table = rotary(spec, 128)
    reference = LlamaRotaryEmbedding(LlamaConfig(hidden_size=512, num_attention_heads=4, **settings))
    positions = torch.tensor([0, 1, 7, 100, 4095, 4096, 20_000, 131_071])
    cos, sin = reference(torch.zeros(1, dtype=torch.float32), positions[None])
    wanted = torch.cat([cos[0, :, :64], sin[0, :, :64]], dim=-1)
    # A query with itself, at distance 0: what a wrong magnitude multiplies each score by.
    size = (table[positions].float().square().sum(-1) / wanted.square().sum(-1)).mean()
    return {"difference": float((table[positions].float() - wanted).abs().max()), "score": float(size)}


def layers(spec: Any) -> dict[str, Any]:
    """The ids that each runner of this release takes from a drafter's config; None means the default ones."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    found = {"V1": GPUModelRunner._get_eagle3_aux_layers_from_config(SimpleNamespace(speculative_config=spec))}
    try:
        second = import_module("vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils")
        found["V2"] = second.get_eagle3_aux_layers_from_config(spec)
    except (ModuleNotFoundError, AttributeError):
        pass  # the runner of this release doesn't speculate with EAGLE-3 by ids of its own
    return found | {"hash": spec.compute_hash()}


def states(cases: Cases, folder: Path) -> dict[str, int]:
    """How many states the drafter's `fc` takes, in the model that the engine builds of a config."""
    proposer = cases.bench.proposer(folder)
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    with set_current_vllm_config(proposer.vllm_config):
        draft = proposer.vllm_config.speculative_config.draft_model_config
        model = initialize_model(vllm_config=proposer.vllm_config, model_config=draft)
    return {"states": model.model.fc.weight.shape[1] // tiny_models.HIDDEN}


def context(cases: Cases, runner: str | None, options: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Start a configuration with a runner (V1, V2 or the release's only one) and a drafter.

    What it starts with: the longest sequence, where the runner stops drafting, and the rows of the rotary table.
    """
    from vllm.config import CompilationConfig, DeviceConfig, SchedulerConfig, VllmConfig, set_current_vllm_config

    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    if runner:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "V2" else "0"
    spec = cases.speculative(cases.drafter(**changes), **options)
    config = VllmConfig(
        model_config=spec.target_model_config,
        speculative_config=spec,
        device_config=DeviceConfig(device="cpu"),
        compilation_config=CompilationConfig(mode=0, custom_ops=["none"]),
        scheduler_config=SchedulerConfig(
            max_model_len=128,
            max_num_batched_tokens=128,
            max_num_seqs=4,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
    )
    with set_current_vllm_config(config):
        table = rotary(spec, 16)
    return {
        "longest": config.model_config.max_model_len,
        "drafts until": spec.draft_model_config.max_model_len,
        "table": table.shape[0],
    }


def main(work: Path) -> dict[str, Any]:
    contract_vllm.prepare(Context({"engine": "vllm"}, Path(), work))
    cases = Cases(work)
    cases.bench.config  # noqa: B018  (the world comes first)
    for name, scaling in ROPES.items():
        cases.collect(f"rope: {name}", lambda scaling=scaling: rope(cases, scaling))

    def ids(top: Any = None, nested: Any = None, **changes: Any) -> Path:
        return cases.drafter(**{NAME: top}, eagle_config={NAME: nested} if nested else None, **changes)

    for name, value in TOP.items():
        cases.collect(f"ids: {name}", lambda value=value: layers(cases.speculative(ids(value))))
        nested = name.replace("top", "nested")
        cases.collect(f"ids: {nested} nested", lambda value=value: layers(cases.speculative(ids(None, value))))
    cases.collect("ids: both", lambda: layers(cases.speculative(ids([2, 4, 6], [3, 5, 7]))))
    cases.collect("ids: none", lambda: layers(cases.speculative(ids())))
    # The hash holds the drafter's path, so these are written over one another, as an update of a cached one would be.
    folder = ids([2, 4, 6])
    for name, change in {
        "once": {},
        "again": {},
        "other ids": {NAME: [3, 5, 7]},
        "other size": {"head_dim": 32},
    }.items():
        config = json.loads((folder / "config.json").read_text()) | {NAME: [2, 4, 6], "head_dim": 16} | change
        (folder / "config.json").write_text(json.dumps(config))
        cases.collect(f"hash: {name}", lambda: layers(cases.speculative(folder)))
    last = [2, 4, 9]
    cases.collect("ids: the last layer's output", lambda: layers(cases.speculative(ids(last))))
    for name, value in BAD.items():
        cases.collect(f"bad: {name}", lambda value=value: layers(cases.speculative(ids(value))))
        cases.collect(f"bad: {name}, nested", lambda value=value: layers(cases.speculative(ids(None, value))))
    count = {"num_aux_hidden_states": 4}
    cases.collect("bad: another number", lambda: layers(cases.speculative(ids([2, 4, 6], **count))))
    cases.collect("bad: a number without ids", lambda: layers(cases.speculative(ids(**count))))
    for name, given in {"top": ([2, 4, 6, 8], None), "nested": (None, [2, 4, 6, 8])}.items():
        cases.collect(f"states: four, {name}", lambda given=given: states(cases, ids(*given)))
    cases.collect("states: none", lambda: states(cases, ids()))

    short, table = {"max_position_embeddings": 64}, {"factor": 4.0, "original_max_position_embeddings": 16}
    yarn = short | {"rope_scaling": YARN | table}
    for runner in ("V1", "V2"):
        cases.collect(f"context: {runner}", lambda runner=runner: context(cases, runner, {}, **short))
        cases.collect(f"context: {runner}, yarn", lambda runner=runner: context(cases, runner, {}, **yarn))
        enough = {"max_position_embeddings": 128}
        cases.collect(f"context: {runner}, enough", lambda runner=runner, e=enough: context(cases, runner, {}, **e))
        accepted = {"max_model_len": 64}
        cases.collect(
            f"context: {runner}, accepted", lambda runner=runner, a=accepted: context(cases, runner, a, **short)
        )
    return cases.found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print("\n" + json.dumps(main(Path(folder))))
