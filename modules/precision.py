"""Which precisions of Lightning this machine can serve, and how.

bfloat16 on a CPU without bfloat16 instructions is served by `modules/float32_products.py`. Lightning is loaded only to
make a plugin.
"""

import os
import platform
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision

Bfloat16Products = Literal["native", "float32"]
"""How products of bfloat16 operands are computed: by torch's own kernels, or in float32 and rounded once."""

_X86_BFLOAT16_CAPABILITIES = ("avx512_bf16", "amx_bf16", "avx10_2")
_X86_ISA_LIMITS_WITHOUT_BFLOAT16 = {"AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
"""Values of ONEDNN_MAX_CPU_ISA at which oneDNN serves bfloat16 by conversion; lower ones it reports itself."""


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
    precision: str, *, device_type: str, bfloat16_products: Literal["auto", "native", "float32"]
) -> Bfloat16Products:
    """One word for how products of bfloat16 operands will be computed in a run.

    Args:
        precision: Lightning's name. Where it is neither `bf16-true` nor `bf16-mixed` there are no such products and
            the answer is "native".
        device_type: "cpu", "cuda", ...
        bfloat16_products: "auto" takes "float32" on a CPU without bfloat16 instructions and "native" elsewhere.
    Raises:
        ValueError: "float32" asked for on another device than the CPU, or an unknown word.
    """
    if bfloat16_products not in ("auto", "native", "float32"):
        raise ValueError(
            f"trainer.bfloat16_products={bfloat16_products!r} is none of 'auto', 'native' and 'float32'. "
            "Leave it at 'auto' unless you want to compare the two."
        )
    if precision not in ("bf16-true", "bf16-mixed"):
        return "native"
    if bfloat16_products == "auto":
        return "float32" if device_type == "cpu" and not cpu_has_bfloat16_products() else "native"
    if bfloat16_products == "float32" and device_type != "cpu":
        raise ValueError(
            f"trainer.bfloat16_products='float32' replaces CPU kernels, but the run is on {device_type!r}. "
            "Set trainer.bfloat16_products='auto'."
        )
    return bfloat16_products


def precision_plugin(
    precision: str, *, device_type: str, bfloat16_products: Literal["auto", "native", "float32"]
) -> "Precision | None":
    """The plugin for `Trainer(plugins=[...])`, or None where Lightning's own for `Trainer(precision=...)` will do.

    A Trainer takes one of the two, never both. Arguments and errors are those of `resolve_bfloat16_products`, whose
    answer is "float32" exactly where a plugin is returned.
    """
    chosen = resolve_bfloat16_products(precision, device_type=device_type, bfloat16_products=bfloat16_products)
    if chosen == "native":
        return None
    from modules.precision_plugins import HalfPrecisionFloat32Products, MixedPrecisionFloat32Products

    if precision == "bf16-true":
        return HalfPrecisionFloat32Products("bf16-true")
    return MixedPrecisionFloat32Products("bf16-mixed", device="cpu")


def _cpu_capabilities() -> dict[str, Any]:
    """What the processor has, whatever limits are set; of torch versions that cannot list it, the little they tell."""
    if hasattr(torch.cpu, "get_capabilities"):
        return dict(torch.cpu.get_capabilities())
    has_avx512_bfloat16 = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return {"avx512_bf16": has_avx512_bfloat16 is not None and has_avx512_bfloat16()}
