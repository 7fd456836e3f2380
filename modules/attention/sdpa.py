"""One causal `scaled_dot_product_attention` per segment: the cost of the visible pairs, on any device torch knows.

    anchor, one row     A a a | b b | - -
    blocks              [A a a]  [A b b]     the anchor's query stands in front of b too, since `is_causal` aligns
                                             top left where there are more keys than queries
    joined               A a a      b b  0 0     its second output is left out, and padding gets zeros

Shape letters: B rows, T tokens in a row, N = B * T tokens of the batch, n tokens of one block, H query heads, G key and
value heads, X either of the two, D head width.
"""

from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from modules.attention.borders import Borders, Segment
from modules.attention.capabilities import Request
from modules.attention.strategies import Strategy

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
    segments = borders.segments(strategy)
    if all(segment.padding for segment in segments):
        return q_BHTD.masked_fill(torch.ones_like(q_BHTD, dtype=torch.bool), 0.0)
    if len(segments) == rows and not any(segment.padding for segment in segments):
        return _causal(q_BHTD, k_BGTD, v_BGTD)

    # Tokens before heads is how projections and SDPA itself lay memory out: `flatten` is a view, pieces are contiguous.
    end_to_end = (x.transpose(1, 2).flatten(0, 1)[None] for x in (q_BHTD, k_BGTD, v_BGTD))
    blocks = _Cut.apply(segments, tokens, *end_to_end)
    count = len(blocks) // 3
    outputs = [_causal(*blocks[i::count]) for i in range(count)]
    return _Join.apply(segments, *outputs)[0].unflatten(0, (rows, tokens)).transpose(1, 2)


class _Cut(torch.autograd.Function):
    """q, k and v end to end, each [1, N, X, D], to blocks [1, X, n, D]: all of q's, then k's, then v's.

    There is one block for each segment that is no padding. Cutting and joining have gradients of their own that copy
    each tensor once, by one concatenation. Autograd's would take a dozen nodes per segment, and with slices a gradient
    of the full size for each of them.
    """

    @staticmethod
    def forward(ctx: Any, segments: tuple[Segment, ...], tokens: int, *q_k_v: Tensor) -> tuple[Tensor, ...]:
        ctx.segments, ctx.tokens = segments, tokens
        rows = {segment.row for segment in segments if segment.sees_anchor}
        blocks: tuple[Tensor, ...] = ()
        for x_1NXD in q_k_v:
            blocks += _to_blocks(x_1NXD, segments, {row: x_1NXD.narrow(1, row * tokens, 1) for row in rows})
        return blocks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count = len(grads) // 3
        joined = []
        for i in range(0, len(grads), count):
            grad_1NXD, grad_of_copies = _from_blocks(grads[i : i + count], ctx.segments)
            for row, copies in grad_of_copies.items():
                grad_1NXD[:, row * ctx.tokens] += torch.cat(copies, dim=1).sum(1)
            joined.append(grad_1NXD)
        return None, None, *joined


class _Join(torch.autograd.Function):
    """The way back: outputs of the blocks, [1, H, n, D], to tokens end to end, [1, N, H, D]."""

    @staticmethod
    def forward(ctx: Any, segments: tuple[Segment, ...], *blocks: Tensor) -> Tensor:
        ctx.segments = segments
        return _from_blocks(blocks, segments)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_1NHD: Tensor) -> tuple[Tensor | None, ...]:
        nothing = torch.zeros_like(grad_1NHD[:, :1])
        anchors = {segment.row: nothing for segment in ctx.segments}
        return None, *_to_blocks(grad_1NHD, ctx.segments, anchors)


def _to_blocks(x_1NXD: Tensor, segments: tuple[Segment, ...], anchors: dict[int, Tensor]) -> tuple[Tensor, ...]:
    """Cut into blocks, with the row's anchor in front where the segment sees it. Copies only if some segment does."""
    lengths = [segment.stop - segment.start for segment in segments]
    if not any(segment.sees_anchor for segment in segments):
        pieces = x_1NXD.transpose(1, 2).split(lengths, dim=2)
        return tuple(piece for piece, segment in zip(pieces, segments, strict=True) if not segment.padding)
    parts: list[Tensor] = []
    block_lengths: list[int] = []
    for piece, segment, length in zip(x_1NXD.split(lengths, dim=1), segments, lengths, strict=True):
        if segment.padding:
            continue
        if segment.sees_anchor:
            parts.append(anchors[segment.row])
        parts.append(piece)
        block_lengths.append(length + segment.sees_anchor)
    return torch.cat(parts, dim=1).transpose(1, 2).split(block_lengths, dim=2)


def _from_blocks(blocks: tuple[Tensor, ...], segments: tuple[Segment, ...]) -> tuple[Tensor, dict[int, list[Tensor]]]:
    """Join the segments' own tokens and zeros for padding; apart from them, each row's copies of its anchor."""
    parts: list[Tensor] = []
    copies: dict[int, list[Tensor]] = defaultdict(list)
    remaining = iter(blocks)
    for segment in segments:
        length = segment.stop - segment.start
        if segment.padding:
            parts.append(blocks[0].new_zeros(1, length, blocks[0].shape[1], blocks[0].shape[3]))
            continue
        part = next(remaining).transpose(1, 2)
        if segment.sees_anchor:
            copy, part = part.split([1, length], dim=1)
            copies[segment.row].append(copy)
        parts.append(part)
    return torch.cat(parts, dim=1), copies


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
