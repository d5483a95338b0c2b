"""The oracle's files beside the weights: configs, tokenizer and image processor, as an engine reads them. No torch."""

from typing import Any

import oracle_plan as plan
from oracle_plan import PLACES, Oracle, draft_vocabulary

MAX_POSITIONS = 4096
# A factor of 1 leaves the plain rotary embedding. But without YaRN, vLLM's MLA drafter of 0.18 to 0.27.1 fails, and so
# does SGLang's latent attention on a CPU.
YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 1.0,
    "original_max_position_embeddings": MAX_POSITIONS,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
SPECIAL = (
    "[BOS]",
    "[EOS]",
    "[PAD]",
    "[UNK]",
    "<|im_system|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_middle|>",
    "<|im_end|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_pad|>",
    "<|media_end|>",
    "<|kimi_k25_video_placeholder|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<think>",
    "</think>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_{{ message.role }}|> {{ message.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|> <|im_middle|>{% endif %}"
)
# What 0.16.0 asks of the image processor, which it always loads with remote code; later releases bring their own.
IMAGE_PROCESSOR = '''\
"""An image processor that counts one token for each image: the oracle is about text."""

from transformers.image_processing_utils import BaseImageProcessor


class OracleImageProcessor(BaseImageProcessor):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.num_frames_per_chunk = 4

    def media_tokens_calculator(self, media):
        return 1

    def preprocess(self, *_, **__):
        raise ValueError("the oracle takes text alone")
'''


def special(name: str) -> int:
    """The id of a special token: they follow the ordinary ones."""
    return PLACES + SPECIAL.index(name)


def common() -> dict[str, Any]:
    """What the configs of target and drafter share."""
    return {
        "hidden_size": plan.HIDDEN,
        "vocab_size": plan.VOCAB,
        "num_attention_heads": plan.HEADS,
        "num_key_value_heads": plan.HEADS,
        "intermediate_size": plan.DENSE_INNER,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": plan.ROPE_BASE,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": special("[BOS]"),
        "eos_token_id": special("[EOS]"),
        "pad_token_id": special("[PAD]"),
    }


def text_config(oracle: Oracle) -> dict[str, Any]:
    """The config of the target's language model, as a DeepseekV3ForCausalLM reads it."""
    return common() | plan.MLA | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "num_hidden_layers": oracle.layers,
        "rope_scaling": YARN,
        "moe_intermediate_size": plan.MOE_INNER,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": oracle.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": plan.EXPERTS_PER_TOKEN,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": plan.ROUTED_SCALE,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }  # fmt: skip


def target_config(oracle: Oracle) -> dict[str, Any]:
    """The config of a KimiK25ForConditionalGeneration."""
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text_config(oracle),
        "vision_config": {
            "model_type": "kimi_k25_vision",
            "patch_size": 14,
            "merge_kernel_size": [2, 2],
            "num_hidden_layers": 1,
            "hidden_size": plan.VISION_HIDDEN,
            "num_attention_heads": plan.VISION_HEADS,
            "intermediate_size": plan.VISION_INNER,
            # SGLang reads the projector's sizes by the names of the model's own config.
            "vt_hidden_size": plan.VISION_HIDDEN,
            "text_hidden_size": plan.HIDDEN,
            # The names of the model's own config, and those of transformers' class.
            **{f"init_pos_emb_{name}": 4 for name in ("height", "width", "time")},
            **{f"pos_emb_{name}": 4 for name in ("height", "width", "time")},
        },
        "projection_hidden_size": plan.VISION_HIDDEN,
        "media_placeholder_token_id": special("<|media_pad|>"),
        "image_token_id": special("<|media_pad|>"),
        "video_token_id": special("<|kimi_k25_video_placeholder|>"),
        "vision_start_token_id": special("<|media_begin|>"),
        "vision_end_token_id": special("<|media_end|>"),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": special("[BOS]"),
        "eos_token_id": special("[EOS]"),
        "pad_token_id": special("[PAD]"),
    }


def drafter_config(oracle: Oracle) -> dict[str, Any]:
    """The config of the drafter. vLLM reads the layer ids at the top level, SGLang inside `eagle_config`."""
    ids = {"eagle_aux_hidden_state_layer_ids": list(oracle.ids)}
    shared = common() | {
        "num_hidden_layers": 1,
        # Where the drafter has no head of its own, SGLang's Llama drafter shares the target's only without a size here.
        "draft_vocab_size": len(draft_vocabulary(oracle)) if oracle.partial else None,
        "eagle_config": {"use_aux_hidden_state": True, **ids},
        **ids,
    }
    if oracle.drafter == "llama":
        return shared | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "head_dim": plan.HEAD_DIM}
    names = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "rope_scaling": YARN}
    return shared | plan.MLA | names


def tokenizer() -> dict[str, dict[str, Any]]:
    """The tokenizer's files: one word for each token, `t0` to `t503`, with spaces between them."""
    words = [f"t{token}" for token in range(PLACES)] + list(SPECIAL)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": special(name), "content": name, **flags} for name in SPECIAL]
    model = {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "[UNK]"}
    parts = {"truncation": None, "padding": None, "normalizer": None, "post_processor": None, "decoder": None}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    whole = {"version": "1.0", **parts, "added_tokens": added, "pre_tokenizer": {"type": "WhitespaceSplit"}}
    return {"tokenizer.json": whole | {"model": model}, "tokenizer_config.json": settings}


def preprocessor() -> dict[str, Any]:
    """preprocessor_config.json with the names of Kimi-K2.5's own, and what 0.16.0 needs to load a processor."""
    name = "OracleImageProcessor"
    return {
        "auto_map": {"AutoImageProcessor": f"oracle_image_processor.{name}"},
        "image_processor_type": name,
        "media_proc_cfg": {
            "in_patch_limit": 64,
            "in_patch_limit_each_frame": 64,
            "in_patch_limit_video": 256,
            "patch_limit_on_one_side": 16,
            "patch_size": 14,
            "merge_kernel_size": 2,
            "temporal_merge_kernel_size": 4,
            "fixed_output_tokens": None,
            "sample_fps": 2.0,
            "timestamp_mode": "hh:mm:ss.fff",
            "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    }


def configs(oracle: Oracle) -> dict[str, dict[str, Any]]:
    """Each JSON file that an engine reads, by its path."""
    return {
        "target/config.json": target_config(oracle),
        "target/generation_config.json": {"eos_token_id": special("[EOS]"), "max_length": MAX_POSITIONS},
        "target/preprocessor_config.json": preprocessor(),
        **{f"target/{name}": data for name, data in tokenizer().items()},
        "drafter/config.json": drafter_config(oracle),
    }
