"""Tiny checkpoints with random weights, in the shapes and names of Kimi-K2.5 and its EAGLE-3 drafters.

Each function writes a folder that an engine loads as it loads the real thing: config.json and model.safetensors. The
weights are seeded, so the same folder is written each time.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HIDDEN = 64
VOCAB = 128
LAYERS = 9
DENSE_LAYERS = 1  # the rest are mixture-of-experts layers, as in Kimi-K2.5
HEADS = 4
EXPERTS = 8
MEDIA_TOKEN = 97

# The dimensions of one multi-head latent attention; the latent and rope sizes are Kimi-K2.5's own.
MLA = {"q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}

# Kimi's rope, scaled down.
YARN: dict[str, Any] = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
TEXT: dict[str, Any] = (
    COMMON
    | MLA
    | {
        "num_hidden_layers": LAYERS,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": DENSE_LAYERS,
        "moe_layer_freq": 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
)
VISION: dict[str, Any] = {
    "model_type": "kimi_k25_vision",
    "patch_size": 14,
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
    "init_pos_emb_time": 4,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "pos_emb_time": 4,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "merge_kernel_size": [2, 2],
    # The names that Kimi-K2.5's own config.json uses for the projector, which SGLang reads.
    "vt_hidden_size": 32,
    "text_hidden_size": HIDDEN,
}
TARGET: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": TEXT | {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]},
    "vision_config": VISION,
    # The name that Kimi-K2.5's own config.json uses, and the one that transformers' class uses since 5.x.
    "media_placeholder_token_id": MEDIA_TOKEN,
    "image_token_id": MEDIA_TOKEN,
    "projection_hidden_size": 32,
    "tie_word_embeddings": False,
    "pad_token_id": 2,
    "torch_dtype": "float32",
}
REFERENCE: dict[str, Any] = TEXT | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
DRAFTER: dict[str, Any] = COMMON | {
    "num_hidden_layers": 1,
    "intermediate_size": 128,
    "draft_vocab_size": VOCAB,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 6],
}
LLAMA_DRAFTER = DRAFTER | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "head_dim": 16}
MLA_DRAFTER = (
    DRAFTER
    | MLA
    | {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        # Without YaRN the class of 0.18 to 0.27.1 fails on a plain rope; Kimi's drafters have YaRN anyway.
        "rope_scaling": YARN,
    }
)
LLAMA_TARGET = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "intermediate_size": 128,
    "head_dim": 16,
}

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _mla(prefix: str, inputs: int) -> Shapes:
    nope, rope, v = MLA["qk_nope_head_dim"], MLA["qk_rope_head_dim"], MLA["v_head_dim"]
    yield f"{prefix}.q_a_proj.weight", (MLA["q_lora_rank"], inputs)
    yield f"{prefix}.q_a_layernorm.weight", (MLA["q_lora_rank"],)
    yield f"{prefix}.q_b_proj.weight", (HEADS * (nope + rope), MLA["q_lora_rank"])
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (MLA["kv_lora_rank"] + rope, inputs)
    yield f"{prefix}.kv_a_layernorm.weight", (MLA["kv_lora_rank"],)
    yield f"{prefix}.kv_b_proj.weight", (HEADS * (nope + v), MLA["kv_lora_rank"])
    yield f"{prefix}.o_proj.weight", (HIDDEN, HEADS * v)


def _mlp(prefix: str, inner: int) -> Shapes:
    yield f"{prefix}.gate_proj.weight", (inner, HIDDEN)
    yield f"{prefix}.up_proj.weight", (inner, HIDDEN)
    yield f"{prefix}.down_proj.weight", (HIDDEN, inner)


def _text() -> Shapes:
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for j in range(LAYERS):
        layer = f"model.layers.{j}"
        yield f"{layer}.input_layernorm.weight", (HIDDEN,)
        yield f"{layer}.post_attention_layernorm.weight", (HIDDEN,)
        yield from _mla(f"{layer}.self_attn", HIDDEN)
        if j < DENSE_LAYERS:
            yield from _mlp(f"{layer}.mlp", 128)
            continue
        yield f"{layer}.mlp.gate.weight", (EXPERTS, HIDDEN)
        yield f"{layer}.mlp.gate.e_score_correction_bias", (EXPERTS,)
        yield from _mlp(f"{layer}.mlp.shared_experts", 32)
        for e in range(EXPERTS):
            yield from _mlp(f"{layer}.mlp.experts.{e}", 32)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def _drafter(attention: Shapes) -> Shapes:
    yield "fc.weight", (HIDDEN, 3 * HIDDEN)
    yield "midlayer.input_layernorm.weight", (HIDDEN,)
    yield "midlayer.hidden_norm.weight", (HIDDEN,)
    yield "midlayer.post_attention_layernorm.weight", (HIDDEN,)
    yield from attention
    yield from _mlp("midlayer.mlp", 128)
    yield "norm.weight", (HIDDEN,)


def _llama_attention() -> Shapes:
    for name in ("q_proj", "k_proj", "v_proj"):
        yield f"midlayer.self_attn.{name}.weight", (HIDDEN, 2 * HIDDEN)
    yield "midlayer.self_attn.o_proj.weight", (HIDDEN, HIDDEN)


def _random(shapes: Shapes, seed: int) -> dict[str, Any]:
    """Weights that keep each layer's contribution as large as the residual: a wrong layer can't hide.

    Norms are never the identity, so a state taken behind a norm is another state.
    """
    import torch  # here, as an engine must be prepared before torch is imported

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes:
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            weights[name] = noise if "embed_tokens" in name else noise / shape[1] ** 0.5
        else:
            weights[name] = 0.1 * noise + (0.0 if name.endswith("bias") else 1.0)
    return weights


def _write(folder: Path, config: dict[str, Any], weights: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if weights:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_target(folder: Path, **changes: Any) -> Path:
    """A KimiK25ForConditionalGeneration: the text model alone has weights, under `language_model.`.

    `changes` go into its text_config, here and in `write_reference`.
    """
    text = {f"language_model.{name}": weight for name, weight in _random(_text(), 0).items()}
    return _write(folder, TARGET | {"text_config": TARGET["text_config"] | changes}, text)


def write_reference(folder: Path, **changes: Any) -> Path:
    """The target's text model as a DeepseekV3ForCausalLM for transformers: the same weights."""
    return _write(folder, REFERENCE | changes, _random(_text(), 0))


def write_llama_drafter(folder: Path, **changes: Any) -> Path:
    """A LlamaForCausalLMEagle3 without embedding and lm_head of its own; `changes` go into config.json."""
    return _write(folder, LLAMA_DRAFTER | changes, _random(_drafter(_llama_attention()), 1))


def write_mla_drafter(folder: Path, **changes: Any) -> Path:
    """An Eagle3DeepseekV2ForCausalLM without embedding and lm_head of its own; `changes` go into config.json."""
    return _write(folder, MLA_DRAFTER | changes, _random(_drafter(_mla("midlayer.self_attn", 2 * HIDDEN)), 2))


def write_llama_target(folder: Path) -> Path:
    """The config of a Llama target, without weights: one that each release's allow-list has."""
    return _write(folder, LLAMA_TARGET, {})
