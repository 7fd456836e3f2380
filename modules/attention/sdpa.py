"""One causal `scaled_dot_product_attention` per segment: the cost of the visible pairs, on any device torch knows.

Shape letters: B rows, T tokens in a row, n tokens of one segment, H query heads, G key and value heads, D head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from modules.attention.borders import Borders
from modules.attention.capabilities import Request
from modules.attention.strategies import Strategy

DEVICES = ("cpu", "cuda", "mps")


def why_not(request: Request) -> str | None:
    """See `Kernel.why_not`: CPU, CUDA and MPS, any floating dtype the device has, no window."""
    if request.device_type not in DEVICES:
        return f"The sdpa kernel runs on {', '.join(DEVICES)}, not on {request.device_type}."
    if request.strategy.window is not None:
        return (
            "The sdpa kernel runs plain causal attention inside a segment and so has no windows or sinks, which "
            f"attention.strategy={request.strategy.name!r} asks for."
        )
    if request.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return f"The sdpa kernel computes in float64, float32, bfloat16 and float16, not in {request.dtype}."
    if request.device_type == "mps" and request.dtype == torch.float64:
        return "The mps device has no float64."
    return None


def compute(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, borders: Borders, strategy: Strategy) -> Tensor:
    """See `Kernel.compute`.

    anchor   A a a | b b | - -      SDPA over [A a a]; over [A b b], dropping A's output; zeros
    """
    rows, _, tokens, _ = q_BHTD.shape
    segments = borders.segments(strategy)
    if len(segments) == rows and not any(segment.padding for segment in segments):
        return _causal(q_BHTD, k_BGTD, v_BGTD)

    # All rows laid end to end, cut once. A split's gradient is one concatenation, where slices would each add a
    # gradient of the full size. Tokens before heads is how projections and SDPA itself lay memory out, so that
    # `flatten` is a view and pieces are contiguous.
    lengths = [segment.stop - segment.start for segment in segments]
    pieces = zip(
        *(x.transpose(1, 2).flatten(0, 1).split(lengths) for x in (q_BHTD, k_BGTD, v_BGTD)), segments, strict=True
    )
    outputs: list[Tensor] = []
    anchor: tuple[Tensor, Tensor, Tensor] | None = None
    for q_nHD, k_nGD, v_nGD, segment in pieces:
        if segment.padding:
            outputs.append(torch.zeros_like(q_nHD))
            continue
        inputs = (q_nHD, k_nGD, v_nGD)
        if segment.start == 0:
            anchor = (q_nHD[:1], k_nGD[:1], v_nGD[:1])
        if segment.sees_anchor:
            assert anchor is not None
            inputs = tuple(torch.cat(pair) for pair in zip(anchor, inputs, strict=True))
        out_nHD = _causal(*(x.transpose(0, 1)[None] for x in inputs))[0].transpose(0, 1)
        outputs.append(out_nHD[1:] if segment.sees_anchor else out_nHD)
    return torch.cat(outputs).unflatten(0, (rows, tokens)).transpose(1, 2)


def _causal(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
    """Plain causal attention, with each key head shared by H / G query heads."""
    share = q_BHTD.shape[1] // k_BGTD.shape[1]
    if share == 1:
        return F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, is_causal=True)
    if _fused_takes_shared_heads(q_BHTD, k_BGTD, v_BGTD):
        return F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, is_causal=True, enable_gqa=True)
    k_BHTD, v_BHTD = (x.repeat_interleave(share, dim=1) for x in (k_BGTD, v_BGTD))
    return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)


def _fused_takes_shared_heads(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> bool:
    """Whether `enable_gqa` keeps a fused kernel, forward and backward.

    The CPU's does, and is then up to 1.5 x faster than on repeated key heads (short segments most). On CUDA
    FlashAttention does, while memory-efficient attention, the only fused one for float32, does not: without repeated
    heads SDPA would fall back to all T x T scores.
    """
    if q_BHTD.device.type == "cuda":
        params = torch.backends.cuda.SDPAParams(q_BHTD, k_BGTD, v_BGTD, None, 0.0, True, True)
        return torch.backends.cuda.can_use_flash_attention(params)
    return q_BHTD.device.type == "cpu"
