"""Losses over many batches and ranks, and where in its document a target stands.

States are sums in float64, reduced by addition, so batches of any size and ranks with any number of targets give what
one pass over everything would.

Shape letters: B rows, T tokens in a row, K buckets.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric

from modules.batch import SHARED_ANCHOR
from modules.documents import offset_in_document

BUCKETS = 40
"""Log2 buckets of LossByPosition: more than any document is long."""


class _Sums(Metric):
    """States that keep their dtype when the module that holds them is cast to a lower one."""

    full_state_update = False

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        def move(x: Tensor) -> Tensor:
            return x.to(fn(x).device)

        return super()._apply(move, exclude_state)


class TokenLoss(_Sums):
    """Mean loss over targets; NaN before the first."""

    sum: Tensor
    count: Tensor

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.add_state("sum", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, loss: Tensor) -> None:
        """Adds losses: any shape, one element per target, none is fine."""
        self.sum += loss.sum(dtype=torch.float64)
        self.count += loss.numel()

    def compute(self) -> Tensor:
        return self.sum / self.count


class LossByPosition(_Sums):
    """Mean loss by offset of the target in its document, in buckets named for their last offset.

    bucket    0   1   3     7          15
    offsets   0   1   2-3   4-7        8-15   ...
    """

    sum_K: Tensor
    count_K: Tensor

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.add_state("sum_K", torch.zeros(BUCKETS, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count_K", torch.zeros(BUCKETS, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, loss: Tensor, offset: Tensor) -> None:
        """Adds losses.

        Args:
            loss: any shape, one element per target.
            offset: int64, same shape: of the target in its document, as by `target_offset`; negative: left out.
        """
        loss, offset = loss[offset >= 0], offset[offset >= 0]
        bucket = torch.bucketize(offset, _last_offsets().to(offset.device))
        self.sum_K.index_add_(0, bucket, loss.double())
        self.count_K.index_add_(0, bucket, torch.ones_like(bucket))

    def compute(self) -> dict[int, float]:
        """Mean loss of every bucket that holds a target, by the bucket's last offset, in rising order."""
        count_K = self.count_K.tolist()
        mean_K = (self.sum_K / self.count_K).tolist()
        return {last: mean_K[k] for k, last in enumerate(_last_offsets().tolist()) if count_K[k]}


def target_offset(document_BT: Tensor, anchor_copy_BT: Tensor | None) -> Tensor:
    """Where in its document the token stands that each position has to predict, counted from 0; int64 [B, T].

        tokens     A  a  b  c  A  d  e  f         A the anchor token, two documents with their own copies
        document   1  1  1  1  2  2  2  2
        offset     0  1  2 -1  0  1  2 -1         a and d are first tokens: the copies do not count

    -1 where the next token is not of the same document, on the shared anchor and on padding.

    Args:
        document_BT, anchor_copy_BT: as in `PackedBatch`.
    """
    counted_BT = document_BT if anchor_copy_BT is None else document_BT.masked_fill(anchor_copy_BT, SHARED_ANCHOR)
    offset_BT = offset_in_document(counted_BT)
    goes_on_BT = (document_BT[:, 1:] == document_BT[:, :-1]) & (document_BT[:, 1:] > SHARED_ANCHOR)
    return F.pad(torch.where(goes_on_BT, offset_BT[:, 1:], -1), (0, 1), value=-1)


def _last_offsets() -> Tensor:
    return 2 ** torch.arange(BUCKETS) - 1
