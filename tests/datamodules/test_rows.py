"""Rows against literal arrays, and against a writer of one token at a time."""

import pickle
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.domain_tags import DomainTags
from datamodules.interleaving import interleave
from datamodules.packing import plan_rows
from datamodules.rows import PackedRows
from datamodules.splits import PackedPart
from modules.batch import PackedBatch

A, P = 256, 257  # anchor and padding of these tests


def rows_of(lengths, context_length, anchor, positions="continuous", labels="within_document", *, packing="concatenate",
            copies_at_zero=False, order=None, tags=None, interleaved=None):  # fmt: skip
    """Document i holds the tokens 10 * i, 10 * i + 1, ... ; packed in `order`; a tag of its own length in front.

    Tag i holds the tokens 1000 + 10 * i, ... Interleaved with a seed.
    """
    lengths = np.array(lengths)
    tokens = np.concatenate([10 * i + np.arange(n) for i, n in enumerate(lengths)]).astype(np.uint16)
    store = SimpleNamespace(
        tokens=[tokens], begins=np.cumsum(lengths) - lengths, store_of=np.zeros(len(lengths), int), lengths=lengths
    )
    order = np.arange(lengths.size) if order is None else np.array(order)
    own_tags = None
    if tags is not None:
        held = np.concatenate([1000 + 10 * i + np.arange(n) for i, n in enumerate(tags)])
        own_tags = DomainTags(held, (np.cumsum(tags) - tags)[order], np.array(tags)[order])
    plan = plan_rows(
        lengths[order] + (0 if own_tags is None else own_tags.length_N),
        context_length=context_length,
        anchor=anchor,
        packing=packing,
        long_documents="split",
        tail="pad",
    )
    part = PackedPart(order, plan, tags=own_tags)
    if interleaved is not None:
        part = part._replace(plan=interleave(plan, part.piece_tag, seed=interleaved))
    return PackedRows(
        part,
        store,
        SimpleNamespace(anchor_id=A, pad_id=P),
        positions=positions,
        labels=labels,
        anchor_copies_at_zero=copies_at_zero,
    )


def literal(batch: PackedBatch) -> list[list[list[int]]]:
    """Tokens, labels, documents, positions."""
    return [column.tolist() for column in batch[:4]]


def test_the_worked_row_of_eight():
    batch = rows_of([3, 4], 8, "row_start")[[0]]
    assert literal(batch) == [
        [[A, 0, 1, 2, 10, 11, 12, 13]],
        [[-100, 1, 2, -100, 11, 12, 13, -100]],
        [[0, 1, 1, 1, 2, 2, 2, 2]],
        [[0, 1, 2, 3, 4, 5, 6, 7]],
    ]
    assert batch.anchor_copy_BT is None
    assert [column.dtype for column in batch[:4]] == [torch.int64, torch.int64, torch.int32, torch.int64]
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
    assert all((a[2] == b[0]).all() for a, b in zip(mixed[:4], alone[:4], strict=True))


def test_a_domain_tag_is_seen_and_never_predicted():
    """Tags of 2 tokens and of 1 in front of documents of 3 and 2; the tag's last token predicts the first token."""
    assert literal(rows_of([3, 2], 9, "row_start", tags=[2, 1])[[0]]) == [
        [[A, 1000, 1001, 0, 1, 2, 1010, 10, 11]],
        [[-100, -100, 0, 1, 2, -100, 10, 11, -100]],
        [[0, 1, 1, 1, 1, 1, 2, 2, 2]],
        [[0, 1, 2, 3, 4, 5, 6, 7, 8]],
    ]
    assert literal(rows_of([3, 2], 10, "every_document", "reset", "across", tags=[2, 1])[[0]]) == [
        [[A, 1000, 1001, 0, 1, 2, A, 1010, 10, 11]],
        [[-100, -100, 0, 1, 2, A, -100, 10, 11, -100]],
        [[1, 1, 1, 1, 1, 1, 2, 2, 2, 2]],
        [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]],
    ]
    # Cut inside the tag, and after it: the next row begins with what is left, and without a new tag.
    assert literal(rows_of([3], 2, "none", tags=[3])[[0, 1, 2]])[:2] == [
        [[1000, 1001], [1002, 0], [1, 2]],
        [[-100, -100], [0, -100], [2, -100]],
    ]


def test_interleaved_chunks_keep_their_documents_numbers():
    """Whatever order the seed gives; the labels at the pieces' ends, the positions and the tokens must fit it."""
    rows = rows_of([4, 5], 10, "row_start", "reset", interleaved=0)
    (tokens,), (labels,), (document,), (position,) = literal(rows[[0]])
    assert sorted(tokens) == [0, 1, 2, 3, 10, 11, 12, 13, 14, A] and tokens[0] == A
    assert len(rows.plan.piece_document) >= 4, "the documents of this seed are cut and shuffled"
    for number, own in ((1, [0, 1, 2, 3]), (2, [10, 11, 12, 13, 14])):
        places = [i for i, each in enumerate(document) if each == number]
        assert [tokens[i] for i in places] == own
        assert [position[i] for i in places] == list(range(1, len(own) + 1))
    for i in range(1, 9):
        assert labels[i] == (tokens[i + 1] if document[i] == document[i + 1] else -100)
    assert labels[0] == labels[9] == -100


def one_token_at_a_time(plan, order, positions, labels, copies_at_zero, tags):
    """Oracle: (tokens, labels, document, position) of all rows, by appending."""
    result = []
    for row in range(plan.rows):
        line = [(A, 0, 0, "shared")] if plan.anchor == "row_start" else []
        for piece in plan.pieces(row):
            document = order[piece.document]
            tag = [(1000 + 10 * document + i, "tag") for i in range(tags[document])]
            text = [(10 * document + i, "text") for i in range(9)]
            content = [(A, "copy")] * piece.anchor + [*tag, *text][piece.start : piece.stop]
            for token, kind in content:
                before = sum(number == piece.number for _, number, _, _ in line)
                position = len(line) if positions == "continuous" else int(plan.anchor == "row_start") + before
                line.append((token, piece.number, 0 if kind == "copy" and copies_at_zero else position, kind))
        while len(line) < plan.context_length:
            line.append((P, -1, len(line), "padding"))
        targets = []
        for (_, number, _, kind), (token, next_number, _, next_kind) in pairwise(line):
            wanted = kind in ("text", "copy", "tag") and next_kind not in ("padding", "tag")
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
    st.booleans(),
    st.none() | st.integers(0, 9),
)
def test_rows_as_written_one_token_at_a_time(
    lengths, length, anchor, positions, labels, packing, at_zero, random, tagged, interleaved
):
    order = random.sample(range(len(lengths)), len(lengths))
    tags = [random.randrange(5) if tagged else 0 for _ in lengths]
    rows = rows_of(lengths, length, anchor, positions, labels, packing=packing, copies_at_zero=at_zero, order=order,
                   tags=tags if tagged else None, interleaved=interleaved)  # fmt: skip
    expected = one_token_at_a_time(rows.plan, order, positions, labels, at_zero, tags)
    batch = rows[range(len(rows))]
    assert literal(batch) == expected
    if anchor == "every_document":
        assert (batch.anchor_copy_BT == (batch.tokens_BT == A)).all()


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
