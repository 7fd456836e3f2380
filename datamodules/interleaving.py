"""Interleaved chunks: the documents of a row cut in pieces and shuffled among one another, each in its own order.

    row      A a a a a b b b c         after it, for instance     A b a a b b a a c
    number   0 1 1 1 1 2 2 2 3                                    0 2 1 1 2 2 1 1 3

Every document keeps its number, so its pieces still see one another, and every row its tokens.

Source: AnchorAttention, arXiv 2411.13476v2, section 5.2.
"""

from dataclasses import replace

import numpy as np

from datamodules.best_fit import number_pieces
from datamodules.packing import PackPlan

MAX_TOKENS = 2048
"""Documents that have more tokens in a row stay in one piece there."""


def interleave(plan: PackPlan, tag_P: np.ndarray | None = None, *, seed: int) -> PackPlan:
    """Cuts documents of 2 to `MAX_TOKENS` tokens in 2 or 3 pieces, and shuffles all pieces of each row.

    Two pieces or three are equally likely where both are possible, and so are all places to cut and all orders of a
    row's pieces that keep each document's own. An anchor copy and a domain tag stay in front of their document's first
    piece. Pieces of one document that come to stand side by side are one again.

    Args:
        plan: every document of a row in one piece.
        tag_P: int64 [pieces], tokens of a domain tag that each piece of the plan begins with; None: of no tag.
        seed: of the cuts and orders, which are the same in every epoch.
    """
    random = np.random.default_rng((seed, 2))  # another stream than the split's and the mix's
    tag = np.zeros_like(plan.piece_length) if tag_P is None else tag_P
    length = plan.piece_length - tag
    cut = (length >= 2) & (length <= MAX_TOKENS)
    count = np.where(cut, np.minimum(random.integers(2, 4, length.size), length), 1)
    whole, part = number_pieces(count)

    # Two different places to cut, the second left out where there are two pieces.
    one = random.integers(1, np.maximum(length, 2))
    other = random.integers(1, np.maximum(length - 1, 2))
    other += other >= one
    low, high = np.minimum(one, other), np.maximum(one, other)
    first_cut = np.where(count == 3, low, np.where(count == 2, one, length))
    second_cut = np.where(count == 3, high, length)
    bounds = np.stack([np.zeros_like(length), first_cut, second_cut, length])
    start, stop = bounds[part, whole], np.where(part + 1 == count[whole], length[whole], bounds[part + 1, whole])
    start, stop = np.where(part == 0, 0, start + tag[whole]), stop + tag[whole]

    # Random keys, sorted within each document, sort its row: of the orders that keep each document's own any is as
    # likely as another.
    key = random.random(whole.size)
    key = key[np.lexsort((key, whole))]
    order = np.lexsort((key, plan.piece_row[whole]))
    whole, start, stop, first = whole[order], start[order], stop[order], part[order] == 0

    begins = np.ones(whole.size, bool)
    begins[1:] = whole[1:] != whole[:-1]
    last = np.append(np.flatnonzero(begins)[1:], whole.size) - 1
    whole, start, stop, first = whole[begins], start[begins], stop[last], first[begins]
    copy = plan.piece_anchor[whole]
    rows = np.arange(plan.rows + 1)
    return replace(
        plan,
        piece_document=plan.piece_document[whole],
        piece_start=plan.piece_start[whole] + start,
        piece_length=stop - start,
        piece_anchor=copy & first,
        piece_number=plan.piece_number[whole],
        piece_within=start + (copy & ~first),
        row_first_piece=np.searchsorted(plan.piece_row[whole], rows),
    )
