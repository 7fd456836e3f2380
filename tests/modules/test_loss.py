"""The chunked loss held to torch's cross-entropy of all logits at once."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from modules.loss import CHUNK_LOGITS, cross_entropy_sum, default_chunk_tokens, token_losses

ROWS, TOKENS, WIDTH, VOCABULARY = 2, 13, 6, 31


def inputs(dtype: torch.dtype, *, seed: int = 0, targets: float = 0.7) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=generator)
    labels[torch.rand(ROWS, TOKENS, generator=generator) >= targets] = -100
    return hidden, weight, labels


def at_once(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
    logits = F.linear(hidden, weight).flatten(0, 1)
    return F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), labels.flatten(), reduction=reduction
    )


@settings(max_examples=40, deadline=None)
@given(chunk_tokens=st.integers(1, 40), seed=st.integers(0, 2**31), targets=st.sampled_from([0.1, 0.7, 1.0]))
def test_chunks_of_any_size_equal_all_logits_at_once(chunk_tokens: int, seed: int, targets: float) -> None:
    hidden, weight, labels = inputs(torch.float64, seed=seed, targets=targets)
    expected = at_once(hidden, weight, labels)
    got, count = cross_entropy_sum(hidden, weight, labels, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)
    assert got.dtype == torch.float64 and count.dtype == torch.int64 and count == (labels != -100).sum()

    for got_gradient, expected_gradient in zip(
        torch.autograd.grad(got / 7, (hidden, weight)), torch.autograd.grad(expected / 7, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(got_gradient, expected_gradient, rtol=0, atol=1e-12)

    each = token_losses(hidden, weight, labels, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(each.flatten(), at_once(hidden, weight, labels, "none"), rtol=0, atol=1e-12)
    assert each.shape == labels.shape and not each.requires_grad


@pytest.mark.parametrize("chunk_tokens", [5, 26, None])
def test_gradients_numerically(chunk_tokens: int | None) -> None:
    hidden, weight, labels = inputs(torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: cross_entropy_sum(h, w, labels, chunk_tokens=chunk_tokens)[0], (hidden, weight)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_tokens", [4, 26])
def test_no_target_is_exactly_zero(dtype: torch.dtype, chunk_tokens: int) -> None:
    hidden, weight, labels = inputs(dtype)
    loss, count = cross_entropy_sum(hidden, weight, torch.full_like(labels, -100), chunk_tokens=chunk_tokens)
    loss.backward()
    assert loss == 0 and count == 0
    for x in (hidden, weight):
        assert x.grad is not None and not x.grad.any()


def test_a_position_without_target_may_hold_anything() -> None:
    hidden, weight, labels = inputs(torch.float32)
    labels[0, 3] = -100
    with torch.no_grad():
        hidden[0, 3] = torch.nan
    loss, _ = cross_entropy_sum(hidden, weight, labels)
    loss.backward()
    assert loss.isfinite() and hidden.grad is not None
    assert not hidden.grad[0, 3].any() and hidden.grad.isfinite().all()


def test_a_loss_that_is_not_finite_says_so() -> None:
    hidden, weight, labels = inputs(torch.float32, targets=1.0)
    with torch.no_grad():
        hidden[0, 3] = torch.nan
    assert cross_entropy_sum(hidden, weight, labels)[0].isnan()


@pytest.mark.parametrize("chunk_tokens", [4, 26])
@pytest.mark.parametrize("setting", ["bfloat16", "autocast"])
def test_low_precision_rounds_the_product_alone(setting: str, chunk_tokens: int) -> None:
    """Against plain torch in the same setting, in the gradients too: at most twice as far from float64 as it is."""
    dtype = torch.bfloat16 if setting == "bfloat16" else torch.float32
    hidden, weight, labels = inputs(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=setting == "autocast"):
        loss, _ = cross_entropy_sum(hidden, weight, labels, chunk_tokens=chunk_tokens)
        plain = at_once(hidden, weight, labels)
        each = token_losses(hidden, weight, labels, chunk_tokens=chunk_tokens)
    assert loss.dtype == each.dtype == torch.float32
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    torch.testing.assert_close(each.sum(), plain, rtol=1e-6, atol=0)

    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = torch.autograd.grad(at_once(wide[0], wide[1], labels) / 17, wide)
    ours = torch.autograd.grad(loss / 17, (hidden, weight))
    theirs = torch.autograd.grad(plain / 17, (hidden, weight))
    for a, b, right in zip(ours, theirs, exact, strict=True):
        assert a.dtype == b.dtype == dtype
        assert (a.double() - right).norm() <= 2 * (b.double() - right).norm()


def test_a_confident_mistake_stays_finite() -> None:
    hidden, weight = torch.tensor([[[1000.0]]]), torch.tensor([[1.0], [-1.0]])
    assert cross_entropy_sum(hidden, weight, torch.tensor([[1]]))[0] == 2000


def test_frozen_parts_get_no_gradient_and_validation_has_no_graph() -> None:
    hidden, weight, labels = inputs(torch.float64)
    cross_entropy_sum(hidden, weight.detach(), labels, chunk_tokens=4)[0].backward()
    expected = torch.autograd.grad(at_once(hidden, weight, labels), hidden)[0]
    torch.testing.assert_close(hidden.grad, expected, rtol=0, atol=1e-12)
    with torch.no_grad():
        assert not cross_entropy_sum(hidden, weight, labels)[0].requires_grad


def test_default_chunk() -> None:
    assert [default_chunk_tokens(v) for v in (128_256, 4096, 258, 2**30)] == [261, 8192, 130_055, 1]
    assert CHUNK_LOGITS * 4 == 128 * 2**20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_stays_under_an_eighth_of_the_logits(dtype: str) -> None:
    """Peak resident memory of a process that does nothing else, 128K vocabulary, 4096 tokens, forward and backward.

    The gradient of the head, which any loss has to leave behind, is counted in.
    """
    vocabulary, tokens = 128 * 1024, 4096
    script = f"""
        import resource, torch
        from modules.loss import cross_entropy_sum
        torch.set_num_threads(1)
        hidden = torch.randn(1, {tokens}, 32).to(torch.{dtype}).requires_grad_()
        weight = torch.randn({vocabulary}, 32).to(torch.{dtype}).requires_grad_()
        labels = torch.randint({vocabulary}, (1, {tokens}))
        cross_entropy_sum(hidden[:, :2], weight, labels[:, :2])[0].backward()  # libraries set themselves up
        weight.grad = hidden.grad = None
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        cross_entropy_sum(hidden, weight, labels)[0].backward()
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
    """
    root = Path(__file__).parents[2]
    run: Any = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=root, capture_output=True, text=True, check=True
    )
    # All logits as they reach the softmax, in float32.
    assert int(run.stdout) < vocabulary * tokens * 4 / 8
