"""On a CUDA device: the kernel against the oracle, and float16 training with its gradient scaler."""

import pytest
import torch
import yaml
from mlflow.tracking import MlflowClient

from modules.attention.attend import attend
from modules.attention.borders import Borders
from modules.attention.strategies import STRATEGIES
from tests.oracles.dense_attention import dense_attention
from workbench.cli import main
from workbench.tracking import store_uri, tag

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

DOCUMENTS = [[0] + [1] * 60 + [2] + [3] * 75, [0] + [1] * 120 + [-1] * 16]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sdpa_on_cuda_errs_at_most_twice_as_much_as_plain_attention(strategy, dtype):
    """Oracle: dense attention in float64; plain: the same computation in the kernel's dtype."""
    torch.manual_seed(0)
    exact = [torch.randn(2, heads, 137, 64, dtype=torch.float64) for heads in (9, 3, 3)]
    low = [x.to(dtype) for x in exact]
    expected = dense_attention(*(x.double() for x in low), strategy, DOCUMENTS)
    plain = dense_attention(*low, strategy, DOCUMENTS).double()
    borders = Borders.of(torch.tensor(DOCUMENTS, dtype=torch.int32, device="cuda"))
    out = attend(*(x.cuda() for x in low), borders, STRATEGIES[strategy], kernel="sdpa").cpu().double()
    floor = 1e-5 if dtype == torch.float32 else 0.0  # TF32-free float32 is nearly exact in both
    assert (out - expected).abs().max() <= 2 * (plain - expected).abs().max() + floor


@pytest.mark.parametrize("precision", ["16-mixed", "16-true", "bf16-true", "bf16-mixed"])
def test_a_run_on_cuda_completes(home, tmp_path, tiny, precision):
    (tmp_path / "gpu.yaml").write_text(yaml.safe_dump(tiny))
    assert main(["fit", str(tmp_path / "gpu.yaml"), f"trainer.precision={precision}"]) == 0
    client = MlflowClient(store_uri(home))
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert (tag(run, "outcome"), run.data.params["resolved.device"]) == ("completed", "cuda")
    assert run.data.metrics["val/loss"] < 5.6
