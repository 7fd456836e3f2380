"""The sdpa kernel's blocks: right values for many short documents, few calls, memory linear in T."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from modules.attention.attend import attend
from modules.attention.borders import Borders
from modules.attention.sdpa import WIDE_TILES, WIDE_TILES_PAY, filled_length
from modules.attention.strategies import STRATEGIES
from tests.oracles.dense_attention import dense_attention


def inputs(rows: int, tokens: int, dtype: torch.dtype = torch.float64, heads: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(rows, h, tokens, 8, dtype=torch.float64, generator=generator) for h in (heads, 2, 2)]
    return [x.to(dtype).requires_grad_() for x in made]


def row_of(lengths: list[int], *, anchor: bool, padding: int = 0) -> list[int]:
    return [0] * anchor + [n for n, length in enumerate(lengths, 1) for _ in range(length)] + [-1] * padding


@pytest.mark.parametrize("anchor", [False, True])
@pytest.mark.parametrize("strategy", ["intra_document", "anchor"])
@pytest.mark.parametrize(
    "lengths",
    [
        [[1] * 40, [40]],
        [list(range(1, 13)), list(range(12, 0, -1))],
        [[3, 61, 5, 64, 2, 60], [1, 126, 2, 66]],
        [[WIDE_TILES_PAY + 1, 5, WIDE_TILES - 1, 7], [WIDE_TILES, WIDE_TILES_PAY, 12]],
    ],
    ids=["ones", "ragged", "short and long", "wide tiles"],
)
def test_blocks_equal_dense_attention(lengths, strategy, anchor):
    longest = max(map(sum, lengths))
    documents = [row_of(each, anchor=anchor, padding=longest - sum(each)) for each in lengths]
    q_k_v = inputs(2, len(documents[0]))
    out = attend(*q_k_v, Borders.of(torch.tensor(documents)), STRATEGIES[strategy], kernel="sdpa")
    expected = dense_attention(*q_k_v, strategy, documents)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((out * weight).sum(), q_k_v)
    for gradient, wanted in zip(gradients, torch.autograd.grad((expected * weight).sum(), q_k_v), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_documents_in_low_precision(dtype):
    """Against float64 at most twice what plain attention in that dtype errs, three times for gradients."""
    documents = [row_of([1, 2, 3, 4, 5, 6] * 6 + [10], anchor=True)]
    q_k_v = inputs(1, len(documents[0]), dtype)
    weight = torch.randn(q_k_v[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype)

    def run(compute, dtype):
        low = [x.detach().to(dtype).requires_grad_() for x in q_k_v]
        out = compute(*low)
        return [out.detach().double(), *(g.double() for g in torch.autograd.grad(out, low, weight.to(dtype)))]

    def plain(q, k, v):
        return dense_attention(q, k, v, "anchor", documents)

    def ours(q, k, v):
        return attend(q, k, v, Borders.of(torch.tensor(documents)), STRATEGIES["anchor"], kernel="sdpa")

    exact, usual, got = run(plain, torch.float64), run(plain, dtype), run(ours, dtype)
    for factor, value, low, high in zip((2, 3, 3, 3), got, usual, exact, strict=True):
        assert (value - high).abs().max() <= factor * (low - high).abs().max()


@pytest.mark.parametrize(("strategy", "calls"), [("intra_document", 2), ("anchor", 3)])
def test_many_short_documents_share_few_calls(monkeypatch, strategy, calls):
    """500 documents of 16 tokens and one of 200: the short ones are one call, under anchor the row's first another."""
    made = []
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *x, **y: made.append(x[0].shape) or real(*x, **y))
    documents = [row_of([16] * 500 + [200], anchor=strategy == "anchor")]
    attend(*inputs(1, len(documents[0])), Borders.of(torch.tensor(documents)), STRATEGIES[strategy], kernel="sdpa")
    assert len(made) <= calls
    assert sum(shape[0] for shape in made) == 501


def test_filler_costs_little():
    lengths = np.arange(1, 5000)
    filled = filled_length(lengths, "cpu")
    assert (filled >= lengths).all()
    usual = (lengths < WIDE_TILES_PAY) | (lengths >= WIDE_TILES)
    assert (filled - lengths)[usual].max() == 3
    assert (filled_length(lengths, "cuda") % 64 == 0).all()


def peak_bytes(strategy: str, tokens: int) -> int:
    """Most memory that torch's allocator held at once during forward and backward."""
    documents = [row_of([256] * (tokens // 256), anchor=False)]
    q_k_v, borders = inputs(1, tokens, torch.float32), Borders.of(torch.tensor(documents))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out = attend(*q_k_v, borders, STRATEGIES[strategy], kernel="sdpa")
        torch.autograd.grad(out.sum(), q_k_v)
    events = profile.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return int(np.cumsum([change for _, change in changes]).max())


@pytest.mark.parametrize("strategy", ["full", "intra_document"])
def test_memory_is_linear_in_tokens(strategy):
    assert peak_bytes(strategy, 4096) / peak_bytes(strategy, 2048) <= 2.2
