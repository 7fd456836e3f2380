"""bfloat16 products in float32: exactly those, rounded once, in every pass of a real training run."""

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import get_args

import lightning
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.plugins.precision.precision import (
    _PRECISION_INPUT_STR,
    _PRECISION_INPUT_STR_ALIAS_CONVERSION,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from modules import precision
from modules.float32_products import Float32Products
from modules.precision import (
    ALIASES,
    DTYPES,
    LOW_PRECISION_WEIGHTS,
    PrecisionName,
    check_precision,
    cpu_has_bfloat16_products,
    precision_plugin,
    resolve_bfloat16_products,
)
from modules.widened import Widened

BFLOAT16 = torch.bfloat16
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
WATCHED = [
    *(name + form for name in ("addmm", "baddbmm", "addbmm", "addmv") for form in ("", "_", ".out")),
    *(name + form for name in ("mm", "bmm", "mv", "dot") for form in ("", ".out")),
    *("_addmm_activation", "vdot", ATTENTION, f"{ATTENTION}_backward"),
]


class KernelDtypes:
    """Writes down which product and attention kernels run and in which dtype.

    Entered before `Float32Products` it stands below it and sees what that hands on to torch.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[str, torch.dtype]] = []

    def __enter__(self) -> "KernelDtypes":
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in WATCHED:
                self._watch(name, torch.library.get_kernel(f"aten::{name}", "CPU"))
        return self

    def _watch(self, name: str, kernel) -> None:
        def watched(keys, *args, **kwargs):
            dtypes = {x.dtype for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()}
            self.seen += [(name, dtype) for dtype in dtypes]
            return kernel.call_boxed(keys, *args, **kwargs)

        self._library.impl(name, watched, "CPU", with_keyset=True, allow_override=True)

    def __exit__(self, *error) -> None:
        self._library._destroy()

    def count(self, name: str, dtype: torch.dtype) -> int:
        return self.seen.count((name, dtype))

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {dtype for _, dtype in self.seen}


class Block(nn.Module):
    """A Llama block without rotation: RMSNorm, grouped-query attention of 4 heads on 2, SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=True)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x_BTE: Tensor) -> Tensor:
        def heads(y_BTE: Tensor) -> Tensor:
            return y_BTE.unflatten(-1, (-1, x_BTE.shape[-1] // 4)).transpose(1, 2)

        h_BTE = self.attention_norm(x_BTE)
        k, v = self.kv(h_BTE).chunk(2, dim=-1)
        attended = F.scaled_dot_product_attention(
            heads(self.q(h_BTE)), heads(k), heads(v), is_causal=True, enable_gqa=True
        )
        x_BTE = x_BTE + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x_BTE)).chunk(2, dim=-1)
        return x_BTE + self.down(F.silu(gate) * up)


class LittleLlama(lightning.LightningModule):
    """Two blocks, tied embeddings, a loss in two checkpointed chunks."""

    def __init__(self, vocabulary_size: int = 64, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm = nn.RMSNorm(width)
        self.losses: list[float] = []
        self.gradient_dtypes: set[torch.dtype] = set()
        self.validation_loss, self.validated_in_inference_mode = float("nan"), False
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        hidden = self.norm(self.blocks(self.embedding(tokens_BT[:, :-1]))).flatten(0, 1)
        labels = tokens_BT[:, 1:].flatten()

        def chunk_loss(hidden: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(F.linear(hidden, self.embedding.weight).float(), labels, reduction="sum")

        chunks = zip(hidden.tensor_split(2), labels.tensor_split(2), strict=True)
        return sum(checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in chunks) / labels.numel()

    def training_step(self, tokens_BT: Tensor) -> Tensor:
        loss = self(tokens_BT)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, tokens_BT: Tensor) -> None:
        self.validation_loss = self(tokens_BT).item()
        self.validated_in_inference_mode = torch.is_inference_mode_enabled()

    def on_before_optimizer_step(self, optimizer) -> None:
        self.gradient_dtypes |= {p.grad.dtype for p in self.parameters()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = BFLOAT16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


PRODUCTS = {
    "mm": (torch.mm, [(5, 37), (37, 9)]),
    "mm of a transposed": (lambda a, b: torch.mm(a.t(), b), [(37, 5), (37, 9)]),
    "bmm": (torch.bmm, [(3, 5, 37), (3, 37, 9)]),
    "mv": (torch.mv, [(5, 37), (37,)]),
    "dot": (torch.dot, [(37,), (37,)]),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0), [(9,), (5, 37), (37, 9)]),
    "addmm_": (lambda c, a, b: c.clone().addmm_(a, b), [(5, 9), (5, 37), (37, 9)]),
    "baddbmm": (torch.baddbmm, [(3, 5, 9), (3, 5, 37), (3, 37, 9)]),
    "addbmm": (torch.addbmm, [(5, 9), (3, 5, 37), (3, 37, 9)]),
    "addmv": (torch.addmv, [(5,), (5, 37), (37,)]),
    "mm into out": (lambda c, a, b: torch.mm(a, b, out=c.clone()), [(5, 9), (5, 37), (37, 9)]),
    "linear": (F.linear, [(2, 5, 37), (9, 37)]),
    "linear with bias": (F.linear, [(2, 5, 37), (9, 37), (9,)]),
    "matmul": (torch.matmul, [(2, 3, 5, 37), (2, 3, 37, 9)]),
    "einsum": (lambda a, b: torch.einsum("bik,bjk->bij", a, b), [(3, 5, 37), (3, 9, 37)]),
}
GRAD_MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_the_float32_product_rounded_once(name, mode):
    product, shapes = PRODUCTS[name]
    with GRAD_MODES[mode]():
        operands = [randn(*shape, seed=seed) for seed, shape in enumerate(shapes)]
        expected = product(*(x.float() for x in operands)).bfloat16()
        native = product(*operands)
        with KernelDtypes() as kernels, Float32Products():
            result = product(*operands)
    assert torch.equal(result, expected)
    assert kernels.dtypes == {torch.float32}
    assert (result.dtype, result.shape, result.stride()) == (native.dtype, native.shape, native.stride())


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_small_integers_is_exact_until_its_one_rounding(name):
    """Oracle: float64. Integers to 8 keep every partial sum exact in float32, whatever the order of summation."""
    product, shapes = PRODUCTS[name]
    operands = [randn(*shape, seed=seed).mul(3).round().clamp(-8, 8) for seed, shape in enumerate(shapes)]
    with Float32Products():
        result = product(*operands)
    assert torch.equal(result, product(*(x.double() for x in operands)).bfloat16())


def units_apart(a: Tensor, b: Tensor) -> Tensor:
    """How many bfloat16 numbers lie between those nearest to a and b: 0 for the same, 1 for neighbours."""

    def order(x: Tensor) -> Tensor:
        bits = x.to(BFLOAT16).view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (order(a) - order(b)).abs()


@pytest.mark.parametrize("depth", [37, 1024])
@pytest.mark.parametrize("positive", [True, False])
def test_a_product_is_within_one_rounding_of_the_exact_and_of_the_native_one(depth, positive):
    """Oracle: float64. Sums of one sign lose nothing in float32; those of both what their operands' size makes them."""
    a, b = randn(64, depth), randn(depth, 48, seed=1)
    if positive:
        a, b = a.abs(), b.abs()
    exact, native = a.double() @ b.double(), a @ b
    with Float32Products():
        ours = a @ b
    size = a.double().abs() @ b.double().abs()
    half_a_unit = 2.0**-8 * exact.abs().log2().ceil().exp2() / 2
    assert ((ours - exact).abs() <= half_a_unit * (1 + 1e-6) + 2**-20 * size).all()
    if positive:
        assert units_apart(ours, exact).max() <= 1 and (units_apart(ours, exact) == 0).float().mean() > 0.99
        assert units_apart(ours, native).max() <= 1
    assert ((ours.double() - native).abs() <= 2 * half_a_unit + 2**-7 * size / depth**0.5).all()


def test_what_is_written_to_between_two_products_is_widened_anew():
    """Large enough to be kept; every way to write that autograd knows, and memory that another tensor gets."""
    weight = randn(80, 64, seed=1)
    writes = {
        "in place": lambda x: x.mul_(3),
        "a view": lambda x: x[5:9].zero_(),
        "the whole through a view": lambda x: x.view(-1).add_(1),
        "a detached twin": lambda x: x.detach().neg_(),
        "copy_": lambda x: x.copy_(randn(*x.shape, seed=2)),
        "foreach": lambda x: torch._foreach_add_([x], 1.0),
        "a product": lambda x: x[:, :64].addmm_(x[:, :64].clone(), weight[:64]),
        "out": lambda x: torch.mm(x.clone(), weight, out=x[:, :64]),
    }
    for name, write in writes.items():
        for mode in GRAD_MODES.values():
            with mode(), Float32Products():
                x = randn(96, 80)
                before = x @ weight
                write(x)
                after, transposed = x @ weight, x.t() @ randn(96, 64, seed=3)
            assert torch.equal(after, (x.float() @ weight.float()).bfloat16()), name
            assert torch.equal(transposed, (x.float().t() @ randn(96, 64, seed=3).float()).bfloat16()), name
            assert not torch.equal(after, before), name


def test_memory_that_changes_hands_brings_no_old_numbers_back():
    """As sharded parameters do: one gives its memory away, another gets it, and no version tells."""
    weight = randn(80, 64, seed=1)
    memory = randn(96, 80)
    first, second = torch.empty(0, dtype=BFLOAT16), torch.empty(0, dtype=BFLOAT16)
    with Float32Products():
        first.set_(memory)
        first @ weight
        with torch.autograd._unsafe_preserve_version_counter((first, memory)):
            memory.copy_(randn(96, 80, seed=2))
            address = memory.data_ptr()
        same_memory = (ctypes.c_char * memory.nbytes).from_address(address)
        second.set_(torch.frombuffer(same_memory, dtype=BFLOAT16).view(96, 80))
        result = second @ weight
    assert second.data_ptr() == first.data_ptr() and torch.equal(result, (memory.float() @ weight.float()).bfloat16())


def test_any_order_of_products_gives_what_each_gives_alone():
    """Matrices of many sizes, twice and transposed, more than are kept, memory used again and again."""
    random = torch.Generator().manual_seed(0)
    matrices = [randn(rows, 72, seed=rows) for rows in (60, 64, 80, 100, 130, 150, 200, 300)]
    with Float32Products():
        for _ in range(200):
            i, j = torch.randint(len(matrices), (2,), generator=random).tolist()
            a, b = matrices[i], matrices[j]
            assert torch.equal(a @ b.t(), (a.float() @ b.float().t()).bfloat16())
            assert torch.equal(a[:50].t() @ b[:50], (a[:50].float().t() @ b[:50].float()).bfloat16())
            if i % 3 == 0:
                a.mul_(-0.5)


def test_a_matrix_that_is_multiplied_in_a_row_is_widened_once(monkeypatch):
    """Forward by three weights; backward of each once for the input and once for the weight."""
    x, weights = randn(96, 64).requires_grad_(), [randn(64, 96, seed=i).requires_grad_() for i in range(3)]
    copied = []
    real = Widened._memory
    monkeypatch.setattr(Widened, "_memory", lambda self, size: copied.append(size) or real(self, size))
    with Float32Products():
        outs = [x @ weight for weight in weights]
        assert len(copied) == 1 + 3
        sum(out.sum() * (i + 1) for i, out in enumerate(outs)).backward()
    assert len(copied) <= 1 + 3 + 3 * 2 + 1


def test_in_place_and_out_write_into_the_tensor_given():
    a, b, target = randn(4, 6), randn(6, 5, seed=1), randn(4, 5, seed=2)
    too_small = torch.empty(0, dtype=BFLOAT16)
    sums = target.clone()
    with Float32Products():
        assert sums.addmm_(a, b) is sums
        assert torch.mm(a, b, out=too_small) is too_small
    assert torch.equal(sums, torch.addmm(target.float(), a.float(), b.float()).bfloat16())
    assert torch.equal(too_small, (a.float() @ b.float()).bfloat16())


def test_other_dtypes_and_mixed_operands_are_left_to_torch():
    a, b = randn(4, 6), randn(6, 5, seed=1)
    for dtype in (torch.float32, torch.float64, torch.float16):
        with Float32Products():
            result = a.to(dtype) @ b.to(dtype)
        assert torch.equal(result, a.to(dtype) @ b.to(dtype))
    with Float32Products(), pytest.raises(RuntimeError, match="dtype"):
        a @ b.float()


ELSEWHERE = {
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "add with alpha": lambda x, y: torch.add(x, y, alpha=0.3),
    "silu": lambda x, y: F.silu(x) * y,
    "rms_norm": lambda x, y: F.rms_norm(x, (x.shape[-1],), y[0], 1e-5),
    "layer_norm": lambda x, y: F.layer_norm(x, (x.shape[-1],), y[0], y[1]),
    "softmax": lambda x, y: x.softmax(-1) * y,
    "cross_entropy": lambda x, y: F.cross_entropy(x * y, torch.arange(x.shape[0])),
    "embedding": lambda x, y: F.embedding(torch.tensor([1, 3, 3, 0, 1]), x) * y[:5],
    "index_put": lambda x, y: x.index_put((torch.tensor([0, 2, 2]),), y[:3], accumulate=True),
    "sum": lambda x, y: (x * y).sum(0),
    "cumsum": lambda x, y: (x * y).cumsum(-1),
    "rotation": lambda x, y: torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1) * y,
    "cast": lambda x, y: (x.float() * y.float()).to(BFLOAT16),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_everything_else_is_bit_equal_to_torch(name):
    def value_and_gradients(context: contextlib.AbstractContextManager) -> list[Tensor]:
        x, y = randn(7, 64).requires_grad_(), randn(7, 64, seed=1).requires_grad_()
        with context:
            value = ELSEWHERE[name](x, y)
            return [value.detach(), *torch.autograd.grad(value, (x, y), randn(*value.shape, seed=2))]

    ours, native = value_and_gradients(Float32Products()), value_and_gradients(contextlib.nullcontext())
    for our, theirs in zip(ours, native, strict=True):
        assert our.dtype == theirs.dtype
        assert torch.equal(our, theirs)


def attend(q: Tensor, k: Tensor, v: Tensor, **kwargs) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **kwargs)


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("key_heads", [6, 2, 1])
@pytest.mark.parametrize("tokens", [1, 2, 137])
def test_fused_attention_is_the_float32_attention_rounded_once(tokens, key_heads):
    q, k, v = randn(2, 6, tokens, 16), randn(2, key_heads, tokens, 16, seed=1), randn(2, key_heads, tokens, 16, seed=2)
    for mode in GRAD_MODES.values():
        with mode(), KernelDtypes() as kernels, Float32Products():
            out = attend(q, k, v, is_causal=True)
        assert torch.equal(out, attend(q.float(), k.float(), v.float(), is_causal=True).bfloat16())
        assert kernels.dtypes == {torch.float32}


def test_fused_attention_with_a_mask():
    q, k, v = (randn(2, 3, 33, 16, seed=seed) for seed in range(3))
    bias, visible = randn(33, 33, seed=3), torch.ones(33, 33, dtype=torch.bool).tril()
    with KernelDtypes() as kernels, Float32Products():
        masked, biased = attend(q, k, v, attn_mask=visible), attend(q, k, v, attn_mask=bias)
    wide = q.float(), k.float(), v.float()
    assert torch.equal(masked, attend(*wide, attn_mask=visible).bfloat16())
    assert torch.equal(biased, attend(*wide, attn_mask=bias.float()).bfloat16())
    assert kernels.dtypes == {torch.float32}


def test_backward_of_fused_attention_is_the_float32_backward_rounded_once():
    """Oracle: torch's float32 kernel called by hand; the output it is given was rounded when forward stored it."""
    q, k, v = (randn(2, 3, 65, 16, seed=seed).requires_grad_() for seed in range(3))
    upstream = randn(2, 3, 65, 16, seed=3)
    with KernelDtypes() as kernels, Float32Products():
        out = attend(q, k, v, is_causal=True)
        gradients = torch.autograd.grad(out, (q, k, v), upstream)
    assert kernels.dtypes == {torch.float32}

    wide = [x.detach().float() for x in (q, k, v)]
    out_wide, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*wide, 0.0, True)
    out_rounded = out_wide.bfloat16().float()
    expected = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        upstream.float(), *wide, out_rounded, logsumexp, 0.0, True
    )
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, wanted.bfloat16())


def test_gradients_of_attention_err_no_more_than_native_ones():
    """Both against a dense float64 attention of the same bfloat16 numbers."""
    q, k, v = randn(2, 6, 137, 16), randn(2, 2, 137, 16, seed=1), randn(2, 2, 137, 16, seed=2)
    upstream = randn(2, 6, 137, 16, seed=3)

    def gradients(attention, context, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        with context:
            return torch.autograd.grad(attention(*leaves), leaves, upstream.to(dtype))

    def causal(q, k, v):
        return attend(q, k, v, is_causal=True)

    exact = gradients(dense_attention, contextlib.nullcontext(), torch.float64)
    ours = gradients(causal, Float32Products(), BFLOAT16)
    native = gradients(causal, contextlib.nullcontext(), BFLOAT16)
    for our, theirs, right in zip(ours, native, exact, strict=True):
        assert our.dtype == BFLOAT16
        assert (our - right).norm() <= 1.1 * (theirs - right).norm()
        assert (our - right).norm() <= 2**-7 * right.norm()


def model_gradients(context: contextlib.AbstractContextManager, *, dtype: torch.dtype, autocast: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = LittleLlama().to(BFLOAT16).to(dtype)  # the same numbers, whatever the dtype
    tokens_BT = torch.randint(0, 64, (4, 65), generator=torch.Generator().manual_seed(1))
    with context:
        with torch.autocast("cpu", BFLOAT16, enabled=autocast):
            loss = model(tokens_BT)
        loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("kind", ["bf16-true", "bf16-mixed"])
def test_gradients_of_a_model_are_as_close_to_float32_as_native_ones(kind):
    nothing = contextlib.nullcontext()
    kwargs = {"dtype": BFLOAT16 if kind == "bf16-true" else torch.float32, "autocast": kind == "bf16-mixed"}
    exact = model_gradients(nothing, dtype=torch.float32, autocast=False)
    ours, native = model_gradients(Float32Products(), **kwargs), model_gradients(nothing, **kwargs)

    def error(gradients: list[Tensor]) -> float:
        pairs = list(zip(gradients, exact, strict=True))
        return torch.stack([(g.float() - e).norm() / e.norm() for g, e in pairs]).square().mean().sqrt().item()

    assert {g.dtype for g in ours} == {kwargs["dtype"]}
    assert 0 < error(ours) <= 1.2 * error(native)
    assert error(ours) < 0.05


@pytest.mark.parametrize("autocast", [False, True])
def test_backward_and_the_recomputation_of_checkpoints_are_reached(autocast):
    """By hand: 2 blocks of 5 linears, 2 chunks of the loss, each of them recomputed once in backward.

    Backward multiplies twice per linear, once for its input and once for its weight.
    """
    with KernelDtypes() as kernels:
        model_gradients(Float32Products(), dtype=torch.float32 if autocast else BFLOAT16, autocast=autocast)
    assert kernels.dtypes == {torch.float32}
    assert len([name for name, _ in kernels.seen if name in ("mm", "addmm")]) == 2 * 5 + 2 + 2 + 2 * (2 * 5 + 2)
    assert kernels.count("addmm", torch.float32) == 2
    assert kernels.count("_scaled_dot_product_flash_attention_for_cpu", torch.float32) == 2
    assert kernels.count("_scaled_dot_product_flash_attention_for_cpu_backward", torch.float32) == 2


def test_nothing_leaks_out_of_the_context():
    a, b = randn(4, 6), randn(6, 5, seed=1)
    kernels = KernelDtypes()

    def multiply() -> None:
        with kernels:
            torch.mm(a, b)

    with kernels, contextlib.suppress(KeyError), Float32Products():
        raise KeyError
    multiply()
    with kernels, Float32Products():
        elsewhere = threading.Thread(target=torch.mm, args=(a, b))
        elsewhere.start()
        elsewhere.join()
    assert kernels.seen == [("mm", BFLOAT16), ("mm", BFLOAT16)]


def test_contexts_may_be_nested():
    a, b = randn(4, 6), randn(6, 5, seed=1)
    with Float32Products(), Float32Products() as inner, inner:
        result = a @ b
    assert torch.equal(result, (a.float() @ b.float()).bfloat16())


@pytest.mark.parametrize("kind", ["bf16-true", "bf16-mixed"])
def test_a_trainer_fits_with_the_plugin(kind, tmp_path):
    """No bfloat16 product reaches torch in training, backward, checkpointing or validation; the loss falls."""
    torch.manual_seed(0)
    rows = (torch.arange(33) + torch.arange(16)[:, None]) % 64  # each token is followed by the next number
    model = LittleLlama()
    trainer = lightning.Trainer(
        max_steps=12,
        accelerator="cpu",
        plugins=[precision_plugin(kind, "float32")],
        gradient_clip_val=1.0,
        val_check_interval=4,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    assert trainer.precision == kind
    with KernelDtypes() as kernels:
        trainer.fit(model, DataLoader(rows, batch_size=4), DataLoader(rows, batch_size=4))
        trainer.validate(model, DataLoader(rows, batch_size=4), verbose=False)

    assert model.validated_in_inference_mode
    assert len(model.losses) == 12
    assert model.losses[-1] < model.losses[0] - 0.5
    assert model.validation_loss < model.losses[0] - 0.5
    stored = BFLOAT16 if kind == "bf16-true" else torch.float32
    assert {p.dtype for p in model.parameters()} == model.gradient_dtypes == {stored}
    assert kernels.dtypes == {torch.float32}
    # 2 blocks in 12 steps, 3 validations inside fit and the one after
    assert kernels.count("_scaled_dot_product_flash_attention_for_cpu", torch.float32) == 2 * (12 + 3 + 1)
    assert kernels.count("_scaled_dot_product_flash_attention_for_cpu_backward", torch.float32) == 2 * 12


@pytest.mark.parametrize(
    ("kind", "device_type", "setting", "cpu_has_them", "chosen"),
    [
        ("bf16-true", "cpu", "auto", False, "float32"),
        ("bf16-mixed", "cpu", "auto", False, "float32"),
        ("bf16-true", "cpu", "auto", True, "native"),
        ("bf16-true", "cpu", "native", False, "native"),
        ("bf16-true", "cpu", "float32", True, "float32"),
        ("bf16-mixed", "cpu", "float32", True, "float32"),
        ("bf16-true", "cuda", "auto", False, "native"),
        ("bf16-true", "cuda", "native", False, "native"),
        ("32-true", "cpu", "auto", False, "native"),
        ("32-true", "cpu", "float32", False, "native"),
        ("16-mixed", "cuda", "float32", False, "native"),
        ("64-true", "cpu", "float32", False, "native"),
    ],
)
def test_the_choice(monkeypatch, kind, device_type, setting, cpu_has_them, chosen):
    monkeypatch.setattr(precision, "cpu_has_bfloat16_products", lambda: cpu_has_them)
    arguments = {"device_type": device_type, "bfloat16_products": setting}
    assert resolve_bfloat16_products(kind, **arguments) == chosen
    assert resolve_bfloat16_products(kind, **{**arguments, "bfloat16_products": "auto"}, is_compiled=True) == "native"
    plugin = precision_plugin(kind, chosen)  # type: ignore[arg-type]
    assert (plugin is None) == (chosen == "native")
    assert plugin is None or plugin.precision == kind


def test_impossible_choices_name_setting_value_and_way_out():
    with pytest.raises(ValueError, match=r"trainer\.bfloat16_products='float32'.*'cuda'.*'auto'"):
        resolve_bfloat16_products("bf16-true", device_type="cuda", bfloat16_products="float32")
    with pytest.raises(ValueError, match=r"trainer\.bfloat16_products='fast'.*'auto'"):
        resolve_bfloat16_products("32-true", device_type="cpu", bfloat16_products="fast")
    with pytest.raises(ValueError, match=r"trainer\.bfloat16_products='float32' and trainer\.compile=true.*'auto'"):
        resolve_bfloat16_products("bf16-true", device_type="cpu", bfloat16_products="float32", is_compiled=True)


def test_every_name_of_lightning_is_known_and_served_or_refused():
    """Lightning's own list; what it would compute under each name, in its plugin's words."""
    assert set(get_args(PrecisionName)) == set(get_args(_PRECISION_INPUT_STR)) == set(DTYPES)
    assert ALIASES == _PRECISION_INPUT_STR_ALIAS_CONVERSION
    refused = {"cpu": ("16-true", "16-mixed"), "cuda": ()}
    for device_type, names in refused.items():
        for name in DTYPES:
            if name in names or name.startswith("transformer-engine"):
                with pytest.raises(ValueError, match=rf"trainer\.precision='{name}'.*Set trainer\.precision to bf16"):
                    check_precision(name, device_type=device_type)
            else:
                check_precision(name, device_type=device_type)


@pytest.mark.parametrize("name", ["32-true", "64-true", "bf16-true", "bf16-mixed"])
def test_what_is_served_computes_in_the_dtype_that_its_name_says(name, tmp_path):
    seen = []

    class Little(LittleLlama):
        def training_step(self, tokens_BT: Tensor) -> Tensor:
            seen.append((self.blocks[0].q(self.embedding(tokens_BT)).dtype, self.embedding.weight.dtype))
            return super().training_step(tokens_BT)

    trainer = lightning.Trainer(
        accelerator="cpu", precision=name, max_steps=1, logger=False, default_root_dir=tmp_path,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Little(), DataLoader(torch.zeros(2, 9, dtype=torch.int64), batch_size=2))
    weights = {"bf16-true": BFLOAT16, "64-true": torch.float64}.get(name, torch.float32)
    assert seen == [(DTYPES[name], weights)]
    assert (weights == BFLOAT16) == (name in LOW_PRECISION_WEIGHTS)


X86_LINUX = sys.platform == "linux" and os.uname().machine == "x86_64"


@pytest.mark.skipif(not X86_LINUX, reason="reads the processor's flags from /proc/cpuinfo of x86 Linux")
def test_the_cpu_is_known_by_its_flags(monkeypatch):
    if {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"} & os.environ.keys():
        pytest.skip("oneDNN's instructions are limited from outside")
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    assert cpu_has_bfloat16_products() == bool({"avx512_bf16", "amx_bf16"} & set(flags))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx512_core")  # oneDNN itself would still say yes
    assert not cpu_has_bfloat16_products()


@pytest.mark.skipif(not X86_LINUX, reason="limits oneDNN to an x86 instruction set")
def test_a_cpu_limited_to_avx2_has_no_bfloat16_products_and_asking_loads_no_lightning():
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    question = (
        "import sys; from modules import precision; "
        "print(precision.cpu_has_bfloat16_products(), 'lightning' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", question], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert answer.stdout.split() == ["False", "False"]
