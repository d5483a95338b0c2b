"""What the series of vLLM 0.32.0 changes, shown with the engine's own code and no GPU.

Needs KIMI_EAGLE3_VENV_0_32_0: the Python interpreter of an environment that holds the pristine release. The
engine runs in a process of its own, from a tree of symbolic links; the environment is never written to.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).parents[2]
SERIES = REPO / "patches/vllm/0.32.0"
INTERPRETER = os.environ.get("KIMI_EAGLE3_VENV_0_32_0", "")
SM_120 = 101_376  # bytes of shared memory a block may opt in to: the limit that issues 46721 and 53748 report
SM_90 = 232_448

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not INTERPRETER, reason="KIMI_EAGLE3_VENV_0_32_0 names no interpreter with vllm 0.32.0"),
]

KERNELS = (Path(__file__).parent / "mla_compiled.py").read_text()

# The scratch of TRITON_MLA, in bytes: what the layer claims in the profiling pass, and what the metadata builder
# reserves when the KV cache is there. argv[1]: a JSON list of cases.
SCRATCH = """
import json, math, sys
from types import SimpleNamespace
import torch
from triton.backends.nvidia.driver import CudaDriver
CudaDriver.is_active = staticmethod(lambda: True)
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.attention.backends.mla import triton_mla

def claims(case):
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=case["max_num_seqs"]),
        model_config=SimpleNamespace(max_model_len=case["max_model_len"]),
        speculative_config=SimpleNamespace(num_speculative_tokens=case["draft_tokens"], parallel_drafting=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=case["dcp"]),
    )
    asked = [0]
    def get_simultaneous(*wanted):
        asked.append(sum(math.prod(shape) * dtype.itemsize for shape, dtype in wanted))
    triton_mla.is_workspace_manager_initialized = lambda: True
    triton_mla.current_workspace_manager = lambda: SimpleNamespace(get_simultaneous=get_simultaneous)
    triton_mla.current_platform = SimpleNamespace(num_compute_units=lambda: 188)

    impl = object.__new__(triton_mla.TritonMLAImpl)
    impl.num_heads, impl.kv_lora_rank, impl.dcp_world_size = 8, 512, case["dcp"]
    impl._sm_count, impl._vllm_config = 188, config
    layer = SimpleNamespace(impl=impl, num_heads=8, v_head_dim=128, qk_nope_head_dim=128,
                            chunked_prefill_workspace_size=16)
    rows = torch.ones(4, 576)
    out = MLAAttention.forward_impl(layer, torch.ones(4, 8, 192), rows, rows, rows, None, torch.ones(4, 1024))
    profiled = max(asked)

    builder = object.__new__(triton_mla.TritonMLAMetadataBuilder)
    builder.vllm_config, builder.model_config = config, config.model_config
    builder.num_heads, builder.dcp_world_size = 8, case["dcp"]
    builder.mla_dims = SimpleNamespace(kv_lora_rank=512)
    builder._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
    asked[:] = [0]
    builder._reserve_attn_logits_workspace()
    return {"profiled": profiled, "reserved": max(asked), "zeroed": not out.any().item()}

print(json.dumps([claims(case) for case in json.loads(sys.argv[1])]))
"""


def run(code: str, argument: object, packages: Path | None) -> Any:
    """Run code under the engine's interpreter, with `packages` before its own; its last line of stdout is JSON."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    if packages:
        env["PYTHONPATH"] = str(packages)
    command = [INTERPRETER, "-c", code, json.dumps(argument)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the release's vllm package after the series: links, and real files where a patch touches one."""
    find = "import json, sysconfig; print(json.dumps(sysconfig.get_path('platlib')))"
    pristine, root = Path(run(find, None, None)), tmp_path_factory.mktemp("patched")
    no_bytecode = shutil.ignore_patterns("__pycache__")
    shutil.copytree(pristine / "vllm", root / "vllm", copy_function=os.symlink, ignore=no_bytecode)
    for line in (SERIES / "tree").read_text().splitlines():
        path = line.split()[0]
        if not line.startswith("#") and (pristine / path).exists():
            (root / path).unlink()
            shutil.copyfile(pristine / path, root / path)
    subprocess.run([sys.executable, REPO / "scripts/in_image/apply_series.py", SERIES, root], check=True)
    return root


def case(
    cache: str, limit: int = SM_120, query_len: int = 4, heads: int = 8, page: int = 16, max_seq_len: int = 4096
) -> dict[str, object]:
    """A decode of two sequences, `query_len` = K + 1 rows each; 8 heads are Kimi-K2.5's 64 over 8 GPUs."""
    return {
        "cache": cache,
        "limit": limit,
        "query_len": query_len,
        "heads": heads,
        "page": page,
        "max_seq_len": max_seq_len,
    }


CASES = {
    "fp8": case("fp8"),
    "fp8, one token": case("fp8", query_len=1),
    "fp8, K = 7": case("fp8", query_len=8),
    "fp8, 64 heads": case("fp8", query_len=1, heads=64),
    "fp8, pages of 64, 262144 tokens": case("fp8", page=64, max_seq_len=262_144),
    "bf16": case("bf16"),
    "bf16, 64 heads": case("bf16", query_len=1, heads=64),
    "fp8 on sm_90": case("fp8", limit=SM_90),
}


@pytest.fixture(scope="module")
def before() -> dict[str, Any]:
    return dict(zip(CASES, run(KERNELS, list(CASES.values()), None), strict=True))


@pytest.fixture(scope="module")
def after(patched: Path) -> dict[str, Any]:
    return dict(zip(CASES, run(KERNELS, list(CASES.values()), patched), strict=True))


def test_pristine_decode_with_fp8_cache_needs_more_shared_memory_than_sm_120_has(before: dict[str, Any]) -> None:
    fp8 = {name: answer["shared"] for name, answer in before.items() if name.startswith("fp8")}
    assert set(fp8.values()) == {102_400}, fp8


def test_patched_decode_with_fp8_cache_fits_sm_120(after: dict[str, Any]) -> None:
    fp8 = {name: answer["shared"] for name, answer in after.items() if name.startswith("fp8") and "sm_90" not in name}
    assert set(fp8.values()) == {83_968}, fp8


@pytest.mark.parametrize("name", ["bf16", "bf16, 64 heads", "fp8 on sm_90"])
def test_launch_is_unchanged_where_two_stages_fit(before: dict[str, Any], after: dict[str, Any], name: str) -> None:
    assert after[name] | {"narrow": before[name]["narrow"]} == before[name]
    assert after[name]["stages"] == 2


def test_verify_pass_gets_one_row_for_each_query_token(after: dict[str, Any]) -> None:
    for name in ("fp8", "bf16"):
        assert after[name]["rows"] == 8
        assert after[name]["row_lens"] == [97, 98, 99, 100, 4, 5, 6, 7]
        assert after[name]["first_blocks"] == [0, 0, 0, 0, 16, 16, 16, 16]


@pytest.mark.parametrize("name", ["fp8", "bf16"])
def test_scratch_is_addressed_in_64_bits(before: dict[str, Any], after: dict[str, Any], name: str) -> None:
    assert before[name]["narrow"] > 0
    assert after[name]["narrow"] == 0


DEFAULTS = {"max_num_seqs": 1024, "draft_tokens": 3, "max_model_len": 262_144, "dcp": 1}  # those of a 96 GB card, K = 3
SETTINGS = [DEFAULTS, DEFAULTS | {"max_num_seqs": 64, "max_model_len": 131_072}, DEFAULTS | {"dcp": 8}]


def test_pristine_profiling_pass_misses_25_gb_that_the_builder_reserves() -> None:
    assert run(SCRATCH, [DEFAULTS], None) == [{"profiled": 0, "reserved": 4 * 1024 * 8 * 376 * 513 * 4, "zeroed": True}]


def test_patched_profiling_pass_claims_what_the_builder_reserves(patched: Path) -> None:
    for scratch in run(SCRATCH, SETTINGS, patched):
        assert scratch["profiled"] == scratch["reserved"] > 0
        assert scratch["zeroed"]
