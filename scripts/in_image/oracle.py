"""The oracle: a tiny Kimi-K2.5 target and an EAGLE-3 drafter that is right if, and only if, the hidden states are.

`python3 oracle.py OUT [options]` writes OUT/target, OUT/drafter and OUT/oracle.json, byte for byte the same each time.
An engine loads both folders as they are, without a network. Acceptance length is exactly K + 1 when the engine hands
the drafter the states that it asks for, and exactly 1 otherwise. oracle.json says what to send and what has to come
back: prompt, output, and for each K the counts of a run in which every round is a full one.

`python3 oracle.py check OUT [--json]` proves the pair without an engine: transformers' hidden states drive the drafter,
written out in torch; it is right with them, and with none of the faults that an engine can have.

Needs torch and safetensors, and `check` transformers. Exit status: 0, 1 if a check fails, 2 for wrong arguments.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

LEAST_LAYERS, MOST_LAYERS = 7, 61
LEAST_EXPERTS = 4
ROUNDS = 24
MOST_DRAFT_TOKENS = 16
MAX_POSITIONS = 4096
PROMPT_TOKENS = 12
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
    from oracle_weights import PLACES

    return PLACES + SPECIAL.index(name)


def common() -> dict[str, Any]:
    """What the configs of target and drafter share."""
    import oracle_weights as w

    return {
        "hidden_size": w.HIDDEN,
        "vocab_size": w.VOCAB,
        "num_attention_heads": w.HEADS,
        "num_key_value_heads": w.HEADS,
        "intermediate_size": w.DENSE_INNER,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": w.ROPE_BASE,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": special("[BOS]"),
        "eos_token_id": special("[EOS]"),
        "pad_token_id": special("[PAD]"),
    }


def text_config(oracle: Any) -> dict[str, Any]:
    """The config of the target's language model, as a DeepseekV3ForCausalLM reads it."""
    import oracle_weights as w

    return common() | w.MLA | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "num_hidden_layers": oracle.layers,
        "moe_intermediate_size": w.MOE_INNER,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": oracle.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": w.EXPERTS_PER_TOKEN,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": w.ROUTED_SCALE,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }  # fmt: skip


def target_config(oracle: Any) -> dict[str, Any]:
    """The config of a KimiK25ForConditionalGeneration."""
    import oracle_weights as w

    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text_config(oracle),
        "vision_config": {
            "model_type": "kimi_k25_vision",
            "patch_size": 14,
            "merge_kernel_size": [2, 2],
            "num_hidden_layers": 1,
            "hidden_size": w.VISION_HIDDEN,
            "num_attention_heads": w.VISION_HEADS,
            "intermediate_size": w.VISION_INNER,
            # The names of the model's own config, and those of transformers' class.
            **{f"init_pos_emb_{name}": 4 for name in ("height", "width", "time")},
            **{f"pos_emb_{name}": 4 for name in ("height", "width", "time")},
        },
        "projection_hidden_size": w.VISION_HIDDEN,
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


def drafter_config(oracle: Any) -> dict[str, Any]:
    """The config of the drafter. The layer ids are at the top level, where each release reads them."""
    import oracle_weights as w

    shared = common() | {
        "num_hidden_layers": 1,
        "draft_vocab_size": len(w.draft_vocabulary(oracle)),
        "eagle_aux_hidden_state_layer_ids": list(oracle.ids),
    }
    if oracle.drafter == "llama":
        return shared | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "head_dim": w.HEAD_DIM}
    # Without YaRN the class of 0.18 to 0.27.1 fails; a factor of 1 leaves the plain rotary embedding.
    yarn = {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": MAX_POSITIONS,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    names = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "rope_scaling": yarn}
    return shared | w.MLA | names


def tokenizer() -> dict[str, dict[str, Any]]:
    """The tokenizer's files: one word for each token, `t0` to `t503`, with spaces between them."""
    from oracle_weights import PLACES

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


def accepted(oracle: Any, sequence: Sequence[int], start: int, k: int) -> int:
    """How many of k drafts for sequence[start], sequence[start + 1], ... are right: up to the first it can't write."""
    from oracle_weights import draft_vocabulary

    vocabulary = set(draft_vocabulary(oracle))
    return next((i for i in range(k) if sequence[start + i] not in vocabulary), k)


def expected(oracle: Any, output: Sequence[int], k: int) -> dict[str, Any]:
    """What the engine counts in a run of ROUNDS rounds with k draft tokens.

    The first token comes from the prompt, so that the first draft is for output[1]; a round writes the tokens that it
    accepts and one of the target's own. `max_tokens` ends the run with a full round.
    """
    position, rounds = 1, []
    for _ in range(ROUNDS):
        rounds.append(accepted(oracle, output, position, k))
        position += rounds[-1] + 1
    return {
        "max_tokens": position,
        "drafts": ROUNDS,
        "draft_tokens": ROUNDS * k,
        "accepted": sum(rounds),
        "accepted_per_position": [sum(n > i for n in rounds) for i in range(k)],
        "acceptance_length": 1 + sum(rounds) / ROUNDS,
    }


def expectations(oracle: Any) -> dict[str, Any]:
    """oracle.json: what the pair is, the prompt and the output as token ids and as text, and the counts for each K."""
    from oracle_weights import PLACES, following

    prompt = [(37 * i + 5) % PLACES for i in range(PROMPT_TOKENS)]
    output = [following(prompt[-1])]
    while len(output) < 1 + ROUNDS * (MOST_DRAFT_TOKENS + 1):
        output.append(following(output[-1]))
    return {
        "oracle": asdict(oracle),
        "prompt": prompt,
        "prompt_text": " ".join(f"t{token}" for token in prompt),
        "output": output,
        "output_text": " ".join(f"t{token}" for token in output),
        "rounds": ROUNDS,
        "k": {str(k): expected(oracle, output, k) for k in range(1, MOST_DRAFT_TOKENS + 1)},
    }


def write(out: Path, oracle: Any) -> None:
    """Write the pair and oracle.json to the folder `out`, all or nothing. Raises SystemExit if it isn't empty."""
    import oracle_weights
    from safetensors.torch import save_file

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SystemExit(f"error: {out} exists and is not an empty folder: name another, or remove it")
    try:
        half = out.with_name(out.name + ".part")
        shutil.rmtree(half, ignore_errors=True)
        files: dict[str, Any] = {
            "target/config.json": target_config(oracle),
            "target/generation_config.json": {"eos_token_id": special("[EOS]"), "max_length": MAX_POSITIONS},
            "target/preprocessor_config.json": preprocessor(),
            **{f"target/{name}": data for name, data in tokenizer().items()},
            "drafter/config.json": drafter_config(oracle),
            "oracle.json": expectations(oracle),
        }
        for name, data in files.items():
            (half / name).parent.mkdir(parents=True, exist_ok=True)
            (half / name).write_text(json.dumps(data, indent=1) + "\n")
        (half / "target/oracle_image_processor.py").write_text(IMAGE_PROCESSOR)
        for name, make in (("target", oracle_weights.target), ("drafter", oracle_weights.drafter)):
            save_file(make(oracle), half / name / "model.safetensors", metadata={"format": "pt"})
            (half / name / "model.safetensors").chmod(0o644)  # readable for the engine's user
        if out.exists():
            out.rmdir()
        half.rename(out)
    except OSError as error:
        shutil.rmtree(half, ignore_errors=True)
        raise SystemExit(f"error: {out} can't be written: {error.strerror}; name a folder that you can write") from None


def default_ids(layers: int) -> tuple[int, ...]:
    """The layers that an engine captures when it is told nothing."""
    return (2, layers // 2, layers - 3)


def parse(arguments: Sequence[str]) -> tuple[Path, dict[str, Any]]:
    """OUT and the fields of the oracle. Exits with 2 and one line for arguments that no oracle can have."""
    parser = argparse.ArgumentParser(prog="oracle.py", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; it must be empty or not exist")
    parser.add_argument("--layers", type=int, default=9, help=f"{LEAST_LAYERS} to {MOST_LAYERS} (default 9)")
    parser.add_argument("--drafter", choices=("llama", "mla"), default="llama", help="its attention (default llama)")
    parser.add_argument(
        "--attention", action=argparse.BooleanOptionalAction, default=True,
        help="let drafts depend on the drafter's attention too: next token, positions, KV cache (default on)",
    )  # fmt: skip
    parser.add_argument(
        "--partial-vocabulary", action="store_true", help="a drafter that can't write every ninth token: rejections"
    )
    parser.add_argument("--experts", type=int, default=8, help=f"experts of a layer, {LEAST_EXPERTS} or more (default 8)")
    parser.add_argument("--ids", type=int, nargs=3, metavar="ID", help="layers whose input is captured, ascending")
    given = parser.parse_args(arguments)
    ids = tuple(given.ids or default_ids(given.layers))
    if not LEAST_LAYERS <= given.layers <= MOST_LAYERS:
        parser.error(f"--layers {given.layers}: with fewer than {LEAST_LAYERS} the default ids meet, and the clock is"
                     f" made for up to {MOST_LAYERS}")  # fmt: skip
    if given.experts < LEAST_EXPERTS:
        parser.error(f"--experts {given.experts}: two are chosen and two have to be left, so give {LEAST_EXPERTS} or more")
    if not 1 <= ids[0] < ids[1] < ids[2] < given.layers:
        parser.error(f"--ids {' '.join(map(str, ids))}: three ascending ids from 1 to {given.layers - 1}; an engine"
                     " can't capture 0, and captures in ascending order")  # fmt: skip
    fields = {"drafter": given.drafter, "attention": given.attention, "partial": given.partial_vocabulary}
    return given.out, {"layers": given.layers, "ids": ids, "experts": given.experts, **fields}


def check(arguments: Sequence[str]) -> int:
    """Run the engine-free check of a folder. The exit status."""
    parser = argparse.ArgumentParser(prog="oracle.py check", description="Prove the pair without an engine.")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder that oracle.py wrote")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    given = parser.parse_args(arguments)
    if not (given.out / "oracle.json").is_file():
        raise SystemExit(f"error: {given.out} has no oracle.json: write one with `oracle.py {given.out}`")
    import oracle_reference

    results = oracle_reference.check(given.out)
    passed = bool(results) and all(result.passed for result in results)
    if given.json:
        print(json.dumps({"passed": passed, "checks": [asdict(r) | {"passed": r.passed} for r in results]}, indent=1))
    else:
        for result in results:
            print(f"{'ok  ' if result.passed else 'FAIL'} {result.name}: {result.found} of {result.of} drafts right,"
                  f" {result.expected} expected")  # fmt: skip
    return 0 if passed else 1


def main(arguments: list[str]) -> int:
    """Run as a command. The exit status."""
    if arguments[:1] == ["check"]:
        return check(arguments[1:])
    out, fields = parse(arguments)
    from oracle_weights import Oracle

    oracle = Oracle(**fields)
    write(out, oracle)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"{out}: target of {oracle.layers} layers, {oracle.drafter} drafter for the input of layers"
          f" {', '.join(map(str, oracle.ids))}; {size / 1e6:.1f} MB")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
