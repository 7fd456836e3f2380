"""Rotary position embedding from explicit integer positions, with the place of each rounding as a setting.

    pair (x_i, x_{i + D/2}) at position p turns by the angle p * theta^(-2i / D)        i = 0 ... D/2 - 1

Angles are elementwise products of integer positions and inverse frequencies in at least float32, never a matrix
product (TF32 keeps integers only to 2048) and never made from anything stored in low precision: bfloat16(257) is 256.
Nothing here is a parameter or buffer, so casting a module to bfloat16 cannot reach it.

Shape letters: B rows, T tokens in a row, H heads, D width of a head.
Source: RoFormer, arXiv 2104.09864; halves split as in Hugging Face's Llama; where it breaks: arXiv 2411.13476.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

RotaryPrecision = Literal["float32_scores", "float32", "compute", "low_positions"]


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """How positions turn queries and keys."""

    theta: float | None = None
    """Base of the frequencies. None: the model's own."""
    scaling: str = "default"
    """How frequencies change for contexts longer than the model was made for. Only `default`: not at all."""
    precision: RotaryPrecision = "float32"
    """Where the rotation rounds. `wide` is the wider of float32 and the compute dtype, which is that of q and k as
    they leave their projections.

        value            tables cos, sin                        rotation   q, k handed to attention
        float32_scores   wide                                   wide       wide, and v with them: scores are wide too
        float32          wide                                   wide       rounded to the compute dtype
        compute          rounded to the compute dtype           compute    compute dtype
        low_positions    of positions rounded to the compute    compute    compute dtype
                         dtype, then rounded as for `compute`              (a historic bug, the negative control)
    """

    def __post_init__(self) -> None:
        broken = []
        if self.theta is not None and not (math.isfinite(self.theta) and self.theta > 0):
            broken.append(f"rotary.theta={self.theta!r} must be a finite number above 0, or null for the model's own.")
        if self.scaling != "default":
            broken.append(f"rotary.scaling={self.scaling!r} is not known. Set rotary.scaling='default'.")
        if self.precision not in get_args(RotaryPrecision):
            choices = ", ".join(get_args(RotaryPrecision))
            broken.append(f"rotary.precision={self.precision!r} is not known. Set one of: {choices}.")
        if broken:
            raise ValueError("\n".join(broken))


class RotaryTables(NamedTuple):
    """Cosine and sine of every token's angles, made once per forward pass and shared by all layers.

    Both halves of the last dimension hold the same D/2 angles.
    """

    cos_BTD: Tensor
    sin_BTD: Tensor


def inverse_frequencies(
    head_width: int, theta: float, *, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """theta^(-2i / D) for i = 0 ... D/2 - 1, shape [D/2], falling from 1.

    Computed in float64 on the CPU, so that every device starts from the same bits, and rounded once to the wider of
    float32 and `dtype`.
    """
    exponent = torch.arange(0, head_width, 2, dtype=torch.float64, device="cpu") / head_width
    return torch.pow(theta, -exponent).to(dtype=_wide(dtype), device=device)


def rotary_tables(
    position_BT: Tensor, *, config: RotaryConfig, head_width: int, theta: float, compute_dtype: torch.dtype
) -> RotaryTables:
    """Tables for these positions, rounded as `config.precision` says.

    Args:
        position_BT: integer positions.
        config: only `precision` is read here: `theta` is already decided.
        head_width: D, even.
        theta: base of the frequencies.
        compute_dtype: dtype of q and k as they leave their projections.
    """
    frequency = inverse_frequencies(head_width, theta, device=position_BT.device, dtype=compute_dtype)
    if config.precision == "low_positions":
        position_BT = position_BT.to(compute_dtype)
    angle = position_BT.to(frequency.dtype)[..., None] * frequency
    angle = torch.cat((angle, angle), dim=-1)
    stored = frequency.dtype if config.precision in ("float32_scores", "float32") else compute_dtype
    return RotaryTables(angle.cos().to(stored), angle.sin().to(stored))


def apply_rotary(
    q_BHTD: Tensor, k_BGTD: Tensor, tables: RotaryTables, precision: RotaryPrecision
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys by their positions' angles; dtypes as in `RotaryConfig.precision`.

    The rotation runs in the dtype of the tables, which is the wide one or the compute dtype by policy.
    """
    handed = tables.cos_BTD.dtype if precision == "float32_scores" else q_BHTD.dtype
    cos, sin = tables.cos_BTD[:, None], tables.sin_BTD[:, None]
    q_BHTD, k_BGTD = (_rotate(x.to(cos.dtype), cos, sin).to(handed) for x in (q_BHTD, k_BGTD))
    return q_BHTD, k_BGTD


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(torch.float32, dtype)
