"""Targets of the loss: which token each place has to predict.

    tokens             A a b c d e -      document  0 1 1 1 2 2 -1
    within_document    - b c - e - -      (- no target)
    across             - b c d e - -

    tokens             A w w a b c -      document  0 1 1 1 1 1 -1      w w a domain tag
    either             - - a b c - -

Shape letters: B rows, T tokens in a row.
"""

from typing import Literal

import numpy as np

from datamodules.anchors import Layout
from modules.batch import NO_TARGET


def next_token_labels(
    tokens_BT: np.ndarray, layout: Layout, labels: Literal["within_document", "across"]
) -> np.ndarray:
    """The next token where it is a target, else NO_TARGET; int64 [B, T].

    A row's last token, a shared anchor and padding predict nothing, and padding is never predicted. A copy of the
    anchor belongs to its document and predicts that document's first token; `across` has the last token of the
    document before predict the copy. Domain tags are never predicted; a tag's last token predicts its document's first.
    """
    rows, context_length = tokens_BT.shape
    labels_BT = np.empty((rows, context_length), np.int64)
    labels_BT[:, :-1] = tokens_BT[:, 1:]
    labels_BT[layout.shared_B, 0] = NO_TARGET
    for row, filled in enumerate(layout.filled_B.tolist()):
        labels_BT[row, max(filled - 1, 0) :] = NO_TARGET
    if labels == "within_document":
        labels_BT.reshape(-1)[layout.begin_P + layout.width_P - 1] = NO_TARGET
    _leave_out_tags(labels_BT.reshape(-1), layout)
    return labels_BT


def _leave_out_tags(flat: np.ndarray, layout: Layout) -> None:
    tagged = np.flatnonzero(layout.tag_P)
    # The place before predicts a tag's first token. Where that is in the row before, it has no target anyway.
    stops = (layout.begin_P + layout.copy_P + layout.tag_P - 1)[tagged]
    starts = np.maximum(stops - layout.tag_P[tagged], 0)
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        flat[start:stop] = NO_TARGET
