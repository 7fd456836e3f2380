"""Subjects that take turns: machines are shared and noisy, so only what ran in one round is compared.

A ratio is the median of the rounds' ratios, never a quotient of numbers from different minutes.
"""

import statistics
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

Name = TypeVar("Name", bound=Hashable)


def take_turns(
    subjects: Mapping[Name, Callable[[], object]], *, rounds: int, title: str, device: str = "cpu"
) -> dict[Name, list[float]]:
    """Seconds of every subject in every round. Warm them up before."""
    seconds: dict[Name, list[float]] = {name: [] for name in subjects}
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task(title, total=rounds * len(subjects))
        for _ in range(rounds):
            for name, run in subjects.items():
                _wait_for(device)
                started = time.perf_counter()
                run()
                _wait_for(device)
                seconds[name].append(time.perf_counter() - started)
                progress.advance(task)
    return seconds


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median over rounds of one subject's seconds over another's."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def _wait_for(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
