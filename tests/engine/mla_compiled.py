"""The kernels that TRITON_MLA launches for a decode, compiled for sm_120: their shared memory, and their rows.

Runs under the engine's interpreter (0.16.0 or 0.32.0): argv[1] is a JSON list of cases, and a JSON list of answers goes
to stdout. The launcher is the engine's own, with its own block sizes, stages and types. A recorder stands where it
would start its kernels, and what it would have started is compiled: the compiler states the shared memory it needs.
"""
# ruff: noqa: E402 (the driver is set before the engine is imported)

import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
import vllm
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.compiler import ASTSource

CudaDriver.is_active = staticmethod(lambda: True)  # or vllm switches Triton off
from vllm.v1.attention.backends.mla import triton_mla
from vllm.v1.attention.ops import triton_decode_attention as ops

TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
}
CACHES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
SEQ_LENS = torch.tensor([100, 7], dtype=torch.int32)
BLOCK_TABLE = torch.arange(32, dtype=torch.int32).view(2, 16)


class Recorder:
    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.grid, self.args, self.kwargs = grid, args, kwargs

        return launch


def source(kernel: Any, args: Any, kwargs: Any) -> ASTSource:
    """What Triton makes of a launch: types, constants, and what is divisible by 16."""
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = args[i] if i < len(args) else kwargs[name]
        if i >= len(args) or value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(i,)] = "*" + TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return ASTSource(kernel, signature, constants, attributes)


def metadata(case: dict[str, Any]) -> Any:
    """Two sequences of case["query_len"] tokens each. 0.16.0's backend is handed rows, as its builder makes them."""
    table, lens = BLOCK_TABLE, SEQ_LENS
    if vllm.__version__ == "0.16.0":
        table = table.repeat_interleave(case["query_len"], 0)
        lens = (lens[:, None] - torch.arange(case["query_len"]).flip(0)).flatten().int()
    decode = SimpleNamespace(block_table=table, seq_lens=lens)
    return SimpleNamespace(max_seq_len=case["max_seq_len"], causal=True, decode=decode)


def decode(case: dict[str, Any]) -> dict[str, Any]:
    """TritonMLAImpl.forward_mqa for Kimi-K2.5's latent: 512 + 64 wide, case["heads"] heads on this rank."""
    ops.current_platform = SimpleNamespace(is_cuda=lambda: True)
    ops.get_max_shared_memory_bytes = lambda index: case["limit"]
    stage1 = ops._fwd_grouped_kernel_stage1 = Recorder(ops._fwd_grouped_kernel_stage1)
    stage2 = ops._fwd_kernel_stage2 = Recorder(ops._fwd_kernel_stage2)
    try:
        impl = object.__new__(triton_mla.TritonMLAImpl)
        impl.kv_lora_rank, impl.scale, impl.dcp_world_size, impl._sm_count = 512, 0.1, 1, 188
        impl.kv_cache_dtype = "auto" if case["cache"] == "bf16" else case["cache"]
        impl.forward_mqa(
            torch.zeros(2 * case["query_len"], case["heads"], 576, dtype=torch.bfloat16),
            torch.zeros(16, case["page"], 576, dtype=CACHES[case["cache"]]),
            metadata(case),
            SimpleNamespace(_k_scale=torch.ones(())),
        )
    finally:
        ops._fwd_grouped_kernel_stage1, ops._fwd_kernel_stage2 = stage1.kernel, stage2.kernel
    shared, narrow = [], 0
    for record in (stage1, stage2):
        options = {key: record.kwargs.pop(key) for key in ("num_warps", "num_stages")}
        if record is stage1:
            stages = options["num_stages"]
            record.kwargs["BLOCK_N"] *= case.get("wider", 1)
        elif "OUTPUT_FP16" in record.kernel.arg_names:
            record.kwargs.setdefault("OUTPUT_FP16", 0)
        launch = source(record.kernel, record.args, record.kwargs)
        compiled = triton.compile(launch, GPUTarget("cuda", 120, 32), options)
        shared.append(compiled.metadata.shared)
        narrow += len(re.findall("arith.muli .*%stride_mid_ob.* : i32", compiled.asm["ttir"]))
    given = dict(zip(stage1.kernel.arg_names, stage1.args, strict=False))
    return {
        "stages": stages,
        "shared": max(shared),
        "rows": stage1.grid[0],
        "row_lens": given["B_Seqlen"].tolist(),
        "first_blocks": given["Req_to_tokens"][:, 0].tolist(),
        "narrow": narrow,
    }


print(json.dumps([decode(case) for case in json.loads(sys.argv[1])]))
