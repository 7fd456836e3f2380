"""Packed rows of real documents for Lightning: training and validation, split by document."""

from typing import Any

import lightning.pytorch as pl

from datamodules.config import DataConfig
from datamodules.corpus import Corpus
from datamodules.loader import RowLoader, RowOrder, TrainingOrder, validation_order
from datamodules.rows import PackedRows
from datamodules.splits import plan_parts
from datamodules.tokenizers import Tokenizer

__all__ = ["PackedRows", "PackedTextDataModule", "RowLoader"]


class PackedTextDataModule(pl.LightningDataModule):
    """Rows for training and validation from one corpus.

    The training loader is one pass over `total_rows` rows, however many epochs of the documents that takes. How far it
    is stands in checkpoints as this module's state, which Lightning restores before it asks for loaders or optimizers.
    Validation rows have labels within documents and best-fit packing whatever the training rows have.

    Args:
        config: `anchor` and `positions` resolved (not `auto`).
        corpus: the documents; made by the same `tokenizer`.
        rows_per_batch: rows of one micro batch on one rank.
        total_rows: rows that the whole training takes, over all ranks and micro batches; a multiple of
            rows_per_batch x ranks.
        seed: of the order of training rows.
        anchor_copies_at_zero: with anchor=every_document, every copy of the anchor at position 0 (the anchor
            strategy).
    Raises:
        ValueError: nothing left to train or validate on, or no full row.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        corpus: Corpus,
        tokenizer: Tokenizer,
        rows_per_batch: int,
        total_rows: int,
        seed: int,
        anchor_copies_at_zero: bool = False,
    ) -> None:
        super().__init__()
        assert config.positions != "auto", "whoever knows the attention strategy resolves data.positions"
        assert corpus.tokenizer_digest == tokenizer.digest, "a store of another tokenizer"
        self.config = config
        self._loader_in_use: RowLoader | None = None
        self._rows_given: int | None = None
        self.rows_per_batch, self.total_rows, self.seed = rows_per_batch, total_rows, seed
        self.training, self.validation = plan_parts(corpus.table, config, tokenizer)
        shared: dict[str, Any] = {"positions": config.positions, "anchor_copies_at_zero": anchor_copies_at_zero}
        self.training_rows = PackedRows(self.training, corpus, tokenizer, labels=config.labels, **shared)
        self.validation_rows = PackedRows(self.validation, corpus, tokenizer, labels="within_document", **shared)

    def train_dataloader(self) -> RowLoader:
        order = TrainingOrder(len(self.training_rows), total=self.total_rows, seed=self.seed)
        if self._rows_given is None and self.trainer and self.trainer.ckpt_path:
            raise ValueError(
                f"{self.trainer.ckpt_path} does not say how many rows its training was given, so it cannot go on with "
                "the next one. Set model.checkpoint to its exported weights to begin a training from them."
            )
        loader = self._loader(self.training_rows, order, rows_given=self._rows_given or 0)
        self._loader_in_use = loader
        assert self.total_rows % loader.rows_per_step == 0, "the last micro batch would be smaller than the others"
        return loader

    def state_dict(self) -> dict[str, int]:
        """Rows given to the training loop, over all ranks, and what they are of: rank 0's state serves all."""
        given = self._loader_in_use.rows_given if self._loader_in_use else self._rows_given or 0
        return {"rows_given": given, "rows_in_plan": len(self.training_rows)}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Goes on from a checkpoint.

        Raises:
            ValueError: it is of other rows.
        """
        if state_dict["rows_in_plan"] != len(self.training_rows):
            raise ValueError(
                f"The checkpoint was trained on a plan of {state_dict['rows_in_plan']} rows, these data settings make "
                f"{len(self.training_rows)}. Resume with the data settings and the corpus of the run that wrote it."
            )
        self._rows_given = state_dict["rows_given"]

    def val_dataloader(self) -> RowLoader:
        world_size = self.trainer.world_size if self.trainer else 1
        return self._loader(self.validation_rows, validation_order(len(self.validation_rows), world_size=world_size))

    def _loader(self, rows: PackedRows, order: RowOrder, rows_given: int = 0) -> RowLoader:
        trainer = self.trainer
        return RowLoader(
            rows,
            order,
            rows_per_batch=self.rows_per_batch,
            rank=trainer.global_rank if trainer else 0,
            world_size=trainer.world_size if trainer else 1,
            workers=self.config.workers,
            rows_given=rows_given,
        )
