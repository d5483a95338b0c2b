"""The contract's checks of the drafters: configs, classes, the loader, and what they share with the target."""

from typing import Any

from contract_check import Context, Unmet, kimi_k2_config, mla_drafter, require
from contract_draft import drafted
from contract_sglang_bench import bench, captured
from contract_sglang_start import Pair
from contract_states import DISTINCT, LENGTHS, TOLERANCE, prompt
from tiny_models import HIDDEN, LAYERS, VOCAB

# Names by which drafters for Kimi-K2.5 are published.
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM")
KEY = "eagle_aux_hidden_state_layer_ids"
# What a drafter's config states, and the layers that a target of 9 captures then. Ids from 1 name outputs, in each
# release, so that the convention (a check of its own) doesn't matter here.
STATED: tuple[tuple[str, dict[str, Any], tuple[int, ...]], ...] = (
    ("no ids", {KEY: None}, (2, LAYERS // 2, LAYERS - 3)),
    ("ids in eagle_config", {KEY: None, "eagle_config": {KEY: [1, 4, 6]}}, (2, 5, 7)),
    ("ids at the top level", {KEY: [1, 4, 6]}, (2, 5, 7)),
)


def layer_ids(context: Context) -> str:
    """A real target worker that starts with a drafter captures the layers that the drafter's config states."""
    engine = bench(context)
    for where, changes, wanted in STATED:
        found = captured(engine.target_runner(engine.drafter("llama", **changes)).model)
        require(found == wanted, f"a drafter with {where} captures {found}, not {wanted}")
    try:
        engine.target_runner(engine.drafter("llama", eagle_config="use_aux_hidden_state"))
    except Exception:
        return f"{', '.join(where for where, *_ in STATED)}; an eagle_config that can't be read stops the start"
    raise Unmet("an eagle_config that can't be read counts as none, without a word")


def eagle3_refused_as_eagle(context: Context) -> str:
    """An EAGLE-3 drafter under --speculative-algorithm EAGLE stops the start, and the message says what to write."""
    engine = bench(context)
    try:
        engine.target_runner(engine.drafter("llama"), algorithm="EAGLE")
    except ValueError as error:
        require("EAGLE3" in str(error), f"the refusal doesn't name EAGLE3: {error}")
        return "an EAGLE-3 drafter under EAGLE stops the start"
    raise Unmet("an EAGLE-3 drafter starts under EAGLE, where its acceptance length is exactly 1.0")


def config_type(context: Context) -> str:
    """A drafter whose config.json says kimi_k2 has a config."""
    engine = bench(context)
    folder = engine.drafter("llama", model_type="kimi_k2")
    from sglang.srt.utils.hf_transformers_utils import get_config

    return kimi_k2_config(folder, get_config)


def architectures(context: Context) -> str:
    """Each architecture of a drafter resolves to a class."""
    bench(context)
    from sglang.srt.models.registry import ModelRegistry

    pinned = (context.release.get("drafter") or {}).get("architecture")
    names = sorted({*ARCHITECTURES, *([pinned] if pinned else [])})
    missing = [name for name in names if name not in ModelRegistry.get_supported_archs()]
    require(not missing, f"no model class is registered for {', '.join(missing)}")
    return ", ".join(names)


def _runs(context: Context, kind: str, **changes: Any) -> str:
    """A tiny drafter loads beside the target, and computes what transformers' attention in the same layer does."""
    import torch

    engine = bench(context)
    folder = engine.drafter(kind, draft_vocab_size=None, **changes)
    pair = engine.pair(folder)
    _require_shared(pair)
    drafter, shared = pair.drafter.model, pair.target.model.language_model
    calls: list[Any] = []
    drafter.model.fc.register_forward_hook(lambda *_: calls.append(None))
    for length in LENGTHS:
        ids = prompt(length)
        states = torch.randn(length, 3 * HIDDEN, generator=torch.Generator().manual_seed(length))
        output = engine.draft(pair.drafter, ids, states)
        wanted, normed = drafted(kind, folder, shared.model.embed_tokens.weight[ids], states)
        shape = tuple(output.hidden_states.shape)
        require(shape == (length, HIDDEN), f"the drafter's own states have shape {shape}")
        require(_near(output.hidden_states, wanted), f"the drafter's states are not transformers', {length} tokens")
        logits = normed[-1:] @ shared.lm_head.weight.T
        require(_near(output.next_token_logits, logits), f"the drafter's logits are not transformers', {length} tokens")
        turned, _ = drafted(kind, folder, shared.model.embed_tokens.weight[ids], states.roll(HIDDEN, dims=-1))
        require((wanted - turned).abs().max() > DISTINCT, "the order of the three states can't be told")
        count = len(calls)
        again = engine.draft(pair.drafter, ids, output.hidden_states).hidden_states
        require(len(calls) == count, "the drafter's own states go through fc again in the next draft step")
        require(again.isfinite().all(), "the next draft step gives numbers that are not finite")
    lengths = ", ".join(map(str, LENGTHS))
    return f"{type(drafter).__name__} loads and computes what transformers does within {TOLERANCE}, {lengths} tokens"


def _near(found: Any, wanted: Any) -> bool:
    return found.shape == wanted.shape and bool((found - wanted).abs().max() < TOLERANCE)


def llama(context: Context) -> str:
    """A Llama drafter."""
    return _runs(context, "llama")


def mla(context: Context) -> str:
    """An MLA drafter."""
    bench(context)
    from sglang.srt.models.registry import ModelRegistry

    return mla_drafter(
        ModelRegistry.get_supported_archs(),
        lambda: _runs(context, "mla", model_type="deepseek_v3"),
        lambda: _runs(context, "mla"),
    )


def _require_shared(pair: Pair) -> None:
    drafter, inner = pair.drafter.model, pair.target.model.language_model
    require(drafter.model.embed_tokens.weight is inner.model.embed_tokens.weight, "the drafter has its own embedding")
    require(drafter.lm_head.weight is inner.lm_head.weight, "the drafter has its own lm_head")


def sharing(context: Context) -> str:
    """A drafter without embedding and lm_head gets the target's tensors; one with its own vocabulary keeps its head."""
    engine = bench(context)
    _require_shared(engine.pair(engine.drafter("llama", draft_vocab_size=None)))
    own = engine.pair(engine.drafter("llama", draft_vocab_size=VOCAB // 2))
    drafter, inner = own.drafter.model, own.target.model.language_model
    require(drafter.model.embed_tokens.weight is inner.model.embed_tokens.weight, "the drafter has its own embedding")
    require(len(drafter.lm_head.weight) == VOCAB // 2, "a drafter with a smaller vocabulary gets the target's head")
    return "embedding and lm_head are the target's own tensors; a smaller vocabulary keeps its own lm_head"
