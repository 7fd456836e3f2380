"""Which row comes when, and a loader that can go on from where it was.

The order of training rows is a pure function of (seed, epoch, index): the same for any number of workers, cut
disjointly over ranks, and the same after a resume as without one.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from datamodules.rows import NO_ROW, PackedRows
from modules.batch import PackedBatch


class RowOrder(Protocol):
    """Rows one after another for as long as the loader runs; numpy arrays are such."""

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice, /) -> np.ndarray: ...


class TrainingOrder:
    """`total` rows: every row once in each epoch, each epoch in an order of its own.

    Epochs live in here only. The loader runs through all of them in one go, so nothing depends on Lightning's epochs.
    """

    def __init__(self, rows: int, *, total: int, seed: int) -> None:
        self.rows, self.total, self.seed = rows, total, seed
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(self.rows)

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, span: slice, /) -> np.ndarray:
        start, stop, step = span.indices(self.total)
        index = np.arange(start, stop, step)
        epoch = index // self.rows
        return np.concatenate(
            [index[:0], *(self._epoch(int(e))[index[epoch == e] % self.rows] for e in np.unique(epoch))]
        )


def validation_order(rows: int, *, world_size: int) -> np.ndarray:
    """Every row once, filled up with rows of padding so that all ranks get equally many batches."""
    return np.pad(np.arange(rows), (0, -rows % world_size), constant_values=NO_ROW)


class RowLoader:
    """Batches of rows in a given order, resumable at any batch.

    Batch b of all ranks together is order[b * R * W : (b + 1) * R * W] with R `rows_per_batch` and W `world_size`;
    rank r takes every W-th of those rows, from the r-th on. So ranks never share a row, and W ranks of R rows see in
    each step what one rank of R * W rows would.

        order 5 2 4 0 1 3, R = 1, W = 2        rank 0: [5] [4] [1]    rank 1: [2] [0] [3]

    It holds torch's DataLoader instead of being one, since Lightning puts a sampler of its own into DataLoaders when
    there are several ranks. Where it stands is kept with the DataModule's state and not offered to Lightning as the
    loader's own, which is forgotten where the loader is made before the loops are restored, as for a scheduler that
    asks how many steps there will be.

    Args:
        rows_given: goes on after so many rows of the order, counted over all ranks.
    Raises:
        ValueError: `rows_given` stands between two of this loader's batches.
    """

    def __init__(
        self,
        rows: PackedRows,
        order: RowOrder,
        *,
        rows_per_batch: int,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        rows_given: int = 0,
    ) -> None:
        assert len(order) % world_size == 0, "ranks would get different numbers of rows"
        self.rows, self.order = rows, order
        self.rows_per_step, self.rank, self.world_size = rows_per_batch * world_size, rank, world_size
        self.workers = workers
        if rows_given % self.rows_per_step and rows_given != len(order):
            raise ValueError(
                f"The checkpoint stands after {rows_given} rows, which is no whole number of batches of "
                f"{self.rows_per_step} rows (trainer.rows_per_batch x devices). Resume with the batch size of the run."
            )
        self.rows_given = rows_given
        """Rows given to the training loop, over all ranks; not what workers have made ahead."""
        self._resuming = rows_given > 0

    def __len__(self) -> int:
        """Batches from the very start to the end, also after a resume."""
        return -(-len(self.order) // self.rows_per_step)

    def __iter__(self) -> Iterator[PackedBatch]:
        # Lightning calls iter() once or twice before it asks for a batch: only a batch given ends the resuming.
        if not self._resuming:
            self.rows_given = 0
        return self._batches(self.rows_given)

    def _batches(self, start: int) -> Iterator[PackedBatch]:
        loader = DataLoader(
            self.rows,
            sampler=_Batches(self, start),
            batch_size=None,  # the sampler's items are whole batches of row numbers
            collate_fn=_unchanged,
            num_workers=self.workers,  # not kept for a next pass, since a training is one pass
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # its own, so that starting workers leaves the model's random numbers alone
        )
        for batch in loader:
            self._resuming = False
            start = min(start + self.rows_per_step, len(self.order))
            self.rows_given = start
            yield batch


class _Batches(Sampler[np.ndarray]):
    """Row numbers of this rank's batches, from row `start` of the order on."""

    def __init__(self, loader: RowLoader, start: int) -> None:
        self.loader, self.start = loader, start

    def __iter__(self) -> Iterator[np.ndarray]:
        loader = self.loader
        for begin in range(self.start, len(loader.order), loader.rows_per_step):
            yield loader.order[begin : begin + loader.rows_per_step][loader.rank :: loader.world_size]


def _unchanged(batch: Any) -> Any:
    return batch
