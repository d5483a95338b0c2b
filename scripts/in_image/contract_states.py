"""How the states that an engine hands over are held against transformers' own, for each engine alike."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contract_check import require
from tiny_models import MEDIA_TOKEN

LENGTHS = (1, 7, 33)  # tokens of a prompt
# Both sides compute in float32 and differ in the order of sums alone: some 1e-5 after nine layers, at values up to
# about 10. The input of a neighbouring layer differs by more than 1, so this decides without doubt.
TOLERANCE = 1e-3
DISTINCT = 1e-1


def prompt(length: int) -> Any:
    """`length` token ids, [length], none of them special."""
    import torch

    return 3 + (torch.arange(length) * 37 + length) % (MEDIA_TOKEN - 3)


def reference(folder: Path) -> Any:
    """transformers' own DeepseekV3ForCausalLM of a folder that `tiny_models.write_reference` wrote, in float32."""
    import torch
    from transformers import DeepseekV3ForCausalLM

    model = DeepseekV3ForCausalLM.from_pretrained(str(folder), attn_implementation="eager", dtype=torch.float32)
    return model.eval()


def hidden_states(model: Any, ids: Any) -> list[Any]:
    """transformers' hidden_states for `ids`, [tokens]: at i the input of layer i, [tokens, hidden], the last normed."""
    import torch

    with torch.inference_mode():
        return [state[0] for state in model(ids[None], output_hidden_states=True).hidden_states]


def compare(layers: Sequence[int], states: Sequence[Any], wanted: Sequence[Any], where: str) -> None:
    """Raise Unmet unless each state, [tokens, hidden], is the `wanted` one at its layer id, and at no neighbour's."""
    require(len(states) == len(layers), f"{len(states)} states come for {len(layers)} layer ids, {where}")
    for layer, state in zip(layers, states, strict=True):
        here = f"at layer id {layer}, {where}"
        require(state.shape == wanted[layer].shape, f"the state {here} has shape {tuple(state.shape)}")
        distance = {i: float((state - wanted[i]).abs().max()) for i in (layer - 1, layer, layer + 1)}
        like = [i for i in distance if distance[i] < TOLERANCE and i != layer]
        found = f"it is the input of layer {like[0]}" if like else "it is the input of no layer near"
        require(distance[layer] < TOLERANCE, f"wrong state {here}: {found}")
        near = min(distance[layer - 1], distance[layer + 1])
        require(near > DISTINCT, f"the state {here} can't be told from a neighbour's")
