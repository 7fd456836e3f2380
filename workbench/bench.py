"""Speed of a whole training step on this machine, as ratios measured in one run.

Machines are shared and noisy: the subjects take turns within each round, and a ratio is the median of the rounds'
ratios, never a quotient of numbers from different minutes.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from workbench import build
from workbench.config import resolve

CORPUS = "python_stdlib"


@dataclass(frozen=True)
class Subject:
    """One way to take the same step."""

    strategy: str
    precision: str
    bfloat16_products: str = "auto"


SUBJECTS = [
    Subject("full", "32-true"),
    Subject("intra_document", "32-true"),
    Subject("intra_document_reset", "32-true"),
    Subject("anchor", "32-true"),
    Subject("anchor", "bf16-true", "native"),
    Subject("anchor", "bf16-true", "float32"),
]


def bench_step(*, tokens: int, rounds: int, steps_per_round: int = 3) -> list[dict[str, Any]]:
    """Times training steps of the debug Llama on rows of the built-in corpus.

    Args:
        tokens: context length; one row a step.
        rounds: how often every subject has its turn.
        steps_per_round: steps of one turn.
    Returns:
        One row per subject: strategy, precision, tokens, seconds (median per step) and ratio to anchor in 32-true.
    """
    with TemporaryDirectory() as home:
        steps = [_stepper(subject, tokens, Path(home)) for subject in SUBJECTS]
        for step in steps:
            step()  # warm-up
        seconds: list[list[float]] = [[] for _ in SUBJECTS]
        for _ in range(rounds):
            for index, step in enumerate(steps):
                started = time.perf_counter()
                for _ in range(steps_per_round):
                    step()
                seconds[index].append((time.perf_counter() - started) / steps_per_round)
    base = seconds[SUBJECTS.index(Subject("anchor", "32-true"))]
    return [
        {
            "subject": "workbench",
            "strategy": subject.strategy,
            "precision": subject.precision,
            "bfloat16_products": subject.bfloat16_products if subject.precision.startswith("bf16") else None,
            "tokens": tokens,
            "seconds": statistics.median(own),
            "ratio": statistics.median(mine / anchor for mine, anchor in zip(own, base, strict=True)),
        }
        for subject, own in zip(SUBJECTS, seconds, strict=True)
    ]


def _stepper(subject: Subject, tokens: int, home: Path) -> Callable[[], None]:
    """A function that takes one optimizer step, built as a run builds it but without Lightning's loop."""
    from modules.attention.borders import Borders
    from modules.loss import cross_entropy_sum
    from modules.optim import build_optimizer
    from modules.precision import precision_plugin

    config = resolve(
        (
            "",
            {
                "attention.strategy": subject.strategy,
                "trainer.precision": subject.precision,
                "trainer.bfloat16_products": subject.bfloat16_products,
                "data.context_length": tokens,
                "data.corpus": CORPUS,
            },
        )
    )
    resolved = build.check(config)
    rows = build.data(resolved, build.store(resolved, home)).training_rows
    model = build.model(resolved).to(build.DTYPES[subject.precision]).to(resolved.device_type)
    optimizer = build_optimizer(model, config.optimizer)
    plugin = precision_plugin(
        subject.precision, device_type=resolved.device_type, bfloat16_products=config.trainer.bfloat16_products
    )
    turn = iter(range(10**9))

    def step() -> None:
        batch = rows[[next(turn) % len(rows)]]
        batch = type(batch)(*(part.to(resolved.device_type) for part in batch))
        hidden = model(batch.tokens_BT, batch.position_BT, Borders.of(batch.document_BT))
        loss, targets = cross_entropy_sum(hidden, model.head_weight_VE, batch.labels_BT)
        (loss / targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if resolved.device_type == "cuda":
            torch.cuda.synchronize()

    if plugin is None:
        return step

    def in_float32_products() -> None:
        with plugin.forward_context():
            step()

    return in_float32_products


def print_steps(rows: list[dict[str, Any]]) -> None:
    """The table on the terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("strategy", "precision", "bfloat16 products"):
        table.add_column(heading)
    for heading in ("tokens", "ms per step", "x anchor 32-true"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["strategy"],
            row["precision"],
            row["bfloat16_products"] or "",
            str(row["tokens"]),
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['ratio']:.2f}",
        )
    Console().print(table)
