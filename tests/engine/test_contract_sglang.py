"""The contract on real releases of SGLang: what each gap makes false, and nothing else.

The gaps are numbered as the patches of 0.5.9 are, and as the cures of the checks name them. Gap 1 makes false what goes
through the wrapper; gap 3 the states at ids that a drafter states by input; 7 and 8 what an MLA drafter needs.
Gap 9, the positions of draft steps, is for the oracle to see: test_oracle_in_process.py.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_help import SGLANG, Engine
from sglang_faults import MODEL, next_layer, previous_layer, without_residual

METHODS = {"eagle3-methods", "embedding-and-head"}
STATES = {"hidden-states-default", "hidden-states-explicit"}
DRAFTERS = {"drafter-llama", "drafter-mla", "sharing"}
GAPS = {
    1: METHODS | STATES,
    2: {"call-sites"},
    3: {"layer-table", "hidden-states-explicit"},
    4: {"layer-ids-refused"},
    5: {"eagle3-refused-as-eagle"},
    6: {"drafter-layer-ids"},
    7: {"config-type", "drafter-mla"},
    8: {"drafter-architectures", "drafter-mla"},
}
# Of these gaps, 0.5.23 has two.
LATER = (5, 6)

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("version", SGLANG)
def test_a_patched_release_satisfies_the_contract(version: str, tmp_path: Path) -> None:
    engine = Engine(version, tmp_path)
    engine.apply()
    assert engine.false() == set()


def test_unpatched_0_5_9_fails_what_its_gaps_explain_and_nothing_else(tmp_path: Path) -> None:
    assert Engine("0.5.9", tmp_path).false() == set().union(*GAPS.values())


def test_unpatched_0_5_23_has_two_of_the_gaps(tmp_path: Path) -> None:
    assert Engine("0.5.23", tmp_path).false() == set().union(*(GAPS[gap] for gap in LATER))


@pytest.mark.slow
@pytest.mark.parametrize(("version", "gap"), [("0.5.9", gap) for gap in GAPS] + [("0.5.23", gap) for gap in LATER])
def test_each_gap_alone_makes_false_what_is_written_here(version: str, gap: int, tmp_path: Path) -> None:
    engine = Engine(version, tmp_path)
    engine.apply(without=f"{gap:04}")
    assert engine.false() == GAPS[gap]


def other_head(text: str) -> str:
    """The target gives out a copy of its head."""
    own = "return self.model.embed_tokens.weight, self.lm_head.weight"
    return text.replace(own, "return self.model.embed_tokens.weight, torch.nn.Parameter(self.lm_head.weight.clone())")


@pytest.mark.slow
@pytest.mark.parametrize("version", SGLANG)
@pytest.mark.parametrize(
    ("change", "false"),
    [
        (previous_layer, STATES),
        (next_layer, STATES),
        (without_residual, STATES),
        (other_head, {"embedding-and-head", *DRAFTERS}),
    ],
)
def test_a_fault_makes_false_what_it_is_about(
    version: str, change: Callable[[str], str], false: set[str], tmp_path: Path
) -> None:
    if change is without_residual and version != "0.5.9":
        pytest.skip("this release adds the residual up elsewhere")
    engine = Engine(version, tmp_path)
    engine.apply()
    engine.edit(MODEL, change)
    assert engine.false() - {"tree"} == false


def test_a_drafter_that_reads_the_states_in_another_order_is_seen(tmp_path: Path) -> None:
    engine = Engine("0.5.9", tmp_path)
    engine.apply()
    drafter = "sglang/srt/models/llama_eagle3.py"
    turned = "hidden_states = self.fc(hidden_states.flip(-1))"
    engine.edit(drafter, lambda text: text.replace("hidden_states = self.fc(hidden_states)", turned))
    # The MLA drafter runs the same lines.
    assert engine.false("--only", ",".join(DRAFTERS)) == {"drafter-llama", "drafter-mla"}


def test_a_wrapper_that_wants_another_argument_is_seen(tmp_path: Path) -> None:
    engine = Engine("0.5.9", tmp_path)
    engine.apply()
    more = "def get_embed_and_head(self, which)"
    wrapper = "sglang/srt/models/kimi_k25.py"
    engine.edit(wrapper, lambda text: text.replace("def get_embed_and_head(self)", more))
    assert "eagle3-methods" in engine.false("--only", "eagle3-methods")


def test_one_byte_changed_in_a_patched_file_fails_the_tree(tmp_path: Path) -> None:
    engine = Engine("0.5.9", tmp_path)
    engine.apply()
    assert engine.false("--only", "tree") == set()
    engine.edit(MODEL, lambda text: text.replace("a", "b", 1))
    assert engine.false("--only", "tree") == {"tree"}
