"""Rows in, step batches out: each row once an epoch, in the sampler's order, from any position."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler


class RowStream:
    """Hands out the rows of an epoch, as many at a time as are asked for.

    The loader delivers rows, not batches, so the batch size can change at any step; the position is counted in rows, so
    resuming is exact across any change of batch size. The order is that of torchtune's recipes: a permutation drawn anew for
    each epoch from `seed` and the epoch's number.

    Args:
        dataset: map-style; its rows are handed on as they are.
        shuffle: False keeps the dataset's own order.
        seed: of the order.

    Attributes:
        position: rows of this epoch that have been handed out.
    """

    def __init__(self, dataset: Dataset[Any], *, shuffle: bool, seed: int = 0) -> None:
        self._dataset = dataset
        self._sampler: DistributedSampler[Any] = DistributedSampler(dataset, 1, 0, shuffle=shuffle, seed=seed)
        self._rows: Iterator[Any] = iter(())
        self.position = 0

    def __len__(self) -> int:
        return len(self._sampler)

    def start_epoch(self, epoch: int, *, position: int = 0) -> None:
        """Begin an epoch, or go on within it after `position` rows."""
        self._sampler.set_epoch(epoch)
        order = list(self._sampler)[position:]
        loader: DataLoader[Any] = DataLoader(self._dataset, batch_size=None, sampler=order, collate_fn=_as_it_is)
        self._rows = iter(loader)
        self.position = position

    def take(self, count: int) -> list[Any]:
        """The next `count` rows; fewer at the end of the epoch, none after it."""
        rows = list(islice(self._rows, count))
        self.position += len(rows)
        return rows


def _as_it_is(row: Any) -> Any:
    return row
