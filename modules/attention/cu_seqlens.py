"""What cumulative sequence lengths must be: the one check for those we make and those a user brings.

Numbers on the host only, and no torch: a value checked on the device would make every layer wait for it.
Source: `cu_seqlens_q` and `cu_seqlens_k` of flash_attn_varlen_func, github.com/Dao-AILab/flash-attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LARGEST = np.iinfo(np.int32).max
"""Kernels read cu_seqlens as int32."""


def check_cu_seqlens(cu_seqlens: Sequence[int] | NDArray[np.integer], *, tokens: int, name: str = "cu_seqlens") -> None:
    """Hold cumulative lengths to what a kernel reads unchecked: it would run over its arrays' ends, or skip tokens.

        documents of 3, 2 and 4 tokens  ->  0 3 5 9, tokens = 9

    Args:
        cu_seqlens: where each sequence starts, in tokens from the start of the batch, then where the last one ends.
        tokens: all tokens of the batch: B * T, less padding where that is left out.
        name: what the caller calls them, for the message.
    Raises:
        ValueError: they are not a list of whole numbers, do not start at 0, do not rise strictly (an empty sequence),
            do not end at `tokens`, or go beyond int32.
    """
    values = np.asarray(cu_seqlens)
    if values.ndim != 1 or len(values) < 2 or not np.issubdtype(values.dtype, np.integer):
        raise ValueError(
            f"{name} has shape {list(values.shape)} and dtype {values.dtype}. It must hold whole numbers in one "
            "dimension, one more than there are sequences, and at least one sequence."
        )
    if values[0] != 0:
        raise ValueError(f"{name}[0] = {values[0]}: it must start at 0.")
    # Compared, not subtracted: differences of unsigned numbers wrap around.
    falling = np.flatnonzero(values[1:] <= values[:-1])
    if len(falling):
        at = int(falling[0]) + 1
        raise ValueError(
            f"{name}[{at}] = {values[at]} comes after {name}[{at - 1}] = {values[at - 1]}: it must rise strictly. "
            "Leave out sequences without tokens."
        )
    if values[-1] != tokens:
        raise ValueError(f"{name} ends at {values[-1]}: it must end at {tokens}, the number of tokens.")
    if tokens > LARGEST:
        raise ValueError(
            f"{name} ends at {tokens}: kernels read it as int32, which ends at {LARGEST}. Use fewer rows per batch."
        )
