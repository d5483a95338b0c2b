"""A run of the oracle in one process, what an engine has to do for it, and how it is judged. Nothing of an engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

COUNTS = ("drafts", "draft_tokens", "accepted", "accepted_per_position", "acceptance_length")


class Failure(Exception):
    """The engine is wrong, or nothing was measured: a name of oracle_in_process.py's list, and one line on it."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(name, detail)  # as it comes out of another process
        self.name, self.detail = name, detail

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


@dataclass(frozen=True)
class Run:
    """A run with k draft tokens in each round: what the target wrote, and how many drafts each round accepted."""

    k: int
    output: list[int]
    rounds: list[int]

    def counts(self) -> dict[str, Any]:
        """The counts by oracle.json's names, of one round at least."""
        return {
            "drafts": len(self.rounds),
            "draft_tokens": len(self.rounds) * self.k,
            "accepted": sum(self.rounds),
            "accepted_per_position": [sum(n > i for n in self.rounds) for i in range(self.k)],
            "acceptance_length": 1 + sum(self.rounds) / len(self.rounds),
        }


class Pair(Protocol):
    """The oracle's target and drafter in an engine, which oracle_ENGINE.py has to offer by this name.

    `layers` are the ids that the target captures, `models` the classes of target and drafter: both from `load` on.
    """

    layers: tuple[int, ...]
    models: tuple[str, str]

    def __init__(self, folder: Path, work: Path, max_len: int, most_draft_tokens: int) -> None:
        """`folder` is the oracle's, `work` one to write to; no sequence has more than `max_len` tokens."""

    def load(self, k: int) -> None:
        """Load what drafts `k` tokens. Raises Failure, or whatever the engine raises."""

    def speculate(self, prompt: Sequence[int], max_tokens: int) -> Run:
        """Write `max_tokens` tokens after `prompt`, greedily. Raises Failure, or whatever the engine raises."""


def line(counts: dict[str, Any]) -> str:
    """Counts for people."""
    return (
        f"acceptance length {counts['acceptance_length']:.4g}, {counts['accepted']} of {counts['draft_tokens']} draft"
        f" tokens accepted, by position {counts['accepted_per_position']}"
    )


def judge(run: Run, expected: dict[str, Any], output: Sequence[int]) -> None:
    """Compare a run with oracle.json's counts for its K and with its output. Raises Failure where they differ."""
    counts = run.counts()
    wanted = list(output[: expected["max_tokens"]])
    if run.output != wanted:
        at = next((i for i, pair in enumerate(zip(run.output, wanted, strict=False)) if pair[0] != pair[1]), -1)
        raise Failure("output-differs", f"token {at} of the output with K = {run.k} is not the oracle's")
    if all(counts[name] == expected[name] for name in COUNTS):
        return
    detail = f"K = {run.k}: {line(counts)}; right is: {line(expected)}"
    raise Failure("acceptance-differs" if counts["accepted"] else "acceptance-is-one", detail)
