"""A sweep from its file to MLflow and back, with real trials in real processes, and what happens when they die."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml
from filelock import FileLock
from mlflow.tracking import MlflowClient

from workbench.cli import main
from workbench.tracking import store_uri, tag

ROOT = Path(__file__).resolve().parents[2]
METRICS = {
    "train/loss", "train/learning_rate", "train/gradient_norm", "val/loss", "val/perplexity",
    "throughput/tokens_per_second", "memory/peak_gigabytes", "attention/visible_pair_share",
}  # fmt: skip


@pytest.fixture
def grid(tmp_path, tiny):
    """Writes the tiny experiment and a sweep file over it; returns the sweep file."""

    def write(**contents):
        (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny))
        file = tmp_path / "small.yaml"
        file.write_text(yaml.safe_dump({"base": "tiny.yaml", **contents}))
        return file

    return write


def runs_of(home: Path):
    """(parents, children) read by MLflow's own client."""
    client = MlflowClient(store_uri(home))
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments, max_results=1000)
    parents = [run for run in runs if tag(run, "kind") == "sweep"]
    children = [run for run in runs if tag(run, "kind") == "trial"]
    return client, parents, children


def history(client, run, key):
    return [(p.step, p.value) for p in sorted(client.get_metric_history(run.info.run_id, key), key=lambda p: p.step)]


def test_a_grid_is_recorded_whole_and_never_run_twice(home, grid, capsys):
    file = grid(grid={"attention.strategy": ["full", "anchor"], "data.context_length": [32, 64]})
    assert main(["sweep", str(file), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    client, (parent,), children = runs_of(home)
    assert (parent.info.run_name, parent.info.status) == ("small", "FINISHED")
    assert sorted(child.info.run_name for child in children) == [
        "anchor 32", "anchor 64", "full 32", "full 64",
    ]  # fmt: skip
    for child in children:
        assert child.info.status == "FINISHED" and tag(child, "outcome") == "completed"
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert set(child.data.metrics) >= METRICS
        assert [step for step, _ in history(client, child, "train/loss")] == [1, 2, 3, 4, 5, 6]
        assert [step for step, _ in history(client, child, "val/loss")] == [0, 6]
        assert child.data.params["resolved.kernel"] == "sdpa"
        assert child.data.params["optimizer.learning_rate"] == "0.003"
        assert float(tag(child, "overhead_seconds")) > 0
        names = {artifact.path for artifact in client.list_artifacts(child.info.run_id)}
        assert names >= {"config.yaml", "environment.json", "packing.json"}
        assert child.inputs.dataset_inputs[0].dataset.name == "corpus"
    names = {artifact.path for artifact in client.list_artifacts(parent.info.run_id)}
    assert names >= {"report.md", "report.csv", "report.png", "report.json", "sweep.yaml"}

    # The report says what the store says.
    assert [row["cell"] for row in report["rows"]] == [
        {"attention.strategy": strategy, "data.context_length": length}
        for strategy in ("full", "anchor")
        for length in (32, 64)
    ]
    by_axes = {tag(child, "axes"): child for child in children}
    for row in report["rows"]:
        child = by_axes[json.dumps(row["cell"])]
        assert row["metrics"]["val/loss"] == {"mean": child.data.metrics["val/loss"], "std": None}
        assert row["outcome"] == "completed"

    # All strategies are scored on the same targets.
    for length in ("32", "64"):
        scored = {c.data.metrics["val/targets"] for c in children if c.data.params["data.context_length"] == length}
        assert len(scored) == 1

    # A second call touches nothing.
    before = {run.info.run_id: run.info.end_time for run in [parent, *children]}
    assert main(["sweep", str(file)]) == 0
    _, parents, children = runs_of(home)
    assert {run.info.run_id: run.info.end_time for run in [*parents, *children]} == before
    assert main(["sweep", str(file), "--dry-run", "--json"]) == 0
    out = capsys.readouterr().out
    cells = json.loads(out[out.index('{\n  "cells"') :])["cells"]
    assert {cell["state"] for cell in cells} == {"done"}


def test_the_config_artifact_loads_back_equal(home, grid, tmp_path):
    from workbench.config import read_yaml, resolve

    file = grid(grid={"attention.strategy": ["anchor"]}, set={"trainer.max_steps": 2})
    assert main(["sweep", str(file)]) == 0
    client, _, (child,) = runs_of(home)
    local = client.download_artifacts(child.info.run_id, "config.yaml", str(tmp_path))
    config = resolve(("", read_yaml(Path(local))))
    assert config.attention.strategy == "anchor" and config.trainer.max_steps == 2
    from workbench.config import flatten, to_dict
    from workbench.tracking import param_text

    stored = {key: value for key, value in child.data.params.items() if not key.startswith("resolved.")}
    assert stored == {key: param_text(value) for key, value in flatten(to_dict(config)).items()}


def test_a_failed_cell_is_recorded_and_the_others_go_on(home, grid, capsys):
    """A learning rate of 1e30 makes the loss NaN: a result, with its reason and traceback."""
    file = grid(grid={"optimizer.learning_rate": [1e30, 1e-3]}, set={"optimizer.gradient_clip_norm": None})
    assert main(["sweep", str(file)]) == 1
    client, (parent,), children = runs_of(home)
    good, bad = sorted(children, key=lambda run: float(run.data.params["optimizer.learning_rate"]))
    assert (bad.info.status, tag(bad, "outcome")) == ("FAILED", "diverged")
    assert "NonFiniteLossError" in tag(bad, "reason")
    assert "traceback.txt" in {artifact.path for artifact in client.list_artifacts(bad.info.run_id)}
    assert (good.info.status, parent.info.status, tag(parent, "outcome")) == ("FINISHED", "FAILED", "failed")
    capsys.readouterr()

    assert main(["sweep", str(file), "--json"]) == 1  # runs the failed one alone, in a run that takes its place
    report = json.loads(capsys.readouterr().out)
    assert [(row["outcome"], row["seeds"]) for row in report["rows"]] == [("completed", [0]), ("diverged", [0])]
    _, _, again = runs_of(home)
    (new,) = {run.info.run_id for run in again} - {good.info.run_id, bad.info.run_id}
    superseded = {run.info.run_id: tag(run, "superseded_by") for run in again}
    assert superseded == {good.info.run_id: "", bad.info.run_id: new, new: ""}


def losses(capsys, file) -> list:
    """Runs the sweep; (cell, val/loss) of its report."""
    capsys.readouterr()
    assert main(["sweep", str(file), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    return [(row["cell"], row["seeds"], row["metrics"]["val/loss"]["mean"]) for row in rows]


def test_an_edited_sweep_reports_what_its_file_says(home, grid, capsys):
    """Settings changed and changed back, a cell taken out, seeds added: never a run of other settings."""
    strategies = {"attention.strategy": ["full", "anchor"]}
    first = losses(capsys, grid(grid=strategies, set={"trainer.max_steps": 2}))
    other = losses(capsys, grid(grid=strategies, set={"trainer.max_steps": 3}))
    assert [row[2] for row in first] != [row[2] for row in other]
    assert losses(capsys, grid(grid=strategies, set={"trainer.max_steps": 2})) == first
    fewer = grid(grid={"attention.strategy": ["anchor"]}, set={"trainer.max_steps": 2})
    assert losses(capsys, fewer) == first[1:]
    client, (parent,), _ = runs_of(home)
    logged = json.loads(Path(client.download_artifacts(parent.info.run_id, "report.json")).read_text())
    assert [row["cell"] for row in logged["rows"]] == [{"attention.strategy": "anchor"}], "the parent's report follows"
    (row,) = losses(capsys, grid(grid={"attention.strategy": ["anchor"]}, set={"trainer.max_steps": 2}, seeds=[0, 1]))
    assert row[1] == [0, 1]
    _, parents, children = runs_of(home)
    assert len(parents) == 1 and len(children) == 5


@pytest.mark.parametrize(
    ("contents", "part"),
    [
        ({"grid": {"data.workers": [0, 1]}}, "the same work"),
        ({"grid": {"trainer.accumulate": [1, 2]}, "hold": {"tokens_per_step": 256}}, "hold.tokens_per_step"),
        ({"grid": {"data.context_length": [32]}, "set": {"data.context_length": 64}}, "in set and an axis"),
        ({"seeds": [0, 1], "exclude": [{"when": {"data.tail": "pad"}, "why": "x"}]}, "data.tail is no axis"),
    ],
)
def test_cells_that_do_not_differ_are_refused(home, grid, capsys, contents, part):
    assert main(["sweep", str(grid(**contents)), "--dry-run"]) == 2
    assert part in capsys.readouterr().err


def test_a_sweep_without_seeds_takes_the_configs(home, grid, capsys):
    file = grid(grid={"attention.strategy": ["full"]}, set={"seed": 7})
    assert main(["sweep", str(file), "--json", "--dry-run"]) == 0
    assert [cell["seed"] for cell in json.loads(capsys.readouterr().out)["cells"]] == [7]


def test_fail_fast_stops_at_the_first_failure(home, grid):
    file = grid(grid={"optimizer.learning_rate": [1e30, 1e-3]}, set={"optimizer.gradient_clip_norm": None})
    assert main(["sweep", str(file), "--fail-fast"]) == 1
    _, _, children = runs_of(home)
    assert [tag(run, "outcome") for run in children] == ["diverged"]


def test_seeds_are_trials_of_one_cell(home, grid, capsys):
    file = grid(grid={"attention.strategy": ["anchor"]}, seeds=[0, 1])
    assert main(["sweep", str(file), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    _, _, children = runs_of(home)
    losses = [child.data.metrics["val/loss"] for child in children]
    assert row["seeds"] == [0, 1] and losses[0] != losses[1]
    assert row["metrics"]["val/loss"]["mean"] == pytest.approx(sum(losses) / 2)
    assert row["metrics"]["val/loss"]["std"] == pytest.approx(abs(losses[0] - losses[1]) / 2**0.5)


def test_changed_code_runs_again_in_a_new_run(home, grid, capsys):
    file = grid(grid={"attention.strategy": ["anchor"]})
    assert main(["sweep", str(file)]) == 0
    client, _, (child,) = runs_of(home)
    client.set_tag(child.info.run_id, "workbench.hash", "what older code had")
    capsys.readouterr()
    for words, state in (([], "stale"), (["--ignore-code"], "done")):
        assert main(["sweep", str(file), "--dry-run", "--json", *words]) == 0
        assert json.loads(capsys.readouterr().out)["cells"][0]["state"] == state
    assert main(["sweep", str(file), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 1
    _, parents, children = runs_of(home)
    assert len(parents) == 1 and len(children) == 2
    new, old = sorted(children, key=lambda run: bool(tag(run, "superseded_by")))
    assert tag(old, "superseded_by") == new.info.run_id


def wait_for(condition, seconds=90.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (found := condition()) is not None:
            return found
        time.sleep(0.05)
    raise AssertionError("did not happen in time")


def running_step(home: Path, beyond: int):
    """The folder of a trial that is past a step and not finished."""
    for status in home.glob("trials/*/status.json"):
        try:
            step = json.loads(status.read_text())["step"]
        except (OSError, ValueError):
            continue
        if step >= beyond and not (status.parent / "outcome.json").exists():
            return status.parent
    return None


LONG = {"trainer.max_steps": 200, "trainer.checkpoint_every": 5}


def test_a_killed_sweep_goes_on_where_it_was(home, grid, start):
    """kill -9 of the sweep in its second cell: its trial ends too; a second call finishes that one from its
    checkpoint, repeats nothing finished, and every run's status is true."""
    file = grid(grid={"data.context_length": [32, 64]}, set=LONG)
    sweep = start("sweep", str(file), home=home)
    first = wait_for(lambda: next((p.parent for p in home.glob("trials/*/outcome.json")), None))
    folder = wait_for(lambda: running_step(home, 50))
    assert folder != first
    sweep.kill()
    sweep.wait()
    client, (parent,), children = runs_of(home)
    assert {run.info.status for run in [parent, *children]} == {"RUNNING", "FINISHED"}
    (finished,) = [run for run in children if run.info.status == "FINISHED"]

    assert main(["sweep", str(file)]) == 0
    client, (parent,), again = runs_of(home)
    assert {run.info.status for run in [parent, *again]} == {"FINISHED"}
    assert {run.info.run_id for run in again} == {run.info.run_id for run in children}
    resumed = next(run for run in again if run.info.run_id == folder.name)
    assert tag(resumed, "attempt") == "2"
    assert [step for step, _ in history(client, resumed, "train/loss")] == list(range(1, 201))
    assert [step for step, _ in history(client, resumed, "val/loss")] == [0, 200]
    untouched = next(run for run in again if run.info.run_id == finished.info.run_id)
    assert untouched.info.end_time == finished.info.end_time


@pytest.mark.parametrize("retries", [0, 3])
def test_a_killed_trial_is_lost_or_goes_on(home, grid, start, retries):
    """Its run goes on in place where limits.retries lets it, with every point once; the other trial runs either way."""
    limits = {"retries": {"lost": retries}}
    file = grid(grid={"data.context_length": [32, 64]}, set=LONG, limits=limits)
    sweep = start("sweep", str(file), home=home)
    folder = wait_for(lambda: running_step(home, 20))
    client, _, _ = runs_of(home)
    os.kill(int(tag(client.get_run(folder.name), "pid")), signal.SIGKILL)
    out, _ = sweep.communicate(timeout=120)
    assert sweep.returncode == (0 if retries else 1), out
    _, _, children = runs_of(home)
    assert len(children) == 2
    outcomes = {run.info.run_id: (run.info.status, tag(run, "outcome"), tag(run, "attempt")) for run in children}
    hit = outcomes.pop(folder.name)
    assert list(outcomes.values()) == [("FINISHED", "completed", "1")]
    assert hit == (("FINISHED", "completed", "2") if retries else ("KILLED", "lost", "1"))
    if retries:
        points = history(client, client.get_run(folder.name), "train/loss")
        assert [step for step, _ in points] == list(range(1, 201))


def test_trials_share_the_machine_by_slots(home, grid, capsys):
    """Two at once where each takes one of two cores: their times overlap, and their speed says so."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine has one core")
    cores = len(os.sched_getaffinity(0)) // 2
    file = grid(grid={"data.context_length": [32, 64]}, set={"trainer.max_steps": 60}, resources={"cpus": cores})
    assert main(["sweep", str(file)]) == 0
    _, _, (one, other) = runs_of(home)
    assert one.info.start_time < other.info.end_time and other.info.start_time < one.info.end_time
    assert tag(one, "device_name").endswith("2 trials at once") and f"{cores} threads" in tag(one, "device_name")
    capsys.readouterr()
    file = grid(grid={"data.context_length": [16]}, resources={"cpus": 10_000})
    assert main(["sweep", str(file)]) == 2
    assert "resources.cpus=10000" in capsys.readouterr().err


def test_a_trial_beyond_its_time_is_stopped(home, grid, capsys):
    file = grid(
        grid={"trainer.max_steps": [1_000_000, 2]}, limits={"timeout": "12s", "retries": {"lost": 0}},
        resources={"cpus": len(os.sched_getaffinity(0))},
    )  # fmt: skip
    assert main(["sweep", str(file), "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["cell"]["trainer.max_steps"], row["outcome"]) for row in rows] == [
        (2, "completed"), (1_000_000, "timeout"),
    ]  # fmt: skip
    _, _, children = runs_of(home)
    (late,) = [run for run in children if tag(run, "outcome") == "timeout"]
    assert late.info.status == "KILLED" and "12 s" in tag(late, "reason")


def test_a_crash_is_tried_again_as_often_as_limits_say(home, grid, capsys):
    """diverged is a result: tried again only where the file says so, in runs that take each other's place."""
    broken = {"optimizer.learning_rate": [1e30]}
    file = grid(grid=broken, set={"optimizer.gradient_clip_norm": None}, limits={"retries": {"diverged": 1}})
    assert main(["sweep", str(file), "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["outcome"], row["seeds"]) == ("diverged", [0])
    _, _, children = runs_of(home)
    assert sorted(bool(tag(run, "superseded_by")) for run in children) == [False, True]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_an_interrupted_sweep_closes_its_runs(home, grid, number, start):
    file = grid(grid={"data.context_length": [32, 64]}, set={**LONG, "trainer.max_steps": 100_000})
    sweep = start("sweep", str(file), home=home)
    folder = wait_for(lambda: running_step(home, 20))
    sweep.send_signal(number)
    out, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == 130, out
    assert "Traceback" not in out
    _, (parent,), (child,) = runs_of(home)
    assert (child.info.run_id, child.info.status, tag(child, "outcome")) == (folder.name, "KILLED", "cancelled")
    assert (parent.info.status, tag(parent, "outcome")) == ("KILLED", "cancelled")


def test_one_sweep_runs_once_at_a_time(home, grid, capsys):
    file = grid(grid={"data.context_length": [32, 64]})
    home.mkdir()
    with FileLock(home / "sweep-small.lock"):  # what another process that runs this sweep holds
        assert main(["sweep", str(file)]) == 2
    assert "running already" in capsys.readouterr().err
    assert runs_of(home)[1:] == ([], [])
