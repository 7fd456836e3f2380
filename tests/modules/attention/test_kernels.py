"""Every strategy x kernel against dense attention written apart, in float64."""

from dataclasses import replace

import pytest
import torch

from modules.attention.attend import attend
from modules.attention.borders import Borders
from modules.attention.strategies import STRATEGIES
from tests.oracles.dense_attention import dense_attention
from tests.random_rows import random_documents, random_qkv

TRAINS_ON_CPU = ("sdpa", "reference")
"""The kernels that give float64 gradients without a GPU; the others are held to the same oracle in their own files."""

SEGMENTED = [name for name, strategy in STRATEGIES.items() if strategy.window is None]


SHAPES = [(tokens, anchor, padding) for tokens in (2, 137) for anchor in (False, True) for padding in (False, True)]
SHAPES += [(1025, False, False), (1025, True, True)]


@pytest.mark.parametrize("interleaved", [False, True], ids=["whole", "interleaved"])
@pytest.mark.parametrize(("tokens", "anchor", "padding"), SHAPES)
@pytest.mark.parametrize("kernel", TRAINS_ON_CPU)
@pytest.mark.parametrize("strategy", SEGMENTED)
def test_kernel_equals_dense_attention(strategy, kernel, tokens, anchor, padding, interleaved):
    """Rows with a shared anchor and rows without document 0, as `data.anchor: every_document` makes them."""
    rows, heads, kv_heads = 2, 9, 3
    documents = random_documents(tokens, rows, anchor=anchor, padding=padding, seed=tokens, interleaved=interleaved)
    inputs = random_qkv(rows, tokens, heads, kv_heads, 8, seed=tokens)
    weight = torch.randn(rows, heads, tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    expected = dense_attention(*inputs, strategy, documents)
    out = attend(*inputs, Borders.of(torch.tensor(documents)), STRATEGIES[strategy], kernel=kernel)

    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    gradients = torch.autograd.grad((out * weight).sum(), inputs)
    for gradient, wanted in zip(gradients, torch.autograd.grad((expected * weight).sum(), inputs), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("interleaved", [False, True], ids=["whole", "interleaved"])
@pytest.mark.parametrize(("tokens", "anchor", "padding"), SHAPES)
@pytest.mark.parametrize(("strategy", "window", "sink"), [("sliding_window", 7, 0), ("sink_window", 5, 3)])
def test_windows_equal_dense_attention(strategy, window, sink, tokens, anchor, padding, interleaved):
    documents = random_documents(tokens, 2, anchor=anchor, padding=padding, seed=tokens, interleaved=interleaved)
    inputs = random_qkv(2, tokens, 4, 2, 8, seed=tokens)
    expected = dense_attention(*inputs, strategy, documents, window=window, sink=sink)
    narrow = replace(STRATEGIES[strategy], window=window, sink=sink)
    out = attend(*inputs, Borders.of(torch.tensor(documents)), narrow, kernel="reference")

    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    gradients = torch.autograd.grad(out.square().sum(), inputs)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected.square().sum(), inputs), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kernel", TRAINS_ON_CPU)
def test_heads_that_are_not_shared_and_one_shared_by_all(kernel):
    documents = random_documents(23, 2, anchor=True, padding=True, seed=3)
    for heads, kv_heads in ((4, 4), (4, 1)):
        inputs = random_qkv(2, 23, heads, kv_heads, 8, seed=3)
        out = attend(*inputs, Borders.of(torch.tensor(documents)), STRATEGIES["anchor"], kernel=kernel)
        torch.testing.assert_close(out, dense_attention(*inputs, "anchor", documents), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kernel", TRAINS_ON_CPU)
@pytest.mark.parametrize("layout", ["heads_first", "tokens_first"])
def test_memory_layout_of_the_inputs_is_free(kernel, layout):
    documents = random_documents(30, 2, anchor=True, padding=False, seed=4)
    inputs = random_qkv(2, 30, 4, 2, 8, seed=4)
    if layout == "tokens_first":
        inputs = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs]
    out = attend(*inputs, Borders.of(torch.tensor(documents)), STRATEGIES["anchor"], kernel=kernel)
    torch.testing.assert_close(out, dense_attention(*inputs, "anchor", documents), rtol=0, atol=1e-10)


def output_and_gradients(compute, inputs, dtype):
    inputs = [x.to(dtype).requires_grad_() for x in inputs]
    out = compute(*inputs)
    assert out.dtype == dtype
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", SEGMENTED)
def test_sdpa_errs_little_in_low_precision(strategy, dtype):
    """Against float64: at most twice as much as plain attention in that dtype, or 5e-5 in float32.

    Plain float32 has gradients of exactly 0 where a token sees itself alone; a fused kernel has 1e-6 there.
    """
    documents = random_documents(64, 2, anchor=True, padding=True, seed=5)
    rounded = [x.detach().to(dtype) for x in random_qkv(2, 64, 4, 2, 16, seed=5)]

    def plain(q, k, v):
        return dense_attention(q, k, v, strategy, documents)

    def sdpa(q, k, v):
        return attend(q, k, v, Borders.of(torch.tensor(documents)), STRATEGIES[strategy], kernel="sdpa")

    exact = output_and_gradients(plain, rounded, torch.float64)
    usual = output_and_gradients(plain, rounded, dtype)
    ours = output_and_gradients(sdpa, rounded, dtype)
    for value, low, high in zip(ours, usual, exact, strict=True):
        allowed = 5e-5 if dtype == torch.float32 else 2 * (low.double() - high).abs().max()
        assert (value.double() - high).abs().max() <= allowed


@pytest.mark.parametrize("kernel", TRAINS_ON_CPU)
@pytest.mark.parametrize("strategy", SEGMENTED)
@pytest.mark.parametrize("document", [[[0, 1, 1, -1, -1], [0, -1, -1, -1, -1]], [[-1, -1, -1], [-1, -1, -1]]])
def test_padding_is_zero_and_passes_no_gradient(kernel, strategy, document):
    document_BT = torch.tensor(document)
    inputs = random_qkv(2, document_BT.shape[1], 2, 1, 8, seed=6)
    out = attend(*inputs, Borders.of(document_BT), STRATEGIES[strategy], kernel=kernel)
    padding = (document_BT == -1)[:, None, :, None]
    assert not out.masked_select(padding).any()
    for gradient in torch.autograd.grad(out.sum(), inputs, allow_unused=True):
        assert gradient is None or not gradient.masked_select(padding).any()
        assert gradient is None or gradient.isfinite().all()


@pytest.mark.parametrize("kernel", TRAINS_ON_CPU)
def test_a_document_in_an_anchor_row_attends_as_if_alone(kernel):
    """Plain causal attention over [anchor, document]."""
    document_BT = torch.tensor([[0] + [1] * 5 + [2] * 3])
    q, k, v = random_qkv(1, 9, 2, 2, 8, seed=7)
    out = attend(q, k, v, Borders.of(document_BT), STRATEGIES["anchor"], kernel=kernel)
    for start, stop in ((1, 6), (6, 9)):
        alone = [0, *range(start, stop)]
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(x[:, :, alone] for x in (q, k, v)), is_causal=True
        )
        torch.testing.assert_close(out[:, :, start:stop], expected[:, :, 1:], rtol=0, atol=1e-12)
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", TRAINS_ON_CPU)
def test_copies_of_the_anchor_compute_what_the_shared_anchor_does(kernel):
    """A A1 A2 hold the same q, k and v, as they do in every layer of a model, since a copy attends to itself alone."""
    shared = torch.tensor([[0, 1, 1, 1, 2, 2]])
    copied = torch.tensor([[1, 1, 1, 1, 2, 2, 2]])
    inputs = random_qkv(1, 6, 3, 1, 8, seed=8)
    order = [0, 1, 2, 3, 0, 4, 5]
    one = attend(*inputs, Borders.of(shared), STRATEGIES["anchor"], kernel=kernel)
    two = attend(*(x[:, :, order] for x in inputs), Borders.of(copied), STRATEGIES["anchor"], kernel=kernel)
    torch.testing.assert_close(two, one[:, :, order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", TRAINS_ON_CPU)
@pytest.mark.parametrize("strategy", SEGMENTED)
def test_what_a_document_cannot_see_does_not_move_one_bit_of_it(strategy, kernel, dtype):
    document_BT = torch.tensor([[0] + [1] * 40 + [2] * 30])
    borders = Borders.of(document_BT)
    inputs = [x.detach().to(dtype) for x in random_qkv(1, 71, 4, 2, 16, seed=9)]

    def second_document(changed_token: int | None):
        changed = [x.clone() for x in inputs]
        for x in changed:
            if changed_token is not None:
                x[:, :, changed_token] += 1.0
        out = attend(*changed, borders, STRATEGIES[strategy], kernel=kernel)
        return out[:, :, 1:41], out[:, :, 41:]

    first, second = second_document(None)
    for token in (1, 17, 40):
        assert torch.equal(second_document(token)[1], second) == (strategy != "full")
    seen = strategy in ("full", "anchor")
    assert torch.equal(second_document(0)[0], first) != seen
    assert torch.equal(second_document(0)[1], second) != seen


@pytest.mark.parametrize("kernel", TRAINS_ON_CPU)
@pytest.mark.parametrize("strategy", SEGMENTED)
def test_interleaved_documents_do_not_move_one_bit_of_one_another(strategy, kernel):
    """Three documents in pieces of 10 to 20 tokens behind the anchor."""
    document = [0, *[1] * 10, *[2] * 20, *[1] * 15, *[3] * 12, *[2] * 10, *[1] * 10, *[3] * 10]
    borders = Borders.of(torch.tensor([document]))
    inputs = [x.detach().float() for x in random_qkv(1, len(document), 4, 2, 16, seed=10)]
    before = attend(*inputs, borders, STRATEGIES[strategy], kernel=kernel)
    for token in (1, 31, 70):  # one in each piece of document 1
        changed = [x.clone() for x in inputs]
        for x in changed:
            x[:, :, token] += 1.0
        after = attend(*changed, borders, STRATEGIES[strategy], kernel=kernel)
        moved = (after != before).any(-1).any(1)[0].tolist()
        sees = [i for i, number in enumerate(document) if i >= token and (number == 1 or strategy == "full")]
        assert [i for i, each in enumerate(moved) if each] == sees


@pytest.mark.parametrize("kernel", TRAINS_ON_CPU)
@pytest.mark.parametrize("strategy", [name for name in SEGMENTED if name != "full"])
def test_a_document_attends_in_pieces_as_it_does_in_one(strategy, kernel):
    """The same queries, keys and values, in another order."""
    whole = [0, *[1] * 9, *[2] * 7, *[3] * 4, -1, -1]
    order = [0, 10, 11, 1, 2, 3, 17, 4, 12, 13, 14, 18, 5, 6, 7, 8, 15, 16, 9, 19, 20, 21, 22]
    inputs = random_qkv(1, 23, 3, 1, 8, seed=11)
    expected = attend(*inputs, Borders.of(torch.tensor([whole])), STRATEGIES[strategy], kernel=kernel)
    pieces = Borders.of(torch.tensor([[whole[i] for i in order]]))
    out = attend(*(x[:, :, order] for x in inputs), pieces, STRATEGIES[strategy], kernel=kernel)
    torch.testing.assert_close(out, expected[:, :, order], rtol=0, atol=1e-12)
