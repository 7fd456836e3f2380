import numpy as np
import pytest
import torch

from datamodules.loader import RowLoader, TrainingOrder, validation_order
from datamodules.packing import plan_rows
from datamodules.rows import PackedRows
from datamodules.splits import PackedPart


@pytest.fixture
def rows(store_of, tokenizer):
    """7 rows, each a document of its own, told apart by their second token: 0, 1, ... as ASCII letters from a."""
    store = store_of([chr(ord("a") + i) * 8 for i in range(7)])
    plan = plan_rows(
        store.lengths, context_length=10, anchor="row_start", packing="concatenate", long_documents="split", tail="drop"
    )
    part = PackedPart(np.arange(7), plan)
    return PackedRows(part, store, tokenizer, positions="continuous", labels="within_document")


def seen(batches):
    return [(batch.tokens_BT[:, 1] - ord("a")).tolist() for batch in batches]


def loader_of(rows, total=24, seed=3, **options):
    return RowLoader(rows, TrainingOrder(len(rows), total=total, seed=seed), rows_per_batch=2, **options)


def test_every_epoch_is_a_permutation_of_its_own():
    order = TrainingOrder(7, total=28, seed=3)
    epochs = order[0:28].reshape(4, 7)
    assert (np.sort(epochs) == np.arange(7)).all()
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 4
    assert order[5:9].tolist() == [order[i : i + 1].item() for i in range(5, 9)]
    assert order[28:30].size == 0 and len(order) == 28
    assert TrainingOrder(7, total=28, seed=4)[0:7].tolist() != epochs[0].tolist()
    assert TrainingOrder(7, total=9, seed=3)[0:9].tolist() == order[0:9].tolist()


def test_the_order_is_the_one_that_runs_have_seen_before():
    """A literal, since a changed order breaks resuming older runs."""
    assert TrainingOrder(5, total=10, seed=0)[0:10].tolist() == [2, 4, 3, 0, 1, 1, 4, 3, 0, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_follow_the_order(rows, workers):
    loader = loader_of(rows, workers=workers)
    order = TrainingOrder(7, total=24, seed=3)[0:24]
    assert seen(loader) == order.reshape(12, 2).tolist()
    assert len(loader) == 12
    assert seen(loader) == order.reshape(12, 2).tolist()  # from the start again


def test_ranks_share_no_row_and_miss_none(rows):
    one = seen(RowLoader(rows, TrainingOrder(7, total=24, seed=3), rows_per_batch=6))
    ranks = [seen(loader_of(rows, rank=rank, world_size=3)) for rank in range(3)]
    for step, batch in enumerate(one):
        assert sorted(row for rank in ranks for row in rank[step]) == sorted(batch)
        assert ranks[1][step] == batch[1::3]


def test_validation_gives_every_rank_as_many_batches(rows):
    order = validation_order(7, world_size=2)
    loaders = [RowLoader(rows, order, rows_per_batch=3, rank=rank, world_size=2) for rank in range(2)]
    batches = [list(loader) for loader in loaders]
    assert [batch.tokens_BT.shape[0] for batch in batches[0]] == [3, 1] == [len(b.tokens_BT) for b in batches[1]]
    assert seen(batches[0]) == [[0, 2, 4], [6]]
    assert seen(batches[1][:1]) == [[1, 3, 5]]
    assert (batches[1][1].document_BT == -1).all() and (batches[1][1].labels_BT == -100).all()
    assert seen(RowLoader(rows, validation_order(7, world_size=1), rows_per_batch=4)) == [[0, 1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("given", [0, 1, 7, 12])
def test_goes_on_where_it_stood(rows, workers, given):
    whole = seen(loader_of(rows))
    first = loader_of(rows, workers=workers)
    batches = iter(first)
    assert seen(next(batches) for _ in range(given)) == whole[:given]
    assert first.rows_given == 2 * given  # not what workers have made ahead

    second = loader_of(rows, workers=workers, rows_given=first.rows_given)
    iter(second)  # as Lightning does, without taking a batch
    assert second.rows_given == 2 * given
    assert len(second) == 12
    assert seen(second) == whole[given:]
    if given < 12:
        assert seen(second) == whole


def test_goes_on_with_another_number_of_ranks(rows):
    one = loader_of(rows, world_size=3, rank=1)
    next(iter(one))
    other = loader_of(rows, world_size=1, rows_given=one.rows_given)
    assert [row for batch in seen(other) for row in batch] == TrainingOrder(7, total=24, seed=3)[6:24].tolist()


def test_a_place_between_two_batches_is_refused(rows):
    with pytest.raises(ValueError, match=r"after 3 rows.*2 rows \(trainer\.rows_per_batch x devices\)"):
        loader_of(rows, rows_given=3)


def test_ten_documents_over_two_ranks_with_two_workers_come_once_each(store_of, tokenizer):
    store = store_of([chr(ord("a") + i) * 8 for i in range(10)])
    plan = plan_rows(
        store.lengths, context_length=10, anchor="row_start", packing="one_per_row", long_documents="split", tail="drop"
    )
    ten = PackedRows(
        PackedPart(np.arange(10), plan), store, tokenizer, positions="continuous", labels="within_document"
    )
    order = TrainingOrder(10, total=10, seed=5)
    loaders = [RowLoader(ten, order, rows_per_batch=1, rank=rank, world_size=2, workers=2) for rank in range(2)]
    given = [[row for batch in seen(loader) for row in batch] for loader in loaders]
    assert [len(rows) for rows in given] == [5, 5]
    assert sorted(given[0] + given[1]) == list(range(10))


def test_loading_leaves_the_global_random_numbers_alone(rows):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    list(loader_of(rows))
    assert torch.rand(1) == expected
