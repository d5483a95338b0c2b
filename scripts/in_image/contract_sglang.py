"""The contract for SGLang: each check runs the engine's own code with tiny checkpoints, on a CPU, in one process.

Nothing here asks for a version. What differs between releases is found by looking at what the release has.
"""

from functools import partial
from pathlib import Path

import contract_sglang_config as config
import contract_sglang_drafter as drafter
import contract_sglang_target as target
from contract_check import PATCH, Check, Context, isolate


def prepare(context: Context) -> None:
    """Set what must be set before sglang is imported.

    Triton's kernels run in its interpreter, and nothing is compiled: what is left to compile is for a GPU.
    """
    isolate(context, "SGLANG_", "SGL_", TORCHDYNAMO_DISABLE="1", TRITON_INTERPRET="1")


CHECKS = (
    Check("eagle3-methods", target.methods, f"gap 1: {PATCH}"),
    Check("embedding-and-head", target.embedding_and_head, f"gap 1: {PATCH}"),
    Check("call-sites", target.call_sites, f"gap 2: {PATCH}"),
    Check("layer-table", target.layer_table, f"gap 3: {PATCH}"),
    Check("layer-ids-refused", target.impossible_ids, f"gap 4: {PATCH}"),
    Check("hidden-states-default", target.hidden_states_default, f"gap 1: {PATCH}"),
    Check("hidden-states-explicit", target.hidden_states_explicit, f"gaps 1 and 3: {PATCH}"),
    Check("eagle3-refused-as-eagle", drafter.eagle3_refused_as_eagle, f"gap 5: {PATCH}"),
    Check("drafter-layer-ids", drafter.layer_ids, f"gap 6: {PATCH}"),
    Check("config-type", drafter.config_type, f"gap 7: {PATCH}"),
    Check("drafter-architectures", drafter.architectures, f"gap 8: {PATCH}"),
    Check("drafter-llama", drafter.llama, "compare llama_eagle3.py and the drafter's loader with the release's own"),
    Check("drafter-mla", drafter.mla, f"gaps 7 and 8: {PATCH}"),
    Check("sharing", drafter.sharing, "compare the EAGLE worker and its drafter's weight names with the release's own"),
)


def drafter_check(folder: Path) -> Check:
    """The check of a real drafter's config.json, for whoever has one."""
    cure = "correct the drafter's config.json, or use another drafter; a drafter belongs to one target"
    return Check("drafter-config", partial(config.check, folder), cure)
