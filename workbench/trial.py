"""One trial as a process: reads its spec, trains, leaves its outcome in its folder.

    folder/
      trial.json     what to do (TrialSpec)
      log.txt        everything printed
      status.json    step, loss, tokens/s while it runs
      outcome.json   how it ended, written whole or not at all
      checkpoints/

The launcher reads outcome.json and sets the MLflow status: an exit code is a hint at most (Lightning 2.6 exits with 0
after SIGTERM).
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workbench.checkpoints import newest_checkpoint
from workbench.config import RunConfig, resolve
from workbench.environment import code_version
from workbench.home import write_json
from workbench.outcome import Outcome


@dataclass(frozen=True, kw_only=True)
class TrialSpec:
    """Everything a trial needs, as plain JSON values."""

    config: dict[str, Any]
    """The resolved config, nested."""
    home: str
    run_id: str
    folder: str
    launcher_pid: int
    """The trial ends when this process does."""
    resume: bool
    """Whether to go on from the newest checkpoint in the folder, if there is one."""
    code_version: str
    """The launcher's, which is part of the trial's identity."""
    start_folder: str
    """Where relative paths of the config begin; the trial itself works in its own folder."""
    processes: int = 1
    threads: int | None = None
    """Of each process on the CPU; None: torch's own choice."""
    visible_gpus: str | None = None
    """CUDA_VISIBLE_DEVICES; None: as the launcher's."""
    at_once: int = 1
    """Trials that share the machine, this one included: what its speed belongs to."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; loads back equal with TrialSpec(**...)."""
        return asdict(self)

    @property
    def run_config(self) -> RunConfig:
        """The config as dataclasses."""
        return resolve(("", self.config))


def run_in_child(spec_file: str) -> None:
    """Entry of a forkserver child: a session of its own, output to the log, then the trial."""
    os.setsid()
    log = os.open(Path(spec_file).parent / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    sys.exit(run_trial(spec_file))


def run_trial(spec_file: str) -> int:
    """Trains what the spec says; the exit code."""
    spec = TrialSpec(**json.loads(Path(spec_file).read_text(encoding="utf-8")))
    _end_with(spec.launcher_pid)
    os.chdir(spec.start_folder)
    if spec.visible_gpus is not None:  # before CUDA starts in this process
        os.environ["CUDA_VISIBLE_DEVICES"] = spec.visible_gpus
    import torch

    from workbench.run import Prepared, prepare, train
    from workbench.tracking import Tracker

    if spec.threads is not None:
        torch.set_num_threads(spec.threads)

    if code_version() != spec.code_version:
        reason = "the code changed while the sweep ran. Run the sweep again."
        write_json(Path(spec.folder) / "outcome.json", asdict(Outcome(name="config", reason=reason)))
        return 1
    config, home, folder = spec.run_config, Path(spec.home), Path(spec.folder)
    is_first_rank = int(os.environ.get("LOCAL_RANK", "0")) == 0
    checkpoint = newest_checkpoint(folder) if spec.resume else None

    def prepare_here() -> Prepared:
        prepared = prepare(config, home=home, checkpoint=checkpoint)
        if spec.processes == 1:  # other ranks are started from here, and find our packages as this one did
            os.chdir(folder)  # what a library leaves in the current folder stays with the trial
        return prepared

    outcome = train(
        prepare_here,
        tracker=Tracker(home, config.tracking.experiment) if is_first_rank else None,
        run_id=spec.run_id,
        folder=folder,
        status_file=folder / "status.json" if is_first_rank else None,
        at_once=spec.at_once,
    )
    if is_first_rank:
        write_json(folder / "outcome.json", asdict(outcome))
    return 0 if outcome.name == "completed" else 1


def _end_with(launcher_pid: int) -> None:
    """Kills this process group soon after the launcher is gone, so that no orphan trains on unseen."""

    def watch() -> None:
        while is_alive(launcher_pid):
            time.sleep(1.0)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="end-with-launcher").start()


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs (a zombie does not)."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except PermissionError:  # alive, under another user
        return True
    except OSError:  # no /proc on this system
        return True
    return state != "Z"


def main() -> int:
    """`python -m workbench.trial --spec FILE`, for launchers that start a fresh interpreter."""
    parser = argparse.ArgumentParser(prog="python -m workbench.trial")
    parser.add_argument("--spec", required=True, help="trial.json of a trial's folder")
    return run_trial(parser.parse_args().spec)


if __name__ == "__main__":
    sys.exit(main())
