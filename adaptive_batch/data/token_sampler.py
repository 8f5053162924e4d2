"""Rows into batches of a budget of tokens, one budget or one for each step: pure, no device, time close to linear in the rows."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import KEY, Progress, request_batch

from .bin_packing import Limits, Rows, fill_batches
from .sampler import row_order

log = logging.getLogger("adaptive_batch")

HISTOGRAM_LINES = 10
HISTOGRAM_WIDTH = 40
MOST_STEPS = 64  # steps that are planned at one time while the budget of a rule stays


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
        """Return all batches as lists of row numbers."""
        rows = self.rows.tolist()
        return [rows[start:end] for start, end in pairwise(self.starts.tolist())]

    def report(self, lengths: Sequence[int] | torch.Tensor, *, min_rows: int = 1) -> str:
        """Describe the batches: how full, how much padding, what was dropped, how many rows each.

        Args:
            lengths: as they were planned with, and so is `min_rows`.

        Returns:
            Aligned text of several lines.
        """
        kept, sizes = _whole_numbers("lengths", lengths)[self.rows], self.sizes
        longest = torch.zeros(len(self), dtype=torch.int64)
        longest.scatter_reduce_(0, torch.arange(len(self)).repeat_interleave(sizes), kept, "amax")
        real, padded = int(kept.sum()), int((longest * sizes).sum())
        per_batch = f"{int(sizes.min())} / {int(sizes.median())} / {int(sizes.max())}" if len(self) else "none"
        facts = (
            ("rows", f"{len(self.rows):,}"),
            ("batches", f"{len(self):,}"),
            ("real tokens", f"{real:,}"),
            ("padded tokens", f"{padded:,}"),
            ("padding", f"{1 - real / padded if padded else 0.0:.1%}"),
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
    count: str = "padded",
    long_rows: str = "error",
    verbose: bool = False,
) -> list[list[int]]:
    """Put the rows of an epoch into batches that are filled to a budget of tokens.

    Args:
        lengths: int ``[rows]``, tokens of each row.
        max_tokens: the most tokens of a batch.
        order, window, seed, epoch: the order in which the rows are taken, see :func:`~adaptive_batch.data.row_order`.
        min_rows, max_rows, count, long_rows: see :func:`plan_batches`.
        verbose: log how full the batches are.

    Returns:
        Row numbers of each batch.

    Raises:
        SettingError: an argument cannot be used; it names the argument, its value and a suggested fix.
    """
    lengths = _whole_numbers("lengths", lengths)
    plan = plan_batches(
        lengths,
        max_tokens,
        order=row_order(len(lengths), order=order, lengths=lengths, window=window, seed=seed, epoch=epoch),
        min_rows=min_rows,
        max_rows=max_rows,
        count=count,
        long_rows=long_rows,
    )
    if verbose:
        log.info("batches of %d tokens (%s):\n%s", max_tokens, count, plan.report(lengths, min_rows=min_rows))
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
    divisible: bool = False,
) -> TokenBatchPlan:
    """Plan batches that are filled to a budget of tokens; every row of `order` is in one of them, or listed as dropped.

    Rows are taken in order; a batch is closed when the next row would take it beyond `max_tokens` or `max_rows`. One
    that would then have too few rows stays open: rows that do not fit wait, and come first afterwards, while later rows that
    fit are added. At the end of the epoch what is left is combined, the longest with the shortest, and only rows for which
    no partner is left are in batches below `min_rows`.

    Args:
        lengths: int ``[rows]``, tokens of each row, 1 or more.
        max_tokens: the most tokens of a batch.
        order: int64, row numbers in the order in which to take them, each at most once; None takes all as they come.
        min_rows: rows that a batch should have at least.
        max_rows: rows that a batch may have; None for no limit.
        count: ``padded`` counts rows x longest, ``real`` the sum of lengths.
        long_rows: what becomes of a row that alone is longer than `max_tokens`: ``error``, ``drop``, or ``alone``, a
            batch of one row.
        divisible: each batch but the last has a multiple of 1/8 to 1/16 of its rows, a power of two, so that it divides
            into equal micro-batches; at most 1/8 fewer than would fit, unless that is below `min_rows`.

    Raises:
        SettingError: an argument cannot be used, a row is too long, or the shortest `min_rows` rows do not fit in one
            batch.
    """
    lengths = _whole_numbers("lengths", lengths)
    if len(lengths) and int(lengths.min()) < 1:
        row = int(lengths.argmin())
        raise SettingError("lengths", int(lengths[row]), f"row {row} must have 1 token or more")
    most_rows = sys.maxsize if max_rows is None else max_rows
    limits = Limits(max_tokens, min_rows, most_rows, count=count, long_rows=long_rows, divisible=divisible)
    numbers = torch.arange(len(lengths)) if order is None else _checked_order(order, num_rows=len(lengths))
    rows = Rows(numbers, lengths if order is None else lengths[numbers])

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
                f"row {row} alone has {int(lengths[row])} tokens{too}; set long_rows to drop or alone, or max_tokens to "
                f"{int(rows.sizes.max())} or more",
            )
        dropped, rows = numbers[is_long], rows.pick(~is_long)
    return TokenBatchPlan(*fill_batches(rows, limits), dropped)


def plan_batches_by_rule(
    lengths: Sequence[int] | torch.Tensor,
    rule: Callable[[Progress], object],
    *,
    order: torch.Tensor,
    progress: Progress,
    min_rows: int,
    max_rows: int | None,
    long_rows: str,
    divisible: bool,
) -> tuple[TokenBatchPlan, torch.Tensor]:
    """Plan an epoch, each step of which is filled to the real tokens that a rule requests at the beginning of the step.

    With a rule that always answers the same this is ``plan_batches(..., count="real")``. What is left of the epoch is
    planned again whenever the budget changes. Where batches are filled in order, the first of them do not depend on rows
    that come much later: then a piece of the epoch is planned, and its last batch, which its end may have cut, is not used.

    What becomes of a row that is longer than a budget does not depend on where the order has put it. ``error`` refuses every
    budget below the longest row of the epoch. With ``drop`` the row waits for a budget that holds it, and is dropped only
    when none came before the epoch ends. ``alone`` makes a step of it when its turn comes.

    Args:
        lengths: int ``[rows]``, real tokens of each row, 1 or more.
        rule: ``rule(progress) -> tokens of a step``, a function of progress alone.
        order: int64, row numbers in the order in which to take them, each at most once.
        progress: at the beginning of the epoch; it advances from step to step as training will.
        min_rows, max_rows, long_rows, divisible: see :func:`plan_batches`. With `min_rows` above 1 rows wait for others:
            each change of budget plans all that is left.

    Returns:
        The batches; and int64 ``[batches]``, the budget that each was filled to.

    Raises:
        SettingError: an argument cannot be used, a row is too long, or the shortest `min_rows` rows do not fit in one batch.
        GrowthFunctionError: the rule failed.
    """
    lengths = torch.as_tensor(lengths, dtype=torch.int64)

    def planned(lengths: torch.Tensor, budget: int, order: torch.Tensor | None = None) -> TokenBatchPlan:
        limits = {"min_rows": min_rows, "max_rows": max_rows}
        options = {"count": "real", "long_rows": long_rows, "divisible": divisible}
        return plan_batches(lengths, budget, order=order, **limits, **options)  # type: ignore[arg-type]

    planned(lengths, sys.maxsize, order[:0])  # refuses what cannot be used, before the rule is called
    rest = _Rest(lengths[order], max_rows=max_rows, in_order=min_rows == 1, long_rows_wait=long_rows == "drop")
    longest = int(rest.sizes.max()) if len(order) else 0
    used, batch_sizes, budgets = [order[:0]], [order[:0]], [order[:0]]
    budget, steps, step = 0, 2, 1
    while len(rest):
        if step:  # called again at the same progress, a rule that is not pure might never let a piece be long enough
            requested = request_batch(rule, progress, maximum=None).after
            budget, steps = requested, (2 if requested != budget else steps)
        if long_rows == "error" and longest > budget:
            row = int(order[rest.sizes.argmax()])
            raise SettingError(
                KEY,
                budget,
                f"these are the tokens of step {progress.steps}, and row {row} alone has {longest}; return {longest} or more "
                "for each step, or set long_rows to drop or alone",
            )
        places, is_all = rest.piece(budget, steps)
        sizes = rest.sizes[places]
        plan = planned(sizes, budget)
        ends = plan.starts[1:].tolist()
        tokens = [0, *sizes[plan.rows].cumsum(0).tolist()]
        safe = len(ends) if is_all else len(ends) - 1
        begin = step = 0
        while step < safe and (step == 0 or request_batch(rule, progress, maximum=None).after == budget):
            end = ends[step]
            progress = progress.after_step(rows=end - begin, tokens=tokens[end] - tokens[begin])
            progress, begin, step = replace(progress, batch=budget), end, step + 1
        used.append(order[places[plan.rows[:begin]]])
        batch_sizes.append(plan.sizes[:step])
        budgets.append(torch.full((step,), budget))
        rest.take(places, plan.rows[:begin])
        steps = 2 * steps if step == 0 else min(MOST_STEPS, 2 * steps)
        if is_all and step == len(ends):
            break
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(batch_sizes).cumsum(0)])
    return TokenBatchPlan(torch.cat(used), starts, order[rest.places]), torch.cat(budgets)


class _Rest:
    """The rows of an epoch that no step has yet, by their place in the order.

    Args:
        sizes: int64 ``[rows]``, tokens of the row at each place.
        max_rows: of a step; None for no limit.
        in_order: the rows of a step do not depend on rows that come after it.
        long_rows_wait: a row that is longer than the budget stays behind.
    """

    def __init__(self, sizes: torch.Tensor, *, max_rows: int | None, in_order: bool, long_rows_wait: bool) -> None:
        self.sizes = sizes
        self._max_rows, self._in_order, self._long_rows_wait = max_rows, in_order, long_rows_wait
        self._before = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        self._seen = torch.zeros(0, dtype=torch.int64)  # places that a piece had, or that wait, rising
        self._unseen = 0  # all from this one on

    def __len__(self) -> int:
        return len(self._seen) + len(self.sizes) - self._unseen

    @property
    def places(self) -> torch.Tensor:
        """All of them, rising."""
        return torch.cat([self._seen, torch.arange(self._unseen, len(self.sizes))])

    def piece(self, budget: int, steps: int) -> tuple[torch.Tensor, bool]:
        """Return the places of about `steps` steps' rows, without those that wait for a larger budget; and whether they are all."""
        if not self._in_order:
            return self.places, True
        tokens, rows = steps * budget, len(self) if self._max_rows is None else steps * self._max_rows
        seen = self._seen[self.sizes[self._seen] <= budget] if self._long_rows_wait else self._seen
        before = self.sizes[seen].cumsum(0)
        if len(seen) and (int(before[-1]) > tokens or len(seen) > rows):
            return seen[: min(rows, 1 + int(torch.searchsorted(before, tokens)))], False
        tokens -= int(before[-1]) if len(seen) else 0
        most = min(int(self._before[-1]), int(self._before[self._unseen]) + tokens)
        end = min(self._unseen + rows - len(seen), int(torch.searchsorted(self._before, most)))
        if end >= len(self.sizes):
            return self.places, True
        unseen = torch.arange(self._unseen, end)
        self._seen, self._unseen = torch.cat([self._seen, unseen]), end
        if self._long_rows_wait:
            unseen = unseen[self.sizes[unseen] <= budget]
        return torch.cat([seen, unseen]), False

    def take(self, places: torch.Tensor, which: torch.Tensor) -> None:
        """Remove some of a piece's places, given by their number in the piece."""
        if not len(which):
            return
        if len(places) == len(self):
            self._seen, self._unseen = places, len(self.sizes)
        is_left = torch.ones(len(self._seen), dtype=torch.bool)
        # none waits: the piece is all that has been seen
        is_left[which if len(places) == len(self._seen) else torch.searchsorted(self._seen, places[which])] = False
        self._seen = self._seen[is_left]


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
    """Return lines that show how many batches have how many rows."""
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
