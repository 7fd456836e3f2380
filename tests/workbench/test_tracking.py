"""The MLflow store, always a real one: written, closed, read back."""

import multiprocessing
import runpy
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from workbench.errors import UserError
from workbench.run_logger import RunLogger
from workbench.tracking import Tracker, param_text, store_uri, tag


def reader(home: Path) -> MlflowClient:
    """A client of MLflow's own, apart from ours."""
    return MlflowClient(store_uri(home))


def run_at_once(script: Path, count: int) -> None:
    """The script in `count` processes at once, with `number` set. Forked from a server that has imported everything,
    as our launcher does: only the store is fresh."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["workbench.preload"])
    processes = [
        context.Process(target=runpy.run_path, args=(str(script),), kwargs={"init_globals": {"number": number}})
        for number in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0] * count


def test_eight_processes_open_a_fresh_store_and_log_at_once(tmp_path):
    """MLflow alone corrupts the file here (schema made eight times); ours keeps every point."""
    script = tmp_path / "script.py"
    script.write_text(f"""
from pathlib import Path
from workbench.run_logger import RunLogger
from workbench.tracking import Tracker
home = Path({str(tmp_path / "home")!r})
tracker = Tracker(home, "together")
run = tracker.create(f"run {{number}}", {{"kind": "fit"}})
logger = RunLogger(tracker.client, run, home)
for step in range(1, 41):
    logger.log_metrics({{"train/loss": step + number / 10, "other": -step}}, step=step)
    logger.flush()
tracker.close(run, status="FINISHED", outcome="completed")
""")
    run_at_once(script, 8)
    client = reader(tmp_path / "home")
    (experiment,) = [e for e in client.search_experiments() if e.name == "together"]
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(run.info.run_name for run in runs) == [f"run {n}" for n in range(8)]
    for run in runs:
        number = int(run.info.run_name.split()[1])
        points = client.get_metric_history(run.info.run_id, "train/loss")
        assert sorted((p.step, p.value) for p in points) == [(s, s + number / 10) for s in range(1, 41)]
        assert run.info.status == "FINISHED"


def test_params_are_whole_and_written_once(tmp_path):
    tracker = Tracker(tmp_path, "e")
    run = tracker.create("r", {"kind": "fit"})
    params = {f"p{n}": n for n in range(250)} | {"text": "x" * 5999, "none": None, "flag": True, "list": [1, 2]}
    tracker.log_params(run, params)
    tracker.log_params(run, params)
    stored = reader(tmp_path).get_run(run).data.params
    assert stored == {key: param_text(value) for key, value in params.items()}
    assert (stored["none"], stored["flag"], len(stored["text"])) == ("null", "true", 5999)


def test_a_param_too_long_says_so(tmp_path):
    tracker = Tracker(tmp_path, "e")
    run = tracker.create("r", {})
    tracker.log_params(run, {"long": "x" * 7000})
    assert reader(tmp_path).get_run(run).data.params["long"].endswith("whole in config.yaml")


def test_one_point_per_key_and_step_after_a_resume(tmp_path):
    tracker = Tracker(tmp_path, "e")
    run = tracker.create("r", {})
    first = RunLogger(tracker.client, run, tmp_path)
    for step in (1, 2, 3):
        first.log_metrics({"train/loss": step}, step=step)
    first.log_metrics({"val/loss": 9}, step=2)
    first.finalize("failed")
    again = RunLogger(tracker.client, run, tmp_path)
    for step in (2, 3, 4):
        again.log_metrics({"train/loss": step, "val/loss": step}, step=step)
    again.finalize("success")
    client = reader(tmp_path)
    assert [(p.step, p.value) for p in client.get_metric_history(run, "train/loss")] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert [(p.step, p.value) for p in client.get_metric_history(run, "val/loss")] == [(2, 9), (3, 3), (4, 4)]


def test_infinite_points_are_dropped_and_counted_and_nan_is_kept(tmp_path):
    tracker = Tracker(tmp_path, "e")
    run = tracker.create("r", {})
    logger = RunLogger(tracker.client, run, tmp_path)
    logger.log_metrics({"a": float("inf"), "b": float("nan")}, step=1)
    logger.flush()
    metrics = reader(tmp_path).get_run(run).data.metrics
    assert "a" not in metrics and metrics["b"] != metrics["b"]
    assert logger.dropped_points == 1


def test_points_survive_a_store_that_fails_for_a_while(tmp_path, monkeypatch, caplog):
    tracker = Tracker(tmp_path, "e")
    run = tracker.create("r", {})
    logger = RunLogger(tracker.client, run, tmp_path)
    logger.log_metrics({"a": 1.0}, step=1)
    with monkeypatch.context() as broken:
        broken.setattr(tracker.client, "log_batch", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
        logger.save()
        with pytest.raises(OSError, match="disk full"):
            logger.finalize("success")
    logger.flush()
    assert reader(tmp_path).get_run(run).data.metrics == {"a": 1.0}
    assert "disk full" in caplog.text


def test_parent_children_and_status(tmp_path):
    tracker = Tracker(tmp_path, "e")
    parent = tracker.create("sweep", {"kind": "sweep", "sweep": "s"})
    child = tracker.create("cell", {"kind": "trial", "sweep": "s"}, parent=parent)
    tracker.close(child, status="FAILED", outcome="crash", reason="ValueError: no")
    client = reader(tmp_path)
    stored = client.get_run(child)
    assert (stored.info.status, tag(stored, "outcome"), tag(stored, "reason")) == ("FAILED", "crash", "ValueError: no")
    assert stored.data.tags["mlflow.parentRunId"] == parent
    tracker.reopen(child)
    assert client.get_run(child).info.status == "RUNNING"
    assert [run.info.run_id for run in tracker.find({"parent": parent})] == [child]
    assert tracker.find({"kind": "sweep", "sweep": "other"}) == []


def test_artifacts_go_under_home_whatever_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracker = Tracker(tmp_path / "home", "e")
    run = tracker.create("r", {})
    tracker.client.log_dict(run, {"a": 1}, "config.yaml")
    assert [path.name for path in (tmp_path / "home" / "artifacts").rglob("config.yaml")] == ["config.yaml"]
    assert {path.name for path in tmp_path.iterdir()} == {"home"}


def test_a_home_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="WORKBENCH_HOME"):
        Tracker(tmp_path / "file", "e")


def test_a_deleted_experiment_says_how_to_restore_it(tmp_path):
    tracker = Tracker(tmp_path, "gone")
    tracker.client.delete_experiment(tracker.experiment_id)
    with pytest.raises(UserError, match="restore"):
        Tracker(tmp_path, "gone")
