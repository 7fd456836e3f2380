"""Rows against literal arrays, and against a writer of one token at a time."""

import pickle
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.packing import plan_rows
from datamodules.rows import PackedRows
from datamodules.splits import PackedPart
from modules.batch import PackedBatch

A, P = 256, 257  # anchor and padding of these tests


def rows_of(lengths, context_length, anchor, positions="continuous", labels="within_document", *, packing="concatenate",
            copies_at_zero=False, order=None):  # fmt: skip
    """Document i holds the tokens 10 * i, 10 * i + 1, ... ; packed in `order`."""
    lengths = np.array(lengths)
    tokens = np.concatenate([10 * i + np.arange(n) for i, n in enumerate(lengths)]).astype(np.uint16)
    store = SimpleNamespace(
        tokens=[tokens], begins=np.cumsum(lengths) - lengths, store_of=np.zeros(len(lengths), int), lengths=lengths
    )
    order = np.arange(lengths.size) if order is None else np.array(order)
    plan = plan_rows(
        lengths[order],
        context_length=context_length,
        anchor=anchor,
        packing=packing,
        long_documents="split",
        tail="pad",
    )
    return PackedRows(
        PackedPart(order, plan),
        store,
        SimpleNamespace(anchor_id=A, pad_id=P),
        positions=positions,
        labels=labels,
        anchor_copies_at_zero=copies_at_zero,
    )


def literal(batch: PackedBatch) -> list[list[list[int]]]:
    return [column.tolist() for column in batch]


def test_the_worked_row_of_eight():
    batch = rows_of([3, 4], 8, "row_start")[[0]]
    assert literal(batch) == [
        [[A, 0, 1, 2, 10, 11, 12, 13]],
        [[-100, 1, 2, -100, 11, 12, 13, -100]],
        [[0, 1, 1, 1, 2, 2, 2, 2]],
        [[0, 1, 2, 3, 4, 5, 6, 7]],
    ]
    assert [column.dtype for column in batch] == [torch.int64, torch.int64, torch.int32, torch.int64]
    assert rows_of([3, 4], 8, "row_start", "reset")[[0]].position_BT.tolist() == [[0, 1, 2, 3, 1, 2, 3, 4]]


def test_the_two_documents_without_anchor():
    assert literal(rows_of([3, 4], 7, "none")[[0]]) == [
        [[0, 1, 2, 10, 11, 12, 13]],
        [[1, 2, -100, 11, 12, 13, -100]],
        [[1, 1, 1, 2, 2, 2, 2]],
        [[0, 1, 2, 3, 4, 5, 6]],
    ]
    assert rows_of([3, 4], 7, "none", "reset")[[0]].position_BT.tolist() == [[0, 1, 2, 0, 1, 2, 3]]


def test_anchor_copies():
    assert literal(rows_of([3, 4], 10, "every_document")[[0]]) == [
        [[A, 0, 1, 2, A, 10, 11, 12, 13, P]],
        [[0, 1, 2, -100, 10, 11, 12, 13, -100, -100]],
        [[1, 1, 1, 1, 2, 2, 2, 2, 2, -1]],
        [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]],
    ]
    at_zero = rows_of([3, 4], 9, "every_document", copies_at_zero=True)[[0]]
    assert at_zero.position_BT.tolist() == [[0, 1, 2, 3, 0, 5, 6, 7, 8]]
    reset = rows_of([3, 4], 9, "every_document", "reset", copies_at_zero=True)[[0]]
    assert reset.position_BT.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4]]


def test_a_piece_that_goes_on_has_a_new_number_and_no_copy():
    assert literal(rows_of([5, 2], 4, "every_document", "reset")[[0, 1, 2]]) == [
        [[A, 0, 1, 2], [3, 4, A, 10], [11, P, P, P]],
        [[0, 1, 2, -100], [4, -100, 10, -100], [-100] * 4],
        [[1, 1, 1, 1], [1, 1, 2, 2], [1, -1, -1, -1]],
        [[0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 2, 3]],
    ]


def test_labels_across_documents():
    assert rows_of([3, 2], 7, "row_start", labels="across")[[0]].labels_BT.tolist() == [
        [-100, 1, 2, 10, 11, -100, -100]
    ]
    assert rows_of([2, 2], 6, "every_document", labels="across")[[0]].labels_BT.tolist() == [[0, 1, A, 10, 11, -100]]


def test_shortest_rows():
    assert literal(rows_of([2], 2, "row_start")[[0, 1]]) == [
        [[A, 0], [A, 1]],
        [[-100, -100], [-100, -100]],
        [[0, 1], [0, 1]],
        [[0, 1], [0, 1]],
    ]
    assert rows_of([2], 2, "none")[[0]].labels_BT.tolist() == [[1, -100]]


def test_a_row_of_padding():
    rows = rows_of([3, 4], 4, "row_start")
    assert literal(rows[[-1]]) == [[[P] * 4], [[-100] * 4], [[-1] * 4], [[0, 1, 2, 3]]]
    mixed, alone = rows[[1, -1, 0]], rows[[0]]
    assert all((a[2] == b[0]).all() for a, b in zip(mixed, alone, strict=True))


def one_token_at_a_time(plan, order, positions, labels, copies_at_zero):
    """Oracle: (tokens, labels, document, position) of all rows, by appending."""
    result = []
    for row in range(plan.rows):
        line = [(A, 0, 0, "shared")] if plan.anchor == "row_start" else []
        for number, piece in enumerate(plan.pieces(row), start=1):
            restart = len(line) if positions == "continuous" else int(plan.anchor == "row_start")
            content = [(A, "copy")] * piece.anchor
            content += [(10 * order[piece.document] + i, "text") for i in range(piece.start, piece.stop)]
            for step, (token, kind) in enumerate(content):
                position = 0 if kind == "copy" and copies_at_zero else restart + step
                line.append((token, number, position, kind))
        while len(line) < plan.context_length:
            line.append((P, -1, len(line), "padding"))
        targets = []
        for (_, number, _, kind), (token, next_number, _, next_kind) in pairwise(line):
            wanted = kind in ("text", "copy") and next_kind != "padding"
            wanted &= labels == "across" or number == next_number
            targets.append(token if wanted else -100)
        tokens, numbers, place, _ = zip(*line, strict=True)
        result.append((list(tokens), [*targets, -100], list(numbers), list(place)))
    return [list(column) for column in zip(*result, strict=True)]


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(2, 14),
    st.sampled_from(["row_start", "every_document", "none"]),
    st.sampled_from(["continuous", "reset"]),
    st.sampled_from(["within_document", "across"]),
    st.sampled_from(["concatenate", "best_fit"]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_rows_as_written_one_token_at_a_time(lengths, length, anchor, positions, labels, packing, at_zero, random):
    order = random.sample(range(len(lengths)), len(lengths))
    rows = rows_of(lengths, length, anchor, positions, labels, packing=packing, copies_at_zero=at_zero, order=order)
    expected = one_token_at_a_time(rows.plan, order, positions, labels, at_zero)
    assert literal(rows[range(len(rows))]) == expected


@pytest.mark.parametrize("anchor", ["row_start", "every_document", "none"])
def test_a_pickled_copy_makes_the_same_rows(store_of, tokenizer, many_texts, anchor):
    store = store_of(many_texts)
    plan = plan_rows(
        store.lengths, context_length=32, anchor=anchor, packing="best_fit", long_documents="split", tail="pad"
    )
    part = PackedPart(np.arange(200), plan)
    rows = PackedRows(part, store, tokenizer, positions="reset", labels="across")
    copy = pickle.loads(pickle.dumps(rows))
    assert literal(copy[[5, 0]]) == literal(rows[[5, 0]])
    assert tokenizer.decode(store.document(0)) == many_texts[0] + "<eos>"
