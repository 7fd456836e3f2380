"""What is watched while training: metrics of each optimizer step, a status file for the launcher, a progress bar."""

import resource
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from modules.batch import PackedBatch
from modules.language_model import LanguageModel
from workbench.home import write_json
from workbench.outcome import Status
from workbench.run_logger import RunLogger


class StepMetrics(lightning.Callback):
    """Logs every `log_every` optimizer steps and after the last.

    Throughput counts all tokens of the rows, anchors and padding included, over the time of the steps since the last
    point, waiting for data included; validation and checkpoints are left out.
    """

    def __init__(self, *, log_every: int, status_file: Path | None = None, progress: Progress | None = None) -> None:
        """Args: steps between points; where to write Status; a bar to move."""
        self.log_every = log_every
        self.status_file = status_file
        self.progress = progress
        self._task: Any = None
        self._since: float | None = None
        self._tokens = 0
        self._status_written = 0.0
        self.status = Status(step=0, max_steps=0)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Starts the bar where training starts, which after a resume is not 0."""
        max_steps = trainer.max_steps
        self.status = replace(self.status, step=trainer.global_step, max_steps=max_steps)
        self._write_status(force=True)
        if self.progress is not None:
            self._task = self.progress.add_task("training", total=max_steps, completed=trainer.global_step, note="")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: PackedBatch, batch_idx: int) -> None:
        """Restarts the clock after an interruption."""
        if self._since is None:
            self._since, self._tokens = time.perf_counter(), 0

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: PackedBatch, batch_idx: int
    ) -> None:
        """Counts a micro batch, and after a step logs it."""
        assert isinstance(pl_module, LanguageModel)
        self._tokens += batch.tokens_BT.numel() * trainer.world_size
        record, pl_module.step_record = pl_module.step_record, None
        step = trainer.global_step
        if record is None or (step % self.log_every and step != trainer.max_steps):
            return
        now = time.perf_counter()
        assert self._since is not None
        tokens_per_second = self._tokens / (now - self._since)
        self._since, self._tokens = now, 0
        metrics = {
            "train/loss": record.loss,
            "train/learning_rate": record.learning_rate,
            "train/gradient_norm": record.gradient_norm,
            "train/targets": record.targets,
            "throughput/tokens_per_second": tokens_per_second,
            "memory/peak_gigabytes": peak_gigabytes(pl_module.device),
            "attention/visible_pair_share": record.visible_pair_share,
        }
        if pl_module.skipped_steps:
            metrics["train/skipped_steps"] = pl_module.skipped_steps
        if trainer.logger is not None:
            trainer.logger.log_metrics(metrics, step=step)
        self._show(step, trainer.max_steps, record.loss, tokens_per_second)

    def stop_clock(self) -> None:
        """The time since the last point is no training alone; the next batch starts the clock anew."""
        self._since = None

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Stops the clock."""
        self.stop_clock()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Notes the validation loss for the launcher's table."""
        self.status = replace(self.status, validation_loss=pl_module.validation_metrics["val/loss"])
        self._write_status(force=True)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Stops the clock, and writes all points first: a resume from this checkpoint never repeats earlier steps."""
        self.stop_clock()
        if isinstance(trainer.logger, RunLogger):
            trainer.logger.save()

    def _show(self, step: int, max_steps: int, loss: float, tokens_per_second: float) -> None:
        self.status = Status(step, max_steps, loss, tokens_per_second, self.status.validation_loss)
        self._write_status(force=step == max_steps)
        if self.progress is not None:
            note = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s"
            self.progress.update(self._task, completed=step, note=note)

    def _write_status(self, *, force: bool) -> None:
        if self.status_file is not None and (force or time.monotonic() - self._status_written > 0.5):
            self._status_written = time.monotonic()
            write_json(self.status_file, asdict(self.status))


def step_progress() -> Progress:
    """A bar that counts optimizer steps."""
    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )


def peak_gigabytes(device: torch.device) -> float:
    """Most memory in use since the start: the device's allocator on CUDA, the process's resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kibibytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
