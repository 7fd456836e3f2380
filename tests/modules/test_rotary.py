"""Where each policy rounds, held to the formula written out number by number."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor

from modules.rotary import (
    RotaryConfig,
    RotaryPrecision,
    RotaryTables,
    apply_rotary,
    rotary_tables,
)
from modules.rotary_frequencies import frequencies
from modules.rotary_scaling import ScalingConfig

WIDTH, THETA = 8, 10_000.0
LOW = (torch.bfloat16, torch.float16)


def tables(
    position_BT: Tensor, precision: str, dtype: torch.dtype, theta: float = THETA, width: int = WIDTH
) -> RotaryTables:
    config = RotaryConfig(precision=precision)  # type: ignore[arg-type]
    return rotary_tables(position_BT, config=config, head_width=width, theta=theta, compute_dtype=dtype)


def written_out(x: Tensor, positions: list[int], precision: str) -> Tensor:
    """Rotation of x [..., T, D] one rounding at a time: every number lives in float32 and is rounded by `low`."""

    def low(y: Tensor) -> Tensor:
        return y.to(x.dtype).float()

    def rotation(y: Tensor) -> Tensor:
        return low(y) if precision in ("compute", "low_positions") else y

    out = torch.empty(x.shape, dtype=torch.float32)
    half = WIDTH // 2
    for t, position in enumerate(positions):
        for i in range(half):
            p = low(torch.tensor(float(position))).item() if precision == "low_positions" else position
            angle = np.float32(p) * (np.float32(1) / np.float32(THETA ** (2 * i / WIDTH)))
            # A full vector of it, since torch's cosine of one number and of many may differ in the last bit.
            cos, sin = (f(torch.full((16,), float(angle)))[0] for f in (torch.cos, torch.sin))
            cos, sin = rotation(cos), rotation(sin)
            a, b = x[..., t, i].float(), x[..., t, i + half].float()
            out[..., t, i] = rotation(rotation(a * cos) - rotation(b * sin))
            out[..., t, i + half] = rotation(rotation(b * cos) + rotation(a * sin))
    return out if precision == "float32_scores" else out.to(x.dtype)


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
@pytest.mark.parametrize("precision", get_args(RotaryPrecision))
def test_every_rounding_of_every_policy(precision: RotaryPrecision, dtype: torch.dtype) -> None:
    positions = [0, 1, 2, 255, 257, 511, 1023, 4095, 32767, 1]
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, len(positions), WIDTH, generator=generator).to(dtype) for heads in (4, 2))
    made = tables(torch.tensor([positions]), precision, dtype)
    got = apply_rotary(q, k, made, precision)
    for result, x in zip(got, (q, k), strict=True):
        assert result.dtype == (torch.float32 if precision == "float32_scores" else dtype)
        assert torch.equal(result, written_out(x, positions, precision))
    assert made.cos_BTD.dtype == (dtype if precision in ("compute", "low_positions") else torch.float32)


@pytest.mark.parametrize("precision", get_args(RotaryPrecision))
def test_float64_stays_float64_everywhere(precision: RotaryPrecision) -> None:
    positions = torch.tensor([[0, 3, 100_003]])
    made = tables(positions, precision, torch.float64)
    q = torch.randn(1, 2, 3, WIDTH, dtype=torch.float64)
    assert {x.dtype for x in (*made, *apply_rotary(q, q, made, precision))} == {torch.float64}
    angle = math.fmod(100_003 * THETA ** (-2 / WIDTH), 2 * math.pi)
    assert made.cos_BTD[0, 2, 1].item() == pytest.approx(math.cos(angle), abs=1e-11)
    assert made.sin_BTD[0, 2, WIDTH // 2 + 1].item() == pytest.approx(math.sin(angle), abs=1e-11)


def test_the_historic_bug_does_not_tell_257_from_256() -> None:
    positions = torch.tensor([[256, 257]])
    for precision in get_args(RotaryPrecision):
        cos = tables(positions, precision, torch.bfloat16).cos_BTD
        assert torch.equal(cos[:, 0], cos[:, 1]) == (precision == "low_positions"), precision


def test_the_meta_device_needs_no_numbers() -> None:
    with torch.device("meta"):
        made = tables(torch.zeros(2, 5, dtype=torch.int64), "float32", torch.bfloat16)
    assert made.cos_BTD.is_meta and made.cos_BTD.shape == (2, 5, WIDTH)


def test_autocast_does_not_reach_the_tables() -> None:
    positions = torch.arange(3000)[None]
    expected = tables(positions, "float32", torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        got = tables(positions, "float32", torch.bfloat16)
    assert torch.equal(got.cos_BTD, expected.cos_BTD) and torch.equal(got.sin_BTD, expected.sin_BTD)


@given(
    query=st.integers(0, 5000), distance=st.integers(0, 5000), shift=st.integers(0, 200_000), seed=st.integers(0, 2**31)
)
def test_in_float64_a_score_depends_on_distance_only(query: int, distance: int, shift: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 1, 1, 64, dtype=torch.float64, generator=generator) for _ in range(2))
    scores = []
    for start in (query, query + shift):
        turned = [
            apply_rotary(x, x, tables(torch.tensor([[p]]), "float32", torch.float64, width=64), "float32")[0]
            for x, p in ((q, start + distance), (k, start))
        ]
        scores.append((turned[0] * turned[1]).sum().item())
    assert scores[1] == pytest.approx(scores[0], abs=1e-8)


def test_only_float32_scores_keep_distance_in_bfloat16() -> None:
    """The break that is studied: how much a score moves with a shift of 1000, for q and k in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 4, 128, 64, generator=generator).bfloat16() for _ in range(2))
    moved = {}
    for precision in get_args(RotaryPrecision):
        scores = []
        for shift in (0, 1000):
            made = tables(torch.arange(128)[None] + shift, precision, torch.bfloat16, width=64)
            turned_q, turned_k = apply_rotary(q, k, made, precision)
            scores.append(turned_q.double() @ turned_k.double().transpose(-1, -2) / 8)
        moved[precision] = (scores[0] - scores[1]).abs().mean().item()
    assert moved["float32_scores"] < 1e-4 < 1e-3 < moved["float32"] < moved["compute"] < moved["low_positions"]


@pytest.mark.parametrize("precision", get_args(RotaryPrecision))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_the_first_part_of_a_head_turns(dtype: torch.dtype, precision: RotaryPrecision) -> None:
    """The turning part is a head of its own; the rest leaves bit for bit as it came."""
    positions = torch.tensor([[0, 3, 4095, 17]])
    config = RotaryConfig(precision=precision)
    scaling = ScalingConfig(rope_type="default", partial_rotary_factor=0.375)  # 12 of 32
    made, alone = (
        rotary_tables(positions, config=config, head_width=width, theta=THETA, compute_dtype=dtype, scaling=kind)
        for width, kind in ((32, scaling), (12, ScalingConfig(rope_type="default")))
    )
    q, k = (torch.randn(1, heads, 4, 32, generator=torch.Generator().manual_seed(heads)).to(dtype) for heads in (4, 2))
    for got, part, x in zip(
        apply_rotary(q, k, made, precision), apply_rotary(q[..., :12], k[..., :12], alone, precision), (q, k),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(got[..., :12], part) and got.dtype == part.dtype
        assert torch.equal(got[..., 12:], x[..., 12:].to(got.dtype))


def test_the_attention_factor_stretches_both_tables_before_they_round() -> None:
    positions = torch.arange(50)[None] * 700
    scaling = ScalingConfig(rope_type="yarn", factor=16.0, original_max_position_embeddings=4096)
    inverse_P, factor = frequencies(head_width=64, theta=THETA, scaling=scaling)
    angle = positions[..., None].float() * torch.cat((inverse_P, inverse_P))
    for precision, dtype in (("float32", torch.float32), ("compute", torch.bfloat16)):
        made = rotary_tables(
            positions, config=RotaryConfig(precision=precision),  # type: ignore[arg-type]
            head_width=64, theta=THETA, compute_dtype=torch.bfloat16, scaling=scaling,
        )  # fmt: skip
        assert torch.equal(made.cos_BTD, (angle.cos() * factor).to(dtype))
        assert torch.equal(made.sin_BTD, (angle.sin() * factor).to(dtype))
    assert made.cos_BTD[0, 0, 0] == torch.tensor(1.2773).bfloat16()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_positions_that_are_no_integers_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"Positions are torch\..* must be integers"):
        tables(torch.arange(5)[None].to(dtype), "float32", torch.float32)


def test_the_config_is_filled_by_omegaconf() -> None:
    written = {"theta": 1000000, "precision": "compute", "scaling": {"rope_type": "linear", "factor": 4}}
    merged = OmegaConf.merge(OmegaConf.structured(RotaryConfig), written)
    expected = RotaryConfig(theta=1e6, precision="compute", scaling=ScalingConfig(rope_type="linear", factor=4.0))
    assert OmegaConf.to_object(merged) == expected


def test_all_broken_settings_are_named_at_once() -> None:
    with pytest.raises(ValueError) as error:
        RotaryConfig(theta=-1.0, scaling=ScalingConfig(rope_type="yarn"), precision="bfloat16")  # type: ignore[arg-type]
    lines = str(error.value).splitlines()
    assert [line.split(" ")[0] for line in lines] == [
        "rotary.theta=-1.0",
        "rotary.scaling.factor=None",
        "rotary.precision='bfloat16'",
    ]
    assert "float32_scores" in lines[2]
