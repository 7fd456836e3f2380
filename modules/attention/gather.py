"""Tokens in the order in which a kernel wants them, with the anchor in front of each document that sees it.

    tokens   A a a b b -          documents a and b, one token of padding
    slots    A a a A b b .        one copy of A; `.` fills up a block and belongs to nobody
    index    0 1 2 0 3 4 0        the token in each slot

`gather` fills slots from tokens, `scatter` brings each token's own slot back. Their gradients are written by hand: a
gather by autograd adds token by token with atomics, in the low precision of its input and in no fixed order, where one
copy for tokens and one sum for anchors does.

Shape letters: N = B * T tokens of the batch, M slots, X heads, D width of a head.
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Slots:
    """Which token stands in which slot. Build with `Slots.of`; int64 tensors on the batch's device."""

    index_M: Tensor
    """The token in each slot; any token in filler."""
    own_N: Tensor
    """The slot of each token; any slot for tokens that have none."""
    absent: Tensor | None
    """Tokens without a slot: padding."""
    spare: Tensor | None
    """Slots that are copies of an anchor, or filler."""
    anchors: tuple[tuple[int, Tensor], ...]
    """Each copied token with all its slots, its own among them."""

    @classmethod
    def of(cls, token_M: NDArray[np.int64], copy_M: NDArray[np.bool_], *, tokens: int, device: torch.device) -> Slots:
        """From the token in each slot.

        Args:
            token_M: token number in 0 .. tokens - 1, or `FILLER`. A token has at most one slot that is no copy.
            copy_M: whether the slot is a copy of a token that has a slot of its own.
            tokens: N.
            device: of the tensors to come.
        """
        filler_M = token_M == FILLER
        own_slots = np.flatnonzero(~filler_M & ~copy_M)
        own_N = np.zeros(tokens, dtype=np.int64)
        own_N[token_M[own_slots]] = own_slots
        present = np.zeros(tokens, dtype=bool)
        present[token_M[own_slots]] = True
        assert present.sum() == len(own_slots), "a token has two slots of its own"

        def on_device(values: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(values).to(device, non_blocking=True)

        anchors = [
            (int(token), on_device(np.append(own_N[token], np.flatnonzero(copy_M & (token_M == token)))))
            for token in np.unique(token_M[copy_M & ~filler_M])
        ]
        absent, spare = np.flatnonzero(~present), np.flatnonzero(filler_M | copy_M)
        return cls(
            index_M=on_device(np.where(filler_M, 0, token_M)),
            own_N=on_device(own_N),
            absent=on_device(absent) if len(absent) else None,
            spare=on_device(spare) if len(spare) else None,
            anchors=tuple(anchors),
        )


def gather(x_NXD: Tensor, slots: Slots) -> Tensor:
    """Tokens to slots, [M, X, D]. What flows back into filler is dropped; an anchor gets the sum over its slots."""
    gathered: Tensor = _Gather.apply(slots, x_NXD)
    return gathered


def scatter(x_MXD: Tensor, slots: Slots) -> Tensor:
    """Each token's own slot, [N, X, D], and zeros for tokens without one. Copies and filler get no gradient."""
    scattered: Tensor = _Scatter.apply(slots, x_MXD)
    return scattered


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x[index], by the look-up of embeddings: on the CPU 5 times as fast as `index_select` on three dimensions."""
    return F.embedding(index, x.flatten(1)).unflatten(1, x.shape[1:])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slots: Slots, x_NXD: Tensor) -> Tensor:
        ctx.slots = slots
        return _take(x_NXD, slots.index_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MXD: Tensor) -> tuple[None, Tensor]:
        slots: Slots = ctx.slots
        grad_NXD = _take(grad_MXD, slots.own_N)
        if slots.absent is not None:
            grad_NXD.index_fill_(0, slots.absent, 0.0)
        for token, own_and_copies in slots.anchors:
            # One sum over all slots, so that it rounds once where gradients are bfloat16.
            grad_NXD[token] = grad_MXD.index_select(0, own_and_copies).sum(0)
        return None, grad_NXD


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slots: Slots, x_MXD: Tensor) -> Tensor:
        ctx.slots = slots
        x_NXD = _take(x_MXD, slots.own_N)
        return x_NXD if slots.absent is None else x_NXD.index_fill_(0, slots.absent, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NXD: Tensor) -> tuple[None, Tensor]:
        slots: Slots = ctx.slots
        grad_MXD = _take(grad_NXD, slots.index_M)
        return None, grad_MXD if slots.spare is None else grad_MXD.index_fill_(0, slots.spare, 0.0)
