"""Dense attention written apart from the package: the table of strategies as a mask, and softmax by hand.

Nothing of modules/attention takes part, so an error there cannot hide here.
"""

import numpy as np
import torch
from torch import Tensor


def dense_mask(strategy: str, document: list[int], *, window: int = 0, sink: int = 0) -> np.ndarray:
    """Bool [T, T]: may query (first axis) see key (second axis), for one row's document numbers.

    Window and sink are for the strategies that have them, and count the tokens of the document.
    """
    number = np.asarray(document)
    tokens = len(number)
    before = np.array([document[:i].count(n) for i, n in enumerate(document)])  # tokens of the same document
    in_window = before[:, None] - before[None, :] < window
    is_sink = (before < sink)[None, :]
    query, key = number[:, None], number[None, :]
    causal = np.tril(np.ones((tokens, tokens), dtype=bool))
    real = (query >= 0) & (key >= 0)
    match strategy:
        case "full":
            rule = np.ones((tokens, tokens), dtype=bool)
        case "intra_document" | "intra_document_reset":
            rule = query == key
        case "anchor":
            rule = (query == key) | (key == 0)
        case "sliding_window":
            rule = (query == key) & in_window
        case "sink_window":
            rule = ((query == key) & (in_window | is_sink)) | (key == 0)
        case _:
            raise AssertionError(f"the table has no row {strategy!r}")
    return causal & real & rule


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, strategy: str, documents: list[list[int]], *, window: int = 0, sink: int = 0
) -> Tensor:
    """Attention of [B, H, T, D] queries over [B, G, T, D] keys, row by row and head by head."""
    share = q.shape[1] // k.shape[1]
    rows = []
    for b, document in enumerate(documents):
        visible = torch.from_numpy(dense_mask(strategy, document, window=window, sink=sink))
        heads = []
        for h in range(q.shape[1]):
            score = q[b, h] @ k[b, h // share].T / q.shape[-1] ** 0.5
            highest = score.where(visible, torch.tensor(-1e30, dtype=score.dtype)).amax(1, keepdim=True).detach()
            weight = torch.where(visible, (score - highest).clamp(max=0.0).exp(), torch.zeros_like(score))
            total = weight.sum(1, keepdim=True)
            heads.append(weight / torch.where(total == 0, torch.ones_like(total), total) @ v[b, h // share])
        rows.append(torch.stack(heads))
    return torch.stack(rows)
