"""The kernels of SGLang that a drafted token meets and that no CPU runs, in torch, with the arguments of the real ones.

Two are the triton backend's attention: the interpreter runs them too, but takes a second for a token, and has no
bfloat16. Two are compiled, in sgl_kernel: how the drafts of a round become a tree, and which of its branches the target
agrees with. The norm is the engine's own in torch, made to write where the compiled one does.
"""

import inspect
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

# Where the triton backend has its attention: later releases, earlier ones.
TRITON = ("sglang.kernels.ops.attention", "sglang.srt.layers.attention.triton_ops")


def _attend(q: Any, k: Any, v: Any, scale: float, mask: Any) -> Any:
    """Attention in float32. q: [n, heads, d], k: [m, kv_heads, d], v: [m, kv_heads, d_v], mask: [n, m], true to see."""
    import torch

    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1).float() for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)


def extend_attention(
    q_extend: Any,
    k_extend: Any,
    v_extend: Any,
    o_extend: Any,
    k_buffer: Any,
    v_buffer: Any,
    qo_indptr: Any,
    kv_indptr: Any,
    kv_indices: Any,
    custom_mask: Any,
    mask_indptr: Any,
    sm_scale: float,
    **_: Any,
) -> None:
    """extend_attention_fwd: new tokens see what `kv_indices` names in the cache, and each other up to themselves.

    The first four: [tokens, heads, d]; the buffers: [slots, heads, d]. Sequence b has the tokens qo_indptr[b] up to
    qo_indptr[b + 1], and the slots kv_indices[kv_indptr[b] : kv_indptr[b + 1]]. `custom_mask` is flat, [tokens, slots +
    tokens] for each sequence; of it, as in the kernel, what is about the cache is not read.
    """
    import torch

    for b in range(len(qo_indptr) - 1):
        new = slice(int(qo_indptr[b]), int(qo_indptr[b + 1]))
        slots = kv_indices[kv_indptr[b] : kv_indptr[b + 1]].long()
        n, known = new.stop - new.start, len(slots)
        among = torch.ones(n, n, dtype=torch.bool).tril()
        if custom_mask is not None:
            start = int(mask_indptr[b])
            among = custom_mask[start : start + n * (known + n)].view(n, known + n)[:, known:].bool()
        mask = torch.cat([torch.ones(n, known, dtype=torch.bool), among], 1)
        # A first pass of MLA has heads of its own, other than the cache's one.
        keys, values = k_extend[new], v_extend[new]
        if known:
            keys, values = torch.cat([k_buffer[slots], keys]), torch.cat([v_buffer[slots], values])
        o_extend[new] = _attend(q_extend[new], keys, values, sm_scale, mask).to(o_extend.dtype)


def decode_attention(
    q: Any,
    k_buffer: Any,
    v_buffer: Any,
    o: Any,
    kv_indptr: Any,
    kv_indices: Any,
    sm_scale: float,
    **_: Any,
) -> None:
    """decode_attention_fwd: one new token for each sequence, [sequences, heads, d], which is in the cache already."""
    import torch

    for b in range(len(q)):
        slots = kv_indices[kv_indptr[b] : kv_indptr[b + 1]].long()
        mask = torch.ones(1, len(slots), dtype=torch.bool)
        o[b] = _attend(q[b : b + 1], k_buffer[slots], v_buffer[slots], sm_scale, mask)[0].to(o.dtype)


def build_tree(
    parent_list: Any,
    selected_index: Any,
    seq_lens: Any,
    tree_mask: Any,
    positions: Any,
    retrive_index: Any,
    retrive_next_token: Any,
    retrive_next_sibling: Any,
    topk: int,
    depth: int,
    draft_tokens: int,
    *_: Any,
) -> None:
    """build_tree_kernel_efficient where there is one branch: `draft_tokens` tokens, each of them after the last.

    Writes positions, [sequences * n], the tree, [sequences, n] each, and the mask of all, which comes filled with true.
    Raises NotImplementedError for more branches.
    """
    import torch

    if topk != 1:
        raise NotImplementedError(f"topk {topk}: this stands in for trees of one branch")
    n, start = draft_tokens, 0
    steps = torch.arange(n)
    for b, length in enumerate(seq_lens.tolist()):
        positions[b * n : (b + 1) * n] = length + steps
        retrive_index[b] = b * n + steps
        retrive_next_token[b, :-1] = steps[1:]
        size = n * (length + n)
        tree_mask[start : start + size].view(n, length + n)[:, length:] = torch.ones(n, n, dtype=torch.bool).tril()
        start += size


def verify_tree_greedy(
    predicts: Any,
    accept_index: Any,
    accept_token_num: Any,
    candidates: Any,
    retrive_index: Any,
    retrive_next_token: Any,
    retrive_next_sibling: Any,
    target_predict: Any,
) -> None:
    """The branch of drafts that the target would have written, for each sequence.

    candidates, target_predict: [sequences, n], the drafts behind the last known token, and what the target puts after
    each. Written: which of them are accepted (accept_index, [sequences, depth + 1], -1 behind the last), how many of
    these are drafts, and in `predicts` what follows each.
    """
    after = target_predict.flatten()
    for b in range(len(candidates)):
        node, accepted = 0, 0
        while node != -1:
            at = int(retrive_index[b, node])
            accept_index[b, accepted], predicts[at] = at, after[at]
            node = int(retrive_next_token[b, node])
            while node != -1 and candidates[b, node] != after[at]:
                node = int(retrive_next_sibling[b, node])
            accepted += 1
        accept_token_num[b] = accepted - 1


def _scalar_of_one() -> None:
    """Let Triton's interpreter count a loop: it takes an array of one as a number, which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, *arguments: Any) -> None:
        patch(tensor, *arguments)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def where() -> str:
    """The package of the triton backend's attention in this release."""
    return TRITON[0] if find_spec("sglang.kernels") else TRITON[1]


def _in_place(native: Any) -> Any:
    """The engine's norm in torch, which writes into its inputs as the fused kernel on a GPU does.

    So a state that was captured by reference is overwritten here, too.
    """

    def forward_native(self: Any, x: Any, residual: Any = None, *more: Any, **named: Any) -> Any:
        if residual is None:
            return native(self, x)
        normed, total = native(self, x, residual, *more, **named)
        return x.copy_(normed), residual.copy_(total)

    return forward_native


def _by_name(real: Any, stand_in: Any) -> Any:
    """`stand_in`, called as `real` is: the order of its arguments differs between releases, their names don't."""
    signature = inspect.signature(real)

    def call(*arguments: Any, **named: Any) -> None:
        stand_in(**signature.bind(*arguments, **named).arguments)

    return call


def stand_in() -> None:
    """Put all of these where the engine looks them up, before it makes its workers."""
    from sglang.srt.layers.layernorm import RMSNorm

    RMSNorm.forward_native = _in_place(RMSNorm.forward_native)
    _scalar_of_one()
    for name, attention in (("extend_attention", extend_attention), ("decode_attention", decode_attention)):
        kernels = import_module(f"{where()}.{name}")
        setattr(kernels, f"{name}_fwd", _by_name(getattr(kernels, f"{name}_fwd"), attention))
    try:
        spec_tree: Any = import_module("sglang.kernels.ops.speculative.spec_tree")
    except ModuleNotFoundError:
        # The engine imports both only where it finds CUDA.
        eagle_utils: Any = import_module("sglang.srt.speculative.eagle_utils")
        eagle_utils._is_cuda = True
        eagle_utils.sgl_build_tree_kernel_efficient = build_tree
        sys.modules["sgl_kernel"].verify_tree_greedy = verify_tree_greedy  # type: ignore[attr-defined]
    else:
        spec_tree._is_xpu = True  # this release has both in Triton too, for the devices of another vendor
