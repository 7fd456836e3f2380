import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from datamodules.loader import RowLoader, TrainingOrder, validation_order
from datamodules.packing import plan_rows
from datamodules.rows import PackedRows
from datamodules.splits import PackedPart
from modules.batch import PackedBatch


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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("given", [0, 1, 7, 11, 12])
def test_goes_on_where_the_state_stands(rows, workers, given):
    whole = seen(loader_of(rows))
    first = loader_of(rows, workers=workers)
    batches = iter(first)
    assert seen(next(batches) for _ in range(given)) == whole[:given]
    state = first.state_dict()
    assert state == {"rows_given": 2 * given, "rows_in_plan": 7}  # not what workers have made ahead

    second = loader_of(rows, workers=workers)
    second.load_state_dict(state)
    iter(second)  # as Lightning does, without taking a batch
    assert second.state_dict() == state
    assert len(second) == 12
    assert seen(second) == whole[given:]
    if given < 12:
        assert seen(second) == whole


def test_the_state_fits_another_number_of_ranks(rows):
    one = loader_of(rows, world_size=3, rank=1)
    next(iter(one))
    other = loader_of(rows, world_size=1)
    other.load_state_dict(one.state_dict())
    assert [row for batch in seen(other) for row in batch] == TrainingOrder(7, total=24, seed=3)[6:24].tolist()


def test_a_state_of_other_rows_is_refused(rows):
    with pytest.raises(ValueError, match="a plan of 8 rows, these data settings make 7"):
        loader_of(rows).load_state_dict({"rows_given": 2, "rows_in_plan": 8})
    with pytest.raises(ValueError, match=r"after 3 rows.*2 rows \(trainer\.rows_per_batch x devices\)"):
        loader_of(rows).load_state_dict({"rows_given": 3, "rows_in_plan": 7})


def test_loading_leaves_the_global_random_numbers_alone(rows):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    list(loader_of(rows))
    assert torch.rand(1) == expected


class Watcher(pl.LightningModule):
    """Trains one number and notes what it is given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.notes = []

    def training_step(self, batch: PackedBatch, batch_idx: int):
        assert isinstance(batch, PackedBatch)
        self.notes.append((batch_idx, self.global_step, self.trainer.is_last_batch, *seen([batch])[0]))
        return self.weight * batch.tokens_BT.float().mean()

    def validation_step(self, batch: PackedBatch, batch_idx: int):
        self.log("seen", float(batch.tokens_BT.shape[0]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def trainer_of(tmp_path, steps):
    return pl.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        val_check_interval=4,
        check_val_every_n_epoch=None,
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_twice_resumed_training_sees_what_an_unbroken_one_sees(rows, tmp_path, workers):
    """10 optimizer steps of 2 micro batches = 20 batches of 2 rows, over 6 epochs of 7 rows; validation each 4."""

    def train(steps, checkpoint=None):
        model = Watcher()
        trainer = trainer_of(tmp_path, steps)
        training = loader_of(rows, total=40, workers=workers)
        validation = RowLoader(rows, validation_order(7, world_size=1), rows_per_batch=2, workers=workers)
        trainer.fit(model, training, validation, ckpt_path=checkpoint)
        assert trainer.num_training_batches == 20
        path = tmp_path / f"{steps}.ckpt"
        trainer.save_checkpoint(path)
        return model, path

    unbroken, _ = train(10)
    assert len(unbroken.notes) == 20 and unbroken.notes[-1][2]
    parts, path = [], None
    for steps in (3, 8, 10):
        model, path = train(steps, path)
        parts += model.notes
    assert parts == unbroken.notes
    assert model.weight == unbroken.weight
