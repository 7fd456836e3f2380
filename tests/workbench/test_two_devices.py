"""A trial on two devices: started by exec, so that Lightning's second rank repeats the trial and never the sweep."""

import pytest
import yaml
from mlflow.tracking import MlflowClient

from workbench.cli import main
from workbench.tracking import store_uri, tag


@pytest.mark.slow
def test_two_ranks_are_one_run_with_the_losses_of_one_rank(home, tmp_path, tiny):
    """Two gloo processes with one row each see in every step the rows that one process with two rows sees."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny))
    file = tmp_path / "ranks.yaml"
    axes = [{"trainer.devices": [1, 2], "trainer.rows_per_batch": [2, 1]}]
    file.write_text(yaml.safe_dump({"base": "tiny.yaml", "zip": axes, "set": {"trainer.max_steps": 4}}))
    assert main(["sweep", str(file)]) == 0
    client = MlflowClient(store_uri(home))
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments, "tags.`workbench.kind` = 'trial'")
    assert [tag(run, "outcome") for run in runs] == ["completed"] * 2
    one, two = sorted(runs, key=lambda run: int(run.data.params["trainer.devices"]))
    for key, steps in (("train/loss", [1, 2, 3, 4]), ("val/loss", [0, 4])):
        points = [sorted((p.step, p.value) for p in client.get_metric_history(r.info.run_id, key)) for r in (one, two)]
        assert [step for step, _ in points[1]] == steps
        for (_, alone), (_, together) in zip(*points, strict=True):
            assert together == pytest.approx(alone, abs=1e-5)
