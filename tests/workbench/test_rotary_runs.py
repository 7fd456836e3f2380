"""Rotary settings on their way from the command line, a YAML and a sweep to the model that is trained and to MLflow."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from mlflow.tracking import MlflowClient
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from modules.rotary_frequencies import Frequencies, frequency_digest
from modules.rotary_scaling import ScalingConfig
from workbench import build
from workbench.checkpoints import newest_checkpoint
from workbench.cli import main
from workbench.config import read_yaml, resolve
from workbench.tracking import store_uri

LISTS: dict[str, Any] = {"short_factor": [1.0, 1.5, 2, 2], "long_factor": [1.0, 2e0, 4, 8.5]}


def logged(home: Path) -> tuple[MlflowClient, str, dict[str, str]]:
    client = MlflowClient(store_uri(home))
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return client, run.info.run_id, run.data.params


def their_digest(parameters: dict[str, Any], length: int) -> str:
    """Of transformers' own frequencies for short sequences and for those of that length; heads are 8 wide."""
    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, max_position_embeddings=2048, rope_parameters=parameters
    )
    make = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    return frequency_digest(*(Frequencies(*make(config, "cpu", seq_len=n)) for n in (1, length)))


def test_a_fit_logs_the_frequencies_it_trained_with(home, tmp_path, tiny):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**tiny, "rotary": {"theta": 5e5}}))
    assert main(["fit", str(file), "rotary.scaling.rope_type=yarn", "rotary.scaling.factor=8"]) == 0
    _, _, params = logged(home)
    expected = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048, "rope_theta": 5e5}
    assert params["resolved.inverse_frequencies"] == their_digest(expected, 2048)
    assert (params["resolved.rope_type"], params["resolved.original_max_position_embeddings"]) == ("yarn", "2048")
    assert (params["rotary.scaling.rope_type"], params["rotary.scaling.factor"]) == ("yarn", "8.0")
    assert params["resolved.master_weights"] == "none"


def test_lists_of_factors_in_a_yaml(home, tmp_path, tiny):
    """The length decides between them, and the config that is logged loads back equal."""
    scaling = {"rope_type": "longrope", "factor": 4, "original_max_position_embeddings": 32, **LISTS}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**tiny, "rotary": {"scaling": scaling}}))
    assert main(["fit", str(file)]) == 0
    client, run_id, params = logged(home)
    assert params["resolved.inverse_frequencies"] == their_digest({**scaling, "rope_theta": 1e4}, 2048)
    assert params["rotary.scaling.long_factor"] == "[1.0, 2.0, 4.0, 8.5]"
    saved = resolve(("", read_yaml(Path(client.download_artifacts(run_id, "config.yaml", str(tmp_path))))))
    assert saved.rotary.scaling == ScalingConfig(**scaling)


def test_type_and_factor_as_axes_of_a_sweep(home, tmp_path, tiny, capsys):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(tiny))
    file = tmp_path / "scalings.yaml"
    axes = {"rotary.scaling.rope_type": ["default", "linear", "yarn"], "rotary.scaling.factor": [None, 4, 8]}
    grid = {"rotary.precision": ["float32", "compute"]}
    file.write_text(yaml.safe_dump({"base": "base.yaml", "zip": axes, "grid": grid}))
    assert main(["sweep", str(file), "--dry-run", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert len(cells) == len({cell["hash"] for cell in cells}) == 6
    assert {cell["overrides"]["rotary.scaling.rope_type"] for cell in cells} == {"default", "linear", "yarn"}

    file.write_text(yaml.safe_dump({"base": "base.yaml", "grid": {"rotary.scaling.rope_type": ["yarn", "llama3"]}}))
    assert main(["sweep", str(file), "--dry-run"]) == 2
    message = capsys.readouterr().err
    assert "rotary.scaling.factor=None is needed by rope_type='yarn'" in message
    assert "rotary.scaling.low_freq_factor=None is needed by rope_type='llama3'" in message
    assert not home.exists()


@pytest.mark.parametrize("max_positions", [None, 8192])
def test_a_window_beyond_the_models_own_is_what_scaling_is_for(tiny, max_positions):
    """The positions of the window are the model's from now on, and not its original length."""
    settings = {
        "data.context_length": 8192, "rotary.scaling.rope_type": "dynamic", "rotary.scaling.factor": 2,
        "model.max_positions": max_positions,
    }  # fmt: skip
    resolved = build.check(resolve(("", tiny), ("", settings)))
    assert resolved.shape.max_positions == 8192
    assert resolved.shape.rope_scaling.original_max_position_embeddings == 2048
    model = build.model(resolved)
    assert model.scaling == resolved.shape.rope_scaling
    assert model.frequencies(2048).inverse_P[-1] == model.frequencies().inverse_P[-1]
    # theta grows to theta * growth^(R / (R - 2)), so the last frequency falls by 2 * 8192 / 2048 - 1 = 7.
    ratio = model.frequencies(2048).inverse_P[-1] / model.frequencies(8192).inverse_P[-1]
    assert ratio.item() == pytest.approx(7, rel=1e-5)


def test_a_checkpoint_holds_the_master_weights(home, tmp_path, tiny):
    """Read without unpickling; the model's weights are those, rounded; nothing is left of bfloat16 in the moments."""
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**tiny, "trainer": {**tiny["trainer"], "precision": "bf16-true"}}))
    assert main(["fit", str(file)]) == 0
    _, run_id, params = logged(home)
    assert params["resolved.master_weights"] == "float32"
    checkpoint = newest_checkpoint(home / "trials" / run_id)
    assert checkpoint is not None
    saved = torch.load(checkpoint, weights_only=True)
    weights, states = saved["state_dict"], saved["optimizer_states"][0]["state"]
    assert {x.dtype for x in weights.values()} == {torch.bfloat16}
    assert {name: x.dtype for state in states.values() for name, x in state.items()} == dict.fromkeys(
        ("master", "step", "exp_avg", "exp_avg_sq"), torch.float32
    )
    assert len(states) == len(weights)
    # Matrices first, then norms, each in the model's order: the optimizer's two groups.
    in_order = sorted(weights.values(), key=lambda x: x.ndim < 2)
    for weight, state in zip(in_order, states.values(), strict=True):
        assert torch.equal(weight, state["master"].bfloat16())
        assert not torch.equal(state["master"], weight.float()), "masters know more than weights"


def test_a_run_of_pure_bfloat16_says_so(home, tmp_path, tiny):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**tiny, "trainer": {**tiny["trainer"], "precision": "bf16-true"}}))
    assert main(["fit", str(file), "optimizer.master_weights=none"]) == 0
    assert logged(home)[2]["resolved.master_weights"] == "none"
