"""What `attend` is handed and cannot serve is refused in words, before any kernel runs, on a CPU too."""

from typing import Any

import pytest
import torch
from torch import Tensor

from modules.attention.attend import attend
from modules.attention.borders import Borders
from modules.attention.capabilities import KERNELS, load_kernel
from modules.attention.strategies import STRATEGIES

ROWS, TOKENS = 2, 6


@pytest.fixture(autouse=True)
def no_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(*_: object) -> Tensor:
        raise AssertionError("a kernel was launched")

    for kernel in KERNELS:
        monkeypatch.setattr(load_kernel(kernel), "compute", launched)


def inputs(dtype: torch.dtype = torch.float32, **changed: tuple[int, ...]) -> list[Tensor]:
    shapes = {"q": (ROWS, 4, TOKENS, 8), "k": (ROWS, 2, TOKENS, 8), "v": (ROWS, 2, TOKENS, 8)} | changed
    return [torch.ones(shape, dtype=dtype) for shape in shapes.values()]


def borders(rows: int = ROWS, tokens: int = TOKENS) -> Borders:
    return Borders.of(torch.ones(rows, tokens, dtype=torch.int32))


def test_good_input_reaches_a_kernel() -> None:
    """Or the tests below would prove nothing."""
    with pytest.raises(AssertionError, match="a kernel was launched"):
        attend(*inputs(), borders(), STRATEGIES["anchor"])


@pytest.mark.parametrize("kernel", ["auto", *KERNELS])
@pytest.mark.parametrize(
    ("q_k_v", "message"),
    [
        (inputs(q=(ROWS, 4, TOKENS + 1, 8)), r"must agree .* q \(2, 4, 7, 8\), k \(2, 2, 6, 8\)"),
        (inputs(k=(ROWS, 2, TOKENS + 1, 8)), r"k, v \[B, G, T, D\], but got .* k \(2, 2, 7, 8\), v \(2, 2, 6, 8\)"),
        (inputs(v=(ROWS, 2, TOKENS + 1, 8)), r"k, v \[B, G, T, D\], but got .* k \(2, 2, 6, 8\), v \(2, 2, 7, 8\)"),
        (inputs(v=(ROWS, 1, TOKENS, 8)), r"k, v \[B, G, T, D\], but got .* v \(2, 1, 6, 8\)"),
        (inputs(v=(ROWS, 2, TOKENS, 16)), r"k, v \[B, G, T, D\], but got .* v \(2, 2, 6, 16\)"),
        (inputs(q=(ROWS, 4, TOKENS, 16)), r"must agree in rows, tokens and head width"),
        (inputs(q=(1, 4, TOKENS, 8)), r"must agree in rows"),
        (inputs(q=(ROWS, 3, TOKENS, 8)), r"key heads must divide query heads"),
        (inputs(q=(ROWS, 1, TOKENS, 8)), r"key heads must divide query heads"),
        (inputs(k=(ROWS, 0, TOKENS, 8), v=(ROWS, 0, TOKENS, 8)), r"key heads must divide query heads"),
        (inputs(q=(4, TOKENS, 8)), r"takes q \[B, H, T, D\]"),
        ([*inputs()[:2], inputs(torch.bfloat16)[2]], r"but v is torch.bfloat16 on cpu: cast them"),
        ([inputs()[0], inputs()[1].to("meta"), inputs()[2]], r"but k is torch.float32 on meta: cast them"),
    ],
)
def test_tensors_that_do_not_fit_one_another(q_k_v: list[Tensor], message: str, kernel: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(*q_k_v, borders(), STRATEGIES["anchor"], kernel=kernel)


@pytest.mark.parametrize(("rows", "tokens"), [(1, TOKENS), (ROWS, TOKENS - 1), (ROWS, TOKENS + 1), (TOKENS, ROWS)])
def test_borders_of_another_batch(rows: int, tokens: int) -> None:
    with pytest.raises(ValueError, match=rf"borders describe \({rows}, {tokens}\) tokens, but attend got q \(2, 4, 6"):
        attend(*inputs(), borders(rows, tokens), STRATEGIES["anchor"])


def test_an_unknown_kernel() -> None:
    with pytest.raises(ValueError) as error:
        attend(*inputs(), borders(), STRATEGIES["anchor"], kernel="flsh")
    assert "attention.kernel='flsh'" in str(error.value) and "Did you mean 'flash'?" in str(error.value)
    assert all(repr(kernel) in str(error.value) for kernel in ("auto", *KERNELS))


@pytest.mark.parametrize(
    ("kernel", "strategy", "dtype", "message"),
    [
        ("flash", "anchor", torch.bfloat16, "runs on cuda, not on cpu"),
        ("flash", "anchor", torch.float32, "bfloat16 or float16"),
        ("varlen", "anchor", torch.float16, "runs on cuda, not on cpu"),
        ("varlen", "full", torch.float64, "bfloat16 or float16"),
        ("flex", "anchor", torch.float32, "gradients on cuda only"),
        ("sdpa", "sliding_window", torch.float32, "no windows"),
        ("sdpa", "anchor", torch.int64, "not in torch.int64"),
        ("reference", "anchor", torch.int64, "not in torch.int64"),
    ],
)
def test_a_kernel_that_cannot_serve(kernel: str, strategy: str, dtype: torch.dtype, message: str) -> None:
    q_k_v = [x.requires_grad_(dtype.is_floating_point) for x in inputs(dtype)]
    with pytest.raises(ValueError, match=message) as error:
        attend(*q_k_v, borders(), STRATEGIES[strategy], kernel=kernel)
    assert f"attention.kernel={kernel!r} cannot serve this run" in str(error.value)


@pytest.mark.parametrize("kernel", ["flash", "varlen"])
@pytest.mark.parametrize("width", [12, 264])
def test_a_head_width_that_a_kernel_does_not_have(kernel: str, width: int) -> None:
    q_k_v = [torch.ones(ROWS, heads, TOKENS, width, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    with pytest.raises(ValueError, match=f"multiple of 8 up to 256, not {width}"):
        attend(*q_k_v, borders(), STRATEGIES["anchor"], kernel=kernel)


def test_auto_says_why_none_of_the_kernels_serves() -> None:
    q_k_v: list[Any] = inputs(torch.int64)
    with pytest.raises(ValueError) as error:
        attend(*q_k_v, borders(), STRATEGIES["anchor"])
    assert all(f"{kernel}: " in str(error.value) for kernel in KERNELS)
