"""The smoke ladder: what was measured goes in, a verdict for each rung comes out. Nothing here does any I/O.

S0 the engine is the pinned one. S1 the server is healthy. S2 it drafts. S3 drafts are accepted as they should be, and
the output is what it would be without them. S4 acceptance is as published. A failure has a name of its own, and what
wasn't measured never passes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Number = float | int | str | None | list[float] | list[int]
RUNGS = ("S0", "S1", "S2", "S3", "S4")
EXACT = 1e-9  # two acceptance lengths are the same within this: they are quotients of small whole numbers
TOLERANCE = 0.10  # how far from a published acceptance length ours may be
GARBLED_SHARE = 0.5  # one token, or characters that are no text, on more than this share of an answer
GARBLED_LEAST = 16  # tokens or characters below which an answer is too short to be judged so

# Each failure, and what to look at first.
FAILURES = {
    "wrong-version": "build the image again, or name the version that is meant with --version",
    "image-incomplete": "`docker run --rm IMAGE about` says more; build it again",
    "cannot-start": "the container engine's own words say why",
    "died": "the lines of its log above say more",
    "never-healthy": "its log says what it waits for; --deadline gives it more time",
    "request-failed": "the server's log says why",
    "wedged": "it is up and doesn't answer: the server's log says what it does",
    "garbled": "the target itself is wrong: its weights, its quantisation or a kernel; try --no-speculation",
    "counters-missing": "the server runs without speculation, or the engine has renamed its counters (adapters.py)",
    "counters-still": "the metrics aren't those of the server that answered: another process or replica?",
    "counters-reset": "the server was restarted between the two readings: see its log",
    "counters-disagree": "another server's metrics, or an engine that counts in another way (adapters.py)",
    "other-traffic": "somebody else uses this server: test one that nobody uses",
    "no-drafts": "the drafter is loaded and never asked: see the server's line about its speculative config",
    "acceptance-is-one": "not one draft was accepted: the drafter gets wrong hidden states (layer ids?) or is no match",
    "acceptance-low": "the drafter gets partly wrong hidden states or positions, or doesn't match the target",
    "acceptance-high": "more was accepted than can be: is it the pair and the K that were meant?",
    "output-differs": "speculation must not change greedy output: a fault in the engine's verification",
    "acceptance-unpublished": "not what others measured: other prompts, another target or revision, or a fault",
}


@dataclass(frozen=True)
class Counters:
    """One reading of a server's counters, or the difference of two. All count tokens but `drafts`, which are rounds.

    `per_position[i]` counts accepted drafts at position i.
    """

    generated: float
    drafts: float
    draft_tokens: float
    accepted: float
    per_position: tuple[float, ...]

    def since(self, before: "Counters") -> "Counters":
        """The difference to an earlier reading."""
        pairs = zip(self.per_position, before.per_position, strict=True)
        return Counters(
            self.generated - before.generated,
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted - before.accepted,
            tuple(after - earlier for after, earlier in pairs),
        )

    @property
    def acceptance(self) -> float:
        """Acceptance length: tokens that one round yields. Raises ZeroDivisionError where nothing was drafted."""
        return 1 + self.accepted / self.drafts


@dataclass(frozen=True)
class Answer:
    """What came back for one request. `tokens` is None where the server gave no ids; `generated` counts its tokens.

    `told` is what it says of its own drafts, or the name of what is missing; None where the engine counts them itself.
    """

    text: str
    tokens: tuple[int, ...] | None
    generated: int
    told: Counters | str | None = None


@dataclass(frozen=True)
class Measured:
    """Everything that was seen across our own requests of one kind of prompts.

    A reading of the counters is a str, the name of the first one that is missing, where it isn't whole.
    """

    kind: str
    before: Counters | str
    after: Counters | str
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Figure:
    """A published acceptance length for a kind of prompts at some K."""

    kind: str
    k: int
    acceptance: float


@dataclass(frozen=True)
class Expected:
    """What a run is held against. None or empty: not known, and then the rung says so.

    `acceptance` is exact, `floor` a lower bound. `counts` is exact, too: (drafts, accepted, accepted per position).
    `outputs` are the answers that must come back, `source` says where they are from; `plain` are those of a server
    without speculation.
    """

    k: int
    acceptance: float | None = None
    floor: float | None = None
    counts: tuple[int, int, tuple[int, ...]] | None = None
    outputs: tuple[Answer, ...] = ()
    source: str = ""
    plain: tuple[Answer, ...] = ()
    figures: tuple[Figure, ...] = ()
    no_figures: str = "no acceptance length is published for this drafter in pins.toml"


@dataclass(frozen=True)
class Rung:
    """The verdict on one rung. `failure` is a key of FAILURES, or empty; `detail` is one line; numbers as measured."""

    name: str
    status: Literal["passed", "failed", "not climbed"]
    detail: str
    failure: str = ""
    numbers: dict[str, Number] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.status == "failed") != (self.failure in FAILURES):
            raise ValueError(f"{self.name}: a failed rung, and no other, has a failure of FAILURES: {self.failure!r}")


def passed(name: str, detail: str, **numbers: Number) -> Rung:
    return Rung(name, "passed", detail, numbers=numbers)


def failed(name: str, failure: str, detail: str, **numbers: Number) -> Rung:
    return Rung(name, "failed", detail, failure, numbers)


def not_climbed(name: str, why: str) -> Rung:
    return Rung(name, "not climbed", why)


def failure(rungs: Sequence[Rung]) -> Rung | None:
    """The first rung that failed; None where none did."""
    return next((rung for rung in rungs if rung.status == "failed"), None)


def whole(rungs: Sequence[Rung]) -> tuple[Rung, ...]:
    """All rungs in order: those above the last one that was tried are not climbed, because of the one that failed."""
    broken = failure(rungs)
    why = f"{broken.name} failed ({broken.failure})" if broken else "the run ended before"
    tried = {rung.name: rung for rung in rungs}
    return tuple(tried.get(name) or not_climbed(name, why) for name in RUNGS)


def ok(rungs: Sequence[Rung]) -> bool:
    """Whether a run counts as passed: nothing failed, and S0 to S3, of which the last proves the most, were passed."""
    status = {rung.name: rung.status for rung in rungs}
    return "failed" not in status.values() and all(status.get(name) == "passed" for name in RUNGS[:4])


def _public(version: str) -> str:
    """A version without its local part: `0.32.0+cpu` is 0.32.0."""
    return version.split("+")[0]


def version(pinned: str, installed: str | None, served: str | None) -> Rung:
    """S0. `installed` is what the image says of itself, `served` what its server answers; None: not known."""
    numbers: dict[str, Number] = {"pinned": pinned, "installed": installed, "served": served}
    known = {"installed": installed, "served": served}
    wrong = [f"{name} is {value}" for name, value in known.items() if value is not None and _public(value) != pinned]
    if wrong:
        return failed("S0", "wrong-version", f"{' and '.join(wrong)}, pinned is {pinned}", **numbers)
    if installed is None and served is None:
        return not_climbed("S0", "no version could be asked for: nothing answered")
    return passed("S0", f"the engine is {pinned}, as pinned", **numbers)


def health(seconds: float, deadline: float, ended: str | None, healthy: bool, last: str) -> Rung:
    """S1. `ended` says how the process ended, None while it lives; `last` is what its log says of that."""
    said = f"; its log: {last}" if last else ""
    if ended is not None:
        return failed("S1", "died", f"{ended} after {seconds:.0f} s{said}", seconds=round(seconds, 1))
    if not healthy:
        waited = f"not healthy within {deadline:.0f} s"
        return failed("S1", "never-healthy", f"{waited}{said}", seconds=round(seconds, 1), deadline=deadline)
    return passed("S1", f"healthy after {seconds:.0f} s", seconds=round(seconds, 1), deadline=deadline)


def garbled(answer: Answer) -> str:
    """Why an answer can't be a language model's, in a few words; empty where it may be."""
    if not answer.generated or not (answer.text or answer.tokens):
        return "it is empty"
    text = answer.text
    broken = sum(char == "\ufffd" for char in text)
    if len(text) >= GARBLED_LEAST and broken > GARBLED_SHARE * len(text):
        return f"{broken} of its {len(text)} characters are no text"
    units: Sequence[int | str] = answer.tokens or text.split() or text
    units = units if len(units) >= GARBLED_LEAST else text
    if len(units) >= GARBLED_LEAST:
        unit, count = Counter(units).most_common(1)[0]
        if count > GARBLED_SHARE * len(units):
            return f"{count} of {len(units)} pieces are {unit!r}"
    return ""


def difference(measured: Measured) -> Counters:
    """What the counters counted across our requests. Raises ValueError where a reading isn't whole."""
    if isinstance(measured.before, str) or isinstance(measured.after, str):
        raise ValueError(f"nothing was measured: a counter is missing ({measured.before}, {measured.after})")
    return measured.after.since(measured.before)


def total(measured: Sequence[Measured]) -> Counters:
    """The sum of all differences."""
    differences = [difference(m) for m in measured]
    return Counters(
        sum(d.generated for d in differences),
        sum(d.drafts for d in differences),
        sum(d.draft_tokens for d in differences),
        sum(d.accepted for d in differences),
        tuple(map(sum, zip(*(d.per_position for d in differences), strict=True))),
    )


def speculation(measured: Sequence[Measured], k: int) -> Rung:
    """S2: the server drafts, across our own requests and nobody else's."""
    if not measured or not all(m.answers for m in measured):
        raise ValueError("nothing was measured: no request was made")
    for m in measured:
        if isinstance(m.before, str) or isinstance(m.after, str):
            name = m.before if isinstance(m.before, str) else m.after
            return failed("S2", "counters-missing", f"there is no {name}")
        if len(m.before.per_position) != len(m.after.per_position):
            return failed("S2", "counters-reset", "the number of draft positions changed between the two readings")
    d = total(measured)
    ours = sum(answer.generated for m in measured for answer in m.answers)
    numbers: dict[str, Number] = {
        "drafts": d.drafts, "draft_tokens": d.draft_tokens, "accepted": d.accepted, "generated": d.generated,
        "requests": sum(len(m.answers) for m in measured),
    }  # fmt: skip
    if min(d.generated, d.drafts, d.draft_tokens, d.accepted, *d.per_position) < 0:
        return failed("S2", "counters-reset", "a counter went down across our requests", **numbers)
    if not d.generated:
        return failed("S2", "counters-still", f"no counter moved, though {ours} tokens came back", **numbers)
    if not all(difference(m).drafts for m in measured):
        last = measured[-1].after
        if not isinstance(last, str) and last.drafts:
            had = f"{last.drafts:g} drafts are counted, and none across requests of ours"
            return failed("S2", "counters-still", had, **numbers)
        return failed("S2", "no-drafts", f"0 drafts for {ours} tokens", **numbers)
    if d.generated > ours:
        counted = f"the server counted {d.generated:g} tokens, of which {ours} are ours"
        return failed("S2", "other-traffic", counted, **numbers)
    # Read from what the counters are: a token is accepted once, at one position, after those before it.
    falls = all(a >= b for a, b in zip(d.per_position, d.per_position[1:], strict=False))
    for wrong, says in (
        (d.generated < ours, f"{d.generated:g} tokens counted, and {ours} came back"),
        (d.draft_tokens > k * d.drafts, f"{d.draft_tokens:g} draft tokens in {d.drafts:g} drafts of {k}"),
        (d.accepted > d.draft_tokens, f"{d.accepted:g} accepted of {d.draft_tokens:g} draft tokens"),
        (sum(d.per_position) != d.accepted, f"{sum(d.per_position):g} accepted by position, {d.accepted:g} in all"),
        (not falls, f"a later position has more accepted than one before it: {list(d.per_position)}"),
    ):
        if wrong:
            return failed("S2", "counters-disagree", says, **numbers)
    return passed("S2", f"{d.drafts:g} drafts for {ours} tokens", **numbers)


def compare(answers: Sequence[Answer], expected: Sequence[Answer]) -> str:
    """Where the first answer differs from the expected one; empty where all are the same."""
    if len(answers) != len(expected):
        return f"{len(answers)} answers, {len(expected)} expected"
    for number, (answer, wanted) in enumerate(zip(answers, expected, strict=True), 1):
        by_id = answer.tokens is not None and wanted.tokens is not None
        got: Sequence[object] = (answer.tokens or ()) if by_id else answer.text.split()
        want: Sequence[object] = (wanted.tokens or ()) if by_id else wanted.text.split()
        if got != want:
            same = next(
                (i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want))
            )
            pieces = [repr(side[same]) if same < len(side) else "nothing" for side in (got, want)]
            return f"answer {number}: the first {same} tokens agree, then {pieces[0]} instead of {pieces[1]}"
    return ""


def acceptance(measured: Sequence[Measured], expected: Expected) -> Rung:
    """S3: the output is right and acceptance is what it has to be. After S2 has passed."""
    d = total(measured)
    length = d.acceptance
    answers = [answer for m in measured for answer in m.answers]
    numbers: dict[str, Number] = {
        "acceptance": round(length, 4), "k": expected.k, "expected": expected.acceptance, "floor": expected.floor,
        "per_position": [round(n / d.drafts, 4) for n in d.per_position],
    }  # fmt: skip
    references = [(expected.source, expected.outputs), ("the answers without speculation", expected.plain)]
    references = [(source, outputs) for source, outputs in references if outputs]
    numbers["output"] = " and ".join(f"as {source}" for source, _ in references) or "not compared (--compare-plain)"
    for number, answer in enumerate(answers, 1):
        if why := garbled(answer):
            return failed("S3", "garbled", f"answer {number} of {len(answers)}: {why}: {answer.text[:60]!r}", **numbers)
    for source, outputs in references:
        if where := compare(answers, outputs):
            numbers["output"] = f"not {source}"
            return failed("S3", "output-differs", f"{where} (compared with {source})", **numbers)
    shown = f"acceptance length {length:.3f} at K = {expected.k}"
    if not d.accepted:
        return failed("S3", "acceptance-is-one", f"0 of {d.draft_tokens:g} draft tokens were accepted", **numbers)
    if length > expected.k + 1:
        return failed("S3", "acceptance-high", f"{shown}, which gives at most {expected.k + 1}", **numbers)
    if (exact := expected.acceptance) is not None and abs(length - exact) > EXACT:
        name = "acceptance-low" if length < exact else "acceptance-high"
        return failed("S3", name, f"{shown}, and it has to be exactly {exact:g}", **numbers)
    if expected.floor is not None and length < expected.floor:
        return failed("S3", "acceptance-low", f"{shown}, below the floor of {expected.floor:g}", **numbers)
    found = (d.drafts, d.accepted, d.per_position)
    if expected.counts is not None and found != expected.counts:
        return failed(
            "S3", "counters-disagree", f"(drafts, accepted, by position) {found}, not {expected.counts}", **numbers
        )
    bound = f"exactly {exact:g}" if exact is not None else f"the floor is {expected.floor:g}" if expected.floor else ""
    return passed("S3", f"{shown}: {bound or 'no floor is known, so more than 1 is all it shows'}", **numbers)


def published(measured: Sequence[Measured], expected: Expected) -> Rung:
    """S4: for each kind of prompts, acceptance within 10 % of what is published for it. After S3 has passed."""
    figures = [figure for figure in expected.figures if figure.k == expected.k]
    if not figures:
        return not_climbed(
            "S4", f"{expected.no_figures} at K = {expected.k}" if expected.figures else expected.no_figures
        )
    numbers: dict[str, Number] = {}
    shown, off = [], []
    for m in measured:
        of_kind = [figure.acceptance for figure in figures if figure.kind == m.kind]
        if not of_kind:
            continue
        length = total([m]).acceptance
        low, high = min(of_kind), max(of_kind)
        numbers |= {f"{m.kind}": round(length, 4), f"{m.kind}_published": of_kind}
        shown.append(f"{m.kind} {length:.2f} ({low:g} to {high:g} published)")
        if not low * (1 - TOLERANCE) <= length <= high * (1 + TOLERANCE):
            off.append(shown[-1])
    if not shown:
        return not_climbed("S4", "none of the prompts is of a kind that acceptance lengths are published for")
    if off:
        return failed("S4", "acceptance-unpublished", f"more than {TOLERANCE:.0%} off: {', '.join(off)}", **numbers)
    return passed("S4", ", ".join(shown), **numbers)
