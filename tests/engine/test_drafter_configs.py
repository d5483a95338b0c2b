"""Patches about drafters' configs, on the engine's own code: with them, and without. See drafter_configs.py.

YaRN's magnitude (0.16.0), layer ids (each release), sequences beyond a drafter's context (each release), and the
compile cache's key (0.16.0).
"""

from typing import Any

import pytest
from engine_help import SCRIPTS, VERSIONS, Engine

pytestmark = pytest.mark.engine
# What 0.16.0 needs to take a Kimi target at all stays in. Later releases do without any patch.
WITHOUT = {"0.16.0": "001"}
Found = dict[str, Any]


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def after(version: str, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The results with the whole series."""
    engine = Engine(version, tmp_path_factory.mktemp("after"))
    engine.apply()
    return dict(engine.measure("drafter_configs.py", SCRIPTS))


@pytest.fixture(scope="module")
def before(version: str, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The results without the patches under test."""
    engine = Engine(version, tmp_path_factory.mktemp("before"))
    if version in WITHOUT:
        engine.apply(without=WITHOUT[version])
    return dict(engine.measure("drafter_configs.py", SCRIPTS))


def named(found: Found, name: str) -> Found:
    """The results of the cases whose name begins with `name`; none at all is an error."""
    chosen = {key.removeprefix(name): value for key, value in found.items() if key.startswith(name)}
    assert chosen, f"no case is named {name}"
    return chosen


def layers(result: Found) -> set[tuple[int, ...] | None]:
    """What the runners take: one element where they agree."""
    assert "refused" not in result, result
    return {tuple(ids) if ids else None for runner, ids in result.items() if runner != "hash"}


# YaRN's magnitude.


def test_the_rotary_table_is_that_of_transformers(after: Found) -> None:
    for name, result in named(after, "rope: ").items():
        assert result["difference"] < 1e-6, name
        assert result["score"] == pytest.approx(1, abs=1e-6), name


def test_0_16_0_multiplied_scores_by_two(version: str, before: Found) -> None:
    wrong = {name: result["score"] for name, result in named(before, "rope: ").items() if result["difference"] > 1e-3}
    if version != "0.16.0":
        assert not wrong
        return
    assert set(wrong) == {"kimi-k2.5", "kimi-k2", "unequal", "attention factor"}
    assert wrong["kimi-k2.5"] == pytest.approx(2.005, abs=1e-3)


# Layer ids.


def test_ids_mean_inputs_and_nested_ones_that_begin_with_1_mean_outputs(after: Found) -> None:
    assert layers(after["ids: top"]) == layers(after["ids: nested nested"]) == {(2, 4, 6)}
    assert layers(after["ids: top, from 1"]) == {(1, 3, 5)}
    assert layers(after["ids: nested, from 1 nested"]) == {(2, 4, 6)}
    assert layers(after["ids: three others"]) == layers(after["ids: three others nested"]) == {(3, 5, 7)}
    assert layers(after["ids: both"]) == {(2, 4, 6)}, "the top level wins"
    assert layers(after["ids: none"]) == {None}, "the target's default layers"


def test_without_the_patch_a_runner_misses_nested_ids(before: Found) -> None:
    assert layers(before["ids: three others"]) == {(3, 5, 7)}
    assert None in layers(before["ids: three others nested"])


def test_the_drafter_takes_as_many_states_as_ids_are_named(before: Found, after: Found) -> None:
    assert {name: result["states"] for name, result in named(after, "states: ").items()} == {
        "four, top": 4,
        "four, nested": 4,
        "none": 3,
    }
    assert {result["states"] for result in named(before, "states: four").values()} != {4}


def test_ids_that_cannot_be_right_are_refused_in_words(after: Found) -> None:
    words = {
        "beyond": "layers allow",
        "zero": "layers allow",
        "twice": "ascending order",
        "unordered": "ascending order",
        "no integers": "integers",
        "another number": "num_aux_hidden_states is 4",
        "a number without ids": "names no layers",
    }
    found = named(after, "bad: ")
    for name, result in found.items():
        refused = result["refused"]
        assert words[name.removesuffix(", nested")] in refused, name
        assert "can't be right for this target" in refused and "config.json" in refused
    assert {name.removesuffix(", nested") for name in found} == set(words)


def test_without_the_patch_each_of_them_is_taken(before: Found) -> None:
    assert not [name for name, result in named(before, "bad: ").items() if "refused" in result]


def test_the_output_of_the_last_layer_is_taken_where_the_release_can_capture_it(version: str, after: Found) -> None:
    assert ("refused" in after["ids: the last layer's output"]) == (version == "0.16.0")


# The compile cache.


def test_the_compile_cache_knows_the_drafter_and_its_layers(after: Found) -> None:
    hashes = {name: result["hash"] for name, result in named(after, "hash: ").items()}
    assert hashes["once"] == hashes["again"], "the same drafter finds its cache"
    assert len({hashes["once"], hashes["other ids"], hashes["other size"]}) == 3


def test_0_16_0_had_one_key_for_all_drafters(version: str, before: Found) -> None:
    different = len({result["hash"] for result in named(before, "hash: ").values()})
    assert different == (1 if version == "0.16.0" else 3)


# Sequences beyond the drafter's context.


def test_a_longer_context_than_the_drafters_is_refused_where_it_does_harm(version: str, after: Found) -> None:
    found = named(after, "context: ")
    refused = {name for name, result in found.items() if "refused" in result}
    # 0.16.0 has the V1 runner alone. V2 extends a plain table; 0.33.0 lowers max_model_len for YaRN by itself.
    assert (
        refused
        == {
            "0.16.0": {"V1", "V1, yarn", "V2", "V2, yarn"},
            "0.32.0": {"V1", "V1, yarn", "V2, yarn"},
            "0.33.0": {"V1", "V1, yarn"},
        }[version]
    )
    for name in refused:
        assert "--max-model-len 64" in found[name]["refused"]
    for name in set(found) - refused - {"V1, accepted", "V2, accepted"}:
        assert found[name]["table"] >= found[name]["longest"], name
    assert found["V1, accepted"]["drafts until"] == 64


def test_without_the_patch_v1_starts_and_stops_drafting_there(version: str, before: Found) -> None:
    found = named(before, "context: ")
    assert found["V1"]["drafts until"] == 64 < found["V1"]["longest"] == 128
    if version == "0.32.0":
        assert found["V2, yarn"]["table"] == 64 < found["V2, yarn"]["longest"], "read beyond its end"
