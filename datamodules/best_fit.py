"""Best-fit decreasing: which row takes which piece, so that little padding is left and nothing is cut.

Source: Ding et al., "Fewer truncations improve language modeling", arXiv 2404.10830.
"""

import numpy as np


def best_fit_decreasing(widths: np.ndarray, room: int) -> np.ndarray:
    """Row of each piece: pieces by falling width, each into the row with the least room left that still has enough.

        widths 3 5 2 2, room 6  ->  rows 1 0 1 2        (5 opens row 0, 3 row 1, 2 joins the 3, 2 opens row 2)

    Pieces of one width and rows of one rest are interchangeable, so the work is per distinct width and rest, not per
    piece: a row with rest R takes R // width pieces of that width one after another before the next row is touched,
    because each piece makes it the fullest row still fit.

    Args:
        widths: int64 [pieces], each from 1 to `room`.
    Returns:
        int64 [pieces], rows counted from 0 without gaps.
    """
    falling = np.argsort(-widths, kind="stable")
    values, counts = np.unique(widths, return_counts=True)
    rests = _Rests(room)
    first_row: list[int] = []  # runs, in the order the pieces are taken: `run_rows` rows from `first_row` on,
    run_rows: list[int] = []  # each of them taking `per_row` pieces
    per_row: list[int] = []
    opened = 0
    for width, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        left = count
        while left:
            rest = rests.smallest_from(width)
            if rest is None:
                take = room // width
                rows = max(left // take, 1)
                span = (opened, opened + rows)
                opened += rows
                rest = room
            else:
                take = rest // width
                span = rests.pop(rest, max(left // take, 1))
                rows = span[1] - span[0]
            take = min(take, left)
            first_row.append(span[0])
            run_rows.append(rows)
            per_row.append(take)
            left -= take * rows
            rests.push(rest - take * width, span)
    rows_of_run, takes = np.array(run_rows), np.array(per_row)
    run, number = number_pieces(rows_of_run * takes)
    row = np.empty(widths.size, np.int64)
    row[falling] = np.array(first_row)[run] + number // takes[run]
    return row


class _Rests:
    """Open rows by the room they have left, as spans of row numbers, with the smallest rest >= x found fast.

    A rest in use is one bit of an integer, 512 to a block; a bit per block in use makes the second level.
    """

    def __init__(self, room: int) -> None:
        self.spans: dict[int, list[tuple[int, int]]] = {}
        self.blocks = [0] * ((room >> 9) + 1)
        self.used = 0

    def push(self, rest: int, span: tuple[int, int]) -> None:
        if rest == 0:  # full rows are never asked for
            return
        if rest in self.spans:
            self.spans[rest].append(span)
            return
        self.spans[rest] = [span]
        self.blocks[rest >> 9] |= 1 << (rest & 511)
        self.used |= 1 << (rest >> 9)

    def pop(self, rest: int, most: int) -> tuple[int, int]:
        """At most `most` rows of that rest, as one span."""
        spans = self.spans[rest]
        start, stop = spans.pop()
        if stop - start > most:
            spans.append((start + most, stop))
            return start, start + most
        if not spans:
            del self.spans[rest]
            self.blocks[rest >> 9] &= ~(1 << (rest & 511))
            if not self.blocks[rest >> 9]:
                self.used &= ~(1 << (rest >> 9))
        return start, stop

    def smallest_from(self, rest: int) -> int | None:
        block = rest >> 9
        bits = self.blocks[block] >> (rest & 511)
        if bits:
            return rest + _lowest_bit(bits)
        later = self.used >> (block + 1)
        if not later:
            return None
        block += 1 + _lowest_bit(later)
        return (block << 9) + _lowest_bit(self.blocks[block])


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def number_pieces(count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """count [3 1] -> document [0 0 0 1], number of the piece in its document [0 1 2 0]."""
    document = np.repeat(np.arange(count.size), count)
    return document, np.arange(document.size) - np.repeat(np.cumsum(count) - count, count)
