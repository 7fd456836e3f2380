"""How documents become rows, decided from their lengths alone.

    documents    [a a a a a] [b b]              anchor row_start, context_length 4: room for 3 beside the anchor

    concatenate  A a a a | A a a b | A b        cut at row ends; tail=drop leaves the third row out, pad fills it
    best_fit     A a a a | A a a - | A b b -    a is longer than a row: pieces of 3 first; b fits, so is never cut
    one_per_row  A a a a | A a a - | A b b -    as best_fit cuts, but no second document joins a row with room left

Nothing is copied: a plan says which piece of which document stands where, and rows are made when asked for. So a
sweep over context lengths plans again in seconds over one token store.
"""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from datamodules.best_fit import best_fit_decreasing, number_pieces

Anchor = Literal["row_start", "every_document", "none"]


@dataclass(frozen=True, kw_only=True)
class PackingReport:
    """Where every document and token went. Tokens are the documents' own; anchors and padding count apart.

    documents_in = documents_out + documents_dropped
    tokens_in    = tokens_out + tokens_truncated + tokens_dropped
    rows x context_length = tokens_out + anchors + padding

    A domain tag counts as its document's own tokens.
    """

    documents_in: int
    documents_out: int
    """Have a token in some row."""
    documents_split: int
    """Have tokens in more than one piece."""
    documents_truncated: int
    documents_dropped: int
    tokens_in: int
    tokens_out: int
    tokens_truncated: int
    tokens_dropped: int
    """By `long_documents` = drop or with the tail."""
    anchors: int
    padding: int
    padding_share: float
    """Of all places in all rows."""
    rows: int

    def as_dict(self) -> dict[str, int | float]:
        """Flat, for a run's log."""
        return asdict(self)


class RowPiece(NamedTuple):
    """Tokens [start, stop) of a document, as they stand in a row; `anchor`: with a copy of the anchor in front."""

    document: int
    start: int
    stop: int
    anchor: bool
    number: int
    """The document's in its row."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackPlan:
    """Pieces of documents, row after row and in each row from left to right.

    Row r holds the pieces row_first_piece[r] to row_first_piece[r + 1], after the shared anchor if there is one;
    the rest is padding.
    """

    context_length: int
    anchor: Anchor
    piece_document: np.ndarray
    """int64 [pieces], index into the lengths that were planned."""
    piece_start: np.ndarray
    """int64 [pieces], the piece's first token, counted from its document's first."""
    piece_length: np.ndarray
    """int64 [pieces], tokens of the document. 0 only where a row ends right after an anchor copy."""
    piece_anchor: np.ndarray
    """bool [pieces]: a copy of the anchor stands in front (where a document begins, anchor=every_document)."""
    piece_number: np.ndarray
    """int64 [pieces], the document number in its row, from 1. Pieces share one where chunks are interleaved."""
    piece_within: np.ndarray
    """int64 [pieces], places of the same row and number that come before; above 0 for interleaved chunks alone."""
    row_first_piece: np.ndarray
    """int64 [rows + 1]."""
    report: PackingReport

    @property
    def rows(self) -> int:
        return len(self.row_first_piece) - 1

    @cached_property
    def piece_row(self) -> np.ndarray:
        """int64 [pieces], the row of each piece."""
        return np.repeat(np.arange(self.rows), np.diff(self.row_first_piece))

    @cached_property
    def piece_width(self) -> np.ndarray:
        """int64 [pieces], places that each piece takes, its anchor copy included."""
        return self.piece_length + self.piece_anchor

    @cached_property
    def row_documents(self) -> tuple[np.ndarray, np.ndarray]:
        """(row, width), int64 both: each document of each row, all its pieces there together."""
        first_piece, last_piece = self.row_first_piece[:-1], self.row_first_piece[1:]
        numbers = np.maximum.reduceat(self.piece_number, first_piece)
        assert (last_piece > first_piece).all(), "a row holds at least one piece"
        before = np.cumsum(numbers) - numbers
        width = np.zeros(int(numbers.sum()), np.int64)
        np.add.at(width, before[self.piece_row] + self.piece_number - 1, self.piece_width)
        return np.repeat(np.arange(self.rows), numbers), width

    @cached_property
    def piece_offset(self) -> np.ndarray:
        """int64 [pieces], the piece's first place in its row, which is its anchor copy's if it has one."""
        ends = np.cumsum(self.piece_width)
        row_begin = np.concatenate([[0], ends])[self.row_first_piece[:-1]]
        return ends - self.piece_width - row_begin[self.piece_row] + (self.anchor == "row_start")

    def pieces(self, row: int) -> list[RowPiece]:
        """What stands in one row, for people to look at."""
        span = slice(self.row_first_piece[row], self.row_first_piece[row + 1])
        stop = self.piece_start + self.piece_length
        columns = (self.piece_document, self.piece_start, stop, self.piece_anchor, self.piece_number)
        return [RowPiece(*values) for values in zip(*(column[span].tolist() for column in columns), strict=True)]


class _Pieces(NamedTuple):
    """Columns of a plan before rows are counted; sorted by row."""

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    anchor: np.ndarray
    row: np.ndarray


def plan_rows(
    lengths: np.ndarray,
    *,
    context_length: int,
    anchor: Anchor,
    packing: Literal["concatenate", "best_fit", "one_per_row"],
    long_documents: Literal["split", "truncate", "drop"],
    tail: Literal["drop", "pad"],
) -> PackPlan:
    """Lays documents into rows, in the order given.

    A long document is one that does not fit a row of its own beside its anchor. `concatenate` splits at row ends
    (short documents too). `best_fit` splits long documents into pieces that fill a row beside an anchor,
    context_length - 1 tokens for `row_start` and `every_document` alike, so that both have the same cuts and
    targets; then takes pieces by falling length, each into the fullest row that still has room. `one_per_row` cuts the
    same pieces and gives each a row of its own. Rows of both end in padding where they are not full, so `tail` concerns
    `concatenate` alone.

        length 20, context_length 8, row_start, split          payloads 7 7 6
        length 10, context_length 4, none, tail=pad            split: 4 4 2; truncate: 4, and 6 reported lost

        lengths 3 2, context_length 4, concatenate, tail=pad        (A anchor, - padding)
            row_start        A a a a | A b b -
            every_document   A a a a | A b b -
            none             a a a b | b - - -

    Args:
        lengths: int64 [documents], each >= 1.
    Raises:
        ValueError: no row is left, or no document.
    """
    lengths = np.asarray(lengths, np.int64)
    assert lengths.ndim == 1 and lengths.size and lengths.min() > 0, "the token store leaves empty documents out"
    longest = context_length - (anchor != "none")
    room = context_length - (anchor == "row_start")
    copies = anchor == "every_document"

    documents = np.arange(lengths.size)
    kept = lengths
    if long_documents == "drop":
        documents = np.flatnonzero(lengths <= longest)
        kept = lengths[documents]
        if not documents.size:
            raise ValueError(
                f"data.long_documents='drop' leaves no document: the shortest of {lengths.size} has {lengths.min()} "
                f"tokens and a row of data.context_length={context_length} holds {longest}. "
                "Set data.long_documents='split', or a longer data.context_length."
            )
    elif long_documents == "truncate":
        kept = np.minimum(lengths, longest)

    if packing == "concatenate":
        pieces = _cut_at_row_ends(kept, room, copies)
        filled = int(pieces.length.sum() + pieces.anchor.sum())
        if tail == "drop" and filled % room:
            if filled < room:
                raise ValueError(
                    f"data.tail='drop' leaves no row: {documents.size} documents fill {filled} of the {room} places of "
                    f"a row of data.context_length={context_length}. Set data.tail='pad', a shorter "
                    "data.context_length, or a larger corpus."
                )
            whole = pieces.row < filled // room
            pieces = _Pieces(*(column[whole] for column in pieces))
    else:
        pieces = _whole_where_they_fit(kept, longest, copies)
        if packing == "best_fit":
            row = best_fit_decreasing(pieces.length + pieces.anchor, room)
            order = np.argsort(
                row, kind="stable"
            )  # in a row the order of the documents, or long ones would always lead
            pieces = _Pieces(*(column[order] for column in pieces._replace(row=row)))

    pieces = pieces._replace(document=documents[pieces.document])
    rows = int(pieces.row[-1]) + 1
    row_first_piece = np.searchsorted(pieces.row, np.arange(rows + 1))
    return PackPlan(
        context_length=context_length,
        anchor=anchor,
        piece_document=pieces.document,
        piece_start=pieces.start,
        piece_length=pieces.length,
        piece_anchor=pieces.anchor,
        piece_number=np.arange(1, pieces.row.size + 1) - row_first_piece[pieces.row],
        piece_within=np.zeros(pieces.row.size, np.int64),
        row_first_piece=row_first_piece,
        report=_report(lengths, kept, pieces, rows, context_length, shared_anchors=rows * (anchor == "row_start")),
    )


def _cut_at_row_ends(lengths: np.ndarray, room: int, copies: bool) -> _Pieces:
    """Documents end to end, anchor copies among them, cut every `room` places."""
    ends = np.cumsum(lengths + copies)
    starts = ends - lengths - copies
    first_row = starts // room
    count = (ends - 1) // room - first_row + 1
    document, number = number_pieces(count)
    row = first_row[document] + number
    begin = np.maximum(starts[document], row * room)
    end = np.minimum(ends[document], (row + 1) * room)
    anchor = (number == 0) & copies
    start = begin - starts[document] - ((number > 0) & copies)
    return _Pieces(document, start, end - begin - anchor, anchor, row)


def _whole_where_they_fit(lengths: np.ndarray, longest: int, copies: bool) -> _Pieces:
    """Long documents in pieces of `longest` tokens; each piece in a row of its own."""
    document, number = number_pieces(-(-lengths // longest))
    start = number * longest
    length = np.minimum(lengths[document] - start, longest)
    anchor = (number == 0) & copies
    return _Pieces(document, start, length, anchor, np.arange(document.size))


def _report(
    lengths: np.ndarray, kept: np.ndarray, pieces: _Pieces, rows: int, context_length: int, shared_anchors: int
) -> PackingReport:
    with_tokens = np.bincount(pieces.document[pieces.length > 0], minlength=lengths.size)
    truncated = int(lengths.sum() - kept.sum()) if kept.size == lengths.size else 0
    tokens_in, tokens_out = int(lengths.sum()), int(pieces.length.sum())
    anchors = shared_anchors + int(pieces.anchor.sum())
    padding = rows * context_length - tokens_out - anchors
    return PackingReport(
        documents_in=lengths.size,
        documents_out=int(np.count_nonzero(with_tokens)),
        documents_split=int(np.count_nonzero(with_tokens > 1)),
        documents_truncated=int(np.count_nonzero(kept < lengths)) if truncated else 0,
        documents_dropped=int(np.count_nonzero(with_tokens == 0)),
        tokens_in=tokens_in,
        tokens_out=tokens_out,
        tokens_truncated=truncated,
        tokens_dropped=tokens_in - tokens_out - truncated,
        anchors=anchors,
        padding=padding,
        padding_share=padding / (rows * context_length),
        rows=rows,
    )
