"""What vLLM 0.16.0 has as CUDA code alone, in plain torch: FlashAttention, and MLA's KV cache written and gathered."""

from typing import Any

import torch

FP8 = torch.float8_e4m3fn


def attention(q: Any, k: Any, v: Any, scale: float, behind: int | None) -> tuple[Any, Any]:
    """Dense attention. q: [m, heads, d]; k, v: [n, heads, ...]; query i sees keys up to i + `behind` (None: all).

    Returns the output [m, heads, d_v] and the log of the sum of exponentials [heads, m], both in float32.
    """
    scores = torch.einsum("mhd,nhd->hmn", q.float(), k.float()) * scale
    if behind is not None:
        hidden = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).triu(1 + behind)
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    return torch.einsum("hmn,nhv->mhv", (scores - lse.unsqueeze(-1)).exp(), v.float()), lse


def flash_attention(
    *, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, softmax_scale: float, causal: bool, **_: Any
) -> tuple[Any, Any]:
    """FlashAttention over sequences side by side: the output as q has tokens, and the log-sum-exp [heads, tokens]."""
    outputs, sums = [], []
    bounds = zip(
        cu_seqlens_q.tolist(), cu_seqlens_q[1:].tolist(), cu_seqlens_k.tolist(), cu_seqlens_k[1:].tolist(), strict=False
    )
    for q0, q1, k0, k1 in bounds:
        behind = (k1 - k0) - (q1 - q0) if causal else None
        if k1 > k0:
            out, lse = attention(q[q0:q1], k[k0:k1], v[k0:k1], softmax_scale, behind)
        else:  # a sequence without context in a chunk of those that have some
            out, lse = torch.zeros(q1 - q0, q.shape[1], v.shape[2]), torch.full((q.shape[1], q1 - q0), float("-inf"))
        outputs.append(out)
        sums.append(lse)
    return torch.cat(outputs).to(q.dtype), torch.cat(sums, dim=1)


def write_cache(kv_c: Any, k_pe: Any, cache: Any, slots: Any, kv_cache_dtype: str, scale: Any) -> None:
    """concat_and_cache_mla: token i goes to slot slots[i]; -1 is nowhere."""
    flat, rows = cache.view(-1, cache.shape[-1]), torch.cat([kv_c, k_pe], dim=-1)
    used = slots >= 0
    if kv_cache_dtype.startswith("fp8"):
        flat[slots[used]] = (rows[used].float() / scale).to(FP8).view(torch.uint8)
    else:
        flat[slots[used]] = rows[used].to(flat.dtype)


def gather_cache(
    *, src_cache: Any, dst: Any, block_table: Any, cu_seq_lens: Any, token_to_seq: Any, num_tokens: Any,
    kv_cache_dtype: str, scale: Any, seq_starts: Any,
) -> None:  # fmt: skip
    """gather_and_maybe_dequant_cache: a chunk of each sequence's context, side by side, in the type of `dst`."""
    tokens = torch.arange(int(num_tokens))
    seqs = token_to_seq[: len(tokens)].long()
    position = seq_starts[seqs] + tokens - cu_seq_lens[seqs]
    page = src_cache.shape[1]
    pages, places = block_table[seqs, position // page].long(), (position % page).long()
    if kv_cache_dtype.startswith("fp8"):
        rows = src_cache.view(torch.uint8)[pages, places].view(FP8).float() * scale
    else:
        rows = src_cache[pages, places]
    dst[: len(tokens)] = rows.to(dst.dtype)
