"""Sums over batches and ranks, and where targets stand, in literal arrays."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from modules.metrics import LossByPosition, TokenLoss, target_offset

A = 9  # the anchor token

pytestmark = pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")


@pytest.mark.parametrize(
    ("tokens", "document", "expected"),
    [
        # A document's own copy of the anchor does not count ...
        ([A, 1, 2, 3, A, 4, 5, 6], [1, 1, 1, 1, 2, 2, 2, 2], [0, 1, 2, -1, 0, 1, 2, -1]),
        # ... and without one the first token has offset 0 too, though nothing in the document predicts it.
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 1, 1, 2, 2, 2, 2, 2], [1, 2, -1, 1, 2, 3, 4, -1]),
        # Mixed: a piece that goes on from the row before has no copy.
        ([1, 2, A, 3, 4, 5, A, 6], [1, 1, 2, 2, 2, 2, 3, 3], [1, -1, 0, 1, 2, -1, 0, -1]),
        # The shared anchor predicts nothing and does not belong to the first document.
        ([A, 1, 2, 3, 4, 5, 6, 7], [0, 1, 1, 1, 2, 2, 2, 2], [-1, 1, 2, -1, 1, 2, 3, -1]),
        # Padding, documents of one token, the anchor's token inside a document.
        ([A, 1, A, A, 2, A, 0, 0], [1, 1, 2, 3, 3, 3, -1, -1], [0, -1, -1, 0, 1, -1, -1, -1]),
        # A document in two pieces is counted piece by piece.
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 1, 1, 2, 2, 1, 1, 1], [1, 2, -1, 1, -1, 1, 2, -1]),
    ],
)
def test_target_offset(tokens: list[int], document: list[int], expected: list[int]) -> None:
    got = target_offset(torch.tensor([tokens]), torch.tensor([document], dtype=torch.int32), A)
    assert got.dtype == torch.int64 and got.tolist() == [expected]


def test_target_offset_of_several_rows_and_without_anchor() -> None:
    tokens, document = torch.tensor([[A, 1, 2], [A, 1, 2]]), torch.tensor([[1, 1, 1], [1, 2, 2]])
    assert target_offset(tokens, document, A).tolist() == [[0, 1, -1], [-1, 1, -1]]
    assert target_offset(tokens, document, None).tolist() == [[1, 2, -1], [-1, 1, -1]]


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=6), st.booleans(), st.integers(0, 3))
def test_target_offset_of_any_row(documents: list[tuple[int, bool]], shared: bool, padding: int) -> None:
    """Rows built with their offsets at hand."""
    tokens, numbers, offsets = ([A], [0], [0]) if shared else ([], [], [])
    for number, (length, copy) in enumerate(documents, start=1):
        tokens += [A] * copy + [1] * length
        numbers += [number] * (copy + length)
        offsets += [-1] * copy + list(range(length))
    tokens, numbers, offsets = tokens + [A] * padding, numbers + [-1] * padding, offsets + [0] * padding
    expected = [
        offsets[t + 1] if t + 1 < len(tokens) and numbers[t] == numbers[t + 1] > 0 else -1 for t in range(len(tokens))
    ]
    assert target_offset(torch.tensor([tokens]), torch.tensor([numbers]), A).tolist() == [expected]


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
