"""A run that is killed and resumed is the run that was never killed."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import yaml
from mlflow.tracking import MlflowClient

from workbench.checkpoints import checkpoint_step, newest_checkpoint
from workbench.cli import main
from workbench.tracking import Tracker, store_uri, tag

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def experiment(tmp_path, tiny):
    def write(name, **trainer):
        file = tmp_path / f"{name}.yaml"
        tree = {**tiny, "trainer": {**tiny["trainer"], **trainer}, "evaluation": {"every": 15}}
        file.write_text(yaml.safe_dump(tree))
        return file

    return write


def fits(home: Path) -> tuple[MlflowClient, dict]:
    client = MlflowClient(store_uri(home))
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return client, {run.info.run_id: run for run in client.search_runs(experiments)}


def points(client, run_id, key):
    return sorted((p.step, p.value) for p in client.get_metric_history(run_id, key))


def kill_after(process: subprocess.Popen, home: Path, step: int) -> None:
    """Kills a fit with SIGKILL once a checkpoint of at least that step is there."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        steps = [checkpoint_step(path) or 0 for path in home.glob("trials/*/checkpoints/step=*.ckpt")]
        if max(steps, default=0) >= step:
            process.kill()
            process.wait()
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.002)
    raise AssertionError("no checkpoint in time")


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.slow), "bf16-true"])
def test_killed_twice_and_resumed_equals_unbroken(home, tmp_path, experiment, precision, start):
    """Every later step's loss is bit-identical, in one MLflow run without a double point."""
    steps = 60
    file = experiment("run", max_steps=steps, checkpoint_every=4, precision=precision)
    assert main(["fit", str(file)]) == 0
    client, runs = fits(home)
    (unbroken,) = runs
    expected = {key: points(client, unbroken, key) for key in ("train/loss", "train/gradient_norm", "val/loss")}
    assert [step for step, _ in expected["train/loss"]] == list(range(1, steps + 1))
    assert [step for step, _ in expected["val/loss"]] == [0, 15, 30, 45, 60]

    broken_home = tmp_path / "broken"
    kill_after(start("fit", str(file), home=broken_home), broken_home, 12)
    kill_after(start("fit", str(file), "--resume", home=broken_home), broken_home, 28)
    os.environ["WORKBENCH_HOME"] = str(broken_home)  # the home fixture restores it
    assert main(["fit", str(file), "--resume"]) == 0
    client, runs = fits(broken_home)
    ((run_id, run),) = runs.items()
    assert (run.info.status, tag(run, "outcome"), tag(run, "attempt")) == ("FINISHED", "completed", "3")
    for key, values in expected.items():
        assert points(client, run_id, key) == values, key


def test_a_checkpoint_of_another_shape_is_refused(home, experiment, capsys, start):
    file = experiment("run", max_steps=400, checkpoint_every=2)
    kill_after(start("fit", str(file), home=home), home, 4)
    _, before = fits(home)
    capsys.readouterr()
    assert main(["fit", str(file), "model.overrides={width: 48, layers: 2}", "--resume"]) == 2
    message = capsys.readouterr().err
    assert "another shape" in message and "Traceback" not in message and ".ckpt" in message
    assert main(["fit", str(file), "model.overrides={rope_theta: 500.0}", "--resume"]) == 2
    assert "model.overrides.rope_theta was not set and is now 500.0" in capsys.readouterr().err
    assert main(["fit", str(file), "--resume", "optimizer.learning_rate=1"]) == 2
    assert "optimizer.learning_rate was 0.003 and is now 1.0" in capsys.readouterr().err
    _, after = fits(home)
    (run,) = after.values()
    assert run.data.params == next(iter(before.values())).data.params
    assert (run.info.status, tag(run, "outcome")) == ("KILLED", "lost"), "what the killed run now says of itself"


def test_broken_and_foreign_checkpoints_are_refused(home, experiment, capsys, start):
    """A file cut short, and one that would run code if it were unpickled."""
    file = experiment("run", max_steps=400, checkpoint_every=2)
    kill_after(start("fit", str(file), home=home), home, 4)
    (trial,) = (home / "trials").iterdir()
    checkpoint = newest_checkpoint(trial)
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[: len(whole) // 2])
    assert main(["fit", str(file), "--resume"]) == 2
    assert "no checkpoint that can be read" in capsys.readouterr().err

    class Evil:
        def __reduce__(self):
            return (Path.touch, (home / "pwned",))

    torch.save({"state_dict": Evil()}, checkpoint)
    assert main(["fit", str(file), "--resume"]) == 2
    assert "no checkpoint that can be read" in capsys.readouterr().err
    assert not (home / "pwned").exists()


def test_a_complete_run_is_not_resumed(home, experiment, capsys):
    file = experiment("run")
    assert main(["fit", str(file)]) == 0
    _, runs = fits(home)
    (run_id,) = runs
    for words in (["--resume"], ["--resume", run_id]):
        capsys.readouterr()
        assert main(["fit", str(file), *words]) == 2
        assert "complete" in capsys.readouterr().err
    assert main(["fit", str(file), "--resume", "nonsense"]) == 2
    tracker = Tracker(home, "workbench")
    parent = tracker.create("a sweep", {"kind": "sweep"})
    capsys.readouterr()
    assert main(["fit", str(file), "--resume", parent]) == 2
    assert "belongs to a sweep" in capsys.readouterr().err
    tracker.client.delete_run(parent)
    assert main(["fit", str(file)]) == 0  # fit never skips
    assert len(fits(home)[1]) == 2


def test_ctrl_c_in_a_fit_is_recorded(home, experiment, start):
    file = experiment("run", max_steps=100_000, checkpoint_every=5)
    process = start("fit", str(file), home=home)
    deadline = time.monotonic() + 90
    while not list(home.glob("trials/*/checkpoints/step=*.ckpt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert "Traceback" not in out and "--resume" in out
    _, runs = fits(home)
    (run,) = runs.values()
    assert (run.info.status, tag(run, "outcome")) == ("KILLED", "cancelled")
    assert json.loads(run.data.tags.get("workbench.attempt", "0")) == 1
