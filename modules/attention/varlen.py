"""`torch.nn.attention.varlen`: FlashAttention over documents of any length, in torch itself, on CUDA.

    varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size, ...)

torch 2.11 has no `enable_gqa` and documents equal numbers of heads; later ones take fewer key and value heads.
`torch.use_deterministic_algorithms` reaches its backward by itself.

Shape letters: B rows, T tokens in a row, N queries, M keys, H query heads, G key and value heads, D width of a head.
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from modules.attention.borders import Borders
from modules.attention.capabilities import Request
from modules.attention.strategies import Strategy
from modules.attention.varlen_call import VarlenCall, refusals, run


@cache
def takes_shared_heads() -> bool:
    """Whether this torch's `varlen_attn` takes fewer key heads than query heads."""
    # Imported where it is used, since it loads torch's compiler, which takes two seconds.
    from torch.nn.attention import varlen

    return "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters


def why_not(request: Request) -> str | None:
    """See `Kernel.why_not`: CUDA from Ampere on, bfloat16 and float16, windows without sinks."""
    reasons = refusals(request, kernel="varlen")
    if not reasons and not torch.backends.cuda.is_flash_attention_available():
        reasons.append(
            f"The varlen kernel is FlashAttention inside torch, and torch {torch.__version__} has none built in."
        )
    return " ".join(reasons) or None


def compute(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, borders: Borders, strategy: Strategy) -> Tensor:
    """See `Kernel.compute`."""
    return run(q_BHTD, k_BGTD, v_BGTD, borders, strategy, kernel=_attend)


def _attend(call: VarlenCall) -> Tensor:
    from torch.nn.attention import varlen

    k_MGD, v_MGD = call.k_MGD, call.v_MGD
    settings: dict[str, Any] = {"window_size": call.window_size}
    share = call.q_NHD.shape[1] // k_MGD.shape[1]
    if share > 1 and takes_shared_heads():
        settings["enable_gqa"] = True
    elif share > 1:
        k_MGD, v_MGD = (x.repeat_interleave(share, dim=1) for x in (k_MGD, v_MGD))
    out_NHD = varlen.varlen_attn(
        call.q_NHD,
        k_MGD,
        v_MGD,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        call.max_seqlen_q,
        call.max_seqlen_k,
        **settings,
    )
    assert isinstance(out_NHD, Tensor), "log-sum-exp was not asked for"
    return out_NHD
