"""Where documents begin and end: made once per batch, shared by all layers.

Shape letters: B rows, T tokens in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modules.attention.cu_seqlens import check_cu_seqlens
from modules.attention.strategies import Strategy, visible_pairs
from modules.batch import PADDING, SHARED_ANCHOR

Made = TypeVar("Made")


class Segment(NamedTuple):
    """Places `start .. stop - 1` of one row that attend causally among themselves, or padding, which does not.

    A place is the token's index in its row, unless `Borders.order` says which token stands there.
    """

    row: int
    start: int
    stop: int
    sees_anchor: bool
    """Whether they also see the row's first token, which then is the shared anchor and no part of the segment."""
    padding: bool


class Run(NamedTuple):
    """The places of one row's document, or of its shared anchor or padding; see `Borders.gathered`."""

    row: int
    start: int
    stop: int
    document: int


# Not frozen: torch.compile (2.11) looks into frozen dataclasses and compiles anew for every number of documents.
@dataclass(kw_only=True, eq=False)
class Borders:
    """The documents of one batch, known on the host. Build with `Borders.of`.

    document_BT  0 1 1 1 2 2 -1 -1     one row, B * T = 8
    runs         0 | 1 1 1 | 2 2 | -1 -1
    cu_seqlens   0   1       4     6      8

    A document may stand in several pieces, as interleaved chunks do. Then the borders are those of its gathered tokens,
    which attend causally in the order of the row:

    document_BT  0 1 1 2 2 1 -1 -1
    gathered     0 1 2 5 3 4  6  7     the token at each place
    runs         0 | 1 1 1 | 2 2 | -1 -1
    """

    document_BT: Tensor
    """Integer, on the batch's device: 0 the shared anchor, 1, 2, ... documents, -1 padding."""
    runs: tuple[Run, ...]
    """Every place of the batch once and in order; a run is never empty and never crosses rows."""
    gathered: NDArray[np.int64] | None
    """int64 [B * T]: the token at each place, where documents in several pieces are gathered. None: every document
    stands in one piece, and places are tokens."""
    _derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, document_BT: Tensor) -> Borders:
        """Read the borders off the document numbers. Waits for the device once.

        Raises:
            ValueError: not a [B, T] tensor of integers; a number below -1; the shared anchor (0) other than as one
                token at the start of a row; padding (-1) before a row's end.
        """
        if document_BT.ndim != 2 or document_BT.numel() == 0 or document_BT.dtype.is_floating_point:
            raise ValueError(
                f"document_BT has shape {tuple(document_BT.shape)} and dtype {document_BT.dtype}. "
                "It must hold one integer document number per token, in a non-empty shape [rows, tokens]."
            )
        document = document_BT.detach().cpu().numpy()
        runs = tuple(_runs(document))
        _check(runs, tokens=document.shape[1])
        if len({(run.row, run.document) for run in runs}) == len(runs):
            return cls(document_BT=document_BT, runs=runs, gathered=None)
        gathered = _gathered(document)
        runs = tuple(_runs(document.reshape(-1)[gathered].reshape(document.shape)))
        return cls(document_BT=document_BT, runs=runs, gathered=gathered)

    @classmethod
    def of_cu_seqlens(cls, cu_seqlens: Tensor, *, rows: int, tokens: int) -> Borders:
        """Borders as flash-attn users have them: cumulative lengths of documents that lie end to end in all rows.

            cu_seqlens 0 3 5 10, rows=2, tokens=5  ->  document_BT 1 1 1 2 2
                                                                   1 1 1 1 1

        Args:
            cu_seqlens: integer [documents + 1], on the batch's device: 0, where each document ends, rows * tokens last.
            rows: B.
            tokens: T.
        Raises:
            ValueError: cu_seqlens do not start at 0, rise strictly and end at rows * tokens, or a document crosses the
                end of a row.
        """
        bounds = cu_seqlens.detach().cpu().numpy()
        check_cu_seqlens(bounds, tokens=rows * tokens)
        crossing = np.flatnonzero(bounds[:-1] // tokens != (bounds[1:] - 1) // tokens)
        if len(crossing):
            start, stop = bounds[crossing[0]], bounds[crossing[0] + 1]
            raise ValueError(
                f"cu_seqlens: the document of tokens {start} to {stop - 1} crosses the end of a row of {tokens} "
                "tokens. A row is one window: cut the document there."
            )
        number = np.repeat(np.arange(1, len(bounds)), np.diff(bounds)).reshape(rows, tokens)
        number -= number[:, :1] - 1
        return cls.of(torch.from_numpy(number.astype(np.int32)).to(cu_seqlens.device))

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int32 [runs + 1]: where each run starts in the batch laid out as B * T places, then B * T."""
        tokens = self.document_BT.shape[1]
        starts = [run.row * tokens + run.start for run in self.runs]
        return torch.tensor([*starts, self.document_BT.numel()], dtype=torch.int32, device=self.document_BT.device)

    @cached_property
    def max_seqlen(self) -> int:
        """Tokens of the longest run."""
        return max(run.stop - run.start for run in self.runs)

    def order(self, strategy: Strategy) -> NDArray[np.int64] | None:
        """int64 [B * T]: the token at each place that the strategy's segments count, or None where places are tokens.

        One that looks over the whole row takes it as it stands, whatever its documents do.
        """
        return self.gathered if strategy.scope == "document" else None

    def segments(self, strategy: Strategy) -> tuple[Segment, ...]:
        """The strategy as causal segments that cover every place of the batch once and in order.

            anchor   A a a | b b | - -     A stands in the first segment and is seen from the second one
            full     A a a b b | - -       - is padding

        A window or a sink is not expressed here: they narrow each segment, and a kernel that cannot says so.
        """
        # Only these two fields of a strategy decide, so all strategies that agree in them share the result.
        key = ("segments", strategy.scope, strategy.anchor)
        return self.derived(key, lambda: tuple(self._merged(strategy)))

    def derived(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What a kernel makes of the borders once per batch, for all layers.

        `key` begins with the kernel's name and holds everything else that the result depends on.
        """
        if key not in self._derived:
            self._derived[key] = make()
        made: Made = self._derived[key]
        return made

    def visible_pairs(self, strategy: Strategy) -> int:
        """(query, key) pairs that the strategy lets see each other, in the whole batch."""
        documents = [run for run in self.runs if run.document > SHARED_ANCHOR]
        lengths = np.array([run.stop - run.start for run in documents], dtype=np.int64)
        rows = np.array([run.row for run in documents], dtype=np.int64)
        anchored = {run.row for run in self.runs if run.document == SHARED_ANCHOR}
        total = 0
        for anchor_tokens, group in ((1, anchored), (0, set(range(self.document_BT.shape[0])) - anchored)):
            if group:
                inside = np.isin(rows, list(group))
                _, row = np.unique(rows[inside], return_inverse=True)
                total += int(visible_pairs(strategy, lengths[inside], row, anchor_tokens, len(group)).sum())
        return total

    def _merged(self, strategy: Strategy) -> Iterator[Segment]:
        """Join neighbouring runs that attend causally as one."""
        joined: Segment | None = None
        has_anchor = False
        for run in self.runs:
            padding = run.document == PADDING
            if run.start == 0:
                has_anchor = strategy.anchor and run.document == SHARED_ANCHOR
            # Under a shared anchor the first document and the anchor before it are one causal segment.
            together = strategy.scope == "row" or (has_anchor and joined is not None and joined.stop == 1)
            if joined is not None and joined.row == run.row and together and not padding:
                joined = joined._replace(stop=run.stop)
                continue
            if joined is not None:
                yield joined
            sees_anchor = has_anchor and run.start > 0 and not padding
            joined = Segment(run.row, run.start, run.stop, sees_anchor=sees_anchor, padding=padding)
        assert joined is not None, "a batch holds at least one token"
        yield joined


def _runs(document: NDArray[np.integer]) -> Iterator[Run]:
    """Split each row where the document number changes."""
    for row, numbers in enumerate(document):
        cuts = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(numbers)]
        for start, stop in pairwise(cuts):
            yield Run(row, start, stop, int(numbers[start]))


def _gathered(document: NDArray[np.integer]) -> NDArray[np.int64]:
    """The tokens of each row by document, documents in the order in which they begin."""
    rows, tokens = document.shape
    gathered = np.empty((rows, tokens), dtype=np.int64)
    for row, numbers in enumerate(document):
        _, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
        gathered[row] = row * tokens + np.argsort(first[inverse], kind="stable")
    return gathered.reshape(-1)


def _check(runs: tuple[Run, ...], *, tokens: int) -> None:
    """Hold the document numbers to what strategies and kernels rely on."""
    for run in runs:
        where = f"document_BT: row {run.row}, tokens {run.start} to {run.stop - 1}"
        if run.document < PADDING:
            raise ValueError(f"{where} have document number {run.document}. Only {PADDING} (padding) is negative.")
        if run.document == SHARED_ANCHOR and (run.start > 0 or run.stop > 1):
            raise ValueError(
                f"{where} have document number {SHARED_ANCHOR}, the shared anchor, which is one token at the start of "
                "a row. Number documents from 1."
            )
        if run.document == PADDING and run.stop < tokens:
            raise ValueError(f"{where} are padding ({PADDING}), which may stand only at the end of a row.")
