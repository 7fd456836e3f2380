"""One causal `scaled_dot_product_attention` per document: the cost of the visible pairs, on any device torch knows.

The tokens of the batch are cut into *blocks*, attended to block by block, and joined again:

    anchor, one row    A a a | b b | - -
    blocks             [A a a]  [A b b]        the anchor's query stands in front of b too, because `is_causal`
                                               aligns top left when there are more keys than queries
    joined              A a a      b b  0 0    its second output is dropped

Shape letters: B rows, T tokens in a row, N = B * T tokens of the batch, S segments in a block, L tokens of a block's
segments, H query heads, G key and value heads, X any of the two, D head width.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from modules.attention.borders import Borders, Segment
from modules.attention.capabilities import Request
from modules.attention.strategies import Strategy

DEVICES = ("cpu", "cuda", "mps")

SHORT_TOKENS = 256
"""Up to this length the call, not the arithmetic, sets the cost, so segments share calls: see `Layout`."""

SHORT_STEP = 32
"""Short segments are filled up to a multiple of this, the CPU kernel's own block of queries."""


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
    if len(segments) == rows and not any(segment.padding for segment in segments):
        return _causal(q_BHTD, k_BGTD, v_BGTD)

    layout = Layout.of(segments, tokens=tokens)
    # Tokens before heads is how projections and SDPA itself lay memory out, so `flatten` is a view.
    blocks = [_Cut.apply(x.transpose(1, 2).flatten(0, 1), layout) for x in (q_BHTD, k_BGTD, v_BGTD)]
    outputs = [_causal(*block) for block in zip(*blocks, strict=True)]
    out_NHD = _Join.apply(layout, *outputs)
    return out_NHD.unflatten(0, (rows, tokens)).transpose(1, 2)


class Place(NamedTuple):
    """Where a segment's tokens stand among the blocks."""

    block: int
    slot: int
    """Index of the segment in its block."""
    offset: int
    """1 where the shared anchor stands in front of the segment, otherwise 0."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which segments are attended to in one call.

    A long segment is a block of its own. Short ones of about one length make a block together, filled up at their
    ends: a causal query never sees what follows it, so the filling changes nothing and is cut off afterwards.
    """

    segments: tuple[Segment, ...]
    tokens: int
    """Tokens in a row."""
    places: tuple[Place | None, ...]
    """One for each segment; None for padding, which attends to nothing."""
    blocks: tuple[tuple[int, tuple[int, ...]], ...]
    """(L, indices of the S segments) of each block."""

    @classmethod
    def of(cls, segments: tuple[Segment, ...], *, tokens: int) -> Layout:
        members: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, segment in enumerate(segments):
            if not segment.padding:
                length = segment.stop - segment.start + segment.sees_anchor
                short = length <= SHORT_TOKENS
                key = (-(-length // SHORT_STEP) * SHORT_STEP, -1) if short else (length, index)
                members[key].append(index)
        places: list[Place | None] = [None] * len(segments)
        for block, indices in enumerate(members.values()):
            for slot, index in enumerate(indices):
                places[index] = Place(block, slot, int(segments[index].sees_anchor))
        blocks = tuple((key[0], tuple(indices)) for key, indices in members.items())
        return cls(segments=segments, tokens=tokens, places=tuple(places), blocks=blocks)

    def to_blocks(self, x_NXD: Tensor, *, anchors: bool) -> tuple[Tensor, ...]:
        """Copy the tokens into blocks of shape [S, X, L, D], with the anchors or with zeros in their place."""
        lengths = [segment.stop - segment.start for segment in self.segments]
        pieces = x_NXD.split(lengths)
        zeros = x_NXD.new_zeros(SHORT_STEP, *x_NXD.shape[1:])
        parts: list[Tensor] = []
        for length, indices in self.blocks:
            for index in indices:
                segment = self.segments[index]
                if segment.sees_anchor:
                    first = segment.row * self.tokens
                    parts.append(x_NXD[first : first + 1] if anchors else zeros[:1])
                parts.append(pieces[index])
                filling = length - lengths[index] - segment.sees_anchor
                if filling:
                    parts.append(zeros[:filling])
        sizes = [length * len(indices) for length, indices in self.blocks]
        flat = torch.cat(parts).split(sizes)
        return tuple(
            x.unflatten(0, (-1, length)).transpose(1, 2) for x, (length, _) in zip(flat, self.blocks, strict=True)
        )

    def from_blocks(self, blocks: tuple[Tensor, ...]) -> Tensor:
        """The segments' own tokens in the order of the batch, zeros for padding: [N, X, D]."""
        parts: list[Tensor] = []
        for segment, place in zip(self.segments, self.places, strict=True):
            length = segment.stop - segment.start
            if place is None:
                parts.append(blocks[0].new_zeros(length, blocks[0].shape[1], blocks[0].shape[3]))
            else:
                piece = blocks[place.block][place.slot].transpose(0, 1)
                parts.append(piece[place.offset : place.offset + length])
        return torch.cat(parts)


class _Cut(torch.autograd.Function):
    """Tokens to blocks. Its own gradient, because autograd's would copy q, k and v once more, node by node."""

    @staticmethod
    def forward(ctx: Any, x_NXD: Tensor, layout: Layout) -> tuple[Tensor, ...]:
        ctx.layout = layout
        return layout.to_blocks(x_NXD, anchors=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        layout: Layout = ctx.layout
        grad_NXD = layout.from_blocks(grads)
        # Every copy of an anchor hands its gradient to the one token it was copied from.
        copies: dict[int, list[Tensor]] = defaultdict(list)
        for segment, place in zip(layout.segments, layout.places, strict=True):
            if place is not None and segment.sees_anchor:
                copies[segment.row * layout.tokens].append(grads[place.block][place.slot, :, 0])
        for first, of_copies in copies.items():
            grad_NXD[first] += torch.stack(of_copies).sum(0)
        return grad_NXD, None


class _Join(torch.autograd.Function):
    """Blocks to tokens, leaving out the anchors' copies and the filling."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, *blocks: Tensor) -> Tensor:
        ctx.layout = layout
        return layout.from_blocks(blocks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHD: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.layout.to_blocks(grad_NHD, anchors=False)


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

    The CPU's does, and is then up to 1.5 x faster than on repeated key heads (short segments most). On CUDA
    FlashAttention does, while memory-efficient attention, the only fused one for float32, does not: without repeated
    heads SDPA would fall back to all T x T scores.
    """
    if q_BHTD.device.type == "cuda":
        params = torch.backends.cuda.SDPAParams(q_BHTD, k_BGTD, v_BGTD, None, 0.0, True, True)
        return torch.backends.cuda.can_use_flash_attention(params)
    return q_BHTD.device.type == "cpu"
