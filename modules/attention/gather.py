"""Tokens in the order in which a kernel's calls want them, with the anchor in front of each document that sees it.

    tokens   A a a b b -          documents a and b, one token of padding
    slots    [A a a] [A b b .]    two calls; one copy of A; `.` fills up a block and belongs to nobody
    source    0 1 2   0 3 4 0     the token in each slot

`gather` fills the slots of every call from the tokens, `scatter` brings each token's own slot back. Where tokens stand
in a call as they stand in the row, the call is a view of them; elsewhere each is copied once. The gradients are written
by hand: autograd would add up one tensor of full size per call, and an anchor's copies one by one, in the low precision
of its input and, by atomics, in no fixed order.

Shape letters: N = B * T tokens of the batch, M slots of one call, X heads, D width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

FILLER = -1
"""In place of a token: a slot that belongs to nobody."""

Places = slice | Tensor
"""Where to read or write along the first dimension: a slice where that is enough, so that reading copies nothing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Slots:
    """Which token stands in which slot of one call. Build with `Slots.of`; int64 tensors on the batch's device."""

    source: Places
    """The token in each of the M slots; any token in filler."""
    own: Places
    """Slots that are a token's own: no copy of an anchor, no filler."""
    token: Places
    """The tokens in them, in the same order."""
    spare: Places | None
    """All other slots."""
    copies: tuple[tuple[int, Places], ...]
    """Each copied token and the slots of its copies."""

    @classmethod
    def of(cls, token_M: NDArray[np.int64], copy_M: NDArray[np.bool_], *, device: torch.device) -> Slots:
        """From the token in each slot.

        Args:
            token_M: token number, or `FILLER`. In all calls together a token has at most one slot that is no copy.
            copy_M: whether the slot is a copy of a token that has a slot of its own.
            device: of the tensors to come.
        """
        filler_M = token_M == FILLER
        own = np.flatnonzero(~filler_M & ~copy_M)
        spare = np.flatnonzero(filler_M | copy_M)
        copied = np.flatnonzero(copy_M)
        source_M = np.where(filler_M, 0, token_M)
        return cls(
            # Spare slots are overwritten on the way back, which a view must not be.
            source=_index(source_M, device) if len(spare) else _places(source_M, device),
            own=_places(own, device),
            token=_places(token_M[own], device),
            spare=_places(spare, device) if len(spare) else None,
            copies=tuple(
                (int(token), _places(copied[token_M[copied] == token], device)) for token in np.unique(token_M[copied])
            ),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """All calls of a batch."""

    calls: tuple[Slots, ...]
    absent: Places | None
    """Tokens without a slot: padding."""

    @classmethod
    def of(cls, calls: tuple[Slots, ...], padding_N: NDArray[np.bool_], *, device: torch.device) -> Layout:
        """Args: the calls; which tokens of the batch are padding, and so in none of them; the batch's device."""
        absent = np.flatnonzero(padding_N)
        return cls(calls=calls, absent=_places(absent, device) if len(absent) else None)


def gather(x_NXD: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    """Tokens to the slots of each call, [M, X, D]. Filler holds any token and drops what flows back into it."""
    gathered: tuple[Tensor, ...] = _Gather.apply(layout, x_NXD)
    return gathered


def scatter(calls_MXD: list[Tensor], layout: Layout, *, tokens: int) -> Tensor:
    """Each token's own slot, [N, X, D], and zeros for tokens without one. Copies and filler get no gradient."""
    if len(calls_MXD) == 1 and isinstance(layout.calls[0].source, slice) and layout.absent is None:
        return calls_MXD[0]  # every token, in order
    scattered: Tensor = _Scatter.apply(layout, tokens, *calls_MXD)
    return scattered


def nothing(q_BHTD: Tensor) -> Tensor:
    """The output where all is padding: zeros, which pass no gradient on."""
    return q_BHTD.masked_fill(torch.ones_like(q_BHTD, dtype=torch.bool), 0.0)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: Layout, x_NXD: Tensor) -> tuple[Tensor, ...]:
        ctx.layout, ctx.tokens = layout, len(x_NXD)
        return tuple(_read(x_NXD, slots.source) for slots in layout.calls)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_MXD: Tensor) -> tuple[None, Tensor]:
        layout: Layout = ctx.layout
        grad_NXD = _own_slots(grads_MXD, layout, ctx.tokens)
        of_copies: dict[int, list[Tensor]] = {}
        for grad_MXD, slots in zip(grads_MXD, layout.calls, strict=True):
            for token, copies in slots.copies:
                of_copies.setdefault(token, [grad_NXD[token : token + 1]]).append(_read(grad_MXD, copies))
        for token, parts in of_copies.items():
            # One sum over the anchor's own slot and all copies, so that it rounds once where gradients are bfloat16.
            grad_NXD[token] = torch.cat(parts).sum(0)
        return None, grad_NXD


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: Layout, tokens: int, *calls_MXD: Tensor) -> Tensor:
        ctx.layout = layout
        return _own_slots(calls_MXD, layout, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NXD: Tensor) -> tuple[Tensor | None, ...]:
        grads = []
        for slots in ctx.layout.calls:
            grad_MXD = _read(grad_NXD, slots.source)
            if slots.spare is not None:
                _write(grad_MXD, slots.spare, 0.0)
            grads.append(grad_MXD)
        return None, None, *grads


def _own_slots(calls_MXD: tuple[Tensor, ...], layout: Layout, tokens: int) -> Tensor:
    x_NXD = calls_MXD[0].new_empty(tokens, *calls_MXD[0].shape[1:])
    for x_MXD, slots in zip(calls_MXD, layout.calls, strict=True):
        _write(x_NXD, slots.token, _read(x_MXD, slots.own))
    if layout.absent is not None:
        _write(x_NXD, layout.absent, 0.0)
    return x_NXD


def _places(index: NDArray[np.int64], device: torch.device) -> Places:
    """A slice where the places follow one another."""
    if len(index) and (np.diff(index) == 1).all():
        return slice(int(index[0]), int(index[-1]) + 1)
    return _index(index, device)


def _index(index: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(index).to(device, non_blocking=True)


def _read(x: Tensor, places: Places) -> Tensor:
    if isinstance(places, slice):
        return x[places]
    # The look-up of embeddings is 5 times as fast on the CPU as `index_select` on three dimensions.
    return F.embedding(places, x.flatten(1)).unflatten(1, x.shape[1:])


def _write(x: Tensor, places: Places, value: Tensor | float) -> None:
    if isinstance(places, slice):
        x[places] = value
    elif isinstance(value, Tensor):
        x.index_copy_(0, places, value)
    else:
        x.index_fill_(0, places, value)
