"""Runs a planned sweep: one parent run, one child run per trial, one process per trial.

    plan -> for each trial that is not done: open its run -> start its process -> watch -> read its outcome -> close its
    run -> report on the parent

The launcher (this process) owns every run's status. A trial that fails is recorded and the others go on.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from workbench.config import to_dict
from workbench.environment import code_version
from workbench.errors import UserError
from workbench.home import read_json, trial_folder
from workbench.launchers.local import LocalLauncher, TrialProcess
from workbench.lost_runs import close_lost_runs
from workbench.outcome import Outcome, Status
from workbench.plan import Plan, Trial
from workbench.sweep_file import Sweep
from workbench.sweep_table import SweepTable
from workbench.tracking import Tracker, tag
from workbench.trial import TrialSpec

POLL_SECONDS = 0.1


@dataclass
class SweepResult:
    """What `run_sweep` did."""

    parent: str
    """The parent run's id."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """Cell name -> outcome, of the trials that ran now."""
    runs: dict[int, str] = field(default_factory=dict)
    """id() of a trial -> its run, of the trials that ran now."""
    changed: bool = False
    """Whether the sweep's report is another one than before."""

    @property
    def failed(self) -> bool:
        """Whether any trial did not complete."""
        return any(outcome.name != "completed" for outcome in self.outcomes.values())


def run_sweep(
    sweep: Sweep, make_plan: Callable[[], Plan], launcher: LocalLauncher, *, tracker: Tracker, fail_fast: bool
) -> SweepResult:
    """Executes a plan, made under the sweep's lock: nobody else finishes a cell in between.

    Args:
        sweep: the file.
        make_plan: decides every cell from the store as it is then.
        launcher: starts the trials.
        tracker: the store and experiment of all trials.
        fail_fast: stop at the first trial that does not complete.
    Raises:
        UserError: the same sweep is running already.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the running trial and the parent are closed as cancelled first.
    """
    with _only_one(tracker.home, sweep.name), _sigterm_as_interrupt():
        close_lost_runs(tracker, {"sweep": sweep.name}, owned=True)
        plan = make_plan()
        result = SweepResult(parent=_open_parent(tracker, sweep, plan))
        to_do = [trial for trial in plan.trials if trial.to_do]
        status, outcome, reason = "FINISHED", "completed", ""
        try:
            with SweepTable(plan) as table:
                for trial in to_do:
                    run_id = _open_run(trial, tracker, result.parent, sweep.name)
                    result.runs[id(trial)] = run_id
                    ended = _run_trial(trial, run_id, tracker, launcher, table)
                    result.outcomes[trial.cell.name] = ended
                    if ended.name == "cancelled":
                        raise KeyboardInterrupt
                    if fail_fast and ended.name != "completed":
                        break
            if result.failed:
                names = [name for name, ended in result.outcomes.items() if ended.name != "completed"]
                status, outcome, reason = "FAILED", "failed", f"did not complete: {', '.join(names)}"
        except KeyboardInterrupt:
            status, outcome, reason = "KILLED", "cancelled", "stopped by Ctrl-C or SIGTERM"
            raise
        except BaseException as error:
            status, outcome, reason = "FAILED", "crash", f"{type(error).__name__}: {error}"
            raise
        finally:
            result.changed = _mark_superseded(tracker, sweep.name, plan, result.runs) or bool(result.runs)
            if tracker.client.get_run(result.parent).info.status != "FINISHED":
                tracker.close(result.parent, status=status, outcome=outcome, reason=reason)
        return result


def find_parent(tracker: Tracker, name: str) -> str | None:
    """The newest parent run of a sweep's name."""
    found = tracker.find({"kind": "sweep", "sweep": name})
    return str(found[0].info.run_id) if found else None


def _open_parent(tracker: Tracker, sweep: Sweep, plan: Plan) -> str:
    """The sweep's parent run: continued where there is one, RUNNING again only if there is something to do."""
    parent = find_parent(tracker, sweep.name)
    if parent is None:
        parent = tracker.create(sweep.name, {"kind": "sweep", "sweep": sweep.name})
    elif any(trial.to_do for trial in plan.trials):
        tracker.reopen(parent)
    tracker.set_tags(parent, {"axes": json.dumps(sweep.axis_keys), "code_version": code_version()})
    tracker.client.log_text(parent, sweep.path.read_text(encoding="utf-8"), "sweep.yaml")
    return parent


def _mark_superseded(tracker: Tracker, sweep: str, plan: Plan, opened: dict[int, str]) -> bool:
    """Leaves one run per cell and seed of the file in the report: the one the plan chose or that ran now.

    Returns:
        Whether any run's mark changed.
    """
    changed = False
    current = {_place(t.cell.axes, t.cell.seed): opened.get(id(t), t.run_id) for t in plan.trials}
    for run in tracker.find({"sweep": sweep, "kind": "trial"}):
        place = _place(json.loads(tag(run, "axes") or "{}"), tag(run, "seed"))
        chosen = current.get(place, "no cell of the sweep file any more")
        if chosen is None:  # not run yet
            continue
        by = "" if chosen == run.info.run_id else chosen
        if tag(run, "superseded_by") != by:
            tracker.set_tags(run.info.run_id, {"superseded_by": by})
            changed = True
    return changed


def _place(axes: dict[str, Any], seed: int | str) -> str:
    return json.dumps([axes, str(seed)], sort_keys=True)


def _run_trial(trial: Trial, run_id: str, tracker: Tracker, launcher: LocalLauncher, table: SweepTable) -> Outcome:
    started = time.monotonic()
    folder = trial_folder(tracker.home, run_id)
    for leftover in ("outcome.json", "status.json"):
        (folder / leftover).unlink(missing_ok=True)
    config = trial.resolved.config
    process = launcher.start(
        TrialSpec(
            config=to_dict(config),
            home=str(tracker.home),
            run_id=run_id,
            folder=str(folder),
            launcher_pid=os.getpid(),
            resume=trial.state == "resume",
            processes=config.trainer.devices,
            code_version=trial.identity.code,
        )
    )
    try:
        code = _watch(process, folder, trial, table)
        outcome = read_outcome(folder, code)
    except KeyboardInterrupt:
        process.stop()
        outcome = Outcome(name="cancelled", reason="stopped by Ctrl-C or SIGTERM")
    _close_run(tracker, run_id, folder, outcome, wall_seconds=time.monotonic() - started)
    table.ended(trial, outcome)
    return outcome


def _open_run(trial: Trial, tracker: Tracker, parent: str, sweep_name: str) -> str:
    if trial.run_id is not None:
        attempt = int(tag(tracker.client.get_run(trial.run_id), "attempt") or 1) + 1
        tracker.reopen(trial.run_id)
        tracker.set_tags(trial.run_id, {"attempt": str(attempt)})
        return trial.run_id
    run_id = tracker.create(
        trial.cell.label,
        {
            "kind": "trial",
            "sweep": sweep_name,
            "cell": trial.cell.name,
            "axes": json.dumps(trial.cell.axes),
            "seed": str(trial.cell.seed),
            "hash": trial.identity.trial,
            "config_hash": trial.identity.config,
            "code_version": trial.identity.code,
            "data_digest": trial.identity.data_digest,
            "attempt": "1",
        },
        parent=parent,
    )
    return run_id


def _watch(process: TrialProcess, folder: Path, trial: Trial, table: SweepTable) -> int:
    while (code := process.wait(POLL_SECONDS)) is None:
        status = read_json(folder / "status.json")
        table.running(trial, Status(**status) if status else None)
    return code


def read_outcome(folder: Path, exit_code: int | None) -> Outcome:
    """What the trial says of its own end; where it could say nothing, what its exit code tells."""
    left = read_json(folder / "outcome.json")
    if left is not None:
        try:
            return Outcome(**left)
        except TypeError:  # written by other code
            return Outcome(name="config", reason="the code changed while the sweep ran")
    if exit_code is not None and exit_code < 0:
        return Outcome(name="lost", reason=f"killed by signal {signal.Signals(-exit_code).name}")
    return Outcome(name="lost", reason=f"ended with exit code {exit_code} and left no outcome")


def _close_run(tracker: Tracker, run_id: str, folder: Path, outcome: Outcome, *, wall_seconds: float) -> None:
    log = folder / "log.txt"
    if log.is_file() and log.stat().st_size:
        tracker.client.log_artifact(run_id, str(log))
    if outcome.traceback:
        tracker.client.log_text(run_id, outcome.traceback, "traceback.txt")
    if outcome.fit_seconds is not None:
        tracker.set_tags(run_id, {"overhead_seconds": f"{wall_seconds - outcome.fit_seconds:.2f}"})
    tracker.close(run_id, status=outcome.status, outcome=outcome.name, reason=outcome.reason)


@contextmanager
def _only_one(home: Path, sweep: str) -> Iterator[None]:
    """One process per sweep at a time; the lock goes with its process, however that ends."""
    lock = FileLock(home / f"sweep-{sweep}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(
            f"the sweep {sweep!r} is running already, in another process of this machine. Wait for it."
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM ends a sweep as Ctrl-C does: trial stopped, runs closed."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
