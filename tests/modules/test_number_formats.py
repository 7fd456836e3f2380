"""Emulated rounding against torch's own casts, bit for bit, and against literal ties."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modules.number_formats import NumberFormat

TORCH_HAS = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "e5m2": torch.float8_e5m2,
}


def any_float32(count=500_000):
    """Every kind of float32, NaN, infinities and subnormals among them: random bits."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65504.0, 65519.99, 65520.0, 1e-45, 3.4e38])
    return torch.cat([bits.int().view(torch.float32), special, torch.linspace(-2, 2, 100_001)])


@pytest.mark.parametrize("name", TORCH_HAS)
def test_equals_torchs_cast_bit_for_bit(name):
    x = any_float32()
    rounded, expected = NumberFormat.of(name).round(x), x.to(TORCH_HAS[name]).float()
    both_nan = rounded.isnan() & expected.isnan()
    assert torch.equal(rounded.isnan(), expected.isnan())
    assert torch.equal(rounded.view(torch.int32)[~both_nan], expected.view(torch.int32)[~both_nan])


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_float64_is_rounded_once(name):
    """By way of float32 a number just above a tie would become the tie, and then round down."""
    x = torch.randn(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 8
    just_above_a_tie = 1 + 2.0 ** -(NumberFormat.of(name).mantissa_bits + 1) + 2.0**-50
    x[0] = just_above_a_tie
    rounded = NumberFormat.of(name).round(x)
    step = 2.0 ** -NumberFormat.of(name).mantissa_bits
    assert rounded[0] == 1 + step
    assert torch.equal(rounded.to(TORCH_HAS[name]).double(), rounded)
    assert ((rounded - x).abs() <= x.abs() * step / 2 + 1e-7).all()


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        ("bfloat16", 257.0, 256.0),  # a tie, to even
        ("bfloat16", 259.0, 260.0),  # a tie, to even, upwards
        ("tfloat32", 2049.0, 2048.0),
        ("tfloat32", 2051.0, 2052.0),
        ("e8m2", 1.125, 1.0),
        ("e8m2", 1.375, 1.5),
        ("e4m3", 248.0, torch.inf),  # of IEEE: 240 is the largest, and 248 lies half way to what comes next
        ("e4m3", 247.9, 240.0),
        ("e4m3", 2.0**-9, 2.0**-9),  # the smallest subnormal
        ("e4m3", 2.0**-10, 0.0),
    ],
)
def test_ties_ends_and_subnormals(name, x, expected):
    assert NumberFormat.of(name).round(torch.tensor(x)).item() == expected
    assert NumberFormat.of(name).round(torch.tensor(-x)).item() == -expected


@given(st.integers(2, 8), st.integers(2, 23), st.floats(width=32, allow_nan=False))
def test_no_number_of_the_format_is_nearer(exponent_bits, mantissa_bits, x):
    """Neighbours are one unit in the last place apart, found by adding and taking it away."""
    form = NumberFormat(exponent_bits, mantissa_bits)
    rounded = form.round(torch.tensor(x, dtype=torch.float64)).item()
    assert form.round(torch.tensor(rounded, dtype=torch.float64)).item() == rounded
    if abs(rounded) == float("inf"):
        assert abs(x) >= form.largest
        return
    for factor in (1 - 2.0 ** -(mantissa_bits + 1), 1 + 2.0**-mantissa_bits):
        neighbour = form.round(torch.tensor(rounded * factor, dtype=torch.float64)).item()
        assert abs(rounded - x) <= abs(neighbour - x)


@pytest.mark.parametrize("name", ["e9m3", "e8m24", "e1m5", "e8m1", "m5", "bf16", ""])
def test_other_formats_are_refused(name):
    with pytest.raises(ValueError, match="number format"):
        NumberFormat.of(name)


def test_names():
    assert [NumberFormat.of(name).name for name in ("e8m7", "e8m10", "e5m10", "e6m9")] == [
        "bfloat16", "tfloat32", "float16", "e6m9",
    ]  # fmt: skip
