"""Rows into batches of a budget of tokens, one budget or one for each step: pure, no device, time
close to linear in the rows.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import torch

from adaptive_batch.errors import GrowthFunctionError, SettingError
from adaptive_batch.schedules import KEY, Progress, request_batch

from .bin_packing import Limits, Rows, fill_batches
from .order import row_order

log = logging.getLogger("adaptive_batch")


@dataclass(frozen=True, eq=False)
class TokenBatchPlan:
    """The batches of an epoch: a sequence of lists of row numbers, held as tensors.

    Attributes:
        rows: int64 ``[kept rows]``, row numbers in the order of use, each once.
        starts: int64 ``[batches + 1]``, where each batch starts in `rows`; the last is the number
            of kept rows.
        dropped: int64, numbers of the rows that are in no batch (``long_rows="drop"``), each once.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    dropped: torch.Tensor

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> list[int]:
        start, end = self.starts[range(len(self))[index] :][:2].tolist()
        batch: list[int] = self.rows[start:end].tolist()
        return batch

    @property
    def sizes(self) -> torch.Tensor:
        """Rows of each batch, int64 ``[batches]``."""
        return self.starts.diff()

    def followed_by(self, rest: TokenBatchPlan, *, after: int) -> TokenBatchPlan:
        """Return the plan whose first `after` batches are these, and whose others are those of
        `rest`.
        """
        begin = int(self.starts[after])
        rows = torch.cat([self.rows[:begin], rest.rows])
        return TokenBatchPlan(
            rows, torch.cat([self.starts[: after + 1], rest.starts[1:] + begin]), rest.dropped
        )

    def tolist(self) -> list[list[int]]:
        """Return all batches as lists of row numbers."""
        rows = self.rows.tolist()
        return [rows[start:end] for start, end in pairwise(self.starts.tolist())]


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
        order, window, seed, epoch: the order in which the rows are taken, see
            :func:`~adaptive_batch.data.row_order`.
        min_rows, max_rows, count, long_rows: see :func:`plan_batches`.
        verbose: log how full the batches are.

    Returns:
        Row numbers of each batch.

    Raises:
        SettingError: an argument cannot be used; it names the argument, its value and a suggested
            fix.
    """
    lengths = torch.as_tensor(lengths if len(lengths) else torch.zeros(0, dtype=torch.int64))
    if lengths.ndim != 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
        description = f"{lengths.dtype}{list(lengths.shape)}"
        raise SettingError("lengths", description, "must be a list or 1-D tensor of whole numbers")
    plan = plan_batches(
        lengths,
        max_tokens,
        order=row_order(
            len(lengths), order=order, lengths=lengths, window=window, seed=seed, epoch=epoch
        )[:],
        min_rows=min_rows,
        max_rows=max_rows,
        count=count,
        long_rows=long_rows,
    )
    batches = plan.tolist()
    if verbose:
        padded = sum(len(batch) * int(lengths[batch].max()) for batch in batches)
        log.info(
            "%d batches of up to %d tokens (%s): %d rows, %.1f%% padding; %d rows dropped",
            len(batches),
            max_tokens,
            count,
            len(plan.rows),
            100 * (1 - int(lengths[plan.rows].sum()) / max(1, padded)),
            len(plan.dropped),
        )
    return batches


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
    """Plan batches that are filled to a budget of tokens; every row of `order` is in one of them,
    or listed as dropped.

    Rows are taken in order; a batch is closed when the next row would take it beyond `max_tokens`
    or `max_rows`. One that would then have too few rows stays open: rows that do not fit wait, and
    come first afterwards, while later rows that fit are added. At the end of the epoch what is left
    is combined, the longest with the shortest, and only rows for which no partner is left are in
    batches below `min_rows`.

    Args:
        lengths: int ``[rows]``, tokens of each row, 1 or more.
        max_tokens: the most tokens of a batch.
        order: int64, row numbers in the order in which to take them, each at most once; None takes
            all as they come.
        min_rows: rows that a batch should have at least.
        max_rows: rows that a batch may have; None for no limit.
        count: ``padded`` counts rows x longest, ``real`` the sum of lengths.
        long_rows: what becomes of a row that alone is longer than `max_tokens`: ``error``,
            ``drop``, or ``alone``, a batch of one row.
        divisible: each batch but the last has a multiple of 1/8 to 1/16 of its rows, a power of
            two, so that it divides into equal micro-batches; at most 1/8 fewer than would fit,
            unless that is below `min_rows`.

    Raises:
        SettingError: an argument cannot be used, a row is too long, or the shortest `min_rows` rows
            do not fit in one batch.
    """
    lengths = torch.as_tensor(lengths, dtype=torch.int64)
    if len(lengths) and int(lengths.min()) < 1:
        row = int(lengths.argmin())
        raise SettingError("lengths", int(lengths[row]), f"row {row} must have 1 token or more")
    most_rows = sys.maxsize if max_rows is None else max_rows
    limits = Limits(
        max_tokens, min_rows, most_rows, count=count, long_rows=long_rows, divisible=divisible
    )
    numbers = torch.arange(len(lengths)) if order is None else order
    rows = Rows(numbers, lengths[numbers])
    is_long = rows.sizes > max_tokens
    dropped = numbers[:0]
    if long_rows == "error" and is_long.any():
        row = int(numbers[is_long][0])
        longest = int(rows.sizes.max())
        remedy = (
            f"row {row} alone has {int(lengths[row])} tokens; give {longest} or more, or set"
            " long_rows to drop or alone"
        )
        raise SettingError("max_tokens", max_tokens, remedy)
    if long_rows == "drop":
        dropped = numbers[is_long]
        rows = rows.pick(~is_long)
    return TokenBatchPlan(*fill_batches(rows, limits), dropped)


def plan_batches_by_rule(
    lengths: torch.Tensor,
    rule: Callable[[Progress], object],
    *,
    order: torch.Tensor,
    progress: Progress,
    ranks: int = 1,
    min_rows: int,
    max_rows: int | None,
    long_rows: str,
    divisible: bool,
) -> tuple[TokenBatchPlan, list[int]]:
    """Plan an epoch, each step of which is filled to the real tokens that a rule requests at the
    beginning of the step.

    With a rule that always answers the same this is ``plan_batches(..., count="real")``. With
    `min_rows` above 1 rows wait for others, so all that is left is planned again whenever the
    budget changes.

    What becomes of a row that is longer than a budget does not depend on where the order has put
    it. ``error`` refuses every budget below the longest row of the epoch. With ``drop`` the row
    waits for a budget that holds it, and is dropped only when none came before the epoch ends.
    ``alone`` makes a step of it when its turn comes.

    Args:
        lengths: int64 ``[rows]``, real tokens of each row, 1 or more.
        rule: ``rule(progress) -> tokens of a step on one device``, a function of progress alone.
        order: int64, row numbers in the order in which to take them, each at most once.
        progress: at the beginning of the epoch; it advances from step to step as training will.
        ranks: devices; a step is filled to as many times what the rule requests.
        min_rows, max_rows, long_rows, divisible: see :func:`plan_batches`, of a step on all
            devices.

    Returns:
        The batches; and the tokens that were requested for each on one device.

    Raises:
        SettingError: an argument cannot be used, a row is too long, or the shortest `min_rows` rows
            do not fit in one batch.
        GrowthFunctionError: the rule failed, or answers otherwise when it is called again.
    """

    def plan(budget: int, rows: torch.Tensor) -> TokenBatchPlan:
        return plan_batches(
            lengths,
            budget,
            order=rows,
            min_rows=min_rows,
            max_rows=max_rows,
            count="real",
            long_rows=long_rows,
            divisible=divisible,
        )

    def left() -> torch.Tensor:
        return order[
            ~torch.isin(order, torch.tensor([*chain.from_iterable(batches)], dtype=torch.int64))
        ]

    batches: list[list[int]] = []
    # It refuses what cannot be used, before the rule is called.
    plan(sys.maxsize, order[:0])
    limits = Limits(
        sys.maxsize,
        1,
        max_rows or sys.maxsize,
        count="real",
        long_rows=long_rows,
        divisible=divisible,
    )
    in_order = _InOrder(lengths[order].tolist(), limits) if min_rows == 1 else None
    longest = int(lengths[order].max()) if len(order) else 0
    begins: list[Progress] = []
    budgets: list[int] = []
    # Planned with the budget of the last step, the next batch last.
    planned: list[list[int]] = []
    is_last = not len(order)
    while not is_last:
        budget = request_batch(rule, progress, maximum=None).after
        if long_rows == "error" and longest > budget * ranks:
            remedy = (
                f"these are the tokens of step {progress.steps} on one device, and a row alone has"
                f" {longest}"
            )
            needed = math.ceil(longest / ranks)
            raise SettingError(
                KEY, budget, f"{remedy}; return {needed} or more, or set long_rows to drop or alone"
            )
        if in_order:
            places, is_last = in_order.next_batch(budget * ranks)
            batch = order[places].tolist()
        else:
            if budgets[-1:] != [budget]:
                planned = plan(budget * ranks, left()).tolist()[::-1]
            batch = planned.pop() if planned else []
            is_last = not planned
        if batch:
            batches.append(batch)
            begins.append(progress)
            budgets.append(budget)
            progress = progress.after_step(rows=len(batch), tokens=int(lengths[batch].sum()))
            progress = replace(progress, batch=budget)
    for begin, budget in zip(begins, budgets, strict=True):
        again = request_batch(rule, begin, maximum=None).after
        if again != budget:
            raise GrowthFunctionError(
                f"{KEY} {rule!r} returned {budget}, and {again} when called again: with"
                " batch_tokens it must be a function of progress alone"
            )
    starts = torch.tensor([0, *map(len, batches)]).cumsum(0)
    rows = torch.tensor([*chain.from_iterable(batches)], dtype=torch.int64)
    return TokenBatchPlan(rows, starts, left()), budgets


class _InOrder:
    """Rows by their place in the order, handed out in order but for those that wait for a larger
    budget, counted in real tokens.
    """

    def __init__(self, sizes: list[int], limits: Limits) -> None:
        self._sizes = sizes
        self._limits = limits
        self._waiting: list[int] = []
        self._coming = 0

    def next_batch(self, budget: int) -> tuple[list[int], bool]:
        """Return the places of the rows of the next step, and whether it is the last."""
        sizes = self._sizes
        limits = self._limits
        places: list[int] = []
        tokens = 0
        end = len(sizes)
        is_last = True
        for place in chain(self._waiting, range(self._coming, len(sizes))):
            if limits.long_rows == "drop" and sizes[place] > budget:
                continue
            if places and (tokens + sizes[place] > budget or len(places) == limits.max_rows):
                end = max(place, self._coming)
                places = places[: limits.kept(len(places), 1)]
                is_last = False
                break
            places.append(place)
            tokens += sizes[place]
        used = set(places)
        seen = chain(self._waiting, range(self._coming, end))
        self._waiting = [place for place in seen if place not in used]
        self._coming = end
        return places, is_last
