"""The order in which the rows of an epoch come, and the sampler that hands them out, resumable at any row."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from adaptive_batch.errors import SettingError

ORDERS = ("dataloader", "random", "seqlen")


def row_order(
    num_rows: int,
    *,
    order: str = "dataloader",
    lengths: torch.Tensor | None = None,
    window: int | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> torch.Tensor:
    """Order the rows of an epoch; the same arguments give the same order on every rank and machine.

    Sorting by length costs the least padding, and its batches are the least random: each has rows of one length, and
    the lengths rise through the epoch. Within windows only neighbours are alike, and every epoch differs.

    Args:
        num_rows: rows of the epoch.
        order: ``dataloader`` keeps them as they come; ``random`` draws a permutation for each epoch; ``seqlen`` sorts
            from short to long, rows of equal length in an order drawn for each epoch.
        lengths: int tensor ``[rows]``, tokens of each row; needed by ``seqlen``.
        window: with ``seqlen``, shuffle the rows and sort only within each so many of them; None sorts the whole epoch.
        seed: of what is drawn.
        epoch: from 0; what is drawn differs from epoch to epoch.

    Returns:
        int64 tensor ``[rows]``: row numbers, each once.

    Raises:
        SettingError: `order` is unknown, `window` below 1, or ``seqlen`` has no length for each row.
    """
    if order not in ORDERS:
        raise SettingError("order", order, f"must be one of {', '.join(ORDERS)}")
    if window is not None and window < 1:
        raise SettingError("window", window, "must be 1 row or more, or None to sort the whole epoch")
    if order == "dataloader":
        return torch.arange(num_rows)
    # Hashed, as seed + epoch would repeat one seed's epochs under the next seed.
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    shuffled = torch.randperm(num_rows, generator=generator)
    if order == "random":
        return shuffled
    if lengths is None or len(lengths) != num_rows:
        given = None if lengths is None else f"{len(lengths)} of them"
        raise SettingError("lengths", given, f"order='seqlen' needs the length of each of the {num_rows} rows")
    keys = lengths.to(torch.int64)[shuffled]
    if window is not None and window < num_rows:
        keys += torch.arange(num_rows).div_(window, rounding_mode="floor").mul_(int(keys.max()) + 1)
    # Stable: rows of equal length stay as they were shuffled.
    return shuffled[torch.sort(keys, stable=True).indices]


class RowSampler:
    """Hand out the rows of an epoch, as many at a time as are requested.

    The loader delivers rows, not batches, so the batch size can change at any step; the position is counted in rows, so
    resuming is exact across any change of batch size.

    Args:
        dataset: map-style; its rows are returned as they are. ``expect`` of it, if it has that, is told which are likely next.
        shuffle: with the order ``dataloader``, False keeps the dataset's own order.
        order: ``dataloader``: as torchtune's recipes, a permutation drawn for each epoch from `seed` and the epoch's
            number; or ``random`` or ``seqlen``, see :func:`row_order`.
        seed, window: see :func:`row_order`.

    Attributes:
        position: rows of this epoch that have been handed out, to all ranks.
        taken: the numbers, in the dataset, of the rows that were handed out last, to all ranks.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        shuffle: bool,
        seed: int = 0,
        order: str = "dataloader",
        window: int | None = None,
    ) -> None:
        self._dataset = dataset
        self._expect: Callable[[list[int]], object] = getattr(dataset, "expect", lambda numbers: None)
        self._sampler: DistributedSampler[Any] = DistributedSampler(dataset, 1, 0, shuffle=shuffle, seed=seed)
        self._order = partial(row_order, len(dataset), order=order, window=window, seed=seed)
        self._is_dataloaders = order == "dataloader"
        self._requested: deque[int] = deque()
        self._rows: Iterator[Any] = iter(())
        self._numbers = torch.zeros(0, dtype=torch.int64)
        self.position = 0
        self.taken: list[int] = []

    def __len__(self) -> int:
        return len(self._sampler)

    def order(self, epoch: int, *, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """Return the row numbers in the order of an epoch: int64, `[rows]`; by the `lengths` of all rows where these decide it."""
        if not self._is_dataloaders:
            return self._order(epoch=epoch, lengths=lengths)
        self._sampler.set_epoch(epoch)
        return torch.tensor(list(self._sampler), dtype=torch.int64)

    def start_epoch(self, epoch: int, *, position: int = 0, rows: torch.Tensor | None = None) -> None:
        """Begin an epoch, or resume it after `position` rows; `rows` are its row numbers if not those of `order`."""
        self._numbers = self.order(epoch) if rows is None else rows
        self._requested.clear()
        # torch's own loader, as it draws a random number where it begins, and so do torchtune's recipes
        requested: Iterator[int] = iter(self._requested.popleft, None)
        loader: DataLoader[Any] = DataLoader(
            self._dataset, batch_size=None, sampler=requested, collate_fn=lambda row: row
        )
        self._rows = iter(loader)
        self.position, self.taken = position, []
        self._expect([])

    def next_numbers(self, count: int) -> list[int]:
        """Return the numbers of the next `count` rows, in their order; fewer at the end of the epoch, none after it."""
        numbers: list[int] = self._numbers[self.position : self.position + count].tolist()
        return numbers

    def take(self, count: int, *, only: Sequence[int] | None = None) -> list[Any]:
        """Read the next `count` rows of all ranks, or the ones at the positions `only` among them; fewer at the end of the epoch."""
        self.taken = self.next_numbers(count)
        self.position += len(self.taken)
        self._requested.extend(self.taken if only is None else [self.taken[position] for position in only])
        rows = [next(self._rows) for _ in range(len(self._requested))]
        following = self.next_numbers(count)
        self._expect(following if only is None else [following[i] for i in only if i < len(following)])
        return rows
