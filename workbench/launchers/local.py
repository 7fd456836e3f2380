"""Trials as processes of this machine.

A trial on one device is a child of a forkserver that has imported torch, Lightning and MLflow once: it starts in a
tenth of a second where a fresh interpreter needs about nine. A trial on several devices is started by `python -m
workbench.trial`, since Lightning starts the other ranks by running the same command again.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from workbench.home import write_json
from workbench.trial import TrialSpec, run_in_child

GRACE_SECONDS = 10.0


class TrialProcess:
    """A running trial, leader of its own session and process group."""

    def __init__(self, process: "BaseProcess | subprocess.Popen[bytes]") -> None:
        """Args: the started process."""
        self._process = process
        assert process.pid is not None
        self.pid: int = process.pid

    def wait(self, timeout_seconds: float) -> int | None:
        """The exit code (negative: the signal that ended it), or None while it runs."""
        if isinstance(self._process, subprocess.Popen):
            try:
                return self._process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                return None
        self._process.join(timeout_seconds)
        return self._process.exitcode

    def stop(self) -> int | None:
        """SIGTERM to the group, grace, SIGKILL to the group; the exit code."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            code = self.wait(0.1)
            if code is not None:
                break
        self._signal(signal.SIGKILL)  # whatever of the group is left
        return self.wait(GRACE_SECONDS)

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            if self.wait(0) is None:  # not the leader of its group yet
                os.kill(self.pid, number)


class LocalLauncher:
    """Starts trials on this machine, one after another."""

    def __init__(self) -> None:
        """Nothing starts yet; the first trial waits for the imports."""
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["workbench.preload"])

    def start(self, spec: TrialSpec) -> TrialProcess:
        """Starts a trial in its folder."""
        folder = Path(spec.folder)
        folder.mkdir(parents=True, exist_ok=True)
        spec_file = folder / "trial.json"
        write_json(spec_file, spec.to_dict())
        if spec.processes == 1:
            child = self._context.Process(target=run_in_child, args=(str(spec_file),), name="workbench-trial")
            child.start()
            return TrialProcess(child)
        with open(folder / "log.txt", "ab") as log:
            command = [sys.executable, "-m", "workbench.trial", "--spec", str(spec_file)]
            return TrialProcess(
                subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
                )
            )
