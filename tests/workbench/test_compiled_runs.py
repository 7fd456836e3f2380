"""`trainer.compile`: the same training, the same checkpoints, and what the run says of its products."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from mlflow.tracking import MlflowClient

from modules import precision
from modules.compilation import why_no_compilation
from workbench.checkpoints import newest_checkpoint
from workbench.cli import main
from workbench.tracking import store_uri

lacking = why_no_compilation("cpu")
needs_a_compiler = pytest.mark.skipif(lacking is not None, reason=str(lacking))


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """What earlier tests compiled counts against the limit of versions that torch keeps of a function."""
    torch.compiler.reset()


@pytest.fixture
def experiment(tmp_path: Path, tiny: dict[str, Any]) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**tiny, "evaluation": {"every": 3}}))
    return file


def fit(
    file: Path, home: Path, monkeypatch: pytest.MonkeyPatch, *settings: str, code: int = 0
) -> tuple[dict[str, str], dict[str, str], list[float], dict[str, torch.Tensor]]:
    """Params, tags, losses step by step and the weights of the last checkpoint, all read back from the store."""
    monkeypatch.setenv("WORKBENCH_HOME", str(home))
    assert main(["fit", str(file), *settings]) == code
    client = MlflowClient(store_uri(home))
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    points = client.get_metric_history(run.info.run_id, "train/loss")
    losses = [point.value for point in sorted(points, key=lambda point: point.step)]
    checkpoint = newest_checkpoint(home / "trials" / run.info.run_id)
    assert checkpoint is not None
    return run.data.params, run.data.tags, losses, torch.load(checkpoint, weights_only=True)["state_dict"]


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize(("name", "tolerance"), [("32-true", 1e-5), ("bf16-mixed", 2e-2), ("bf16-true", 2e-2)])
def test_a_compiled_run_trains_as_an_uncompiled_one(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, name: str, tolerance: float
) -> None:
    compiled_models = []
    real = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled_models.append(self) or real(self))
    plain = fit(experiment, tmp_path / "plain", monkeypatch, f"trainer.precision={name}")
    assert not compiled_models and "trainer.compile" not in capfd.readouterr().err
    settings = (f"trainer.precision={name}", "trainer.compile=true")
    params, tags, losses, weights = fit(experiment, tmp_path / "compiled", monkeypatch, *settings)
    said = capfd.readouterr().err
    assert len(compiled_models) == 1
    assert len(losses) == 6 and losses == pytest.approx(plain[2], rel=tolerance)
    assert losses[-1] < losses[0] - 0.1
    assert {key: (x.shape, x.dtype) for key, x in weights.items()} == {
        key: (x.shape, x.dtype) for key, x in plain[3].items()
    }
    assert not any("_orig_mod" in key for key in weights)
    assert (params["trainer.compile"], tags["workbench.compile"]) == ("true", "true")
    assert (plain[0]["trainer.compile"], plain[1]["workbench.compile"]) == ("false", "false")
    if name == "32-true":
        assert params["resolved.bfloat16_products"] == "native" and "trainer.compile:" not in said
    else:
        assert params["resolved.bfloat16_products"] == "native (trainer.compile)"
        assert "trainer.compile: products of bfloat16 are torch's own" in said


@pytest.mark.slow
@needs_a_compiler
def test_a_run_goes_on_compiled_where_it_was_not_and_back(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped by a step that no longer works, three steps at a time."""
    from modules.language_model import LanguageModel

    whole = fit(experiment, tmp_path / "whole", monkeypatch)
    home = tmp_path / "switched"
    real = LanguageModel.training_step
    for attempt, (stop, compiled) in enumerate(((2, "false"), (4, "true"), (None, "false"))):

        def step(self: LanguageModel, batch: Any, index: int, stop: int | None = stop) -> torch.Tensor:
            if self.trainer.global_step == stop:
                raise RuntimeError("stopped by the test")
            return real(self, batch, index)

        monkeypatch.setattr(LanguageModel, "training_step", step)
        words = ["trainer.checkpoint_every=1", f"trainer.compile={compiled}", *(["--resume"] if attempt else [])]
        params, tags, losses, weights = fit(experiment, home, monkeypatch, *words, code=1 if stop else 0)
        assert (params["trainer.compile"], tags["workbench.compile"]) == ("false", compiled)
    assert losses == pytest.approx(whole[2], rel=1e-5)
    assert weights.keys() == whole[3].keys()


@pytest.mark.parametrize("has_instructions", [True, False])
def test_what_a_compiled_run_says_of_its_products(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Any, has_instructions: bool
) -> None:
    from workbench import build, run
    from workbench.config import resolve

    for module in (precision, run):
        monkeypatch.setattr(module, "cpu_has_bfloat16_products", lambda: has_instructions)
    monkeypatch.setattr(build, "why_no_compilation", lambda device_type: None)
    settings = {"trainer.compile": True, "trainer.precision": "bf16-mixed", "trainer.accelerator": "cpu"}
    resolved = build.check(resolve(("", tiny), ("", settings)))
    assert resolved.bfloat16_products == "native"
    run._announce(resolved)
    assert ("steps will be slow" in capsys.readouterr().err) == (not has_instructions)


@pytest.mark.parametrize(
    ("variable", "value", "parts"),
    [
        ("CXX", "no-such-compiler", ["'no-such-compiler' is not found", "CXX"]),
        ("CXX", "false", ["'false' is not found or does not run"]),
        ("TORCH_COMPILE_DISABLE", "1", ["TORCH_COMPILE_DISABLE=1"]),
    ],
)
def test_without_a_compiler_nothing_is_opened(
    experiment: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    variable: str,
    value: str,
    parts: list[str],
) -> None:
    monkeypatch.setenv(variable, value)
    assert main(["fit", str(experiment), "trainer.compile=true", "trainer.accelerator=cpu"]) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in ["trainer.compile=true", "trainer.compile=false", *parts])
    assert "Traceback" not in message and not home.exists()
