"""Ways to capture wrong states in SGLang. Each changes the text of a file; one that finds nothing fails its test."""

import re

MODEL = "sglang/srt/models/deepseek_v2.py"
BOUNDARY = "sglang/srt/layers/layer_boundary/stage.py"  # where later releases capture


def previous_layer(text: str) -> str:
    """MODEL: each state is that of the layer before."""
    return re.sub(r"\bif i in self\.layers_to_capture", "if i + 1 in self.layers_to_capture", text)


def next_layer(text: str) -> str:
    """MODEL: each state is that of the layer behind, as if it was taken after the layer."""
    return re.sub(r"\bif i in self\.layers_to_capture", "if i - 1 in self.layers_to_capture", text)


def without_residual(text: str) -> str:
    """MODEL of 0.5.9: the residual is left out."""
    return text.replace("aux_hidden_states.append(hidden_states + residual)", "aux_hidden_states.append(hidden_states)")


def by_reference(text: str) -> str:
    """MODEL of 0.5.9: the state is kept by reference, and added up when the layers have written over it."""
    keep = text.replace("append(hidden_states + residual)", "append((hidden_states, residual))")
    late = "return hidden_states, [h + r for h, r in aux_hidden_states]"
    return keep.replace("return hidden_states, aux_hidden_states", late)


def behind_the_norm(text: str) -> str:
    """BOUNDARY of 0.5.23: what the layer's norm puts out is taken, instead of the sum that it was made of."""
    return text.replace("residual_value = stream.residual", "residual_value = hidden_states")
