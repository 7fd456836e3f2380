"""Gather and scatter against plain indexing by autograd, in float64."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modules.attention.gather import FILLER, Slots, gather, scatter


def test_literal_slots():
    """A a a b b and one token of padding; A stands in front of b too, and one slot fills up."""
    slots = Slots.of(
        np.array([0, 1, 2, 0, 3, 4, FILLER]),
        np.array([False, False, False, True, False, False, False]),
        tokens=6,
        device=torch.device("cpu"),
    )
    x = torch.arange(1.0, 7.0)[:, None, None].requires_grad_()
    gathered = gather(x, slots)
    assert gathered.flatten()[:6].tolist() == [1, 2, 3, 1, 4, 5]
    assert scatter(gathered, slots).flatten().tolist() == [1, 2, 3, 4, 5, 0]
    # Slot i sends back 10 ** i; filler's 10 ** 6 goes nowhere.
    (gradient,) = torch.autograd.grad(gathered, x, 10.0 ** torch.arange(7)[:, None, None])
    assert gradient.flatten().tolist() == [1001, 10, 100, 10_000, 100_000, 0]


@st.composite
def layouts(draw):
    """(token_M, copy_M, tokens): a random order of some tokens, copies of one or two of them, filler."""
    tokens = draw(st.integers(1, 12))
    present = draw(st.lists(st.integers(0, tokens - 1), min_size=1, unique=True))
    copied = draw(st.lists(st.sampled_from(present), max_size=6))
    slots = [(token, False) for token in present] + [(token, True) for token in copied]
    slots += [(FILLER, False)] * draw(st.integers(0, 3))
    slots = draw(st.permutations(slots))
    return np.array([token for token, _ in slots]), np.array([copy for _, copy in slots]), tokens


@settings(deadline=None)
@given(layout=layouts())
def test_equal_to_plain_indexing(layout):
    token_M, copy_M, tokens = layout
    slots = Slots.of(token_M, copy_M, tokens=tokens, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 2, 3, dtype=torch.float64, generator=generator).requires_grad_()
    y = torch.randn(len(token_M), 2, 3, dtype=torch.float64, generator=generator).requires_grad_()
    real = token_M != FILLER

    expected = x[torch.from_numpy(token_M[real])]
    gathered = gather(x, slots)[torch.from_numpy(real)]
    assert torch.equal(gathered, expected)
    own = torch.from_numpy(np.flatnonzero(real & ~copy_M))
    scattered = torch.zeros_like(x).index_copy(0, torch.from_numpy(token_M)[own], y[own])
    assert torch.equal(scatter(y, slots), scattered)

    for ours, plain, source in ((gathered, expected, x), (scatter(y, slots), scattered, y)):
        weight = torch.randn(ours.shape, dtype=torch.float64, generator=generator)
        (gradient,) = torch.autograd.grad(ours, source, weight)
        (wanted,) = torch.autograd.grad(plain, source, weight)
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12)


def test_the_anchors_gradient_rounds_once():
    """301 slots that each send back 1.0 make 301 rounded; added one by one, bfloat16 stops at 256."""
    slots = Slots.of(np.zeros(301, dtype=np.int64), np.arange(301) > 0, tokens=1, device=torch.device("cpu"))
    x = torch.ones(1, 1, 1, dtype=torch.bfloat16).requires_grad_()
    (gradient,) = torch.autograd.grad(gather(x, slots).sum(), x)
    assert gradient.item() == torch.tensor(301.0).bfloat16().item()
