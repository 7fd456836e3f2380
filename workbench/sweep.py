"""Runs a planned sweep: one parent run, one child run per trial, one process group per trial.

    lock -> close what a killed call left -> plan -> parent run -> schedule -> marks on superseded runs -> parent closed

The launcher (this process) owns every run's status. A trial that fails is recorded and the others go on.
"""

import json
import os
import platform
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from workbench.environment import code_version
from workbench.errors import UserError
from workbench.launchers.launcher import Launcher, Need
from workbench.lost_runs import close_lost_runs
from workbench.outcome import Outcome
from workbench.plan import Plan
from workbench.schedule import Schedule
from workbench.sweep_file import Sweep
from workbench.sweep_table import SweepTable
from workbench.tracking import Tracker, tag
from workbench.trial_runs import beat


@dataclass
class SweepResult:
    """What `run_sweep` did."""

    parent: str
    """The parent run's id."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """Cell name -> outcome, of the trials that ran now."""
    changed: bool = False
    """Whether the sweep's report is another one than before."""
    gave_up: str = ""
    """Why not every trial was started."""

    @property
    def failed(self) -> bool:
        """Whether any trial did not complete."""
        return bool(self.gave_up) or any(outcome.name != "completed" for outcome in self.outcomes.values())


def run_sweep(
    sweep: Sweep, make_plan: Callable[[], Plan], launcher: Launcher, *, tracker: Tracker, fail_fast: bool
) -> SweepResult:
    """Executes a plan, made under the sweep's lock: nobody else finishes a cell in between.

    Args:
        sweep: the file.
        make_plan: decides every cell from the store as it is then.
        launcher: starts the trials.
        tracker: the store and experiment of all trials.
        fail_fast: stop at the first trial that does not complete.
    Raises:
        UserError: the same sweep is running already, or the launcher cannot give a trial what it needs.
        KeyboardInterrupt: Ctrl-C or SIGTERM; running trials and the parent are closed as cancelled first.
    """
    with _only_one(tracker.home, sweep.name), _sigterm_as_interrupt():
        close_lost_runs(tracker, {"sweep": sweep.name}, owned=True)
        plan = make_plan()
        to_do = [trial for trial in plan.trials if trial.to_do]
        need = need_of(sweep, plan)
        launcher.slots(need)  # says now what it cannot give, before a run is opened
        result = SweepResult(parent=_open_parent(tracker, sweep, plan))
        status, outcome, reason = "FINISHED", "completed", ""
        with SweepTable(plan) as table:
            schedule = Schedule(
                tracker=tracker,
                launcher=launcher,
                need=need,
                limits=sweep.limits,
                parent=result.parent,
                sweep=sweep.name,
                table=table,
                fail_fast=fail_fast,
            )
            try:
                schedule.run(to_do)
                result.gave_up = schedule.gave_up
                names = [t.cell.name for t in to_do if _failed(schedule.outcomes.get(id(t)))]
                if names:
                    status, outcome, reason = "FAILED", "failed", f"did not complete: {', '.join(names)}"
            except KeyboardInterrupt:
                status, outcome, reason = "KILLED", "cancelled", "stopped by Ctrl-C or SIGTERM"
                raise
            except BaseException as error:
                status, outcome, reason = "FAILED", "crash", f"{type(error).__name__}: {error}"
                raise
            finally:
                result.outcomes = {
                    trial.cell.name: schedule.outcomes[id(trial)] for trial in to_do if id(trial) in schedule.outcomes
                }
                result.changed = _mark_superseded(tracker, sweep.name, plan, schedule.runs) or bool(schedule.runs)
                if tracker.client.get_run(result.parent).info.status != "FINISHED":
                    tracker.close(result.parent, status=status, outcome=outcome, reason=reason)
        return result


def need_of(sweep: Sweep, plan: Plan) -> Need:
    """What each trial of the sweep takes: `resources`, else a GPU per rank on CUDA and an equal share of the cores."""
    on_cuda = [trial.resolved for trial in plan.trials if trial.resolved.device_type == "cuda"]
    ranks = max((resolved.config.trainer.devices for resolved in on_cuda), default=0)
    gpus = sweep.resources.gpus
    if gpus is not None and gpus < ranks:
        raise UserError(f"{sweep.path}: resources.gpus={gpus}, but trainer.devices={ranks} in some cell. Raise it.")
    return Need(cpus=sweep.resources.cpus, gpus=ranks if gpus is None else gpus)


def _failed(outcome: Outcome | None) -> bool:
    """None: was not started."""
    return outcome is None or outcome.name != "completed"


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
    if any(trial.to_do for trial in plan.trials):
        tracker.set_tags(parent, {"host": platform.node(), "pid": str(os.getpid())})
        beat(tracker, parent)
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
