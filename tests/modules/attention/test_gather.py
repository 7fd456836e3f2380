"""Gather and scatter against plain indexing by autograd, in float64."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modules.attention.gather import FILLER, Layout, Slots, gather, scatter

CPU = torch.device("cpu")


def layout_of(calls: list[list[tuple[int, bool]]], tokens: int) -> Layout:
    """From (token, is it a copy?) of each slot of each call."""
    padding = np.ones(tokens, dtype=bool)
    padding[[token for call in calls for token, _ in call if token != FILLER]] = False
    slots = [Slots.of(np.array([t for t, _ in call]), np.array([c for _, c in call]), device=CPU) for call in calls]
    return Layout.of(tuple(slots), padding, device=CPU)


def test_literal_slots():
    """A a a b b and one token of padding; A stands in front of b too, and one slot fills up."""
    calls = [[(0, False), (1, False), (2, False)], [(0, True), (3, False), (4, False), (FILLER, False)]]
    layout = layout_of(calls, tokens=6)
    x = torch.arange(1.0, 7.0)[:, None, None].requires_grad_()
    first, second = gather(x, layout)
    assert first.flatten().tolist() == [1, 2, 3]
    assert second.flatten()[:3].tolist() == [1, 4, 5]
    assert scatter([first, second], layout, tokens=6).flatten().tolist() == [1, 2, 3, 4, 5, 0]
    # Slot i sends back 10 ** i; filler's 10 ** 6 goes nowhere.
    power = 10.0 ** torch.arange(7)[:, None, None]
    (gradient,) = torch.autograd.grad((first, second), x, (power[:3], power[3:]))
    assert gradient.flatten().tolist() == [1001, 10, 100, 10_000, 100_000, 0]


def test_what_stands_in_order_is_not_copied():
    x = torch.randn(5, 2, 3)
    layout = layout_of([[(0, False), (1, False)], [(2, False), (3, False), (4, False)]], tokens=5)
    first, second = gather(x, layout)
    assert first.data_ptr() == x.data_ptr()
    assert second.data_ptr() == x[2:].data_ptr()
    whole = layout_of([[(token, False) for token in range(5)]], tokens=5)
    assert scatter(list(gather(x, whole)), whole, tokens=5).data_ptr() == x.data_ptr()


@st.composite
def layouts(draw):
    """(calls, tokens): some tokens in one to four calls, in order or not, copies of some, filler."""
    tokens = draw(st.integers(1, 12))
    present = draw(st.lists(st.integers(0, tokens - 1), min_size=1, unique=True))
    copied = draw(st.lists(st.sampled_from(present), max_size=6))
    slots = [(token, False) for token in sorted(present)]
    if draw(st.booleans()):
        slots = draw(st.permutations([*slots, *((token, True) for token in copied), *[(FILLER, False)] * 2]))
    cuts = draw(st.sets(st.integers(1, len(slots)), max_size=3))
    bounds = sorted({0, *cuts, len(slots)})
    return [slots[a:b] for a, b in pairwise(bounds)], tokens


@settings(deadline=None)
@given(layout=layouts())
def test_equal_to_plain_indexing(layout):
    calls, tokens = layout
    slots = [slot for call in calls for slot in call]
    token_M, copy_M = np.array([t for t, _ in slots]), np.array([c for _, c in slots])
    layout = layout_of(calls, tokens)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 2, 3, dtype=torch.float64, generator=generator).requires_grad_()
    y = torch.randn(len(slots), 2, 3, dtype=torch.float64, generator=generator).requires_grad_()
    real = token_M != FILLER

    expected = x[torch.from_numpy(token_M[real])]
    gathered = torch.cat(gather(x, layout))[torch.from_numpy(real)]
    assert torch.equal(gathered, expected)
    own = torch.from_numpy(np.flatnonzero(real & ~copy_M))
    plain = torch.zeros_like(x).index_copy(0, torch.from_numpy(token_M)[own], y[own])
    scattered = scatter(list(y.split([len(call) for call in calls])), layout, tokens=tokens)
    assert torch.equal(scattered, plain)

    for ours, wanted, source in ((gathered, expected, x), (scattered, plain, y)):
        weight = torch.randn(ours.shape, dtype=torch.float64, generator=generator)
        before = weight.clone()
        (gradient,) = torch.autograd.grad(ours, source, weight)
        torch.testing.assert_close(gradient, torch.autograd.grad(wanted, source, weight)[0], rtol=0, atol=1e-12)
        assert torch.equal(weight, before), "the gradient that came in was written to"


def test_the_anchors_gradient_rounds_once():
    """301 slots that each send back 1.0 make 301 rounded; added one by one, bfloat16 stops at 256."""
    layout = layout_of([[(0, False)], [(0, True)] * 150, [(0, True)] * 150], tokens=1)
    x = torch.ones(1, 1, 1, dtype=torch.bfloat16).requires_grad_()
    (gradient,) = torch.autograd.grad(sum(call.sum() for call in gather(x, layout)), x)
    assert gradient.item() == torch.tensor(301.0).bfloat16().item()
