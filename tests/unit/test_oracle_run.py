"""What a run of the oracle in one process counts, and the name of each way to be wrong."""

import pickle
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts/in_image"))

from oracle_run import Failure, Run, judge

OUTPUT = [7, 8, 9, 10, 11, 12, 13]
RIGHT = {
    "max_tokens": 7,
    "drafts": 2,
    "draft_tokens": 4,
    "accepted": 3,
    "accepted_per_position": [2, 1],
    "acceptance_length": 2.5,
}


def failure(run: Run) -> str:
    """The name of what is wrong with a run, or nothing."""
    try:
        judge(run, RIGHT, OUTPUT)
    except Failure as wrong:
        return wrong.name
    return ""


def test_the_counts_are_those_of_the_rounds() -> None:
    run = Run(2, OUTPUT, [2, 1])
    assert {"max_tokens": 7, **run.counts()} == RIGHT
    assert failure(run) == "" and failure(Run(2, OUTPUT, [1, 2])) == ""


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (Run(2, OUTPUT, [2, 2]), "acceptance-differs"),
        (Run(2, OUTPUT, [2, 1, 0]), "acceptance-differs"),
        (Run(2, OUTPUT, [0, 0]), "acceptance-is-one"),
        (Run(2, [7, 8, 0, *OUTPUT[3:]], [2, 1]), "output-differs"),
        (Run(2, OUTPUT[:-1], [2, 1]), "output-differs"),
        (Run(2, [*OUTPUT, 14], [2, 1]), "output-differs"),
    ],
)
def test_each_difference_has_its_name(run: Run, name: str) -> None:
    assert failure(run) == name


def test_a_failure_comes_out_of_another_process_as_it_was() -> None:
    there = pickle.loads(pickle.dumps(Failure("does-not-run", "why")))
    assert (there.name, there.detail, str(there)) == ("does-not-run", "why", "does-not-run: why")
