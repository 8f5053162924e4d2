"""The steps of an epoch that hold tokens in place of rows."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import EpochPlan, Progress

from .batching import Batching
from .epoch_lengths import EpochLengths, PlannedBy
from .token_sampler import TokenBatchPlan, plan_batches, plan_batches_by_rule


class StepsOfEpoch(NamedTuple):
    """The steps of an epoch.

    Attributes:
        batches: rows of each step.
        budgets: tokens on one device that are requested for each.
        plan: how the epoch divides into them.
    """

    batches: TokenBatchPlan
    budgets: list[int]
    plan: EpochPlan


class TokenSteps:
    """Plans the steps of epochs by the lengths of their rows.

    Args:
        batching: what a step holds.
        lengths: lengths that an epoch is planned by.
        ranks: a step has `batch_tokens` for each of so many.
        divisible: steps divide into equal micro-batches.
    """

    def __init__(
        self, batching: Batching, lengths: EpochLengths, *, ranks: int, divisible: bool
    ) -> None:
        self._batching = batching
        self._lengths = lengths
        self._ranks = ranks
        self._divisible = divisible
        # Each step asks, and the next epoch is looked at from within this one.
        self._planned = lru_cache(maxsize=2)(self._plan)

    def of_epoch(self, progress: Progress) -> StepsOfEpoch:
        """Return the steps of the epoch within which progress is."""
        return self._planned(progress.at_epoch_start(), self._lengths.version)

    def _plan(self, begin: Progress, version: int) -> StepsOfEpoch:
        """Plan the steps of an epoch.

        Args:
            begin: progress at which it begins.
            version: version of the lengths, by which a plan is kept.
        """
        first, *later_parts = self._lengths.parts(begin.epoch)
        batches, budgets = self._plan_part(begin, first, used=torch.zeros(0, dtype=torch.int64))
        for part in later_parts:
            done = int(torch.searchsorted(batches.starts, part.begin))
            at = begin
            for step in range(done):
                rows = batches[step]
                at = replace(
                    at.after_step(rows=len(rows), tokens=int(part.lengths[rows].sum())),
                    batch=budgets[step],
                )
            rest, budgets_of_rest = self._plan_part(at, part, used=batches.rows[: part.begin])
            batches = batches.followed_by(rest, after=done)
            budgets = budgets[:done] + budgets_of_rest
        plan = EpochPlan.of_sizes(batches.sizes.tolist(), **self._batching.ends)
        return StepsOfEpoch(batches, budgets, plan)

    def _plan_part(
        self, begin: Progress, part: PlannedBy, *, used: torch.Tensor
    ) -> tuple[TokenBatchPlan, list[int]]:
        """Plan the steps of the rows that are not used yet, and the tokens that are requested for
        each on one device.
        """
        batching = self._batching
        order = self._lengths.left(begin.epoch, part, used=used)
        if batching.batch_size_schedule is None:
            assert batching.batch_tokens
            batches = self.constant(order, part.lengths)
            return batches, [batching.batch_tokens] * len(batches)
        return plan_batches_by_rule(
            part.lengths,
            batching.batch_size_schedule,
            order=order,
            progress=begin,
            ranks=self._ranks,
            **_row_limits(batching, self._ranks, self._divisible),
        )

    def constant(self, order: torch.Tensor, lengths: torch.Tensor) -> TokenBatchPlan:
        """Return the rows of steps of a constant number of tokens.

        Args:
            order: row numbers in their order.
            lengths: tokens of each row of the dataset.
        """
        return plan_token_batches(
            lengths, self._batching, ranks=self._ranks, order=order, divisible=self._divisible
        )


def plan_token_batches(
    lengths: torch.Tensor,
    batching: Batching,
    *,
    ranks: int,
    order: torch.Tensor | None,
    divisible: bool,
) -> TokenBatchPlan:
    """Plan the steps of an epoch that hold `batch_tokens` on each device; the rest as in
    :func:`plan_batches`.

    Raises:
        SettingError: a row is too long, or what is configured cannot be had.
    """
    assert batching.batch_tokens
    limits = _row_limits(batching, ranks, divisible)
    try:
        return plan_batches(
            lengths,
            batching.batch_tokens * ranks,
            order=order,
            last_rows=batching.min_rows_per_batch * ranks,
            **limits,
        )
    except SettingError as error:
        keys = {
            "max_tokens": "batch_tokens",
            "min_rows": "min_rows_per_batch",
            "max_rows": "max_rows_per_batch",
        }
        raise SettingError(keys.get(error.key, error.key), error.value, error.remedy) from None


def _row_limits(batching: Batching, ranks: int, divisible: bool) -> dict[str, Any]:
    """Return what a step by tokens must keep to, over all ranks."""
    least = batching.min_rows_per_batch
    return {
        # One row is no minimum for each rank: long rows never take a step beyond its tokens then.
        "min_rows": least * ranks if least > 1 else 1,
        "max_rows": batching.max_rows_per_batch and batching.max_rows_per_batch * ranks,
        "long_rows": batching.long_rows,
        "divisible": divisible,
    }
