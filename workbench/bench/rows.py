"""The row that every subject of a benchmark is given: an anchor and documents of log-normal lengths.

Shape letters: T tokens in a row, P documents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from datamodules.anchors import Layout
    from modules.batch import PackedBatch


def log_normal_lengths(tokens: int, *, mean: float, sigma: float, seed: int) -> np.ndarray:
    """Lengths of documents that fill a row behind its anchor, int64 [P], each at least 1, their sum tokens - 1.

    Args:
        tokens: T, the anchor included.
        mean: wanted mean length; there are as many documents as come nearest to it.
        sigma: standard deviation of the lengths' logarithms, before they are scaled to fill the row.
        seed: of the draw.
    """
    room = tokens - 1
    count = min(max(1, round(room / mean)), room)
    drawn = np.random.default_rng(seed).lognormal(sigma=sigma, size=count)
    # Whole borders of the scaled lengths; one token for each document is set aside first.
    borders = np.rint(drawn.cumsum() / drawn.sum() * (room - count)).astype(np.int64)
    return np.diff(borders, prepend=0) + 1


def row_layout(lengths: np.ndarray) -> Layout:
    """One row that begins with a shared anchor, in the terms of the data packages."""
    from datamodules.anchors import Layout

    ends = 1 + lengths.cumsum()
    return Layout(
        begin_P=ends - lengths,
        width_P=lengths,
        copy_P=np.zeros(len(lengths), dtype=bool),
        number_P=np.arange(1, len(lengths) + 1),
        within_P=np.zeros(len(lengths), dtype=np.int64),
        tag_P=np.zeros(len(lengths), dtype=np.int64),
        tag_source_P=np.zeros(len(lengths), dtype=np.int64),
        store_P=np.zeros(len(lengths), dtype=np.int64),
        source_P=np.zeros(len(lengths), dtype=np.int64),
        shared_B=np.array([True]),
        filled_B=ends[-1:],
    )


def random_row(
    lengths: np.ndarray, *, vocabulary_size: int, positions: Literal["continuous", "reset"], seed: int
) -> PackedBatch:
    """A batch of one row of random tokens, with the labels and positions that training would have."""
    import torch

    from datamodules.anchors import number_documents
    from datamodules.labels import next_token_labels
    from datamodules.positions import token_positions
    from modules.batch import PackedBatch

    layout, tokens = row_layout(lengths), int(lengths.sum()) + 1
    tokens_BT = np.random.default_rng(seed).integers(vocabulary_size, size=(1, tokens))
    labels_BT = next_token_labels(tokens_BT, layout, "within_document")
    document_BT = number_documents(layout, context_length=tokens)
    position_BT = token_positions(layout, context_length=tokens, positions=positions)
    return PackedBatch(*map(torch.from_numpy, (tokens_BT, labels_BT, document_BT, position_BT)))
