"""Speed and memory of attention alone: strategies x kernels x lengths over identical documents.

    speedup        full's seconds / own seconds, same kernel and length
    ideal_speedup  full's visible pairs / own visible pairs
    achieved       speedup / ideal_speedup
    bare_ratio     own seconds / those of the bare causal calls on the same segments, cut beforehand (sdpa alone)

Shape letters: B rows, T tokens in a row, H query heads, G key and value heads, D width of a head.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from modules.attention.capabilities import KERNELS, can_serve, check_kernel_name, check_name
from modules.attention.strategies import STRATEGIES, Strategy
from workbench.bench.rounds import ratio, take_turns
from workbench.bench.rows import log_normal_lengths, row_layout
from workbench.errors import UserError, user_input

if TYPE_CHECKING:
    from torch import Tensor

    from modules.attention.borders import Borders

DTYPES = ("float32", "bfloat16", "float16", "float64")
BARE = "bare calls"
"""In place of a kernel: the subject that `bare_ratio` compares with."""


@dataclass(frozen=True, kw_only=True)
class AttentionBench:
    """What is measured.

    Raises:
        UserError: a name that is not known, or a number out of range; all at once.
    """

    tokens: Sequence[int] = (4096, 8192, 16384)
    strategies: Sequence[str] = ("full", "intra_document", "anchor")
    kernels: Sequence[str] | None = None
    """None: all but `reference`, whose memory grows with the square of the length."""
    documents_mean: float = 1000.0
    """Mean document length in tokens, as near as whole documents that fill the row come to it."""
    sigma: float = 1.0
    """Standard deviation of the logarithms of the lengths, which are log-normal."""
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
            for kernel in self.kernels or ():
                check_kernel_name(kernel, auto=False)
            check_name("--dtype", self.dtype, DTYPES)
            check_name("--device", self.device, ("cpu", "cuda"))
        broken = [f"--tokens {tokens}: a row has 2 tokens or more." for tokens in self.tokens if tokens < 2]
        for name in ("rounds", "documents_mean", "heads", "kv_heads", "head_width"):
            if not 1 <= getattr(self, name) < math.inf:
                broken.append(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1.")
        for name in ("sigma", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                broken.append(f"--{name} {getattr(self, name)} must be at least 0.")
        if not broken and self.heads % self.kv_heads:
            broken.append(f"--heads {self.heads} must be a multiple of --kv-heads {self.kv_heads}.")
        if broken:
            raise UserError("\n".join(broken))


def bench_attention(asked: AttentionBench) -> list[dict[str, Any]]:
    """Measures forward and backward, forward alone where a kernel gives no gradients here.

    Returns:
        One row per length, kernel and strategy; with `why` and no numbers where the kernel cannot serve.
    Raises:
        UserError: there is no such device, or a kernel that was named can serve none of the strategies.
    """
    import torch

    if asked.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no CUDA device here. Use --device cpu.")
    rows = [row for tokens in asked.tokens for row in _bench_length(asked, tokens)]
    for kernel in asked.kernels or ():
        reasons = {row["why"] for row in rows if row["kernel"] == kernel}
        if None not in reasons:
            raise UserError(f"--kernels {kernel}: {' '.join(sorted(reasons))} Leave it out.")
    return rows


def _bench_length(asked: AttentionBench, tokens: int) -> list[dict[str, Any]]:
    import torch

    from datamodules.anchors import number_documents
    from modules.attention.borders import Borders

    lengths = log_normal_lengths(tokens, mean=asked.documents_mean, sigma=asked.sigma, seed=asked.seed)
    document_BT = torch.from_numpy(number_documents(row_layout(lengths), context_length=tokens))
    borders = Borders.of(document_BT.to(asked.device))
    # `full` is measured whether or not it is asked for: the others are compared with it.
    strategies = [STRATEGIES[name] for name in dict.fromkeys(("full", *asked.strategies))]
    rows: list[dict[str, Any]] = []
    runs: dict[tuple[str, str], Callable[[], None]] = {}
    peaks: dict[tuple[str, str], int] = {}
    for kernel in asked.kernels or [name for name in KERNELS if name != "reference"]:
        for strategy in strategies:
            gradient, why = _mode(asked, kernel, strategy, tokens)
            rows.append(
                {
                    "strategy": strategy.name,
                    "kernel": kernel,
                    "tokens": tokens,
                    "documents": len(lengths),
                    "documents_mean": float(lengths.mean()),
                    "backward": gradient,
                    "why": why,
                    **dict.fromkeys(NUMBERS),
                }
            )
            if why is not None:
                continue
            run = _attend(asked, borders, strategy, kernel, gradient)
            run()  # warm-up, and a kernel's compilation
            runs[kernel, strategy.name] = run
            peaks[kernel, strategy.name] = _peak_bytes(run, asked.device)
            if kernel == "sdpa":
                runs[BARE, strategy.name] = _bare_calls(asked, borders, strategy)
                runs[BARE, strategy.name]()
    seconds = take_turns(runs, rounds=asked.rounds, title=f"{tokens} tokens", device=asked.device)
    for row in rows:
        key = (row["kernel"], row["strategy"])
        if key in seconds:
            own, full = seconds[key], seconds[row["kernel"], "full"]
            visible = borders.visible_pairs(STRATEGIES[row["strategy"]])
            ideal = borders.visible_pairs(STRATEGIES["full"]) / visible
            row |= {"seconds": statistics.median(own), "peak_bytes": peaks[key]}
            row |= {"speedup": ratio(full, own), "ideal_speedup": ideal, "achieved": ratio(full, own) / ideal}
            if row["kernel"] == "sdpa":
                row["bare_ratio"] = ratio(own, seconds[BARE, row["strategy"]])
    return [row for row in rows if row["strategy"] in asked.strategies]


NUMBERS = ("seconds", "peak_bytes", "speedup", "ideal_speedup", "achieved", "bare_ratio")
"""What is measured of a subject; null where there is nothing to measure."""


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
        calls.append([x[:, :, tokens].contiguous().requires_grad_() for x in inputs])
    grads = [torch.randn_like(q) for q, _, _ in calls]

    def run() -> None:
        for (q, k, v), grad in zip(calls, grads, strict=True):
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=asked.heads != asked.kv_heads)
            torch.autograd.grad(out, (q, k, v), grad)

    return run


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
    changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    held = np.cumsum([change for _, change in changes])
    return int(held.max(initial=0))


def print_attention(asked: AttentionBench, rows: list[dict[str, Any]]) -> None:
    """The table on the terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("strategy", "kernel"):
        table.add_column(heading)
    for heading in ("tokens", "ms", "peak MB", "speed-up", "ideal", "achieved", "x bare"):
        table.add_column(heading, justify="right")
    for row in rows:
        if row["why"] is None:
            table.add_row(
                row["strategy"],
                row["kernel"] + ("" if row["backward"] else " (forward)"),
                str(row["tokens"]),
                f"{row['seconds'] * 1e3:.1f}",
                f"{row['peak_bytes'] / 1e6:.1f}",
                f"{row['speedup']:.2f}",
                f"{row['ideal_speedup']:.2f}",
                f"{row['achieved']:.2f}",
                "" if row["bare_ratio"] is None else f"{row['bare_ratio']:.2f}",
            )
    console = Console()
    console.print(table)
    for tokens in asked.tokens:
        found = next(row for row in rows if row["tokens"] == tokens)
        console.print(
            f"{tokens} tokens: {found['documents']} documents of mean {found['documents_mean']:.0f}, log-normal with "
            f"sigma {asked.sigma:g}, seed {asked.seed}.",
            highlight=False,
        )
    for line in dict.fromkeys(f"{row['kernel']}: {row['why']}" for row in rows if row["why"] is not None):
        console.print(line, style="dim", highlight=False, markup=False)
