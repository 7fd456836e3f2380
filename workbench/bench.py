"""Speed of a whole training step on this machine, as ratios measured in one run.

Machines are shared and noisy: the subjects take turns within each round, and a ratio is the median of the rounds'
ratios, never a quotient of numbers from different minutes.

The model has 4 layers, width 256, 8 query and 4 key heads, 4096 tokens of vocabulary; a row is an anchor and documents
of log-normal lengths, the same for every subject; one row a step; AdamW.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from modules.attention.capabilities import check_name
from workbench.errors import UserError, user_input

if TYPE_CHECKING:
    from modules.batch import PackedBatch
    from modules.llama import Llama

PRECISIONS = ("32-true", "bf16-true")
STRATEGIES = ("full", "intra_document", "intra_document_reset", "anchor")
DOCUMENTS_PER_ROW = 18


@dataclass
class Subject:
    """One way to take the same step."""

    name: str
    strategy: str
    precision: str
    bfloat16_products: str | None
    step: Callable[[], float]
    """Takes one training step and returns its loss."""


def bench_step(
    *,
    tokens: int,
    rounds: int,
    peers: Sequence[str] = (),
    precisions: Sequence[str] = ("32-true",),
    strategies: Sequence[str] = STRATEGIES,
) -> list[dict[str, Any]]:
    """Times training steps.

    Args:
        tokens: context length.
        rounds: how often every subject has its turn.
        peers: other libraries that train the same weights on the same rows: names in PEERS.
        precisions: of our own steps; bf16-true is measured with native products and with those of `precision.py`.
        strategies: what is measured.
    Returns:
        One row per subject: seconds (median per step), ratio to our 32-true step of the same strategy, speedup over
        our full attention in 32-true.
    Raises:
        UserError: an unknown name, a peer that is not installed or does not compute the same loss.
    """
    if tokens < 64 or rounds < 1:
        raise UserError(f"--tokens {tokens} must be at least 64, --rounds {rounds} at least 1.")
    with user_input():
        for peer in peers:
            check_name("--peer", peer, tuple(PEERS))
        for precision in precisions:
            check_name("--precisions", precision, PRECISIONS)
    subjects = []
    for strategy in dict.fromkeys(("full", *strategies)):
        for precision in dict.fromkeys(("32-true", *precisions)):
            for products in ("native", "float32") if precision == "bf16-true" else (None,):
                subjects.append(_ours(strategy, precision, products, tokens))
        subjects += [PEERS[peer](strategy, tokens) for peer in peers]
    _warm_up(subjects)
    seconds: list[list[float]] = [[] for _ in subjects]
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        for _ in progress.track(range(rounds), description=f"{tokens} tokens"):
            for own, subject in zip(seconds, subjects, strict=True):
                started = time.perf_counter()
                subject.step()
                own.append(time.perf_counter() - started)
    base = {s.strategy: own for s, own in zip(subjects, seconds, strict=True) if _is_base(s)}
    return [
        {
            "subject": subject.name,
            "strategy": subject.strategy,
            "precision": subject.precision,
            "bfloat16_products": subject.bfloat16_products,
            "tokens": tokens,
            "seconds": statistics.median(own),
            "ratio": _ratio(own, base[subject.strategy]),
            "speedup": _ratio(base["full"], own),
        }
        for subject, own in zip(subjects, seconds, strict=True)
    ]


def _is_base(subject: Subject) -> bool:
    return subject.name == "workbench" and subject.precision == "32-true"


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def _warm_up(subjects: Sequence[Subject]) -> None:
    """First steps, which must give one loss where the arithmetic is the same."""
    losses: dict[str, float] = {}
    for subject in subjects:
        loss = subject.step()
        if subject.precision != "32-true":
            continue
        expected = losses.setdefault(subject.strategy, loss)
        if abs(loss - expected) > 1e-4 * abs(expected):
            raise UserError(
                f"{subject.name} has a loss of {loss} on the weights and row on which workbench has {expected}: "
                "it trains something else, so a comparison of speed would mean nothing."
            )


def _row(strategy: str, tokens: int) -> PackedBatch:
    """Random tokens with the borders of `log_normal_documents`; a token's target is the next of its document."""
    import torch

    from modules.batch import NO_TARGET, PackedBatch
    from workbench.bench_attention import log_normal_documents

    document = torch.from_numpy(log_normal_documents(tokens, mean=tokens / DOCUMENTS_PER_ROW, sigma=0.5, seed=0))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(_shape().vocabulary_size, (tokens,), generator=generator)
    labels = torch.full((tokens,), NO_TARGET)
    within = document[1:] == document[:-1]
    labels[:-1][within] = drawn[1:][within]
    position = torch.arange(tokens)
    if strategy == "intra_document_reset":
        starts = torch.cat((torch.tensor([True]), document[1:] != document[:-1]))
        position = position - torch.where(starts, position, torch.tensor(0)).cummax(0).values
    return PackedBatch(drawn[None], labels[None], document[None], position[None])


def _shape() -> Any:
    from modules.llama import LlamaConfig

    return LlamaConfig(
        vocabulary_size=4096, width=256, layers=4, heads=8, kv_heads=4, head_width=32, hidden_width=768,
        norm_epsilon=1e-5, tied_embeddings=False, rope_theta=10_000.0, max_positions=131_072,
    )  # fmt: skip


def _model(strategy: str) -> Llama:
    import torch

    from modules.attention.capabilities import resolve_kernel
    from modules.attention.strategies import STRATEGIES as REGISTERED
    from modules.llama import Llama
    from modules.rotary import RotaryConfig

    with user_input():
        check_name("--strategies", strategy, tuple(REGISTERED))
        chosen = REGISTERED[strategy]
        kernel = resolve_kernel("auto", strategy=chosen, device_type="cpu", dtype=torch.float32, head_width=32)
    torch.manual_seed(0)
    return Llama(_shape(), strategy=chosen, kernel=kernel, rotary=RotaryConfig())


def _ours(strategy: str, precision: str, products: str | None, tokens: int) -> Subject:
    """A step as a run takes it, without Lightning's loop."""
    from contextlib import nullcontext

    import torch

    from modules.attention.borders import Borders
    from modules.loss import cross_entropy_sum
    from modules.precision import Float32Products

    model = _model(strategy).to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = _row(strategy, tokens)

    def step() -> float:
        with Float32Products() if products == "float32" else nullcontext():
            # Borders are made anew, as they are for every batch.
            hidden = model(batch.tokens_BT, batch.position_BT, Borders.of(batch.document_BT))
            loss, targets = cross_entropy_sum(hidden, model.head_weight_VE, batch.labels_BT)
            (loss / targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach() / targets)

    return Subject("workbench", strategy, precision, products, step)


def _transformers(strategy: str, tokens: int) -> Subject:
    """Hugging Face's Llama with our weights: plain causal for `full`, an explicit 4-D mask for every other strategy."""
    import torch

    from modules.attention.strategies import STRATEGIES as REGISTERED
    from modules.attention.strategies import visible_rule

    try:
        import transformers
    except ImportError as error:
        raise UserError("--peer transformers: the package is not installed: pip install transformers.") from error
    c = _shape()
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=c.vocabulary_size, hidden_size=c.width, intermediate_size=c.hidden_width,
            num_hidden_layers=c.layers, num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
            head_dim=c.head_width, rms_norm_eps=c.norm_epsilon, tie_word_embeddings=c.tied_embeddings,
            max_position_embeddings=c.max_positions, attn_implementation="sdpa",  # type: ignore[call-arg]
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        )
    )  # fmt: skip
    ours = _model(strategy).state_dict()
    model.load_state_dict({name if name.startswith("lm_head") else f"model.{name}": ours[name] for name in ours})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = _row(strategy, tokens)
    mask = None
    if strategy != "full":
        index = torch.arange(tokens)
        rule = visible_rule(REGISTERED[strategy], batch.document_BT)
        mask = rule(torch.tensor(0), torch.tensor(0), index[:, None], index)[None, None]
    # Ours hold each token's target beside it; theirs are shifted by the model itself.
    labels = torch.cat((torch.full((1, 1), -100), batch.labels_BT[:, :-1]), dim=1)

    def step() -> float:
        loss = model(
            batch.tokens_BT, attention_mask=mask, position_ids=batch.position_BT, labels=labels, use_cache=False
        ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return Subject("transformers", strategy, "32-true", None, step)


PEERS = {"transformers": _transformers}


def print_steps(rows: list[dict[str, Any]]) -> None:
    """The table on the terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("subject", "strategy", "precision", "bfloat16 products"):
        table.add_column(heading)
    for heading in ("tokens", "ms per step", "x ours 32-true", "speed-up over full"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["subject"],
            row["strategy"],
            row["precision"],
            row["bfloat16_products"] or "",
            str(row["tokens"]),
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['speedup']:.2f}",
        )
    Console().print(table)
