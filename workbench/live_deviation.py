"""How far RoPE is from relative while a model trains: the probe on a small fixed sample, every some steps."""

from collections.abc import Callable
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only

from datamodules.corpus import Corpus
from datamodules.packed_text import PackedTextDataModule
from modules.language_model import LanguageModel
from modules.position_probe import Rotation, propagate
from modules.shift_deviation import DeviationSums, ShiftDeviationConfig


class LiveDeviation(lightning.Callback):
    """Logs D as `rotary/shift_deviation`, with `rotary/row_deviation` and `rotary/first_token_share`.

    In the training's own precision and by its rotary policy, `propagated` (a forward pass for each of the two places).
    Costs two forward passes over the sample and draws no random number: training goes on as if it had not been there.
    """

    def __init__(self, config: ShiftDeviationConfig, sample_T: torch.Tensor, *, stop_clock: Callable[[], None]) -> None:
        """Args: when and what; int64 tokens; called whenever measuring took time that is no training."""
        assert config.every is not None
        self.config, self.every, self.sample_T, self.stop_clock = config, config.every, sample_T, stop_clock
        self._seen_step = 0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Before the first step; a resumed run measured there already."""
        self._seen_step = trainer.global_step
        if trainer.global_step == 0:
            self._measure(trainer, pl_module)

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: Any, *rest: Any) -> None:
        """After a step, not after each of its micro batches."""
        step = trainer.global_step
        is_new, self._seen_step = step != self._seen_step, step
        if is_new and (step % self.every == 0 or step == trainer.max_steps):
            self._measure(trainer, pl_module)

    @rank_zero_only
    def _measure(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.logger is None:
            return
        assert isinstance(pl_module, LanguageModel)
        model = pl_module.model
        place_T = torch.arange(len(self.sample_T))
        position_ST = torch.stack([place_T, place_T + self.config.shift]).to(pl_module.device)
        sums = DeviationSums(shifts=1, lengths=[len(self.sample_T)])
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            propagate(
                model,
                self.sample_T.to(pl_module.device),
                position_ST,
                Rotation(precision=model.rotary.precision),
                sums=sums,
                layers=self.config.layers,
            )
        found = sums.result()
        trainer.logger.log_metrics(
            {
                "rotary/shift_deviation": float(found.deviation_SN),
                "rotary/row_deviation": float(found.row_deviation_SN),
                "rotary/first_token_share": float(found.first_token_share_SN),
            },
            step=trainer.global_step,
        )
        self.stop_clock()


def sample_of(data: PackedTextDataModule, corpus: Corpus, *, tokens: int, anchor_id: int) -> torch.Tensor:
    """The anchor token and then the validation documents' tokens, as many as asked for and there are."""
    parts, length = [np.array([anchor_id], np.int64)], 1
    for document in data.validation.documents:
        if length >= tokens:
            break
        parts.append(corpus.document(int(document)).astype(np.int64))
        length += len(parts[-1])
    return torch.from_numpy(np.concatenate(parts)[:tokens])
