"""The arguments of a variable-length attention call: what `torch.nn.attention.varlen` and flash-attn both take.

    tokens        A a a | b b | -        one row: the anchor, documents a and b, padding
    queries       A a a   b b            every token that is no padding, document by document
    keys          A a a A b b            the anchor's key and value in front of each later document
    cu_seqlens_q  0     3   5
    cu_seqlens_k  0     3     6          causal, aligned bottom right: the last query sees the last key

Nothing here launches a kernel or needs a GPU.

Shape letters: B rows, T tokens in a row, N queries, M keys, H query heads, G key and value heads, X either of the two,
D width of a head.
Source: `flash_attn_varlen_func` of github.com/Dao-AILab/flash-attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modules.attention.borders import Borders
from modules.attention.capabilities import Request
from modules.attention.cu_seqlens import check_cu_seqlens
from modules.attention.gather import Layout, Slots, gather, nothing, scatter
from modules.attention.strategies import Strategy
from modules.batch import PADDING

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_WIDTH = 256
HEAD_WIDTH_STEP = 8
MIN_CAPABILITY = (8, 0)
"""Ampere. What FlashAttention 2 and its copy inside torch check on launch, as are width and dtypes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VarlenCall:
    """One call. Query i sees the keys from i + shift - left to i + shift of its sequence; shift = keys - queries."""

    q_NHD: Tensor
    k_MGD: Tensor
    v_MGD: Tensor
    """Contiguous."""
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    """int32 on the device: where each sequence starts, then N and M. First 0, strictly rising."""
    max_seqlen_q: int
    max_seqlen_k: int
    window_size: tuple[int, int]
    """(left, right), keys seen before and after the query's own: (-1, 0) is all that came before, plain causal."""

    @property
    def causal(self) -> bool:
        """Causal and nothing else. A window says it by itself: its right end is the query's own key."""
        return self.window_size == (-1, 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class VarlenLayout:
    """What a batch's borders make of every call: once per batch, for all layers."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    queries: Layout
    keys: Layout


def run(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    borders: Borders,
    strategy: Strategy,
    *,
    kernel: Callable[[VarlenCall], Tensor],
) -> Tensor:
    """`Kernel.compute` by a kernel that makes [N, H, D] of a call."""
    layout = layout_of(borders, strategy)
    if layout is None:
        return nothing(q_BHTD)
    out_NHD = kernel(prepare(q_BHTD, k_BGTD, v_BGTD, layout, strategy))
    return restore(out_NHD, layout, rows=q_BHTD.shape[0], tokens=q_BHTD.shape[2])


def layout_of(borders: Borders, strategy: Strategy) -> VarlenLayout | None:
    """The layout of a batch, made on the host when first asked; None where all of it is padding."""
    # Only these two fields of a strategy decide: a window is an argument of the call.
    key = ("varlen_call", strategy.scope, strategy.anchor)
    return borders.derived(key, lambda: _layout(borders, strategy))


def prepare(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, layout: VarlenLayout, strategy: Strategy) -> VarlenCall:
    """The call's arguments. Copies what it must: an anchor or padding, and tensors that lie heads before tokens."""

    def laid_out(x_BXTD: Tensor, tokens: Layout) -> Tensor:
        # Tokens before heads is how projections lay memory out: then `flatten` is a view and `contiguous` too.
        (x_MXD,) = gather(x_BXTD.transpose(1, 2).flatten(0, 1), tokens)
        return x_MXD.contiguous()

    return VarlenCall(
        q_NHD=laid_out(q_BHTD, layout.queries),
        k_MGD=laid_out(k_BGTD, layout.keys),
        v_MGD=laid_out(v_BGTD, layout.keys),
        cu_seqlens_q=layout.cu_seqlens_q,
        cu_seqlens_k=layout.cu_seqlens_k,
        max_seqlen_q=layout.max_seqlen_q,
        max_seqlen_k=layout.max_seqlen_k,
        window_size=(-1 if strategy.window is None else strategy.window - 1, 0),
    )


def restore(out_NHD: Tensor, layout: VarlenLayout, *, rows: int, tokens: int) -> Tensor:
    """The output as [B, H, T, D], zero at padding."""
    return scatter([out_NHD], layout.queries, tokens=rows * tokens).unflatten(0, (rows, tokens)).transpose(1, 2)


def refusals(request: Request, *, kernel: str) -> list[str]:
    """Why no kernel that takes such calls can serve, apart from what is installed: full sentences, none if it can."""
    strategy = request.strategy
    reasons = []
    if request.device_type != "cuda":
        reasons.append(f"The {kernel} kernel runs on cuda, not on {request.device_type}.")
    elif torch.version.hip is not None:
        reasons.append(f"The {kernel} kernel is held to the oracle on NVIDIA cards alone, and this torch is for AMD's.")
    elif not torch.cuda.is_available():
        reasons.append(f"The {kernel} kernel runs on cuda, and torch finds no CUDA device here.")
    elif (capability := torch.cuda.get_device_capability()) < MIN_CAPABILITY:
        reasons.append(
            f"The {kernel} kernel needs compute capability {_dotted(MIN_CAPABILITY)} or newer, and "
            f"{torch.cuda.get_device_name()} has {_dotted(capability)}."
        )
    if request.dtype not in DTYPES:
        reasons.append(
            f"The {kernel} kernel computes in bfloat16 or float16, but q, k and v come in {request.dtype}, as "
            "trainer.precision='32-true' or rotary.precision='float32_scores' keeps them. Set "
            "trainer.precision='bf16-mixed' and rotary.precision='float32'."
        )
    if request.head_width % HEAD_WIDTH_STEP or request.head_width > MAX_HEAD_WIDTH:
        reasons.append(
            f"The {kernel} kernel takes heads whose width is a multiple of {HEAD_WIDTH_STEP} up to {MAX_HEAD_WIDTH}, "
            f"not {request.head_width}."
        )
    if strategy.window is not None and (strategy.anchor or strategy.sink):
        reasons.append(
            f"The {kernel} kernel has windows, but beside them it would hide the anchor and the first tokens, which "
            f"attention.strategy={strategy.name!r} keeps in sight. The flex and reference kernels keep them."
        )
    return reasons


def _layout(borders: Borders, strategy: Strategy) -> VarlenLayout | None:
    segments = [segment for segment in borders.segments(strategy) if not segment.padding]
    if not segments:
        return None
    tokens, device = borders.document_BT.shape[1], borders.document_BT.device

    row_start = np.array([segment.row * tokens for segment in segments])
    first_token = row_start + [segment.start for segment in segments]
    sees_anchor = np.array([segment.sees_anchor for segment in segments])
    queries_each = np.array([segment.stop - segment.start for segment in segments])
    keys_each = queries_each + sees_anchor

    cu_seqlens_q, cu_seqlens_k = (np.append(0, each.cumsum()) for each in (queries_each, keys_each))
    padding_N = (borders.document_BT == PADDING).flatten().cpu().numpy()
    # Padding ends its row whatever the order, so places and tokens are padding alike.
    token_N = np.flatnonzero(~padding_N)
    check_cu_seqlens(cu_seqlens_q, tokens=len(token_N), name="cu_seqlens_q")
    check_cu_seqlens(cu_seqlens_k, tokens=len(token_N) + int(sees_anchor.sum()), name="cu_seqlens_k")

    # Slot j of a segment holds the place j after its first, or one before that where the anchor stands in front.
    token_M = np.arange(cu_seqlens_k[-1]) + np.repeat(first_token - sees_anchor - cu_seqlens_k[:-1], keys_each)
    copy_M = np.zeros(len(token_M), dtype=bool)
    copy_M[cu_seqlens_k[:-1][sees_anchor]] = True
    token_M[copy_M] = row_start[sees_anchor]
    order = borders.order(strategy)
    if order is not None:
        token_N, token_M = order[token_N], order[token_M]

    def laid_out(token: NDArray[np.int64], copy: NDArray[np.bool_]) -> Layout:
        return Layout.of((Slots.of(token, copy, device=device),), padding_N, device=device)

    return VarlenLayout(
        cu_seqlens_q=_int32(cu_seqlens_q, device),
        cu_seqlens_k=_int32(cu_seqlens_k, device),
        max_seqlen_q=int(queries_each.max()),
        max_seqlen_k=int(keys_each.max()),
        queries=laid_out(token_N, np.zeros(len(token_N), dtype=bool)),
        keys=laid_out(token_M, copy_M),
    )


def _int32(values: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(device)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
