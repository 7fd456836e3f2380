"""Rotary position embedding from explicit integer positions, with the place of each rounding as a setting.

    pair (x_i, x_{i + R/2}) at position p turns by the angle p * theta^(-2i / R)        i = 0 ... R/2 - 1

R is D unless only a part of each head turns; `modules/rotary_frequencies.py` makes the frequencies.
Angles are elementwise products of integer positions and inverse frequencies in at least float32, never a matrix
product (TF32 keeps integers only to 2048) and never made from anything stored in low precision: bfloat16(257) is 256.
Nothing here is a parameter or buffer, so casting a module to bfloat16 cannot reach it.

Shape letters: B rows, T tokens in a row, H heads, D width of a head, R its first dimensions that turn, P = R / 2.
Source: RoFormer, arXiv 2104.09864; halves split as in Hugging Face's Llama; where it breaks: arXiv 2411.13476.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from modules.rotary_frequencies import frequencies
from modules.rotary_scaling import NO_SCALING, ScalingConfig

RotaryPrecision = Literal["float32_scores", "float32", "compute", "low_positions"]


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """How positions turn queries and keys."""

    theta: float | None = None
    """Base of the frequencies. None: the model's own."""
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    """How frequencies change for contexts longer than the model was made for. Without a type: the model's own."""
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
        broken += self.scaling.broken_rules()
        if self.precision not in get_args(RotaryPrecision):
            choices = ", ".join(get_args(RotaryPrecision))
            broken.append(f"rotary.precision={self.precision!r} is not known. Set one of: {choices}.")
        if broken:
            raise ValueError("\n".join(broken))


class RotaryTables:
    """Cosine and sine of every token's angles, made once per forward pass and shared by all layers.

    As wide as the part of a head that turns (R, nearly always D); both halves hold the same angles.

    No tuple and no dataclass: FSDP with mixed precision casts all floating tensors that it finds in those on their way
    into a layer, and would round the tables to bfloat16 whatever the policy says. It does not look in here.
    """

    def __init__(self, cos_BTD: Tensor, sin_BTD: Tensor) -> None:
        self.cos_BTD, self.sin_BTD = cos_BTD, sin_BTD

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.cos_BTD, self.sin_BTD))


def rotary_tables(
    position_BT: Tensor,
    *,
    config: RotaryConfig,
    head_width: int,
    theta: float,
    compute_dtype: torch.dtype,
    scaling: ScalingConfig = NO_SCALING,
) -> RotaryTables:
    """Tables for these positions, rounded as `config.precision` says.

    Args:
        position_BT: integer positions. Scaling that depends on the length takes it from the largest of them.
        config: only `precision` is read here: `theta` and `scaling` are already decided.
        head_width: D, even.
        theta: base of the frequencies.
        compute_dtype: dtype of q and k as they leave their projections.
        scaling: complete.
    Raises:
        ValueError: the positions are no integers.
    """
    if position_BT.is_floating_point() or position_BT.is_complex():
        raise ValueError(
            f"Positions are {position_BT.dtype}, but must be integers: bfloat16 cannot tell 257 from 256. "
            "Keep the batch's positions out of what casts its inputs."
        )
    device = position_BT.device
    inverse_P, attention_factor = frequencies(
        head_width=head_width, theta=theta, scaling=scaling, length=_length(position_BT, scaling),
        device=device, dtype=compute_dtype,
    )  # fmt: skip
    if config.precision == "low_positions":
        position_BT = position_BT.to(compute_dtype)
    angle_BTP = position_BT.to(inverse_P.dtype)[..., None] * inverse_P
    angle_BTD = torch.cat((angle_BTP, angle_BTP), dim=-1)
    stored = inverse_P.dtype if config.precision in ("float32_scores", "float32") else compute_dtype
    cos_BTD, sin_BTD = angle_BTD.cos(), angle_BTD.sin()
    if attention_factor != 1:
        cos_BTD, sin_BTD = cos_BTD * attention_factor, sin_BTD * attention_factor
    return RotaryTables(cos_BTD.to(stored), sin_BTD.to(stored))


def _length(position_BT: Tensor, scaling: ScalingConfig) -> int | None:
    """Last position plus 1, where the frequencies ask for it: on a GPU that waits for the positions."""
    if not scaling.depends_on_length or position_BT.is_meta or position_BT.numel() == 0:
        return None
    return int(position_BT.max()) + 1


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
    turning, still = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, still), dim=-1) if still.shape[-1] else turned
