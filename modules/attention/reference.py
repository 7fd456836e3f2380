"""The slow, plain computation that every kernel is held to: one dense softmax over the visible rule.

Shape letters: B rows, T tokens in a row, H query heads, G key and value heads, D width of a head.
"""

import torch
from torch import Tensor

from modules.attention.borders import Borders
from modules.attention.capabilities import Request
from modules.attention.strategies import Strategy, visible_rule

MAX_TOKENS = 8192
"""Longest row it takes: at 8192 tokens the scores of one head are 256 MiB in float32, and grow with the square."""


def why_not(request: Request) -> str | None:
    """See `Kernel.why_not`: any device, any floating dtype, rows up to `MAX_TOKENS`."""
    if not request.dtype.is_floating_point:
        return f"The reference kernel computes in floating dtypes, not in {request.dtype}."
    if request.tokens is not None and request.tokens > MAX_TOKENS:
        return (
            f"The reference kernel holds all tokens x tokens scores and so takes rows of at most {MAX_TOKENS} tokens, "
            f"not {request.tokens}."
        )
    return None


def compute(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, borders: Borders, strategy: Strategy) -> Tensor:
    """See `Kernel.compute`. Everything happens in the dtype of q, k and v: float64 gives the oracle."""
    rows, heads, tokens, width = q_BHTD.shape
    device = q_BHTD.device
    share = heads // k_BGTD.shape[1]
    k_BHTD, v_BHTD = (x.repeat_interleave(share, dim=1) for x in (k_BGTD, v_BGTD))

    row = torch.arange(rows, device=device)[:, None, None, None]
    # No strategy tells heads apart, so one head's mask serves all.
    head = torch.zeros(1, dtype=torch.long, device=device)
    index = torch.arange(tokens, device=device)
    visible_B1TT = visible_rule(strategy, borders.document_BT)(row, head, index[:, None], index)

    score_BHTT = (q_BHTD * width**-0.5) @ k_BHTD.transpose(-1, -2)
    weight_BHTT = score_BHTT.masked_fill(~visible_B1TT, -torch.inf).softmax(-1)
    # A row of padding sees nothing, and softmax over nothing is NaN there, also in its gradient.
    nothing_B1T1 = ~visible_B1TT.any(-1, keepdim=True)
    return weight_BHTT.masked_fill(nothing_B1T1, 0.0) @ v_BHTD
