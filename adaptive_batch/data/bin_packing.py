"""Greedy bin packing: rows into batches of a budget of tokens, in time close to linear in the rows.

Most plans are one pass in the given order. Rows that can never share a batch with `min_rows` others
are put aside first, since one of them in an open batch would keep all others waiting; they come at
the end of the epoch. Padded, `min_rows` of the other rows fit together whichever they are; counted
in real tokens a long row may have to wait for short ones, and that is the second way to fill.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from adaptive_batch._util import check_choice, check_whole
from adaptive_batch.errors import SettingError

COUNTS = ("padded", "real")
LONG_ROWS = ("error", "drop", "alone")
# Rows that are Python numbers at one time: as tensors they take a quarter of the memory.
CHUNK = 65_536


@dataclass(frozen=True)
class Limits:
    """What batches must keep to, checked; see :func:`~adaptive_batch.data.plan_batches`."""

    max_tokens: int
    min_rows: int
    max_rows: int
    count: str
    long_rows: str
    divisible: bool

    def __post_init__(self) -> None:
        for key in ("max_tokens", "min_rows", "max_rows"):
            # sys.maxsize is no limit.
            check_whole(key, getattr(self, key), most=sys.maxsize)
        for key, words in (("count", COUNTS), ("long_rows", LONG_ROWS)):
            check_choice(key, getattr(self, key), words)
        if self.min_rows > self.max_rows:
            raise SettingError(
                "min_rows", self.min_rows, f"must not be above the most rows, {self.max_rows}"
            )

    @property
    def padded(self) -> bool:
        """Whether padded tokens are counted: rows x longest."""
        return self.count == "padded"

    def kept(self, rows: int, min_rows: int) -> int:
        """Return the rows of a batch that could hold `rows`: those, or with `divisible` at most an
        eighth fewer.
        """
        if not self.divisible:
            return rows
        # An eighth of the rows at most is left: 2 ** (floor(log2(rows)) - 3).
        multiple = 1 << max(0, rows.bit_length() - 4)
        fewer = rows - rows % multiple
        return fewer if fewer >= min_rows else rows


class Rows(NamedTuple):
    """Row numbers and their lengths in tokens: int64 ``[rows]``, in the order of use."""

    numbers: torch.Tensor
    sizes: torch.Tensor

    def pick(self, which: torch.Tensor | slice) -> Rows:
        return Rows(self.numbers[which], self.sizes[which])


# Row numbers in the order of use, and the rows of each batch.
Packed = tuple[torch.Tensor, torch.Tensor]


def fill_batches(rows: Rows, limits: Limits) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill batches with at least `min_rows`, then with what is left.

    Returns:
        int64 ``[rows]``, row numbers in the order of use; and int64 ``[batches + 1]``, where each
        batch starts in them.
    """
    batches: list[Packed] = []

    def fill(rows: Rows, min_rows: int, *, more_follow: bool) -> Rows:
        fill_rows = _fill_waiting
        if limits.padded or _any_fit(rows, limits, min_rows):
            fill_rows = _fill_in_order
        packed, left = fill_rows(rows, limits, min_rows, more_follow=more_follow)
        batches.append(packed)
        return left

    aside = _without_partners(rows, limits)
    any_aside = bool(aside.any())
    left = fill(rows.pick(~aside) if any_aside else rows, limits.min_rows, more_follow=any_aside)
    if len(left.numbers) >= limits.min_rows > 1 and not limits.padded:
        packed, left = _long_with_short(left, limits)
        batches.append(packed)
        left = fill(left, limits.min_rows, more_follow=any_aside)
    if any_aside:
        long = rows.pick(aside)
        left = Rows(torch.cat([left.numbers, long.numbers]), torch.cat([left.sizes, long.sizes]))
    left = left.pick(torch.sort(left.sizes, descending=True, stable=True).indices)
    while len(left.numbers):
        # All of them, also where `divisible` would keep some back.
        if _fit_together(left, limits):
            batches.append((left.numbers, torch.tensor([len(left.numbers)])))
            break
        left = fill(left, 1, more_follow=False)
    starts = torch.cat(
        [torch.zeros(1, dtype=torch.int64), torch.cat([sizes for _, sizes in batches]).cumsum(0)]
    )
    return torch.cat([numbers for numbers, _ in batches]), starts


def _without_partners(rows: Rows, limits: Limits) -> torch.Tensor:
    """Mark the rows that not even the shortest others bring to `min_rows`, and those longer than
    the budget.
    """
    budget = limits.max_tokens
    min_rows = limits.min_rows
    if min_rows == 1:
        return torch.zeros_like(rows.sizes, dtype=torch.bool)
    max_size = budget
    shortest = torch.topk(rows.sizes, min(min_rows, len(rows.sizes)), largest=False).values
    if len(shortest) == min_rows and int(shortest[-1]) <= budget:
        needed = int(shortest.sum())
        max_size = budget - int(shortest[:-1].sum())
        if limits.padded:
            needed = min_rows * int(shortest[-1])
            max_size = budget // min_rows
        if needed > budget:
            raise SettingError(
                "min_rows",
                min_rows,
                f"the {min_rows} shortest rows need {needed} {limits.count} tokens, and {budget}"
                " are allowed; lower one, or raise the other",
            )
    return rows.sizes > max_size


def _any_fit(rows: Rows, limits: Limits, min_rows: int) -> bool:
    """Return whether any `min_rows` rows fit in one batch, counted in real tokens."""
    longest = torch.topk(rows.sizes, min(min_rows, len(rows.sizes))).values
    return min_rows == 1 or int(longest.sum()) <= limits.max_tokens


def _fit_together(rows: Rows, limits: Limits) -> bool:
    """Return whether the rows are one batch; a single row always is."""
    count = len(rows.sizes)
    tokens = count * rows.sizes.max() if limits.padded else rows.sizes.sum()
    return count == 1 or (count <= limits.max_rows and int(tokens) <= limits.max_tokens)


def _fill_in_order(
    rows: Rows, limits: Limits, min_rows: int, *, more_follow: bool
) -> tuple[Packed, Rows]:
    """Fill batches with consecutive rows; return them, and the rows that are left."""
    filled = _greedy(rows.sizes, limits, min_rows)
    if filled and filled[-1] < min_rows:
        # any min_rows rows fit together here, so rows of the batch before can fill it up
        missing = min_rows - filled[-1]
        if len(filled) > 1 and filled[-2] - missing >= min_rows and not limits.divisible:
            filled[-2] -= missing
            filled[-1] += missing
        else:
            filled.pop()
    elif filled and more_follow:
        filled[-1] = limits.kept(filled[-1], min_rows)
    used = sum(filled)
    return (rows.numbers[:used], torch.tensor(filled, dtype=torch.int64)), rows.pick(
        slice(used, None)
    )


def _greedy(sizes: torch.Tensor, limits: Limits, min_rows: int) -> list[int]:
    """Return how many rows each batch takes, one after the other; a row that alone is over the
    budget is a batch.
    """
    filled: list[int] = []
    rows = longest = total = position = 0
    for first in range(0, len(sizes), CHUNK):
        for size in sizes[first : first + CHUNK].tolist():
            while rows:
                tokens = (
                    (rows + 1) * (longest if longest > size else size)
                    if limits.padded
                    else total + size
                )
                if tokens <= limits.max_tokens and rows < limits.max_rows:
                    break
                filled.append(limits.kept(rows, min_rows))
                rows -= filled[-1]
                longest = 0
                total = 0
                if rows:
                    kept_back = sizes[position - rows : position]
                    longest = int(kept_back.max())
                    total = int(kept_back.sum())
            rows = rows + 1
            longest = longest if longest > size else size
            total = total + size
            position += 1
    if rows:
        filled.append(rows)
    return filled


def _fill_waiting(
    rows: Rows, limits: Limits, min_rows: int, *, more_follow: bool
) -> tuple[Packed, Rows]:
    """Fill as :func:`_fill_in_order`, but rows that do not fit wait for others that do.

    Counted in real tokens. Waiting rows come first, and again once a batch has enough; they are
    taken up to the first that does not fit, so each batch looks at few of them in vain, and the
    time is in proportion to the rows. A batch that has enough leaves to the first that waits what
    would fit with it.
    """
    sizes: list[int] = rows.sizes.tolist()
    waiting: deque[int] = deque()
    used: list[int] = []
    filled: list[int] = []
    coming = 0
    while True:
        batch = _OpenBatch(limits.max_tokens, limits.max_rows, min_rows)
        while waiting and batch.add(waiting[0], sizes):
            waiting.popleft()
        while coming < len(sizes):
            enough = len(batch.rows) >= min_rows
            if len(batch.rows) == min_rows:
                while waiting and batch.add(waiting[0], sizes):
                    waiting.popleft()
            if enough and waiting:
                room = limits.max_tokens - sizes[waiting[0]]
                # It fits in the batch of the first that waits.
                if sizes[coming] * max(1, min_rows - 1) <= room:
                    break
            if not batch.add(coming, sizes):
                if enough:
                    break
                waiting.append(coming)
            coming += 1
        is_last = coming == len(sizes) and not waiting
        kept = 0
        if len(batch.rows) >= min_rows:
            kept = len(batch.rows)
            if more_follow or not is_last:
                kept = limits.kept(len(batch.rows), min_rows)
            used += batch.rows[:kept]
            filled.append(kept)
        waiting.extendleft(reversed(batch.rows[kept:]))
        if is_last or not kept:
            break
    packed = (
        rows.numbers[torch.tensor(used, dtype=torch.int64)],
        torch.tensor(filled, dtype=torch.int64),
    )
    return packed, rows.pick(torch.tensor(waiting, dtype=torch.int64))


class _OpenBatch:
    """A batch that is being filled, counted in real tokens."""

    def __init__(self, max_tokens: int, max_rows: int, min_rows: int) -> None:
        self._tokens_left = max_tokens
        self._max_rows = max_rows
        self._min_rows = min_rows
        self.rows: list[int] = []

    def add(self, row: int, sizes: list[int]) -> bool:
        """Add a row if it fits; return whether it did.

        Up to `min_rows` it may take its share of what is left, so that others can follow.
        """
        missing = max(1, self._min_rows - len(self.rows))
        if self.rows and (
            len(self.rows) == self._max_rows or sizes[row] * missing > self._tokens_left
        ):
            return False
        self.rows.append(row)
        self._tokens_left -= sizes[row]
        return True


def _long_with_short(rows: Rows, limits: Limits) -> tuple[Packed, Rows]:
    """Put the longest row with the shortest ones, until any `min_rows` of the other rows fit.

    For pairs no other choice leaves fewer rows without a partner. Counted in real tokens.
    """
    ordered = torch.sort(rows.sizes, stable=True)
    # Tokens of so many shortest rows.
    tokens_of = [0, *accumulate(ordered.values.tolist())]
    partners = limits.min_rows - 1
    budget = limits.max_tokens
    low = 0
    high = len(tokens_of) - 1
    used: list[int] = []
    # Until the longest rows that are left fit together.
    while high - low > partners and tokens_of[high] - tokens_of[high - partners - 1] > budget:
        high -= 1
        longest = tokens_of[high + 1] - tokens_of[high]
        shortest = tokens_of[low + partners] - tokens_of[low]
        # A row that fits with no partners is left for a later batch.
        if longest + shortest <= budget:
            used += [high, *range(low, low + partners)]
            low += partners
    chosen = ordered.indices[torch.tensor(used, dtype=torch.int64)]
    is_left = torch.ones_like(rows.sizes, dtype=torch.bool)
    is_left[chosen] = False
    sizes = torch.full((len(used) // limits.min_rows,), limits.min_rows)
    return (rows.numbers[chosen], sizes), rows.pick(is_left)
