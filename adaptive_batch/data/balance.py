"""Load balance: the rows of a step are divided among ranks by pure functions, so that each rank
computes the same division.

Ranks wait for each other in every micro-batch, and all run as many as the rank with most. So a step
takes the sum of the largest first micro-batch of any rank, the largest second one, and so on.
Balancing reduces this sum.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import mul

import torch

from .layouts import MicroBatchLayout, MicroBatchLimit, spread_by_tokens

# Sizes of a wave's groups to try, in percent of the size if all waves were alike. Measured on
# lognormal lengths, this range makes steps 2% to 7% shorter. A range of twice the size would add
# 0.2% at most; half the range would lose 0.2% to 0.8%.
TRIED_PERCENT = range(68, 133, 4)


def balance_by_rows(num_rows: int, ranks: int) -> list[range]:
    """Divide rows in turn, as torch's DistributedSampler does; return for each rank its positions
    in the step, ascending.
    """
    return [range(rank, num_rows, ranks) for rank in range(ranks)]


def balance_by_tokens(
    lengths: Sequence[int] | torch.Tensor,
    ranks: int,
    limit: MicroBatchLimit,
    layout: MicroBatchLayout | None = None,
) -> list[list[int]]:
    """Divide rows so that ranks wait little for each other once each has cut its rows into
    micro-batches.

    By tokens, rows sorted by length are cut into a group for each micro-batch of each rank. The
    groups that run at the same time, a *wave*, are neighbours with nearly equal padded tokens, and
    each rank has one group of each wave. :func:`~adaptive_batch.data.micro_batches` may then cut a
    rank's rows into fewer groups, or into as many that cost no more. A rank has at most as many as
    the whole step would have on one rank, divided by the ranks and rounded up, which is optimal.

    Other layouts and units leave fewer choices:

    - packed, by tokens: each row, the longest first, goes to the rank that has the fewest tokens
      (Graham, 1969).
    - grouped, or packed by rows: rows sorted by length are dealt in turns that reverse, so that all
      ranks have rows of nearly the same lengths and cut them alike.
    - uniform ``lengths``, or by rows if a rank can run all of its rows at once: a rank has one
      group of neighbours.
    - uniform ``rows``, or ``both``: numbers of rows differ by one at most; by tokens, lengths are
      nearly the same.
    - by rows otherwise: micro-batches keep the order of the step, so rows are divided in turn.

    Args:
        lengths: tokens of each row of the step, over all ranks.
        ranks: number of ranks, 1 or more.
        limit: limit of each micro-batch.
        layout: layout of the micro-batches of a rank; None for the default.

    Returns:
        The rows of each rank: positions in the step, ascending; empty only if there are fewer rows
        than ranks.
    """
    layout = layout or MicroBatchLayout()
    in_turn = list(map(list, balance_by_rows(len(lengths), ranks)))
    if ranks == 1 or len(lengths) <= ranks:
        return in_turn
    if not layout.pads and limit.unit == "tokens":
        return spread_by_tokens(torch.as_tensor(lengths).tolist(), ranks)
    by_length = torch.sort(torch.as_tensor(lengths), descending=True, stable=True)
    order: list[int] = by_length.indices.tolist()
    real: list[int] = by_length.values.tolist()
    if not layout.is_usual:
        return [
            sorted(order[rank :: 2 * ranks] + order[2 * ranks - 1 - rank :: 2 * ranks])
            for rank in range(ranks)
        ]
    if layout.uniform in ("rows", "both"):
        if limit.unit == "rows":
            return in_turn
        return [sorted(order[rank::ranks]) for rank in range(ranks)]

    padded = layout.padded_lengths(real)
    # Computed once for each length; there are far fewer lengths than rows.
    rows_within = {length: layout.rows_within(limit, length) for length in set(real)}
    max_rows = [rows_within[length] for length in real]
    if layout.uniform is None and limit.unit == "tokens":
        num_waves = math.ceil(_fewest_groups(max_rows) / ranks)
    else:
        num_waves = 1
        micro_batches_each = math.ceil(len(order) / (ranks * max_rows[0]))
        if layout.uniform is None and micro_batches_each > 1:
            return in_turn
        max_rows = [micro_batches_each * rows for rows in max_rows]
    divided: list[list[int]] = [[] for _ in range(ranks)]
    for wave in _SortedRows(padded, max_rows).waves(num_waves, ranks):
        for positions, (start, end) in zip(divided, wave, strict=False):
            positions += order[start:end]
    return [sorted(positions) for positions in divided]


def _fewest_groups(max_rows: list[int]) -> int:
    """Return the number of groups if each has the most rows that it may have."""
    start = 0
    groups = 0
    while start < len(max_rows):
        start += max_rows[start]
        groups += 1
    return groups


class _SortedRows:
    """Rows, the longest first, to be cut into groups of neighbours.

    Args:
        lengths: padded tokens of each row.
        max_rows: for each row, the most rows of a group in which it is the longest.
    """

    def __init__(self, lengths: list[int], max_rows: list[int]) -> None:
        self._lengths = lengths
        self._max_rows = max_rows
        self._largest = max(map(mul, lengths, max_rows))
        self._tokens_before = [0, *accumulate(lengths)]

    def waves(self, num_waves: int, ranks: int) -> Iterator[list[tuple[int, int]]]:
        """Yield the start and end of each group of each wave: a group for each rank, or for each
        row if there are fewer rows than ranks.
        """
        start = 0
        for waves_left in range(num_waves, 0, -1):
            end, tokens = self._next_wave(start, waves_left, ranks)
            groups = []
            for groups_after in range(min(ranks, end - start) - 1, -1, -1):
                rows = min(tokens // self._lengths[start] or 1, self._max_rows[start])
                # Leave a row for each of the later groups.
                rows = min(rows, end - start - groups_after)
                groups.append((start, start + rows))
                start += rows
            yield groups

    def _next_wave(self, start: int, num_waves: int, ranks: int) -> tuple[int, int]:
        """Return the end of the next wave and the most tokens of its groups. They minimize the time
        of the remaining waves if the later ones are alike.
        """
        last = len(self._lengths)
        later = num_waves - 1
        alike = self._least_tokens(start, last, ranks * num_waves, at_most=self._largest)
        assert alike is not None, "this many full groups take all rows"
        if not later:
            return last, alike
        best = alike
        least_time = num_waves * alike
        for percent in TRIED_PERCENT:
            tokens = max(percent * alike // 100, self._lengths[start])
            end = self._reached(start, ranks, tokens)
            # With more tokens, the total time would not be less.
            at_most = (least_time - tokens - 1) // later
            later_tokens = self._least_tokens(end, last, ranks * later, at_most=at_most)
            if later_tokens is not None:
                best = tokens
                least_time = tokens + later * later_tokens
        return self._reached(start, ranks, best), best

    def _least_tokens(self, start: int, end: int, groups: int, *, at_most: int) -> int | None:
        """Return the fewest tokens of a group with which `groups` groups hold the rows from `start`
        to `end`; None if that is more than `at_most`.
        """
        mean = math.ceil((self._tokens_before[end] - self._tokens_before[start]) / groups)
        low = max(self._lengths[start], mean)
        high = at_most
        if high < low or self._reached(start, groups, high) < end:
            return None
        return bisect_left(
            range(high), end, lo=low, key=lambda tokens: self._reached(start, groups, tokens)
        )

    def _reached(self, start: int, groups: int, tokens: int) -> int:
        """Return the end of `groups` full groups."""
        lengths = self._lengths
        max_rows = self._max_rows
        last = len(self._lengths)
        for _ in range(groups):
            if start >= last:
                break
            rows = tokens // lengths[start] or 1
            # Not min(): most of the time of balancing is spent in this loop.
            start += rows if rows < max_rows[start] else max_rows[start]
        return min(start, last)
