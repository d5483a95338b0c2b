"""The contract for vLLM: each check runs the engine's own code with tiny checkpoints, on a CPU, in one process.

Nothing here asks for a version. What differs between releases is found by looking at what the release has.
"""

import contract_vllm_drafter as drafter
import contract_vllm_target as target
from contract_check import PATCH, Check, Context, isolate


def prepare(context: Context) -> None:
    """Set what must be set before vllm is imported."""
    isolate(
        context,
        "VLLM_",
        folders=("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT"),
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        VLLM_PLUGINS="",
    )


CHECKS = (
    Check("allow-list", target.allow_list, f"gap 1: {PATCH}"),
    Check("placeholder-token", target.placeholder_token, f"gap 2: {PATCH}"),
    Check("config-type", target.config_type, f"gap 6: {PATCH}"),
    Check("supports-eagle3-language-model", target.language_model_supports, f"gap 3: {PATCH}"),
    Check("supports-eagle3", target.wrapper_supports, f"gap 4: {PATCH}"),
    Check("delegation", target.delegation, f"gaps 3 and 4: {PATCH}"),
    Check("hidden-states-default", target.hidden_states_default, f"gaps 3 and 4: {PATCH}"),
    Check("hidden-states-explicit", target.hidden_states_explicit, f"gaps 3 and 4: {PATCH}"),
    Check("drafter-architectures", drafter.architectures, f"gap 5: {PATCH}"),
    Check("drafter-llama", drafter.llama, "compare llama_eagle3.py and the drafter's loader with the release's own"),
    Check("drafter-mla", drafter.mla, f"gap 5: {PATCH}"),
    Check("sharing", drafter.sharing, "compare the drafter's loader and its weight names with the release's own"),
)
