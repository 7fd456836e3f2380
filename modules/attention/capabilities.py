"""Which kernel can compute what is asked, and if not, why not.

A kernel is one module of this folder, named as the kernel is, with two functions:

    why_not(request: Request) -> str | None              a full sentence, or None where it can serve
    compute(q_BHTD, k_BGTD, v_BGTD, borders, strategy)   -> out_BHTD

and one entry in `KERNELS`. Modules load when first asked, so an optional package is needed only where it is used, and
this file imports without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from modules.attention.strategies import Strategy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from modules.attention.borders import Borders

KERNELS = ("flash", "varlen", "sdpa", "flex", "reference")
"""All kernels, fastest first: the order in which `auto` asks them."""

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a kernel is asked to compute."""

    strategy: Strategy
    device_type: str
    """As in `torch.device.type`: cpu, cuda, mps, ..."""
    dtype: torch.dtype
    """Of q, k and v."""
    head_width: int
    needs_gradient: bool = True
    tokens: int | None = None
    """Tokens in a row. None = not known yet, so no reason to refuse."""


class Kernel(Protocol):
    """What the module of a kernel offers."""

    def why_not(self, request: Request) -> str | None:
        """Why this kernel cannot serve the request, as a full sentence; None where it can."""

    def compute(self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, borders: Borders, strategy: Strategy) -> Tensor:
        """Attention output of the shape and dtype of q. Padding gets zeros and no gradient."""


def load_kernel(kernel: str) -> Kernel:
    """The module of a kernel by its name in `KERNELS`."""
    assert kernel in KERNELS, kernel
    return cast(Kernel, import_module(f"modules.attention.{kernel}"))


def can_serve(
    kernel: str,
    *,
    strategy: Strategy,
    device_type: str,
    dtype: torch.dtype,
    head_width: int,
    needs_gradient: bool = True,
    tokens: int | None = None,
) -> str | None:
    """None if the kernel computes this, otherwise the reason why not, as a full sentence.

    Raises:
        ValueError: there is no such kernel.
    """
    check_kernel_name(kernel, auto=False)
    request = Request(
        strategy=strategy,
        device_type=device_type,
        dtype=dtype,
        head_width=head_width,
        needs_gradient=needs_gradient,
        tokens=tokens,
    )
    return load_kernel(kernel).why_not(request)


def resolve_kernel(
    kernel: str,
    *,
    strategy: Strategy,
    device_type: str,
    dtype: torch.dtype,
    head_width: int,
    needs_gradient: bool = True,
    tokens: int | None = None,
) -> str:
    """The concrete kernel: `auto` becomes the fastest one that can serve; a named one is held to it.

    Raises:
        ValueError: there is no such kernel, or it cannot serve; for `auto`, none can.
    """
    check_kernel_name(kernel)
    request = Request(
        strategy=strategy,
        device_type=device_type,
        dtype=dtype,
        head_width=head_width,
        needs_gradient=needs_gradient,
        tokens=tokens,
    )
    # A named kernel alone is asked, since every layer of every step comes by here.
    reasons: dict[str, str] = {}
    for candidate in KERNELS if kernel == AUTO else (kernel,):
        reason = load_kernel(candidate).why_not(request)
        if reason is None:
            return candidate
        reasons[candidate] = reason
    if kernel == AUTO:
        details = " ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise ValueError(f"attention.kernel='auto' finds no kernel for attention.strategy={strategy.name!r}. {details}")
    able = [repr(name) for name in KERNELS if load_kernel(name).why_not(request) is None]
    way_out = (
        f"Set attention.kernel='auto' or {' or '.join(able)}." if able else "No other kernel can serve this either."
    )
    raise ValueError(f"attention.kernel={kernel!r} cannot serve this run. {reasons[kernel]} {way_out}")


def check_kernel_name(kernel: str, *, auto: bool = True) -> None:
    """Raise a ValueError that suggests the nearest name unless `kernel` is one of `KERNELS` (or `auto`)."""
    check_name("attention.kernel", kernel, (AUTO, *KERNELS) if auto else KERNELS)


def check_name(key: str, value: str, valid: tuple[str, ...]) -> None:
    """Raise a ValueError that names the config key, the value, the valid names and the nearest of them."""
    if value in valid:
        return
    nearest = get_close_matches(value, valid, n=1)
    suggestion = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"{key}={value!r} is none of {', '.join(map(repr, valid))}.{suggestion}")
