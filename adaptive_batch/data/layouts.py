"""The division of the rows of a step: among ranks, and by layouts and limits into micro-batches.

These are pure functions, so that each rank computes the same division. Ranks wait for each other in
every micro-batch, and all run as many as the rank with most. So a step takes the sum of the largest
first micro-batch of any rank, the largest second one, and so on. Balancing reduces this sum.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapreplace
from itertools import accumulate, pairwise
from operator import mul
from typing import TypeVar

import torch

from adaptive_batch._util import count, round_up

Row = TypeVar("Row")

# Kinds of layouts by their names in the configuration, see MicroBatchLayout.
LAYOUT_KINDS = ("padded", "grouped", "packed")
UNIFORM = ("rows", "lengths", "both")
NO_LIMIT = sys.maxsize

# Sizes of a wave's groups to try, in percent of the size if all waves were alike. Measured on
# lognormal lengths, this range makes steps 2% to 7% shorter. A range of twice the size would add
# 0.2% at most; half the range would lose 0.2% to 0.8%.
TRIED_PERCENT = range(68, 133, 4)


@dataclass(frozen=True)
class MicroBatchLimit:
    """Limit of a micro-batch.

    Attributes:
        amount: most rows or tokens, 1 or more; :data:`NO_LIMIT` for no limit.
        unit: ``rows``, or ``tokens``: padded tokens, rows x longest.
    """

    amount: int
    unit: str = "rows"

    def __str__(self) -> str:
        return self.describe()

    def describe(self, noun: str = "row") -> str:
        """Describe the limit; `noun` is the name of a row."""
        noun = {"rows": noun, "tokens": "padded token"}[self.unit]
        return f"all {noun}s" if self.amount == NO_LIMIT else count(self.amount, noun)

    def fullest(self, pieces: Sequence[MicroBatch]) -> MicroBatch:
        """Return the micro-batch that uses most of the limit."""

        def fullness(piece: MicroBatch) -> tuple[int, int]:
            rows = len(piece.rows)
            # By tokens, all of several rows are alike. One row comes last, as it cannot be split.
            if self.unit == "tokens":
                rows = min(2, rows)
            return rows, piece.run_tokens

        return max(pieces, key=fullness)


@dataclass(frozen=True)
class MicroBatchTime:
    """Model of the time of forward and backward of a micro-batch, in seconds if it was measured,
    else in any unit.

    Attributes:
        fixed: constant time: launching kernels, gathering and reducing parameters.
        token: time per token, padding included.
    """

    # The time of this many tokens; the order of magnitude on CPUs and GPUs.
    fixed: float = 256.0
    token: float = 1.0


@dataclass(frozen=True)
class MicroBatchLayout:
    """Layout of the rows in a micro-batch, and constraints on the shapes of micro-batches.

    Attributes:
        kind: ``padded``: rows are padded to the longest, and there are as few micro-batches as can
            be, of nearly equal size; ``grouped``: also padded, but rows are sorted by length and
            cut for the least time; ``packed``: rows are concatenated, without padding.
        time: model of the time of a micro-batch.
        uniform: ``rows``: the same number of rows in all micro-batches of a step; ``lengths``:
            padded to one length; ``both``; or None.
        pad_to_multiple_of: padded lengths are rounded up to a multiple of it.
        longest: most tokens of a row that the model takes, which rounding never exceeds; None for
            no limit.
        shortest: rows are padded to this many tokens at least.
    """

    uniform: str | None = None
    pad_to_multiple_of: int = 1
    longest: int | None = None
    shortest: int = 1
    kind: str = "padded"
    time: MicroBatchTime = field(default_factory=MicroBatchTime)

    @property
    def pads(self) -> bool:
        """True if the rows of a micro-batch are padded to the longest."""
        return self.kind != "packed"

    def keeps_order(self, limit: MicroBatchLimit) -> bool:
        """Return whether rows stay in their order, whatever their lengths."""
        return (
            limit.unit == "rows"
            and self.kind != "grouped"
            and self.uniform not in ("lengths", "both")
        )

    def padded(self, length: int) -> int:
        """Return the tokens that rows of up to `length` tokens are padded to, at least 1."""
        needed = max(1, self.shortest, length)
        rounded = round_up(needed, self.pad_to_multiple_of)
        if self.longest is None:
            return rounded
        return max(needed, min(rounded, self.longest))

    def padded_lengths(self, lengths: Sequence[int]) -> list[int]:
        """Return the length that each row is padded to."""
        # The rows of a step have few different lengths.
        padded = {length: self.padded(length) for length in set(lengths)}
        return [padded[length] for length in lengths]

    def run_tokens(self, lengths: Sequence[int]) -> int:
        """Return the tokens that a micro-batch of these rows runs: their sum, or with padding rows
        x longest.
        """
        if self.pads:
            return len(lengths) * self.padded(max(lengths, default=0))
        return sum(lengths)

    def amount(self, rows: int, length: int, *, unit: str) -> int:
        """Return the amount of a limit that `rows` rows of `length` tokens take, in a unit."""
        if unit == "rows":
            return rows
        return self.run_tokens([length] * rows)

    def rows_within(self, limit: MicroBatchLimit, length: int) -> int:
        """Return how many rows of `length` tokens a micro-batch may hold; one row is always
        allowed.
        """
        rows = limit.amount
        if limit.unit == "tokens":
            rows //= self.run_tokens([length])
        return max(1, rows)


@dataclass(frozen=True)
class MicroBatch:
    """Rows that are run at once.

    Attributes:
        rows: their positions in the step, in order.
        length: tokens that each is padded to; without padding the mean, rounded up.
        own_lengths: tokens of each row in a layout that does not pad; else empty.
    """

    rows: list[int]
    length: int
    own_lengths: tuple[int, ...] = ()

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens that are run of each row, padding included."""
        return self.own_lengths or [self.length] * len(self.rows)

    @property
    def run_tokens(self) -> int:
        """Tokens that are run, padding included."""
        return sum(self.own_lengths) or len(self.rows) * self.length

    @property
    def size(self) -> int:
        """Tokens that are run; the number of rows if their lengths are not known."""
        return self.run_tokens or len(self.rows)


def split_by_rows(rows: Sequence[Row], micro_batch_size: int) -> list[list[Row]]:
    """Split rows, in their order, into the fewest micro-batches of at most `micro_batch_size` rows;
    their sizes differ by one row at most, so that ranks finish together and BatchNorm seldom meets
    a rest of one row.
    """
    number = math.ceil(len(rows) / micro_batch_size)
    ends = [math.ceil(end * len(rows) / max(1, number)) for end in range(number + 1)]
    return [list(rows[begin:end]) for begin, end in pairwise(ends)]


def micro_batches(
    lengths: Sequence[int], limit: MicroBatchLimit, layout: MicroBatchLayout | None = None
) -> list[MicroBatch]:
    """Split the rows of a step into micro-batches within a limit, in a layout.

    Padded and packed micro-batches are few and of nearly equal size. By rows they are the fewest,
    and rows keep their order. By tokens padded ones are the fewest, of rows of similar length, and
    packed ones are as few as first-fit decreasing finds. Grouped micro-batches take the least time
    that the layout models. A row that alone is above the limit is a micro-batch by itself. If rows
    leave their order, the micro-batches with the most tokens come first.

    Args:
        lengths: tokens of each row of the step.
        limit: limit of each micro-batch.
        layout: layout of the micro-batches; None for the default.
    """
    layout = layout or MicroBatchLayout()
    if not lengths:
        return []
    # A short cut for most steps.
    if layout.kind == "padded" and limit.unit == "rows" and len(lengths) <= limit.amount:
        return [MicroBatch(list(range(len(lengths))), layout.padded(max(lengths)))]
    # Every micro-batch is padded to at least this length.
    least_length = max(lengths) if layout.uniform in ("lengths", "both") else 0
    pieces = []
    for rows in _divide(lengths, limit, layout):
        own_lengths = tuple(lengths[row] for row in rows)
        if layout.pads:
            length = layout.padded(max(least_length, *own_lengths))
            pieces.append(MicroBatch(rows, length))
        else:
            mean_length = math.ceil(sum(own_lengths) / len(own_lengths))
            pieces.append(MicroBatch(rows, mean_length, own_lengths))
    if not layout.keeps_order(limit):
        # Run the largest first: the others reuse its memory from the allocator's cache. A larger
        # one that comes later would not fit in cached blocks, and needs new memory.
        pieces.sort(key=lambda piece: (piece.run_tokens, piece.length), reverse=True)
    return pieces


def _divide(
    lengths: Sequence[int], limit: MicroBatchLimit, layout: MicroBatchLayout
) -> list[list[int]]:
    """Divide the rows of a step; return the positions of the rows of each micro-batch."""
    if layout.kind == "packed":
        if limit.unit == "rows":
            return split_by_rows(range(len(lengths)), limit.amount)
        return _packed(lengths, limit.amount)
    padded = layout.padded_lengths(lengths)
    if layout.kind == "grouped":
        max_rows_each = [layout.rows_within(limit, length) for length in padded]
        return _grouped_by_time(padded, max_rows_each, layout.time)
    # Rows of a micro-batch if all are padded to the longest row.
    max_rows = layout.rows_within(limit, max(lengths))
    if layout.uniform in ("rows", "both"):
        max_rows = largest_divisor(len(lengths), at_most=max_rows)
    if limit.unit == "rows":
        return split_by_rows(range(len(lengths)), max_rows)
    if layout.uniform is None:
        return _grouped(padded, limit.amount)
    # By tokens, uniform micro-batches have rows of similar length, which need the least padding.
    by_length = sorted(range(len(padded)), key=padded.__getitem__, reverse=True)
    return [sorted(piece) for piece in split_by_rows(by_length, max_rows)]


def largest_divisor(number: int, *, at_most: int) -> int:
    """Return the largest whole number that divides `number` and is at most `at_most`; 1 always
    does.
    """
    return next(divisor for divisor in range(min(number, at_most), 0, -1) if number % divisor == 0)


def _grouped(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group rows by length into the fewest groups of at most `max_tokens` padded tokens, rows x
    longest, with little padding and of nearly equal size. A longer row is a group by itself.

    The cost of a group of `t` tokens is t * (max_tokens + t). Of all groupings with the fewest
    groups, the result has the least sum of costs. The first term counts padding. The second makes
    sizes equal: without it, rows of equal length could leave a group of one row.

    Rows are sorted by length and cut into groups of neighbours. Some best grouping always has this
    form: exchanging rows so that the shorter one is in the group whose longest row is shorter does
    not lengthen any group. The algorithm is dynamic programming over the number of shortest rows.
    Its time grows with rows x rows of a group.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    # Entry n of each list is of the n shortest rows: their fewest groups, the least cost of so few
    # groups, and the position in `order` at which the last of these groups begins.
    fewest_groups = [0]
    least_cost = [0]
    begin_of_last = [0]
    for end, row in enumerate(order, start=1):
        longest = lengths[row]
        max_rows = max(1, max_tokens // max(1, longest))
        # With a longer last row, the best begin is never further left: the costs have the
        # quadrangle inequality (Yao, 1980).
        first = max(begin_of_last[-1], end - max_rows)
        costs = []
        for begin in range(first, end):
            # One more group is never worth its lower cost.
            if fewest_groups[begin] > fewest_groups[first]:
                break
            tokens = (end - begin) * longest
            costs.append(least_cost[begin] + tokens * (max_tokens + tokens))
        cost = min(costs)
        fewest_groups.append(fewest_groups[first] + 1)
        least_cost.append(cost)
        begin_of_last.append(first + costs.index(cost))
    return _cut(order, begin_of_last)


def _cut(order: Sequence[int], begin_of_last: Sequence[int]) -> list[list[int]]:
    """Cut rows into groups, the last group first.

    Args:
        order: rows in their order.
        begin_of_last: by number of first rows, the position at which the last group of them begins.
    """
    groups = []
    end = len(order)
    while end:
        begin = begin_of_last[end]
        groups.append(sorted(order[begin:end]))
        end = begin
    return groups


def _grouped_by_time(
    lengths: Sequence[int], max_rows: Sequence[int], time: MicroBatchTime
) -> list[list[int]]:
    """Group rows so that the sum of the groups' times is least.

    As in :func:`_grouped`, rows are sorted by length and cut into groups of neighbours by dynamic
    programming.

    Args:
        lengths: padded tokens of each row.
        max_rows: for each row, the most rows of a group in which it is the longest.
        time: model of the time of a group.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    # `least_time[n]` is the least time of the groups of the n shortest rows, and `begin_of_last[n]`
    # the position in `order` at which the last of these groups begins.
    least_time = torch.zeros(len(order) + 1, dtype=torch.float64)
    begin_of_last = [0]
    for end, row in enumerate(order, start=1):
        first = max(0, end - max_rows[row])
        # The last group may begin at any position from `first` to `end` - 1.
        rows_of_last = torch.arange(end - first, 0, -1, dtype=torch.float64)
        times = least_time[first:end].add(rows_of_last, alpha=time.token * lengths[row])
        begin_of_last.append(first + int(times.argmin()))
        least_time[end] = times.min() + time.fixed
    return _cut(order, begin_of_last)


def _packed(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put rows, the longest first, each into the first micro-batch that has room (first-fit
    decreasing: Johnson, 1973). Return the same number of micro-batches of nearly equal size if they
    are within the limit, else these.
    """
    pieces: list[list[int]] = []
    # Tokens that are left in each micro-batch.
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        with_room = (number for number, left in enumerate(room) if left >= lengths[row])
        number = next(with_room, len(room))
        if number == len(room):
            pieces.append([])
            room.append(max_tokens)
        pieces[number].append(row)
        room[number] -= lengths[row]
    equal_pieces = spread_by_tokens(lengths, len(pieces))
    for rows in equal_pieces:
        # A row that alone is above the limit is a micro-batch by itself.
        if len(rows) > 1 and sum(lengths[row] for row in rows) > max_tokens:
            return [sorted(piece) for piece in pieces]
    return equal_pieces


def spread_by_tokens(lengths: Sequence[int], groups: int) -> list[list[int]]:
    """Divide rows into groups of nearly equal tokens: each row, the longest first, goes to the
    group with the fewest (Graham, 1969). No group is empty unless there are fewer rows than groups.
    """
    # A heap of the tokens, rows and number of each group: the first entry has the fewest tokens,
    # and of groups with equal tokens the fewest rows.
    loads = [(0, 0, group) for group in range(groups)]
    divided: list[list[int]] = [[] for _ in range(groups)]
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        tokens, num_rows, group = loads[0]
        heapreplace(loads, (tokens + lengths[row], num_rows + 1, group))
        divided[group].append(row)
    return list(map(sorted, divided))


# --- ranks


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
    rank's rows into fewer groups, or into as many that cost no more. A rank has at most n / ranks
    micro-batches, rounded up, if the whole step would have n on one rank; no division has fewer.

    Other layouts and units leave fewer choices:

    - packed, by tokens: each row, the longest first, goes to the rank that has the fewest tokens
      (Graham, 1969).
    - grouped, packed by rows, or uniform ``rows`` or ``both``: rows sorted by length are dealt in
      turns that reverse, so that all ranks have rows of nearly the same lengths and cut them alike.
      Numbers of rows differ by one at most.
    - uniform ``lengths``: a rank has one group of neighbours.
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
    in_order = layout.pads and layout.keeps_order(limit)
    if in_order or ranks == 1 or len(lengths) <= ranks:
        return in_turn
    if not layout.pads and limit.unit == "tokens":
        return spread_by_tokens(torch.as_tensor(lengths).tolist(), ranks)
    by_length = torch.sort(torch.as_tensor(lengths), descending=True, stable=True)
    order: list[int] = by_length.indices.tolist()
    real: list[int] = by_length.values.tolist()
    if layout.kind != "padded" or layout.uniform in ("rows", "both"):
        # In turns that reverse: of 2 * ranks rows, a rank has one of the first half, and the one at
        # the same distance from the end.
        return [
            sorted(order[rank :: 2 * ranks] + order[2 * ranks - 1 - rank :: 2 * ranks])
            for rank in range(ranks)
        ]
    padded = layout.padded_lengths(real)
    # Computed once for each length; there are far fewer lengths than rows.
    rows_within = {length: layout.rows_within(limit, length) for length in set(real)}
    max_rows = [rows_within[length] for length in real]
    if layout.uniform is None:
        num_waves = math.ceil(_fewest_groups(max_rows) / ranks)
    else:
        # One wave: a rank has one group of neighbours, which it cuts into equal micro-batches.
        num_waves = 1
        micro_batches_each = math.ceil(len(order) / (ranks * max_rows[0]))
        max_rows = [micro_batches_each * rows for rows in max_rows]
    divided: list[list[int]] = [[] for _ in range(ranks)]
    for wave in _SortedRows(padded, max_rows).waves(num_waves, ranks):
        # The last wave may have fewer groups than there are ranks.
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
                rows_within_tokens = max(1, tokens // self._lengths[start])
                # Leave a row for each of the later groups.
                rows_to_spare = end - start - groups_after
                rows = min(rows_within_tokens, self._max_rows[start], rows_to_spare)
                groups.append((start, start + rows))
                start += rows
            yield groups

    def _next_wave(self, start: int, num_waves: int, ranks: int) -> tuple[int, int]:
        """Return the end of the next wave and the most tokens of its groups. They minimize the time
        of the remaining waves, which is the sum of the most tokens of each, if all later waves have
        groups of one size.
        """
        num_rows = len(self._lengths)
        num_later = num_waves - 1
        # The most tokens of a group if this wave is like the later ones.
        equal_tokens = self._smallest_limit(
            start, num_rows, ranks * num_waves, at_most=self._largest
        )
        assert equal_tokens is not None, "this many full groups take all rows"
        if num_later == 0:
            return num_rows, equal_tokens
        best_tokens = equal_tokens
        least_time = num_waves * equal_tokens
        for percent in TRIED_PERCENT:
            tokens = max(percent * equal_tokens // 100, self._lengths[start])
            end = self._reached(start, ranks, tokens)
            # With more tokens in each later wave, the time would not be less than `least_time`.
            at_most = (least_time - tokens - 1) // num_later
            later_tokens = self._smallest_limit(end, num_rows, ranks * num_later, at_most=at_most)
            if later_tokens is not None:
                best_tokens = tokens
                least_time = tokens + num_later * later_tokens
        return self._reached(start, ranks, best_tokens), best_tokens

    def _smallest_limit(self, start: int, end: int, groups: int, *, at_most: int) -> int | None:
        """Return the smallest limit of a group's tokens at which `groups` groups take the rows from
        `start` to `end`; None if it is above `at_most`.
        """
        mean_tokens = math.ceil((self._tokens_before[end] - self._tokens_before[start]) / groups)
        at_least = max(self._lengths[start], mean_tokens)
        if at_most < at_least or self._reached(start, groups, at_most) < end:
            return None
        # A higher limit reaches further, so bisect for the lowest that reaches `end`.
        return bisect_left(
            range(at_most),
            end,
            lo=at_least,
            key=lambda tokens: self._reached(start, groups, tokens),
        )

    def _reached(self, start: int, groups: int, tokens: int) -> int:
        """Return the end of `groups` groups from `start` on, each filled to `tokens` tokens."""
        lengths = self._lengths
        max_rows = self._max_rows
        num_rows = len(lengths)
        for _ in range(groups):
            if start >= num_rows:
                break
            rows = tokens // lengths[start] or 1
            # Not min(): most of the time of balancing is spent in this loop.
            start += rows if rows < max_rows[start] else max_rows[start]
        return min(start, num_rows)
