"""The LightningModule: a Llama, its loss over packed rows, its optimizer.

The loss of an optimizer step is a sum over targets divided by the number of targets of the whole step, all micro
batches and ranks. Lightning divides by the number of micro batches and DDP takes a mean over ranks; neither knows how
many targets each one had. So every micro batch hands over its sum divided by a constant, and before clipping the
gradients are scaled by what turns that into the true mean.

Shape letters: B rows, T tokens in a row, E width.
"""

import math
from dataclasses import dataclass
from typing import Any

import lightning
import torch
import torch.distributed
from torch import Tensor

from modules.attention.borders import Borders
from modules.batch import NO_TARGET, PackedBatch
from modules.llama import Llama
from modules.loss import cross_entropy_sum, token_losses
from modules.metrics import LossByPosition, TokenLoss, target_offset
from modules.optim import OptimizerConfig, build_optimizer, build_schedule


class NonFiniteLossError(Exception):
    """The loss became NaN or infinite: the run has diverged and going on would only burn time."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, summed over its micro batches and ranks."""

    loss: float
    targets: int
    gradient_norm: float
    learning_rate: float
    visible_pair_share: float
    """Visible pairs over those of full causal attention on the same rows."""


class LanguageModel(lightning.LightningModule):
    """Trains a Llama on PackedBatch rows and scores it on validation rows."""

    def __init__(self, model: Llama, *, optimizer: OptimizerConfig, max_steps: int) -> None:
        """Args: the model; optimizer settings; length of the schedule in steps."""
        super().__init__()
        self.model = model
        self.optimizer_config = optimizer
        self.max_steps = max_steps
        self.skipped_steps = 0
        """Optimizer steps that the float16 gradient scaler left out."""
        self.start_step = 0
        """Where training (re)starts: the step of a validation that runs before Lightning has restored its counters."""
        self.validated_step: int | None = None
        self.step_record: StepRecord | None = None
        """The last finished step; read by callbacks in on_train_batch_end, None between steps."""
        self._gradient_norm: Tensor | None = None
        self._step_loss_sum, self._step_targets = 0.0, 0
        self._reset_step()
        self.validation_metrics: dict[str, float] = {}
        """The last validation's numbers."""
        self.validation_loss = TokenLoss()
        self.validation_first_token_loss = TokenLoss()
        self.validation_loss_by_position = LossByPosition()

    def configure_optimizers(self) -> Any:
        """AdamW and a schedule that moves every optimizer step."""
        optimizer = build_optimizer(self.model, self.optimizer_config)
        schedule = build_schedule(optimizer, self.optimizer_config, max_steps=self.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: PackedBatch, batch_index: int) -> Tensor:
        """The micro batch's loss sum over its number of tokens (a constant; see the file's head)."""
        borders = Borders.of(batch.document_BT)
        hidden_BTE = self.model(batch.tokens_BT, batch.position_BT, borders)
        loss_sum, targets = cross_entropy_sum(hidden_BTE, self.model.head_weight_VE, batch.labels_BT)
        self._loss_and_targets.append(torch.stack([loss_sum.detach().double(), targets.double()]))
        self._tokens += batch.tokens_BT.numel()
        self._visible_pairs += borders.visible_pairs(self.model.strategy)
        self._causal_pairs += batch.tokens_BT.shape[0] * _pairs(batch.tokens_BT.shape[1])
        return loss_sum / batch.tokens_BT.numel()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Scales the gradients from 'sum over tokens, mean over micro batches and ranks' to the mean over targets."""
        step = torch.stack(self._loss_and_targets)
        tokens_per_micro_batch = self._tokens / len(step)
        step = step.sum(dim=0)
        ranks = 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            ranks = torch.distributed.get_world_size()
            torch.distributed.all_reduce(step)
        handed_over_as = tokens_per_micro_batch * self.trainer.accumulate_grad_batches * ranks
        self._step_loss_sum, self._step_targets = float(step[0]), int(step[1])
        factor = handed_over_as / max(self._step_targets, 1)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips by the global norm, which is taken in float32 (a bfloat16 norm has three digits)."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        wide = torch.float64 if parameters[0].dtype == torch.float64 else torch.float32
        norms = [torch.linalg.vector_norm(p.grad, dtype=wide) for p in parameters]
        self._gradient_norm = torch.linalg.vector_norm(torch.stack(norms))
        limit = self.optimizer_config.gradient_clip_norm
        if limit is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, self._gradient_norm)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Lightning's step; under float16's gradient scaler a skipped one is counted."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        scale_before = scaler.get_scale() if scaler is not None else None
        super().optimizer_step(*args, **kwargs)
        if scaler is not None and scaler.get_scale() < scale_before:
            self.skipped_steps += 1
        self._finish_step()

    def _finish_step(self) -> None:
        """Collects the step's numbers for the callbacks."""
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer) and self._gradient_norm is not None
        self.step_record = StepRecord(
            loss=self._step_loss_sum / max(self._step_targets, 1),
            targets=self._step_targets,
            gradient_norm=float(self._gradient_norm),
            learning_rate=float(optimizer.param_groups[0]["lr"]),
            visible_pair_share=self._visible_pairs / self._causal_pairs,
        )
        if not math.isfinite(self.step_record.loss):
            raise NonFiniteLossError(
                f"The training loss became {self.step_record.loss} at step {self.trainer.global_step + 1}. "
                "Lower optimizer.learning_rate, raise optimizer.warmup_steps or use a wider trainer.precision."
            )
        self._reset_step()

    def _reset_step(self) -> None:
        self._loss_and_targets: list[Tensor] = []
        self._tokens = self._visible_pairs = self._causal_pairs = 0

    def validation_step(self, batch: PackedBatch, batch_index: int) -> None:
        """Scores each document's second and later tokens, and its first tokens apart.

        First tokens are predicted from a document's own BOS, where it has one; leaving them out of `val/loss` is what
        makes the number comparable between strategies.
        """
        hidden_BTE = self.model(batch.tokens_BT, batch.position_BT, Borders.of(batch.document_BT))
        loss_BT = token_losses(hidden_BTE, self.model.head_weight_VE, batch.labels_BT)
        offset_BT = target_offset(batch.document_BT, batch.anchor_copy_BT)
        has_target = batch.labels_BT != NO_TARGET
        first, later = has_target & (offset_BT == 0), has_target & (offset_BT >= 1)
        self.validation_loss.update(loss_BT[later])
        self.validation_first_token_loss.update(loss_BT[first])
        self.validation_loss_by_position.update(loss_BT[later], offset_BT[later])

    def on_validation_epoch_end(self) -> None:
        """Hands the metrics to the logger at the current optimizer step."""
        # Every rank takes part in every sum: which metrics there are must not depend on one rank's own rows.
        loss, first = float(self.validation_loss.compute()), float(self.validation_first_token_loss.compute())
        with self.validation_loss.sync_context():
            targets = int(self.validation_loss.count)
        metrics = {"val/loss": loss, "val/perplexity": math.exp(min(loss, 700.0)), "val/targets": targets}
        if not math.isnan(first):  # without a BOS of their own, first tokens are no targets
            metrics["val/loss_first_token"] = first
        by_position = self.validation_loss_by_position.compute()
        metrics |= {f"val/loss_by_position/{last}": float(value) for last, value in by_position.items()}
        for metric in (self.validation_loss, self.validation_first_token_loss, self.validation_loss_by_position):
            metric.reset()
        self.validation_metrics = metrics
        self.validated_step = max(self.trainer.global_step, self.start_step)
        if self.trainer.logger is not None:
            self.trainer.logger.log_metrics(metrics, step=self.validated_step)
        if not math.isfinite(loss):
            raise NonFiniteLossError(f"The validation loss became {loss} at step {self.validated_step}.")


def _pairs(tokens: int) -> int:
    """Pairs of a causal row: every token sees itself and all before it."""
    return tokens * (tokens + 1) // 2
