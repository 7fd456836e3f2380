"""Floating-point formats that torch may not have, emulated: any number of exponent and mantissa bits.

    format     exponent  mantissa       1 + 2^-8 in it
    bfloat16   8         7              1           (a tie: to the even neighbour)
    tfloat32   8         10             1.00390625
    e5m3       5         3              1

Source: IEEE 754-2019, roundTiesToEven, with gradual underflow, and infinity past the largest finite number.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

_NAMED = {"bfloat16": (8, 7), "float16": (5, 10), "tfloat32": (8, 10), "float32": (8, 23)}
EXPONENT_BITS, MANTISSA_BITS = range(2, 9), range(2, 24)
"""What can be emulated: everything that float32 holds exactly."""


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format with a sign bit."""

    exponent_bits: int
    mantissa_bits: int
    """Stored ones: the leading 1 comes on top."""

    def __post_init__(self) -> None:
        """Raises ValueError for a format that float32 does not contain."""
        if self.exponent_bits not in EXPONENT_BITS or self.mantissa_bits not in MANTISSA_BITS:
            raise ValueError(
                f"number format {self.name!r}: exponent bits must be {EXPONENT_BITS[0]} to {EXPONENT_BITS[-1]} and "
                f"mantissa bits {MANTISSA_BITS[0]} to {MANTISSA_BITS[-1]}, which float32 has room for."
            )

    @classmethod
    def of(cls, name: str) -> "NumberFormat":
        """From bfloat16, float16, tfloat32, float32, or the form e8m7.

        Raises:
            ValueError: no such name, or bits out of range.
        """
        if name in _NAMED:
            return cls(*_NAMED[name])
        match = re.fullmatch(r"e(\d+)m(\d+)", name)
        if match is None:
            raise ValueError(
                f"number format {name!r} is not known. Write one of {', '.join(_NAMED)}, "
                "or exponent and mantissa bits as in e8m7."
            )
        return cls(int(match[1]), int(match[2]))

    @property
    def name(self) -> str:
        """`bfloat16` where the format has a name, else `e5m3`."""
        bits = (self.exponent_bits, self.mantissa_bits)
        return next((name for name, known in _NAMED.items() if known == bits), "e{}m{}".format(*bits))

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return (2 - 2.0**-self.mantissa_bits) * 2.0**self._largest_exponent

    @property
    def _largest_exponent(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    def round(self, x: Tensor) -> Tensor:
        """`x` rounded to the nearest number of this format, ties to the even one, once.

        Args:
            x: float32 or narrower, or float64; the result has its dtype. Computed in float64, where every step but
                the rounding is exact.
        """
        wide = x.double()
        _, exponent = torch.frexp(wide)  # |x| in [2^(exponent - 1), 2^exponent)
        exponent = (exponent - 1).clamp(min=1 - self._largest_exponent)  # below: subnormal, one step for all
        step = torch.ldexp(torch.ones_like(wide), exponent - self.mantissa_bits)
        rounded = torch.where(wide.isfinite(), (wide / step).round() * step, wide)
        return torch.where(rounded.abs() > self.largest, rounded.sign() * torch.inf, rounded).to(x.dtype)
