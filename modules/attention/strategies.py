"""Attention strategies: the rule that says which keys each query may see.

Everything that decides a *result* stands here: one entry of `STRATEGIES` per strategy, from which the visible rule
(dense and FlexAttention kernels), the segments (`Borders.segments`, for kernels that run document by document) and
the count of visible pairs derive. No kernel knows a strategy by name. This file imports without torch, so that a
plan can be checked and counted before anything heavy is loaded.

Shape letters: B rows, T tokens in a row, N documents.
Source: AnchorAttention, arXiv 2411.13476v2, section 4; windows and sinks, arXiv 2309.17453.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Scope = Literal["row", "document"]
Positions = Literal["continuous", "reset"]
Anchor = Literal["row_start", "every_document", "none"]

VisibleRule = Callable[["Tensor", "Tensor", "Tensor", "Tensor"], "Tensor"]
"""(row, head, query index, key index), integer tensors that broadcast -> bool. Usable as a FlexAttention `mask_mod`."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """What a query may see. Always causal, never padding.

                 full          document scope    with anchor        window=2         window=2, sink=1
        key      A a a b b     A a a b b         A a a b b          a a a a a        a a a a a
        query A  x             x                 x                  x                x
              a  x x             x               x x                x x              x x
              a  x x x           x x             x x x                x x            x x x
              b  x x x x             x           x     x                x x          x   x x
              b  x x x x x           x x         x     x x                x x        x     x x

    Raises:
        ValueError: the fields contradict each other.
    """

    name: str
    scope: Scope
    """How far a query looks back: over the whole row, or to the start of its own document."""
    anchor: bool = False
    """Whether every document also sees document 0, the row's shared anchor. Only with scope `document`."""
    window: int | None = None
    """The latest keys of its scope that a query sees, itself included. None = all of them."""
    sink: int = 0
    """The first tokens of its scope that a query sees besides its window."""
    default_positions: Positions
    default_anchor: Anchor

    def __post_init__(self) -> None:
        if self.anchor and self.scope == "row":
            raise ValueError(
                f"strategy {self.name!r}: anchor=True with scope='row' says nothing, since a query that looks over the "
                "whole row sees its first token anyway. Set scope='document', or sink=1 to keep it beside a window."
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"strategy {self.name!r}: window={self.window} must be at least 1, the query itself.")
        if self.sink < 0 or (self.sink and self.window is None):
            raise ValueError(f"strategy {self.name!r}: sink={self.sink} needs a window and must not be negative.")

    @property
    def visibility(self) -> tuple[Scope, bool, int | None, int]:
        """The fields that decide which pairs are visible. Two strategies equal here differ in their defaults alone."""
        return (self.scope, self.anchor, self.window, self.sink)

    @property
    def kind(self) -> tuple[Scope, bool, bool, bool]:
        """`visibility` up to the size of window and sink, which are settings."""
        return (self.scope, self.anchor, self.window is not None, self.sink > 0)


STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy(name="full", scope="row", default_positions="continuous", default_anchor="every_document"),
        Strategy(
            name="intra_document", scope="document", default_positions="continuous", default_anchor="every_document"
        ),
        Strategy(
            name="intra_document_reset", scope="document", default_positions="reset", default_anchor="every_document"
        ),
        Strategy(
            name="anchor", scope="document", anchor=True, default_positions="continuous", default_anchor="row_start"
        ),
        Strategy(
            name="sliding_window",
            scope="document",
            window=1024,
            default_positions="continuous",
            default_anchor="every_document",
        ),
        # StreamingLLM, arXiv 2309.17453: what stays visible beside the window is the shared anchor, where the row has
        # one, and the first tokens of the document.
        Strategy(
            name="sink_window",
            scope="document",
            anchor=True,
            window=1024,
            sink=4,
            default_positions="continuous",
            default_anchor="row_start",
        ),
    )
}
"""The whole registry: a new strategy is one entry here and one row in the tests."""


def visible_rule(strategy: Strategy, document_BT: Tensor) -> VisibleRule:
    """The strategy as a predicate over index tensors.

    Args:
        strategy: what a query may see.
        document_BT: 0 the shared anchor, 1, 2, ... documents, -1 padding. A document may stand in several pieces.
    Returns:
        A function of (row, head, query, key) made of plain tensor operations. It is evaluated wherever the kernel
        likes: on broadcast index grids (reference) or under vmap (FlexAttention).
    """
    # These import torch, which the rest of this file does without.
    from modules.batch import PADDING, SHARED_ANCHOR
    from modules.documents import offset_in_document

    # Window and sink count the tokens of the scope: what stands between two pieces of a document is not of it.
    counted_BT = (
        offset_in_document(document_BT) if strategy.window is not None and strategy.scope == "document" else None
    )

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        query_document, key_document = document_BT[b, q], document_BT[b, k]
        inside = (query_document != PADDING) & (key_document != PADDING)
        if strategy.scope == "document":
            inside = inside & (query_document == key_document)
        if strategy.window is not None:
            query_at, key_at = (q, k) if counted_BT is None else (counted_BT[b, q], counted_BT[b, k])
            near = query_at - key_at < strategy.window
            if strategy.sink:
                near = near | (key_at < strategy.sink)
            inside = inside & near
        if strategy.anchor:
            inside = inside | ((key_document == SHARED_ANCHOR) & (query_document != PADDING))
        return inside & (k <= q)

    return visible


def visible_pairs(
    strategy: Strategy,
    document_lengths: NDArray[np.int64],
    row: NDArray[np.int64],
    anchor_tokens: int,
    rows: int,
) -> NDArray[np.int64]:
    """How many (query, key) pairs are visible in each row, in closed form: linear in documents, never T x T.

        A a a a b b b b, anchor:  1 + (3*4/2 + 3) + (4*5/2 + 4) = 24;  full: 8*9/2 = 36

    Args:
        strategy: what a query may see.
        document_lengths: int64 [N], tokens that each document has in a row, all its pieces there and its own copy of
            an anchor included; >= 1.
        row: int64 [N], that row, in 0 .. rows - 1.
        anchor_tokens: 1 where every row starts with a shared anchor (`data.anchor: row_start`), otherwise 0.
        rows: number of rows; rows without any document are allowed.
    Returns:
        int64 [rows].
    """
    if strategy.scope == "row":
        row_lengths = np.full(rows, anchor_tokens, dtype=np.int64)
        np.add.at(row_lengths, row, document_lengths)
        return _pairs_in_scope(strategy, row_lengths)
    pairs = np.full(rows, anchor_tokens * (anchor_tokens + 1) // 2, dtype=np.int64)
    seen_of_anchor = anchor_tokens * document_lengths if strategy.anchor else 0
    np.add.at(pairs, row, _pairs_in_scope(strategy, document_lengths) + seen_of_anchor)
    return pairs


def _pairs_in_scope(strategy: Strategy, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Visible pairs of one uninterrupted scope of each length: the window's, and the sink's outside the window."""
    if strategy.window is None:
        return _pairs_in_window(lengths, None)
    beyond_window = np.maximum(lengths - strategy.window, 0)
    return _pairs_in_window(lengths, strategy.window) + _pairs_in_window(beyond_window, strategy.sink)


def _pairs_in_window(lengths: NDArray[np.int64], window: int | None) -> NDArray[np.int64]:
    """Sum over i = 1 .. length of min(i, window)."""
    if window is None:
        return lengths * (lengths + 1) // 2
    short = np.minimum(lengths, window)
    return short * (short + 1) // 2 + (lengths - short) * window


def check_data_choice(strategy: Strategy, anchor: str, positions: str) -> tuple[Anchor, Positions]:
    """Resolve `auto` to the strategy's own defaults and refuse pairs that are another strategy in disguise.

    Args:
        strategy: the run's strategy.
        anchor: `data.anchor`: auto, row_start, every_document or none.
        positions: `data.positions`: auto, continuous or reset.
    Returns:
        (anchor, positions), neither of them `auto`.
    Raises:
        ValueError: an unknown value, or a pair that computes what another strategy's name stands for.
    """
    anchor_choice: Anchor
    positions_choice: Positions
    match anchor:
        case "auto":
            anchor_choice = strategy.default_anchor
        case "row_start" | "every_document" | "none":
            anchor_choice = anchor
        case _:
            raise ValueError(f"data.anchor={anchor!r} is none of 'auto', 'row_start', 'every_document', 'none'.")
    match positions:
        case "auto":
            positions_choice = strategy.default_positions
        case "continuous" | "reset":
            positions_choice = positions
        case _:
            raise ValueError(f"data.positions={positions!r} is none of 'auto', 'continuous', 'reset'.")

    # The first tokens of a document are sinks whatever they are, so a strategy with sinks does without an anchor.
    # Without sinks a document's own anchor leaves the window like any other token.
    lost = anchor_choice == "none" or (anchor_choice == "every_document" and strategy.window is not None)
    if strategy.anchor and not strategy.sink and lost:
        twin = _named(replace(strategy, anchor=False), positions_choice)
        raise ValueError(
            f"data.anchor={anchor_choice!r} leaves attention.strategy={strategy.name!r} nothing to share: that is "
            f"{twin}. Set that strategy, or data.anchor='auto'."
        )
    if strategy.scope == "document" and not strategy.anchor and anchor_choice == "row_start":
        twin = _named(replace(strategy, anchor=True), positions_choice)
        raise ValueError(
            f"data.anchor='row_start' gives attention.strategy={strategy.name!r} an anchor that no document sees; "
            f"one that they do see is {twin}. Set that strategy, or data.anchor='auto' or 'none'."
        )
    if positions_choice != strategy.default_positions:
        for other in STRATEGIES.values():
            if other.kind == strategy.kind and other.default_positions == positions_choice:
                raise ValueError(
                    f"data.positions={positions_choice!r} with attention.strategy={strategy.name!r} is "
                    f"attention.strategy={other.name!r}. Set that strategy, or data.positions='auto'."
                )
    return anchor_choice, positions_choice


def _named(wanted: Strategy, positions: Positions) -> str:
    """The registered strategy that sees what `wanted` sees, in words: the one with these default positions if any."""
    # An anchor beside a window is registered with sinks, whose number is a setting.
    kinds = (wanted.kind, (*wanted.kind[:3], True)) if wanted.anchor else (wanted.kind,)
    twins = [strategy for strategy in STRATEGIES.values() if strategy.kind in kinds]
    twins.sort(key=lambda strategy: strategy.default_positions != positions)
    assert twins, f"no registered strategy sees what {wanted} sees"
    addition = "" if twins[0].default_positions == positions else f" with data.positions={positions!r}"
    addition += "" if bool(wanted.sink) == bool(twins[0].sink) else f" with attention.sink={wanted.sink}"
    return f"attention.strategy={twins[0].name!r}{addition}"
