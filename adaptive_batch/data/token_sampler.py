"""Rows into batches that are filled to a budget of tokens: pure, no device, time close to linear in the rows."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from adaptive_batch.errors import SettingError

from .bin_packing import Limits, Rows, fill_batches, padded_by, rounded_up
from .order import row_order

logger = logging.getLogger("adaptive_batch")

HISTOGRAM_LINES = 10
HISTOGRAM_WIDTH = 40


@dataclass(frozen=True, eq=False)
class TokenBatchPlan:
    """The batches of an epoch: a sequence of lists of row numbers, held as tensors.

    Attributes:
        rows: int64 ``[kept rows]``, row numbers in the order of use, each once.
        starts: int64 ``[batches + 1]``, where each batch starts in `rows`; the last is the number of kept rows.
        dropped: int64, numbers of the rows that are in no batch (``long_rows="drop"``), each once.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    dropped: torch.Tensor

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> list[int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        start, end = self.starts[index % len(self) :][:2].tolist()
        batch: list[int] = self.rows[start:end].tolist()
        return batch

    @property
    def sizes(self) -> torch.Tensor:
        """Rows of each batch, int64 ``[batches]``."""
        return self.starts.diff()

    def tolist(self) -> list[list[int]]:
        """Returns all batches as lists of row numbers."""
        rows = self.rows.tolist()
        return [rows[start:end] for start, end in pairwise(self.starts.tolist())]

    def report(
        self,
        lengths: Sequence[int] | torch.Tensor,
        *,
        min_rows: int = 1,
        uniform_groups: int = 1,
        pad_to_multiple_of: int = 1,
    ) -> str:
        """Describes the batches: how full, how much padding, what was dropped, how many rows each.

        Args:
            lengths: as they were planned with; so are the others.

        Returns:
            Aligned text of several lines.
        """
        kept = _whole_numbers("lengths", lengths)[self.rows]
        sizes = self.sizes
        real = int(kept.sum())
        # Of a group, all batches are as long as its longest row.
        group_of_batch = torch.arange(len(self)).div_(uniform_groups, rounding_mode="floor")
        longest = torch.zeros(len(self), dtype=torch.int64)
        longest.scatter_reduce_(
            0, group_of_batch.repeat_interleave(sizes), rounded_up(kept, pad_to_multiple_of), "amax"
        )
        padded = int((longest[group_of_batch] * sizes).sum())
        per_batch = "none"
        if len(self):
            per_batch = f"{int(sizes.min())} / {int(sizes.median())} / {int(sizes.max())}"
        share = 1 - real / padded if padded else 0.0
        facts = (
            ("rows", f"{len(self.rows):,}"),
            ("batches", f"{len(self):,}"),
            ("real tokens", f"{real:,}"),
            ("padded tokens", f"{padded:,}"),
            ("padding", f"{share:.1%}"),
            ("dropped rows", f"{len(self.dropped):,}"),
            (f"batches below min_rows={min_rows}", f"{int((sizes < min_rows).sum()):,}"),
            ("rows per batch (min / median / max)", per_batch),
        )
        return "\n".join([*(f"{name:<36} {value:>20}" for name, value in facts), *_histogram(sizes)])


def batches_by_tokens(
    lengths: Sequence[int] | torch.Tensor,
    max_tokens: int,
    *,
    order: str = "dataloader",
    window: int | None = None,
    min_rows: int = 1,
    max_rows: int | None = None,
    seed: int = 0,
    epoch: int = 0,
    uniform_groups: int | None = 1,
    count: str = "padded",
    long_rows: str = "error",
    pad_to_multiple_of: int = 1,
    verbose: bool = False,
) -> list[list[int]]:
    """Puts the rows of an epoch into batches that are filled to a budget of tokens.

    Args:
        lengths: int ``[rows]``, tokens of each row.
        max_tokens: what a batch may hold.
        order, window, seed, epoch: in which order the rows are taken, see :func:`adaptive_batch.order.row_order`.
        verbose: log what came of it.
        min_rows, max_rows, uniform_groups, count, long_rows, pad_to_multiple_of: see :func:`plan_batches`; no
            `uniform_groups` is 1.

    Returns:
        Row numbers of each batch.

    Raises:
        SettingError: an argument cannot be used; it names the argument, its value and what would do.
    """
    lengths = _whole_numbers("lengths", lengths)
    uniform_groups = 1 if uniform_groups is None else uniform_groups
    plan = plan_batches(
        lengths,
        max_tokens,
        order=row_order(len(lengths), order=order, lengths=lengths, window=window, seed=seed, epoch=epoch),
        min_rows=min_rows,
        max_rows=max_rows,
        count=count,
        long_rows=long_rows,
        uniform_groups=uniform_groups,
        pad_to_multiple_of=pad_to_multiple_of,
    )
    if verbose:
        text = plan.report(
            lengths, min_rows=min_rows, uniform_groups=uniform_groups, pad_to_multiple_of=pad_to_multiple_of
        )
        logger.info("batches of %d tokens (%s):\n%s", max_tokens, count, text)
    return plan.tolist()


def plan_batches(
    lengths: Sequence[int] | torch.Tensor,
    max_tokens: int,
    *,
    order: torch.Tensor | None = None,
    min_rows: int = 1,
    max_rows: int | None = None,
    count: str = "padded",
    long_rows: str = "error",
    uniform_groups: int = 1,
    divisible: bool = False,
    pad_to_multiple_of: int = 1,
) -> TokenBatchPlan:
    """Plans batches that are filled to a budget of tokens; every row of `order` is in one of them, or listed as dropped.

    Rows are taken in order; a batch is closed when the next row would take it beyond `max_tokens` or `max_rows`. One
    that would then have too few rows stays open: rows that do not fit wait, and come first afterwards, while later rows that
    fit are added. At the end of the epoch what is left is combined, the longest with the shortest, and only rows for which
    no partner is left are in batches below `min_rows`. To have equal batches in a group comes before `min_rows`.

    Args:
        lengths: int ``[rows]``, tokens of each row, 1 or more.
        max_tokens: what a batch may hold.
        order: int64, row numbers in the order in which to take them, each at most once; None takes all as they come.
        min_rows: rows that a batch should have at least.
        max_rows: rows that a batch may have; None for no limit.
        count: ``padded`` counts rows x longest, ``real`` the sum of lengths.
        long_rows: what becomes of a row that alone is longer than `max_tokens`: ``error``, ``drop``, or ``alone``, a
            batch of its own.
        uniform_groups: batches ``i * g`` to ``i * g + g - 1`` have an equal number of rows, and padded to the longest row of
            all of them each is within `max_tokens` (counted ``real``, its own sum is). Where a group has a row that is
            ``alone``, all its batches have one row. The last group may have fewer batches.
        divisible: each batch but the last (group) has a multiple of 1/8 to 1/16 of its rows, a power of two, so that
            it divides into equal micro-batches; at most 1/8 fewer than would fit, unless that is below `min_rows`.
        pad_to_multiple_of: the longest row is rounded up to a multiple of this where padded tokens are counted.

    Returns:
        The batches.

    Raises:
        SettingError: an argument cannot be used, a row is too long, or the shortest `min_rows` rows do not fit in one
            batch.
    """
    lengths = _whole_numbers("lengths", lengths)
    if len(lengths) and int(lengths.min()) < 1:
        row = int(lengths.argmin())
        raise SettingError("lengths", int(lengths[row]), f"row {row} must have 1 token or more")
    limits = Limits(
        max_tokens=max_tokens,
        min_rows=min_rows,
        max_rows=sys.maxsize if max_rows is None else max_rows,
        count=count,
        long_rows=long_rows,
        uniform_groups=uniform_groups,
        pad_to_multiple_of=pad_to_multiple_of,
        divisible=divisible,
    )
    numbers = torch.arange(len(lengths)) if order is None else _checked_order(order, num_rows=len(lengths))
    sizes = lengths if order is None else lengths[numbers]
    rows = Rows(numbers, rounded_up(sizes, pad_to_multiple_of) if limits.padded else sizes)

    is_long = rows.sizes > max_tokens
    dropped = numbers[:0]
    if long_rows != "alone" and is_long.any():
        if long_rows == "error":
            row = int(numbers[is_long.to(torch.uint8).argmax()])
            others = int(is_long.sum()) - 1
            too = f", and {others} more are too long" if others else ""
            raise SettingError(
                "max_tokens",
                max_tokens,
                f"row {row} alone has {int(lengths[row])} tokens{padded_by(limits)}{too}; set "
                f"long_rows to drop or alone, or max_tokens to {int(rows.sizes.max())} or more",
            )
        dropped, rows = numbers[is_long], rows.pick(~is_long)
    return TokenBatchPlan(*fill_batches(rows, limits), dropped)


def _whole_numbers(key: str, values: Sequence[int] | torch.Tensor) -> torch.Tensor:
    tensor = torch.as_tensor(values if len(values) else torch.zeros(0, dtype=torch.int64))
    if tensor.ndim != 1 or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise SettingError(key, f"{tensor.dtype}{list(tensor.shape)}", "must be a list or 1-D tensor of whole numbers")
    return tensor.to(torch.int64)


def _checked_order(order: torch.Tensor, *, num_rows: int) -> torch.Tensor:
    order = _whole_numbers("order", order)
    if len(order):
        for row in (int(order.min()), int(order.max())):
            if not 0 <= row < num_rows:
                raise SettingError("order", row, f"must hold row numbers of 0 to {num_rows - 1}")
        times = torch.zeros(num_rows, dtype=torch.bool)
        times[order] = True
        if int(times.sum()) < len(order):
            row = int(order.bincount().argmax())
            raise SettingError("order", row, "must hold each row at most once")
    return order


def _histogram(sizes: torch.Tensor) -> list[str]:
    """Lines that show how many batches have how many rows."""
    if not len(sizes):
        return []
    least, most = int(sizes.min()), int(sizes.max())
    width = -(-(most - least + 1) // HISTOGRAM_LINES)
    counts = ((sizes - least).div_(width, rounding_mode="floor")).bincount().tolist()
    lines = []
    for number, batches in enumerate(counts):
        first, last = least + number * width, min(most, least + (number + 1) * width - 1)
        rows = f"{first} to {last} rows" if last > first else f"{first} rows"
        bar = "#" * -(-batches * HISTOGRAM_WIDTH // max(counts))
        lines.append(f"{rows:<24} {batches:>9,} {bar}")
    return ["batches of", *lines]
