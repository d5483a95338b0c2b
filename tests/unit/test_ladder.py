"""The ladder's verdicts: every rung passes for what it should, and fails by name for what it should."""

from dataclasses import replace

import pytest

from scripts.pipeline import adapters, ladder
from scripts.pipeline.ladder import Answer, Counters, Expected, Figure, Measured, Rung

ZERO = Counters(0, 0, 0, 0, (0, 0, 0))
WORDS = tuple(range(100, 197))
ANSWER = Answer(" ".join(map(str, WORDS)), WORDS, 97)


def seen(
    after: Counters | str, before: Counters | str = ZERO, kind: str = "oracle", answer: Answer = ANSWER
) -> Measured:
    return Measured(kind, before, after, (answer,))


def counted(drafts: float, *per_position: float, generated: float = 97) -> Counters:
    return Counters(generated, drafts, drafts * len(per_position), sum(per_position), per_position)


GOOD = seen(counted(24, 24, 24, 24))


def verdict(rung: Rung) -> str:
    return rung.failure or rung.status


# --- S0, S1 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("installed", "served", "says"),
    [
        ("0.32.0", "0.32.0", "passed"),
        ("0.32.0+cpu", "0.32.0", "passed"),
        ("0.32.0", None, "passed"),
        (None, "0.32.0", "passed"),
        ("0.32.0", "0.31.0", "wrong-version"),
        ("0.32.1", None, "wrong-version"),
        ("0.32.0", "0.32.0rc1", "wrong-version"),
        (None, "not told", "wrong-version"),
        (None, None, "not climbed"),
    ],
)
def test_s0_holds_every_version_that_is_known_against_the_pin(
    installed: str | None, served: str | None, says: str
) -> None:
    assert verdict(ladder.version("0.32.0", installed, served)) == says


def test_s1_tells_the_dead_from_the_slow() -> None:
    assert verdict(ladder.health(96, 900, None, True, "")) == "passed"
    assert verdict(ladder.health(3, 900, "its process ended with exit code 1", False, "boom")) == "died"
    slow = ladder.health(900, 900, None, False, "Loading 40 %")
    assert verdict(slow) == "never-healthy" and "Loading 40 %" in slow.detail and slow.numbers["deadline"] == 900


# --- S2 ---------------------------------------------------------------------------------------------------------------


def test_s2_counts_differences_only() -> None:
    before = counted(1000, 900, 800, 700, generated=5000)
    after = counted(1024, 924, 824, 724, generated=5097)
    rung = ladder.speculation([seen(after, before)], 3)
    assert verdict(rung) == "passed" and rung.numbers["drafts"] == 24
    assert ladder.total([seen(after, before)]).acceptance == 4.0


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (ZERO, "vllm:spec_decode_num_drafts_total", "counters-missing"),
        ("vllm:spec_decode_num_drafts_total", ZERO, "counters-missing"),
        (ZERO, ZERO, "counters-still"),
        (counted(24, 24, 24, 24), counted(24, 24, 24, 24), "counters-still"),
        (counted(24, 24, 24, 24), counted(24, 24, 24, 24, generated=194), "counters-still"),
        (ZERO, counted(0, 0, 0, 0), "no-drafts"),
        (counted(24, 24, 24, 24), counted(12, 12, 12, 12), "counters-reset"),
        (ZERO, Counters(97, 24, 72, 72, (72.0,)), "counters-reset"),
        (ZERO, counted(24, 24, 24, 24, generated=98), "other-traffic"),
        (ZERO, counted(24, 24, 24, 24, generated=96), "counters-disagree"),
        (ZERO, Counters(97, 24, 96, 72, (24, 24, 24)), "counters-disagree"),
        (ZERO, Counters(97, 24, 70, 72, (24, 24, 24)), "counters-disagree"),
        (ZERO, Counters(97, 24, 72, 71, (24, 24, 24)), "counters-disagree"),
        (ZERO, Counters(97, 24, 72, 60, (12, 24, 24)), "counters-disagree"),
    ],
)
def test_s2_fails_by_name(before: Counters | str, after: Counters | str, says: str) -> None:
    assert verdict(ladder.speculation([seen(after, before)], 3)) == says


def test_s2_wants_drafts_for_every_kind_of_prompts() -> None:
    idle = seen(replace(counted(24, 24, 24, 24), generated=194), counted(24, 24, 24, 24))
    assert verdict(ladder.speculation([GOOD, idle], 3)) == "counters-still"


def test_nothing_measured_is_an_error_and_never_a_verdict() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        ladder.speculation([], 3)
    with pytest.raises(ValueError, match="nothing was measured"):
        ladder.speculation([replace(GOOD, answers=())], 3)
    with pytest.raises(ValueError, match="nothing was measured"):
        ladder.acceptance([seen("vllm:generation_tokens_total")], Expected(3))
    with pytest.raises(ZeroDivisionError):
        _ = ZERO.acceptance


# --- S3 ---------------------------------------------------------------------------------------------------------------

ORACLE = Expected(3, acceptance=4.0, counts=(24, 72, (24, 24, 24)), outputs=(ANSWER,), source="the oracle's")


@pytest.mark.parametrize(
    ("counters", "expected", "says"),
    [
        (counted(24, 24, 24, 24), ORACLE, "passed"),
        (counted(96, 0, 0, 0), ORACLE, "acceptance-is-one"),
        (counted(96, 0, 0, 0), Expected(3), "acceptance-is-one"),
        (counted(96, 0, 0, 0), Expected(3, acceptance=1.0), "acceptance-is-one"),
        (counted(25, 25, 25, 24), ORACLE, "acceptance-low"),
        (counted(25, 25, 25, 25), ORACLE, "counters-disagree"),
        (counted(24, 24, 24, 24), Expected(3, acceptance=3.9), "acceptance-high"),
        (counted(24, 24, 24, 24), Expected(2, acceptance=4.0), "acceptance-high"),
        (counted(40, 30, 20, 7), Expected(3, floor=2.2), "passed"),
        (counted(45, 30, 16, 6), Expected(3, floor=2.2), "acceptance-low"),
        (counted(90, 5, 1, 1), Expected(3), "passed"),
    ],
)
def test_s3_holds_the_oracle_exactly_and_a_real_drafter_above_its_floor(
    counters: Counters, expected: Expected, says: str
) -> None:
    assert verdict(ladder.acceptance([seen(counters)], expected)) == says


def test_s3_says_where_no_floor_is_known_and_where_output_was_not_compared() -> None:
    rung = ladder.acceptance([seen(counted(40, 30, 20, 7))], Expected(3))
    assert "no floor is known" in rung.detail and str(rung.numbers["output"]).startswith("not compared")


@pytest.mark.parametrize("reference", ["outputs", "plain"])
def test_s3_compares_with_every_reference_that_there_is(reference: str) -> None:
    other = replace(ANSWER, tokens=(*WORDS[:60], 7, *WORDS[61:]))
    rung = ladder.acceptance([GOOD], replace(ORACLE, **{reference: (other,)}))
    assert rung.failure == "output-differs" and "the first 60 tokens agree, then 160 instead of 7" in rung.detail


def test_answers_without_token_ids_are_compared_as_text() -> None:
    assert ladder.compare([replace(ANSWER, tokens=None)], [ANSWER]) == ""
    assert "then '196' instead of nothing" in ladder.compare([ANSWER], [Answer(ANSWER.text[:-4], None, 96)])
    assert ladder.compare([], [ANSWER]) == "0 answers, 1 expected"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (ANSWER, ""),
        (Answer("", (), 0), "empty"),
        (Answer("!" * 64, None, 64), "64 of 64 pieces are '!'"),
        (Answer("x", (0,) * 40, 40), "40 of 40 pieces are 0"),
        (Answer("\ufffd" * 30 + "ab", None, 20), "30 of its 32 characters are no text"),
        (Answer("Yes.", (5, 6), 2), ""),
        (Answer("the cat and the dog and the bird saw the fish and the frog by the pond", None, 16), ""),
    ],
)
def test_a_garbled_answer_is_told_from_a_repetitive_one(answer: Answer, says: str) -> None:
    why = ladder.garbled(answer)
    assert says in why if says else why == ""


def test_a_garbled_answer_is_named_before_the_acceptance_that_follows_from_it() -> None:
    rung = ladder.acceptance([seen(counted(96, 0, 0, 0), answer=Answer("", (7,) * 97, 97))], ORACLE)
    assert rung.failure == "garbled" and rung.numbers["acceptance"] == 1.0


# --- S4 ---------------------------------------------------------------------------------------------------------------

FIGURES = Expected(3, figures=(Figure("maths", 3, 3.017), Figure("maths", 3, 3.051), Figure("coding", 3, 2.969)))


def of_kind(kind: str, length: float) -> Measured:
    return seen(Counters(97, 1000, 3000, round(1000 * (length - 1)), (0, 0, 0)), kind=kind)


@pytest.mark.parametrize(
    ("maths", "coding", "says"),
    [
        (3.03, 2.97, "passed"),
        (2.72, 3.26, "passed"),
        (3.35, 2.68, "passed"),
        (2.71, 2.97, "acceptance-unpublished"),
        (3.36, 2.97, "acceptance-unpublished"),
        (3.03, 2.60, "acceptance-unpublished"),
    ],
)
def test_s4_is_within_ten_percent_of_what_is_published_for_each_kind(maths: float, coding: float, says: str) -> None:
    rung = ladder.published([of_kind("maths", maths), of_kind("coding", coding)], FIGURES)
    assert verdict(rung) == says and rung.numbers["maths_published"] == [3.017, 3.051]


def test_s4_is_not_climbed_without_a_figure_for_this_drafter_k_or_kind() -> None:
    for measured, expected in (
        ([of_kind("maths", 3.0)], Expected(3)),
        ([of_kind("maths", 3.0)], replace(FIGURES, k=5)),
        ([of_kind("chat", 3.0)], FIGURES),
    ):
        rung = ladder.published(measured, expected)
        assert rung.status == "not climbed" and rung.detail


# --- all of it --------------------------------------------------------------------------------------------------------


def test_a_rung_that_failed_has_a_name_of_its_own_and_no_other_has_one() -> None:
    with pytest.raises(ValueError):
        Rung("S2", "failed", "why", "no-such-name")
    with pytest.raises(ValueError):
        Rung("S2", "passed", "fine", "no-drafts")


def test_rungs_above_a_failure_are_not_climbed_because_of_it() -> None:
    rungs = ladder.whole([ladder.passed("S0", "fine"), ladder.failed("S1", "died", "boom")])
    assert [rung.name for rung in rungs] == list(ladder.RUNGS)
    assert [rung.status for rung in rungs] == ["passed", "failed", *["not climbed"] * 3]
    assert rungs[4].detail == "S1 failed (died)"


def test_a_run_is_ok_only_with_s0_to_s3_passed() -> None:
    fine = [ladder.passed(name, "fine", n=1) for name in ladder.RUNGS[:4]]
    assert ladder.ok(ladder.whole(fine))
    assert not ladder.ok(ladder.whole([*fine, ladder.failed("S4", "acceptance-unpublished", "off")]))
    for n in range(4):
        assert not ladder.ok(ladder.whole(fine[:n]))
        assert not ladder.ok([replace(r, status="not climbed") if i == n else r for i, r in enumerate(fine)])
    assert not ladder.ok([])


# --- the adapter ------------------------------------------------------------------------------------------------------


def test_counters_are_summed_over_the_engines_of_a_server_and_read_past_names_that_begin_alike() -> None:
    names = adapters.VLLM
    lines = ["# HELP vllm:x y", f'{names.drafts.removesuffix("_total")}_created{{engine="0"}} 1.79e+09']
    for engine in (0, 1):
        label = f'engine="{engine}",model_name="a {{b}} \\" c"'
        lines += [f"{name}{{{label}}} {value}" for name, value in (
            (names.generated, 97.0), (names.drafts, 24.0), (names.draft_tokens, 72.0), (names.accepted, 7.2e1)
        )]  # fmt: skip
        lines += [f'{names.per_position}{{{label},position="{place}"}} 24.0' for place in (2, 0, 1)]
    assert adapters.counters("\n".join(lines), names) == Counters(194, 48, 144, 144, (48, 48, 48))


def test_the_first_counter_that_is_missing_is_named() -> None:
    names = adapters.VLLM
    assert adapters.counters("", names) == f"{names.generated} in /metrics"
    assert adapters.counters(f"{names.generated} 97\n{names.drafts}x 3", names) == f"{names.drafts} in /metrics"
