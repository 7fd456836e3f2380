"""Where in its document each token stands, read off the document numbers.

Shape letters: B rows, T tokens in a row.
"""

import torch
from torch import Tensor


def offset_in_document(document_BT: Tensor) -> Tensor:
    """How many tokens of the same row and document number come before each token; int64 [B, T].

        document   0 1 1 2 2 1 1 2       documents may stand in several pieces
        offset     0 0 1 0 1 2 3 2

    Padding counts as a document of its own. Made of tensor operations alone: nothing waits for the device.
    """
    number_BT, order_BT = document_BT.sort(dim=1, stable=True)
    index_T = torch.arange(document_BT.shape[1], device=document_BT.device)
    starts_BT = torch.ones_like(number_BT, dtype=torch.bool)
    starts_BT[:, 1:] = number_BT[:, 1:] != number_BT[:, :-1]
    offset_BT = index_T - torch.where(starts_BT, index_T, 0).cummax(dim=1).values
    return torch.empty_like(order_BT).scatter_(1, order_BT, offset_BT)
