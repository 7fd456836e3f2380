"""Targets of the loss: which token each place has to predict.

    tokens             A a b c d e -      document  0 1 1 1 2 2 -1
    within_document    - b c - e - -      (- no target)
    across             - b c d e - -

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
    document before predict the copy.
    """
    rows, context_length = tokens_BT.shape
    labels_BT = np.empty((rows, context_length), np.int64)
    labels_BT[:, :-1] = tokens_BT[:, 1:]
    labels_BT[layout.shared_B, 0] = NO_TARGET
    for row, filled in enumerate(layout.filled_B.tolist()):
        labels_BT[row, max(filled - 1, 0) :] = NO_TARGET
    if labels == "within_document":
        labels_BT.reshape(-1)[layout.begin_P + layout.width_P - 1] = NO_TARGET
    return labels_BT
