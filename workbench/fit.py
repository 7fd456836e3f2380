"""One experiment in this process: `workbench fit CONFIG [key=value ...] [--resume [RUN]]`."""

import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.callbacks import step_progress
from workbench.checkpoints import newest_checkpoint
from workbench.config import RunConfig, flatten, to_dict
from workbench.errors import UserError
from workbench.home import trial_folder
from workbench.identity import FREE_OF_IDENTITY, identity
from workbench.lost_runs import close_lost_runs
from workbench.outcome import Outcome
from workbench.run import Prepared, prepare, train
from workbench.tracking import Tracker, param_text, tag
from workbench.trial import is_alive

if TYPE_CHECKING:
    from mlflow.entities import Run

NEWEST = "newest"
"""--resume without a run."""


def fit(config: RunConfig, *, home: Path, resume: str | None) -> tuple[str, Outcome]:
    """Trains a config in a run of its own, or goes on with an earlier one.

    Args:
        config: the experiment.
        home: where runs live.
        resume: None for a new run; a run's id, or NEWEST for this config's latest.
    Returns:
        The run's id and how it ended.
    Raises:
        UserError: anything wrong with the config, its data or the run to go on with. Nothing is written then.
    """
    if config.trainer.devices > 1:
        raise UserError(
            f"trainer.devices={config.trainer.devices}: fit trains on one device. Put the config in a sweep file "
            "(base: this file, seeds: [0]) and run `workbench sweep`, which starts the other ranks."
        )
    earlier = _earlier_run(config, home, resume) if resume else None
    checkpoint = newest_checkpoint(trial_folder(home, earlier.info.run_id)) if earlier else None
    prepared = prepare(config, home=home, checkpoint=checkpoint)
    if earlier is not None:
        _check_same_experiment(earlier, prepared)
    tracker = Tracker(home, config.tracking.experiment)
    close_lost_runs(tracker, {"kind": "fit"}, owned=False)
    run_id = _open_run(tracker, prepared, earlier)
    folder = trial_folder(home, run_id)
    folder.mkdir(parents=True, exist_ok=True)
    if earlier is not None:
        where = f"goes on from {checkpoint}" if checkpoint else "has no checkpoint yet and starts again from step 0"
        print(f"run {run_id} {where}", file=sys.stderr)
    with step_progress() as progress:
        outcome = train(lambda: prepared, tracker=tracker, run_id=run_id, folder=folder, progress=progress)
    if outcome.traceback:
        tracker.client.log_text(run_id, outcome.traceback, "traceback.txt")
    tracker.close(run_id, status=outcome.status, outcome=outcome.name, reason=outcome.reason)
    return run_id, outcome


def _open_run(tracker: Tracker, prepared: Prepared, earlier: "Run | None") -> str:
    config = prepared.resolved.config
    here = {"host": platform.node(), "pid": str(os.getpid())}
    if earlier is not None:
        attempt = str(int(tag(earlier, "attempt") or 1) + 1)
        tracker.reopen(earlier.info.run_id)
        tracker.set_tags(earlier.info.run_id, {**here, "attempt": attempt})
        return str(earlier.info.run_id)
    known = identity(
        config,
        data_digest=prepared.data_digest,
        checkpoint_digest=prepared.resolved.checkpoint_digest,
        device_type=prepared.resolved.device_type,
    )
    tags = {
        "kind": "fit",
        "seed": str(config.seed),
        "hash": known.trial,
        "config_hash": known.config,
        "code_version": known.code,
        "data_digest": known.data_digest,
        "attempt": "1",
    }
    return tracker.create(config.name, {**tags, **here})


def _earlier_run(config: RunConfig, home: Path, resume: str) -> "Run":
    from mlflow.exceptions import MlflowException

    tracker = Tracker.existing(home, config.tracking.experiment)
    if tracker is None:
        raise UserError(f"--resume: there is no run in {home} yet.")
    close_lost_runs(tracker, {"kind": "fit"}, owned=False)
    if resume == NEWEST:
        found = [run for run in tracker.find({"kind": "fit"}) if run.info.run_name == config.name]
        if not found:
            raise UserError(f"--resume: no run named {config.name!r} in {home}. Name one: --resume RUN_ID.")
        run = found[0]
    else:
        try:
            run = tracker.client.get_run(resume)
        except MlflowException as error:
            raise UserError(f"--resume {resume}: no such run in {home}.") from error
        if tag(run, "kind") != "fit":
            raise UserError(f"--resume {resume}: belongs to a sweep. Run `workbench sweep` again to go on with it.")
    if run.info.status == "FINISHED" and tag(run, "outcome") == "completed":
        raise UserError(f"--resume: run {run.info.run_id} is complete. Leave --resume out to start a new one.")
    alive = tag(run, "host") == platform.node() and tag(run, "pid").isdigit() and is_alive(int(tag(run, "pid")))
    if run.info.status == "RUNNING" and alive:
        raise UserError(f"--resume: run {run.info.run_id} is still training, in process {tag(run, 'pid')}.")
    return run


def _check_same_experiment(run: "Run", prepared: Prepared) -> None:
    """A run's params say what it is; going on with others would make them lie."""
    # The tag `compile` says how the last attempt ran: what it trains is the same, up to rounding.
    free = {".".join(path) for path in FREE_OF_IDENTITY} | {"trainer.compile"}
    before = {key: value for key, value in run.data.params.items() if not key.startswith("resolved.")}
    now = {key: param_text(value) for key, value in flatten(to_dict(prepared.resolved.config)).items()}
    changed = [
        f"{key} was {before.get(key, 'not set')} and is now {now.get(key, 'not set')}"
        for key in {**before, **now}
        if before and before.get(key) != now.get(key) and key not in free and not key.startswith("tracking.")
    ]
    if tag(run, "data_digest") not in ("", prepared.data_digest):
        changed.append("the corpus or tokenizer has other content")
    started_from = run.data.params.get("resolved.checkpoint_digest")
    if before and started_from != prepared.resolved.to_params().get("resolved.checkpoint_digest"):
        changed.append("model.checkpoint has other content")
    if changed:
        raise UserError(
            f"--resume: run {run.info.run_id} is another experiment: {'; '.join(changed)}. "
            "Resume with its own settings, or start a new run without --resume."
        )
