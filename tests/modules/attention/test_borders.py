"""Borders against literal arrays, and the segments against the visible rule."""

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


@st.composite
def batches(draw):
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
        rows.append(row + [-1] * (tokens - len(row)))
    return rows


@given(document=batches())
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
        covered = []
        for row, start, stop, sees_anchor, padding in segments:
            covered += [(row, token) for token in range(start, stop)]
            for query in range(start, stop):
                if not padding:
                    from_segments[row, query, start : query + 1] = True
                    from_segments[row, query, 0] |= sees_anchor
        assert covered == [(row, token) for row in range(rows) for token in range(tokens)]
        rule = visible_rule(strategy, document_BT)
        from_rule = rule(torch.arange(rows)[:, None, None], torch.tensor(0), index[:, None], index)
        np.testing.assert_array_equal(from_segments, from_rule.numpy())


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
        ([[1, 2, 1]], "continue document 1"),
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
