"""The contract for vLLM: each check runs the engine's own code with tiny checkpoints, on a CPU, in one process.

Nothing here asks for a version. What differs between releases is found by looking at what the release has.
"""

import importlib.util
import os
import re
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

from contract_check import Check, Context, Unmet, package_root, require

if TYPE_CHECKING:
    from contract_vllm_bench import Bench

# Names by which drafters for Kimi-K2.5 are published, and one that the engine derives.
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DeepseekV2ForCausalLM")
EXPLICIT = (1, 3, 5)  # layer ids, different from the default ones
LENGTHS = (1, 7, 33)  # tokens of a prompt
# Both sides compute in float32 and differ in the order of sums alone: some 1e-5 after nine layers, at values up to
# about 10. The input of a neighbouring layer differs by more than 1, so this decides without doubt.
TOLERANCE = 1e-3
DISTINCT = 1e-1


def prepare(context: Context) -> None:
    """Set what must be set before vllm is imported: caches under the work folder, no network, no GPU, few threads."""
    if "vllm" in sys.modules or "torch" in sys.modules:
        raise Unmet("vllm or torch is imported already: run the contract in a process of its own")
    home = context.work / "home"
    home.mkdir()
    folders = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")
    folders += ("TORCHINDUCTOR_CACHE_DIR", "VLLM_CONFIG_ROOT", "FLASHINFER_WORKSPACE_BASE", "NUMBA_CACHE_DIR")
    os.environ.update({name: str(home) for name in folders})
    os.environ.update(
        CUDA_VISIBLE_DEVICES="",
        DO_NOT_TRACK="1",
        GLOO_SOCKET_IFNAME="lo",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        TRANSFORMERS_OFFLINE="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        VLLM_PLUGINS="",
    )


@lru_cache(maxsize=1)
def _bench(work: Path) -> "Bench":
    from contract_vllm_bench import Bench

    return Bench(work)


def bench(context: Context) -> "Bench":
    """The engine of this process, made at the first call."""
    return _bench(context.work)


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
    from tiny_models import MEDIA_TOKEN

    engine = bench(context)
    proposer = engine.proposer("llama")
    try:
        drafter = engine.load(proposer)
    except AttributeError as error:
        raise Unmet(f"the drafter's loader fails on the wrapper: {error}") from None
    found = getattr(drafter.config, "image_token_index", None)
    require(found == MEDIA_TOKEN, f"the drafter's loader takes {found} for the placeholder token, not {MEDIA_TOKEN}")
    require(engine.wrapper.media_placeholder == MEDIA_TOKEN, "the wrapper holds another placeholder token than its config")
    return "the drafter's loader reads media_placeholder_token_id"


def config_type(context: Context) -> str:
    """A drafter whose config.json says kimi_k2 has a config."""
    from vllm.transformers_utils.config import get_config

    folder = bench(context).drafter("kimi_k2")
    try:
        config = get_config(str(folder), trust_remote_code=False)
    except ValueError as error:
        raise Unmet(f"a drafter of model type kimi_k2 has no config: {error}") from None
    require(config.architectures == ["LlamaForCausalLMEagle3"], f"its architectures become {config.architectures}")
    return f"kimi_k2 loads as {type(config).__name__}"


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
    from contract_vllm_bench import prompt

    engine = bench(context)
    layers = set_layers(engine.wrapper, layers)
    for length in LENGTHS:
        ids = prompt(length)
        output = engine.run(engine.config, engine.wrapper, input_ids=ids, positions=torch.arange(length))
        require(isinstance(output, tuple) and len(output) == 2, "the model returns no auxiliary hidden states")
        with torch.inference_mode():
            wanted = engine.reference(ids[None], output_hidden_states=True).hidden_states
        final, states = output
        require(len(states) == len(layers), f"{len(states)} states come for {len(layers)} layer ids")
        worst = (final - wanted[-1][0]).abs().max()
        require(worst < TOLERANCE, f"the model's last state is not transformers' for {length} tokens")
        for layer, state in zip(layers, states, strict=True):
            where = f"at layer id {layer}, {length} tokens"
            require(state.shape == wanted[layer][0].shape, f"the state {where} has shape {tuple(state.shape)}")
            distance = {i: float((state - wanted[i][0]).abs().max()) for i in (layer - 1, layer, layer + 1)}
            like = [i for i in distance if distance[i] < TOLERANCE and i != layer]
            found = f"it is the input of layer {like[0]}" if like else "it is the input of no layer near"
            require(distance[layer] < TOLERANCE, f"wrong state {where}: {found}")
            near = min(distance[layer - 1], distance[layer + 1])
            require(near > DISTINCT, f"the state {where} can't be told from a neighbour's")
    lengths = ", ".join(map(str, LENGTHS))
    return f"ids {layers} equal transformers' hidden_states within {TOLERANCE}, prompts of {lengths} tokens, MLA and MoE"


def hidden_states_default(context: Context) -> str:
    """The states at the ids that the model gives by default."""
    return _hidden_states(context, None)


def hidden_states_explicit(context: Context) -> str:
    """The states at ids that a drafter's config gives."""
    return _hidden_states(context, EXPLICIT)


class _Admitted(Exception):
    """The proposer went past its check of the drafter's class."""


def _propose(proposer: Any, drafter: type) -> None:
    """Run the proposer's real `propose` up to the drafter's first call. Raises AssertionError where it refuses."""

    class Probe(drafter):  # type: ignore[misc]
        def __init__(self) -> None: ...

        def combine_hidden_states(self, *_: Any, **__: Any) -> Any:
            raise _Admitted

    model, proposer.model = proposer.model, None
    object.__setattr__(proposer, "model", Probe.__new__(Probe))
    try:
        import inspect

        needed = [p for p in inspect.signature(proposer.propose).parameters.values() if p.default is p.empty]
        proposer.propose(**{p.name: MagicMock() for p in needed})
    except _Admitted:
        return
    finally:
        proposer.model = model
    raise Unmet("the proposer never combines the target's hidden states")


def drafter_architectures(context: Context) -> str:
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


def _drafter(context: Context, kind: str) -> str:
    """A tiny drafter loads, combines three states in their order, and runs."""
    import torch
    from contract_vllm_bench import prompt
    from safetensors.torch import load_file
    from tiny_models import HIDDEN, VOCAB

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
        require((combined - states @ fc.T).abs().max() < TOLERANCE, "the combined states are not fc of the three states")
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


def drafter_llama(context: Context) -> str:
    """A Llama drafter."""
    return _drafter(context, "llama")


def drafter_mla(context: Context) -> str:
    """An MLA drafter."""
    name = "Eagle3DeepseekV2ForCausalLM"
    bench(context)
    from vllm.model_executor.models.registry import ModelRegistry

    require(name in ModelRegistry.get_supported_archs(), f"no model class is registered for {name}")
    return _drafter(context, "mla")


def _require_shared(engine: "Bench", drafter: Any) -> None:
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
        load = importlib.import_module(second).load_eagle_model
        with set_current_vllm_config(config):
            _require_shared(engine, load(engine.wrapper, config))
        loaders.append("V2 loader")
    return f"embedding and lm_head are the target's own objects: {', '.join(loaders)}"


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


PATCH = "apply the patch of the series that closes it (patches/README.md), or use a release that has closed it"

CHECKS = (
    Check("allow-list", allow_list, f"gap 1: {PATCH}"),
    Check("placeholder-token", placeholder_token, f"gap 2: {PATCH}"),
    Check("config-type", config_type, f"gap 6: {PATCH}"),
    Check("supports-eagle3-language-model", language_model_supports, f"gap 3: {PATCH}"),
    Check("supports-eagle3", wrapper_supports, f"gap 4: {PATCH}"),
    Check("delegation", delegation, f"gaps 3 and 4: {PATCH}"),
    Check("hidden-states-default", hidden_states_default, f"gaps 3 and 4: {PATCH}"),
    Check("hidden-states-explicit", hidden_states_explicit, f"gaps 3 and 4: {PATCH}"),
    Check("drafter-architectures", drafter_architectures, f"gap 5: {PATCH}"),
    Check("drafter-llama", drafter_llama, "compare models/llama_eagle3.py and the drafter's loader with the release's own"),
    Check("drafter-mla", drafter_mla, f"gap 5: {PATCH}"),
    Check("sharing", sharing, "compare the drafter's loader and its weight names with the release's own"),
)
