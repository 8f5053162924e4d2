"""Rows in, step batches out: each row once an epoch, in a known order, from any position, and each read by one rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from .order import row_order


class RowSampler:
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
        position: rows of this epoch that have been handed out, to all ranks.
        taken: the numbers, in the dataset, of the rows that were handed out last, to all ranks.
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
        self._asked_for: deque[int] = deque()
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
        self._asked_for.clear()
        loader: DataLoader[Any] = DataLoader(
            self._dataset, batch_size=None, sampler=_AsAskedFor(self._asked_for), collate_fn=_as_it_is
        )
        self._rows = iter(loader)
        self.position = position
        self.taken = []

    def next_numbers(self, count: int) -> list[int]:
        """The numbers of the next `count` rows, in their order; fewer at the end of the epoch, none after it."""
        numbers: list[int] = self._numbers[self.position : self.position + count].tolist()
        return numbers

    def take(self, count: int, *, only: Sequence[int] | None = None) -> list[Any]:
        """The next `count` rows; fewer at the end of the epoch, none after it.

        Args:
            count: rows of all ranks.
            only: positions among them, of those to read; None for all.
        """
        self.taken = self.next_numbers(count)
        self.position += len(self.taken)
        self._asked_for.extend(self.taken if only is None else [self.taken[position] for position in only])
        return [next(self._rows) for _ in range(len(self._asked_for))]


class _AsAskedFor:
    """Hands the loader one number after another, as they are asked for."""

    def __init__(self, numbers: deque[int]) -> None:
        self._numbers = numbers

    def __iter__(self) -> Iterator[int]:
        while self._numbers:
            yield self._numbers.popleft()

    def __len__(self) -> int:
        return len(self._numbers)


def _as_it_is(row: Any) -> Any:
    return row
