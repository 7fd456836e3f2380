"""Positions for the rotary embedding.

    document       0 1 1 1 2 2 2 2      1 1 1 1 2 2 2        (the second row: anchor copies at 0 and 4)
    continuous     0 1 2 3 4 5 6 7      0 1 2 3 4 5 6        with copies at zero: 0 1 2 3 0 5 6
    reset          0 1 2 3 1 2 3 4      0 1 2 3 0 1 2

Shape letters: B rows, T tokens in a row.
"""

from typing import Literal

import numpy as np

from datamodules.anchors import Layout


def token_positions(
    layout: Layout,
    *,
    context_length: int,
    positions: Literal["continuous", "reset"],
    anchor_copies_at_zero: bool = False,
) -> np.ndarray:
    """Position of every token, int64 [B, T].

    Args:
        positions: `continuous`: the token's index in its row. `reset`: every document of a row restarts at 0, after a
            shared anchor at 1 (the anchor itself stays at 0), and counts on over its interleaved chunks. Padding keeps
            its index in the row.
        anchor_copies_at_zero: every copy of the anchor stands at 0 whatever else holds, the tokens after it keep
            their positions. Asked for by attention strategies that want all anchors there.
    """
    index_T = np.arange(context_length)
    position_BT = np.empty((len(layout.filled_B), context_length), np.int64)
    position_BT[:] = index_T
    flat = position_BT.reshape(-1)
    if positions == "reset":
        firsts = (layout.shared_B[layout.begin_P // context_length] + layout.within_P).tolist()
        for begin, width, first in zip(layout.begin_P.tolist(), layout.width_P.tolist(), firsts, strict=True):
            flat[begin : begin + width] = index_T[first : first + width]
    if anchor_copies_at_zero:
        flat[layout.begin_P[layout.copy_P]] = 0
    return position_BT
