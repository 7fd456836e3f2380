"""The probe while a model trains: in MLflow, in the training's own precision, and without a trace in the training."""

import pytest
import torch
import yaml
from mlflow.tracking import MlflowClient

from modules.position_probe import Rotation, propagate
from modules.shift_deviation import DeviationSums
from workbench.checkpoints import newest_checkpoint
from workbench.cli import main
from workbench.home import trial_folder
from workbench.live_deviation import sample_of
from workbench.model_source import find_model
from workbench.run import prepare
from workbench.runs import run_config
from workbench.tracking import store_uri

EVERY_2 = "evaluation.shift_deviation.every=2"


def history(home, key, index=0):
    client = MlflowClient(store_uri(home))
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()], order_by=["start_time ASC"])
    return [(point.step, point.value) for point in client.get_metric_history(runs[index].info.run_id, key)]


def fit(tmp_path, tiny, *settings):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tiny))
    return main(["fit", str(file), *settings])


def test_points_before_between_and_after_the_steps(home, tmp_path, tiny):
    """Micro batches make no points of their own: two of them make a step here."""
    assert fit(tmp_path, tiny, EVERY_2, "trainer.max_steps=5", "trainer.precision=bf16-mixed") == 0
    for key in ("rotary/shift_deviation", "rotary/row_deviation", "rotary/first_token_share"):
        points = history(home, key)
        assert [step for step, _ in points] == [0, 2, 4, 5]
        assert all(value > 0 for _, value in points)


def test_the_value_is_the_trained_models_own(home, tmp_path, tiny):
    """Oracle: the last checkpoint, loaded on its own and probed over the same tokens."""
    settings = [EVERY_2, "evaluation.shift_deviation.tokens=48", "evaluation.shift_deviation.shift=5000",
                "evaluation.shift_deviation.layers=[1]", "trainer.checkpoint_every=3"]  # fmt: skip
    assert fit(tmp_path, tiny, *settings) == 0
    client = MlflowClient(store_uri(home))
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert newest_checkpoint(trial_folder(home, run.info.run_id)) is not None
    source = find_model(run.info.run_id, home=home)
    prepared = prepare(run_config(home, run), home=home)
    sample_T = sample_of(prepared.data, prepared.corpus, tokens=48, anchor_id=256)
    assert sample_T.shape == (48,) and sample_T[0] == 256
    sums = DeviationSums(shifts=1, lengths=[48])
    place_T = torch.arange(48)
    model = source.load()
    propagate(model, sample_T, torch.stack([place_T, place_T + 5000]), Rotation(), sums=sums, layers=[1])
    step, value = history(home, "rotary/shift_deviation")[-1]
    assert step == 6 and value == pytest.approx(float(sums.result().deviation_SN), rel=1e-6)


def test_training_does_not_notice(home, tmp_path, tiny):
    assert fit(tmp_path, tiny) == 0
    assert fit(tmp_path, tiny, EVERY_2) == 0
    assert history(home, "train/loss", 0) == history(home, "train/loss", 1)
    assert history(home, "val/loss", 0) == history(home, "val/loss", 1)
    assert not history(home, "rotary/shift_deviation", 0)


def test_bfloat16_training_breaks_more_than_float32(home, tmp_path, tiny):
    for precision in ("32-true", "bf16-true"):
        assert fit(tmp_path, tiny, EVERY_2, f"trainer.precision={precision}", "rotary.precision=compute") == 0
    wide, narrow = (history(home, "rotary/row_deviation", index)[-1][1] for index in (0, 1))
    assert narrow > 20 * wide


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("evaluation.shift_deviation.layers=[0,2]", "layers=[0, 2]: the model's layers are 0 to 1"),
        ("evaluation.shift_deviation.every=0", "evaluation.shift_deviation.every=0 must be at least 1"),
        ("evaluation.shift_deviation.shift=16777216", "only up to 16777216"),
        ("evaluation.shift_deviation.tokens=1", "evaluation.shift_deviation.tokens=1 must be at least 2"),
    ],
)  # fmt: skip
def test_wrong_settings(setting, message, home, tmp_path, tiny, capsys):
    settings = [setting] if setting.startswith("evaluation.shift_deviation.every") else [EVERY_2, setting]
    assert fit(tmp_path, tiny, *settings) == 2
    assert message in capsys.readouterr().err and not home.exists()
