"""Float32 copies of the bfloat16 matrices that products were last made of.

A matrix is multiplied several times in short succession: hidden states by three projections, a gradient once for the
input and once for the weight. It is widened once for all of them. Copies are made in memory that is used again, since
new memory costs more than the copy: the system hands large blocks out page by page.

        q = x @ wq; k = x @ wk; v = x @ wv     ->     x widened once, each weight once

A copy serves as long as its original is alive, unmoved and of the same version, autograd's own witness of writes.
Inference tensors have no version and are widened anew each time.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn

ORIGINALS = 6
"""How many are kept: two others are multiplied, with theirs, between the uses of hidden states in backward."""
SMALLEST, LARGEST = 2**12, 2**24
"""Elements. Copying fewer is quicker than looking them up; of more than 64 MiB nothing is kept alive."""

Key = tuple[int, torch.Size]


class Widened:
    """Hands out float32 copies, to be read only, and valid until `ORIGINALS` others have been asked for."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Key, tuple[Tensor, int, Tensor, Tensor]] = OrderedDict()
        self._free: list[Tensor] = []

    def of(self, x: Tensor) -> Tensor:
        """The same numbers, shape and strides, in float32."""
        if not SMALLEST <= x.numel() <= LARGEST or type(x) not in (Tensor, nn.Parameter) or x.is_inference():
            return x.float()
        is_transposed = x.ndim == 2 and not x.is_contiguous() and x.stride() == (1, x.shape[0])
        if not (is_transposed or x.is_contiguous()):
            return x.float()
        shape = torch.Size((x.shape[1], x.shape[0])) if is_transposed else x.shape
        key = (x.data_ptr(), shape)
        wide = self._of_key(key, x)
        if wide is None:
            if len(self._kept) >= ORIGINALS:
                self._drop(next(iter(self._kept)))
            memory = self._memory(x.numel())
            wide = memory[: x.numel()].view(shape)
            wide.copy_(x.t() if is_transposed else x)
            self._kept[key] = (x, x._version, wide, memory)
        return wide.t() if is_transposed else wide

    def clear(self) -> None:
        """Drops everything."""
        self._kept.clear()
        self._free.clear()

    def _of_key(self, key: Key, x: Tensor) -> Tensor | None:
        if key not in self._kept:
            return None
        original, version, wide, _ = self._kept[key]
        # Sharded parameters give their memory away and keep their version.
        if original._version != version or original.untyped_storage()._cdata != x.untyped_storage()._cdata:
            self._drop(key)
            return None
        self._kept.move_to_end(key)
        return wide

    def _drop(self, key: Key) -> None:
        self._free.append(self._kept.pop(key)[3])

    def _memory(self, size: int) -> Tensor:
        """Of what was dropped, if that is large enough and not far too large."""
        for i, x in enumerate(self._free):
            if size <= x.numel() <= 2 * size:
                return self._free.pop(i)
        self._free.clear()
        return torch.empty(size, dtype=torch.float32)
