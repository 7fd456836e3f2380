"""The arguments of a variable-length call, held to dense attention by a plain implementation of the documented one.

On a CUDA device the real kernels take the same arguments and are held to the same oracle.
"""

import warnings
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modules.attention.borders import Borders
from modules.attention.cu_seqlens import check_cu_seqlens
from modules.attention.strategies import STRATEGIES, Strategy
from modules.attention.varlen_call import VarlenCall, layout_of, prepare, run
from tests.oracles.dense_attention import dense_attention
from tests.oracles.varlen_attention import varlen_attention
from tests.random_rows import random_documents, random_qkv

SERVED = [name for name, strategy in STRATEGIES.items() if not (strategy.window and (strategy.anchor or strategy.sink))]
WINDOW = 7
ROW_WINDOW = Strategy(
    name="row_window", scope="row", window=WINDOW, default_positions="continuous", default_anchor="every_document"
)


def strategy_of(name: str) -> Strategy:
    return replace(STRATEGIES[name], window=WINDOW) if STRATEGIES[name].window else STRATEGIES[name]


def plain(call: VarlenCall) -> torch.Tensor:
    return varlen_attention(
        call.q_NHD,
        call.k_MGD,
        call.v_MGD,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        call.max_seqlen_q,
        call.max_seqlen_k,
        causal=call.causal,
        window_size=call.window_size,
    )


def assert_equal_with_gradients(out, expected, inputs):
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    # Where all is padding, nothing reaches k and v.
    gradients = torch.autograd.grad(out, inputs, weight, materialize_grads=True)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected, inputs, weight), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-9)


SHAPES = [(tokens, anchor, padding) for tokens in (2, 137) for anchor in (False, True) for padding in (False, True)]
SHAPES += [(1025, False, False), (1025, True, True)]


@pytest.mark.parametrize("interleaved", [False, True], ids=["whole", "interleaved"])
@pytest.mark.parametrize(("tokens", "anchor", "padding"), SHAPES)
@pytest.mark.parametrize("strategy", SERVED)
def test_the_documented_call_gives_dense_attention(strategy, tokens, anchor, padding, interleaved):
    """Rows with a shared anchor and rows without document 0, as `data.anchor: every_document` makes them."""
    documents = random_documents(tokens, 2, anchor=anchor, padding=padding, seed=tokens, interleaved=interleaved)
    inputs = random_qkv(2, tokens, 6, 2, 8, seed=tokens)
    expected = dense_attention(*inputs, strategy, documents, window=WINDOW)
    out = run(*inputs, Borders.of(torch.tensor(documents)), strategy_of(strategy), kernel=plain)
    assert_equal_with_gradients(out, expected, inputs)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("tokens", [2, WINDOW, 137])
def test_a_window_over_the_whole_row(tokens, padding):
    """Oracle: torch's attention with a mask made of two rules."""
    documents = torch.tensor(random_documents(tokens, 2, anchor=False, padding=padding, seed=tokens))
    inputs = random_qkv(2, tokens, 2, 2, 8, seed=tokens)
    distance = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    visible = torch.from_numpy((distance >= 0) & (distance < WINDOW))
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=visible)
    # Padding stands behind all tokens, so a causal mask hides it already; only its own output has to go.
    expected = expected.masked_fill((documents == -1)[:, None, :, None], 0.0)
    out = run(*inputs, Borders.of(documents), ROW_WINDOW, kernel=plain)
    assert_equal_with_gradients(out, expected, inputs)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(1, 5), max_size=4), st.integers(0, 3)), min_size=1, max_size=3
    ),
    strategy=st.sampled_from(SERVED),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
)
def test_any_small_batch(rows, strategy, heads):
    """Each row an anchor or none, some documents, some padding; rows are padded to the longest."""
    documents = []
    for anchor, lengths, padding in rows:
        numbers = [0] * anchor + [i for i, length in enumerate(lengths, start=1) for _ in range(length)]
        documents.append(numbers + [-1] * padding)
    tokens = max(1, *map(len, documents))
    documents = [numbers + [-1] * (tokens - len(numbers)) for numbers in documents]
    inputs = random_qkv(len(documents), tokens, *heads, 8, seed=tokens)
    expected = dense_attention(*inputs, strategy, documents, window=WINDOW)
    out = run(*inputs, Borders.of(torch.tensor(documents)), strategy_of(strategy), kernel=plain)
    assert_equal_with_gradients(out, expected, inputs)


def arguments_of(documents: list[list[int]], strategy: str) -> VarlenCall:
    """Of q, k and v whose entries are the tokens' numbers in the batch."""
    rows, tokens = len(documents), len(documents[0])
    number = torch.arange(rows * tokens, dtype=torch.float64).reshape(rows, 1, tokens, 1)
    layout = layout_of(Borders.of(torch.tensor(documents)), STRATEGIES[strategy])
    assert layout is not None
    return prepare(number, number, number, layout, STRATEGIES[strategy])


@pytest.mark.parametrize(
    ("strategy", "queries", "keys", "cu_seqlens_q", "cu_seqlens_k"),
    [
        (
            "anchor",
            [0, 1, 2, 3, 4, 6, 7, 8, 9, 10],
            [0, 1, 2, 0, 3, 4, 6, 7, 6, 8, 9, 10],
            [0, 3, 5, 7, 10],
            [0, 3, 6, 8, 12],
        ),
        ("intra_document", [0, 1, 2, 3, 4, 6, 7, 8, 9, 10], None, [0, 1, 3, 5, 6, 7, 10], None),
        ("full", [0, 1, 2, 3, 4, 6, 7, 8, 9, 10], None, [0, 5, 10], None),
    ],
)
def test_a_worked_example(strategy, queries, keys, cu_seqlens_q, cu_seqlens_k):
    call = arguments_of([[0, 1, 1, 2, 2, -1], [0, 1, 2, 2, 2, -1]], strategy)
    assert call.q_NHD.flatten().tolist() == queries
    assert call.k_MGD.flatten().tolist() == call.v_MGD.flatten().tolist() == (keys or queries)
    assert call.cu_seqlens_q.tolist() == cu_seqlens_q
    assert call.cu_seqlens_k.tolist() == (cu_seqlens_k or cu_seqlens_q)
    assert call.max_seqlen_q == max(np.diff(cu_seqlens_q))
    assert call.max_seqlen_k == max(np.diff(cu_seqlens_k or cu_seqlens_q))
    assert call.window_size == (-1, 0)
    assert call.causal


def test_a_window_of_one_sees_the_token_itself():
    inputs = random_qkv(1, 5, 1, 1, 8, seed=0)
    out = run(*inputs, Borders.of(torch.tensor([[1, 1, 1, 2, 2]])), replace(ROW_WINDOW, window=1), kernel=plain)
    torch.testing.assert_close(out, inputs[2], rtol=0, atol=1e-12)


def test_copies_of_the_anchor_compute_what_the_shared_anchor_does():
    """A copy attends to itself alone, so it holds what the shared anchor holds."""
    inputs = random_qkv(1, 6, 3, 1, 8, seed=8)
    order = [0, 1, 2, 3, 0, 4, 5]
    shared, copied = (Borders.of(torch.tensor([row])) for row in ([0, 1, 1, 1, 2, 2], [1, 1, 1, 1, 2, 2, 2]))
    one = run(*inputs, shared, STRATEGIES["anchor"], kernel=plain)
    two = run(*(x[:, :, order] for x in inputs), copied, STRATEGIES["anchor"], kernel=plain)
    torch.testing.assert_close(two, one[:, :, order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("documents", [[[-1, -1], [-1, -1]], [[0, 1, -1], [-1, -1, -1]]])
def test_padding_gives_zeros_and_takes_no_gradient(documents):
    inputs = random_qkv(2, len(documents[0]), 2, 1, 8, seed=6)
    out = run(*inputs, Borders.of(torch.tensor(documents)), STRATEGIES["anchor"], kernel=plain)
    padding = (torch.tensor(documents) == -1)[:, None, :, None]
    assert not out.masked_select(padding).any()
    for gradient in torch.autograd.grad(out.sum(), inputs, allow_unused=True):
        assert gradient is None or not gradient.masked_select(padding).any()


@pytest.mark.parametrize("strategy", SERVED)
def test_arguments_are_contiguous_whatever_the_memory_layout(strategy):
    borders = Borders.of(torch.tensor(random_documents(30, 2, anchor=True, padding=False, seed=4)))
    layout = layout_of(borders, STRATEGIES[strategy])
    assert layout is not None
    tokens_first = torch.randn(2, 30, 4, 8).transpose(1, 2)
    for x in (tokens_first, tokens_first.contiguous(), tokens_first.transpose(2, 3).contiguous().transpose(2, 3)):
        call = prepare(x, x, x, layout, STRATEGIES[strategy])
        assert all(made.is_contiguous() for made in (call.q_NHD, call.k_MGD, call.v_MGD))
    # Where tokens lie before heads, as a projection leaves them, and nothing is left out, queries are not copied.
    assert prepare(tokens_first, x, x, layout, STRATEGIES[strategy]).q_NHD.data_ptr() == tokens_first.data_ptr()


def test_one_layout_serves_all_layers_and_all_strategies_that_agree():
    borders = Borders.of(torch.tensor([[0, 1, 1, 2]]))
    layout = layout_of(borders, STRATEGIES["intra_document"])
    assert layout_of(borders, STRATEGIES["intra_document"]) is layout
    assert layout_of(borders, STRATEGIES["sliding_window"]) is layout
    assert layout_of(borders, STRATEGIES["anchor"]) is not layout


@pytest.mark.parametrize("kind", [list, np.array, lambda values: np.array(values, dtype=np.uint32), torch.tensor])
def test_right_cu_seqlens_pass(kind):
    check_cu_seqlens(kind([0, 3, 5, 9]), tokens=9)


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([1, 3, 9], r"mine\[0\] = 1: it must start at 0"),
        ([0, 5, 3, 9], r"mine\[2\] = 3 comes after mine\[1\] = 5: it must rise strictly"),
        ([0, 3, 3, 9], r"mine\[2\] = 3 comes after mine\[1\] = 3: it must rise strictly"),
        (np.array([0, 5, 3, 9], dtype=np.uint32), r"mine\[2\] = 3 comes after mine\[1\] = 5: it must rise strictly"),
        ([0, 3, 8], "mine ends at 8: it must end at 9"),
        ([0, 3, 10], "mine ends at 10: it must end at 9"),
        ([0], r"mine has shape \[1\]"),
        ([], r"mine has shape \[0\]"),
        ([[0, 9]], r"mine has shape \[1, 2\]"),
        ([0.0, 9.0], "dtype float64. It must hold whole numbers"),
    ],
)
def test_wrong_cu_seqlens_are_refused(cu_seqlens, message):
    with pytest.raises(ValueError, match=message):
        check_cu_seqlens(cu_seqlens, tokens=9, name="mine")


def test_more_tokens_than_int32_counts_are_refused():
    with pytest.raises(ValueError, match="ends at 2147483647"):
        check_cu_seqlens([0, 2**31], tokens=2**31)


KERNELS = ["varlen", pytest.param("flash", marks=pytest.mark.flash)]
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


def on_the_card(kernel: str, strategy: Strategy, dtype: torch.dtype, width: int):
    """The real kernel's compute, or a skip that says why the machine has none."""
    from modules.attention.capabilities import Request

    module = import_module(f"modules.attention.{kernel}")
    why_not = module.why_not(Request(strategy=strategy, device_type="cuda", dtype=dtype, head_width=width))
    if why_not is not None and "is not installed" in why_not:
        pytest.skip(why_not)
    assert why_not is None, why_not
    return module.compute


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize(
    ("tokens", "width", "anchor", "padding", "interleaved"),
    [
        (2, 64, True, False, False),
        (137, 40, False, True, False),
        (137, 128, True, True, False),
        (1025, 64, True, True, False),
        (1025, 64, True, True, True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", SERVED)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_real_kernel_errs_little(kernel, strategy, dtype, tokens, width, anchor, padding, interleaved):
    """Against float64: at most twice as much as plain attention in that dtype, three times for gradients."""
    compute = on_the_card(kernel, strategy_of(strategy), dtype, width)
    documents = random_documents(tokens, 2, anchor=anchor, padding=padding, seed=tokens, interleaved=interleaved)
    rounded = [x.detach().to(dtype) for x in random_qkv(2, tokens, 6, 2, width, seed=tokens)]
    weight = torch.randn(rounded[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype)

    def output_and_gradients(attention, dtype, device="cpu"):
        inputs = [x.to(device, dtype).requires_grad_() for x in rounded]
        out = attention(*inputs)
        assert out.dtype == dtype
        return [x.double().cpu() for x in (out, *torch.autograd.grad(out, inputs, weight.to(device, dtype)))]

    def dense(q, k, v):
        return dense_attention(q, k, v, strategy, documents, window=WINDOW)

    borders = Borders.of(torch.tensor(documents, device="cuda"))
    exact = output_and_gradients(dense, torch.float64)
    usual = output_and_gradients(dense, dtype)
    ours = output_and_gradients(lambda q, k, v: compute(q, k, v, borders, strategy_of(strategy)), dtype, "cuda")
    for value, low, high, times in zip(ours, usual, exact, (2, 3, 3, 3), strict=True):
        # Plain attention has gradients of exactly 0 where a token sees itself alone; a fused kernel has 1e-6 there.
        assert (value - high).abs().max() <= times * (low - high).abs().max() + 5e-5


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("kernel", KERNELS)
def test_peak_memory_grows_with_tokens_and_not_with_their_square(kernel):
    compute = on_the_card(kernel, STRATEGIES["anchor"], torch.bfloat16, 64)

    def peak_bytes(tokens: int) -> int:
        lengths = np.random.default_rng(0).lognormal(7, 1, tokens).astype(int) + 1
        document = np.repeat(np.arange(1, tokens + 1), lengths)[: tokens - 1]
        borders = Borders.of(torch.tensor(np.array([[0, *document]]), device="cuda"))
        inputs = [
            torch.randn(1, heads, tokens, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
            for heads in (8, 2, 2)
        ]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = compute(*inputs, borders, STRATEGIES["anchor"])
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        return torch.cuda.max_memory_allocated() - before

    peak_bytes(16384)  # workspaces
    assert peak_bytes(65536) <= 4.5 * peak_bytes(16384)


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("kernel", KERNELS)
def test_asked_for_determinism_the_gradients_repeat_to_the_bit(kernel):
    documents = random_documents(1025, 2, anchor=True, padding=True, seed=3)
    borders = Borders.of(torch.tensor(documents, device="cuda"))
    inputs = [x.detach().cuda().bfloat16().requires_grad_() for x in random_qkv(2, 1025, 6, 2, 64, seed=3)]
    torch.use_deterministic_algorithms(True)
    try:
        compute = on_the_card(kernel, STRATEGIES["anchor"], torch.bfloat16, 64)
        runs = []
        for _ in range(4):
            with warnings.catch_warnings(action="error"):
                out = compute(*inputs, borders, STRATEGIES["anchor"])
                runs.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out))])
    finally:
        torch.use_deterministic_algorithms(False)
    for again in runs[1:]:
        assert all(torch.equal(one, two) for one, two in zip(runs[0], again, strict=True))


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("strategy", SERVED)
@pytest.mark.parametrize("kernel", KERNELS)
def test_on_the_card_too_what_a_document_cannot_see_does_not_move_one_bit_of_it(kernel, strategy):
    compute = on_the_card(kernel, strategy_of(strategy), torch.bfloat16, 64)
    borders = Borders.of(torch.tensor([[0] + [1] * 400 + [2] * 300], device="cuda"))
    inputs = [x.detach().cuda().bfloat16() for x in random_qkv(1, 701, 4, 2, 64, seed=9)]

    def second_document(changed_token: int | None):
        changed = [x.clone() for x in inputs]
        for x in changed:
            if changed_token is not None:
                x[:, :, changed_token] += 1.0
        return compute(*changed, borders, strategy_of(strategy))[:, :, 401:]

    for token in (1, 170, 400):
        assert torch.equal(second_document(token), second_document(None)) == (strategy != "full")
    assert torch.equal(second_document(0), second_document(None)) != (strategy in ("full", "anchor"))
