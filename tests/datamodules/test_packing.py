import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.packing import RowPiece, plan_rows

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)
ANCHORS = st.sampled_from(["row_start", "every_document", "none"])


def plan(lengths, context_length, anchor="row_start", packing="concatenate", long_documents="split", tail="pad"):
    return plan_rows(
        np.array(lengths),
        context_length=context_length,
        anchor=anchor,
        packing=packing,
        long_documents=long_documents,
        tail=tail,
    )


def drawing(plan):
    """Rows as text: A an anchor, a b c the documents' tokens, - padding. From the pieces alone."""
    rows = []
    for row in range(plan.rows):
        text = "A" * (plan.anchor == "row_start")
        for piece in plan.pieces(row):
            text += "A" * piece.anchor + "abcdefgh"[piece.document] * (piece.stop - piece.start)
        rows.append(text.ljust(plan.context_length, "-"))
    return " ".join(rows)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (([5, 2], 4, "row_start", "concatenate", "split", "drop"), "Aaaa Aaab"),
        (([5, 2], 4, "row_start", "concatenate", "split", "pad"), "Aaaa Aaab Ab--"),
        (([5, 2], 4, "row_start", "best_fit", "split", "drop"), "Aaaa Aaa- Abb-"),
        (([3, 2], 4, "row_start"), "Aaaa Abb-"),
        (([3, 2], 4, "every_document"), "Aaaa Abb-"),
        (([3, 2], 4, "none"), "aaab b---"),
        (([5, 2], 4, "every_document"), "Aaaa aaAb b---"),
        (([5, 2], 4, "every_document", "best_fit"), "Aaaa Abb- aa--"),
        (([5, 2], 4, "none", "best_fit"), "aaaa abb-"),
        (([6, 2], 4, "every_document", "best_fit"), "Aaaa aaa- Abb-"),
        (([3, 2, 1], 5, "every_document"), "AaaaA bbAc-"),  # a copy that ends its row stands alone, none follows it
        (([5, 2], 4, "row_start", "concatenate", "truncate"), "Aaaa Abb-"),
        (([5, 2], 4, "row_start", "concatenate", "drop"), "Abb-"),
        (([5, 2], 4, "none", "concatenate", "truncate"), "aaaa bb--"),
        (([2, 3, 1, 4], 5, "row_start", "best_fit"), "Adddd Abbbc Aaa--"),
        (([1, 1], 2, "every_document"), "Aa Ab"),
        (([3], 2, "every_document"), "Aa aa"),
        (([5, 2, 1], 4, "row_start", "one_per_row"), "Aaaa Aaa- Abb- Ac--"),
        (([5, 2, 1], 4, "every_document", "one_per_row"), "Aaaa aa-- Abb- Ac--"),
        (([5, 2, 1], 4, "none", "one_per_row", "truncate"), "aaaa bb-- c---"),
        (([5, 2, 1], 4, "none", "one_per_row", "drop"), "bb-- c---"),
    ],
)
def test_drawn_rows(arguments, expected):
    assert drawing(plan(*arguments)) == expected


def test_pieces_name_documents_and_their_tokens():
    packed = plan([5, 2], 4, "every_document", "concatenate", "split", "pad")
    assert packed.pieces(0) == [RowPiece(0, 0, 3, True, 1)]
    assert packed.pieces(1) == [RowPiece(0, 3, 5, False, 1), RowPiece(1, 0, 1, True, 2)]
    assert packed.piece_row.tolist() == [0, 1, 1, 2]
    assert packed.piece_offset.tolist() == [0, 0, 2, 0]
    assert packed.piece_width.tolist() == [4, 2, 2, 1]


@pytest.mark.parametrize("packing", ["concatenate", "best_fit", "one_per_row"])
def test_a_document_of_20_in_rows_of_8_that_each_begin_with_an_anchor(packing):
    assert plan([20], 8, "row_start", packing).piece_length.tolist() == [7, 7, 6]


@pytest.mark.parametrize("packing", ["concatenate", "best_fit", "one_per_row"])
@pytest.mark.parametrize(
    ("long_documents", "payloads", "truncated", "dropped"), [("split", [4, 4, 2], 0, 0), ("truncate", [4], 6, 0)]
)
def test_a_document_of_10_in_rows_of_4(packing, long_documents, payloads, truncated, dropped):
    packed = plan([10], 4, "none", packing, long_documents)
    assert packed.piece_length.tolist() == payloads
    assert (packed.report.tokens_truncated, packed.report.tokens_dropped) == (truncated, dropped)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit", "one_per_row"])
def test_a_document_of_10_that_is_dropped_is_reported(packing):
    """Beside one of 4, since a corpus without a row is refused."""
    packed = plan([10, 4], 4, "none", packing, "drop")
    assert drawing(packed) == "bbbb"
    assert (packed.report.documents_dropped, packed.report.tokens_dropped) == (1, 10)


def test_the_report_of_a_drawn_plan():
    """Aaaa Abbc Acc- of documents of 5 (cut to 3), 2 and 3 tokens."""
    assert plan([5, 2, 3], 4, "row_start", "concatenate", "truncate", "pad").report.as_dict() == {
        "documents_in": 3,
        "documents_out": 3,
        "documents_split": 1,
        "documents_truncated": 1,
        "documents_dropped": 0,
        "tokens_in": 10,
        "tokens_out": 8,
        "tokens_truncated": 2,
        "tokens_dropped": 0,
        "anchors": 3,
        "padding": 1,
        "padding_share": 1 / 12,
        "rows": 3,
    }
    dropped = plan([5, 2, 3, 1], 4, "row_start", "concatenate", "drop", "drop").report  # Abbc Accd
    assert (dropped.rows, dropped.documents_dropped, dropped.tokens_dropped, dropped.padding) == (2, 1, 5, 0)
    tail = plan([3, 1, 1], 4, "row_start", "concatenate", "split", "drop").report  # Aaaa, b and c are the tail
    assert (tail.rows, tail.documents_out, tail.documents_dropped, tail.tokens_dropped) == (1, 1, 2, 2)


@settings(deadline=None, max_examples=200)
@given(
    LENGTHS,
    st.integers(2, 25),
    ANCHORS,
    st.sampled_from(["concatenate", "best_fit", "one_per_row"]),
    st.sampled_from(["split", "truncate", "drop"]),
    st.sampled_from(["drop", "pad"]),
)
def test_every_token_is_in_one_row_or_in_the_report(lengths, context_length, anchor, packing, long_documents, tail):
    """Oracle: a set of (document, token) pairs, filled token by token."""
    try:
        packed = plan(lengths, context_length, anchor, packing, long_documents, tail)
    except ValueError as error:
        assert "data.long_documents='drop'" in str(error) or "data.tail='drop'" in str(error)
        return
    report = packed.report
    seen, copied, anchors, places = set(), [], 0, 0
    for row in range(packed.rows):
        pieces = packed.pieces(row)
        tokens = [(piece.document, token) for piece in pieces for token in range(piece.start, piece.stop)]
        assert seen.isdisjoint(tokens) and len(set(tokens)) == len(tokens)
        seen.update(tokens)
        copies = (anchor == "row_start") + sum(piece.anchor for piece in pieces)
        copied += [piece.document for piece in pieces if piece.anchor]
        assert 0 < copies + len(tokens) <= context_length
        anchors += copies
        places += context_length
    starting = {document for document, token in seen if token == 0} if anchor == "every_document" else set()
    assert starting <= set(copied) and len(set(copied)) == len(copied)  # one copy each, however often it is cut
    longest = context_length - (anchor != "none")
    everything = {(document, token) for document, length in enumerate(lengths) for token in range(length)}
    too_long = {document for document, length in enumerate(lengths) if length > longest}
    cut = {pair for pair in everything if pair[1] >= longest} if long_documents == "truncate" else set()
    out = {pair for pair in everything if pair[0] in too_long} if long_documents == "drop" else set()
    assert seen <= everything - cut - out
    lost = everything - cut - seen
    if packing != "concatenate" or tail == "pad":
        assert lost == out
    else:
        assert len(lost - out) < context_length
    split = [document for document in range(len(lengths)) if sum(d == document for d, _ in seen)]
    assert report.tokens_in == len(everything) == sum(lengths)
    assert report.tokens_out == len(seen)
    assert report.tokens_truncated == len(cut)
    assert report.tokens_dropped == len(lost)
    assert report.documents_in == len(lengths)
    assert report.documents_out == len(split)
    assert report.documents_dropped == len(lengths) - len(split)
    assert report.documents_truncated == (len(too_long) if long_documents == "truncate" else 0)
    assert report.anchors == anchors
    assert report.rows == packed.rows
    assert report.padding == places - len(seen) - anchors
    assert report.padding_share == report.padding / places


@settings(deadline=None, max_examples=200)
@given(LENGTHS, st.integers(2, 25), ANCHORS, st.sampled_from(["drop", "pad"]))
def test_concatenate_is_one_long_row_cut(lengths, context_length, anchor, tail):
    """Oracle: a string of all documents, sliced."""
    stream = "".join("A" * (anchor == "every_document") + chr(256 + i) * n for i, n in enumerate(lengths))
    room = context_length - (anchor == "row_start")
    rows = [stream[i : i + room] for i in range(0, len(stream), room)]
    if tail == "drop" and len(rows[-1]) < room:
        rows.pop()
    if not rows:
        with pytest.raises(ValueError, match=r"data\.tail='drop' leaves no row"):
            plan(lengths, context_length, anchor, tail=tail)
        return
    packed = plan(lengths, context_length, anchor, tail=tail)
    drawn = [
        "".join(
            "A" * piece.anchor + chr(256 + piece.document) * (piece.stop - piece.start) for piece in packed.pieces(row)
        )
        for row in range(packed.rows)
    ]
    assert drawn == rows


def test_best_fit_never_cuts_what_fits():
    lengths = np.random.default_rng(0).integers(1, 200, 500)
    for anchor in ("row_start", "every_document", "none"):
        packed = plan(lengths, 100, anchor, "best_fit")
        longest = 100 - (anchor != "none")
        pieces = np.bincount(packed.piece_document)
        assert (pieces == -(-lengths // longest)).all()


def test_both_anchor_placements_cut_long_documents_alike():
    lengths = np.random.default_rng(1).integers(1, 300, 200)
    cuts = []
    for anchor in ("row_start", "every_document"):
        packed = plan(lengths, 50, anchor, "best_fit")
        cuts.append(sorted(zip(packed.piece_document, packed.piece_start, packed.piece_length, strict=True)))
    assert cuts[0] == cuts[1]


def test_documents_keep_their_order_in_a_row():
    packed = plan(np.random.default_rng(2).integers(1, 30, 300), 64, "row_start", "best_fit")
    for row in range(packed.rows):
        documents = [piece.document for piece in packed.pieces(row)]
        assert documents == sorted(documents)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ([9, 7], 4, "row_start", "concatenate", "drop"),
            r"long_documents='drop'.*context_length=4 holds 3.*Set",
        ),
        (([9, 7], 4, "none", "best_fit", "drop"), r"long_documents='drop'.*context_length=4 holds 4.*Set"),
        (([2, 3], 64, "none", "concatenate", "split", "drop"), r"data\.tail='drop'.*5 of the 64 places.*Set"),
    ],
)
def test_no_row_left(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan(*arguments)
