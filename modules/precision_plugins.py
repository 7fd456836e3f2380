"""Lightning's two bfloat16 precision plugins with products in float32; `modules.precision` says when and chooses."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision

from modules.precision import Float32Products


class _Float32ProductsInSteps(Precision):
    """Puts every step's forward and backward pass into `Float32Products`; optimizer and clipping stay outside."""

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        with super().forward_context(), Float32Products():
            yield

    def backward(self, *args: Any, **kwargs: Any) -> None:
        with Float32Products():
            super().backward(*args, **kwargs)


class HalfPrecisionFloat32Products(_Float32ProductsInSteps, HalfPrecision):
    """Lightning's `bf16-true` with the products of `Float32Products`: parameters and activations are bfloat16."""


class MixedPrecisionFloat32Products(_Float32ProductsInSteps, MixedPrecision):
    """Lightning's `bf16-mixed` with the products of `Float32Products`: parameters are float32, autocast rounds them."""
