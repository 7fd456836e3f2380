"""The one entry to attention: checks shapes, asks the kernel whether it can, calls it.

Shape letters: B rows, T tokens in a row, H query heads, G key and value heads, D width of a head.
"""

import torch
from torch import Tensor

from modules.attention.borders import Borders
from modules.attention.capabilities import load_kernel, resolve_kernel
from modules.attention.strategies import Strategy
from modules.opaque import opaque


# Every batch has other documents: traced, they would be constants of a graph of their own.
@opaque
def attend(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    borders: Borders,
    strategy: Strategy,
    *,
    kernel: str = "auto",
) -> Tensor:
    """Softmax attention over the keys that the strategy lets each query see, scores scaled by 1 / sqrt(D).

    Query head h uses key and value head h // (H / G). Autocast is the caller's business: a kernel computes in the
    dtype it is handed as long as the caller has switched autocast off.

    Args:
        q_BHTD, k_BGTD, v_BGTD: one floating dtype and one device. G divides H.
        borders: the documents of the batch.
        strategy: what a query may see.
        kernel: a name in `KERNELS`, or `auto`. All give the same result up to rounding.
    Returns:
        out_BHTD, of q's dtype. Rows of padding are zero and pass no gradient on.
    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or the kernel cannot serve.
    """
    _check_fit(q_BHTD, k_BGTD, v_BGTD, borders)
    name = resolve_kernel(
        kernel,
        strategy=strategy,
        device_type=q_BHTD.device.type,
        dtype=q_BHTD.dtype,
        head_width=q_BHTD.shape[-1],
        needs_gradient=torch.is_grad_enabled() and any(x.requires_grad for x in (q_BHTD, k_BGTD, v_BGTD)),
        tokens=q_BHTD.shape[2],
    )
    return load_kernel(name).compute(q_BHTD, k_BGTD, v_BGTD, borders, strategy)


def _check_fit(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, borders: Borders) -> None:
    described = f"q {tuple(q_BHTD.shape)}, k {tuple(k_BGTD.shape)}, v {tuple(v_BGTD.shape)}"
    if q_BHTD.ndim != 4 or k_BGTD.ndim != 4 or k_BGTD.shape != v_BGTD.shape:
        raise ValueError(f"attend takes q [B, H, T, D] and k, v [B, G, T, D], but got {described}.")
    rows, heads, tokens, width = q_BHTD.shape
    kv_heads = k_BGTD.shape[1]
    if k_BGTD.shape != (rows, kv_heads, tokens, width) or kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"q, k and v must agree in rows, tokens and head width, and key heads must divide query heads: {described}."
        )
    if borders.document_BT.shape != (rows, tokens):
        raise ValueError(f"The borders describe {tuple(borders.document_BT.shape)} tokens, but attend got {described}.")
    for name, other in (("k", k_BGTD), ("v", v_BGTD)):
        if other.dtype != q_BHTD.dtype or other.device != q_BHTD.device:
            raise ValueError(
                f"q is {q_BHTD.dtype} on {q_BHTD.device}, but {name} is {other.dtype} on {other.device}: "
                "cast them to one dtype and device first."
            )
