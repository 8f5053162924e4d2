"""Rows into micro-batches: pure functions, no device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Row = TypeVar("Row")


def split_by_rows(rows: Sequence[Row], micro_batch_size: int) -> list[list[Row]]:
    """Splits the rows of a step batch into micro-batches of a number of rows.

    Args:
        rows: the rows in order; none gives no micro-batch.
        micro_batch_size: rows of each micro-batch, 1 or more.

    Returns:
        Consecutive pieces in order, each of `micro_batch_size` rows but the last, which may be shorter.

    Raises:
        ValueError: `micro_batch_size` is below 1.
    """
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size={micro_batch_size}: must be 1 or more")
    return [list(rows[start : start + micro_batch_size]) for start in range(0, len(rows), micro_batch_size)]
