"""FlexAttention: one fused kernel over the visible blocks, made by torch.compile from the strategy's own rule.

Serves every strategy. Trains on CUDA; on a CPU torch generates the forward pass alone, which serves evaluation.

Shape letters: B rows, T tokens in a row, H query heads, G key and value heads, D width of a head.
Source: FlexAttention, arXiv 2412.05496.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Hashable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modules.attention.block_mask import block_mask
from modules.attention.borders import Borders
from modules.attention.capabilities import Request
from modules.attention.strategies import Strategy
from modules.batch import PADDING

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# torch.compile loads seconds' worth of modules, so it is left to the first call of `compute`.
Fused = Callable[[Tensor, Tensor, Tensor, "BlockMask"], Tensor]

CUDA_HEAD_WIDTHS = range(16, 257)
"""Triton multiplies no matrices narrower than 16; torch's block sizes are chosen for widths up to 256."""


def why_not(request: Request) -> str | None:
    """See `Kernel.why_not`: CUDA, or a CPU where no gradient is asked for; float32 and the half precisions."""
    if request.device_type not in ("cpu", "cuda"):
        return f"The flex kernel runs on cuda and, without gradients, on cpu, not on {request.device_type}."
    if request.device_type == "cpu" and request.needs_gradient:
        return "The flex kernel has gradients on cuda only; on cpu it serves evaluation."
    if request.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"The flex kernel computes in float32, bfloat16 and float16, not in {request.dtype}."
    if request.device_type == "cuda" and request.head_width not in CUDA_HEAD_WIDTHS:
        return (
            f"The flex kernel on cuda takes heads {CUDA_HEAD_WIDTHS[0]} to {CUDA_HEAD_WIDTHS[-1]} wide, "
            f"not {request.head_width}."
        )
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return (
            "The flex kernel is made by torch.compile, which TORCH_COMPILE_DISABLE=1 in the environment switches off."
        )
    return _cpu_lacks() if request.device_type == "cpu" else _cuda_lacks(request.dtype)


def compute(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, borders: Borders, strategy: Strategy) -> Tensor:
    """See `Kernel.compute`. The first call with a shape and strategy compiles, which takes seconds.

    Raises:
        ValueError: the borders belong to a batch of another shape or device.
        RuntimeError: torch.compile is switched off or gives up, so that only an unfused T x T computation would be
            left.
    """
    mask = block_mask(borders, strategy)
    check_mask(mask, q_BHTD)
    if not torch.is_grad_enabled():
        # FlexAttention on CPU refuses what could require a gradient, even where none is taken.
        q_BHTD, k_BGTD, v_BGTD = q_BHTD.detach(), k_BGTD.detach(), v_BGTD.detach()
    program = _program(
        strategy.visibility,
        q_BHTD.shape,
        k_BGTD.shape[1],
        q_BHTD.dtype,
        q_BHTD.device.type,
        torch.is_grad_enabled(),
    )
    from torch._dynamo.exc import FailOnRecompileLimitHit  # loaded with the program

    try:
        out_BHTD = program(q_BHTD, k_BGTD, v_BGTD, mask)
    except FailOnRecompileLimitHit as error:
        raise RuntimeError(
            "attention.kernel='flex' was compiled for too many kinds of inputs of one shape. Call it with fewer memory "
            "layouts and gradient modes, or raise torch._dynamo.config.recompile_limit."
        ) from error
    padding_B1T1 = borders.derived(("flex", "padding"), lambda: _padding(borders))
    return out_BHTD if padding_B1T1 is None else out_BHTD.masked_fill(padding_B1T1, 0.0)


def check_mask(mask: BlockMask, q_BHTD: Tensor) -> None:
    """Refuse a mask made for other queries: FlexAttention itself would crop, broadcast or read past its end.

    Raises:
        ValueError: rows, tokens or device differ.
    """
    rows, _, tokens, _ = q_BHTD.shape
    device = mask.kv_num_blocks.device
    if (mask.kv_num_blocks.shape[0], *mask.seq_lengths) != (rows, tokens, tokens) or device != q_BHTD.device:
        raise ValueError(
            f"The block mask is for {mask.kv_num_blocks.shape[0]} rows of {mask.seq_lengths[0]} tokens on {device}, "
            f"but the queries are {rows} rows of {tokens} on {q_BHTD.device}: make the borders from this batch's "
            "documents."
        )


def _padding(borders: Borders) -> Tensor | None:
    """Bool [B, 1, T, 1], or None where the batch has none."""
    if not any(run.document == PADDING for run in borders.runs):
        return None
    # As in the mask: what is made in evaluation may be used in training.
    with torch.inference_mode(False):
        return (borders.document_BT == PADDING)[:, None, :, None]


@cache
def _program(*signature: Hashable) -> Fused:
    """What computes all batches of one signature.

    torch keeps the compiled versions of a function with its code object, and refuses to compile after 8 of them. So
    each signature gets a code object of its own, whose versions are few: memory layouts, and inference mode or not.
    Lengths stay constants in it: only so are the boundary checks left out where 128 divides T, and the C++ that torch
    2.13 generates for varying ones does not always compile.
    """
    own = FunctionType(_fused.__code__.replace(), _fused.__globals__, _fused.__name__, _fused.__defaults__)
    return torch.compile(own, fullgraph=True, dynamic=False)


def _fused(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask: BlockMask) -> Tensor:
    """FlexAttention, compiled or not at all."""
    from torch.nn.attention.flex_attention import flex_attention

    # A constant True where torch.compile traces this, and False wherever Python runs it.
    if not torch.compiler.is_dynamo_compiling():
        raise RuntimeError(
            "attention.kernel='flex' runs only as compiled by torch.compile: uncompiled it would hold all T x T "
            "scores. torch.compile is switched off (TORCH_COMPILE_DISABLE, torch.compiler.set_stance, "
            "torch._dynamo.config): switch it on before the first call, or set another attention.kernel."
        )
    # TRITON is the kernel for whole rows. Left to itself torch takes its decoding kernel below 128 tokens.
    return flex_attention(
        q_BHTD, k_BGTD, v_BGTD, block_mask=mask, enable_gqa=True, kernel_options={"BACKEND": "TRITON"}
    )


@cache
def _cpu_lacks() -> str | None:
    """What torch needs to generate and build C++, and this machine does not have."""
    if sys.platform == "darwin" or not torch.cpu._is_avx2_supported() or _capability_is_default():
        return "The flex kernel on cpu needs an x86 processor with AVX2 and a system other than macOS."
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return (
            f"The flex kernel on cpu is compiled by a C++ compiler, and {compiler!r} is not found. Install g++, or "
            "name another in the environment variable CXX."
        )
    return _headers_lack()


@cache
def _cuda_lacks(dtype: torch.dtype) -> str | None:
    """What Triton needs on a machine with a CUDA device; one without is only planning, and nothing is missing."""
    if not torch.cuda.is_available():
        return None
    if find_spec("triton") is None:
        return "The flex kernel on cuda is compiled by Triton, which is not installed: pip install triton."
    if torch.version.hip is None:
        capability = torch.cuda.get_device_capability()
        needed = (8, 0) if dtype == torch.bfloat16 else (7, 0)
        if capability < needed:
            return (
                f"The flex kernel in {dtype} needs a card of compute capability {needed[0]}.{needed[1]}, but "
                f"{torch.cuda.get_device_name()} has {capability[0]}.{capability[1]}."
            )
    if not any(shutil.which(name) for name in (os.environ.get("CC"), "gcc", "clang") if name):
        return (
            "The flex kernel on cuda builds its launcher with a C compiler, and neither gcc nor clang is found. "
            "Install one, or name it in the environment variable CC."
        )
    return _headers_lack()


def _headers_lack() -> str | None:
    if (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return None
    return "The flex kernel builds against Python's C headers, and Python.h is not found. Install python3-dev."


def _capability_is_default() -> bool:
    return os.environ.get("ATEN_CPU_CAPABILITY") == "default"
