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
KERNELS = "vllm/v1/attention/ops/triton_decode_attention.py"
SM_120 = 101_376  # bytes of shared memory a block may opt in to: the limit that issues 46721 and 53748 report
# Heads a rank: Kimi-K2.5's 64 over 8, 4, 2 GPUs and one. Tokens a page: the default, and the largest in use.
GRID = [
    {"cache": cache, "limit": SM_120, "query_len": 4, "heads": heads, "page": page, "max_seq_len": 262_144}
    for cache in ("bf16", "fp8")
    for heads in (8, 16, 32, 64)
    for page in (16, 64)
]
BF16 = [case for case in GRID if case["cache"] == "bf16"]

pytestmark = pytest.mark.engine


def compiled(engine: Engine, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    command = [engine.python, HERE / "mla_compiled.py", json.dumps(cases)]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(engine.root), "HOME": str(engine.work), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return list(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("version", ["0.16.0", "0.32.0"])
def test_the_decode_kernels_fit_sm_120_with_either_cache(version: str, tmp_path: Path) -> None:
    engine = Engine(version, tmp_path)
    engine.apply()
    needs = [answer["shared"] for answer in compiled(engine, GRID)]
    assert len(needs) == len(GRID) and min(needs) > 0 and max(needs) <= SM_120, needs


def test_one_more_stage_of_0_16_0_would_not_fit(tmp_path: Path) -> None:
    """The bound can be missed."""
    engine = Engine("0.16.0", tmp_path)
    engine.apply()
    engine.edit(
        KERNELS, lambda text: text.replace("    num_stages = 2\n    if is_hip_:", "    num_stages = 3\n    if is_hip_:")
    )
    assert min(answer["shared"] for answer in compiled(engine, [GRID[0], GRID[-1]])) > SM_120


def test_the_scratch_of_0_16_0_is_addressed_in_64_bits(tmp_path: Path) -> None:
    engine = Engine("0.16.0", tmp_path)
    assert all(answer["narrow"] for answer in compiled(engine, BF16[:1]))
    engine.apply()
    assert not any(answer["narrow"] for answer in compiled(engine, [GRID[0], GRID[-1]]))


def test_a_bf16_cache_of_0_16_0_is_launched_as_before(tmp_path: Path) -> None:
    engine = Engine("0.16.0", tmp_path)
    before = compiled(engine, BF16[:2])
    engine.apply()
    for old, new in zip(before, compiled(engine, BF16[:2]), strict=True):
        assert new | {"narrow": old["narrow"]} == old
