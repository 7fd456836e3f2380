"""Every YAML that we ship loads, resolves and builds its model, without allocating it."""

from pathlib import Path

import pytest
import torch

from modules.llama import parameter_count
from workbench import build
from workbench.config import read_config
from workbench.plan import plan
from workbench.sweep_file import read_sweep

SWEEPS = Path(__file__).resolve().parents[2] / "sweeps"


def build_on_meta(resolved: build.Resolved) -> None:
    with torch.device("meta"):
        model = build.model(resolved)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == parameter_count(resolved.shape)


@pytest.mark.parametrize("file", sorted(SWEEPS.glob("*.yaml")), ids=lambda file: file.stem)
def test_sweep(file, tmp_path):
    decided = plan(read_sweep(file), {}, home=tmp_path, tokenise=False)
    for trial in decided.trials:
        build_on_meta(trial.resolved)


@pytest.mark.parametrize("file", sorted((SWEEPS / "base").glob("*.yaml")), ids=lambda file: file.stem)
def test_single_experiment(file):
    build_on_meta(build.check(read_config(file, {})))


def test_the_quickstart_asks_what_it_says(tmp_path):
    """16 cells, all with the same tokens per step and in total."""
    decided = plan(read_sweep(SWEEPS / "quickstart.yaml"), {}, home=tmp_path, tokenise=False)
    assert len(decided.trials) == 16
    assert len({trial.identity.trial for trial in decided.trials}) == 16
    assert len({(t.size.tokens_per_step, t.resolved.config.trainer.max_steps) for t in decided.trials}) == 1
    points = {t.resolved.config.trainer.max_steps // t.resolved.config.trainer.log_every for t in decided.trials}
    assert min(points) >= 10
