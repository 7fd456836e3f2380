"""`flash_attn_varlen_func` in plain PyTorch, written from its documentation and in any float dtype.

    "If causal=True, the causal mask is aligned to the bottom right corner of the attention matrix. For example, if
    seqlen_q = 2 and seqlen_k = 5, the causal mask (1 = keep, 0 = masked out) is:
        1 1 1 1 0
        1 1 1 1 1
    [...] If the row of the mask is all zero, the output will be zero. If window_size != (-1, -1), implements sliding
    window local attention. Query at position i will only attend to keys between
    [i + seqlen_k - seqlen_q - window_size[0], i + seqlen_k - seqlen_q + window_size[1]] inclusive."

Also: "if Q has 6 heads and K, V have 2 heads, head 0, 1, 2 of Q will attention to head 0 of K, V". Nothing of modules/
takes part. It is stricter than a kernel, which reads beyond its arrays where the lengths are wrong.
"""

from itertools import pairwise

import torch
from torch import Tensor


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """q [total_q, heads, width], k and v [total_k, heads of k, width] -> [total_q, heads, width]."""
    for x in (q, k, v):
        assert x.ndim == 3 and x.is_contiguous(), (x.shape, x.stride())
        assert x.dtype == q.dtype and x.shape[2] == q.shape[2], (x.dtype, x.shape)
    assert k.shape == v.shape and q.shape[1] % k.shape[1] == 0, (q.shape, k.shape, v.shape)
    for cumulative, x, longest in ((cu_seqlens_q, q, max_seqlen_q), (cu_seqlens_k, k, max_seqlen_k)):
        assert cumulative.dtype == torch.int32 and cumulative.is_contiguous() and cumulative.device == q.device
        lengths = cumulative.diff()
        assert cumulative[0] == 0 and cumulative[-1] == x.shape[0] and (lengths > 0).all(), cumulative
        assert type(longest) is int and longest == lengths.max(), (longest, lengths)
    assert len(cu_seqlens_q) == len(cu_seqlens_k)

    share = q.shape[1] // k.shape[1]
    outputs = []
    for (q0, q1), (k0, k1) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True):
        aligned = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
        key = torch.arange(k1 - k0)[None, :]
        keep = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        if causal:
            keep &= key <= aligned
        if window_size[0] >= 0:
            keep &= key >= aligned - window_size[0]
        if window_size[1] >= 0:
            keep &= key <= aligned + window_size[1]
        keep = keep.to(q.device)
        heads = []
        for h in range(q.shape[1]):
            score = q[q0:q1, h] @ k[k0:k1, h // share].T / q.shape[2] ** 0.5
            score = score.masked_fill(~keep, -torch.inf)
            nothing = ~keep.any(1, keepdim=True)
            weight = score.masked_fill(nothing, 0.0).softmax(1).masked_fill(nothing, 0.0)
            heads.append(weight @ v[k0:k1, h // share])
        outputs.append(torch.stack(heads, dim=1))
    return torch.cat(outputs)
