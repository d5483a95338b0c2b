"""The contract's checks of the target: EAGLE-3 methods, layers to capture, and the hidden states that it hands over."""

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from contract_check import Context, Unmet, package_root, require
from contract_sglang_bench import METHODS, bench
from contract_states import LENGTHS, TOLERANCE, compare, hidden_states, prompt
from tiny_models import HIDDEN, LAYERS

EXPLICIT = (2, 4, 7)  # layer ids by input, as drafters for Kimi-K2.5 state them; not the default ones
# How the workers and the runner call the methods: without ids, with ids, and with an embedding and a head.
CALLS: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("set_eagle3_layers_to_capture", ()),
    ("set_eagle3_layers_to_capture", ([1],)),
    ("get_embed_and_head", ()),
    ("set_embed_and_head", (0, 0)),
)
VERIFY = 4  # tokens of a verify pass
KIMI_LAYERS = 61
# What a drafter states, and the layers whose input is captured then: both conventions mean the same states
# (sgl-project/sglang pull 25454).
TABLE: tuple[tuple[tuple[int, ...] | None, tuple[int, ...]], ...] = (
    (None, (2, 30, 58)),
    ((2, 30, 58), (2, 30, 58)),
    ((1, 29, 57), (2, 30, 58)),
)
# A layer that a target of 9 doesn't have, one that is there twice, and one that nothing has.
IMPOSSIBLE = ((2, 4, LAYERS), (2, 4, 4), (-1, 4, 6))


def methods(context: Context) -> str:
    """The wrapper has the methods, and takes them as the workers and the runner call them."""
    wrapper = type(bench(context).wrapper)
    require(
        wrapper.__name__ == "KimiK25ForConditionalGeneration", f"the engine makes a {wrapper.__name__} of Kimi-K2.5"
    )
    missing = [name for name in METHODS if not callable(getattr(wrapper, name, None))]
    require(not missing, f"{wrapper.__name__} lacks {', '.join(missing)}")
    calls: dict[str, tuple[tuple[object, ...], ...]] = {
        METHODS[0]: ((), ([1],)),
        METHODS[1]: ((),),
        METHODS[2]: ((0, 0),),
    }
    for name, variants in calls.items():
        for arguments in variants:
            try:
                inspect.signature(getattr(wrapper, name)).bind(None, *arguments)
            except TypeError as error:
                raise Unmet(
                    f"{wrapper.__name__}.{name} can't be called with {len(arguments)} arguments: {error}"
                ) from None
    return f"{wrapper.__name__}: {', '.join(METHODS)}"


def embedding_and_head(context: Context) -> str:
    """What the wrapper gives out and takes in for sharing are the language model's own tensors, by identity."""
    wrapper = bench(context).wrapper
    missing = [name for name in METHODS[1:] if not hasattr(wrapper, name)]
    require(not missing, f"{type(wrapper).__name__} lacks {', '.join(missing)}")
    inner = wrapper.language_model

    def shared(pair: Any) -> bool:
        return pair[0] is inner.model.embed_tokens.weight and pair[1] is inner.lm_head.weight

    own = wrapper.get_embed_and_head()
    require(shared(own), "get_embed_and_head gives others than the language model's embedding and head")
    others = tuple(type(weight)(weight.detach().clone(), requires_grad=False) for weight in own)
    try:
        wrapper.set_embed_and_head(*others)
        require(shared(others), "set_embed_and_head doesn't reach the language model")
    finally:
        inner.set_embed_and_head(*own)
    return "get_embed_and_head and set_embed_and_head reach the language model's own tensors"


def _capture(ids: tuple[int, ...] | None, layers: int) -> tuple[int, ...]:
    """What the language model's own method makes of a drafter's ids in a model of so many layers."""
    from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM

    model = SimpleNamespace(start_layer=0, end_layer=layers, layers=[None] * layers, layers_to_capture=[])
    holder = SimpleNamespace(
        config=SimpleNamespace(num_hidden_layers=layers),
        model=model,
        pp_group=SimpleNamespace(is_last_rank=True),
        capture_aux_hidden_states=False,
    )
    DeepseekV3ForCausalLM.set_eagle3_layers_to_capture(holder, None if ids is None else list(ids))
    require(holder.capture_aux_hidden_states, f"ids {ids} don't switch the capture on")
    return tuple(model.layers_to_capture)


def layer_table(context: Context) -> str:
    """For 61 layers, each way to state the layers ends at the same three."""
    bench(context)
    for ids, wanted in TABLE:
        found = _capture(ids, KIMI_LAYERS)
        require(found == wanted, f"a drafter's ids {ids} capture layers {found} of {KIMI_LAYERS}, not {wanted}")
    stated = ", ".join("none" if ids is None else str(list(ids)) for ids, _ in TABLE)
    return f"{stated} capture {TABLE[0][1]} of {KIMI_LAYERS} layers"


def impossible_ids(context: Context) -> str:
    """Ids that can't be captured are refused: where they are set, or by the first pass. They are not left out."""
    engine = bench(context)
    inner = engine.wrapper.language_model
    for ids in IMPOSSIBLE:
        try:
            inner.set_eagle3_layers_to_capture(list(ids))
            states = engine.forward(engine.plain, prompt(VERIFY)).hidden_states
        except Exception:
            continue
        raise Unmet(
            f"ids {list(ids)} for {LAYERS} layers hand over states of width {states.shape[-1]} without an error"
        )
    inner.set_eagle3_layers_to_capture()
    return f"{', '.join(str(list(ids)) for ids in IMPOSSIBLE)} are refused for {LAYERS} layers"


def calls_without_ids(sources: Path) -> tuple[int, list[str]]:
    """How many calls under `sources` set the layers, and those of them that don't pass the drafter's ids."""
    count, bad = 0, []
    for file in sorted(sources.rglob("*.py")):
        text = file.read_text()
        if METHODS[0] not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == METHODS[0]:
                count += 1
                passed = [ast.unparse(argument) for argument in [*node.args, *(k.value for k in node.keywords)]]
                if not any("eagle_aux_hidden_state_layer_ids" in argument for argument in passed):
                    bad.append(f"{file.relative_to(sources)}:{node.lineno}")
    return count, bad


def call_sites(context: Context) -> str:
    """Each place where the runner tells the target its layers passes the drafter's ids: eager, graphs and warm-up."""
    count, bad = calls_without_ids(package_root("sglang") / "sglang/srt/model_executor")
    require(count, "no runner of this release tells the target which layers to capture")
    require(not bad, f"the drafter's layer ids are not passed in {', '.join(bad)}")
    return f"{count} of {count} calls pass the drafter's ids"


def _states(context: Context, layers: tuple[int, ...] | None) -> str:
    """The states of an EXTEND and of a TARGET_VERIFY are transformers' hidden_states at the same ids."""
    engine = bench(context)
    wrapper = engine.wrapper
    require(hasattr(wrapper, METHODS[0]), f"{type(wrapper).__name__} lacks {METHODS[0]}")
    wrapper.set_eagle3_layers_to_capture(None if layers is None else list(layers))
    wanted_layers = layers or (2, LAYERS // 2, LAYERS - 3)
    for length in LENGTHS:
        ids = prompt(length + VERIFY)
        wanted = hidden_states(engine.reference, ids)
        for mode, verify, first in (("EXTEND", 0, 0), ("TARGET_VERIFY", VERIFY, length)):
            output = engine.forward(engine.plain, ids, verify=verify)
            tokens = len(ids) - first
            where = f"{tokens} tokens of {mode}"
            shape = tuple(output.hidden_states.shape)
            require(shape == (tokens, 3 * HIDDEN), f"the auxiliary states of {where} have shape {shape}")
            rows = [state[first:] for state in wanted]
            compare(wanted_layers, output.hidden_states.split(HIDDEN, dim=-1), rows, where)
            logits = rows[-1] @ wrapper.language_model.lm_head.weight.T
            worst = (output.next_token_logits - logits[-len(output.next_token_logits) :]).abs().max()
            require(worst < TOLERANCE, f"the logits are not transformers', {where}")
    lengths = ", ".join(map(str, LENGTHS))
    return (
        f"layers {wanted_layers} are transformers' hidden_states within {TOLERANCE}: EXTEND, and TARGET_VERIFY of "
        f"{VERIFY} tokens behind {lengths}; MLA and MoE"
    )


def hidden_states_default(context: Context) -> str:
    """The states of the layers that the model has by default."""
    return _states(context, None)


def hidden_states_explicit(context: Context) -> str:
    """The states at ids that a drafter states."""
    return _states(context, EXPLICIT)
