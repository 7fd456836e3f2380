"""FlexAttention against dense attention in float64, on this CPU forward only; how often it compiles; what it refuses.

A compilation takes this CPU about ten seconds, so the tests that are not slow share three compiled signatures.
"""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from modules.attention import flex
from modules.attention.attend import attend
from modules.attention.block_mask import block_mask
from modules.attention.borders import Borders
from modules.attention.capabilities import Request
from modules.attention.strategies import STRATEGIES
from modules.float32_products import Float32Products
from tests.oracles.dense_attention import dense_attention

DISTINCT = [name for name in STRATEGIES if name != "intra_document_reset"]
"""That one differs from `intra_document` in positions alone."""

ROWS, HEADS, KV_HEADS, WIDTH = 2, 6, 2, 16

REQUEST = Request(
    strategy=STRATEGIES["anchor"], device_type="cpu", dtype=torch.float32, head_width=WIDTH, needs_gradient=False
)
refusal = flex.why_not(REQUEST)
on_cpu = pytest.mark.skipif(refusal is not None, reason=str(refusal))
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


def narrowed(name):
    """Windows and sinks that end inside a block, beside, and beyond a neighbouring one."""
    strategy = STRATEGIES[name]
    return strategy if strategy.window is None else replace(strategy, window=140, sink=3 if strategy.sink else 0)


def batch_of_documents(tokens, *, anchor, seed, interleaved=False):
    """Two rows, the second with padding: a document of one token, short ones, and a longer one that spans blocks.

    Interleaved ones are laid in pieces of up to 40 tokens, in any order.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for row in range(ROWS):
        starts = np.unique([1, 2, *rng.integers(2, tokens, size=4)])
        number = np.searchsorted(starts, np.arange(tokens), side="right") + (0 if anchor else 1)
        if interleaved:
            pieces = np.split(number[1:], np.arange(40, tokens - 1, 40))
            number[1:] = np.concatenate([pieces[i] for i in rng.permutation(len(pieces))])
        if row == ROWS - 1:
            number[tokens - rng.integers(1, tokens // 2) :] = -1
        rows.append(number)
    return torch.from_numpy(np.stack(rows))


def random_qkv(tokens, dtype=torch.float64, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((ROWS, heads, tokens, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(device, dtype) for shape in shapes]


def oracle(q, k, v, strategy, document_BT):
    documents = document_BT.tolist()
    return dense_attention(q, k, v, strategy.name, documents, window=strategy.window or 0, sink=strategy.sink)


def check_values(strategy, tokens, dtype, *, anchor, seed=0, interleaved=False):
    """At most twice plain attention's error in that dtype; float32 has a floor of 1e-6, for plain may be exact."""
    document_BT = batch_of_documents(tokens, anchor=anchor, seed=seed, interleaved=interleaved)
    low = random_qkv(tokens, dtype, seed)
    exact = oracle(*(x.double() for x in low), strategy, document_BT)
    plain = oracle(*low, strategy, document_BT)
    out = attend(*low, Borders.of(document_BT), strategy, kernel="flex")
    assert out.dtype == dtype
    assert out.shape == exact.shape
    padding = (document_BT == -1)[:, None, :, None]
    assert padding.any()
    assert not out.masked_select(padding).any()
    floor = 1e-6 if dtype == torch.float32 else 0.0
    assert (out.double() - exact).abs().max() <= 2 * (plain.double() - exact).abs().max() + floor


def compilations():
    return counters["stats"]["unique_graphs"]


@on_cpu
@pytest.mark.parametrize("interleaved", [False, True], ids=["whole", "interleaved"])
@pytest.mark.parametrize("anchor", [False, True], ids=["copies", "shared"])
@pytest.mark.parametrize(("name", "tokens"), [("anchor", 137), ("sink_window", 1025)])
def test_values(name, tokens, anchor, interleaved):
    check_values(narrowed(name), tokens, torch.float32, anchor=anchor, interleaved=interleaved)


@on_cpu
def test_twenty_batches_compile_at_most_twice_and_are_all_right():
    before = compilations()
    for seed in range(20):
        check_values(STRATEGIES["anchor"], 137, torch.float32, anchor=seed % 3 > 0, seed=seed)
    assert compilations() - before <= 2


@on_cpu
def test_bfloat16_under_float32_products_on_cpu():
    with Float32Products():
        check_values(STRATEGIES["anchor"], 137, torch.bfloat16, anchor=True)


@on_cpu
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_leaves_that_require_gradients_are_welcome_where_none_is_taken(mode):
    document_BT = batch_of_documents(137, anchor=True, seed=0)
    inputs = random_qkv(137, torch.float32)
    borders = Borders.of(document_BT)
    expected = flex.compute(*inputs, borders, STRATEGIES["anchor"])
    with mode():
        out = flex.compute(*(x.clone().requires_grad_() for x in inputs), borders, STRATEGIES["anchor"])
    assert torch.equal(out, expected)
    assert not out.requires_grad


@on_cpu
def test_a_compiled_model_around_it_leaves_it_its_own_compilation():
    """As a model under torch.compile calls it: from a region that the outer compilation leaves to Python."""
    document_BT = batch_of_documents(137, anchor=True, seed=1)
    borders = Borders.of(document_BT)
    inputs = random_qkv(137, torch.float32)

    @torch.compiler.disable
    def opaque(q, k, v):
        return flex.compute(q, k, v, borders, STRATEGIES["anchor"])

    @torch.compile(backend="eager")
    def model(q, k, v):
        return opaque(q * 2, k, v) + 1

    exact = oracle(inputs[0].double() * 2, *(x.double() for x in inputs[1:]), STRATEGIES["anchor"], document_BT)
    with torch.no_grad():
        torch.testing.assert_close(model(*inputs).double(), exact + 1, rtol=0, atol=1e-5)


@on_cpu
@pytest.mark.parametrize(
    ("tokens", "switch", "message"),
    [
        (65536, lambda: torch.compiler.set_stance("force_eager"), "'flex' runs only as compiled"),
        (65537, lambda: torch._dynamo.config.patch(disable=True), "'flex' runs only as compiled"),
        (65538, lambda: torch._dynamo.config.patch(recompile_limit=0), "raise torch._dynamo.config.recompile_limit"),
    ],
    ids=["stance", "disabled", "limit"],
)
def test_uncompiled_is_an_error_and_no_dense_attention(tokens, switch, message):
    """The scores of one head would take 16 GiB, so nothing else than an error can come back."""
    q, k, v = (torch.zeros(1, 1, 1, 1).expand(1, 1, tokens, 1) for _ in range(3))
    borders = Borders.of(torch.arange(tokens)[None] // 4096 + 1)
    with switch(), pytest.raises(RuntimeError, match=message):
        flex.compute(q, k, v, borders, STRATEGIES["intra_document"])


def test_torch_compile_switched_off_in_the_environment_is_said_before_anything_runs():
    script = (
        "import torch\n"
        "from modules.attention.attend import attend\n"
        "from modules.attention.borders import Borders\n"
        "from modules.attention.strategies import STRATEGIES\n"
        "x = torch.zeros(1, 1, 4, 16)\n"
        "attend(x, x, x, Borders.of(torch.ones(1, 4, dtype=torch.long)), STRATEGIES['full'], kernel='flex')\n"
    )
    environment = {**os.environ, "TORCH_COMPILE_DISABLE": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "TORCH_COMPILE_DISABLE=1" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("rows", "tokens"), [(2, 5), (2, 7), (1, 6), (3, 6)])
def test_a_mask_of_another_batch_is_refused(rows, tokens):
    """Before anything is compiled. FlexAttention itself would take a mask of one row for any number of rows."""
    x = torch.zeros(2, 1, 6, 16)
    borders = Borders.of(torch.ones(rows, tokens, dtype=torch.long))
    before = compilations()
    with pytest.raises(ValueError, match=f"for {rows} rows of {tokens} tokens on cpu, but the queries are 2 rows of 6"):
        flex.compute(x, x, x, borders, STRATEGIES["full"])
    with pytest.raises(ValueError, match="on cpu, but the queries are 2 rows of 6 on meta"):
        flex.check_mask(block_mask(Borders.of(torch.ones(2, 6, dtype=torch.long)), STRATEGIES["full"]), x.to("meta"))
    assert compilations() == before


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"needs_gradient": True}, "gradients on cuda only"),
        ({"device_type": "mps"}, "not on mps"),
        ({"dtype": torch.float64}, "not in torch.float64"),
        ({"device_type": "cuda", "dtype": torch.float64}, "not in torch.float64"),
        ({"device_type": "cuda", "head_width": 8}, "16 to 256 wide, not 8"),
        ({"device_type": "cuda", "head_width": 512}, "16 to 256 wide, not 512"),
    ],
)
def test_refusals_are_sentences(changes, reason):
    refusal = flex.why_not(replace(REQUEST, **changes))
    assert refusal is not None
    assert reason in refusal
    assert refusal.endswith(".")


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
def test_every_strategy_is_served(strategy):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert flex.why_not(replace(REQUEST, strategy=strategy, dtype=dtype)) == refusal


def test_a_machine_without_a_compiler_is_told_so(monkeypatch):
    flex._cpu_lacks.cache_clear()
    try:
        monkeypatch.setenv("CXX", "no-such-compiler")
        reason = flex.why_not(REQUEST)
        assert reason is not None
        assert "'no-such-compiler' is not found" in reason or "AVX2" in reason
    finally:
        flex._cpu_lacks.cache_clear()


def test_asking_what_it_can_serve_loads_no_compiler():
    """`auto` asks every kernel, and loading torch.compile takes seconds."""
    script = (
        "import sys, torch\n"
        "from modules.attention.capabilities import can_serve\n"
        "from modules.attention.strategies import STRATEGIES\n"
        "can_serve('flex', strategy=STRATEGIES['full'], device_type='cpu', dtype=torch.float32, head_width=8)\n"
        "assert 'modules.attention.flex' in sys.modules\n"
        "assert not {'torch._dynamo', 'torch._inductor'} & set(sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


@on_cpu
@pytest.mark.slow
@pytest.mark.parametrize("tokens", [137, 1025])
@pytest.mark.parametrize("name", DISTINCT)
def test_values_of_all_strategies(name, tokens):
    for anchor in (False, True):
        check_values(narrowed(name), tokens, torch.float32, anchor=anchor)


@on_cpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["anchor", "sink_window"])
def test_values_in_half_precision(name, dtype):
    for anchor in (False, True):
        check_values(narrowed(name), 1025, dtype, anchor=anchor)


@on_cpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "tokens", "width"),
    [(1, 1, 1, 2, 1), (1, 9, 3, 130, 7), (3, 2, 2, 128, 80), (5, 6, 1, 300, 17)],
)
def test_any_shape_in_any_memory_layout(rows, heads, kv_heads, tokens, width):
    generator = torch.Generator().manual_seed(tokens)
    document_BT = torch.arange(tokens).expand(rows, -1) // (tokens // 2) + 1
    strategy = replace(STRATEGIES["sink_window"], window=20, sink=2)
    for heads_first in (True, False):
        inputs = []
        for count in (heads, kv_heads, kv_heads):
            shape = (rows, count, tokens, width) if heads_first else (rows, tokens, count, width)
            x = torch.randn(shape, generator=generator)
            inputs.append(x if heads_first else x.transpose(1, 2))
        exact = oracle(*(x.double() for x in inputs), strategy, document_BT)
        out = attend(*inputs, Borders.of(document_BT), strategy, kernel="flex")
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-6)
        padding_alone = attend(*inputs, Borders.of(torch.full_like(document_BT, -1)), strategy, kernel="flex")
        assert not padding_alone.any()


@on_cpu
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_strategies_than_torch_recompiles_a_function():
    """Ten windows in one process, where torch's limit is 8 versions of a function."""
    document_BT = batch_of_documents(40, anchor=True, seed=0)
    inputs = random_qkv(40, torch.float32)
    before = compilations()
    for window in [*range(1, 11), *range(1, 11)]:
        strategy = replace(STRATEGIES["sliding_window"], window=window)
        out = attend(*inputs, Borders.of(document_BT), strategy, kernel="flex")
        exact = oracle(*(x.double() for x in inputs), strategy, document_BT)
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-6)
    assert compilations() - before == 10


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("tokens", [137, 1025])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in DISTINCT), ("anchor", torch.float16), ("anchor", torch.float32)],
)
def test_values_and_gradients_on_cuda(name, dtype, tokens):
    """Against float64: values err at most twice as much as plain attention in that dtype, gradients three times."""
    for anchor, interleaved in ((False, False), (True, False), (True, True)):
        check_gradients(narrowed(name), tokens, dtype, anchor=anchor, interleaved=interleaved)


def check_gradients(strategy, tokens, dtype, *, anchor, interleaved):
    document_BT = batch_of_documents(tokens, anchor=anchor, seed=tokens, interleaved=interleaved)
    low = random_qkv(tokens, dtype, seed=tokens)
    weight = torch.randn(ROWS, HEADS, tokens, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    borders = Borders.of(document_BT.cuda())

    def values(compute, kind, device):
        inputs = [x.to(device, kind).requires_grad_() for x in low]
        out = compute(*inputs)
        assert out.dtype == kind
        gradients = torch.autograd.grad((out * weight.to(device, kind)).sum(), inputs)
        return [x.detach().cpu().double() for x in (out, *gradients)]

    exact = values(lambda *x: oracle(*x, strategy, document_BT), torch.float64, "cpu")
    plain = values(lambda *x: oracle(*x, strategy, document_BT), dtype, "cpu")
    ours = values(lambda *x: attend(*x, borders, strategy, kernel="flex"), dtype, "cuda")

    padding = (document_BT == -1)[:, None, :, None]
    floor = 1e-5 if dtype == torch.float32 else 0.0
    for factor, value, low_value, high in zip((2, 3, 3, 3), ours, plain, exact, strict=True):
        assert not value.masked_select(padding).any()
        assert (value - high).abs().max() <= factor * (low_value - high).abs().max() + floor


@pytest.mark.gpu
@on_cuda
def test_twenty_batches_train_with_at_most_two_compilations_on_cuda():
    before = compilations()
    for seed in range(20):
        inputs = [x.requires_grad_() for x in random_qkv(1025, torch.bfloat16, seed, "cuda")]
        borders = Borders.of(batch_of_documents(1025, anchor=True, seed=seed).cuda())
        out = attend(*inputs, borders, STRATEGIES["anchor"], kernel="flex")
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), inputs))
    assert compilations() - before <= 2


@pytest.mark.gpu
@on_cuda
def test_memory_grows_with_the_row_and_not_with_its_square_on_cuda():
    peaks = []
    for tokens in (16384, 65536):
        inputs = [torch.randn(1, 4, tokens, 64, dtype=torch.bfloat16, device="cuda").requires_grad_() for _ in range(3)]
        borders = Borders.of(torch.arange(tokens, device="cuda")[None] // 3000 + 1)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        attend(*inputs, borders, STRATEGIES["intra_document"], kernel="flex").sum().backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - held)
    assert peaks[1] <= 5 * peaks[0]
