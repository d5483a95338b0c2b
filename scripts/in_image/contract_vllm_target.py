"""The contract's checks of the target: configuration, EAGLE-3 interface, and the hidden states that it hands over."""

import re
from pathlib import Path
from typing import Any

from contract_check import Context, Unmet, kimi_k2_config, package_root, require
from contract_states import LENGTHS, TOLERANCE, compare, hidden_states, prompt
from contract_vllm_bench import bench
from tiny_models import MEDIA_TOKEN

EXPLICIT = (1, 3, 5)  # layer ids, different from the default ones


def allow_list(context: Context) -> str:
    """A Kimi-K2.5 target with an EAGLE-3 drafter is accepted by the configuration."""
    engine = bench(context)
    target = engine.model_config(engine.target)
    try:
        config = engine.speculative_config(engine.drafter("llama"), target)
    except ValueError as error:
        raise Unmet(f"the engine refuses kimi_k25 as an EAGLE-3 target: {error}") from None
    require(config.method == "eagle3", f"the method becomes {config.method}, not eagle3")
    return f"target {target.hf_config.model_type} ({target.hf_text_config.model_type}) accepted with method eagle3"


def placeholder_token(context: Context) -> str:
    """The drafter's loader finds the placeholder token of an image in the target's config."""
    engine = bench(context)
    proposer = engine.proposer(engine.drafter("llama"))
    try:
        drafter = engine.load(proposer)
    except AttributeError as error:
        raise Unmet(f"the drafter's loader fails on the wrapper: {error}") from None
    found = getattr(drafter.config, "image_token_index", None)
    require(found == MEDIA_TOKEN, f"the drafter's loader takes {found} for the placeholder token, not {MEDIA_TOKEN}")
    own = engine.wrapper.media_placeholder
    require(own == MEDIA_TOKEN, f"the wrapper takes {own} for the placeholder token, not {MEDIA_TOKEN}")
    return "the drafter's loader reads media_placeholder_token_id"


def config_type(context: Context) -> str:
    """A drafter whose config.json says kimi_k2 has a config."""
    folder = bench(context).drafter("llama:kimi_k2")
    from vllm.transformers_utils.config import get_config

    return kimi_k2_config(folder, get_config)


def language_model_supports(context: Context) -> str:
    """The language model's classes have the EAGLE-3 interface, by the engine's own test of it."""
    bench(context)
    from vllm.model_executor.models import deepseek_v2
    from vllm.model_executor.models.interfaces import supports_eagle3

    names = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
    for name in names:
        require(supports_eagle3(getattr(deepseek_v2, name)), f"{name} doesn't have the EAGLE-3 interface")
    return " and ".join(names)


def wrapper_supports(context: Context) -> str:
    """The wrapper, which the runner asks, has the EAGLE-3 interface: its class and an object of it."""
    wrapper = bench(context).wrapper
    from vllm.model_executor.models.interfaces import supports_eagle3

    name = type(wrapper).__name__
    require(name == "KimiK25ForConditionalGeneration", f"the engine makes a {name} of a Kimi-K2.5 checkpoint")
    require(supports_eagle3(type(wrapper)) and supports_eagle3(wrapper), f"{name} doesn't have the EAGLE-3 interface")
    return name


def default_layer_methods(sources: Path) -> list[str]:
    """The methods by which the runners under `sources` (a vllm package) ask a model for its default layers."""
    files = [sources / "v1/worker/gpu_model_runner.py", *sorted((sources / "v1/worker/gpu").rglob("*.py"))]
    texts = [file.read_text() for file in files if file.is_file()]
    return sorted({name for text in texts for name in re.findall(r"\w\.(get_eagle3\w*_layers)\(\)", text)})


def set_layers(model: Any, layers: tuple[int, ...] | None) -> tuple[int, ...]:
    """Tell the wrapper which layers to capture as the runner does; None means the default ones. Returns the ids."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    require(supports_eagle3(model), f"{type(model).__name__} doesn't have the EAGLE-3 interface")
    if layers is None:
        layers = tuple(getattr(model, _default_layer_methods()[0])())
    model.set_aux_hidden_state_layers(layers)
    return layers


def _default_layer_methods() -> list[str]:
    names = default_layer_methods(package_root("vllm") / "vllm")
    require(names, "no runner of this release asks a model for its default layers")
    return names


def delegation(context: Context) -> str:
    """What the runner tells and asks the wrapper reaches the language model inside."""
    wrapper = bench(context).wrapper
    inner = wrapper.language_model.model
    set_layers(wrapper, EXPLICIT)
    found = tuple(getattr(inner, "aux_hidden_state_layers", ()))
    require(found == EXPLICIT, f"layers {EXPLICIT} set on the wrapper become {found} in the language model")
    count = len(inner.layers)
    wanted = (2, count // 2, count - 3)
    for name in _default_layer_methods():
        require(hasattr(wrapper, name), f"the runner asks for {name}, which the wrapper doesn't have")
        answer = tuple(getattr(wrapper, name)() or ())
        require(answer == wanted, f"{name} of the wrapper answers {answer}, not {wanted} for {count} layers")
    return f"layers pass through; {', '.join(_default_layer_methods())} answers {wanted} for {count} layers"


def _hidden_states(context: Context, layers: tuple[int, ...] | None) -> str:
    """The states that the wrapper hands over are transformers' hidden_states at the same ids, and at no neighbour."""
    import torch

    engine = bench(context)
    layers = set_layers(engine.wrapper, layers)
    for length in LENGTHS:
        ids = prompt(length)
        output = engine.run(engine.config, engine.wrapper, input_ids=ids, positions=torch.arange(length))
        require(isinstance(output, tuple) and len(output) == 2, "the model returns no auxiliary hidden states")
        wanted = hidden_states(engine.reference, ids)
        final, states = output
        worst = (final - wanted[-1]).abs().max()
        require(worst < TOLERANCE, f"the model's last state is not transformers' for {length} tokens")
        compare(layers, states, wanted, f"{length} tokens")
    lengths = ", ".join(map(str, LENGTHS))
    return f"ids {layers} are transformers' hidden_states within {TOLERANCE}, prompts of {lengths} tokens, MLA and MoE"


def hidden_states_default(context: Context) -> str:
    """The states at the ids that the model gives by default."""
    return _hidden_states(context, None)


def hidden_states_explicit(context: Context) -> str:
    """The states at ids that a drafter's config gives."""
    return _hidden_states(context, EXPLICIT)
