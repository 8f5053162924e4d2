"""Batches filled to a budget of tokens that changes from step to step: pure, the rows of one epoch.

What is left of the epoch is planned anew by :func:`~adaptive_batch.token_batches.plan_batches` whenever the budget changes.
Where batches are filled in order, the first of them do not depend on rows that come much later: then a piece of the epoch is
planned, and its last batches, which its end may have cut, are not used. So the time stays close to linear in the rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import KEY, Progress, ask

from .token_sampler import TokenBatchPlan, plan_batches

MOST_STEPS = 64  # that a piece is long while the budget stays; it begins with one that can be used


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
    maximum: int | None = None,
    world_size: int = 1,
) -> tuple[TokenBatchPlan, torch.Tensor]:
    """Plans an epoch, each step of which is filled to the real tokens that a rule asks for at the beginning of the step.

    With a rule that always answers the same this is ``plan_batches(..., count="real", uniform_groups=world_size)``.

    What becomes of a row that is longer than a budget is not left to where the order has put it. ``error`` refuses every
    budget below the longest row of the epoch. With ``drop`` the row waits for a budget that holds it, and is dropped only
    when none came before the epoch ends. ``alone`` makes a step of it when its turn comes; on several ranks, where each
    then has one row, it waits in the same way and is alone at the end of the epoch.

    Args:
        lengths: int ``[rows]``, real tokens of each row, 1 or more.
        rule: ``rule(progress) -> tokens of a step on one device``, a function of progress alone.
        order: int64, row numbers in the order in which to take them, each at most once.
        progress: at the beginning of the epoch; it is carried on from step to step as training will.
        min_rows, max_rows, long_rows, divisible: see :func:`~adaptive_batch.token_batches.plan_batches`. With `min_rows`
            above 1, or `divisible` on several ranks, rows wait for others: each change of budget plans all that is left.
        maximum: what the rule may not pass; None for no limit.
        world_size: batches of a step, one for each rank, with equally many rows.

    Returns:
        The batches, of which ``i * world_size`` to ``i * world_size + world_size - 1`` are one step; and int64
        ``[batches]``, the budget that each was filled to.

    Raises:
        SettingError: an argument cannot be used, a row is too long, or the shortest `min_rows` rows do not fit in one batch.
        GrowthFunctionError: the rule failed.
    """
    lengths = torch.as_tensor(lengths, dtype=torch.int64)
    limits = _Limits(min_rows, max_rows, long_rows, divisible, world_size)
    limits.plan(lengths, sys.maxsize, order=order[:0])  # refuses what cannot be used, before the rule is asked
    rest = _Rest(lengths[order], limits)
    longest = int(rest.sizes.max()) if len(order) else 0
    used, batch_sizes, budgets = [order[:0]], [order[:0]], [order[:0]]
    # The end of a piece cuts one step, and with several ranks makes another of rows too few for a whole one.
    cut = 1 if world_size == 1 else 2
    budget, steps, step = 0, cut + 1, 1
    while len(rest):
        if step:  # asked again at the same progress, a rule that is not pure might never let a piece be long enough
            asked = ask(rule, progress, maximum=maximum).after
            budget, steps = asked, (cut + 1 if asked != budget else steps)
        if long_rows == "error" and longest > budget:
            row = int(order[rest.sizes.argmax()])
            raise SettingError(
                KEY,
                budget,
                f"these are the tokens that step {progress.steps} is asked to hold, and row {row} alone has {longest}; "
                f"ask for {longest} or more at each step, or set long_rows to drop or alone",
            )
        places, is_all = rest.piece(budget, steps)
        sizes = rest.sizes[places]
        plan = limits.plan(sizes, budget)
        ends = [*plan.starts[::world_size].tolist()[1:], len(plan.rows)][: -(-len(plan) // world_size)]
        tokens = [0, *sizes[plan.rows].cumsum(0).tolist()]
        safe = len(ends) if is_all else len(ends) - cut
        begin = step = 0
        while step < safe and (step == 0 or ask(rule, progress, maximum=maximum).after == budget):
            end = ends[step]
            progress = progress.after_step(rows=end - begin, tokens=tokens[end] - tokens[begin])
            progress, begin, step = replace(progress, batch=budget), end, step + 1
        batches = min(len(plan), step * world_size)
        used.append(order[places[plan.rows[:begin]]])
        batch_sizes.append(plan.sizes[:batches])
        budgets.append(torch.full((batches,), budget))
        rest.take(places, plan.rows[:begin])
        steps = 2 * steps if step == 0 else min(MOST_STEPS, 2 * steps)
        if is_all and step == len(ends):
            break
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(batch_sizes).cumsum(0)])
    return TokenBatchPlan(torch.cat(used), starts, order[rest.places]), torch.cat(budgets)


@dataclass(frozen=True)
class _Limits:
    """What batches must keep to, whatever their budget."""

    min_rows: int
    max_rows: int | None
    long_rows: str
    divisible: bool
    world_size: int

    @property
    def fills_in_order(self) -> bool:
        """Whether the rows of a step do not depend on rows that come after it."""
        return self.min_rows == 1 and (self.world_size == 1 or not self.divisible)

    @property
    def lets_long_rows_wait(self) -> bool:
        """Whether a row that is longer than the budget stays behind."""
        return self.long_rows == "drop" or (self.long_rows == "alone" and self.world_size > 1)

    def plan(self, lengths: torch.Tensor, budget: int, *, order: torch.Tensor | None = None) -> TokenBatchPlan:
        return plan_batches(
            lengths,
            budget,
            order=order,
            min_rows=self.min_rows,
            max_rows=self.max_rows,
            count="real",
            long_rows=self.long_rows,
            uniform_groups=self.world_size,
            divisible=self.divisible,
        )


class _Rest:
    """The rows of an epoch that no step has yet, by their place in the order.

    Attributes:
        sizes: int64 ``[rows]``, tokens of the row at each place.
    """

    def __init__(self, sizes: torch.Tensor, limits: _Limits) -> None:
        self.sizes = sizes
        self._limits = limits
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
        """Places of about that many steps' rows, those that wait for a larger budget left out; and whether they are all."""
        limits = self._limits
        if not limits.fills_in_order:
            return self.places, True
        tokens = steps * budget * limits.world_size
        rows = len(self) if limits.max_rows is None else steps * limits.max_rows * limits.world_size
        waiting = limits.lets_long_rows_wait
        seen = self._seen[self.sizes[self._seen] <= budget] if waiting else self._seen
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
        if waiting:
            unseen = unseen[self.sizes[unseen] <= budget]
        return torch.cat([seen, unseen]), False

    def take(self, places: torch.Tensor, which: torch.Tensor) -> None:
        """Take some of a piece's places, by their number in the piece."""
        if not len(which):
            return
        if len(places) == len(self):
            self._seen, self._unseen = places, len(self.sizes)
        is_left = torch.ones(len(self._seen), dtype=torch.bool)
        # none waits: the piece is all that has been seen
        is_left[which if len(places) == len(self._seen) else torch.searchsorted(self._seen, places[which])] = False
        self._seen = self._seen[is_left]
