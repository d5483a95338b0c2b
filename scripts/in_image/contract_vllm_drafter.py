"""The contract's checks of the drafters: their classes, the loader, and what they share with the target."""

import importlib.util
import inspect
from importlib import import_module
from typing import Any
from unittest.mock import MagicMock

from contract_check import Context, Unmet, mla_drafter, require
from contract_states import LENGTHS, TOLERANCE, prompt
from contract_vllm_bench import Bench, bench
from tiny_models import HIDDEN, VOCAB

# Names by which drafters for Kimi-K2.5 are published, and one that the engine derives.
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DeepseekV2ForCausalLM")


class _Admitted(Exception):
    """The proposer went past its check of the drafter's class."""


def _propose(proposer: Any, drafter: type) -> None:
    """Run the proposer's real `propose` up to the drafter's first call. Raises AssertionError where it refuses."""

    class Probe(drafter):  # type: ignore[misc]
        def __init__(self) -> None: ...

        def combine_hidden_states(self, *_: Any, **__: Any) -> Any:
            raise _Admitted

    model, proposer.model = proposer.model, Probe.__new__(Probe)
    try:
        needed = [p for p in inspect.signature(proposer.propose).parameters.values() if p.default is p.empty]
        proposer.propose(**{p.name: MagicMock() for p in needed})
    except _Admitted:
        return
    finally:
        proposer.model = model
    raise Unmet("the proposer never combines the target's hidden states")


def architectures(context: Context) -> str:
    """Each architecture of a drafter resolves to a class that loads, and the proposer admits it."""
    engine = bench(context)
    from vllm.model_executor.models.registry import ModelRegistry

    pinned = (context.release.get("drafter") or {}).get("architecture")
    names = sorted({*ARCHITECTURES, *([pinned] if pinned else [])})
    proposer = engine.loaded("llama")
    for name in names:
        require(name in ModelRegistry.get_supported_archs(), f"no model class is registered for {name}")
        drafter = ModelRegistry.models[name].load_model_cls()
        try:
            _propose(proposer, drafter)
        except AssertionError:
            raise Unmet(f"the proposer refuses {name}: its assertion doesn't admit {drafter.__name__}") from None
    return ", ".join(names)


def _runs(context: Context, kind: str) -> str:
    """A tiny drafter loads, combines three states in their order, and runs."""
    import torch
    from safetensors.torch import load_file

    engine = bench(context)
    proposer = engine.loaded(kind)
    drafter = proposer.model
    fc = load_file(engine.drafter(kind) / "model.safetensors")["fc.weight"]
    for length in LENGTHS:
        ids, positions = prompt(length), torch.arange(length)
        states = torch.randn(length, 3 * HIDDEN, generator=torch.Generator().manual_seed(length))
        with torch.inference_mode():
            combined = drafter.combine_hidden_states(states)
        require(combined.shape == (length, HIDDEN), f"combined states have shape {tuple(combined.shape)}")
        require((combined - states @ fc.T).abs().max() < TOLERANCE, "the combined states are not fc of the states")
        inputs = {"input_ids": ids, "positions": positions}
        output = engine.run(proposer.vllm_config, drafter, **inputs, hidden_states=combined)
        require(isinstance(output, tuple) and len(output) == 2, "forward doesn't return a state and the next one")
        other = engine.run(proposer.vllm_config, drafter, **inputs, hidden_states=combined + 1)
        for state in output:
            require(state.shape == (length, HIDDEN), f"forward gives shape {tuple(state.shape)}")
            require(state.isfinite().all(), "forward gives numbers that are not finite")
        require((output[0] - other[0]).abs().max() > TOLERANCE, "forward doesn't depend on the hidden states")
        with torch.inference_mode():
            logits = drafter.compute_logits(output[0])
        require(logits.shape == (length, VOCAB) and logits.isfinite().all(), "the logits are not finite, or misshapen")
    _require_shared(engine, drafter)
    lengths = ", ".join(map(str, LENGTHS))
    return f"{type(drafter).__name__} loads, combines and runs, {lengths} tokens"


def llama(context: Context) -> str:
    """A Llama drafter."""
    return _runs(context, "llama")


def mla(context: Context) -> str:
    """An MLA drafter."""
    bench(context)
    from vllm.model_executor.models.registry import ModelRegistry

    return mla_drafter(
        ModelRegistry.get_supported_archs(),
        lambda: _runs(context, "mla:deepseek_v3"),
        lambda: _runs(context, "mla"),
    )


def _require_shared(engine: Bench, drafter: Any) -> None:
    language_model = engine.wrapper.get_language_model()
    require(drafter.model.embed_tokens is language_model.model.embed_tokens, "the drafter has an embedding of its own")
    require(drafter.lm_head is language_model.lm_head, "the drafter has an lm_head of its own")


def sharing(context: Context) -> str:
    """A drafter without embedding and lm_head gets the target's, by each loader of the release."""
    engine = bench(context)
    _require_shared(engine, engine.loaded("llama").model)
    loaders = ["V1 proposer"]
    second = "vllm.v1.worker.gpu.spec_decode.eagle.utils"
    if _exists(second):
        from vllm.config import set_current_vllm_config

        config = engine.vllm_config(engine.drafter("llama"))
        load = import_module(second).load_eagle_model
        with set_current_vllm_config(config):
            _require_shared(engine, load(engine.wrapper, config))
        loaders.append("V2 loader")
    return f"embedding and lm_head are the target's own objects: {', '.join(loaders)}"


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
