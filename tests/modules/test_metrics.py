"""Sums over batches and ranks, and where targets stand, in literal arrays."""

import math
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from modules.metrics import LossByPosition, TokenLoss, target_offset

pytestmark = pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")


# A an anchor copy, * the shared anchor, letters the tokens of documents.
@pytest.mark.parametrize(
    ("tokens", "document", "expected"),
    [
        # A document's own copy of the anchor does not count ...
        ("AabcAdef", [1, 1, 1, 1, 2, 2, 2, 2], [0, 1, 2, -1, 0, 1, 2, -1]),
        # ... and without one the first token has offset 0 too, though nothing in the document predicts it.
        ("abcdefgh", [1, 1, 1, 2, 2, 2, 2, 2], [1, 2, -1, 1, 2, 3, 4, -1]),
        # Mixed: a piece that goes on from the row before has no copy.
        ("abAcdeAf", [1, 1, 2, 2, 2, 2, 3, 3], [1, -1, 0, 1, 2, -1, 0, -1]),
        # The shared anchor predicts nothing and does not belong to the first document.
        ("*abcdefg", [0, 1, 1, 1, 2, 2, 2, 2], [-1, 1, 2, -1, 1, 2, 3, -1]),
        # Padding, documents of one token, a copy alone.
        ("AaAAbc..", [1, 1, 2, 3, 3, 3, -1, -1], [0, -1, -1, 0, 1, -1, -1, -1]),
        # A document in several pieces counts on; between them nothing predicts its tokens.
        ("abcdefgh", [1, 1, 1, 2, 2, 1, 1, 1], [1, 2, -1, 1, -1, 4, 5, -1]),
        ("AaAbcdef", [1, 1, 2, 2, 1, 1, 2, 2], [0, -1, 0, -1, 2, -1, 2, -1]),
    ],
)
def test_target_offset(tokens: str, document: list[int], expected: list[int]) -> None:
    document_BT = torch.tensor([document], dtype=torch.int32)
    copies = torch.tensor([[letter == "A" for letter in tokens]])
    got = target_offset(document_BT, copies)
    assert got.dtype == torch.int64 and got.tolist() == [expected]
    if "A" not in tokens:
        assert target_offset(document_BT, None).tolist() == [expected]


def test_target_offset_of_several_rows() -> None:
    copies, document = torch.tensor([[True, False, False]] * 2), torch.tensor([[1, 1, 1], [1, 2, 2]])
    assert target_offset(document, copies).tolist() == [[0, 1, -1], [-1, 1, -1]]
    assert target_offset(document, None).tolist() == [[1, 2, -1], [-1, 1, -1]]


@given(
    st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=6),
    st.booleans(),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_target_offset_of_any_row(
    documents: list[tuple[int, bool]], shared: bool, padding: int, random: Random, interleaved: bool
) -> None:
    """Rows built with their offsets at hand: (number, offset), -1 the offset of a copy."""
    queues = [[(number, i) for i in range(-1 if copy else 0, length)] for number, (length, copy) in
              enumerate(documents, start=1)]  # fmt: skip
    numbers = [number for queue in queues for number, _ in queue]
    if interleaved:
        random.shuffle(numbers)
    row = [(0, 0)] * shared + [queues[number - 1].pop(0) for number in numbers] + [(-1, 0)] * padding
    expected = [row[t + 1][1] if t + 1 < len(row) and row[t][0] == row[t + 1][0] > 0 else -1 for t in range(len(row))]
    copies = torch.tensor([[offset == -1 for _, offset in row]])
    assert target_offset(torch.tensor([[number for number, _ in row]]), copies).tolist() == [expected]


def test_token_loss_weighs_targets_not_batches() -> None:
    """10 targets of mean 2.0 and 100 of mean 1.0 give 1.0909, not 1.5."""
    metric = TokenLoss()
    assert math.isnan(metric.compute())
    for loss in (torch.full((2, 5), 2.0), torch.full((100,), 1.0), torch.zeros(0)):
        metric.update(loss)
    assert metric.compute().item() == pytest.approx(120 / 110, abs=1e-15) and metric.count == 110
    metric.reset()
    assert metric.count == 0


def test_token_loss_adds_up_in_float64() -> None:
    metric = TokenLoss()
    for _ in range(3):
        metric.update(torch.tensor([1e8, 1.0]))
    assert metric.sum.item() == 300_000_003


def test_loss_by_position_names_a_bucket_by_its_last_offset() -> None:
    metric = LossByPosition()
    offset = torch.tensor([[0, 1, 2, 3], [4, 7, 8, 15], [16, -1, 100_000, 0]])
    metric.update(offset.float(), offset)
    metric.update(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert metric.compute() == {0: 0.0, 1: 1.0, 3: 2.5, 7: 5.5, 15: 11.5, 31: 16.0, 131_071: 100_000.0}
    metric.reset()
    assert metric.compute() == {}


@given(st.integers(0, 2**30))
def test_buckets_are_bit_lengths(offset: int) -> None:
    metric = LossByPosition()
    metric.update(torch.tensor([1.0]), torch.tensor([offset]))
    assert list(metric.compute()) == [2 ** offset.bit_length() - 1]


def test_ranks_add_up() -> None:
    """As torchmetrics does it: the states of all ranks, stacked, go through each state's reduction."""
    whole, ranks = LossByPosition(), [LossByPosition(), LossByPosition()]
    for seed, rank in enumerate(ranks):
        generator = torch.Generator().manual_seed(seed)
        loss, offset = torch.rand(50, generator=generator), torch.randint(20, (50,), generator=generator)
        rank.update(loss, offset)
        whole.update(loss, offset)
    merged = LossByPosition()
    for name, reduction in merged._reductions.items():
        assert callable(reduction)
        setattr(merged, name, reduction(torch.stack([getattr(rank, name) for rank in ranks])))
    assert merged.compute() == pytest.approx(whole.compute(), abs=1e-15)


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16(), lambda m: m.half()])
def test_a_cast_of_the_module_around_them_leaves_the_sums(cast: object) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.metric = TokenLoss()

    holder = Holder()
    holder.metric.update(torch.tensor([1.0, 1000.5]))
    cast(holder)  # type: ignore[operator]
    assert holder.metric.sum.dtype == torch.float64 and holder.metric.sum == 1001.5
    holder.metric.reset()
    assert holder.metric.sum.dtype == torch.float64
    assert holder.metric.to("meta").sum.is_meta
