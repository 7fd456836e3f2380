"""The demo as a new user runs it: real documents, 16 cells, in MLflow."""

from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from workbench.cli import main
from workbench.tracking import store_uri, tag

SWEEP = Path(__file__).resolve().parents[2] / "sweeps" / "quickstart.yaml"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_quickstart_learns_in_every_cell_and_runs_once(home):
    assert main(["sweep", str(SWEEP)]) == 0
    client = MlflowClient(store_uri(home))
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]

    def children():
        found = client.search_runs(experiments, "tags.`workbench.kind` = 'trial'", max_results=100)
        return {run.info.run_id: run for run in found}

    first = children()
    assert len(first) == 16
    tokens = set()
    for run_id, run in first.items():
        assert (run.info.status, tag(run, "outcome")) == ("FINISHED", "completed")
        losses = sorted((p.step, p.value) for p in client.get_metric_history(run_id, "val/loss"))
        assert losses[0][0] == 0 and losses[-1][1] <= losses[0][1] - 1.0
        assert len(client.get_metric_history(run_id, "train/loss")) >= 10
        params = run.data.params
        per_step = int(params["data.context_length"]) * int(params["trainer.rows_per_batch"])
        tokens.add(per_step * int(params["trainer.accumulate"]) * int(params["trainer.max_steps"]))
    assert len(tokens) == 1
    assert main(["sweep", str(SWEEP)]) == 0
    assert {i: run.info.end_time for i, run in children().items()} == {i: run.info.end_time for i, run in first.items()}
