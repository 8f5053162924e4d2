"""Rows in, step batches out: each row once an epoch, in a known order, from any position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from .order import row_order


class RowStream:
    """Hands out the rows of an epoch, as many at a time as are asked for.

    The loader delivers rows, not batches, so the batch size can change at any step; the position is counted in rows, so
    resuming is exact across any change of batch size.

    Args:
        dataset: map-style; its rows are handed on as they are.
        shuffle: with the order ``dataloader``, False keeps the dataset's own order.
        seed: of the order.
        order: ``dataloader``: as torchtune's recipes, a permutation drawn anew for each epoch from `seed` and the epoch's
            number; or ``random`` or ``seqlen``, see :func:`adaptive_batch.order.row_order`.
        lengths: tokens of each row, `[rows]`; ``seqlen`` needs it.
        window: rows within which ``seqlen`` sorts; None for all.

    Attributes:
        position: rows of this epoch that have been handed out.
        taken: the numbers, in the dataset, of the rows that were handed out last.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        shuffle: bool,
        seed: int = 0,
        order: str = "dataloader",
        lengths: torch.Tensor | None = None,
        window: int | None = None,
    ) -> None:
        self._dataset = dataset
        self._sampler: DistributedSampler[Any] = DistributedSampler(dataset, 1, 0, shuffle=shuffle, seed=seed)
        self._order = order
        self._lengths = lengths
        self._window = window
        self._seed = seed
        self._rows: Iterator[Any] = iter(())
        self._numbers = torch.zeros(0, dtype=torch.int64)
        self.position = 0
        self.taken: list[int] = []

    def __len__(self) -> int:
        return len(self._sampler)

    def order(self, epoch: int) -> torch.Tensor:
        """Row numbers in the order of an epoch: int64, `[rows]`."""
        if self._order == "dataloader":
            self._sampler.set_epoch(epoch)
            return torch.tensor(list(self._sampler), dtype=torch.int64)
        return row_order(
            len(self),
            order=self._order,
            lengths=self._lengths,
            window=self._window,
            seed=self._seed,
            epoch=epoch,
        )

    def start_epoch(self, epoch: int, *, position: int = 0, rows: Sequence[int] | torch.Tensor | None = None) -> None:
        """Begin an epoch, or go on within it after `position` rows; `rows` are its row numbers if not those of `order`."""
        self._numbers = self.order(epoch) if rows is None else torch.as_tensor(rows)
        loader: DataLoader[Any] = DataLoader(
            self._dataset, batch_size=None, sampler=self._numbers[position:].tolist(), collate_fn=_as_it_is
        )
        self._rows = iter(loader)
        self.position = position
        self.taken = []

    def take(self, count: int) -> list[Any]:
        """The next `count` rows; fewer at the end of the epoch, none after it."""
        rows = list(islice(self._rows, count))
        self.taken = self._numbers[self.position : self.position + len(rows)].tolist()
        self.position += len(rows)
        return rows


def _as_it_is(row: Any) -> Any:
    return row
