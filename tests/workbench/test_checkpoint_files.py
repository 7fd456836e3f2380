"""A kill or a full disk while a checkpoint is written leaves the previous one, and nothing that looks like a newer."""

import multiprocessing
import os
import resource
import signal
import time

import pytest
import torch

from workbench.checkpoint_files import WholeCheckpoints, remove_leftovers
from workbench.checkpoints import newest_checkpoint


def write(path, size, limit):
    if limit is not None:  # as a full disk: the write itself fails
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        WholeCheckpoints().save_checkpoint({"state_dict": {"w": torch.zeros(size)}}, path)
    except (OSError, RuntimeError):
        os._exit(3)


def in_process(*arguments):
    process = multiprocessing.get_context("spawn").Process(target=write, args=arguments)
    process.start()
    return process


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"
    WholeCheckpoints().save_checkpoint({"state_dict": {"w": torch.ones(4)}}, folder / "step=1.ckpt")
    process = in_process(folder / "step=2.ckpt", 1_000_000, 100_000)
    process.join(60)
    assert process.exitcode == 3
    assert [file.name for file in folder.iterdir()] == ["step=1.ckpt"]


@pytest.mark.slow
def test_a_kill_while_writing_leaves_the_previous_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"
    WholeCheckpoints().save_checkpoint({"state_dict": {"w": torch.ones(4)}}, folder / "step=1.ckpt")
    process = in_process(folder / "step=2.ckpt", 500_000_000, None)
    deadline = time.monotonic() + 60
    while not list(folder.glob(".*")) and time.monotonic() < deadline:
        time.sleep(0.002)
    assert not (folder / "step=2.ckpt").exists(), "the kill has to come while it is being written"
    process.kill()
    process.join(60)
    newest = newest_checkpoint(tmp_path)
    assert newest == folder / "step=1.ckpt"
    assert torch.load(newest, weights_only=True)["state_dict"]["w"].tolist() == [1.0] * 4
    remove_leftovers(tmp_path)
    assert [file.name for file in folder.iterdir()] == ["step=1.ckpt"]
