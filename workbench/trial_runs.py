"""The MLflow run of one trial: opened before its process starts, closed by what the process left behind."""

import json
import platform
import signal
import time
from pathlib import Path

from workbench.home import read_json
from workbench.launchers.launcher import Ended
from workbench.outcome import Outcome
from workbench.plan import Trial
from workbench.tracking import Tracker, tag


def open_run(trial: Trial, tracker: Tracker, *, parent: str, sweep: str) -> str:
    """The run that the trial goes on with, RUNNING again, or a new one; its id."""
    if trial.run_id is not None:
        reopen_run(tracker, trial.run_id)
        return trial.run_id
    return tracker.create(trial.cell.label, {**identity_tags(trial, sweep), "attempt": "1", **_beat()}, parent=parent)


def reopen_run(tracker: Tracker, run_id: str) -> None:
    """RUNNING again, as a further attempt."""
    attempt = int(tag(tracker.client.get_run(run_id), "attempt") or 1) + 1
    tracker.reopen(run_id)
    tracker.set_tags(run_id, {"attempt": str(attempt), **_beat()})


def identity_tags(trial: Trial, sweep: str) -> dict[str, str]:
    """What a trial is, whoever runs it."""
    return {
        "kind": "trial",
        "sweep": sweep,
        "cell": trial.cell.name,
        "axes": json.dumps(trial.cell.axes),
        "seed": str(trial.cell.seed),
        "hash": trial.identity.trial,
        "config_hash": trial.identity.config,
        "code_version": trial.identity.code,
        "data_digest": trial.identity.data_digest,
    }


def beat(tracker: Tracker, run_id: str) -> None:
    """Says that somebody still looks after a RUNNING run, and who."""
    tracker.set_tags(run_id, _beat())


def _beat() -> dict[str, str]:
    return {"heartbeat": str(int(time.time())), "launcher_host": platform.node()}


def read_outcome(folder: Path, ended: Ended) -> Outcome:
    """What the trial says of its own end; where it could say nothing, what the evidence tells."""
    left = read_json(folder / "outcome.json")
    if left is not None:
        try:
            return Outcome(**left)
        except TypeError:  # written by other code
            return Outcome(name="config", reason="the code changed while the sweep ran")
    code, step = ended.exit_code, int((read_json(folder / "status.json") or {}).get("step", 0))
    if ended.lost_why:
        return Outcome(name="lost", reason=ended.lost_why, step=step)
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        if code == -signal.SIGKILL and ended.out_of_host_memory:
            reason = "the machine's memory was full, and the kernel killed it"
            return Outcome(name="host_oom", reason=reason, step=step)
        return Outcome(name="lost", reason=f"killed by signal {name}", step=step)
    if code:  # an exception where the trial could not record it; its log has it
        last = next(reversed(_lines(folder / "log.txt")), "it printed nothing")
        return Outcome(name="crash", reason=f"ended with exit code {code}: {last}", step=step)
    return Outcome(name="lost", reason=f"ended with exit code {code} and left no outcome", step=step)


def _lines(log: Path) -> list[str]:
    """What a log holds in its last 4 kB, line by line."""
    try:
        text = log.read_bytes()[-4096:].decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]


def close_run(tracker: Tracker, run_id: str, folder: Path, outcome: Outcome, *, wall_seconds: float) -> None:
    """The run's end, its log and traceback as artifacts."""
    log = folder / "log.txt"
    if log.is_file() and log.stat().st_size:
        tracker.client.log_artifact(run_id, str(log))
    if outcome.traceback:
        tracker.client.log_text(run_id, outcome.traceback, "traceback.txt")
    if outcome.fit_seconds is not None:
        tracker.set_tags(run_id, {"overhead_seconds": f"{wall_seconds - outcome.fit_seconds:.2f}"})
    tracker.close(run_id, status=outcome.status, outcome=outcome.name, reason=outcome.reason)
