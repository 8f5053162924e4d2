"""Rows into batches that are filled to a budget of tokens: pure, no device, time close to linear in the rows.

A *group* is as many batches in a row as `uniform_groups` says, all with an equal number of rows, 1 unless asked for. It
is filled a *unit* at a time, which is one row for each of its batches. Most plans are one pass in the given order.
Rows that can never share a batch with `min_rows` others are put apart first, since one of them in an open batch would
keep all others waiting; they come at the end of the epoch. Padded, `min_rows` of the other rows fit together whichever they
are; counted in real tokens a long row may have to wait for short ones, and that is the second way to fill.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from adaptive_batch.errors import SettingError
from adaptive_batch.order import row_order

logger = logging.getLogger("adaptive_batch")

COUNTS = ("padded", "real")
LONG_ROWS = ("error", "drop", "alone")
CHUNK = 65_536  # rows that are Python numbers at one time: as tensors they take a quarter of the memory
HISTOGRAM_LINES = 10
HISTOGRAM_WIDTH = 40


@dataclass(frozen=True, eq=False)
class TokenBatches:
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
            0, group_of_batch.repeat_interleave(sizes), _rounded_up(kept, pad_to_multiple_of), "amax"
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
) -> TokenBatches:
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
    limits = _Limits(
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
    rows = _Rows(numbers, _rounded_up(sizes, pad_to_multiple_of) if limits.padded else sizes)

    is_long = rows.sizes > max_tokens
    dropped = numbers[:0]
    if long_rows != "alone" and is_long.any():
        if long_rows == "error":
            row = int(numbers[is_long.to(torch.uint8).argmax()])
            others = int(is_long.sum()) - 1
            raise SettingError(
                "max_tokens",
                max_tokens,
                f"row {row} alone has {int(lengths[row])} tokens{_padded_by(limits)}, and {others} more are too long; set "
                f"long_rows to drop or alone, or max_tokens to {int(rows.sizes.max())} or more",
            )
        dropped, rows = numbers[is_long], rows.pick(~is_long)
    return _in_batches(rows, limits, dropped)


# --- arguments -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Limits:
    max_tokens: int
    min_rows: int
    max_rows: int
    count: str
    long_rows: str
    uniform_groups: int
    pad_to_multiple_of: int
    divisible: bool

    def __post_init__(self) -> None:
        for key in ("max_tokens", "min_rows", "max_rows", "uniform_groups", "pad_to_multiple_of"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SettingError(key, value, "must be a whole number, 1 or more")
        for key, words in (("count", COUNTS), ("long_rows", LONG_ROWS)):
            if getattr(self, key) not in words:
                raise SettingError(key, getattr(self, key), f"must be one of {', '.join(words)}")
        if self.min_rows > self.max_rows:
            raise SettingError("min_rows", self.min_rows, f"must not be above max_rows={self.max_rows}")

    @property
    def padded(self) -> bool:
        return self.count == "padded"

    def kept(self, rows: int, min_rows: int) -> int:
        """Rows of a batch that could hold `rows`: those, or with `divisible` at most an eighth fewer."""
        if not self.divisible:
            return rows
        fewer = rows - rows % max(1, 1 << max(0, rows.bit_length() - 4))  # 2 ** (floor(log2(rows)) - 3)
        return fewer if fewer >= min_rows else rows


class _Rows(NamedTuple):
    """Row numbers and what each takes of the budget, rounded up where padded: int64 ``[rows]``, in the order of use."""

    numbers: torch.Tensor
    sizes: torch.Tensor

    def pick(self, which: torch.Tensor | slice) -> _Rows:
        return _Rows(self.numbers[which], self.sizes[which])

    def plus(self, others: _Rows) -> _Rows:
        return _Rows(torch.cat([self.numbers, others.numbers]), torch.cat([self.sizes, others.sizes]))


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


def _rounded_up(sizes: torch.Tensor, multiple: int) -> torch.Tensor:
    return sizes if multiple == 1 else (sizes + (multiple - 1)).div_(multiple, rounding_mode="floor").mul_(multiple)


def _padded_by(limits: _Limits) -> str:
    return f" (padded to a multiple of {limits.pad_to_multiple_of})" if limits.pad_to_multiple_of > 1 else ""


# --- filling ---------------------------------------------------------------------------------------------------------


def _in_batches(rows: _Rows, limits: _Limits, dropped: torch.Tensor) -> TokenBatches:
    """Fills batches with at least `min_rows`, and then with what is left."""
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def fill(rows: _Rows, min_rows: int, *, more_follow: bool) -> _Rows:
        consecutive = limits.padded or (limits.uniform_groups == 1 and _any_fit(rows, limits, min_rows))
        way = _fill_in_order if consecutive else _fill_waiting
        used, batch_sizes, left = way(rows, limits, min_rows, more_follow=more_follow)
        parts.append((used, batch_sizes))
        return left

    apart = _without_partners(rows, limits)
    any_apart = bool(apart.any())
    left = fill(rows.pick(~apart) if any_apart else rows, limits.min_rows, more_follow=any_apart)
    if len(left.numbers) >= limits.min_rows > 1 and not limits.padded and limits.uniform_groups == 1:
        used, batch_sizes, left = _long_with_short(left, limits)
        parts.append((used, batch_sizes))
        left = fill(left, limits.min_rows, more_follow=any_apart)
    if any_apart:
        left = left.plus(rows.pick(apart))
    left = left.pick(torch.sort(left.sizes, descending=True, stable=True).indices)
    while len(left.numbers):
        last = _equal_batches(left, limits)
        if last is not None:
            parts.append(last)
            break
        left = fill(left, 1, more_follow=len(left.numbers) % limits.uniform_groups != 0)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat([sizes for _, sizes in parts]).cumsum(0)])
    return TokenBatches(torch.cat([used for used, _ in parts]), starts, dropped)


def _without_partners(rows: _Rows, limits: _Limits) -> torch.Tensor:
    """Marks the rows that not even the shortest others bring to `min_rows`, and those that are to be alone."""
    budget, min_rows = limits.max_tokens, limits.min_rows
    most = budget
    shortest = torch.topk(rows.sizes, min(min_rows, len(rows.sizes)), largest=False).values
    if min_rows > 1 and len(shortest) == min_rows and int(shortest[-1]) <= budget:
        needed = min_rows * int(shortest[-1]) if limits.padded else int(shortest.sum())
        if needed > budget:
            raise SettingError(
                "min_rows",
                min_rows,
                f"the {min_rows} shortest rows need {needed} {limits.count} tokens{_padded_by(limits)}, and max_tokens is "
                f"{budget}; lower min_rows, or set max_tokens to {needed} or more",
            )
        most = budget // min_rows if limits.padded else budget - int(shortest[:-1].sum())
    if min_rows == limits.uniform_groups == 1:
        return torch.zeros_like(rows.sizes, dtype=torch.bool)
    return rows.sizes > most


def _any_fit(rows: _Rows, limits: _Limits, min_rows: int) -> bool:
    """Whether any `min_rows` rows fit in one batch, counted in real tokens."""
    longest = torch.topk(rows.sizes, min(min_rows, len(rows.sizes))).values
    return min_rows == 1 or int(longest.sum()) <= limits.max_tokens


def _fill_in_order(
    rows: _Rows, limits: _Limits, min_rows: int, *, more_follow: bool
) -> tuple[torch.Tensor, torch.Tensor, _Rows]:
    """Fills batches with consecutive rows. Returns row numbers, rows of each batch, and the rows that are left."""
    groups = limits.uniform_groups
    units = rows.sizes
    if groups > 1:
        units = units[: len(units) // groups * groups].view(-1, groups).amax(1)
    filled = _greedy(units, limits, min_rows)
    if filled and filled[-1] < min_rows:
        # Any min_rows rows fit together here, so rows of the batch before will do.
        missing = min_rows - filled[-1]
        if len(filled) > 1 and filled[-2] - missing >= min_rows and not limits.divisible:
            filled[-2] -= missing
            filled[-1] += missing
        else:
            filled.pop()
    elif filled and (more_follow or len(units) * groups < len(rows.sizes)):
        filled[-1] = limits.kept(filled[-1], min_rows)
    sizes = torch.tensor(filled, dtype=torch.int64).repeat_interleave(groups)
    used = int(sizes.sum())
    return rows.numbers[:used], sizes, rows.pick(slice(used, None))


def _greedy(units: torch.Tensor, limits: _Limits, min_rows: int) -> list[int]:
    """How many units each group takes, one after the other; a unit that alone is over the budget is a group."""
    filled: list[int] = []
    rows = longest = total = position = 0
    for first in range(0, len(units), CHUNK):
        for size in units[first : first + CHUNK].tolist():
            while rows:
                tokens = (rows + 1) * (longest if longest > size else size) if limits.padded else total + size
                if tokens <= limits.max_tokens and rows < limits.max_rows:
                    break
                filled.append(limits.kept(rows, min_rows))
                rows -= filled[-1]
                longest = total = 0
                if rows:
                    again = units[position - rows : position]
                    longest, total = int(again.max()), int(again.sum())
            rows, longest, total = rows + 1, (longest if longest > size else size), total + size
            position += 1
    return [*filled, rows] if rows else filled


def _fill_waiting(
    rows: _Rows, limits: _Limits, min_rows: int, *, more_follow: bool
) -> tuple[torch.Tensor, torch.Tensor, _Rows]:
    """Like :func:`_fill_in_order`, but what does not fit waits for what does; counted in real tokens.

    Waiting units come first, and again once a group has enough; they are taken up to the first that does not fit, so each
    group looks at few of them in vain, and the time is in proportion to the rows. A group that has enough leaves to the first that waits what would fit with it.
    """
    groups = limits.uniform_groups
    sizes: list[int] = rows.sizes.tolist()
    waiting: deque[list[int]] = deque()
    used: list[int] = []
    filled: list[int] = []
    coming, tail = 0, len(sizes) // groups * groups
    while True:
        group: list[list[int]] = []
        sums = [0] * groups
        while waiting and _added(waiting[0], group, sums, sizes, limits, min_rows):
            waiting.popleft()
        while coming < tail:
            unit = list(range(coming, coming + groups))
            enough = len(group) >= min_rows
            if len(group) == min_rows:
                while waiting and _added(waiting[0], group, sums, sizes, limits, min_rows):
                    waiting.popleft()
            if enough and waiting and _may_follow(unit, waiting[0], sizes, limits, min_rows):
                break
            if not _added(unit, group, sums, sizes, limits, min_rows):
                if enough:
                    break
                waiting.append(unit)
            coming += groups
        is_last = coming == tail and not waiting
        kept = 0
        if len(group) >= min_rows:
            whole = is_last and tail == len(sizes) and not more_follow
            kept = len(group) if whole else limits.kept(len(group), min_rows)
            used += [row for batch in zip(*group[:kept], strict=True) for row in batch]
            filled += [kept] * groups
        waiting.extendleft(reversed(group[kept:]))
        if is_last or not kept:
            break
    left = [*(row for unit in waiting for row in unit), *range(tail, len(sizes))]
    return (
        rows.numbers[torch.tensor(used, dtype=torch.int64)],
        torch.tensor(filled, dtype=torch.int64),
        rows.pick(torch.tensor(left, dtype=torch.int64)),
    )


def _added(
    unit: list[int], group: list[list[int]], sums: list[int], sizes: list[int], limits: _Limits, min_rows: int
) -> bool:
    """Adds a unit to a group where it fits, its longest row to the batch with the fewest tokens.

    Up to `min_rows` a row fits where it takes no more than its share of what is left, so that others can follow.
    """
    if len(unit) == 1:
        placed = unit
    else:
        placed = [0] * len(unit)
        by_tokens = sorted(range(len(unit)), key=sums.__getitem__)
        for batch, row in zip(by_tokens, sorted(unit, key=sizes.__getitem__, reverse=True), strict=True):
            placed[batch] = row
    missing = max(1, min_rows - len(group))
    for tokens, row in zip(sums, placed, strict=True):
        if group and (len(group) == limits.max_rows or sizes[row] * missing > limits.max_tokens - tokens):
            return False
    group.append(placed)
    sums[:] = [tokens + sizes[row] for tokens, row in zip(sums, placed, strict=True)]
    return True


def _may_follow(unit: list[int], first: list[int], sizes: list[int], limits: _Limits, min_rows: int) -> bool:
    """Whether the longest row of a unit fits, as :func:`_added` says, in a group that has only `first`."""
    room = limits.max_tokens - max(sizes[row] for row in first)
    return max(sizes[row] for row in unit) * max(1, min_rows - 1) <= room


def _long_with_short(rows: _Rows, limits: _Limits) -> tuple[torch.Tensor, torch.Tensor, _Rows]:
    """Puts the longest row with the shortest ones to make `min_rows`, until any `min_rows` of the other rows fit.

    For pairs no other choice leaves fewer rows without a partner. Counted in real tokens.

    Returns:
        Row numbers, rows of each batch, and the rows that are in none.
    """
    ordered = torch.sort(rows.sizes, stable=True)
    before = [0, *accumulate(ordered.values.tolist())]  # tokens of so many shortest rows
    partners, budget = limits.min_rows - 1, limits.max_tokens
    low, high = 0, len(before) - 1
    used: list[int] = []
    while high - low > partners and before[high] - before[high - partners - 1] > budget:
        high -= 1
        if before[high + 1] - before[high] + before[low + partners] - before[low] <= budget:
            used += [high, *range(low, low + partners)]
            low += partners
    chosen = ordered.indices[torch.tensor(used, dtype=torch.int64)]
    is_left = torch.ones_like(rows.sizes, dtype=torch.bool)
    is_left[chosen] = False
    sizes = torch.full((len(used) // limits.min_rows,), limits.min_rows)
    return rows.numbers[chosen], sizes, rows.pick(is_left)


def _equal_batches(rows: _Rows, limits: _Limits) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The rows as one group of as few batches as can be; None where that is more than `uniform_groups`."""
    for batches in range(1, limits.uniform_groups + 1):
        each, over = divmod(len(rows.sizes), batches)
        if over or each > limits.max_rows:
            continue
        dealt = rows.sizes.view(each, batches)
        tokens = each * dealt.max() if limits.padded else dealt.sum(0).max()
        if each == 1 or int(tokens) <= limits.max_tokens:
            return rows.numbers.view(each, batches).T.flatten(), torch.full((batches,), each)
    return None


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
