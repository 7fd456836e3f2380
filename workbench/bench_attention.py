"""Speed and memory of attention alone: strategies x kernels x lengths over identical documents.

Subjects take turns within each round, since machines are shared and noisy: every ratio is the median of the rounds'
ratios, never a quotient of numbers from different minutes.

    speedup        full's seconds / own seconds, same kernel and length
    ideal_speedup  full's visible pairs / own visible pairs
    achieved       speedup / ideal_speedup
    bare_ratio     own seconds / those of the bare causal calls on the same segments, cut beforehand (sdpa alone)

Shape letters: B rows, T tokens in a row, H query heads, G key and value heads, D width of a head.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from modules.attention.capabilities import KERNELS, can_serve, check_kernel_name, check_name
from modules.attention.strategies import STRATEGIES, Strategy
from workbench.errors import UserError, user_input

if TYPE_CHECKING:
    from torch import Tensor

    from modules.attention.borders import Borders

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, kw_only=True)
class AttentionBench:
    """What is measured.

    Raises:
        UserError: a name that is not known, or a number out of range.
    """

    tokens: Sequence[int] = (4096, 8192, 16384)
    strategies: Sequence[str] = ("full", "intra_document", "anchor")
    kernels: Sequence[str] = KERNELS
    documents_mean: float = 1000.0
    """Mean of the log-normal distribution that document lengths are drawn from, in tokens."""
    sigma: float = 0.5
    """Its standard deviation in logarithms."""
    seed: int = 0
    rounds: int = 5
    heads: int = 8
    kv_heads: int = 4
    head_width: int = 32
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        with user_input():
            for strategy in self.strategies:
                check_name("--strategies", strategy, tuple(STRATEGIES))
            for kernel in self.kernels:
                check_kernel_name(kernel, auto=False)
            check_name("--dtype", self.dtype, DTYPES)
            check_name("--device", self.device, ("cpu", "cuda"))
        small = [f"--tokens {tokens}: a row has 2 tokens or more." for tokens in self.tokens if tokens < 2]
        if small or self.rounds < 1 or self.documents_mean < 1 or self.sigma < 0:
            raise UserError("\n".join(small) or "--rounds and --documents-mean are at least 1, --sigma at least 0.")
        if min(self.heads, self.kv_heads, self.head_width) < 1 or self.heads % self.kv_heads:
            raise UserError(f"--heads {self.heads} must be a multiple of --kv-heads {self.kv_heads}.")


@dataclass
class Subject:
    """One strategy on one kernel and length."""

    strategy: Strategy
    kernel: str
    tokens: int
    run: Callable[[], None]
    peak_bytes: int
    seconds: list[float]


def log_normal_documents(tokens: int, *, mean: float, sigma: float, seed: int) -> np.ndarray:
    """int32 [tokens]: an anchor (0) and documents 1, 2, ... of log-normal lengths; the row's end cuts the last."""
    rng = np.random.default_rng(seed)
    numbers, document = np.zeros(tokens, dtype=np.int32), 1
    start = 1
    while start < tokens:
        length = max(1, round(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma)))
        numbers[start : start + length] = document
        start, document = start + length, document + 1
    return numbers


def bench_attention(asked: AttentionBench) -> list[dict[str, Any]]:
    """Measures forward and backward, forward alone where a kernel gives no gradients here.

    Returns:
        One row per length, kernel and strategy; one with `why` instead of numbers where the kernel cannot serve.
    """
    import torch

    if asked.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no CUDA device here. Use --device cpu.")
    rows = []
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        for tokens in asked.tokens:
            rows += _bench_length(asked, tokens, progress)
    return rows


def _bench_length(asked: AttentionBench, tokens: int, progress: Progress) -> list[dict[str, Any]]:
    import torch

    from modules.attention.borders import Borders

    numbers = log_normal_documents(tokens, mean=asked.documents_mean, sigma=asked.sigma, seed=asked.seed)
    borders = Borders.of(torch.from_numpy(numbers)[None].to(asked.device))
    strategies = [STRATEGIES[name] for name in dict.fromkeys(("full", *asked.strategies))]
    rows: list[dict[str, Any]] = []
    subjects: list[Subject] = []
    bare: dict[str, list[float]] = {}
    bare_runs: dict[str, Callable[[], None]] = {}
    for kernel in asked.kernels:
        for strategy in strategies:
            gradient, why = _mode(asked, kernel, strategy, tokens)
            row: dict[str, Any] = {
                "strategy": strategy.name,
                "kernel": kernel,
                "tokens": tokens,
                "documents": int(numbers.max()),
            }
            rows.append(row | {"backward": gradient} | ({"why": why} if why else {}))
            if why is None:
                run = _attend(asked, borders, strategy, kernel, gradient)
                run()  # warm-up, and a kernel's compilation
                subjects.append(Subject(strategy, kernel, tokens, run, _peak_bytes(run, asked.device), []))
                if kernel == "sdpa":
                    bare_runs[strategy.name] = _bare_calls(asked, borders, strategy)
                    bare[strategy.name] = []
    task = progress.add_task(f"{tokens} tokens", total=asked.rounds)
    for _ in range(asked.rounds):
        for subject in subjects:
            subject.seconds.append(_timed(subject.run, asked.device))
            if subject.kernel == "sdpa":
                bare[subject.strategy.name].append(_timed(bare_runs[subject.strategy.name], asked.device))
        progress.advance(task)
    measured = {(subject.kernel, subject.strategy.name): subject for subject in subjects}
    for row in rows:
        own = measured.get((row["kernel"], row["strategy"]))
        if own is not None:
            row |= _numbers(own, measured[row["kernel"], "full"], borders)
            if row["kernel"] == "sdpa":
                row["bare_ratio"] = _ratio(own.seconds, bare[row["strategy"]])
    return [row for row in rows if row["strategy"] in asked.strategies]


def _numbers(own: Subject, full: Subject, borders: Borders) -> dict[str, Any]:
    speedup = _ratio(full.seconds, own.seconds)
    ideal = borders.visible_pairs(full.strategy) / borders.visible_pairs(own.strategy)
    return {
        "seconds": statistics.median(own.seconds),
        "peak_bytes": own.peak_bytes,
        "speedup": speedup,
        "ideal_speedup": ideal,
        "achieved": speedup / ideal,
    }


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def _mode(asked: AttentionBench, kernel: str, strategy: Strategy, tokens: int) -> tuple[bool, str | None]:
    """(with gradients?, why not at all)."""
    import torch

    why = None
    for gradient in (True, False):
        why = can_serve(
            kernel,
            strategy=strategy,
            device_type=asked.device,
            dtype=getattr(torch, asked.dtype),
            head_width=asked.head_width,
            needs_gradient=gradient,
            tokens=tokens,
        )
        if why is None:
            return gradient, None
    return False, why


def _inputs(asked: AttentionBench, tokens: int, gradient: bool) -> list[Tensor]:
    import torch

    generator = torch.Generator().manual_seed(asked.seed)
    sizes = (asked.heads, asked.kv_heads, asked.kv_heads)
    made = [torch.randn(1, tokens, heads, asked.head_width, generator=generator) for heads in sizes]
    # As projections make them: tokens before heads in memory.
    cast = [x.to(asked.device, getattr(torch, asked.dtype)).transpose(1, 2) for x in made]
    return [x.requires_grad_(gradient) for x in cast]


def _attend(
    asked: AttentionBench, borders: Borders, strategy: Strategy, kernel: str, gradient: bool
) -> Callable[[], None]:
    import torch

    from modules.attention.attend import attend

    q_BHTD, k_BGTD, v_BGTD = _inputs(asked, borders.document_BT.shape[1], gradient)
    grad_BHTD = torch.randn_like(q_BHTD)

    def run() -> None:
        out_BHTD = attend(q_BHTD, k_BGTD, v_BGTD, borders, strategy, kernel=kernel)
        if gradient:
            torch.autograd.grad(out_BHTD, (q_BHTD, k_BGTD, v_BGTD), grad_BHTD)

    return run


def _bare_calls(asked: AttentionBench, borders: Borders, strategy: Strategy) -> Callable[[], None]:
    """One causal call per segment on tensors that are cut beforehand, the anchor in front where it is seen."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    inputs = [x.detach() for x in _inputs(asked, borders.document_BT.shape[1], False)]
    calls = []
    for segment in borders.segments(strategy):
        tokens = [0] * segment.sees_anchor + list(range(segment.start, segment.stop))
        if not segment.padding:
            calls.append([x[:, :, tokens].contiguous().requires_grad_() for x in inputs])
    grads = [torch.randn_like(q) for q, _, _ in calls]

    def run() -> None:
        for (q, k, v), grad in zip(calls, grads, strict=True):
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=asked.heads != asked.kv_heads)
            torch.autograd.grad(out, (q, k, v), grad)

    return run


def _timed(run: Callable[[], None], device: str) -> float:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _peak_bytes(run: Callable[[], None], device: str) -> int:
    """Most memory that torch held at once during the call, beyond what it held before.

    On the CPU from the allocator's own record, which is the same on every machine, not from the process' size.
    """
    import torch

    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    results = profile.profiler.kineto_results
    changes = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    held = np.cumsum([bytes_ for _, bytes_ in changes])
    return int(held.max(initial=0))


def print_attention(rows: list[dict[str, Any]]) -> None:
    """The table on the terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("strategy", "kernel"):
        table.add_column(heading)
    for heading in ("tokens", "documents", "ms", "peak MB", "speed-up", "ideal", "achieved", "x bare calls"):
        table.add_column(heading, justify="right")
    refused: dict[tuple[str, str], str] = {}
    for row in rows:
        if "why" in row:
            refused[row["kernel"], row["why"]] = f"{row['kernel']}: {row['why']}"
            continue
        bare = f"{row['bare_ratio']:.2f}" if "bare_ratio" in row else ""
        table.add_row(
            row["strategy"],
            row["kernel"] + ("" if row["backward"] else " (forward)"),
            str(row["tokens"]),
            str(row["documents"]),
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['peak_bytes'] / 1e6:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['ideal_speedup']:.2f}",
            f"{row['achieved']:.2f}",
            bare,
        )
    console = Console()
    console.print(table)
    for line in refused.values():
        console.print(f"[dim]{line}[/dim]", highlight=False)
