"""FlashInfer compiles its kernels when they are first used: here for sm_120, with nvcc from its wheel, without a GPU.

Runs inside an image (KIMI_EAGLE3_VENV_* names its interpreter), where the release has nvcc; takes about two minutes.
"""

import os
import subprocess
from pathlib import Path

import pytest

INTERPRETERS = [value for name, value in sorted(os.environ.items()) if name.startswith("KIMI_EAGLE3_VENV_")]
PROGRAM = """
from flashinfer.jit.sampling import gen_sampling_module
spec = gen_sampling_module()
spec.build(verbose=False)
print(spec.get_library_path())
"""

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not INTERPRETERS, reason="no KIMI_EAGLE3_VENV_*"),
    pytest.mark.skipif(not Path("/usr/local/cuda/bin/nvcc").is_file(), reason="this release has no nvcc"),
]


def test_the_sampling_kernels_compile_and_link_for_sm_120(tmp_path: Path) -> None:
    env = os.environ | {"FLASHINFER_WORKSPACE_BASE": str(tmp_path), "FLASHINFER_CUDA_ARCH_LIST": "12.0f"}
    done = subprocess.run([INTERPRETERS[0], "-c", PROGRAM], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert str(tmp_path) in done.stdout and Path(done.stdout.split()[-1]).stat().st_size > 100_000
