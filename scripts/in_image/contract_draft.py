"""What a tiny EAGLE-3 drafter computes, without an engine: transformers' own attention, and the layer around it."""

import json
from pathlib import Path
from typing import Any

# The projections of each attention that read the embedding beside the hidden state.
DOUBLE = {"llama": ("q_proj", "k_proj", "v_proj"), "mla": ("q_a_proj", "kv_a_proj_with_mqa")}


def _attention(kind: str, config: dict[str, Any], weights: dict[str, Any], x: Any) -> Any:
    """transformers' causal attention, `llama` or `mla`, over x: [tokens, 2 * hidden] -> [tokens, hidden]."""
    import torch
    from transformers import DeepseekV3Config, LlamaConfig
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
    from transformers.models.llama import modeling_llama as llama

    stated = {name: value for name, value in config.items() if name not in ("model_type", "architectures")}
    if kind == "mla":
        own: Any = DeepseekV3Config(**stated, attn_implementation="eager")
        attention, rotary = deepseek.DeepseekV3Attention(own, 0), deepseek.DeepseekV3RotaryEmbedding(own)
    else:
        own = LlamaConfig(**stated, attn_implementation="eager")
        attention, rotary = llama.LlamaAttention(own, 0), llama.LlamaRotaryEmbedding(own)
    for name in DOUBLE[kind]:
        setattr(attention, name, torch.nn.Linear(x.shape[-1], getattr(attention, name).out_features, bias=False))
    prefix = "midlayer.self_attn."
    attention.load_state_dict({n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)})
    tokens = len(x)
    mask = torch.full((tokens, tokens), float("-inf")).triu(1)[None, None]
    positions = rotary(x[None], torch.arange(tokens)[None])
    return attention(x[None], position_embeddings=positions, attention_mask=mask)[0][0]


def drafted(kind: str, folder: Path, embeddings: Any, states: Any) -> tuple[Any, Any]:
    """What the drafter in `folder` makes of one sequence: its own state before the last norm, and behind it.

    `embeddings`: [tokens, hidden]; `states`: the target's three, [tokens, 3 * hidden]. Each result: [tokens, hidden].
    """
    import torch
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")

    def norm(x: Any, name: str) -> Any:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"])
        return x * scale * weights[f"{name}.weight"]

    def linear(x: Any, name: str) -> Any:
        return x @ weights[f"{name}.weight"].T

    with torch.inference_mode():
        combined = linear(states, "fc")
        inputs = [norm(embeddings, "midlayer.input_layernorm"), norm(combined, "midlayer.hidden_norm")]
        residual = combined + _attention(kind, config, weights, torch.cat(inputs, dim=-1))
        x = norm(residual, "midlayer.post_attention_layernorm")
        gated = torch.nn.functional.silu(linear(x, "midlayer.mlp.gate_proj")) * linear(x, "midlayer.mlp.up_proj")
        state = residual + linear(gated, "midlayer.mlp.down_proj")
        return state, norm(state, "norm")
