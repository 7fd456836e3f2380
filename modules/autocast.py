"""In which dtype a matrix product computes right now, and how to switch autocast off around a stretch of code."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype that `torch.nn.functional.linear(x, ...)` returns here: autocast's where it is on, else x's own.

    Autocast leaves float64 alone.
    """
    kind = x.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if autocast and x.dtype != torch.float64 else x.dtype


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Context in which operations on x's device compute in the dtype of their operands."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
