"""What stands in for SGLang's kernels computes what they compute: the engine's own, in Triton's interpreter."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from engine_help import SGLANG, interpreter

ATTENTION = {f"{name}, {heads} heads" for name in ("extend", "decode") for heads in (8, 1)}
TREE = {"tree", "verify"}

pytestmark = pytest.mark.engine


def compare(version: str) -> dict[str, float]:
    """compare_kernels.py in a release."""
    command = [interpreter(version), Path(__file__).with_name("compare_kernels.py")]
    env = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("version", SGLANG)
def test_the_stand_ins_compute_what_the_kernels_compute(version: str) -> None:
    found = compare(version)
    masked = {f"extend, {heads} heads, masked" for heads in (8, 1)}
    assert set(found) - TREE == ATTENTION | masked
    assert (set(found) >= TREE) == (version == "0.5.23")
    assert max(found.values()) < 1e-5, found
