"""Training through Lightning that stops and goes on sees the rows that an unbroken one sees."""

import lightning.pytorch as pl
import pytest
import torch

from datamodules.config import DataConfig
from datamodules.packed_text import PackedTextDataModule
from modules.batch import PackedBatch

ROWS = 40  # 20 micro batches of 2, which are 10 steps of 2


class Watcher(pl.LightningModule):
    """Trains one number and notes what it is given."""

    def __init__(self, *, asks_for_steps: bool = False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.asks_for_steps = asks_for_steps
        self.notes = []

    def training_step(self, batch: PackedBatch, batch_idx: int):
        assert isinstance(batch, PackedBatch)
        self.notes.append((self.global_step, batch.tokens_BT.tolist()))
        return self.weight * batch.tokens_BT.float().mean()

    def validation_step(self, batch: PackedBatch, batch_idx: int):
        self.log("seen", float(batch.tokens_BT.shape[0]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        if not self.asks_for_steps:
            return optimizer
        # Lightning makes the loaders here, before it restores its loops.
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.fixture
def train(store_of, tokenizer, many_texts, tmp_path):
    corpus = store_of(many_texts)

    def run(steps, checkpoint=None, *, workers=0, accumulate=2, asks_for_steps=False, seed=0):
        config = DataConfig(
            context_length=48, anchor="row_start", positions="continuous", validation_fraction=0.3, workers=workers
        )
        data = PackedTextDataModule(
            config, corpus=corpus, tokenizer=tokenizer, rows_per_batch=2, total_rows=ROWS, seed=seed
        )
        model = Watcher(asks_for_steps=asks_for_steps)
        trainer = pl.Trainer(
            max_steps=steps,
            max_epochs=-1,
            accumulate_grad_batches=accumulate,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            val_check_interval=4,
            check_val_every_n_epoch=None,
        )
        trainer.fit(model, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        path = tmp_path / f"{steps}-{workers}.ckpt"
        trainer.save_checkpoint(path)
        return model, path

    return run


@pytest.mark.parametrize(
    ("workers", "accumulate", "asks_for_steps", "stops"),
    [
        (0, 2, False, (3, 8, 10)),  # two restarts
        (1, 2, False, (4, 10)),
        (4, 1, False, (4, 20)),
        (0, 2, True, (3, 8, 10)),
        (2, 1, True, (4, 5, 20)),
        (0, 1, True, (1, 19, 20)),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_resumed_training_sees_what_an_unbroken_one_sees(train, workers, accumulate, asks_for_steps, stops):
    settings = {"accumulate": accumulate, "asks_for_steps": asks_for_steps}
    unbroken, _ = train(stops[-1], **settings)
    assert len(unbroken.notes) == ROWS // 2
    parts, path = [], None
    for steps in stops:
        model, path = train(steps, path, workers=workers, **settings)
        parts += model.notes
    assert parts == unbroken.notes
    if not asks_for_steps:  # a schedule over other numbers of steps is another schedule
        assert model.weight == unbroken.weight


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_at_its_end_is_given_nothing_more(train):
    _, path = train(10)
    again, _ = train(10, path)
    assert again.notes == []


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_checkpoint_that_fits_no_row_is_refused(train, tmp_path):
    _, path = train(3)
    saved = torch.load(path, weights_only=True)
    assert saved["PackedTextDataModule"]["rows_given"] == 12
    for state, message in (
        (saved["PackedTextDataModule"] | {"rows_in_plan": 3}, "a plan of 3 rows, these data settings make"),
        (saved["PackedTextDataModule"] | {"rows_given": 3}, r"after 3 rows.*2 rows \(trainer\.rows_per_batch"),
        (None, "does not say how many rows its training was given"),
    ):
        changed = dict(saved)
        changed.pop("PackedTextDataModule")
        if state is not None:
            changed["PackedTextDataModule"] = state
        torch.save(changed, tmp_path / "changed.ckpt")
        with pytest.raises(ValueError, match=message):
            train(10, tmp_path / "changed.ckpt")
