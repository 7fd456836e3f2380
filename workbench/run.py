"""Trains one config into one MLflow run that exists already, and says how it ended."""

import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.progress import Progress

from datamodules.corpus import Corpus
from datamodules.packed_text import PackedTextDataModule
from modules.language_model import LanguageModel, NonFiniteLossError
from modules.precision import cpu_has_bfloat16_products, precision_plugin
from workbench import build, environment
from workbench.callbacks import StepMetrics
from workbench.checkpoint_files import WholeCheckpoints, remove_leftovers
from workbench.checkpoints import check_checkpoint, checkpoint_step
from workbench.config import RunConfig, flatten, to_dict
from workbench.errors import UserError
from workbench.live_deviation import LiveDeviation, sample_of
from workbench.outcome import Outcome
from workbench.run_logger import RunLogger
from workbench.runs import SHAPE, shape_to_dict
from workbench.tracking import Tracker


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything that training needs, made and checked; no run is touched yet."""

    resolved: build.Resolved
    corpus: Corpus
    module: LanguageModel
    data: PackedTextDataModule
    checkpoint: Path | None

    @property
    def data_digest(self) -> str:
        """Identity of corpus and tokenizer."""
        return self.corpus.digest


def prepare(config: RunConfig, *, home: Path, checkpoint: Path | None = None) -> Prepared:
    """Builds model and data.

    Args:
        config: the experiment.
        home: where token stores live; the corpus is tokenised here if it is not yet.
        checkpoint: where to go on from.
    Raises:
        UserError: whatever is wrong with settings, corpus, tokenizer or checkpoint.
    """
    resolved = build.check(config)
    corpus = build.corpus(resolved, home)
    module, data = build.module(resolved), build.data(resolved, corpus)
    if checkpoint is not None:
        check_checkpoint(checkpoint, module)
        module.start_step = checkpoint_step(checkpoint) or 0
    return Prepared(resolved=resolved, corpus=corpus, module=module, data=data, checkpoint=checkpoint)


def train(
    prepare: Callable[[], Prepared],
    *,
    tracker: Tracker | None,
    run_id: str,
    folder: Path,
    status_file: Path | None = None,
    progress: Progress | None = None,
    at_once: int = 1,
) -> Outcome:
    """Trains to the end, or to whatever stops it; never raises for what happens in between.

    Args:
        prepare: makes what is trained. Its failures are outcomes too.
        tracker: the store; None on ranks other than the first.
        run_id: an MLflow run; its params, metrics and artifacts are written here, its status by the caller.
        folder: the run's own folder, for checkpoints.
        status_file: kept up to date for a launcher to read.
        progress: a bar to move.
        at_once: trials that share the machine, this one included.
    """
    trainer: lightning.Trainer | None = None
    try:
        prepared = prepare()
        logger = None
        if tracker is not None:
            _announce(prepared.resolved)
            _record_start(tracker, run_id, prepared, at_once)
            logger = RunLogger(tracker.client, run_id, folder)
            remove_leftovers(folder)
        trainer = _trainer(prepared, folder, logger, status_file=status_file, progress=progress)
        started = time.monotonic()
        _fit(trainer, prepared)
        fit_seconds = time.monotonic() - started
    except UserError as error:
        return Outcome(name="config", reason=str(error), traceback=traceback.format_exc())
    except (KeyboardInterrupt, SystemExit, SIGTERMException) as error:
        return _stopped(error, trainer)
    except BaseException as error:
        traceback.print_exc()
        step = trainer.global_step if trainer else 0
        return Outcome(
            name=classify(error, step=step),
            reason=f"{type(error).__name__}: {error}",
            traceback=traceback.format_exc(),
            step=step,
        )
    if trainer.global_step < prepared.resolved.config.trainer.max_steps:
        return _stopped(SIGTERMException(), trainer)  # Lightning's fit returns normally after SIGTERM
    return Outcome(
        name="completed",
        step=trainer.global_step,
        validation_loss=prepared.module.validation_metrics["val/loss"],
        fit_seconds=fit_seconds,
    )


HARDWARE = re.compile(
    r"\bECC\b|NCCL (error|failure)|ncclSystemError|ncclInternalError|device-side assert|CUDA error: (?!out of memory)|"
    r"uncorrectable|unspecified launch failure|illegal memory access|GPU has fallen off the bus"
)


def classify(error: BaseException, *, step: int) -> str:
    """The outcome that an exception stands for.

    Args:
        error: what ended the training.
        step: optimizer steps done before.
    """
    text = str(error)
    if isinstance(error, NonFiniteLossError):
        return "diverged"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in text.lower():
        return "oom"
    if "can't allocate memory" in text:  # of torch's allocator on the CPU
        return "oom"
    if isinstance(error, RuntimeError) and HARDWARE.search(text):
        return "hardware"
    if step == 0 and isinstance(error, ImportError | ValueError):
        return "config"
    return "crash"


def _stopped(error: BaseException, trainer: lightning.Trainer | None) -> Outcome:
    """Ctrl-C (which Lightning turns into SystemExit) or a request to end."""
    step = trainer.global_step if trainer else 0
    if isinstance(error, SIGTERMException):
        return Outcome(name="interrupted", reason=f"stopped by SIGTERM at step {step}", step=step)
    return Outcome(name="cancelled", reason=f"stopped by Ctrl-C at step {step}", step=step)


def _fit(trainer: lightning.Trainer, prepared: Prepared) -> None:
    """Validation before the first step, training with validations in between, validation after the last step.

    A resumed run validates where it starts if a validation is due there: the kill may have come between the checkpoint
    and its validation.
    """
    module, data = prepared.module, prepared.data
    path = str(prepared.checkpoint) if prepared.checkpoint else None
    every = prepared.resolved.config.evaluation.every
    if module.start_step == 0 or (every and module.start_step % every == 0):
        trainer.validate(module, datamodule=data, ckpt_path=path, weights_only=True, verbose=False)
    trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=True)
    if trainer.global_step == trainer.max_steps and module.validated_step != trainer.max_steps:
        trainer.validate(module, datamodule=data, verbose=False)


def _trainer(
    prepared: Prepared,
    folder: Path,
    logger: RunLogger | None,
    *,
    status_file: Path | None,
    progress: Progress | None,
) -> lightning.Trainer:
    resolved = prepared.resolved
    config = resolved.config.trainer
    plugin = precision_plugin(config.precision, resolved.bfloat16_products)
    every = resolved.config.evaluation.every or config.max_steps
    step_metrics = StepMetrics(log_every=config.log_every, status_file=status_file, progress=progress)
    callbacks: list[lightning.Callback] = [
        step_metrics,
        *_live_deviation(prepared, step_metrics),
        *_checkpoint_callbacks(folder / "checkpoints", every=config.checkpoint_every, max_steps=config.max_steps),
    ]
    return lightning.Trainer(
        accelerator=resolved.device_type,
        devices=config.devices,
        strategy="ddp" if config.devices > 1 else "auto",
        precision=None if plugin else config.precision,
        plugins=[WholeCheckpoints(), *([plugin] if plugin else [])],
        max_steps=config.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=config.accumulate,
        val_check_interval=every * config.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=logger or False,
        callbacks=callbacks,
        default_root_dir=folder,
        inference_mode=False,  # metrics keep state from validation, which then could not be updated again
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _live_deviation(prepared: Prepared, step_metrics: StepMetrics) -> list[lightning.Callback]:
    """The probe while training, where it is asked for."""
    resolved = prepared.resolved
    config = resolved.config.evaluation.shift_deviation
    if config.every is None:
        return []
    anchor_id = resolved.tokenizer.anchor_id
    sample_T = sample_of(prepared.data, prepared.corpus, tokens=config.tokens, anchor_id=anchor_id)
    return [LiveDeviation(config, sample_T, stop_clock=step_metrics.stop_clock)]


def _checkpoint_callbacks(folder: Path, *, every: int | None, max_steps: int) -> list[lightning.Callback]:
    """The newest checkpoint of every `every` steps, and the last step's (`monitor` would keep a `last` that is not)."""
    steps = {every or max_steps, max_steps} if every is None or max_steps % every else {every}
    return [
        ModelCheckpoint(
            dirpath=folder,
            filename="{step}",
            monitor=None,
            save_top_k=1,
            every_n_train_steps=step,
            save_on_train_epoch_end=False,
        )
        for step in sorted(steps)
    ]


def _announce(resolved: build.Resolved) -> None:
    """Says on standard error what the settings alone do not."""
    if resolved.compilation_leaves_products:
        slow = "" if cpu_has_bfloat16_products() else "; this CPU has no bfloat16 instructions, so steps will be slow"
        print(
            "trainer.compile: products of bfloat16 are torch's own, the float32 ones of trainer.bfloat16_products are "
            f"off{slow}.",
            file=sys.stderr,
        )


def _record_start(tracker: Tracker, run_id: str, prepared: Prepared, at_once: int) -> None:
    """Params, config, environment, dataset: all that is known before the first step."""
    resolved = prepared.resolved
    config = to_dict(resolved.config)
    # Of the model that is trained and not of its config: a scaling that never reached it would show.
    frequencies = {"resolved.inverse_frequencies": prepared.module.model.frequency_digest()}
    tracker.log_params(run_id, {**flatten(config), **resolved.to_params(), **frequencies})
    tracker.client.log_dict(run_id, config, "config.yaml")
    tracker.client.log_dict(run_id, shape_to_dict(resolved.shape), SHAPE)
    surroundings = environment.describe(resolved.device_type)
    tracker.client.log_dict(run_id, surroundings, "environment.json")
    report = build.data_report(resolved, prepared.corpus, prepared.data.training, prepared.data.validation)
    tracker.client.log_dict(run_id, report, "packing.json")
    tracker.set_tags(
        run_id,
        {
            "kernel": resolved.kernel,
            "device": resolved.device_type,
            "compile": str(resolved.config.trainer.compile).lower(),
            "device_name": _speed_device(surroundings, at_once),
            "host": surroundings["host"],
            "pid": str(os.getpid()),
        },
    )
    tracker.log_dataset(
        run_id,
        name="+".join(prepared.corpus.stores),
        digest=prepared.data_digest,
        source=" ".join(each.corpus for each in resolved.data.sources.values()) or resolved.data.corpus,
        profile=report,
    )


def _speed_device(surroundings: dict[str, Any], at_once: int) -> str:
    """What a speed belongs to: the device, on a CPU how many threads it used, and who shared the machine."""
    parts = [str(surroundings["device_name"])]
    if surroundings["device"] == "cpu":
        parts.append(f"{surroundings['threads']} threads")
        if at_once > 1:
            parts.append(f"{at_once} trials at once")
    return ", ".join(parts)
