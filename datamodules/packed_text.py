"""Packed rows of real documents for Lightning: training and validation, split by document."""

from typing import Any

import lightning.pytorch as pl

from datamodules.config import DataConfig
from datamodules.corpus import Corpus
from datamodules.loader import RowLoader, TrainingOrder, validation_order
from datamodules.rows import PackedRows
from datamodules.splits import plan_parts
from datamodules.tokenizers import Tokenizer

__all__ = ["PackedRows", "PackedTextDataModule", "RowLoader"]


class PackedTextDataModule(pl.LightningDataModule):
    """Rows for training and validation from one corpus.

    The training loader is one pass over `total_rows` rows, however many epochs of the documents that takes.
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
        self.rows_per_batch, self.total_rows, self.seed = rows_per_batch, total_rows, seed
        self.training, self.validation = plan_parts(corpus.table, config)
        shared: dict[str, Any] = {"positions": config.positions, "anchor_copies_at_zero": anchor_copies_at_zero}
        self.training_rows = PackedRows(self.training, corpus, tokenizer, labels=config.labels, **shared)
        self.validation_rows = PackedRows(self.validation, corpus, tokenizer, labels="within_document", **shared)

    def train_dataloader(self) -> RowLoader:
        order = TrainingOrder(len(self.training_rows), total=self.total_rows, seed=self.seed)
        loader = self._loader(self.training_rows, order)
        assert self.total_rows % loader.rows_per_step == 0, "the last micro batch would be smaller than the others"
        return loader

    def val_dataloader(self) -> RowLoader:
        world_size = self.trainer.world_size if self.trainer else 1
        return self._loader(self.validation_rows, validation_order(len(self.validation_rows), world_size=world_size))

    def _loader(self, rows: PackedRows, order: Any) -> RowLoader:
        trainer = self.trainer
        return RowLoader(
            rows,
            order,
            rows_per_batch=self.rows_per_batch,
            rank=trainer.global_rank if trainer else 0,
            world_size=trainer.world_size if trainer else 1,
            workers=self.config.workers,
        )
