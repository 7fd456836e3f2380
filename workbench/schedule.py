"""Runs trials side by side until none is left: starts them as slots become free, watches, tries again, gives up.

waiting --start--> running --ended--> completed
   ^                  |                  or a failure, recorded
   +---- another attempt, where limits.retries has one
"""

import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from workbench.config import to_dict
from workbench.home import read_json, trial_folder
from workbench.launchers.launcher import Ended, Launcher, Need, RunningTrial
from workbench.outcome import GOES_ON, Outcome, Status
from workbench.plan import Trial
from workbench.sweep_options import Limits
from workbench.sweep_table import SweepTable
from workbench.tracking import Tracker
from workbench.trial import TrialSpec
from workbench.trial_runs import beat, close_run, open_run, read_outcome, reopen_run

POLL_SECONDS = 0.1
HEARTBEAT_SECONDS = 30.0


@dataclass(kw_only=True)
class Running:
    """A trial at work."""

    trial: Trial
    run_id: str
    folder: Path
    process: RunningTrial
    attempts: int
    """In this call, this one included."""
    started: float = field(default_factory=time.monotonic)
    beaten: float = field(default_factory=time.monotonic)


@dataclass(kw_only=True)
class Schedule:
    """The trials of one call of `workbench sweep`."""

    tracker: Tracker
    launcher: Launcher
    need: Need
    limits: Limits
    parent: str
    sweep: str
    table: SweepTable
    fail_fast: bool
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    """id() of a trial -> how it ended."""
    runs: dict[int, str] = field(default_factory=dict)
    """id() of a trial -> its run."""
    gave_up: str = ""
    """Why the rest was not started."""
    _running: list[Running] = field(default_factory=list)

    def run(self, trials: list[Trial]) -> None:
        """Runs them all.

        Raises:
            KeyboardInterrupt: Ctrl-C or SIGTERM; every running trial is closed as cancelled first.
        """
        waiting = deque((trial, 1) for trial in trials)
        slots = self.launcher.slots(self.need) if trials else 0
        parent_beaten = time.monotonic()
        try:
            while waiting or self._running:
                while waiting and len(self._running) < slots and not self.gave_up:
                    self._start(*waiting.popleft(), at_once=min(slots, len(trials)))
                if self.gave_up and not self._running:
                    break
                for each in list(self._running):
                    if (outcome := self._look(each)) is None:
                        continue
                    self._running.remove(each)
                    if self._end(each, outcome):
                        waiting.appendleft((each.trial, each.attempts + 1))
                if time.monotonic() - parent_beaten > HEARTBEAT_SECONDS:
                    parent_beaten = time.monotonic()
                    beat(self.tracker, self.parent)
                time.sleep(POLL_SECONDS)
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt)
            self._stop_all("stopped by Ctrl-C or SIGTERM" if stopped else f"the sweep ended: {error}")
            raise

    def _start(self, trial: Trial, attempts: int, *, at_once: int) -> None:
        again = attempts > 1
        if again and self.outcomes[id(trial)].name in GOES_ON:
            run_id = self.runs[id(trial)]
            reopen_run(self.tracker, run_id)
            resume = True
        else:
            fresh = trial if not again else trial.started_anew()
            run_id = open_run(fresh, self.tracker, parent=self.parent, sweep=self.sweep)
            if again:
                self.tracker.set_tags(self.runs[id(trial)], {"superseded_by": run_id})
            resume = fresh.run_id is not None
        self.runs[id(trial)] = run_id
        folder = trial_folder(self.tracker.home, run_id)
        for leftover in ("outcome.json", "status.json"):
            (folder / leftover).unlink(missing_ok=True)
        config = trial.resolved.config
        spec = TrialSpec(
            config=to_dict(config),
            home=str(self.tracker.home),
            run_id=run_id,
            folder=str(folder),
            launcher_pid=os.getpid(),
            resume=resume,
            start_folder=os.getcwd(),
            processes=config.trainer.devices,
            code_version=trial.identity.code,
            at_once=at_once,
        )
        process = self.launcher.start(spec, self.need)
        self._running.append(Running(trial=trial, run_id=run_id, folder=folder, process=process, attempts=attempts))
        self.table.running(trial, None, attempts=attempts)

    def _look(self, each: Running) -> Outcome | None:
        """How it ended, or None while it runs."""
        if (ended := each.process.poll()) is not None:
            return read_outcome(each.folder, ended)
        status = read_json(each.folder / "status.json")
        self.table.running(each.trial, Status(**status) if status else None, attempts=each.attempts)
        now, limit = time.monotonic(), self.limits.timeout_seconds
        if limit is not None and now - each.started > limit:
            each.process.stop()
            outcome = read_outcome(each.folder, each.process.poll() or Ended(exit_code=None))
            if outcome.name == "completed":
                return outcome
            return Outcome(name="timeout", reason=f"took longer than limits.timeout, {limit:g} s", step=outcome.step)
        if now - each.beaten > HEARTBEAT_SECONDS:
            each.beaten = now
            beat(self.tracker, each.run_id)
        return None

    def _end(self, each: Running, outcome: Outcome) -> bool:
        """Closes the run; whether the trial gets another attempt."""
        self.outcomes[id(each.trial)] = outcome
        wall_seconds = time.monotonic() - each.started
        close_run(self.tracker, each.run_id, each.folder, outcome, wall_seconds=wall_seconds)
        again = not self.gave_up and self.limits.tries_again(outcome.name, each.attempts)
        self.table.ended(each.trial, outcome, again=again)
        if again or outcome.name == "completed":
            return again
        mistakes = sum(ended.name == "config" for ended in self.outcomes.values())
        if self.fail_fast:
            self._give_up("--fail-fast")
        elif mistakes >= self.limits.fail_fast_after:
            self._give_up(f"{mistakes} trials failed before their first step (limits.fail_fast_after)")
        return False

    def _give_up(self, why: str) -> None:
        self.gave_up = why
        self._stop_all(f"the sweep stopped: {why}")

    def _stop_all(self, reason: str) -> None:
        """Ends and closes every running trial, whatever becomes of one of them."""
        running, self._running = self._running, []
        for each in running:
            each.process.ask_to_end()  # all at once, so that their graces pass together
        problems: list[Exception] = []
        for each in running:
            each.process.stop()
            left = read_outcome(each.folder, each.process.poll() or Ended(exit_code=None))
            outcome = left if left.name == "completed" else Outcome(name="cancelled", reason=reason, step=left.step)
            self.outcomes[id(each.trial)] = outcome
            try:
                wall_seconds = time.monotonic() - each.started
                close_run(self.tracker, each.run_id, each.folder, outcome, wall_seconds=wall_seconds)
                self.table.ended(each.trial, outcome, again=False)
            except Exception as error:  # the store does not answer; the others are still to be closed
                problems.append(error)
        if problems:
            raise problems[0]
