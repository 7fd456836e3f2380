"""Trials as processes of this machine, as many at once as its cores or GPUs allow.

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
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

from workbench.errors import UserError
from workbench.home import write_json
from workbench.launchers.host_memory import oom_kills
from workbench.launchers.launcher import Ended, Need
from workbench.trial import TrialSpec, run_in_child

GRACE_SECONDS = 10.0


class LocalLauncher:
    """Starts trials on this machine."""

    name = "local"
    needs_server = False

    def __init__(self) -> None:
        """Nothing starts yet; the first trial waits for the imports."""
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["workbench.preload"])
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._gpus = visible_gpus()
        self._free_gpus = list(self._gpus)

    def slots(self, need: Need) -> int:
        """Cores over `cpus`, GPUs over `gpus`, whichever is less; a CPU trial of unsaid size takes the machine."""
        if need.cpus is not None and need.cpus > self._cores:
            raise UserError(f"resources.cpus={need.cpus}, but this machine has {self._cores}. Ask for fewer.")
        if need.gpus > len(self._gpus):
            raise UserError(f"a trial needs {need.gpus} GPUs, but this machine has {len(self._gpus)}. Ask for fewer.")
        by_cpus = self._cores // need.cpus if need.cpus is not None else None
        by_gpus = len(self._gpus) // need.gpus if need.gpus else None
        return min((count for count in (by_cpus, by_gpus) if count is not None), default=1)

    def start(self, spec: TrialSpec, need: Need) -> "LocalTrial":
        """Starts a trial in its folder, on free GPUs."""
        slots = self.slots(need)
        cpus = need.cpus or (self._cores // slots if slots > 1 else None)
        gpus = [self._free_gpus.pop(0) for _ in range(need.gpus)]
        spec = replace(
            spec,
            threads=max(1, cpus // spec.processes) if cpus else None,
            visible_gpus=",".join(gpus) if gpus else None,
        )
        folder = Path(spec.folder)
        folder.mkdir(parents=True, exist_ok=True)
        spec_file = folder / "trial.json"
        write_json(spec_file, spec.to_dict())
        if spec.processes == 1:
            child = self._context.Process(target=run_in_child, args=(str(spec_file),), name="workbench-trial")
            child.start()
            return LocalTrial(child, gpus, self._free_gpus)
        return LocalTrial(start_interpreter(spec, spec_file), gpus, self._free_gpus)

    def close(self) -> None:
        """Nothing: the forkserver ends with this process."""


def start_interpreter(spec: TrialSpec, spec_file: Path) -> "subprocess.Popen[bytes]":
    """A trial as a fresh interpreter, leader of its own session, its output in its folder's log."""
    environment = dict(os.environ)
    if spec.threads is not None:  # read by OpenMP when torch loads, in every rank
        environment["OMP_NUM_THREADS"] = str(spec.threads)
    if spec.visible_gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = spec.visible_gpus
    with open(Path(spec.folder) / "log.txt", "ab") as log:
        command = [sys.executable, "-m", "workbench.trial", "--spec", str(spec_file)]
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )


class LocalTrial:
    """A running trial, leader of its own session and process group."""

    def __init__(self, process: "BaseProcess | subprocess.Popen[bytes]", gpus: list[str], free_gpus: list[str]) -> None:
        """Args: the started process; the GPUs it holds; where they go back to."""
        self._process = process
        assert process.pid is not None
        self.pid: int = process.pid
        self._gpus, self._free_gpus = gpus, free_gpus
        self._oom_kills_before = oom_kills()
        self._ended: Ended | None = None

    def poll(self) -> Ended | None:
        """How it ended, or None while it runs."""
        if self._ended is None and (code := self._wait(0)) is not None:
            self._ended = Ended(exit_code=code, out_of_host_memory=oom_kills() > self._oom_kills_before)
            self._free_gpus.extend(self._gpus)
        return self._ended

    def ask_to_end(self) -> None:
        """SIGTERM to the group."""
        self._signal(signal.SIGTERM)

    def stop(self) -> None:
        """SIGTERM to the group, grace, SIGKILL to the group."""
        self.ask_to_end()
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and self._wait(0.1) is None:
            pass
        self._signal(signal.SIGKILL)  # whatever of the group is left
        self._wait(GRACE_SECONDS)
        self.poll()

    def _wait(self, timeout_seconds: float) -> int | None:
        if isinstance(self._process, subprocess.Popen):
            try:
                return self._process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                return None
        self._process.join(timeout_seconds)
        return self._process.exitcode

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            if self._wait(0) is None:  # not the leader of its group yet
                os.kill(self.pid, number)


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES knows them."""
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(number) for number in range(count)]
