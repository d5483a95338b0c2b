"""The preflight's rules: what is known to fail, or to be silently slow, each with its source and its cure.

A check looks at the facts and says what is wrong in one line, or nothing where all is well or the facts aren't known.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from preflight_facts import Facts, compiled_by, has_graphs

IDS = "eagle_aux_hidden_state_layer_ids"
MLA = "Eagle3DeepseekV2ForCausalLM"
# Backends that admit MLA on capability 12.0. flashinfer is SGLang's, where it runs FlashAttention 2.
BACKENDS = {"vllm": {"TRITON_MLA"}, "sglang": {"triton", "flashinfer"}}
# Drafters whose configs look right for a target that they weren't trained for.
TRAINED_FOR = {"AQ-MedAI/Kimi-K2-Instruct-eagle3": "moonshotai/Kimi-K2-Instruct"}


@dataclass(frozen=True)
class Rule:
    """A thing to know before a start. `check` says what is wrong and the cure, in one line, or "".

    `engines` it holds for; `refuses`: it can't work, or can't be meant (else it warns); `source`: where that is known
    from; `gpu`: only on a GPU.
    """

    name: str
    engines: tuple[str, ...]
    refuses: bool
    source: str
    check: Callable[[Facts], str]
    gpu: bool = False


def layer_ids(facts: Facts) -> Any:
    """The layer ids as the drafter's config gives them, at the top level or nested; None without.

    Where both are there, vLLM reads those at the top level and SGLang the nested ones.
    """
    drafter = facts.drafter or {}
    top, nested = drafter.get(IDS), (drafter.get("eagle_config") or {}).get(IDS)
    return (nested or top) if facts.engine == "sglang" else (top or nested)


def inputs(facts: Facts) -> Any:
    """The layers whose inputs these ids mean. Those that begin with 1 number outputs; in vLLM only nested ones do."""
    ids, nested = layer_ids(facts), not (facts.drafter or {}).get(IDS)
    if not isinstance(ids, list) or ids[:1] != [1] or not (nested or facts.engine == "sglang"):
        return ids
    return [i + 1 if type(i) is int else i for i in ids]


def config(facts: Facts) -> str:
    return "; ".join(facts.broken)


def method(facts: Facts) -> str:
    kinds = " ".join((facts.drafter or {}).get("architectures") or [facts.drafter_name])
    said = str(facts.speculation.get("method", ""))
    if said.lower() != "eagle" or "eagle3" not in kinds.lower():
        return ""
    right = "--speculative-algorithm EAGLE3" if facts.engine == "sglang" else '"method": "eagle3"'
    return f"{said} is another method, and {facts.drafter_name} is an EAGLE-3 drafter: write {right}"


def vocabulary(facts: Facts) -> str:
    ours, theirs = (facts.drafter or {}).get("vocab_size"), (facts.text or {}).get("vocab_size")
    if not ours or not theirs or ours == theirs:
        return ""
    return f"the drafter has a vocabulary of {ours} tokens and the target one of {theirs}: it is for another target"


def hidden_size(facts: Facts) -> str:
    drafter, theirs = facts.drafter or {}, (facts.text or {}).get("hidden_size")
    ours = drafter.get("target_hidden_size") or drafter.get("hidden_size")
    if not ours or not theirs or ours == theirs:
        return ""
    return f"the drafter reads states of size {ours}, and the target's are {theirs}: it is for another target"


def bad_ids(facts: Facts) -> str:
    ids, meant, layers = layer_ids(facts), inputs(facts), (facts.text or {}).get("num_hidden_layers")
    if not ids or not layers:
        return ""
    # The number of layers stands for the last one's output, which only vLLM from 0.26 on can hand over: SGLang 0.5.9
    # refuses it once the target is loaded, and 0.5.23 drops it without a word.
    last = layers - 1 if facts.engine == "sglang" or facts.older("0.26.0") else layers
    right = isinstance(ids, list) and all(type(i) is int for i in ids)
    if right and meant == sorted(set(meant)) and meant[0] >= 1 and meant[-1] <= last:
        return ""
    said = f"{ids}" if meant == ids else f"{ids}, which means the inputs of layers {meant}"
    return f"{IDS} is {said}: for a target of {layers} layers, these are ascending, each once, and from 1 to {last}"


def states(facts: Facts) -> str:
    drafter, size = facts.drafter or {}, (facts.text or {}).get("hidden_size")
    ids = layer_ids(facts)
    nested = (drafter.get("eagle_config") or {}).get("num_aux_hidden_states")
    stated = nested or drafter.get("num_aux_hidden_states")
    count = len(ids) if isinstance(ids, list) else stated or 3
    if stated and stated != count:
        return f"the drafter names {count} layers, and its num_aux_hidden_states is {stated}: correct its config.json"
    if facts.fc_width and size and facts.fc_width != count * size:
        return f"the drafter's fc takes {facts.fc_width} numbers, and {count} states of the target have {count * size}"
    return ""


def numbering(facts: Facts) -> str:
    """vLLM takes ids at the top level for inputs of layers; training tools may have written the outputs' numbers."""
    ids = (facts.drafter or {}).get(IDS)
    if not isinstance(ids, list) or ids[:1] != [1]:
        return ""
    moved = [i + 1 for i in ids if isinstance(i, int)]
    return (
        f"{IDS} {ids} at the top level means the inputs of these layers; if the drafter was trained on their outputs,"
        f" write {moved}: the wrong ones cost acceptance, and no error says so"
    )


def context(facts: Facts) -> tuple[int, int] | None:
    """The longest sequence and the drafter's context, where the first is longer."""
    drafter = facts.drafter or {}
    scaling = drafter.get("rope_scaling") or {}
    mine = drafter.get("max_position_embeddings")
    if facts.older("0.22.0") and (scaling.get("rope_type") or scaling.get("type")) == "yarn":
        mine = int(scaling.get("original_max_position_embeddings", 0) * scaling.get("factor", 0)) or mine
    longest = facts.number("max-model-len") or (facts.text or {}).get("max_position_embeddings")
    if not mine or not longest or longest <= mine or "max_model_len" in facts.speculation:
        return None
    return longest, mine


def zeros(facts: Facts) -> str:
    found = context(facts) if facts.older("0.29.0") else None
    if not found:
        return ""
    return (
        f"sequences of {found[0]} tokens, and the drafter reads {found[1]}: set --max-model-len {found[1]}, as beyond"
        " it the whole batch is drafted zeros"
    )


def worthless(facts: Facts) -> str:
    found = None if facts.older("0.29.0") else context(facts)
    if not found:
        return ""
    return (
        f"sequences of {found[0]} tokens, and the drafter was made for {found[1]}: drafts beyond that are verified and"
        f" hardly accepted; see --max-model-len {found[1]}"
    )


def half(facts: Facts) -> str:
    if facts.flags.get("dtype") not in ("half", "float16"):
        return ""
    return "--dtype half scales the target's hidden states, so the drafter gets wrong ones: use --dtype bfloat16"


def pipeline(facts: Facts) -> str:
    if (facts.number("pipeline-parallel-size") or 1) < 2:
        return ""
    return "pipeline parallelism loses the hidden states of the earlier ranks: use --tensor-parallel-size alone"


def context_parallel(facts: Facts) -> str:
    if (facts.number("decode-context-parallel-size") or 1) < 2:
        return ""
    return "--decode-context-parallel-size above 1 can't verify drafts: leave it out, or add --no-speculation"


def backend(facts: Facts) -> str:
    known = BACKENDS[facts.engine]
    names = ("attention-backend", "prefill-attention-backend", "decode-attention-backend")
    said = {f"--{name}": facts.flags[name] for name in names if name in facts.flags}
    if "speculative-draft-attention-backend" in facts.flags:
        said["--speculative-draft-attention-backend"] = facts.flags["speculative-draft-attention-backend"]
    if facts.engine == "vllm" and facts.env.get("VLLM_ATTENTION_BACKEND"):
        said["VLLM_ATTENTION_BACKEND"] = facts.env["VLLM_ATTENTION_BACKEND"]
    fold = str.upper if facts.engine == "vllm" else str.lower
    wrong = [f"{where} {name}" for where, name in said.items() if fold(name) not in known]
    return f"{', '.join(wrong)}: multi-head latent attention runs on {' or '.join(sorted(known))} here" if wrong else ""


def inherited_backend(facts: Facts) -> str:
    said = facts.flags.get("attention-backend") or facts.env.get("VLLM_ATTENTION_BACKEND", "")
    kinds = (facts.drafter or {}).get("architectures") or []
    if not facts.older("0.21.0") or said.upper() != "TRITON_MLA" or not kinds or MLA in kinds:
        return ""
    return f"the drafter ({kinds[0]}) would inherit the backend {said} and crash: leave it out, the engine finds it"


def graphs(facts: Facts) -> str:
    file = compiled_by(facts.env, facts.version)
    if file is None or not facts.series or not has_graphs(facts.env) or facts.env.get("VLLM_DISABLE_COMPILE_CACHE"):
        return ""
    if file.is_file() and file.read_text().strip() == facts.series:
        return ""
    where = f"{facts.env['VLLM_CACHE_ROOT']}/torch_compile_cache"
    return f"the graphs in {where} may be of an engine with other patches: remove it, or VLLM_DISABLE_COMPILE_CACHE=1"


def memory(facts: Facts) -> str:
    try:
        share = float(facts.flags.get("gpu-memory-utilization", "0"))
    except ValueError:
        return ""
    return f"--gpu-memory-utilization {share} runs out of memory on 96 GB cards: 0.93 is known to work" * (
        share >= 0.95
    )


def scratch(facts: Facts) -> str:
    sequences = facts.number("max-num-seqs") or 1024
    size = 25 * sequences / 1024
    if facts.older("0.31.0") or size < 10:
        return ""
    return f"the verify pass reserves about {size:.0f} GB a GPU for {sequences} sequences: set --max-num-seqs, e.g. 64"


def slow_fp8(facts: Facts) -> str:
    said = facts.flags.get("kv-cache-dtype", "")
    return f"--kv-cache-dtype {said} was measured at 16 tok/s with the original checkpoint: use auto" * said.startswith(
        "fp8"
    )


def quantized_drafter(facts: Facts) -> str:
    if "quantization" not in facts.flags or "speculative-draft-model-quantization" in facts.flags:
        return ""
    return (
        f"--quantization {facts.flags['quantization']} holds for the drafter, too: add"
        " --speculative-draft-model-quantization unquant unless the drafter is quantised"
    )


def experts(facts: Facts) -> str:
    if facts.flags.get("moe-runner-backend") != "flashinfer_trtllm":
        return ""
    return (
        "--moe-runner-backend flashinfer_trtllm has no kernels for this GPU: leave it out (INT4 experts run on Marlin)"
    )


def draft_vocabulary(facts: Facts) -> str:
    if facts.drafter is None or "draft_vocab_size" in facts.drafter:
        return ""
    return "the drafter's config lacks draft_vocab_size, which SGLang reads: add it (null if it has all tokens)"


def no_sharing(facts: Facts) -> str:
    if facts.drafter is None or facts.drafter.get("target_hidden_size", 0) is not None:
        return ""
    return "target_hidden_size is null, which silently ends the sharing of the target's embedding: remove it"


def trained_for(facts: Facts) -> str:
    made = TRAINED_FOR.get(facts.drafter_name)
    if not made or not facts.target_name or facts.target_name.startswith(made):
        return ""
    return (
        f"{facts.drafter_name} was trained for {made}: it runs with {facts.target_name}, and hardly a draft is accepted"
    )


BOTH, VLLM, SGLANG = ("vllm", "sglang"), ("vllm",), ("sglang",)
TRAP = "seen in the released sources"
SM_120 = "the backends' own lists of capabilities"
USERS = "users of 8 RTX PRO 6000 (local-inference-lab/rtx6kpro)"
RULES = (
    Rule("config", BOTH, True, "both engines read config.json before all else", config),
    Rule("method", BOTH, True, "sglang #25673: acceptance length exactly 1.0, and no error", method),
    Rule("vocabulary", BOTH, True, f"{TRAP}: embedding and head are shared by reference", vocabulary),
    Rule("hidden-size", BOTH, True, f"{TRAP}: fc is built for the target's states", hidden_size),
    Rule("layer-ids", BOTH, True, f"{TRAP}: ids out of range drop states", bad_ids),
    Rule("states", BOTH, True, f"{TRAP}: fc takes one state for each id", states),
    Rule("numbering", VLLM, False, "sglang pull 25454: two ways to number layers are in use", numbering),
    Rule("context", VLLM, True, f"{TRAP}: V1 runner, effective_drafter_max_model_len", zeros),
    Rule("long-context", VLLM, False, "vllm #48894: V2 runner", worthless),
    Rule("dtype", VLLM, True, f"{TRAP}: deepseek_v2.py rescales the residual in float16", half),
    Rule("pipeline-parallel", VLLM, True, f"{TRAP}: no release up to 0.33.0 passes them on", pipeline),
    Rule("context-parallel", VLLM, True, f"{TRAP}: the decode path for drafts refuses it", context_parallel),
    Rule("attention-backend", BOTH, True, f"{SM_120}; sglang #24633", backend, gpu=True),
    Rule("inherited-backend", VLLM, True, f"{TRAP}: no speculative_config.attention_backend", inherited_backend),
    Rule("compile-cache", VLLM, False, f"{TRAP}: its key doesn't hold the patches", graphs),
    Rule("memory", VLLM, False, USERS, memory, gpu=True),
    Rule("scratch", VLLM, False, f"{TRAP}: TRITON_MLA's workspace, 25 GB for 1024 sequences, K = 3", scratch, gpu=True),
    Rule("slow-fp8", SGLANG, False, USERS, slow_fp8, gpu=True),
    Rule("drafter-quantization", SGLANG, False, f"{TRAP}: the drafter inherits it", quantized_drafter),
    Rule("experts", SGLANG, True, f"{SM_120}: MoE runners", experts, gpu=True),
    Rule("draft-vocabulary", SGLANG, True, TRAP, draft_vocabulary),
    Rule("sharing", SGLANG, False, f"{TRAP}: llama.py", no_sharing),
    Rule("trained-for", BOTH, False, "its model card", trained_for),
)
# Rules that are about the drafter say nothing where there is none.
ALWAYS = {"config", "attention-backend", "compile-cache", "memory", "slow-fp8", "experts"}
