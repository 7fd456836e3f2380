"""Which precisions of Lightning this machine can serve, and how.

    name          weights    matrix products of   gradients and optimizer
    32-true       float32    float32              float32
    64-true       float64    float64              float64
    bf16-mixed    float32    bfloat16             float32
    bf16-true     bfloat16   bfloat16             bfloat16; optimizer float32 with master weights (modules/optim.py)
    16-mixed      float32    float16              float32, the loss scaled       GPU only
    16-true       float16    float16              float16; optimizer as above    GPU only

bfloat16 on a CPU without bfloat16 instructions is served by `modules/float32_products.py`. Lightning is loaded only to
make a plugin.
"""

import os
import platform
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision

PrecisionName = Literal[
    "32-true",
    "64-true",
    "bf16-true",
    "bf16-mixed",
    "16-true",
    "16-mixed",
    "transformer-engine",
    "transformer-engine-float16",
]
"""All of Lightning's, but for its aliases: one precision has one name, so that equal runs are seen to be equal."""

ALIASES = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}
"""Names that Lightning takes for historical reasons, and what it takes them for."""

DTYPES = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "bf16-true": torch.bfloat16,
    "bf16-mixed": torch.bfloat16,
    "16-true": torch.float16,
    "16-mixed": torch.float16,
    "transformer-engine": torch.bfloat16,
    "transformer-engine-float16": torch.float16,
}
"""The dtype that q and k leave their projections in."""

LOW_PRECISION_WEIGHTS = ("bf16-true", "16-true")
"""Precisions whose weights themselves are rounded."""

BFLOAT16_PRODUCTS = ("bf16-true", "bf16-mixed")
"""Precisions whose matrix products take bfloat16 operands."""

Bfloat16Products = Literal["native", "float32"]
"""How products of bfloat16 operands are computed: by torch's own kernels, or in float32 and rounded once."""

_X86_BFLOAT16_CAPABILITIES = ("avx512_bf16", "amx_bf16", "avx10_2")
_X86_ISA_LIMITS_WITHOUT_BFLOAT16 = {"AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
"""Values of ONEDNN_MAX_CPU_ISA at which oneDNN serves bfloat16 by conversion; lower ones it reports itself."""


def check_precision(precision: str, *, device_type: str) -> None:
    """Refuses what cannot be served, where Lightning would fail late or compute something else.

    Args:
        precision: a name in DTYPES.
        device_type: "cpu", "cuda", ...
    Raises:
        ValueError: with the reason.
    """
    refusal = f"trainer.precision={precision!r} "
    if precision.startswith("transformer-engine"):
        raise ValueError(
            refusal + "is not served: the float8 layers of Transformer Engine keep their scales as a pickle inside "
            "checkpoints and unpickle it to go on, and nothing is ever unpickled here. Set trainer.precision to "
            "bf16-mixed or bf16-true."
        )
    if device_type == "cpu" and precision == "16-mixed":
        raise ValueError(
            refusal + "needs a GPU: on a CPU Lightning would compute in bfloat16 under that name. Set "
            "trainer.precision to bf16-mixed, bf16-true or 32-true."
        )
    if device_type == "cpu" and precision == "16-true":
        raise ValueError(
            refusal + "needs a GPU: most CPUs have no float16 instructions, and torch then multiplies float16 matrices "
            "about 50 times as slowly as float32 ones. Set trainer.precision to bf16-true, bf16-mixed or 32-true."
        )


def cpu_has_bfloat16_products() -> bool:
    """Whether this CPU has bfloat16 product instructions (AVX512-BF16, AMX, Arm BF16) and oneDNN uses them.

    oneDNN alone is no sufficient witness: it says yes on every AVX-512 CPU, and converts on the older ones, which
    takes about four times as long as float32. Limits set by `ONEDNN_MAX_CPU_ISA` (or its older name
    `DNNL_MAX_CPU_ISA`) when the process started count.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    one_dnn_serves_bfloat16 = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    if one_dnn_serves_bfloat16 is None or not one_dnn_serves_bfloat16():
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    capabilities = _cpu_capabilities()
    has_instructions = any(capabilities.get(name, False) for name in _X86_BFLOAT16_CAPABILITIES)
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    return has_instructions and limit not in _X86_ISA_LIMITS_WITHOUT_BFLOAT16


def resolve_bfloat16_products(
    precision: str,
    *,
    device_type: str,
    bfloat16_products: Literal["auto", "native", "float32"],
    is_compiled: bool = False,
) -> Bfloat16Products:
    """One word for how products of bfloat16 operands will be computed in a run.

    Args:
        precision: Lightning's name. Where it is neither `bf16-true` nor `bf16-mixed` there are no such products and
            the answer is "native".
        device_type: "cpu", "cuda", ...
        bfloat16_products: "auto" takes "float32" on a CPU without bfloat16 instructions and "native" elsewhere.
        is_compiled: the model runs under torch.compile, which rounds where it pleases: only "native" means something.
    Raises:
        ValueError: "float32" asked for on another device than the CPU or for a compiled model, or an unknown word.
    """
    if bfloat16_products not in ("auto", "native", "float32"):
        raise ValueError(
            f"trainer.bfloat16_products={bfloat16_products!r} is none of 'auto', 'native' and 'float32'. "
            "Leave it at 'auto' unless you want to compare the two."
        )
    if is_compiled and bfloat16_products == "float32":
        raise ValueError(
            "trainer.bfloat16_products='float32' and trainer.compile=true contradict each other: compiled code rounds "
            "where it pleases. Set trainer.bfloat16_products='auto' or trainer.compile=false."
        )
    if precision not in BFLOAT16_PRODUCTS or is_compiled:
        return "native"
    if bfloat16_products == "auto":
        return "float32" if device_type == "cpu" and not cpu_has_bfloat16_products() else "native"
    if bfloat16_products == "float32" and device_type != "cpu":
        raise ValueError(
            f"trainer.bfloat16_products='float32' replaces CPU kernels, but the run is on {device_type!r}. "
            "Set trainer.bfloat16_products='auto'."
        )
    return bfloat16_products


def precision_plugin(precision: str, products: Bfloat16Products) -> "Precision | None":
    """The plugin for `Trainer(plugins=[...])`, or None where Lightning's own for `Trainer(precision=...)` will do.

    A Trainer takes one of the two, never both.

    Args:
        precision: Lightning's name.
        products: the answer of `resolve_bfloat16_products`. A plugin is returned exactly where it is "float32".
    """
    if products == "native":
        return None
    from modules.precision_plugins import HalfPrecisionFloat32Products, MixedPrecisionFloat32Products

    if precision == "bf16-true":
        return HalfPrecisionFloat32Products("bf16-true")
    assert precision == "bf16-mixed", precision
    return MixedPrecisionFloat32Products("bf16-mixed", device="cpu")


def _cpu_capabilities() -> dict[str, Any]:
    """What the processor has, whatever limits are set; of torch versions that cannot list it, the little they tell."""
    if hasattr(torch.cpu, "get_capabilities"):
        return dict(torch.cpu.get_capabilities())
    has_avx512_bfloat16 = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return {"avx512_bf16": has_avx512_bfloat16 is not None and has_avx512_bfloat16()}
