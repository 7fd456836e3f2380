"""The flash-attn packages: FlashAttention 2, 3 and 4 over documents of any length, on CUDA.

    generation  module                 distribution     for
    3           flash_attn_interface   flash-attn-3     Hopper
    4           flash_attn.cute        flash-attn-4     Hopper and Blackwell, heads up to 128 wide
    2           flash_attn             flash-attn       Ampere and newer

The first that is installed and made for the card and the head width is used, so Hopper trains on 3, which has done so
for longest there, Blackwell on 4, and everything else on 2. Nothing is imported before a card is there to use it.

Shape letters: B rows, T tokens in a row, N queries, H query heads, G key and value heads, D width of a head.
Source: github.com/Dao-AILab/flash-attention, `flash_attn_varlen_func` in flash_attn/flash_attn_interface.py,
hopper/flash_attn_interface.py and flash_attn/cute/interface.py.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from modules.attention.borders import Borders
from modules.attention.capabilities import Request
from modules.attention.strategies import Strategy
from modules.attention.varlen_call import VarlenCall, refusals, run

INSTALL = "pip install flash-attn --no-build-isolation, or the extra workbench[flash]"


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One of the packages, and what it is proven to train."""

    distribution: str
    module: str
    cards: tuple[tuple[range, str], ...]
    """Compute capabilities, less what follows the dot, and the oldest version that trains on them."""
    max_head_width: int
    max_deterministic_head_width: int
    """The same where the backward must be deterministic."""

    def why_not(self, capability: tuple[int, int], head_width: int, deterministic: bool) -> str | None:
        """Why it cannot serve, as a full sentence; None where it can. Imports the package if nothing else is wrong."""
        installed = installed_version(self.distribution)
        if installed is None:
            return f"{self.distribution} is not installed."
        name = f"{self.distribution} {installed}"
        oldest = [version for majors, version in self.cards if capability[0] in majors]
        if not oldest:
            return f"{name} is not used on cards of compute capability {capability[0]}.{capability[1]}."
        if Version(installed) < Version(oldest[0]):
            return (
                f"{name} is installed, but a card of compute capability {capability[0]}.{capability[1]} needs "
                f"{oldest[0]} or newer: pip install -U --no-build-isolation {self.distribution}."
            )
        if head_width > self.max_head_width:
            return f"{name} takes heads up to {self.max_head_width} wide, not {head_width}."
        if deterministic and head_width > self.max_deterministic_head_width:
            return (
                f"{name} has a deterministic backward for heads up to {self.max_deterministic_head_width} wide, not "
                f"{head_width}."
            )
        try:
            load(self.module)
        except Exception as error:  # a library built for another torch fails in any of several ways
            return (
                f"{name} is installed but fails to import ({type(error).__name__}: {error}). Built for another torch, "
                f"it has to be built again: pip install --force-reinstall --no-deps --no-build-isolation "
                f"{self.distribution}."
            )
        return None


GENERATIONS = (
    # "Deterministic backward not supported for hdim 256", hopper/flash_api.cpp, where 193 and more count as 256.
    Generation(
        distribution="flash-attn-3",
        module="flash_attn_interface",
        cards=((range(9, 10), "3.0.0b1"),),
        max_head_width=256,
        max_deterministic_head_width=192,
    ),
    # Its backward over documents is deterministic with shared heads since beta 13, and its own tests hold it to a
    # reference up to a width of 128.
    Generation(
        distribution="flash-attn-4",
        module="flash_attn.cute",
        cards=((range(9, 11), "4.0.0b13"),),
        max_head_width=128,
        max_deterministic_head_width=128,
    ),
    Generation(
        distribution="flash-attn",
        module="flash_attn",
        cards=((range(8, 10), "2.7.0"), (range(10, 100), "2.7.3")),
        max_head_width=256,
        max_deterministic_head_width=256,
    ),
)
"""In the order in which they are asked."""


def why_not(request: Request) -> str | None:
    """See `Kernel.why_not`: CUDA from Ampere on, bfloat16 and float16, windows without sinks, and a package."""
    reasons = refusals(request, kernel="flash")
    if not any(installed_version(generation.distribution) for generation in GENERATIONS):
        reasons.append(f"The flash kernel is the package flash-attn, which is not installed: {INSTALL}.")
    if reasons:
        return " ".join(reasons)
    found = generation(head_width=request.head_width)
    return None if isinstance(found, Generation) else f"The flash kernel finds no package that can serve. {found}"


def compute(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, borders: Borders, strategy: Strategy) -> Tensor:
    """See `Kernel.compute`."""
    found = generation(head_width=q_BHTD.shape[-1], device=q_BHTD.device)
    assert isinstance(found, Generation), found
    return run(q_BHTD, k_BGTD, v_BGTD, borders, strategy, kernel=lambda call: _attend(call, found))


def generation(*, head_width: int, device: torch.device | None = None) -> Generation | str:
    """The generation in use for a card and head width, or why there is none, as full sentences.

    Args:
        head_width: D.
        device: a CUDA device. None = the current one.
    """
    capability = torch.cuda.get_device_capability(device)
    return _choose(capability, head_width, torch.are_deterministic_algorithms_enabled())


def in_use(*, head_width: int, device: torch.device | None = None) -> str:
    """The package and version in use, for the log: flash-attn 2.8.3."""
    found = generation(head_width=head_width, device=device)
    assert isinstance(found, Generation), found
    return f"{found.distribution} {installed_version(found.distribution)}"


@cache
def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, read without importing it."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


@cache
def load(module: str) -> tuple[Callable[..., Any], frozenset[str]]:
    """A package's `flash_attn_varlen_func` and the names of its parameters. Raises what the import raises."""
    function = import_module(module).flash_attn_varlen_func
    return function, frozenset(inspect.signature(function).parameters)


@cache
def _choose(capability: tuple[int, int], head_width: int, deterministic: bool) -> Generation | str:
    reasons = []
    for candidate in GENERATIONS:
        reason = candidate.why_not(capability, head_width, deterministic)
        if reason is None:
            return candidate
        # One generation is enough, so that others are not installed is worth no word.
        if installed_version(candidate.distribution) is not None:
            reasons.append(reason)
    if installed_version("flash-attn") is None:
        reasons.append(f"flash-attn, which serves all cards, is not installed: {INSTALL}.")
    return " ".join(reasons)


def _attend(call: VarlenCall, chosen: Generation) -> Tensor:
    function, parameters = load(chosen.module)
    settings: dict[str, Any] = {
        "cu_seqlens_q": call.cu_seqlens_q,
        "cu_seqlens_k": call.cu_seqlens_k,
        "max_seqlen_q": call.max_seqlen_q,
        "max_seqlen_k": call.max_seqlen_k,
        "causal": call.causal,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    # The generations disagree in what stands for an open end, -1 or None, so only a real window is passed.
    if not call.causal:
        settings["window_size"] = call.window_size
    assert settings.keys() <= parameters, f"{chosen.module} does not take {settings.keys() - parameters}"
    result = function(call.q_NHD, call.k_MGD, call.v_MGD, **settings)
    # Generation 4, and 3 until the summer of 2025, return the log-sum-exp besides.
    out_NHD: Tensor = result[0] if isinstance(result, tuple) else result
    return out_NHD
