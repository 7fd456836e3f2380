"""What the data hands to the model: one row is one training window.

Shape letters: B rows, T tokens in a row.
"""

from typing import NamedTuple

from torch import Tensor

NO_TARGET = -100
"""Label of a token that predicts nothing (the default `ignore_index` of torch's cross-entropy)."""

PADDING = -1
"""Document number of padding, which stands at row ends only."""

SHARED_ANCHOR = 0
"""Document number of the row's shared anchor, which stands at the row's start; documents count from 1."""


class PackedBatch(NamedTuple):
    """B rows of T tokens. Any B >= 1 and any T >= 2.

        row        A  a  b  c  d  e  f  g        A the anchor, abc and defg two documents
        labels     -  b  c  -  e  f  g  -        - is NO_TARGET
        document   0  1  1  1  2  2  2  2
        position   0  1  2  3  4  5  6  7

    A named tuple and not a dataclass, because torch's loaders (pinning) and Lightning's precision plugins and
    device transfer walk through named tuples by themselves.
    """

    tokens_BT: Tensor
    """int64 token ids."""
    labels_BT: Tensor
    """int64, already shifted: the token that this position has to predict, or NO_TARGET."""
    document_BT: Tensor
    """int32: 0 the shared anchor, 1, 2, ... documents, -1 padding. Borders come from here, never from positions."""
    position_BT: Tensor
    """int64 positions for the rotary embedding."""
    anchor_copy_BT: Tensor | None = None
    """bool: the token is its document's own copy of the anchor. None: no row has any. Token ids could not tell: a
    document may hold the anchor's token itself, also where it goes on in the next row and begins without a copy."""
