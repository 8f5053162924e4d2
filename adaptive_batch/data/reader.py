"""Reads rows by number, in the order in which they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
        self._expect: Callable[[Iterable[int]], object] = getattr(
            dataset, "expect", lambda numbers: None
        )

    def begin(self) -> None:
        """Begin an epoch: draw the random number that torch's own loader draws then, as it does in
        torchtune's recipes.
        """
        iter(DataLoader(self._dataset, batch_size=None))
        self._expect([])

    def read(self, numbers: Sequence[int], *, following: Iterable[int] = ()) -> list[Any]:
        """Read some rows.

        Args:
            numbers: row numbers.
            following: row numbers that are likely to be read next.
        """
        rows = [self._dataset[number] for number in numbers]
        self._expect(following)
        return rows
