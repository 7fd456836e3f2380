"""Random inputs of attention tests: rows of documents, and queries, keys and values for them."""

import numpy as np
import torch


def random_documents(
    tokens: int, rows: int, *, anchor: bool, padding: bool, seed: int, interleaved: bool = False
) -> list[list[int]]:
    """Rows of random documents, many of them one token long, each row cut differently.

    Interleaved ones stand in pieces, some of them in dozens.
    """
    rng = np.random.default_rng(seed)
    batch = []
    for row in range(rows):
        numbers = [0] if anchor else []
        # The first row is never padded, the last one more than half.
        end = tokens - (int(rng.integers(tokens // 2, tokens)) if padding and row == rows - 1 else 0)
        document = 1
        while len(numbers) < end:
            length = 1 if rng.random() < 0.3 else int(rng.integers(1, max(2, tokens // 3)))
            numbers += [document] * min(length, end - len(numbers))
            document += 1
        if interleaved:
            first = int(anchor)
            cuts = np.flatnonzero(rng.random(end - first - 1) < 0.3) + 1 if end > first + 1 else []
            pieces = np.split(np.array(numbers[first:]), cuts)
            numbers[first:] = [int(number) for i in rng.permutation(len(pieces)) for number in pieces[i]]
        batch.append(numbers + [-1] * (tokens - len(numbers)))
    return batch


def random_qkv(rows: int, tokens: int, heads: int, kv_heads: int, width: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(rows, h, tokens, width, dtype=torch.float64, generator=generator).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]
