"""What one verify step costs in attention, counted while the release's own code runs it: one layer, one GPU of eight.

Runs under the engine's interpreter: `verify_cost.py CONTEXT...` prints JSON, an entry a context. One sequence, K = 3
draft tokens, Kimi-K2.5's sizes on one of 8 GPUs (8 heads), a cache of 16-bit numbers (float16 here, which is as wide as
bfloat16, and which the interpreter computes). Counted:

* cache_loads: bytes of the KV cache that kernels ask for; cache_bytes: those that are distinct, which is what must come
  from memory at least once.
* moved: bytes that all kernels of the layer's attention read and write; what they read twice counts twice.
* flops: of matrix products, two for a multiplication and an addition. Masked parts count where they are computed.
* kernels: how many are launched.

Triton's kernels are counted load by load and product by product in the interpreter, PyTorch's by their operands.
Kernels that stand in for CUDA code count as one launch that reads its inputs and writes its outputs once. Caches of the
GPU, and time, are not modelled.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mla_rig
import numpy as np
import torch
from mla_rig import Rig, Sizes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from triton.runtime import interpreter

K = 3


class Count(TorchDispatchMode):
    """Counts what runs inside it."""

    def __init__(self, cache: Any) -> None:
        super().__init__()
        self.start, self.seen = cache.data_ptr(), np.zeros(cache.numel() * cache.itemsize, dtype=bool)
        self.cache_loads = self.moved = self.flops = self.kernels = 0
        self.aside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.aside:
            self._operands(func, args, kwargs or {}, out)
        return out

    def _operands(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        known = {t.untyped_storage().data_ptr() for t in tensors}
        fresh = [t for t in made if t.untyped_storage().data_ptr() not in known]
        if func._schema.is_mutable or (fresh and "empty" not in func.__name__):
            self.kernels += 1
            self.moved += sum(t.numel() * t.itemsize for t in (*tensors, *fresh))

    def stand_in(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Count a stand-in for a CUDA kernel: its tensors once, its matrix products as they are computed."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.aside = True
            out = work(*args, **kwargs)
            self.aside = False
            self.kernels += 1
            tensors = torch.utils._pytree.tree_leaves((args, kwargs, out))
            self.moved += sum(t.numel() * t.itemsize for t in tensors if isinstance(t, torch.Tensor))
            return out

        return counted

    def gather(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Count the kernel that copies a context out of the cache: the rows that it copies, not the whole cache."""

        def counted(**kwargs: Any) -> None:
            self.aside = True
            work(**kwargs)
            self.aside = False
            size = int(kwargs["num_tokens"]) * kwargs["dst"].shape[1] * kwargs["dst"].itemsize
            self.kernels += 1
            self.moved += 2 * size
            self.cache_loads += size
            self.gathered = size

        return counted

    gathered = 0

    def addresses(self, pointers: Any, mask: Any, size: int) -> None:
        """Triton loads or stores at these addresses, `size` bytes each."""
        used = pointers[mask]
        self.moved += used.size * size
        offsets = used.astype(np.int64) - self.start
        inside = offsets[(offsets >= 0) & (offsets < self.seen.size)]
        self.cache_loads += inside.size * size
        for byte in range(size):
            self.seen[inside + byte] = True


@contextmanager
def counting(rig: Rig) -> Iterator[Count]:
    """Count everything that the rig's layer does."""
    count, builder = Count(rig.cache), interpreter.InterpreterBuilder
    load, store, dot, launch = (
        builder.create_masked_load,
        builder.create_masked_store,
        builder.create_dot,
        interpreter.GridExecutor.__call__,
    )
    standing = mla_rig.mla_attention.ops, rig.layer.impl.flash_attn_varlen_func

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        count.addresses(pointers.data, mask.data, pointers.get_element_ty().primitive_bitwidth // 8)
        return load(self, pointers, mask, *rest)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        count.addresses(pointers.data, mask.data, pointers.get_element_ty().primitive_bitwidth // 8)
        return store(self, pointers, value, mask, *rest)

    def counted_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        count.flops += 2 * a.data.shape[0] * a.data.shape[1] * b.data.shape[1]
        return dot(self, a, b, *rest)

    def counted_launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        count.kernels += 1
        count.aside = True  # the interpreter's own copies
        launch(self, *args, **kwargs)
        count.aside = False

    builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
    builder.create_dot, interpreter.GridExecutor.__call__ = counted_dot, counted_launch
    write = standing[0].concat_and_cache_mla

    def counted_write(kv_c: Any, k_pe: Any, cache: Any, *args: Any, **kwargs: Any) -> None:
        count.aside = True
        write(kv_c, k_pe, cache, *args, **kwargs)
        count.aside = False
        count.kernels += 1
        count.moved += 2 * (kv_c.numel() * kv_c.itemsize + k_pe.numel() * k_pe.itemsize)

    mla_rig.mla_attention.ops = type(standing[0])(
        concat_and_cache_mla=counted_write,
        gather_and_maybe_dequant_cache=count.gather(standing[0].gather_and_maybe_dequant_cache),
    )
    rig.layer.impl.flash_attn_varlen_func = count.stand_in(standing[1])
    try:
        with FlopCounterMode(display=False) as products, count:
            yield count
        count.flops += products.get_total_flops()
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
        builder.create_dot, interpreter.GridExecutor.__call__ = dot, launch
        mla_rig.mla_attention.ops, rig.layer.impl.flash_attn_varlen_func = standing


def cost(context: int) -> dict[str, int | str]:
    """One verify step of K + 1 tokens behind `context` tokens."""
    sizes = Sizes(k=K, heads=8, nope=128, value=128, max_num_seqs=1, max_model_len=context + K + 1, dtype=torch.float16)
    rig = Rig(sizes)
    batch = [(context, K + 1)]
    inputs = rig.fill(batch)
    metadata = rig.builder.build(0, rig.common(batch))
    with counting(rig) as count:
        rig.forward(metadata, inputs)
    return {
        "context": context,
        "path": "prefill" if rig.seen.prefill_tokens else "decode",
        "cache_loads": count.cache_loads,
        "cache_bytes": int(count.seen.sum()) + count.gathered,
        "moved": count.moved,
        "flops": count.flops,
        "kernels": count.kernels,
    }


if __name__ == "__main__":
    print(json.dumps([cost(int(context)) for context in sys.argv[1:]]))
