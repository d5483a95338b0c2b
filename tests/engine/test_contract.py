"""The contract on real engines: what each gap makes false, and nothing else.

What each gap of 0.16.0 makes false (gaps as patches/README.md and the patches number them):
1 allow-list; 2 placeholder-token; 3 and 4 their own interface check, delegation and both hidden-states checks, which go
through the wrapper into the language model; 5 drafter-architectures and drafter-mla; 6 config-type and drafter-mla, as
MLA drafters are of model type kimi_k2.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_help import MODEL, VERSIONS, Engine, after_the_layer, by_reference, next_id, previous_id, without_residual

STATES = {"hidden-states-default", "hidden-states-explicit"}
GAPS = {
    1: {"allow-list"},
    2: {"placeholder-token"},
    3: {"supports-eagle3-language-model", "delegation", *STATES},
    4: {"supports-eagle3", "delegation", *STATES},
    5: {"drafter-architectures", "drafter-mla"},
    6: {"config-type", "drafter-mla"},
}

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("version", VERSIONS)
def test_a_patched_release_satisfies_the_contract(version: str, tmp_path: Path) -> None:
    engine = Engine(version, tmp_path)
    engine.apply()
    assert engine.false() == set()


def test_unpatched_0_16_0_fails_what_its_gaps_explain_and_nothing_else(tmp_path: Path) -> None:
    assert Engine("0.16.0", tmp_path).false() == set().union(*GAPS.values())


def test_unpatched_0_32_0_has_none_of_the_gaps_but_refuses_mla_drafters_typed_like_a_target(tmp_path: Path) -> None:
    assert Engine("0.32.0", tmp_path).false() == {"drafter-mla"}


@pytest.mark.slow
@pytest.mark.parametrize("gap", GAPS)
def test_each_gap_alone_makes_false_what_is_written_here(gap: int, tmp_path: Path) -> None:
    engine = Engine("0.16.0", tmp_path)
    engine.apply(without=f"{gap:04}")
    assert engine.false() == GAPS[gap] | {"record"}  # patched with `patch`, which keeps no RECORD


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mutation", [after_the_layer, without_residual, next_id, previous_id, by_reference])
def test_a_wrong_capture_makes_the_hidden_states_checks_false_alone(
    version: str, mutation: Callable[[str], str], tmp_path: Path
) -> None:
    engine = Engine(version, tmp_path)
    engine.apply()
    engine.edit(MODEL, mutation)
    assert engine.false() - {"tree", "record"} == STATES


def test_one_byte_changed_in_a_patched_file_fails_the_tree_and_its_record(tmp_path: Path) -> None:
    engine = Engine("0.16.0", tmp_path)
    engine.apply()
    assert engine.false("--only", "tree,record") == set()
    engine.edit(MODEL, lambda text: text.replace("a", "b", 1))
    assert engine.false("--only", "tree,record") == {"tree", "record"}


def test_another_version_than_the_pinned_one_fails(tmp_path: Path) -> None:
    engine = Engine("0.32.0", tmp_path)
    engine.release["version"] = "0.32.1"
    assert engine.false("--only", "version,tree") == {"version"}


def test_an_old_method_name_that_the_runner_never_calls_is_seen(tmp_path: Path) -> None:
    """The trap of 0.18 and later: default layers answered under the old name are ignored."""
    engine = Engine("0.32.0", tmp_path)
    runner = "vllm/v1/worker/gpu_model_runner.py"
    engine.edit(runner, lambda text: text.replace("get_eagle3_default_aux", "get_eagle3_newer_aux"))
    assert "delegation" in engine.false("--only", "delegation")


def test_the_engine_finds_no_module_of_ours(tmp_path: Path) -> None:
    """There is a coverage.py beside the contract, and numba asks for a module of that name."""
    engine = Engine("0.32.0", tmp_path)
    with (tmp_path / "noise").open("w") as noise:
        engine.contract("--only", "allow-list", "--verbose", stderr=noise)
    assert "coverage" not in (tmp_path / "noise").read_text()


# A network without anything in it but the loopback device, as a build has it.
NO_NETWORK = ("unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can run it as somebody else, and without a network")
@pytest.mark.skipif(not all(map(shutil.which, ("unshare", "ip", "setpriv"))), reason="needs util-linux and iproute2")
@pytest.mark.parametrize("version", ["0.32.0", "0.5.9"])
def test_any_user_gets_the_same_bytes_without_a_network_and_leaves_nothing(version: str, tmp_path: Path) -> None:
    engine = Engine(version, tmp_path)
    mine = engine.contract()
    assert list(engine.work.iterdir()) == []
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.stat().st_uid == 0 and folder.stat().st_mode & 0o005 != 0o005:
            folder.chmod(folder.stat().st_mode | 0o005)
    os.chown(engine.work, 65534, 65534)
    theirs = engine.contract(before=(*NO_NETWORK, *NOBODY))
    assert theirs == mine
    assert list(engine.work.iterdir()) == []
    assert str(tmp_path) not in mine
