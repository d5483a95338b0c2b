"""The real MLA attention of vLLM 0.16.0 on a CPU: metadata builder, layer, backend, kernels in Triton's interpreter.

Runs under the engine's interpreter. Real: how a batch is reordered and split, the metadata, the layer's two paths, the
Triton kernels (decode, and the merge of partial results). mla_stand_ins has the rest. The buffers of the model runner
are kept as it keeps them: longer than the batch, at one address, with rows of -1 and zeros where a batch is padded.
"""
# ruff: noqa: E402 (the driver and the platform are set before the engine is imported)

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import vllm.platforms
from mla_stand_ins import FP8, attention, flash_attention, gather_cache, write_cache
from triton.backends.nvidia.driver import CudaDriver
from vllm.platforms.cpu import CpuPlatform

CudaDriver.is_active = staticmethod(lambda: True)  # or vllm switches Triton off
vllm.platforms._current_platform = CpuPlatform()

import vllm.config.vllm as config_module
from vllm.config import CompilationConfig
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import reorder_batch_to_split_decodes_and_prefills
from vllm.v1.kv_cache_interface import MLAAttentionSpec

BACKEND = "vllm.v1.attention.backends.mla.triton_mla"  # imported by the first rig, so that its file may be chosen
LATENT, ROPE = 512, 64  # the widths that MLA's kernels are written for
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sizes:
    """Of one rank: attention heads and their widths, cache pages of `page` tokens, K draft tokens a step (0: none)."""

    k: int = 3
    heads: int = 2
    nope: int = 16
    value: int = 16
    page: int = 16
    max_num_seqs: int = 8
    max_model_len: int = 256
    cache: str = "auto"
    k_scale: float = 1.0
    dcp: int = 1
    dtype: torch.dtype = torch.float32


@dataclass
class Seen:
    """What a rig's passes did: rows of each call of the decode kernel, tokens that the prefill path got."""

    decode: list[dict[str, Any]] = field(default_factory=list)
    prefill_tokens: int = 0


def configuration(sizes: Sizes) -> Any:
    """The fields of VllmConfig that attention reads."""
    drafts = SimpleNamespace(num_speculative_tokens=sizes.k, parallel_drafting=False)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=sizes.max_model_len,
            dtype=sizes.dtype,
            get_head_size=lambda: LATENT + ROPE,
            get_num_attention_heads=lambda parallel: sizes.heads,
            hf_text_config=SimpleNamespace(
                q_lora_rank=None,
                kv_lora_rank=LATENT,
                qk_nope_head_dim=sizes.nope,
                qk_rope_head_dim=ROPE,
                v_head_dim=sizes.value,
            ),
        ),
        parallel_config=SimpleNamespace(
            cp_kv_cache_interleave_size=1,
            decode_context_parallel_size=sizes.dcp,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            tensor_parallel_size=1,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=sizes.max_num_seqs),
        cache_config=SimpleNamespace(
            block_size=sizes.page, cache_dtype=sizes.cache, calculate_kv_scales=False, enable_prefix_caching=False
        ),
        compilation_config=CompilationConfig(custom_ops=["none"]),
        attention_config=SimpleNamespace(
            disable_flashinfer_prefill=True, use_cudnn_prefill=False, use_trtllm_ragged_deepseek_prefill=False
        ),
        speculative_config=drafts if sizes.k else None,
        quant_config=None,
    )


class Rig:
    """One attention layer, its metadata builder, its KV cache, and the runner's buffers."""

    def __init__(self, sizes: Sizes, seed: int = 0) -> None:
        self.sizes, self.seen = sizes, Seen()
        random = torch.Generator().manual_seed(seed)
        self.random = lambda *shape: torch.randn(*shape, generator=random).to(sizes.dtype)
        self.module: Any = import_module(BACKEND)
        self.config = configuration(sizes)
        config_module._current_vllm_config = self.config
        self._stand_ins()

        width = math.ceil(sizes.max_model_len / sizes.page)
        blocks = sizes.max_num_seqs * width + 1
        # What no sequence has written is NaN, and so is what lies before the first page and after the last: a kernel
        # that reads it can't go unnoticed.
        dtype, nan = (sizes.dtype, math.nan) if sizes.cache == "auto" else (torch.uint8, 0x7F)
        self.cache = torch.full((blocks + 2, sizes.page, LATENT + ROPE), nan, dtype=dtype)[1:-1]
        spec = MLAAttentionSpec(block_size=sizes.page, num_kv_heads=1, head_size=LATENT + ROPE, dtype=self.cache.dtype)
        self.backend = self.module.TritonMLABackend
        self.builder = self.backend.get_builder_cls()(spec, ["layer"], self.config, CPU)
        weight = self.random(sizes.heads * (sizes.nope + sizes.value), LATENT) / 16

        class Projection(torch.nn.Module):
            quant_method = None

            def forward(self, x: Any) -> tuple[Any, None]:
                return x @ self.weight.T, None

        projection = Projection()
        projection.weight = torch.nn.Parameter(weight, requires_grad=False)
        default = torch.get_default_dtype()
        torch.set_default_dtype(sizes.dtype)
        self.layer = mla_attention.MLAAttention(
            sizes.heads, (sizes.nope + ROPE) ** -0.5, sizes.nope, ROPE, sizes.value, None, LATENT, projection,
            cache_config=self.config.cache_config, prefix="layer",
        )  # fmt: skip
        torch.set_default_dtype(default)
        self.layer.process_weights_after_loading(sizes.dtype)
        self.layer._k_scale.fill_(sizes.k_scale)
        self.layer.impl.dcp_world_size = 1
        self._watch()

        # These go on behind their last row, so that reading there is wrong without being a crash.
        seqs, beyond = sizes.max_num_seqs, 16 * sizes.max_num_seqs
        self.seq_lens = torch.zeros(beyond, dtype=torch.int32)[:seqs]
        self.query_start_loc = torch.zeros(sizes.max_num_seqs + 1, dtype=torch.int32)
        # Pages are taken in no order, so a wrong row of the table reads another sequence's tokens.
        self.pages = torch.randperm(blocks - 1, generator=random).to(torch.int32).view(sizes.max_num_seqs, width) + 1
        self.block_table = torch.zeros(beyond, width, dtype=torch.int32)[:seqs]

    def _stand_ins(self) -> None:
        mla_attention.get_attn_backend = lambda *args, **named: self.module.TritonMLABackend
        mla_attention.flash_attn_varlen_func = flash_attention
        mla_attention.is_vllm_fa, mla_attention.get_flash_attn_version = True, lambda *args, **named: 2
        ops = SimpleNamespace(concat_and_cache_mla=write_cache, gather_and_maybe_dequant_cache=gather_cache)
        mla_attention.ops = ops
        if not hasattr(torch, "_zeros"):  # pinned memory needs a GPU
            torch._zeros = torch.zeros
            torch.zeros = lambda *args, pin_memory=False, **named: torch._zeros(*args, **named)

    def _watch(self) -> None:
        kernel = getattr(self.module, "_kernel", self.module.decode_attention_fwd)
        self.module._kernel = kernel

        def decode(
            q: Any, k: Any, v: Any, o: Any, lse: Any, table: Any, lens: Any, logits: Any, *rest: Any, **named: Any
        ) -> None:
            self.seen.decode.append(
                {
                    "rows": q.shape[0],
                    "table_rows": table.shape[0],
                    "seq_lens": lens.tolist(),
                    "first_pages": table[:, 0].tolist(),
                    "scratch_rows": logits.shape[0],
                }
            )
            kernel(q, k, v, o, lse, table, lens, logits, *rest, **named)

        self.module.decode_attention_fwd = decode
        prefill = self.layer.impl.forward_mha

        def forward_mha(q: Any, *args: Any, **named: Any) -> None:
            self.seen.prefill_tokens += q.shape[0]
            prefill(q, *args, **named)

        self.layer.impl.forward_mha = forward_mha

    def order(self, batch: Sequence[tuple[int, int]]) -> list[int]:
        """The runner's order of a batch of (tokens computed before, tokens in this step), by the real code."""
        ids = list(map(str, range(len(batch))))
        computed = torch.tensor([before for before, _ in batch]).numpy()

        def swap(i: int, j: int) -> None:
            ids[i], ids[j] = ids[j], ids[i]
            computed[i], computed[j] = computed[j], computed[i]

        reorder_batch_to_split_decodes_and_prefills(
            SimpleNamespace(req_ids=ids, num_computed_tokens_cpu=computed, swap_states=swap),
            SimpleNamespace(num_scheduled_tokens={str(i): new for i, (_, new) in enumerate(batch)}),
            decode_threshold=self.builder.reorder_batch_threshold,
        )
        return list(map(int, ids))

    def fill(self, batch: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Give each sequence pages, a history in them and new tokens; returns the tokens' inputs and all latents."""
        self.pages = self.pages.roll(1, 0)
        sizes, new = self.sizes, [n for _, n in batch]
        history = [self.random(before + n, LATENT + ROPE) for before, n in batch]
        for i, ((before, _), latents) in enumerate(zip(batch, history, strict=True)):
            self._write(i, latents[:before], 0)
        tokens = torch.cat([latents[before:] for (before, _), latents in zip(batch, history, strict=True)])
        q = self.random(sum(new), sizes.heads, sizes.nope + ROPE)
        return {"q": q, "latents": history, "tokens": tokens}

    def slots(self, seq: int, start: int, end: int) -> Any:
        position = torch.arange(start, end)
        return self.pages[seq, position // self.sizes.page].long() * self.sizes.page + position % self.sizes.page

    def _write(self, seq: int, latents: Any, start: int) -> None:
        slots = self.slots(seq, start, start + len(latents))
        write_cache(latents[:, :LATENT], latents[:, LATENT:], self.cache, slots, self.sizes.cache, self.sizes.k_scale)

    def common(self, batch: Sequence[tuple[int, int]], padded_seqs: int = 0) -> CommonAttentionMetadata:
        """The batch as GPUModelRunner describes it; a CUDA graph's is padded to `padded_seqs` times K + 1 tokens."""
        n, new = len(batch), [n for _, n in batch]
        seqs = padded_seqs or n
        tokens = padded_seqs * (self.sizes.k + 1) or sum(new)
        self.seq_lens.zero_()
        self.seq_lens[:n] = torch.tensor([before + m for before, m in batch])
        self.query_start_loc[1 : n + 1] = torch.tensor(new).cumsum(0)
        self.query_start_loc[n + 1 :] = sum(new)
        self.block_table[:n] = self.pages[:n]
        self.block_table[n:seqs] = -1
        slots = torch.full((tokens,), -1)
        slots[: sum(new)] = torch.cat([self.slots(i, before, before + m) for i, (before, m) in enumerate(batch)])
        return CommonAttentionMetadata(
            query_start_loc=self.query_start_loc[: seqs + 1],
            query_start_loc_cpu=self.query_start_loc[: seqs + 1].clone(),
            seq_lens=self.seq_lens[:seqs],
            num_reqs=seqs,
            num_actual_tokens=tokens,
            max_query_len=max(new),
            max_seq_len=int(self.seq_lens.max()),
            block_table_tensor=self.block_table[:seqs],
            slot_mapping=slots,
            causal=True,
        )

    def forward(self, metadata: Any, inputs: dict[str, Any]) -> Any:
        """The layer's own forward; rows past the batch's tokens are zero inputs. [tokens, heads, value]"""
        sizes, rows = self.sizes, metadata.num_actual_tokens
        q = torch.zeros(rows, sizes.heads, sizes.nope + ROPE, dtype=sizes.dtype)
        latents = torch.zeros(rows, LATENT + ROPE, dtype=sizes.dtype)
        q[: len(inputs["q"])], latents[: len(inputs["tokens"])] = inputs["q"], inputs["tokens"]
        out = torch.full((rows, sizes.heads * sizes.value), 7.0, dtype=sizes.dtype)
        self.layer.forward_impl(
            q, latents[:, :LATENT], latents[:, LATENT:].unsqueeze(1), self.cache, metadata, output=out
        )
        return out.view(rows, sizes.heads, sizes.value)

    def dense(self, batch: Sequence[tuple[int, int]], inputs: dict[str, Any]) -> Any:
        """What every token should get, by plain attention over its own sequence up to itself."""
        sizes, results, at, prefill = self.sizes, [], 0, False
        expand = self.layer.kv_b_proj.weight.float().view(sizes.heads, sizes.nope + sizes.value, LATENT)
        for (before, new), latents in zip(batch, inputs["latents"], strict=True):
            latents = latents.float()
            if sizes.cache != "auto":  # what an fp8 cache keeps of it; prefill attends to its new tokens before that
                prefill |= new > sizes.k + 1  # these come last
                kept = before if prefill else before + new
                rounded = (latents[:kept] / sizes.k_scale).to(FP8).float() * sizes.k_scale
                latents = torch.cat([rounded, latents[kept:]])
            up = torch.einsum("nl,hdl->nhd", latents[:, :LATENT], expand)
            rope = latents[:, None, LATENT:].expand(-1, sizes.heads, -1)
            k = torch.cat([up[..., : sizes.nope], rope], dim=-1)
            out, _ = attention(inputs["q"][at : at + new], k, up[..., sizes.nope :], self.layer.scale, before)
            results.append(out)
            at += new
        return torch.cat(results)


def step(rig: Rig, batch: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """The first step of a rig, reordered as the runner does: the largest error, and where its tokens went."""
    batch = [batch[i] for i in rig.order(batch)]
    inputs = rig.fill(batch)
    metadata = rig.builder.build(0, rig.common(batch))
    out = rig.forward(metadata, inputs)
    return {
        "batch": batch,
        "error": float((out.float() - rig.dense(batch, inputs)).abs().nan_to_num(1e9).max()),
        "decode": rig.seen.decode,
        "prefill_tokens": rig.seen.prefill_tokens,
    }
