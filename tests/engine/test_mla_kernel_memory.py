"""Shared memory of TRITON_MLA's decode kernels on sm_120, and the width of their addresses, as Triton compiles them.

Each kernel is compiled for sm_120 as the engine's own launcher would start it: with its block sizes, head widths,
pipeline stages and types. The compiler states the shared memory that a block needs. No GPU has run them here.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from engine_help import Engine

HERE = Path(__file__).parent
SM_120 = 101_376  # bytes of shared memory a block may opt in to: the limit that issues 46721 and 53748 report
# Heads a rank: Kimi-K2.5's 64 over 8, 4, 2 GPUs and one. Tokens a page: the default, and the largest in use.
GRID: list[dict[str, Any]] = [
    {"cache": cache, "limit": SM_120, "query_len": 4, "heads": heads, "page": page, "max_seq_len": 262_144}
    for cache in ("bf16", "fp8")
    for heads in (8, 16, 32, 64)
    for page in (16, 64)
]
BF16 = GRID[:2]
WIDER = [case | {"wider": 2} for case in BF16]  # blocks of twice as many tokens as the launcher takes

pytestmark = pytest.mark.engine


def compiled(engine: Engine, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    command = [engine.python, HERE / "mla_compiled.py", json.dumps(cases)]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(engine.root), "HOME": str(engine.work), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return list(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What 0.16.0 as released launches for a bf16 cache."""
    return compiled(Engine("0.16.0", tmp_path_factory.mktemp("released")), BF16)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What 0.16.0 with its series launches for each case of GRID; then WIDER."""
    engine = Engine("0.16.0", tmp_path_factory.mktemp("patched"))
    engine.apply()
    return compiled(engine, GRID + WIDER)


def fits(answers: list[dict[str, Any]]) -> bool:
    assert answers and all(answer["shared"] > 0 for answer in answers)
    return all(answer["shared"] <= SM_120 for answer in answers)


def test_the_decode_kernels_of_0_16_0_fit_sm_120_with_either_cache(patched: list[dict[str, Any]]) -> None:
    assert fits(patched[: len(GRID)]), patched


def test_blocks_of_twice_the_tokens_would_not_fit(patched: list[dict[str, Any]]) -> None:
    """The bound can be missed."""
    wider = patched[len(GRID) :]
    assert len(wider) == len(WIDER) and all(answer["shared"] > SM_120 for answer in wider), wider


def test_the_decode_kernels_of_0_32_0_fit_sm_120_with_either_cache(tmp_path: Path) -> None:
    engine = Engine("0.32.0", tmp_path)
    assert not fits(compiled(engine, GRID[-1:]))  # as released, with an fp8 cache
    engine.apply()
    assert fits(compiled(engine, GRID))


def test_the_scratch_of_0_16_0_is_addressed_in_64_bits(
    released: list[dict[str, Any]], patched: list[dict[str, Any]]
) -> None:
    assert all(answer["narrow"] for answer in released)
    assert not any(answer["narrow"] for answer in patched)


def test_a_bf16_cache_of_0_16_0_is_launched_as_before(
    released: list[dict[str, Any]], patched: list[dict[str, Any]]
) -> None:
    for old, new in zip(released, patched[: len(BF16)], strict=True):
        assert new | {"narrow": old["narrow"]} == old
