"""Rotary frequencies of a model, scaled or not: what a pair of dimensions turns by from one position to the next.

Made anew from Python numbers by the operations of transformers' `ROPE_INIT_FUNCTIONS`, one by one and in their order,
on the CPU: in float32 that gives their bits, which are those that released checkpoints were trained with (one rounding
from float64 would differ in a quarter of them, by 1 unit in the last place where the width is a power of two and by up
to 6 elsewhere). Nothing is kept between calls, so no sequence can change another's frequencies.

Shape letters: D width of a head, R its first dimensions that turn, P = R / 2 pairs.
Sources: as in `modules/rotary_scaling.py`; `modeling_rope_utils.py` of transformers 5.
"""

import hashlib
import math
from typing import NamedTuple

import torch
from torch import Tensor

from modules.rotary_scaling import BETA_FAST, BETA_SLOW, NO_SCALING, ScalingConfig, ntk_theta


class Frequencies(NamedTuple):
    """What a pair turns by from one position to the next, and what cosine and sine are multiplied by."""

    inverse_P: Tensor
    """Angle per position in radians, falling."""
    attention_factor: float


def frequencies(
    *,
    head_width: int,
    theta: float,
    scaling: ScalingConfig = NO_SCALING,
    length: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Frequencies:
    """The frequencies of a model, made on the CPU in the wider of float32 and `dtype`, then moved to `device`.

    Args:
        head_width: D.
        theta: base of the frequencies before any scaling.
        scaling: complete, of the rules and fit that its checks ask for.
        length: of the sequence, its last position plus 1. None: at most the original length. Read by `dynamic` and
            `longrope` only.
        device: where they are used.
        dtype: float64 gives the frequencies of a yardstick.
    """
    wide = torch.promote_types(torch.float32, dtype)
    width, kind = scaling.turning_width(head_width), scaling.rope_type
    exponent_P = torch.arange(0, width, 2, dtype=torch.int64, device="cpu").to(wide) / width
    attention_factor = 1.0
    if kind == "default":
        inverse_P = 1.0 / theta**exponent_P
    elif kind == "linear":
        inverse_P = 1.0 / theta**exponent_P / _number(scaling.factor)
    elif kind == "ntk":
        inverse_P = 1.0 / ntk_theta(theta, _number(scaling.factor), width) ** exponent_P
    elif kind == "dynamic":
        factor, original = _number(scaling.factor), _original(scaling)
        reached = max(length or original, original)
        growth = (factor * reached / original) - (factor - 1)
        inverse_P = 1.0 / ntk_theta(theta, growth, width) ** exponent_P
    elif kind == "yarn":
        inverse_P = _yarn(theta**exponent_P, theta, width, scaling)
        attention_factor = _yarn_attention_factor(scaling)
    elif kind == "llama3":
        inverse_P = _llama3(1.0 / theta**exponent_P, scaling)
    elif kind == "longrope":
        is_long = length is not None and length > _original(scaling)
        divisors = scaling.long_factor if is_long else scaling.short_factor
        # The lists are float32 in the model that was trained with them.
        divisor_P = torch.tensor(divisors, dtype=torch.float32, device="cpu").to(wide)
        inverse_P = 1.0 / (divisor_P * theta**exponent_P)
        attention_factor = _longrope_attention_factor(scaling)
    else:
        raise AssertionError(f"no frequencies for rope_type={kind!r}")
    return Frequencies(inverse_P.to(device=device), attention_factor)


def frequency_digest(*each: Frequencies) -> str:
    """Identity of frequencies and attention factors, bit for bit: 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for inverse_P, attention_factor in each:
        digest.update(inverse_P.cpu().numpy().tobytes())
        digest.update(repr(float(attention_factor)).encode())
    return digest.hexdigest()[:16]


def _yarn(turn_P: Tensor, theta: float, width: int, scaling: ScalingConfig) -> Tensor:
    """Divided frequencies and kept ones, mixed by a ramp over the pairs. turn_P: theta^(2i / R)."""
    kept_P, divided_P = 1.0 / turn_P, 1.0 / (_number(scaling.factor) * turn_P)

    def pair_that_turns(times: float) -> float:
        """Which pair, as a real number, turns that often in the original length."""
        return (width * math.log(_original(scaling) / (times * 2 * math.pi))) / (2 * math.log(theta))

    first = pair_that_turns(BETA_FAST if scaling.beta_fast is None else scaling.beta_fast)
    last = pair_that_turns(BETA_SLOW if scaling.beta_slow is None else scaling.beta_slow)
    if scaling.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001
    pair_P = torch.arange(width // 2, dtype=turn_P.dtype, device="cpu")
    kept_share_P = 1 - ((pair_P - first) / (last - first)).clamp(0, 1)
    return divided_P * (1 - kept_share_P) + kept_P * kept_share_P


def _yarn_attention_factor(scaling: ScalingConfig) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    factor = _number(scaling.factor)

    def of(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0

    if scaling.mscale is None or scaling.mscale_all_dim is None:
        return of(1)
    return of(scaling.mscale) / of(scaling.mscale_all_dim)


def _llama3(inverse_P: Tensor, scaling: ScalingConfig) -> Tensor:
    """Short waves kept, long ones divided, those between mixed by how often they turn in the original length."""
    factor, original = _number(scaling.factor), _original(scaling)
    low, high = _number(scaling.low_freq_factor), _number(scaling.high_freq_factor)
    wavelength_P = 2 * math.pi / inverse_P
    is_long_P, is_short_P = wavelength_P > original / low, wavelength_P < original / high
    scaled_P = torch.where(is_long_P, inverse_P / factor, inverse_P)
    kept_share_P = (original / wavelength_P - low) / (high - low)
    mixed_P = (1 - kept_share_P) * scaled_P / factor + kept_share_P * scaled_P
    return torch.where(~is_short_P & ~is_long_P, mixed_P, scaled_P)


def _longrope_attention_factor(scaling: ScalingConfig) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return math.sqrt(1 + math.log(_number(scaling.factor)) / math.log(_original(scaling)))


def _number(value: float | None) -> float:
    assert value is not None, "checked by ScalingConfig.broken_rules"
    return value


def _original(scaling: ScalingConfig) -> int:
    assert scaling.original_max_position_embeddings is not None, "filled in by ScalingConfig.completed"
    return scaling.original_max_position_embeddings
