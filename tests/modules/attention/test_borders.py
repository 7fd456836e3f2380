"""Borders against literal arrays, and the segments against the visible rule."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modules.attention.borders import Borders
from modules.attention.strategies import STRATEGIES, visible_rule


def test_literal_batch():
    borders = Borders.of(torch.tensor([[0, 1, 1, 2, -1, -1], [1, 2, 2, 2, 2, 2]]))
    assert borders.cu_seqlens.tolist() == [0, 1, 3, 4, 6, 7, 12]
    assert borders.cu_seqlens.dtype == torch.int32
    assert borders.max_seqlen == 5


def test_segments_of_a_literal_row():
    borders = Borders.of(torch.tensor([[0, 1, 1, 2, 2, -1]]))

    def spans(strategy):
        return [(s.start, s.stop, s.sees_anchor, s.padding) for s in borders.segments(STRATEGIES[strategy])]

    assert spans("full") == [(0, 5, False, False), (5, 6, False, True)]
    assert spans("anchor") == [(0, 3, False, False), (3, 5, True, False), (5, 6, False, True)]
    assert spans("intra_document") == [
        (0, 1, False, False),
        (1, 3, False, False),
        (3, 5, False, False),
        (5, 6, False, True),
    ]
    assert borders.segments(STRATEGIES["intra_document"]) is borders.segments(STRATEGIES["intra_document_reset"])


def test_a_literal_row_of_interleaved_documents():
    borders = Borders.of(torch.tensor([[1, 1, 2, 2, 3, 3, 3, 3], [0, 7, 2, 2, 7, 2, -1, -1]]))
    assert borders.gathered is not None
    assert borders.gathered.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 10, 11, 13, 14, 15]
    assert [tuple(run) for run in borders.runs[3:]] == [(1, 0, 1, 0), (1, 1, 3, 7), (1, 3, 6, 2), (1, 6, 8, -1)]
    assert borders.cu_seqlens.tolist() == [0, 2, 4, 8, 9, 11, 14, 16]
    assert borders.order(STRATEGIES["full"]) is None
    assert borders.order(STRATEGIES["anchor"]) is borders.gathered
    # Document by document: 3 + 3 + 10 in the first row; 1 + (3 + 2) + (6 + 3) with the anchor in the second.
    assert borders.visible_pairs(STRATEGIES["anchor"]) == 16 + 15
    assert borders.visible_pairs(STRATEGIES["full"]) == 36 + 21


def test_documents_in_one_piece_are_not_gathered():
    assert Borders.of(torch.tensor([[3, 1, 1, 2], [1, 1, 1, -1]])).gathered is None


@st.composite
def batches(draw, interleaved=False):
    """[B, T] document numbers: with or without an anchor and padding, rows of padding alone among them."""
    tokens = draw(st.integers(2, 24))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        row = [0] if draw(st.booleans()) else []
        real = draw(st.integers(len(row), tokens))
        document = 1
        while len(row) < real:
            row += [document] * draw(st.integers(1, real - len(row)))
            document += draw(st.integers(1, 3))
        if interleaved:
            first = row[:1] == [0]
            row[first:] = draw(st.permutations(row[first:]))
        rows.append(row + [-1] * (tokens - len(row)))
    return rows


@given(document=batches() | batches(interleaved=True))
def test_segments_and_rule_show_the_same_pairs(document):
    document_BT = torch.tensor(document)
    rows, tokens = document_BT.shape
    borders = Borders.of(document_BT)
    index = torch.arange(tokens)
    for strategy in STRATEGIES.values():
        if strategy.window is not None:
            continue  # narrows each segment
        segments = borders.segments(strategy)
        from_segments = np.zeros((rows, tokens, tokens), dtype=bool)
        order = borders.order(strategy)
        token_at = (np.arange(rows * tokens) if order is None else order).reshape(rows, tokens)
        covered = []
        for row, start, stop, sees_anchor, padding in segments:
            covered += [(row, place) for place in range(start, stop)]
            held = token_at[row, start:stop] - row * tokens
            for i, query in enumerate(held):
                if not padding:
                    from_segments[row, query, held[: i + 1]] = True
                    from_segments[row, query, 0] |= sees_anchor
        assert covered == [(row, place) for row in range(rows) for place in range(tokens)]
        assert sorted(token_at.flat) == list(range(rows * tokens))
        rule = visible_rule(strategy, document_BT)
        from_rule = rule(torch.arange(rows)[:, None, None], torch.tensor(0), index[:, None], index)
        np.testing.assert_array_equal(from_segments, from_rule.numpy())
        assert borders.visible_pairs(strategy) == from_segments.sum()


@given(document=batches(interleaved=True), window=st.integers(1, 9), sink=st.integers(0, 4))
def test_windows_count_the_documents_own_tokens(document, window, sink):
    """Pairs of a window and sinks, counted by hand over each document's tokens."""
    strategy = replace(STRATEGIES["sink_window"], window=window, sink=sink)
    index = torch.arange(len(document[0]))
    rule = visible_rule(strategy, torch.tensor(document))
    visible = rule(torch.arange(len(document))[:, None, None], torch.tensor(0), index[:, None], index)
    expected = set()
    for row, numbers in enumerate(document):
        held = {}
        for token, number in enumerate(numbers):
            own = held.setdefault(number, [])
            own.append(token)
            if number != -1:
                seen = own[-window:] + own[:sink] + ([0] if numbers[0] == 0 else [])
                expected |= {(row, token, key) for key in seen}
    assert {tuple(pair) for pair in visible.nonzero().tolist()} == expected
    assert Borders.of(torch.tensor(document)).visible_pairs(strategy) == len(expected)


@given(document=batches())
def test_cu_seqlens_hold_their_contract(document):
    borders = Borders.of(torch.tensor(document, dtype=torch.int32))
    bounds = borders.cu_seqlens.tolist()
    flat = [(row, number) for row, numbers in enumerate(document) for number in numbers]
    assert bounds[0] == 0
    assert bounds[-1] == len(flat)
    assert all(start < stop for start, stop in pairwise(bounds))
    assert [flat[start] for start in bounds[:-1]] == list(dict.fromkeys(flat))


@given(document=batches())
def test_borders_of_their_own_cu_seqlens_are_the_same(document):
    borders = Borders.of(torch.tensor(document))
    rows, tokens = borders.document_BT.shape
    again = Borders.of_cu_seqlens(borders.cu_seqlens, rows=rows, tokens=tokens)
    assert again.cu_seqlens.tolist() == borders.cu_seqlens.tolist()
    assert [run[:3] for run in again.runs] == [run[:3] for run in borders.runs]


def test_literal_cu_seqlens():
    borders = Borders.of_cu_seqlens(torch.tensor([0, 3, 5, 10]), rows=2, tokens=5)
    assert borders.document_BT.tolist() == [[1, 1, 1, 2, 2], [1, 1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("cu_seqlens", "reason"),
    [
        ([1, 5, 10], "start"),
        ([0, 5, 5, 10], "rise"),
        ([0, 7, 5, 10], "rise"),
        ([0, 5, 9], "10"),
        ([0, 5, 11], "10"),
        ([0, 4, 7, 10], "tokens 4 to 6 crosses the end of a row of 5"),
    ],
)
def test_broken_cu_seqlens_are_refused(cu_seqlens, reason):
    with pytest.raises(ValueError, match=f"cu_seqlens.*{reason}"):
        Borders.of_cu_seqlens(torch.tensor(cu_seqlens), rows=2, tokens=5)


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ([[1, 0, 1]], "row 0, tokens 1 to 1"),
        ([[0, 0, 1]], "one token at the start of a row"),
        ([[1, -1, 1]], "only at the end of a row"),
        ([[1, 1, -2]], "document number -2"),
    ],
)
def test_broken_document_numbers_are_refused(document, reason):
    with pytest.raises(ValueError, match=reason):
        Borders.of(torch.tensor([[1, 1, 1], *document])[1:])


@pytest.mark.parametrize("document_BT", [torch.tensor([1, 1]), torch.ones(1, 2), torch.ones(0, 2, dtype=torch.long)])
def test_what_is_no_batch_is_refused(document_BT):
    with pytest.raises(ValueError, match=r"shape \[rows, tokens\]"):
        Borders.of(document_BT)
