"""What a dead trial is called, from the evidence it and the system left."""

import json
import signal

import pytest
import torch

from modules.language_model import NonFiniteLossError
from workbench.launchers.launcher import Ended
from workbench.outcome import STATUS_OF
from workbench.run import classify
from workbench.trial_runs import read_outcome


@pytest.mark.parametrize(
    ("ended", "name", "reason"),
    [
        (Ended(exit_code=-signal.SIGKILL), "lost", "SIGKILL"),
        (Ended(exit_code=-signal.SIGKILL, out_of_host_memory=True), "host_oom", "memory was full"),
        (Ended(exit_code=-signal.SIGSEGV, out_of_host_memory=True), "lost", "SIGSEGV"),
        (Ended(exit_code=0), "lost", "left no outcome"),
        (Ended(exit_code=None, lost_why="its node died"), "lost", "its node died"),
        (Ended(exit_code=1), "crash", "ImportError: no such thing"),
    ],
)
def test_without_a_word_of_its_own(tmp_path, ended, name, reason):
    (tmp_path / "log.txt").write_text("Traceback\n  ImportError: no such thing\n\n")
    (tmp_path / "status.json").write_text(json.dumps({"step": 7, "max_steps": 9}))
    outcome = read_outcome(tmp_path, ended)
    assert (outcome.name, outcome.step) == (name, 7) and reason in outcome.reason


def test_its_own_word_counts_before_the_exit_code(tmp_path):
    (tmp_path / "outcome.json").write_text(json.dumps({"name": "interrupted", "step": 3}))
    assert read_outcome(tmp_path, Ended(exit_code=0)).name == "interrupted"
    (tmp_path / "outcome.json").write_text(json.dumps({"name": "completed", "of": "other code"}))
    assert read_outcome(tmp_path, Ended(exit_code=0)).name == "config"


@pytest.mark.parametrize(
    ("error", "step", "name"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 3, "oom"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"), 0, "oom"),
        (RuntimeError("CUDA error: out of memory"), 1, "oom"),
        (MemoryError(), 1, "oom"),
        (RuntimeError("CUDA error: device-side assert triggered"), 2, "hardware"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), 2, "hardware"),
        (RuntimeError("NCCL error: unhandled system error"), 0, "hardware"),
        (NonFiniteLossError("loss is nan at step 3"), 3, "diverged"),
        (ImportError("no flash_attn"), 0, "config"),
        (ValueError("a wrong setting"), 0, "config"),
        (ValueError("in step 5"), 4, "crash"),
        (RuntimeError("shapes do not fit"), 0, "crash"),
    ],
)
def test_what_an_exception_stands_for(error, step, name):
    assert classify(error, step=step) == name and name in STATUS_OF
