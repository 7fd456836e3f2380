"""What a strategy hides stays hidden in every way a model is run, and each way gives the same numbers.

Training, evaluation, `no_grad`, `inference_mode`, activation checkpointing, Lightning's validation, torch.compile: a
model that falls back to full attention in one of them would train on one thing and be judged on another.
"""

from collections.abc import Callable
from copy import deepcopy

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from modules.attention.borders import Borders
from modules.attention.config import AttentionConfig
from modules.attention.strategies import STRATEGIES, Strategy
from modules.batch import NO_TARGET, PackedBatch
from modules.language_model import LanguageModel
from modules.llama import Llama, LlamaConfig
from modules.optim import OptimizerConfig
from modules.rotary import RotaryConfig

VOCABULARY = 97
SHAPE = LlamaConfig(
    vocabulary_size=VOCABULARY, width=32, layers=3, heads=4, kv_heads=2, head_width=8, hidden_width=48,
    norm_epsilon=1e-5, tied_embeddings=False, rope_theta=1e4, max_positions=64,
)  # fmt: skip


def strategy_of(name: str) -> Strategy:
    """The registered strategy; with a window short enough to hide something in rows of 20 tokens."""
    return AttentionConfig(
        strategy=name,
        window=4 if STRATEGIES[name].window else None,
        sink=2 if STRATEGIES[name].sink else None,
    ).resolve()


def build(name: str, dtype: torch.dtype = torch.float32) -> Llama:
    strategy = strategy_of(name)
    torch.manual_seed(0)
    kernel = "sdpa" if strategy.window is None else "reference"
    model = Llama(SHAPE, strategy=strategy, kernel=kernel, rotary=RotaryConfig())
    for parameter in model.parameters():  # scores of about 1, so that attention matters
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.3)
    return model.to(dtype)


def packed(name: str) -> PackedBatch:
    """Two rows: documents of 5, 5, 6 and 1 tokens and padding, and two documents without padding."""
    anchor = [0] if STRATEGIES[name].anchor else []
    length = 19 + len(anchor)
    rows = [[*anchor, *[1] * 5, *[2] * 5, *[3] * 6, 4, -1, -1], [*anchor, *[1] * 8, *[2] * 11]]
    document_BT = torch.tensor(rows, dtype=torch.int32)
    tokens_BT = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))
    labels_BT = torch.where(document_BT == document_BT.roll(-1, dims=1), tokens_BT.roll(-1, dims=1), NO_TARGET)
    labels_BT[:, -1] = NO_TARGET
    return PackedBatch(tokens_BT, labels_BT, document_BT, torch.arange(length).repeat(2, 1))


def logits(model: Llama, batch: PackedBatch, run: Callable[..., Tensor] | None = None) -> Tensor:
    run = model if run is None else run
    return model.logits(run(batch.tokens_BT, batch.position_BT, Borders.of(batch.document_BT))).detach()


class Checkpointed(nn.Module):
    """A layer that keeps its input alone and runs again on the way back."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: object) -> Tensor:
        out: Tensor = checkpoint(self.layer, *inputs, use_reentrant=False)
        return out


def with_checkpoints(model: Llama) -> Llama:
    model = deepcopy(model)
    model.layers = nn.ModuleList(Checkpointed(layer) for layer in model.layers)
    return model


def train(model: Llama, batch: PackedBatch) -> Tensor:
    return logits(model.train(), batch)


def evaluation(model: Llama, batch: PackedBatch) -> Tensor:
    return logits(model.eval(), batch)


@torch.no_grad()
def no_grad(model: Llama, batch: PackedBatch) -> Tensor:
    return logits(model.eval(), batch)


def inference_mode(model: Llama, batch: PackedBatch) -> Tensor:
    with torch.inference_mode():
        return logits(model.eval(), batch)


def checkpointed(model: Llama, batch: PackedBatch) -> Tensor:
    return logits(with_checkpoints(model).train(), batch)


def lightning_validation(model: Llama, batch: PackedBatch) -> Tensor:
    """Out of `Trainer.validate`: what the model in the module returns while its `validation_step` runs."""
    module = LanguageModel(model, optimizer=OptimizerConfig(), max_steps=1)
    hidden: list[Tensor] = []
    hook = model.register_forward_hook(lambda _, inputs, output: hidden.append(output))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.validate(module, DataLoader([batch], batch_size=None), verbose=False)
    hook.remove()
    assert len(hidden) == 1
    with torch.inference_mode():
        return model.logits(hidden[0])


MODES = [train, evaluation, no_grad, inference_mode, checkpointed, lightning_validation]


@pytest.mark.filterwarnings("ignore:.*dataloader.*workers")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_document_reads_no_other_one_in_any_mode(
    name: str, dtype: torch.dtype, mode: Callable[[Llama, PackedBatch], Tensor]
) -> None:
    """And every mode's logits are those of training, bit for bit."""
    model, batch = build(name, dtype), packed(name)
    before = mode(model, batch)
    assert torch.equal(before, train(model, batch))
    check_what_moves(name, batch, before, lambda changed: mode(model, changed), every_token=True)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_document_reads_no_other_one_compiled(name: str, fresh_compiler: None) -> None:
    """Compiled results are compared with compiled ones: their rounding is their own. Training, then evaluation."""
    model, batch = build(name), packed(name)
    compiled = torch.compile(model, backend="aot_eager")
    for training in (True, False):
        compiled.train(training)
        with torch.set_grad_enabled(training):
            before = logits(model, batch, compiled)
            torch.testing.assert_close(before, logits(model, batch), rtol=0, atol=1e-5)
            check_what_moves(name, batch, before, lambda changed: logits(model, changed, compiled), every_token=False)


def check_what_moves(
    name: str, batch: PackedBatch, before: Tensor, after: Callable[[PackedBatch], Tensor], *, every_token: bool
) -> None:
    """Changes tokens of document 1 of the first row, then the anchor, and looks at whose logits move."""
    document_T = batch.document_BT[0]
    tokens_of_1 = (document_T == 1).nonzero()[:, 0].tolist()
    for token in tokens_of_1 if every_token else tokens_of_1[:1]:
        moved_BT = (after(with_another_token(batch, token)) != before).any(-1)
        moved_T = moved_BT[0]
        assert moved_T[token] and not moved_T[:token].any() and not moved_BT[1].any()
        later_T = document_T > 1
        assert moved_T[later_T].all() if name == "full" else not moved_T[later_T].any()
    if STRATEGIES[name].anchor:
        moved_BT = (after(with_another_token(batch, 0)) != before).any(-1)
        assert moved_BT[0, document_T >= 0].all() and not moved_BT[1].any()


def with_another_token(batch: PackedBatch, token: int) -> PackedBatch:
    tokens_BT = batch.tokens_BT.clone()
    tokens_BT[0, token] = (tokens_BT[0, token] + 1) % VOCABULARY
    return batch._replace(tokens_BT=tokens_BT)


@pytest.mark.parametrize("setting", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_checkpointing_changes_no_bit_of_loss_and_gradients(name: str, setting: str) -> None:
    dtype = torch.bfloat16 if setting == "bfloat16" else torch.float32
    plain, batch = build(name, dtype), packed(name)
    saving = with_checkpoints(plain)
    calls = [0, 0]
    losses = []
    for i, model in enumerate((plain, saving)):

        def count(*_: object, i: int = i) -> None:
            calls[i] += 1

        for layer in model.layers:
            getattr(layer, "layer", layer).self_attn.register_forward_pre_hook(count)
        with torch.autocast("cpu", torch.bfloat16, enabled=setting == "autocast"):
            out = model.logits(model(batch.tokens_BT, batch.position_BT, Borders.of(batch.document_BT)))
            loss = nn.functional.cross_entropy(out.flatten(0, 1), batch.labels_BT.flatten())
        loss.backward()
        losses.append(loss.detach())
    assert calls == [SHAPE.layers, 2 * SHAPE.layers]
    assert torch.equal(*losses)
    for (parameter, value), again in zip(plain.named_parameters(), saving.parameters(), strict=True):
        assert value.grad is not None and value.grad.any(), parameter
        assert torch.equal(value.grad, again.grad), parameter


@pytest.mark.parametrize("name", ["anchor", "sink_window"])
def test_checkpointing_survives_compilation(name: str, fresh_compiler: None) -> None:
    """Loss and gradients, and what a document reads, of a compiled model whose layers are checkpointed."""
    plain, batch = build(name), packed(name)
    saving = with_checkpoints(plain)
    compiled = torch.compile(saving, backend="aot_eager")
    before = logits(saving, batch, compiled)
    check_what_moves(name, batch, before, lambda changed: logits(saving, changed, compiled), every_token=False)
    for run in (plain, compiled):
        run(batch.tokens_BT, batch.position_BT, Borders.of(batch.document_BT)).square().mean().backward()
    for (parameter, value), again in zip(plain.named_parameters(), saving.parameters(), strict=True):
        if value.grad is not None:
            torch.testing.assert_close(
                again.grad, value.grad, rtol=1e-5, atol=1e-6, msg=lambda m, p=parameter: f"{p}: {m}"
            )


@pytest.fixture
def fresh_compiler() -> None:
    """What earlier tests compiled counts against the limit of versions that torch keeps of a function."""
    torch.compiler.reset()
