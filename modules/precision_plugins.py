"""Lightning's two bfloat16 precision plugins with products in float32; `modules.precision` says when and chooses."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision

from modules.float32_products import Float32Products, replacement


class _Float32ProductsInSteps(Precision):
    """Puts every step's forward and backward pass into `Float32Products`; optimizer and clipping stay outside."""

    _holds_replacement = False

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        if not self._holds_replacement:  # until teardown, so that steps do not replace kernels anew
            self._holds_replacement = True
            replacement.hold()
        with super().forward_context(), Float32Products():
            yield

    def backward(self, *args: Any, **kwargs: Any) -> None:
        with Float32Products():
            super().backward(*args, **kwargs)

    def teardown(self) -> None:
        if self._holds_replacement:
            self._holds_replacement = False
            replacement.release()
        super().teardown()


class HalfPrecisionFloat32Products(_Float32ProductsInSteps, HalfPrecision):
    """Lightning's `bf16-true` with the products of `Float32Products`: parameters and activations are bfloat16."""


class MixedPrecisionFloat32Products(_Float32ProductsInSteps, MixedPrecision):
    """Lightning's `bf16-mixed` with the products of `Float32Products`: parameters are float32, autocast rounds them."""
