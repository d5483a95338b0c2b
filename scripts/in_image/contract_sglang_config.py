"""What SGLang doesn't say about a drafter's config: each of these starts, and is accepted about never, or fails late.

Read from the releases 0.5.9 to 0.5.23: embedding and head are shared by reference, without a look at their sizes.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contract_check import Context, Unmet, require

# Kimi-K2.5's own config.json.
HIDDEN, VOCAB, LAYERS = 7168, 163840, 61
ARCHITECTURES = ("Eagle3DeepseekV2ForCausalLM", "LlamaForCausalLMEagle3")
KEY = "eagle_aux_hidden_state_layer_ids"


def problems(config: Mapping[str, Any], tensors: Sequence[str]) -> list[str]:
    """What is wrong with a drafter for Kimi-K2.5: of its config.json, and the names in its checkpoint. Pure."""
    found = []
    named = list(config.get("architectures") or [])
    if not named or named[0] not in ARCHITECTURES:
        found.append(f"architectures is {named}, and {' and '.join(ARCHITECTURES)} are known")
    for key, wanted in (("hidden_size", HIDDEN), ("vocab_size", VOCAB), ("num_hidden_layers", 1)):
        if config.get(key) != wanted:
            found.append(f"{key} is {config.get(key)}, and must be {wanted}")
    if config.get("target_hidden_size", HIDDEN) != HIDDEN:
        found.append(f"target_hidden_size is {config['target_hidden_size']}: the embedding is not shared then")
    if "draft_vocab_size" not in config:
        found.append("draft_vocab_size is missing: state it, or null for the target's own head")
    elif config["draft_vocab_size"] is not None and not any(name.endswith("lm_head.weight") for name in tensors):
        found.append("draft_vocab_size is stated and the checkpoint has no lm_head: the head stays without weights")
    nested = (config.get("eagle_config") or {}).get(KEY)
    top = config.get(KEY)
    if nested is not None and top is not None and nested != top:
        found.append(f"{KEY} is {nested} in eagle_config and {top} at the top level")
    ids = nested if nested is not None else top
    if ids is not None:
        shift = 1 if ids and ids[0] == 1 else 0
        layers = [layer + shift for layer in ids]
        if len(layers) != 3 or layers != sorted(set(layers) & set(range(1, LAYERS))):
            found.append(f"{KEY} is {ids}: three that ascend are wanted, of a target with {LAYERS} layers")
    return found


def tensors(folder: Path) -> list[str]:
    """The names of the tensors in the safetensors files of a folder, by their headers. Raises Unmet where none is."""
    files = sorted(folder.glob("*.safetensors"))
    require(files, f"{folder} holds no safetensors file")
    names: list[str] = []
    for file in files:
        with file.open("rb") as data:
            size = struct.unpack("<Q", data.read(8))[0]
            names += json.loads(data.read(size))
    return names


def check(folder: Path, _: Context) -> str:
    """The drafter in `folder` has none of the faults that the engine doesn't name."""
    try:
        config = json.loads((folder / "config.json").read_text())
        found = problems(config, tensors(folder))
    except (OSError, ValueError, struct.error) as error:
        raise Unmet(f"{folder} can't be read as a drafter: {error}") from None
    require(not found, "; ".join(found))
    return f"{config['architectures'][0]} fits Kimi-K2.5"
