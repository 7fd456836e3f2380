"""Interleaved chunks, from the plan alone: what is cut, what stays, and in which orders."""

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.interleaving import MAX_TOKENS, interleave
from datamodules.packing import plan_rows
from datamodules.rows import PackedRows
from datamodules.splits import PackedPart
from modules.attention.borders import Borders
from modules.attention.strategies import STRATEGIES
from modules.llama import Llama, LlamaConfig
from modules.rotary import RotaryConfig


def plan(lengths, context_length, anchor="row_start", packing="best_fit"):
    return plan_rows(
        np.array(lengths),
        context_length=context_length,
        anchor=anchor,
        packing=packing,
        long_documents="split",
        tail="pad",
    )


def tokens_by_number(plan, row):
    """(document, token) in the order of the row, -1 an anchor copy, by document number."""
    found = {}
    for piece in plan.pieces(row):
        own = found.setdefault(piece.number, [])
        own += [(piece.document, -1)] * piece.anchor
        own += [(piece.document, token) for token in range(piece.start, piece.stop)]
    return found


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(3, 60),
    st.sampled_from(["row_start", "every_document", "none"]),
    st.sampled_from(["best_fit", "concatenate"]),
    st.integers(0, 99),
)
def test_every_row_keeps_its_tokens_and_every_document_its_number_and_order(lengths, length, anchor, packing, seed):
    before = plan(lengths, length, anchor, packing)
    after = interleave(before, seed=seed)
    assert after.rows == before.rows and after.report == before.report
    for row in range(before.rows):
        assert tokens_by_number(after, row) == tokens_by_number(before, row)
        pieces = Counter(piece.number for piece in after.pieces(row))
        neighbours = [piece.number for piece in after.pieces(row)]
        assert max(pieces.values()) <= 3
        assert all(one != other for one, other in pairwise(neighbours))
    for one, other in zip(after.row_documents, before.row_documents, strict=True):
        assert one.tolist() == other.tolist()


def test_long_documents_and_single_tokens_stay_in_one_piece():
    after = interleave(plan([MAX_TOKENS, MAX_TOKENS + 1, *[1] * 40], 8192), seed=1)
    count = Counter(piece.document for piece in after.pieces(0))
    assert count[0] in (2, 3) and count[1] == 1
    assert all(count[document] == 1 for document in range(2, 42))


def test_cuts_and_orders_are_as_likely_as_one_another():
    """20,000 rows of the documents a a a and b: the pieces of a in every way, and b at every place between them."""
    rows = 20_000
    after = interleave(plan([3, 1] * rows, 5), seed=0)
    drawn = Counter()
    for row in range(after.rows):
        drawn["".join("ab"[piece.document % 2] * (piece.stop - piece.start) for piece in after.pieces(row))] += 1
    # Half the rows cut a in 2 pieces, after its first or second token, with 3 places for b; half in 3, with 4 places.
    expected = {"baaa": 1 / 6 + 1 / 8, "abaa": 1 / 12 + 1 / 8, "aaba": 1 / 12 + 1 / 8, "aaab": 1 / 6 + 1 / 8}
    assert drawn.keys() == expected.keys()
    for row, share in expected.items():
        assert drawn[row] / rows == pytest.approx(share, abs=4 * (share * (1 - share) / rows) ** 0.5)


def test_a_tag_stays_whole_in_front_of_its_first_piece():
    before = plan([7] * 30, 64, "every_document")
    after = interleave(before, np.full(30, 5), seed=0)
    pieces = [piece for row in range(after.rows) for piece in after.pieces(row)]
    assert len(pieces) > 45
    assert all(piece.start == 0 or piece.start == 6 for piece in pieces)
    assert all(piece.stop in (6, 7) and piece.anchor == (piece.start == 0) for piece in pieces)
    alone = interleave(before, np.full(30, 6), seed=0)
    assert all(piece.stop - piece.start == 7 for row in range(alone.rows) for piece in alone.pieces(row))


def test_the_seed_decides():
    before = plan([9] * 50, 64)
    orders = [interleave(before, seed=seed).piece_number.tolist() for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("strategy", ["intra_document_reset", "anchor"])
@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_a_document_means_the_same_in_pieces(strategy, kernel):
    """With positions that restart in each document a model computes what it does for documents in one piece."""
    anchor = STRATEGIES[strategy].default_anchor
    lengths = [9, 14, 3, 20, 1, 12]
    before = plan(lengths, 64, anchor)
    store = SimpleNamespace(
        tokens=[np.arange(sum(lengths)) % 90], begins=np.cumsum(lengths) - lengths, store_of=np.zeros(6, int)
    )
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocabulary_size=92, width=32, layers=3, heads=4, kv_heads=2, head_width=8, hidden_width=48, norm_epsilon=1e-5,
        tied_embeddings=False, rope_theta=1e4, max_positions=64,
    )  # fmt: skip
    model = Llama(shape, strategy=STRATEGIES[strategy], kernel=kernel, rotary=RotaryConfig()).double()
    outputs = []
    for each in (before, interleave(before, seed=2)):
        rows = PackedRows(
            PackedPart(np.arange(6), each),
            store,
            SimpleNamespace(anchor_id=90, pad_id=91),
            positions="reset",
            labels="within_document",
        )
        batch = rows[[0]]
        out = model(batch.tokens_BT, batch.position_BT, Borders.of(batch.document_BT))[0]
        order = batch.document_BT[0].sort(stable=True).indices
        outputs.append(out[order][batch.document_BT[0][order] >= 0])
    assert each.piece_number.size > 6
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-12)
