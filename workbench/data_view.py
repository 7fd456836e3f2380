"""What `workbench prepare` shows: how far tokenising is, how long documents are, and where every token went."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from datamodules.tokenising import Progress as Tokenised

_BAR = 24


@contextmanager
def tokenising_progress() -> Iterator[Callable[[str, Tokenised], None]]:
    """A bar for each source on standard error, with tokens and tokens/s; only the last numbers where that is no
    terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[said]}", markup=False),
        TimeRemainingColumn(),
    )
    start, began = time.monotonic(), dict[str, float]()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks = {}
        last: dict[str, str] = {}

        def show(source: str, tokenised: Tokenised) -> None:
            began.setdefault(source, time.monotonic() if began else start)
            if source not in tasks:
                tasks[source] = bars.add_task(source, total=None, said="")
            seconds = time.monotonic() - began[source]
            speed = f", {tokenised.tokens / seconds:,.0f} tokens/s" if seconds > 0.1 else ""
            last[source] = f"{tokenised.tokens:,} tokens{speed}"
            bars.update(tasks[source], completed=tokenised.size_done, total=tokenised.size or None, said=last[source])

        yield show
    if not console.is_terminal:
        for source, said in last.items():
            console.print(f"{source}: {said}", markup=False, highlight=False)


def length_histogram(lengths: np.ndarray) -> list[tuple[str, int, int]]:
    """(range of tokens, documents, tokens) by powers of two, from the shortest to the longest.

        lengths 1 5 6 700  ->  ("1", 1, 1) ("2-3", 0, 0) ("4-7", 2, 11) ... ("512-1,023", 1, 700)

    Args:
        lengths: int64 [documents], each >= 1.
    """
    power = np.frexp(lengths)[1] - 1
    low, high = int(power.min()), int(power.max())
    documents = np.bincount(power - low, minlength=high - low + 1)
    tokens = np.bincount(power - low, lengths, high - low + 1).astype(np.int64)
    return [
        (f"{1 << p:,}" if p == 0 else f"{1 << p:,}-{(2 << p) - 1:,}", int(documents[p - low]), int(tokens[p - low]))
        for p in range(low, high + 1)
    ]


def print_lengths(lengths: np.ndarray) -> None:
    """The histogram as a table; bars show the share of tokens."""
    rows = length_histogram(lengths)
    most = max(tokens for _, _, tokens in rows)
    table = Table(title="Lengths of documents", title_justify="left", box=None)
    for heading in ("tokens each", "documents", "tokens in all"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for span, documents, tokens in rows:
        table.add_row(span, f"{documents:,}", f"{tokens:,}", "#" * round(_BAR * tokens / most))
    Console().print(table)


def print_report(report: Mapping[str, int | float]) -> None:
    """`build.data_report` as a table of training and validation side by side, and what concerns neither above it."""
    console = Console()
    packing = [key.removeprefix("validation/") for key in report if key.startswith("validation/")]
    packing += [key.removeprefix("training/") for key in report if key.startswith("training/")]
    rest = Table(title="Documents", title_justify="left", box=None, show_header=False)
    rest.add_column(min_width=24)
    rest.add_column(justify="right")
    for key, value in report.items():
        if not key.startswith(("training/", "validation/")):
            rest.add_row(key.removeprefix("store/"), _number(value))
    table = Table(title="Rows", title_justify="left", box=None)
    table.add_column("", min_width=24)
    for part in ("training", "validation"):
        table.add_column(part, justify="right")
    for key in dict.fromkeys(packing):
        table.add_row(key, *(_number(report.get(f"{part}/{key}")) for part in ("training", "validation")))
    for each in (rest, table):
        console.print()
        console.print(each)


def _number(value: int | float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"
