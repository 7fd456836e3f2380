"""Speed of a whole training step: forward, loss, backward, AdamW; ours by strategy, and other libraries'.

The model has 4 layers, width 256, 8 query and 4 key heads, 4096 tokens of vocabulary. A step is one row: an anchor and
documents of log-normal lengths, the same for every subject.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from modules.attention.capabilities import check_name, resolve_kernel
from modules.attention.strategies import STRATEGIES
from workbench.bench.rounds import ratio, take_turns
from workbench.bench.rows import log_normal_lengths, random_row
from workbench.errors import UserError, user_input

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from modules.batch import PackedBatch
    from modules.llama import Llama

PRECISIONS = ("32-true", "bf16-true", "bf16-mixed")
DOCUMENTS, SIGMA, SEED, LEARNING_RATE = 18, 0.5, 0, 1e-4
LOSS_TOLERANCE = 1e-4
"""Relative. Between float32 losses of one step that two libraries compute in different orders."""


class DifferentLossError(Exception):
    """A peer computes something else, so that a comparison of speed would mean nothing."""


@dataclass(frozen=True)
class Subject:
    """One way to take the same step. The fields are columns of its row."""

    subject: str
    strategy: str
    precision: str
    bfloat16_products: str | None = None


def bench_step(
    *,
    tokens: int,
    rounds: int,
    peers: Sequence[str] = (),
    precisions: Sequence[str] = ("32-true",),
    strategies: Sequence[str] = ("full", "intra_document", "intra_document_reset", "anchor"),
) -> list[dict[str, Any]]:
    """Times training steps.

    Args:
        tokens: context length.
        rounds: how often every subject has its turn.
        peers: other libraries that train the same weights on the same rows: names in PEERS.
        precisions: of our own steps; the two of bfloat16 are measured with native products and with those of
            `modules/float32_products.py`, bf16-true with float32 master weights.
        strategies: what is measured; `full` is, whether or not it is among them.
    Returns:
        One row per subject: seconds (median per step), ratio to our 32-true step of the same strategy, speedup over
        our full attention in 32-true.
    Raises:
        UserError: an unknown name, or a peer that is not installed.
        DifferentLossError: a peer has another loss on the same weights and row.
    """
    from workbench.bench.peers import FULL_ONLY, PEERS

    if tokens < 64 or rounds < 1:
        raise UserError(f"--tokens {tokens} must be at least 64, --rounds {rounds} at least 1.")
    with user_input():
        for key, given, valid in (
            ("--peer", peers, PEERS),
            ("--precisions", precisions, PRECISIONS),
            ("--strategies", strategies, STRATEGIES),
        ):
            for name in given:
                check_name(key, name, tuple(valid))
    steps: dict[Subject, Callable[[], float]] = {}
    for strategy in dict.fromkeys(("full", *strategies)):
        batch = _row(strategy, tokens)
        base = Subject("workbench", strategy, "32-true")
        steps[base] = _ours(base, batch)
        for peer in dict.fromkeys(peers):
            if strategy == "full" or peer not in FULL_ONLY:
                steps[replace(base, subject=peer)] = _step(*PEERS[peer](_model(strategy, tokens), batch))
        for precision in dict.fromkeys(precisions):
            for products in ("native", "float32") if precision != "32-true" else ():
                subject = replace(base, precision=precision, bfloat16_products=products)
                steps[subject] = _ours(subject, batch)
    _warm_up(steps)
    seconds = take_turns(steps, rounds=rounds, title=f"{tokens} tokens")
    full = seconds[Subject("workbench", "full", "32-true")]
    return [
        {
            **vars(subject),
            "tokens": tokens,
            "seconds": statistics.median(own),
            "ratio": ratio(own, seconds[Subject("workbench", subject.strategy, "32-true")]),
            "speedup": ratio(full, own),
        }
        for subject, own in seconds.items()
    ]


def _warm_up(steps: dict[Subject, Callable[[], float]]) -> None:
    """First steps, which must give one loss where the arithmetic is the same."""
    losses = {subject: step() for subject, step in steps.items()}
    for subject, loss in losses.items():
        expected = losses[Subject("workbench", subject.strategy, "32-true")]
        if subject.precision == "32-true" and abs(loss - expected) > LOSS_TOLERANCE * abs(expected):
            raise DifferentLossError(
                f"{subject.subject} has a loss of {loss} on the weights and row on which workbench has {expected}: "
                "it trains something else, so a comparison of speed would mean nothing."
            )


def _row(strategy: str, tokens: int) -> PackedBatch:
    lengths = log_normal_lengths(tokens, mean=tokens / DOCUMENTS, sigma=SIGMA, seed=SEED)
    positions = STRATEGIES[strategy].default_positions
    return random_row(lengths, vocabulary_size=_shape().vocabulary_size, positions=positions, seed=SEED)


def _shape() -> Any:
    from modules.llama import LlamaConfig

    return LlamaConfig(
        vocabulary_size=4096, width=256, layers=4, heads=8, kv_heads=4, head_width=32, hidden_width=768,
        norm_epsilon=1e-5, tied_embeddings=False, rope_theta=10_000.0, max_positions=131_072,
    )  # fmt: skip


def _model(strategy: str, tokens: int) -> Llama:
    import torch

    from modules.llama import Llama
    from modules.rotary import RotaryConfig

    chosen = STRATEGIES[strategy]
    with user_input():
        kernel = resolve_kernel(
            "auto", strategy=chosen, device_type="cpu", dtype=torch.float32, head_width=32, tokens=tokens
        )
    torch.manual_seed(SEED)
    return Llama(_shape(), strategy=chosen, kernel=kernel, rotary=RotaryConfig())


def _ours(subject: Subject, batch: PackedBatch) -> Callable[[], float]:
    import torch

    from modules.float32_products import Float32Products
    from modules.optim import OptimizerConfig, build_optimizer

    model = _model(subject.strategy, batch.tokens_BT.shape[1])
    if subject.precision == "bf16-true":
        model = model.to(torch.bfloat16)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=subject.precision == "bf16-mixed"):
            return _loss(model, batch)

    masters = subject.precision == "bf16-true"
    step = _step(model, loss, build_optimizer(model, OptimizerConfig(learning_rate=LEARNING_RATE)) if masters else None)

    def with_products() -> float:
        with Float32Products() if subject.bfloat16_products == "float32" else nullcontext():
            return step()

    return with_products


def _loss(model: Llama, batch: PackedBatch) -> Tensor:
    from modules.attention.borders import Borders
    from modules.loss import cross_entropy_sum

    # Borders are made anew, as they are for every batch.
    hidden_BTE = model(batch.tokens_BT, batch.position_BT, Borders.of(batch.document_BT))
    loss_sum, targets = cross_entropy_sum(hidden_BTE, model.head_weight_VE, batch.labels_BT)
    return loss_sum / targets


def anchor_steps(batches: Iterator[PackedBatch], *, tokens: int) -> Callable[[], float]:
    """What takes one step of our anchor model in float32 on the next batch, which it waits for."""
    model = _model("anchor", tokens)
    return _step(model, lambda: _loss(model, next(batches)))


def _step(model: nn.Module, loss: Callable[[], Tensor], optimizer: Optimizer | None = None) -> Callable[[], float]:
    """What takes one training step, with AdamW unless told otherwise, and returns its loss."""
    import torch

    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step() -> float:
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(value.detach())

    return step


def print_steps(rows: list[dict[str, Any]]) -> None:
    """The table on the terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("subject", "strategy", "precision"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ms", "x ours", "speed-up"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["subject"],
            row["strategy"],
            row["precision"] + (f", {row['bfloat16_products']} products" if row["bfloat16_products"] else ""),
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['speedup']:.2f}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"{rows[0]['tokens']} tokens: {DOCUMENTS} documents, log-normal with sigma {SIGMA}, seed {SEED}. x ours: of "
        "workbench's step in 32-true with the same strategy. Speed-up: over workbench's full attention.",
        highlight=False,
    )
