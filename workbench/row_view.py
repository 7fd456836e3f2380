"""`workbench show CONFIG --rows N`: the first training rows as the model gets them, token by token at their borders.

Everything about tokens is read off the batch itself; the plan only says which document a piece is of.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from datamodules.corpus import Corpus
from datamodules.loader import TrainingOrder
from datamodules.packed_text import PackedTextDataModule
from datamodules.tokenizers import Tokenizer
from modules.batch import NO_TARGET, PADDING, SHARED_ANCHOR

HEAD, TAIL = 6, 4
"""Tokens of each piece that are shown one by one; what is between them as text alone."""
_TEXT = 60


@dataclass(frozen=True, kw_only=True)
class PieceView:
    """What stands in a row under one document number; the shared anchor and padding are such too."""

    number: int
    """In the row: 0 the shared anchor, 1, 2, ... documents, -1 padding."""
    place: int
    """The first one in the row."""
    tokens: list[int]
    labels: list[int]
    """The token to predict, or -100 for none."""
    positions: list[int]
    anchor: bool
    """Whether the first token is an anchor."""
    tag: int = 0
    """Tokens of a domain tag in front, after the anchor."""
    source: str | None = None
    corpus_document: int | None = None
    start: int = 0
    """The piece's first token behind anchor and tag, counted from its document's first."""
    length: int = 0
    """Tokens of the whole document."""
    text: str = ""

    @property
    def title(self) -> str:
        """One line that says what it is."""
        if self.number == SHARED_ANCHOR:
            return "anchor of the row"
        if self.number == PADDING:
            return f"padding, {len(self.tokens)} places"
        stop = self.start + len(self.tokens) - self.anchor - self.tag
        span = f"tokens {self.start} to {stop - 1} of {self.length}" if stop - self.start < self.length else "whole"
        if stop == self.start:
            span = f"none of its {self.length} tokens yet"
        tag = f"{self.tag} of its domain tag, " if self.tag else ""
        return f"document {self.number}: {self.source} #{self.corpus_document}, {tag}{span}"


@dataclass(frozen=True, kw_only=True)
class RowView:
    """One row."""

    row: int
    """In the plan."""
    pieces: list[PieceView]

    def to_json(self) -> dict[str, Any]:
        """Flat lists of the row as the model gets it, and its pieces."""
        parts = [(piece, len(piece.tokens)) for piece in self.pieces]
        return {
            "row": self.row,
            "tokens": [token for piece in self.pieces for token in piece.tokens],
            "labels": [label for piece in self.pieces for label in piece.labels],
            "document": [piece.number for piece, count in parts for _ in range(count)],
            "position": [position for piece in self.pieces for position in piece.positions],
            "pieces": [
                {
                    "document": piece.number,
                    "place": piece.place,
                    "tokens": count,
                    "anchor": piece.anchor,
                    "tag": piece.tag,
                    "source": piece.source,
                    "corpus_document": piece.corpus_document,
                    "start": piece.start,
                    "text": piece.text,
                }
                for piece, count in parts
            ],
        }


def view_rows(data: PackedTextDataModule, corpus: Corpus, tokenizer: Tokenizer, *, count: int) -> list[RowView]:
    """The first rows of the training's first epoch; fewer where there are fewer.

    Args:
        count: at least 1.
    """
    rows = data.training_rows
    order = TrainingOrder(len(rows), total=len(rows), seed=data.seed)
    return [_view(data, corpus, tokenizer, int(row)) for row in order[0:count]]


def _view(data: PackedTextDataModule, corpus: Corpus, tokenizer: Tokenizer, row: int) -> RowView:
    batch = data.training_rows[[row]]
    tokens_T, labels_T, document_T, position_T = (each[0].numpy() for each in batch[:4])
    cuts = [0, *(np.flatnonzero(np.diff(document_T)) + 1).tolist(), len(document_T)]
    planned = iter(data.training.plan.pieces(row))
    tags = data.training.tags
    pieces = []
    for begin, end in pairwise(cuts):
        number = int(document_T[begin])
        values: dict[str, Any] = {"anchor": number == SHARED_ANCHOR}
        if number > SHARED_ANCHOR:
            piece = next(planned)
            document = int(data.training.documents[piece.document])
            tag = 0 if tags is None else int(tags.length_N[piece.document])
            values = {
                "anchor": bool(piece.anchor),
                "source": corpus.table.sources[corpus.table.source[document]],
                "corpus_document": document,
                "tag": min(max(tag - piece.start, 0), piece.stop - piece.start),
                "start": max(piece.start - tag, 0),
                "length": int(corpus.lengths[document]),
                "text": tokenizer.decode(tokens_T[begin + piece.anchor : end]),
            }
        pieces.append(
            PieceView(
                number=number,
                place=begin,
                tokens=tokens_T[begin:end].tolist(),
                labels=labels_T[begin:end].tolist(),
                positions=position_T[begin:end].tolist(),
                **values,
            )
        )
    return RowView(row=row, pieces=pieces)


def print_rows(views: list[RowView], tokenizer: Tokenizer, *, rows: int) -> None:
    """Each row as a table: its pieces one after another, cut short in their middle.

    Args:
        rows: how many the plan has.
    """
    console = Console()
    for view in views:
        count = sum(len(piece.tokens) for piece in view.pieces)
        documents = sum(piece.number > SHARED_ANCHOR for piece in view.pieces)
        table = Table(
            title=f"Row {view.row} of {rows}: {count} places, documents: {documents}", title_justify="left", box=None
        )
        for heading, justify in (("place", "right"), ("token", "left"), ("id", "right"), ("document", "right"),
                                 ("position", "right"), ("predicts", "left")):  # fmt: skip
            table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        for piece in view.pieces:
            table.add_section()
            if piece.number != PADDING:
                _add_tokens(table, piece, tokenizer)
        console.print(table)
        for piece in view.pieces:
            console.print(f"  {piece.title}", markup=False, highlight=False)
            if piece.text:
                console.print(f"    {_shortened(piece.text)}", markup=False, highlight=False, soft_wrap=True)
        console.print()


def _add_tokens(table: Table, piece: PieceView, tokenizer: Tokenizer) -> None:
    count = len(piece.tokens)
    shown = range(count) if count <= HEAD + TAIL + 1 else [*range(HEAD), None, *range(count - TAIL, count)]
    for i in shown:
        if i is None:
            between = f"... {count - HEAD - TAIL} more"
            table.add_row("", between, "", str(piece.number), "...", "...")
            continue
        label = piece.labels[i]
        target = "-" if label == NO_TARGET else f"{_spelled(tokenizer, label)} {label}"
        anchor = " (anchor)" if piece.anchor and i == 0 else ""
        table.add_row(
            str(piece.place + i),
            escape(_spelled(tokenizer, piece.tokens[i]) + anchor),
            str(piece.tokens[i]),
            str(piece.number),
            str(piece.positions[i]),
            escape(target),
        )


def _spelled(tokenizer: Tokenizer, token: int) -> str:
    """One token on one line, in quotes where spaces would not show."""
    return repr(tokenizer.decode([token]))


def _shortened(text: str) -> str:
    """Text on one line, its middle left out."""
    if len(text) > 2 * _TEXT + 5:
        return f"{text[:_TEXT]!r} ... {text[-_TEXT:]!r}"
    return repr(text)
