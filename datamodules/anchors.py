"""Puts anchors, tags, documents and padding in their places: the tokens and document numbers of a batch of rows.

    anchor=row_start        tokens    A a a a b b -     document  0 1 1 1 2 2 -1
    anchor=every_document   tokens    A a a a A b b     document  1 1 1 1 2 2  2
    anchor=none             tokens    a a a b b - -     document  1 1 1 2 2 -1 -1

Shape letters: B rows, T tokens in a row, P pieces of documents in the batch.
"""

from typing import NamedTuple

import numpy as np

from modules.batch import PADDING, SHARED_ANCHOR


class Layout(NamedTuple):
    """Where the pieces of B rows stand and come from.

    Whatever fills rows from this goes piece by piece with slices: documents are long, and a slice moves their tokens
    several times faster than arrays of indices do.
    """

    begin_P: np.ndarray
    """int64, first place of each piece in the flattened B x T batch: its anchor copy's where it has one."""
    width_P: np.ndarray
    """int64, places the piece takes, its anchor copy included."""
    copy_P: np.ndarray
    """bool, whether a copy of the anchor stands in front."""
    number_P: np.ndarray
    """int64, the document's number in its row."""
    within_P: np.ndarray
    """int64, places of the same row and number that come before the piece."""
    tag_P: np.ndarray
    """int64, places of a domain tag at the front, after the anchor copy; 0 for none."""
    tag_source_P: np.ndarray
    """int64, where they begin in the tags' tokens; anything without a tag."""
    store_P: np.ndarray
    """int64, which of the stores the piece is in."""
    source_P: np.ndarray
    """int64, where the piece's tokens begin in that store."""
    shared_B: np.ndarray
    """bool, whether the row begins with a shared anchor."""
    filled_B: np.ndarray
    """int64, places of the row before its padding."""


def place_tokens(
    layout: Layout,
    stores: list[np.ndarray],
    tags: np.ndarray | None,
    *,
    context_length: int,
    anchor_id: int,
    pad_id: int,
) -> np.ndarray:
    """int64 [B, T] token ids, copied from the flat `stores`, and from the tokens of all `tags` where there are any."""
    tokens_BT = np.full((len(layout.filled_B), context_length), pad_id, np.int64)
    tokens_BT[layout.shared_B, 0] = anchor_id
    flat = tokens_BT.reshape(-1)
    flat[layout.begin_P[layout.copy_P]] = anchor_id
    ahead = layout.copy_P + layout.tag_P
    begins, lengths = layout.begin_P + ahead, layout.width_P - ahead
    origin = zip(layout.store_P.tolist(), layout.source_P.tolist(), strict=True)
    for begin, length, (store, source) in zip(begins.tolist(), lengths.tolist(), origin, strict=True):
        flat[begin : begin + length] = stores[store][source : source + length]
    if tags is not None:
        tagged = np.flatnonzero(layout.tag_P)
        columns = (layout.begin_P + layout.copy_P, layout.tag_P, layout.tag_source_P)
        for begin, length, source in zip(*(column[tagged].tolist() for column in columns), strict=True):
            flat[begin : begin + length] = tags[source : source + length]
    return tokens_BT


def number_documents(layout: Layout, *, context_length: int) -> np.ndarray:
    """int32 [B, T]: 0 the shared anchor, 1, 2, ... the documents of each row, -1 padding."""
    document_BT = np.full((len(layout.filled_B), context_length), PADDING, np.int32)
    document_BT[layout.shared_B, 0] = SHARED_ANCHOR
    flat = document_BT.reshape(-1)
    begins, widths = layout.begin_P.tolist(), layout.width_P.tolist()
    for begin, width, number in zip(begins, widths, layout.number_P.tolist(), strict=True):
        flat[begin : begin + width] = number
    return document_BT


def mark_anchor_copies(layout: Layout, *, context_length: int) -> np.ndarray:
    """bool [B, T]: where a document's own copy of the anchor stands."""
    copy_BT = np.zeros((len(layout.filled_B), context_length), bool)
    copy_BT.reshape(-1)[layout.begin_P[layout.copy_P]] = True
    return copy_BT
