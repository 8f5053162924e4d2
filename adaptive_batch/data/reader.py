"""Reads rows by number, in the order in which they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader


class RowReader:
    """Reads the rows of a dataset in this process, a step at a time, so that a step may have any
    number of them.

    Args:
        dataset: map-style; its rows are returned as they are. If it has ``expect``, it is told
            which rows are likely next.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._expect: Callable[[list[int]], object] = getattr(
            dataset, "expect", lambda numbers: None
        )
        self._requested: deque[int] = deque()
        self._rows: Iterator[Any] | None = None

    def begin(self) -> None:
        """Begin an epoch by torch's own loader, which draws a random number then, as it does in
        torchtune's recipes.
        """
        self._requested.clear()
        requested: Iterator[int] = iter(self._requested.popleft, None)
        loader: DataLoader[Any] = DataLoader(
            self._dataset, batch_size=None, sampler=requested, collate_fn=lambda row: row
        )
        self._rows = iter(loader)
        self._expect([])

    def read(self, numbers: Sequence[int], *, following: Sequence[int] = ()) -> list[Any]:
        """Read some rows.

        Args:
            numbers: row numbers.
            following: row numbers that are likely to be read next.
        """
        if self._rows is None:
            rows = [self._dataset[number] for number in numbers]
        else:
            self._requested.extend(numbers)
            rows = [next(self._rows) for _ in numbers]
        self._expect(list(following))
        return rows
