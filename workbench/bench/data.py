"""Speed of the way from documents to rows: tokenising, planning, assembling rows, and a training step fed by them.

tokenize_ratio     the library's own batch call on the same text in one process, over ours into a store
plan_seconds       one million documents, log-normal of median 1000 tokens; the slower packing
row_tokens_per_second   batches of 8 rows of 4096 tokens from a store of such documents, on one core
step_ratio         a step on the next batch from the store, over one on the same row kept in memory
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from workbench.bench.rounds import ratio, take_turns
from workbench.errors import UserError

if TYPE_CHECKING:
    from datamodules.rows import PackedRows
    from datamodules.tokenizers import SavedTokenizer

MEDIAN_TOKENS, SIGMA, SEED = 1000, 1.0, 0
CONTEXT_LENGTH, ROWS_PER_BATCH, VOCABULARY = 4096, 8, 4096
BARS = {
    "plan_seconds": ("< 2", 2.0),
    "row_tokens_per_second": (">= 50 million", 50e6),
    "tokenize_ratio": (">= 0.9", 0.9),
    "step_ratio": ("<= 1.05", 1.05),
}
"""What each figure is held to, in words and as a number."""


def bench_data(*, documents: int = 1_000_000, tokens: int = 20_000_000, rounds: int = 5) -> dict[str, Any]:
    """Measures all of it on this machine.

    Args:
        documents: how many are planned.
        tokens: of the store that rows are made from.
        rounds: how often subjects that are compared take turns.
    Raises:
        UserError: a number below 1.
    """
    for name, value, least in (("documents", documents, 1), ("tokens", tokens, 200_000), ("rounds", rounds, 1)):
        if value < least:
            raise UserError(f"--{name} {value} must be at least {least}.")
    plans = {packing: _plan_seconds(documents, packing, rounds) for packing in ("concatenate", "best_fit")}
    with TemporaryDirectory() as folder:
        rows = _rows(Path(folder), tokens)
        return {
            "plan_seconds": max(plans.values()),
            **{f"plan_seconds_{packing}": seconds for packing, seconds in plans.items()},
            "documents": documents,
            "row_tokens_per_second": _row_speed(rows, rounds),
            "tokenize_ratio": _tokenize_ratio(Path(folder), rounds),
            "step_ratio": _step_ratio(rows, rounds),
        }


def print_data(figures: dict[str, Any]) -> None:
    """The figures beside their bars."""
    table = Table(box=None)
    for heading, justify in (("", "left"), ("measured", "right"), ("bar", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for name, value in figures.items():
        shown = f"{value:,.3f}" if value < 1000 else f"{value:,.0f}"
        table.add_row(name, shown, BARS[name][0] if name in BARS else "")
    Console().print(table)


def _lengths(count: int) -> np.ndarray:
    drawn = np.random.default_rng(SEED).lognormal(np.log(MEDIAN_TOKENS), SIGMA, count)
    return np.maximum(drawn.astype(np.int64), 1)


def _plan_seconds(documents: int, packing: Any, rounds: int) -> float:
    from datamodules.packing import plan_rows

    lengths = _lengths(documents)
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        plan_rows(
            lengths,
            context_length=CONTEXT_LENGTH,
            anchor="row_start",
            packing=packing,
            long_documents="split",
            tail="pad",
        )
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _rows(folder: Path, tokens: int) -> PackedRows:
    """Rows of a store on disk, whose ids are random."""
    import json

    from datamodules.config import DataConfig
    from datamodules.corpus import Corpus
    from datamodules.rows import PackedRows
    from datamodules.splits import plan_parts
    from datamodules.tokenizers import load_tokenizer

    lengths = _lengths(max(2, tokens // int(MEDIAN_TOKENS * np.exp(SIGMA**2 / 2))))
    random = np.random.default_rng(SEED)
    file = folder / "ids.jsonl"
    with file.open("w") as lines:
        for length in lengths:
            lines.write(json.dumps({"input_ids": random.integers(0, 256, length).tolist()}) + "\n")
    config = DataConfig(
        corpus=str(file), context_length=CONTEXT_LENGTH, anchor="row_start", positions="continuous", processes=1
    )
    tokenizer = load_tokenizer("byte")
    corpus = Corpus.open_or_build(folder / "home", config, tokenizer)
    training, _ = plan_parts(corpus.table, config, tokenizer)
    return PackedRows(training, corpus, tokenizer, positions="continuous", labels="within_document")


def _row_speed(rows: PackedRows, rounds: int) -> float:
    """Tokens a second, the median over rounds; each round makes every row once, in a random order."""
    order = np.random.default_rng(SEED).permutation(len(rows))
    batches = [order[i : i + ROWS_PER_BATCH] for i in range(0, len(order), ROWS_PER_BATCH)]
    rows[batches[0]]

    def assemble() -> None:
        for batch in batches:
            rows[batch]

    seconds = take_turns({"rows": assemble}, rounds=rounds, title="rows")["rows"]
    return len(rows) * CONTEXT_LENGTH / statistics.median(seconds)


def _tokenize_ratio(folder: Path, rounds: int) -> float:
    """Both in this process and in one thread, as in each of the processes that share a large source."""
    from datamodules.corpus import Corpus

    tokenizer, texts, config = _text(folder)
    homes = count()

    def library() -> None:
        tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)

    def ours() -> None:
        Corpus.open_or_build(folder / f"tokens-{next(homes)}", config, tokenizer)

    with _one_thread():
        library()
        ours()
        seconds = take_turns({"library": library, "ours": ours}, rounds=rounds, title="tokenising")
    return ratio(seconds["library"], seconds["ours"])


@contextmanager
def _one_thread() -> Iterator[None]:
    name = "TOKENIZERS_PARALLELISM"  # the library asks for it at each call
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _text(folder: Path) -> tuple[SavedTokenizer, list[str], Any]:
    """Python's own sources, and a byte-level BPE tokenizer trained on some of them."""
    import json

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from datamodules.config import DataConfig
    from datamodules.sources.config import SourceConfig
    from datamodules.sources.find import read_documents
    from datamodules.tokenizers import SavedTokenizer, load_tokenizer

    texts = [str(document.content) for document in read_documents(SourceConfig(max_documents=400))]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(texts[:100], trainer)
    backend.save(str(folder / "tokenizer.json"))
    corpus = folder / "text.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    assert isinstance(tokenizer, SavedTokenizer)
    return tokenizer, texts, DataConfig(corpus=str(corpus), processes=1)


def _step_ratio(rows: PackedRows, rounds: int) -> float:
    """Of the model that `bench step` measures, one row a step. Both take the same rows in the same order."""
    from workbench.bench.step import anchor_steps

    order = np.random.default_rng(SEED).permutation(len(rows))[:8]
    kept = [rows[[row]] for row in order]
    steps = {
        "memory": anchor_steps(cycle(kept), tokens=CONTEXT_LENGTH),
        "store": anchor_steps((rows[[row]] for row in cycle(order)), tokens=CONTEXT_LENGTH),
    }
    for step in steps.values():
        step()
    seconds = take_turns(steps, rounds=4 * rounds, title="steps")
    return ratio(seconds["store"], seconds["memory"])
