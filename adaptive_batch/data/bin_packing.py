"""Fills groups of batches with rows, one after the other, in time close to linear in the rows.

A *group* is as many batches in a row as `uniform_groups` says, all with an equal number of rows, 1 unless asked for. It
is filled a *unit* at a time, which is one row for each of its batches. Most plans are one pass in the given order.
Rows that can never share a batch with `min_rows` others are put apart first, since one of them in an open batch would
keep all others waiting; they come at the end of the epoch. Padded, `min_rows` of the other rows fit together whichever they
are; counted in real tokens a long row may have to wait for short ones, and that is the second way to fill.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from adaptive_batch.errors import SettingError

COUNTS = ("padded", "real")
LONG_ROWS = ("error", "drop", "alone")
CHUNK = 65_536  # rows that are Python numbers at one time: as tensors they take a quarter of the memory


@dataclass(frozen=True)
class Limits:
    """What batches must keep to, checked; see :func:`adaptive_batch.token_batches.plan_batches`."""

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


class Rows(NamedTuple):
    """Row numbers and what each takes of the budget, rounded up where padded: int64 ``[rows]``, in the order of use."""

    numbers: torch.Tensor
    sizes: torch.Tensor

    def pick(self, which: torch.Tensor | slice) -> Rows:
        return Rows(self.numbers[which], self.sizes[which])

    def plus(self, others: Rows) -> Rows:
        return Rows(torch.cat([self.numbers, others.numbers]), torch.cat([self.sizes, others.sizes]))


def rounded_up(sizes: torch.Tensor, multiple: int) -> torch.Tensor:
    """The sizes, each rounded up to a multiple."""
    return sizes if multiple == 1 else (sizes + (multiple - 1)).div_(multiple, rounding_mode="floor").mul_(multiple)


def padded_by(limits: Limits) -> str:
    """How a message calls the rounding."""
    return f" (padded to a multiple of {limits.pad_to_multiple_of})" if limits.pad_to_multiple_of > 1 else ""


def fill_batches(rows: Rows, limits: Limits) -> tuple[torch.Tensor, torch.Tensor]:
    """Fills batches with at least `min_rows`, and then with what is left.

    Returns:
        int64 ``[rows]``, row numbers in the order of use; and int64 ``[batches + 1]``, where each batch starts in them.
    """
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def fill(rows: Rows, min_rows: int, *, more_follow: bool) -> Rows:
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
    return torch.cat([used for used, _ in parts]), starts


def _without_partners(rows: Rows, limits: Limits) -> torch.Tensor:
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
                f"the {min_rows} shortest rows need {needed} {limits.count} tokens{padded_by(limits)}, and max_tokens is "
                f"{budget}; lower min_rows, or set max_tokens to {needed} or more",
            )
        most = budget // min_rows if limits.padded else budget - int(shortest[:-1].sum())
    if min_rows == limits.uniform_groups == 1:
        return torch.zeros_like(rows.sizes, dtype=torch.bool)
    return rows.sizes > most


def _any_fit(rows: Rows, limits: Limits, min_rows: int) -> bool:
    """Whether any `min_rows` rows fit in one batch, counted in real tokens."""
    longest = torch.topk(rows.sizes, min(min_rows, len(rows.sizes))).values
    return min_rows == 1 or int(longest.sum()) <= limits.max_tokens


def _fill_in_order(
    rows: Rows, limits: Limits, min_rows: int, *, more_follow: bool
) -> tuple[torch.Tensor, torch.Tensor, Rows]:
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


def _greedy(units: torch.Tensor, limits: Limits, min_rows: int) -> list[int]:
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
    rows: Rows, limits: Limits, min_rows: int, *, more_follow: bool
) -> tuple[torch.Tensor, torch.Tensor, Rows]:
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
    unit: list[int], group: list[list[int]], sums: list[int], sizes: list[int], limits: Limits, min_rows: int
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


def _may_follow(unit: list[int], first: list[int], sizes: list[int], limits: Limits, min_rows: int) -> bool:
    """Whether the longest row of a unit fits, as :func:`_added` says, in a group that has only `first`."""
    room = limits.max_tokens - max(sizes[row] for row in first)
    return max(sizes[row] for row in unit) * max(1, min_rows - 1) <= room


def _long_with_short(rows: Rows, limits: Limits) -> tuple[torch.Tensor, torch.Tensor, Rows]:
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


def _equal_batches(rows: Rows, limits: Limits) -> tuple[torch.Tensor, torch.Tensor] | None:
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
