"""The loss of an optimizer step is a mean over all its targets, however they are spread over micro batches and ranks.

Checked through Lightning's Trainer, against plain autograd over one big batch.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import lightning
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from modules.attention.strategies import STRATEGIES
from modules.batch import NO_TARGET, PackedBatch
from modules.language_model import LanguageModel
from modules.llama import Llama, LlamaConfig
from modules.optim import OptimizerConfig
from modules.rotary import RotaryConfig

SHAPE = LlamaConfig(
    vocabulary_size=19, width=16, layers=1, heads=2, kv_heads=1, head_width=8, hidden_width=24, norm_epsilon=1e-5,
    tied_embeddings=False, rope_theta=1e4, max_positions=128,
)  # fmt: skip


def batch_with(targets: int, *, seed: int, rows: int = 2, tokens: int = 64) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens_BT = torch.randint(19, (rows, tokens), generator=generator)
    labels = torch.full((rows * tokens,), NO_TARGET)
    where = torch.randperm(rows * tokens, generator=generator)[:targets]
    labels[where] = torch.randint(19, (targets,), generator=generator)
    return PackedBatch(
        tokens_BT,
        labels.view(rows, tokens),
        torch.ones(rows, tokens, dtype=torch.int32),
        torch.arange(tokens).expand(rows, tokens).clone(),
    )


def model() -> Llama:
    torch.manual_seed(0)
    return Llama(SHAPE, strategy=STRATEGIES["full"], kernel="sdpa", rotary=RotaryConfig()).double()


def expected_gradients(batches: list[PackedBatch]) -> tuple[float, dict[str, torch.Tensor]]:
    """One big batch through the model, torch's own cross-entropy with its own mean."""
    llama = model()
    from modules.attention.borders import Borders

    big = PackedBatch(*(torch.cat(parts) for parts in zip(*(batch[:4] for batch in batches), strict=True)))
    logits = llama.logits(llama(big.tokens_BT, big.position_BT, Borders.of(big.document_BT)))
    if (big.labels_BT != NO_TARGET).any():
        loss = F.cross_entropy(logits.flatten(0, 1), big.labels_BT.flatten(), ignore_index=NO_TARGET)
    else:
        loss = logits.sum() * 0
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in llama.named_parameters()}


class Watched(LanguageModel):
    """Keeps the gradients of each step as clipping sees them, and its record."""

    def __init__(self):
        settings = OptimizerConfig(gradient_clip_norm=None)
        super().__init__(model(), optimizer=settings, max_steps=1)
        self.steps = []

    def configure_gradient_clipping(self, *args, **kwargs):
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        super().configure_gradient_clipping(*args, **kwargs)

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.steps.append((self.step_record, self.gradients))


def train(batches: list[PackedBatch], *, accumulate: int, devices: int = 1) -> list:
    module = Watched()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", precision="64-true", max_steps=1,
        accumulate_grad_batches=accumulate, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    trainer.fit(module, train_dataloaders=DataLoader(batches[rank::devices], batch_size=None))
    return module.steps


def assert_equal_to_one_big_batch(step, batches):
    record, gradients = step
    loss, expected = expected_gradients(batches)
    assert record.loss == pytest.approx(loss, abs=1e-12)
    assert record.targets == sum(int((batch.labels_BT != NO_TARGET).sum()) for batch in batches)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-12)
    norm = torch.stack([gradient.square().sum() for gradient in expected.values()]).sum().sqrt()
    assert record.gradient_norm == pytest.approx(float(norm), rel=1e-9)


@pytest.mark.parametrize("targets", [(10, 100), (0, 7, 128), (0, 0), (64,)])
def test_accumulated_step_equals_one_big_batch(targets):
    batches = [batch_with(count, seed=index) for index, count in enumerate(targets)]
    (step,) = train(batches, accumulate=len(batches))
    assert_equal_to_one_big_batch(step, batches)


def test_ten_targets_of_mean_two_and_a_hundred_of_mean_one(monkeypatch):
    """The literal example: (10 * 2 + 100 * 1) / 110 = 1.0909, where a mean of means gives 1.5."""
    sums = [(20.0, 10), (100.0, 100)]

    def given(hidden_BTE, head_weight_VE, labels_BT):
        loss, count = sums.pop(0)
        return loss + 0 * (hidden_BTE.sum() + head_weight_VE.sum()), torch.tensor(count)

    monkeypatch.setattr("modules.language_model.cross_entropy_sum", given)
    ((record, _),) = train([batch_with(10, seed=0), batch_with(100, seed=1)], accumulate=2)
    assert record.loss == pytest.approx(120 / 110, abs=1e-12)


def test_two_ranks_equal_one_big_batch(tmp_path):
    """Two gloo processes with accumulation: four micro batches with 10, 100, 0 and 50 targets."""
    result = tmp_path / "steps.pickle"
    done = subprocess.run(
        [sys.executable, __file__, str(result)],
        capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (step,) = pickle.loads(result.read_bytes())
    assert_equal_to_one_big_batch(step, two_rank_batches())


def two_rank_batches() -> list[PackedBatch]:
    return [batch_with(count, seed=index) for index, count in enumerate((10, 100, 0, 50))]


if __name__ == "__main__":
    steps = train(two_rank_batches(), accumulate=2, devices=2)
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        Path(sys.argv[1]).write_bytes(pickle.dumps(steps))
