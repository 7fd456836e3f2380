"""Rows made when asked for, from a plan and the stored tokens.

Shape letters: B rows, T tokens in a row.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from datamodules.anchors import Layout, mark_anchor_copies, number_documents, place_tokens
from datamodules.corpus import Corpus
from datamodules.labels import next_token_labels
from datamodules.positions import token_positions
from datamodules.splits import PackedPart
from datamodules.tokenizers import Tokenizer
from modules.batch import PackedBatch

NO_ROW = -1
"""Asked for as a row, gives one of padding alone (evens out the last batches of several ranks)."""


class PackedRows(Dataset[PackedBatch]):
    """All rows of a plan; `rows[[3, 0]]` is a batch of two.

    Args:
        part: documents of `corpus` and their plan.
        tokenizer: gives the anchor and padding ids; not kept.
        positions, labels: as in DataConfig, resolved.
        anchor_copies_at_zero: every copy of the anchor at position 0 (what the anchor strategy wants).
    """

    def __init__(
        self,
        part: PackedPart,
        corpus: Corpus,
        tokenizer: Tokenizer,
        *,
        positions: Literal["continuous", "reset"],
        labels: Literal["within_document", "across"],
        anchor_copies_at_zero: bool = False,
    ) -> None:
        self.plan = part.plan
        self.corpus = corpus
        self.anchor_id, self.pad_id = tokenizer.anchor_id, tokenizer.pad_id
        self.positions, self.labels = positions, labels
        self.anchor_copies_at_zero = anchor_copies_at_zero
        self.tags, self._piece_tag = part.tags, part.piece_tag
        document = part.documents[self.plan.piece_document]
        self._store, self._begin = corpus.store_of[document], corpus.begins[document] + self.plan.piece_start
        if self.tags is not None:
            self._begin -= np.minimum(self.tags.length_N[self.plan.piece_document], self.plan.piece_start)

    def __len__(self) -> int:
        return self.plan.rows

    def __getitem__(self, rows: Sequence[int] | np.ndarray) -> PackedBatch:
        layout = self._layout(np.asarray(rows, np.int64))
        context_length = self.plan.context_length
        tokens_BT = place_tokens(
            layout,
            self.corpus.tokens,
            None if self.tags is None else self.tags.tokens,
            context_length=context_length,
            anchor_id=self.anchor_id,
            pad_id=self.pad_id,
        )
        document_BT = number_documents(layout, context_length=context_length)
        labels_BT = next_token_labels(tokens_BT, layout, self.labels)
        position_BT = token_positions(
            layout,
            context_length=context_length,
            positions=self.positions,
            anchor_copies_at_zero=self.anchor_copies_at_zero,
        )
        batch = PackedBatch(*map(torch.from_numpy, (tokens_BT, labels_BT, document_BT, position_BT)))
        if self.plan.anchor != "every_document":
            return batch
        anchor_copy_BT = mark_anchor_copies(layout, context_length=context_length)
        return batch._replace(anchor_copy_BT=torch.from_numpy(anchor_copy_BT))

    def _layout(self, rows: np.ndarray) -> Layout:
        plan = self.plan
        first, real = plan.row_first_piece, rows != NO_ROW
        count = np.where(real, first[rows + 1] - first[rows], 0)
        row = np.repeat(np.arange(rows.size), count)
        piece = first[rows][row] + np.arange(row.size) - np.repeat(np.cumsum(count) - count, count)
        width = plan.piece_width[piece]
        tag_source = plan.piece_start[piece]
        if self.tags is not None:
            tag_source += self.tags.begin_N[plan.piece_document[piece]]
        shared = real & (plan.anchor == "row_start")
        return Layout(
            begin_P=row * plan.context_length + plan.piece_offset[piece],
            width_P=width,
            copy_P=plan.piece_anchor[piece],
            number_P=plan.piece_number[piece],
            within_P=plan.piece_within[piece],
            tag_P=self._piece_tag[piece],
            tag_source_P=tag_source,
            store_P=self._store[piece],
            source_P=self._begin[piece],
            shared_B=shared,
            filled_B=np.bincount(row, width, rows.size).astype(np.int64) + shared,
        )
