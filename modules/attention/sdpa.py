"""Causal `scaled_dot_product_attention` per segment: the cost of the visible pairs, on any device torch knows.

    anchor, one row     A a a | b b | c c | d d d d d | - -
    blocks              [A a a]  [A b b]  [A c c]  [A d d d d d]   the anchor's query stands in front too, since
                                                                   `is_causal` aligns top left where keys are more
    calls               [[A a a], [A b b], [A c c]]  [[A d d d d d]]

Blocks of nearly one length share a call and are filled up at their end: no query before the filler sees it, and what
its own queries make is dropped, so neither a mask nor an error comes of it.

Shape letters: B rows, T tokens in a row, N = B * T tokens of the batch, n blocks of one call, L tokens of one block,
M = n * L slots of one call, H query heads, G key and value heads, X either of the two, D head width.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from modules.attention.borders import Borders
from modules.attention.capabilities import Request
from modules.attention.gather import FILLER, Layout, Slots, gather, nothing, scatter
from modules.attention.strategies import Strategy
from modules.batch import PADDING

DEVICES = ("cpu", "cuda", "mps")


def why_not(request: Request) -> str | None:
    """See `Kernel.why_not`: CPU, CUDA and MPS, any floating dtype the device has, no window."""
    if request.device_type not in DEVICES:
        return f"The sdpa kernel runs on {', '.join(DEVICES)}, not on {request.device_type}."
    if request.strategy.window is not None:
        return (
            "The sdpa kernel runs plain causal attention inside a segment and so has no windows or sinks, which "
            f"attention.strategy={request.strategy.name!r} asks for."
        )
    if request.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return f"The sdpa kernel computes in float64, float32, bfloat16 and float16, not in {request.dtype}."
    if request.device_type == "mps" and request.dtype == torch.float64:
        return "The mps device has no float64."
    return None


def compute(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, borders: Borders, strategy: Strategy) -> Tensor:
    """See `Kernel.compute`."""
    rows, _, tokens, _ = q_BHTD.shape
    # Only these two fields of a strategy decide where segments are.
    calls, layout = borders.derived(("sdpa", strategy.scope, strategy.anchor), lambda: _plan(borders, strategy))
    if not calls:
        return nothing(q_BHTD)
    # Tokens before heads is how projections and SDPA itself lay memory out: `flatten` is a view, blocks are contiguous.
    q, k, v = (gather(x.transpose(1, 2).flatten(0, 1), layout) for x in (q_BHTD, k_BGTD, v_BGTD))
    outputs = []
    for call, *q_k_v in zip(calls, q, k, v, strict=True):
        blocks = (x_MXD.unflatten(0, call).transpose(1, 2) for x_MXD in q_k_v)
        outputs.append(_causal(*blocks).transpose(1, 2).flatten(0, 1))
    return scatter(outputs, layout, tokens=rows * tokens).unflatten(0, (rows, tokens)).transpose(1, 2)


def _plan(borders: Borders, strategy: Strategy) -> tuple[list[tuple[int, int]], Layout]:
    """(n, L) of each call, and what stands in it: once per batch, for all layers."""
    segments = [segment for segment in borders.segments(strategy) if not segment.padding]
    tokens, device = borders.document_BT.shape[1], borders.document_BT.device
    order = borders.order(strategy)
    row_start = np.array([segment.row * tokens for segment in segments], dtype=np.int64)
    sees_anchor = np.array([segment.sees_anchor for segment in segments], dtype=bool)
    start = row_start + np.array([segment.start for segment in segments], dtype=np.int64)
    stop = row_start + np.array([segment.stop for segment in segments], dtype=np.int64)
    # Slot j of a block holds the place j after its first, or one before that where the anchor stands in front.
    first = start - sees_anchor
    filled = filled_length(stop - first, device.type)

    calls, slots = [], []
    for length in np.unique(filled):
        chosen = filled == length
        token_nL = first[chosen, None] + np.arange(length)
        token_nL[token_nL >= stop[chosen, None]] = FILLER
        copy_nL = np.zeros(token_nL.shape, dtype=bool)
        copy_nL[:, 0] = sees_anchor[chosen]
        token_nL[copy_nL] = row_start[chosen & sees_anchor]
        if order is not None:
            token_nL = np.where(token_nL == FILLER, FILLER, order[token_nL])
        calls.append((len(token_nL), int(length)))
        slots.append(Slots.of(token_nL.ravel(), copy_nL.ravel(), device=device))
    padding_N = (borders.document_BT == PADDING).flatten().cpu().numpy()
    return calls, Layout.of(tuple(slots), padding_N, device=device)


def filled_length(length: NDArray[np.int64], device_type: str) -> NDArray[np.int64]:
    """Tokens of each block with its filler: few different ones, at little cost in pairs.

    On the CPU a call costs as much as 10 % of a block of 64 tokens and 2 % of one of 128, so longer blocks are left as
    they are. Only from 768 queries on does torch's kernel work in tiles of 256 queries, which take half the time per
    pair of the tiles of 64 below: 767 tokens take twice as long as 768 (torch 2.13, AVX512, 8 heads on 4 of width 32).
    Elsewhere a tile is at least 64 tokens, filled or not, and launching costs more.
    """
    if device_type != "cpu":
        return length if len(np.unique(length)) == 1 else -(-length // 64) * 64
    filled = np.where(length < 128, -(-length // 4) * 4, length)
    return np.where((length >= WIDE_TILES_PAY) & (length < WIDE_TILES), WIDE_TILES, filled)


WIDE_TILES = 768
WIDE_TILES_PAY = 576
"""From here on filling up to `WIDE_TILES` queries is faster on the CPU."""


def _causal(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
    """Plain causal attention, with each key head shared by H / G query heads."""
    share = q_BHTD.shape[1] // k_BGTD.shape[1]
    if share == 1:
        return F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, is_causal=True)
    if _fused_takes_shared_heads(q_BHTD, k_BGTD, v_BGTD):
        return F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, is_causal=True, enable_gqa=True)
    k_BHTD, v_BHTD = (x.repeat_interleave(share, dim=1) for x in (k_BGTD, v_BGTD))
    return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)


def _fused_takes_shared_heads(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> bool:
    """Whether `enable_gqa` keeps a fused kernel, forward and backward.

    The CPU's does, and is then faster than on repeated key heads: 1.6 x at 16 tokens, 1.2 x at 128, as fast from 1024
    on, where it still saves their memory (torch 2.13, 8 heads on 4, forward and backward). On CUDA
    FlashAttention takes them too, while memory-efficient attention, the only fused one for float32, does not: without
    repeated heads SDPA would fall back to all T x T scores.
    """
    if q_BHTD.device.type == "cuda":
        params = torch.backends.cuda.SDPAParams(q_BHTD, k_BGTD, v_BGTD, None, 0.0, True, True)
        return torch.backends.cuda.can_use_flash_attention(params)
    return q_BHTD.device.type == "cpu"
