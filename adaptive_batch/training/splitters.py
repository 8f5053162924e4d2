"""Split a batch by a function of the script, by documents, or by rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from adaptive_batch._util import count
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import RandomState

from .documents import DocumentsOfBatch, documents_of
from .parts import BatchSource, RowsOfBatch, SplitBatch, arrays_in


class CustomSplit:
    """Calls a script's own split function and checks its results.

    Args:
        split: function that returns the :class:`SplitBatch` of a batch.
    """

    def __init__(self, split: Callable[[Any], Any]) -> None:
        self._split = split

    def __call__(self, batch: Any) -> SplitBatch:
        """Return the split of a batch, which raises a SettingError if the part of all rows does not
        have all rows.

        Raises:
            SettingError: the function did not return a SplitBatch.
        """
        rows = self._split(batch)
        if not isinstance(rows, SplitBatch):
            remedy = "give a function that returns SplitBatch(num_rows, part)"
            raise SettingError("split", type(rows).__name__, remedy)

        def part(numbers: Sequence[int]) -> Any:
            some_rows = rows.part(list(numbers))
            # A single part, and the check before the first split, have all rows.
            if len(numbers) == rows.num_rows:
                self._check_all_rows(some_rows, batch, rows.num_rows)
            return some_rows

        return replace(rows, part=part)

    split_sample = __call__

    def _check_all_rows(self, all_rows: Any, batch: Any, num_rows: int) -> None:
        """Raise if a tensor in the part of all rows has more or fewer rows than in the batch."""
        tensors = {"a tensor": (batch, all_rows)}
        if isinstance(all_rows, Mapping) and isinstance(batch, Mapping):
            tensors = {key: (batch[key], all_rows[key]) for key in all_rows.keys() & batch.keys()}
        for key, pair in tensors.items():
            # Skip values that are no tensors, and tensors whose second dimension is the rows.
            have_rows_first = (
                isinstance(tensor, torch.Tensor)
                and tensor.dim()
                and tensor.shape[1:2] != (num_rows,)
                for tensor in pair
            )
            if all(have_rows_first) and len(pair[0]) != len(pair[1]):
                split = f"SplitBatch of {count(num_rows, 'row')}"
                remedy = (
                    f"in the part of all rows, {key} has {len(pair[1])} rows, but in the batch"
                    f" {len(pair[0])}; num_rows and part must cover the whole batch"
                )
                raise SettingError("split", split, remedy)


class RowSplitter:
    """Splits packed batches between documents, and other batches between rows.

    The first batch with several rows decides which keys are divided.

    Args:
        trims: whether unused columns are cut.
        keeps_rows: whether several packed rows are divided by rows, and not by documents.
    """

    def __init__(self, *, trims: bool, keeps_rows: bool = False) -> None:
        self._trims = trims
        self._keeps_rows = keeps_rows
        self._is_divided: dict[str, bool] = {}

    def __call__(self, batch: Any) -> RowsOfBatch | DocumentsOfBatch:
        """Return a batch as rows, and divide the same keys in later batches.

        Raises:
            SettingError: the number of rows is unknown.
        """
        rows = self.split_sample(batch, self._is_divided)
        # In a batch of one row, a first dimension of 1 does not show that a tensor has rows.
        if type(rows) is RowsOfBatch and rows.num_rows > 1:
            self._is_divided = rows.is_divided
        return rows

    def split_sample(
        self, batch: Any, is_divided: Mapping[str, bool] | None = None
    ) -> RowsOfBatch | DocumentsOfBatch:
        """Return a sample of a search as rows, which does not decide on keys of later batches."""
        documents = documents_of(batch)
        if documents is not None and not (self._keeps_rows and documents.num_packed_rows > 1):
            return documents
        return RowsOfBatch(batch, trims=self._trims, is_divided=is_divided or {})


def length_in_sample(
    sample: Callable[[int], Any], split: Callable[[Any], BatchSource], device: torch.device
) -> int:
    """Return the number of tokens of a sample of one row, of all documents if it is packed; 0 if
    unknown. Random numbers are restored.
    """
    with RandomState(device):
        try:
            rows = split(sample(1))
        except SettingError:
            # A batch without a tensor can be tried, but not split.
            return 0
        return (sum if rows.is_packed else max)(rows.lengths or [0])


def counted_sample(
    sample: Callable[[int], Any], split: Callable[[Any], BatchSource]
) -> Callable[[int], Any]:
    """Return a sample function that raises for a batch with fewer rows than requested.

    The number of rows of some batches is unknown. The function raises only if an earlier batch had
    the requested number of rows, or if the batch is not larger than one of fewer requested rows.
    """
    has_rows = False
    first: tuple[int, int] | None = None

    def make(num_rows: int) -> Any:
        nonlocal has_rows, first
        batch = sample(num_rows)
        try:
            rows = split(batch)
        except SettingError:
            # A batch without a tensor can be tried, but not split.
            return batch
        if rows.is_packed:
            return batch
        found = rows.num_rows
        has_rows |= found == num_rows
        size = sum(each.numel() for each in arrays_in(batch) if isinstance(each, torch.Tensor))
        first = first or (num_rows, size)
        is_constant = num_rows > first[0] and size == first[1]
        if found < num_rows and (has_rows or not found or is_constant):
            remedy = "return the requested number of rows; repeat the longest ones if necessary"
            raise SettingError("sample", f"sample({num_rows}) of {count(found, 'row')}", remedy)
        return batch

    return make
