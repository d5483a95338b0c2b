"""Run in an SGLang release: how far sglang_kernels.py is from the engine's own kernels, in Triton's interpreter.

Prints JSON: a name for each case, and the largest difference. In float32, since the interpreter has no bfloat16. The
two tree kernels are compared in a release that has them in Triton.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", TRITON_INTERPRET="1", TORCHDYNAMO_DISABLE="1")
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts/in_image"))

import sglang_kernels as ours
import torch
from contract_sglang_bench import stand_in_for_kernels

# Heads of queries, heads of the cache, width of keys and of values: as the Llama drafter has them, and absorbed MLA.
SHAPES = ((8, 8, 64, 64), (8, 1, 576, 512))
KNOWN, NEW, SLOTS = (5, 0), (3, 4), 24


def indptr(lengths: tuple[int, ...]) -> Any:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()


def extend(kernels: Any, shape: tuple[int, int, int, int], masked: bool) -> float:
    """New tokens of two sequences, one of them with tokens in the cache; `masked`: only every other one is seen."""
    heads, kv_heads, width, v_width = shape
    q, k = torch.randn(sum(NEW), heads, width), torch.randn(sum(NEW), kv_heads, width)
    k_buffer = torch.randn(SLOTS, kv_heads, width)
    v, v_buffer = k[..., :v_width].contiguous(), k_buffer[..., :v_width]
    masks, starts = [], [0]
    for known, new in zip(KNOWN, NEW, strict=True):
        among = torch.eye(new, dtype=torch.bool) | (torch.arange(new) % 2 == 0).expand(new, new).tril()
        masks.append(torch.cat([torch.ones(new, known, dtype=torch.bool), among], 1).flatten())
        starts.append(starts[-1] + len(masks[-1]))
    named: dict[str, Any] = {
        "q_extend": q, "k_extend": k, "v_extend": v, "k_buffer": k_buffer, "v_buffer": v_buffer,
        "qo_indptr": indptr(NEW), "kv_indptr": indptr(KNOWN), "kv_indices": torch.randperm(SLOTS)[: sum(KNOWN)],
        "custom_mask": torch.cat(masks) if masked else None, "is_causal": True,
        "mask_indptr": torch.tensor(starts) if masked else None, "max_len_extend": max(NEW), "sm_scale": width**-0.5,
    }  # fmt: skip
    return difference(kernels.extend_attention_fwd, ours.extend_attention, named, "o_extend", (len(q), heads, v_width))


def decode(kernels: Any, shape: tuple[int, int, int, int]) -> float:
    """One token of each of two sequences, behind 6 and 4 others."""
    heads, kv_heads, width, v_width = shape
    lengths, splits = (7, 5), 2
    k_buffer = torch.randn(SLOTS, kv_heads, width)
    named: dict[str, Any] = {
        "q": torch.randn(2, heads, width), "k_buffer": k_buffer, "v_buffer": k_buffer[..., :v_width],
        "kv_indptr": indptr(lengths), "kv_indices": torch.randperm(SLOTS)[: sum(lengths)],
        "attn_logits": torch.empty(2, heads, splits, v_width), "attn_lse": torch.empty(2, heads, splits),
        "num_kv_splits": torch.full((2,), splits, dtype=torch.int32), "max_kv_splits": splits,
        "sm_scale": width**-0.5,
    }  # fmt: skip
    return difference(kernels.decode_attention_fwd, ours.decode_attention, named, "o", (2, heads, v_width))


def difference(real: Any, stand_in: Any, named: dict[str, Any], out: str, shape: tuple[int, ...]) -> float:
    """The largest difference of what both write to `out`."""
    results = [torch.zeros(shape), torch.zeros(shape)]
    scales = {name: 1.0 for name in ("k_scale", "v_scale") if name in ours.inspect.signature(real).parameters}
    real(**named, **scales, **{out: results[0]})
    ours._by_name(real, stand_in)(**named, **scales, **{out: results[1]})
    assert results[0].abs().max() > 0.1, "nothing was computed"
    return float((results[0] - results[1]).abs().max())


def tree(spec_tree: Any) -> dict[str, float]:
    """A chain of four for two sequences, of which the target agrees with two drafts and with all."""
    n, lengths = 4, torch.tensor([6, 3])
    results: dict[str, list[Any]] = {"tree": [], "verify": []}
    for real in (True, False):
        mask = torch.ones(int((n * (lengths + n)).sum()), dtype=torch.bool)
        positions, links = torch.zeros(2 * n, dtype=torch.long), torch.full((3, 2, n), -1)
        build = spec_tree.sgl_build_tree_kernel_triton if real else ours.build_tree
        # As organize_draft_results gives them for a chain: the drafts of the steps, in their order.
        parents, selected = torch.arange(-1, n - 2).repeat(2, 1), torch.arange(n - 1).repeat(2, 1)
        build(parents, selected, lengths, mask, positions, *links, 1, n - 1, n, 0)
        results["tree"].append(torch.cat([mask.long(), positions, links.flatten()]))
        candidates = torch.tensor([[9, 11, 12, 13], [9, 21, 22, 23]])
        target = torch.tensor([[11, 12, 99, 14], [21, 22, 23, 24]])
        written = [torch.full((2 * n,), -1, dtype=torch.int32), torch.full((2, n), -1, dtype=torch.int32)]
        written.append(torch.zeros(2, dtype=torch.int32))
        verify = spec_tree.verify_tree_greedy_triton if real else ours.verify_tree_greedy
        verify(*written, candidates, *links, target)
        accepted = written[1][written[1] != -1]
        results["verify"].append(torch.cat([written[1].flatten(), written[2], written[0][accepted.long()]]))
        assert written[2].tolist() == [2, 3]
    return {name: float((real - other).abs().max()) for name, (real, other) in results.items()}


def main() -> None:
    stand_in_for_kernels()
    ours._scalar_of_one()
    torch.manual_seed(0)
    kernels = [import_module(f"{ours.where()}.{name}_attention") for name in ("extend", "decode")]
    found = {}
    for shape in SHAPES:
        name = f"{shape[1]} heads"
        found[f"extend, {name}"] = extend(kernels[0], shape, masked=False)
        found[f"extend, {name}, masked"] = extend(kernels[0], shape, masked=True)
        found[f"decode, {name}"] = decode(kernels[1], shape)
    if ours.where() == ours.TRITON[0]:
        found |= tree(import_module("sglang.kernels.ops.speculative.spec_tree"))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
