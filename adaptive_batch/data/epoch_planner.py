"""How an epoch divides into optimizer steps, ahead of training: by a constant batch, a rule, or a
budget of tokens.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch

from adaptive_batch._util import count
from adaptive_batch.errors import CheckpointError, SettingError
from adaptive_batch.schedules import (
    EpochPlan,
    Progress,
    Schedule,
    needs_noise_scale,
)

from .batching import Batching
from .order import EpochOrder, RowOrder, row_order
from .requested_batch import RequestedBatch
from .token_sampler import TokenBatchPlan, plan_batches, plan_batches_by_rule

# Rows whose tokens are looked up at once: a list of them is small, and few calls are made.
_BLOCK_ROWS = 2048


class Rows(Protocol):
    """A map-style dataset, and the tokens of each row, with and without padding: int64, `[rows]`.

    `recount` drops them where a row that was read, on any rank, has another length, and returns
    which row; "" for none. They are counted again when they are asked for.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Any: ...
    @property
    def lengths(self) -> torch.Tensor: ...
    @property
    def real_lengths(self) -> torch.Tensor: ...
    def num_real_tokens(self, row: Any) -> int: ...
    def recount(self) -> str: ...


@dataclass(frozen=True, eq=False)
class RowLengths:
    """Tokens of each row, with and without padding: int64 ``[rows]``."""

    all: torch.Tensor
    real: torch.Tensor

    @cached_property
    def packed(self) -> list[str]:
        """The lengths as text; those without padding only where they differ."""
        different = [] if torch.equal(self.all, self.real) else [self.real]
        return [
            base64.b64encode(
                zlib.compress(lengths.to(torch.int32).numpy().tobytes(), level=1)
            ).decode()
            for lengths in [self.all, *different]
        ]

    @classmethod
    def unpacked(cls, packed: Sequence[str]) -> RowLengths:
        """Return the lengths of a text."""
        tensors = [
            torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(text))), dtype=torch.int32)
            for text in packed
        ]
        return cls(tensors[0].to(torch.int64), tensors[-1].to(torch.int64))


class StepsOfEpoch(NamedTuple):
    """The steps of an epoch by tokens.

    Attributes:
        batches: rows of each step.
        budgets: tokens on one device that are requested for each.
        plan: how the epoch divides into them.
    """

    batches: TokenBatchPlan
    budgets: list[int]
    plan: EpochPlan


class EpochPlanner:
    """Divides epochs into steps and looks ahead through training, without training.

    Args:
        rows: of an epoch.
        batch: batch that is requested for a step on one device.
        ranks: a step has `batch_size` rows for each of so many.
        divisible: steps by tokens divide into equal micro-batches.
        counts_tokens: the tokens of an epoch must be known.
        order: orders the rows of an epoch; None for the configured order.

    Attributes:
        num_rows: rows of an epoch.
    """

    def __init__(
        self,
        rows: Rows,
        batch: RequestedBatch,
        *,
        ranks: int,
        divisible: bool,
        counts_tokens: bool = False,
        order: EpochOrder | None = None,
    ) -> None:
        batching = batch.batching
        self._rows = rows
        self._batch = batch
        self.ranks = ranks
        self._divisible = divisible
        self._counts_tokens = counts_tokens or bool(batching.batch_tokens)
        self._takes_all_rows = order is None
        self.num_rows = len(rows if order is None else order)
        self._row_order = order or partial(
            row_order,
            self.num_rows,
            order=batching.sample_order,
            shuffle=batching.shuffle,
            window=batching.sample_window,
            seed=batching.seed,
        )
        schedule = batching.batch_size_schedule
        self._depends_on_lengths = bool(batching.batch_tokens) or batching.sample_order == "seqlen"
        if self._depends_on_lengths:
            # A row that cannot be measured is refused now.
            _ = rows.lengths
        self._epoch = 0
        # Of the current epoch, and of the epoch of a constant batch, once they are asked for.
        self._lengths: RowLengths | None = None
        self._reference_lengths: RowLengths | None = None
        self._is_estimate = schedule is not None and needs_noise_scale(schedule)
        # Each step asks, and the next epoch is looked at from within this one.
        self._planned = lru_cache(maxsize=2)(self._plan_by_tokens)

    @property
    def _batching(self) -> Batching:
        """What a step holds, as configured; a schedule that follows the rate is put in later."""
        return self._batch.batching

    @property
    def lengths(self) -> RowLengths:
        """Lengths by which the current epoch is planned: they stay until it ends."""
        if self._lengths is None:
            self._lengths = RowLengths(self._rows.lengths, self._rows.real_lengths)
        return self._lengths

    def _lengths_of(self, epoch: int) -> RowLengths:
        if epoch == self._epoch:
            return self.lengths
        return RowLengths(self._rows.lengths, self._rows.real_lengths)

    def num_tokens(self, numbers: Sequence[int]) -> int:
        """Return the real tokens of some rows of the current epoch."""
        return int(self.lengths.real[numbers].sum())

    def follow(self, schedule: Schedule) -> None:
        """Follow a schedule from now on that is coupled to the rate's."""
        self._batch.follow(schedule)
        self._planned.cache_clear()

    def begin(self, epoch: int) -> None:
        """Plan an epoch that begins, by the lengths as they are now."""
        self._epoch = epoch
        self._lengths = None
        self._planned.cache_clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the ranks that steps are for, and the lengths that the current epoch is planned
        by, as plain values.
        """
        reference = self._reference_lengths
        lengths = None if self._lengths is reference else self._lengths
        return {
            "ranks": self.ranks,
            "epoch": self._epoch,
            "lengths": lengths and lengths.packed,
            "reference_lengths": reference and reference.packed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Plan the epoch as it was planned when the state was saved.

        Raises:
            CheckpointError: the lengths that the epoch was planned by are not in the state.
        """
        if not state.keys() >= {"lengths", "reference_lengths"}:
            raise CheckpointError(
                "the checkpoint does not hold the row lengths of its epoch, as an earlier version"
                " saved it; resume with that version, or begin a new run"
            )
        self.ranks = state["ranks"]
        self._epoch = state["epoch"]
        self._lengths = self._reference_lengths = None
        if state["reference_lengths"]:
            self._lengths = self._reference_lengths = RowLengths.unpacked(
                state["reference_lengths"]
            )
        if state["lengths"]:
            self._lengths = RowLengths.unpacked(state["lengths"])
        self._planned.cache_clear()

    def next_step(self, progress: Progress, *, requested: int) -> tuple[int, int]:
        """Return the batch of the next step on one device, and the step's rows over all ranks; 0
        rows where the epoch is over.

        Args:
            progress: progress before the step.
            requested: rows that are requested for it on one device; with `batch_tokens` its tokens
                are those that were planned.
        """
        if self._batching.batch_tokens:
            steps = self.token_steps(progress)
            step = progress.epoch_steps
            if step >= steps.plan.steps:
                return progress.batch, 0
            return steps.budgets[step], steps.plan.rows_of_step(step)
        return requested, self._rows_of_next_step(progress, requested * self.ranks)

    def is_over(self, progress: Progress) -> bool:
        """Return whether the epoch has no step left."""
        if self._batching.batch_tokens:
            return progress.epoch_steps >= self.token_steps(progress).plan.steps
        return self._rows_of_next_step(progress, 1) == 0

    def _rows_of_next_step(self, progress: Progress, global_rows: int) -> int:
        batching = self._batching
        most_steps = batching.max_steps_per_epoch
        left = self.num_rows - progress.epoch_rows
        if most_steps is not None and progress.epoch_steps >= most_steps:
            return 0
        if batching.drop_last and left < global_rows:
            return 0
        return min(global_rows, left)

    def divide(self, progress: Progress, rule: Callable[[Progress], int]) -> EpochPlan:
        """Divide the epoch at whose beginning, or within which, progress is."""
        batching = self._batching
        if batching.batch_tokens:
            plan = self.token_steps(progress).plan
        elif batching.batch_size_schedule is None:
            plan = EpochPlan.of(
                self.num_rows, global_rows=rule(progress) * self.ranks, **batching.ends
            )
            # It was another batch before a restart.
            if progress.epoch_rows != progress.epoch_steps * plan.global_rows:
                plan = self._mixed(progress, rule)
        else:
            order = self.order(progress)
            if self._is_estimate:
                plan = self._mixed(progress, rule, order)
            else:
                begin = progress.at_epoch_start()
                # twice, as a rule that is no function of progress answers otherwise the second time
                sizes, again = (
                    [size for _, size, _ in self._walk(begin, rule, order)] for _ in range(2)
                )
                plan = EpochPlan.of_sizes(sizes, max_steps=batching.max_steps_per_epoch)
                plan = replace(plan, is_estimate=sizes != again)
            plan = replace(
                plan, rows=self.num_rows, is_estimate=self._is_estimate or plan.is_estimate
            )
        if not self._counts_tokens:
            return plan
        return _with_tokens(plan, self.order(progress), self._lengths_of(progress.epoch))

    def constant(self, batch_size: int) -> EpochPlan:
        """Divide the first epoch by a batch that does not change; by the same lengths throughout a
        run, so that a schedule of the rate keeps its end.
        """
        batching = self._batching
        global_rows = self._batch.rows_of_step(batch_size) * self.ranks
        plan = EpochPlan.of(self.num_rows, global_rows=global_rows, **batching.ends)
        if not self._counts_tokens:
            return plan
        if self._reference_lengths is None:
            self._reference_lengths = self.lengths
        lengths = self._reference_lengths
        order = self._row_order(epoch=0, lengths=lengths.all)
        if batching.batch_tokens:
            batches = self._by_constant_tokens(lengths, order[:])
            order = batches.rows
            plan = EpochPlan.of_sizes(batches.sizes.tolist(), **batching.ends)
        return _with_tokens(plan, order, lengths)

    def ahead(
        self, progress: Progress, sizes: Mapping[int, int]
    ) -> Iterator[tuple[Progress, list[int], EpochPlan]]:
        """Walk through the rest of training without training.

        Args:
            progress: where training is.
            sizes: batch size of each epoch to walk through, as a growth function makes them.

        Returns:
            For each step: progress before it, the numbers of its rows, the plan of its epoch.
        """
        for at, size, order, plan in self._steps_ahead(progress, sizes, counts_tokens=True):
            yield at, order[at.epoch_rows : at.epoch_rows + size].tolist(), plan

    def num_steps(
        self, progress: Progress, sizes: Mapping[int, int], *, sees_tokens: bool = True
    ) -> int:
        """Count the steps of :meth:`ahead`; without reading lengths where a schedule sees no tokens
        in training.
        """
        counts_tokens = self._batching.batch_size_schedule is not None
        if counts_tokens and not sees_tokens and not self._batching.batch_tokens:
            num_steps = 0
            for rows in sizes.values():
                for _, _, step_end in self._walk(progress, self._batch.rule(rows), None):
                    progress = step_end
                    num_steps += 1
                progress = progress.after_epoch()
            return num_steps
        return sum(1 for _ in self._steps_ahead(progress, sizes, counts_tokens=counts_tokens))

    def _steps_ahead(
        self, progress: Progress, sizes: Mapping[int, int], *, counts_tokens: bool
    ) -> Iterator[tuple[Progress, int, RowOrder, EpochPlan]]:
        """Walk as :meth:`ahead` does, but yield the number of a step's rows and the order of its
        epoch.
        """
        progress = replace(progress, rows_per_epoch=self.num_rows)
        for rows in sizes.values():
            rule = self._batch.rule(rows)
            plan = self.divide(progress, rule)
            order = self.order(progress)
            for step_begin, size, step_end in self._walk(
                progress, rule, order if counts_tokens else None
            ):
                yield step_begin, size, order, plan
                progress = step_end
            progress = progress.after_epoch()

    def order(self, progress: Progress) -> RowOrder:
        """Return the row numbers of the current epoch in the order of their use.

        Raises:
            SettingError: the dataset has another number of rows than when training began.
        """
        num_rows = len(self._rows)
        if self._takes_all_rows and num_rows != self.num_rows:
            remedy = f"it had {self.num_rows} when training began; keep its length"
            raise SettingError("dataset", count(num_rows, "row"), remedy)
        if self._batching.batch_tokens:
            return self.token_steps(progress).batches.rows
        return self._order_of(progress.epoch)

    def _order_of(self, epoch: int) -> RowOrder:
        if not self._depends_on_lengths:
            return self._row_order(epoch=epoch)
        return self._row_order(epoch=epoch, lengths=self._lengths_of(epoch).all)

    def token_steps(self, progress: Progress) -> StepsOfEpoch:
        """Return the steps, by tokens, of the epoch within which progress is."""
        return self._planned(progress.at_epoch_start())

    def _plan_by_tokens(self, begin: Progress) -> StepsOfEpoch:
        """Plan the steps of an epoch that begins at a progress."""
        batching = self._batching
        lengths = self._lengths_of(begin.epoch)
        order = self._order_of(begin.epoch)[:]
        if batching.batch_size_schedule is None:
            assert batching.batch_tokens
            batches = self._by_constant_tokens(lengths, order)
            budgets = [batching.batch_tokens] * len(batches)
        else:
            batches, budgets = plan_batches_by_rule(
                lengths.all,
                batching.batch_size_schedule,
                order=order,
                progress=begin,
                ranks=self.ranks,
                **_row_limits(batching, self.ranks, self._divisible),
            )
        plan = EpochPlan.of_sizes(batches.sizes.tolist(), **batching.ends)
        return StepsOfEpoch(batches, budgets, plan)

    def _by_constant_tokens(self, lengths: RowLengths, order: torch.Tensor) -> TokenBatchPlan:
        return plan_token_batches(
            lengths.all, self._batching, ranks=self.ranks, order=order, divisible=self._divisible
        )

    def left_out(self, progress: Progress) -> dict[str, int]:
        """Count the rows of an epoch that is over which no step has used, by reason."""
        long_rows = 0
        if self._batching.batch_tokens:
            long_rows = len(self.token_steps(progress).batches.dropped)
        rest = self.num_rows - progress.epoch_rows - long_rows
        max_steps = self._batching.max_steps_per_epoch
        if max_steps is not None and progress.epoch_steps >= max_steps:
            reason = "max_steps_per_epoch"
        elif self._batching.drop_last:
            reason = "drop_last"
        else:
            # The audit does not let it pass.
            reason = "an error"
        reasons = {reason: rest, "long_rows": long_rows}
        return {reason: rows for reason, rows in reasons.items() if rows}

    def _mixed(
        self, progress: Progress, rule: Callable[[Progress], int], order: RowOrder | None = None
    ) -> EpochPlan:
        """Divide an epoch whose steps so far are not the rule's: these count as large as they were
        on average.
        """
        rows = progress.epoch_rows
        steps = progress.epoch_steps
        done = [rows * (step + 1) // steps - rows * step // steps for step in range(steps)]
        left = [size for _, size, _ in self._walk(progress, rule, order)]
        plan = EpochPlan.of_sizes(done + left)
        return replace(plan, rows=self.num_rows, most_steps=self._batching.max_steps_per_epoch)

    def _walk(
        self, progress: Progress, rule: Callable[[Progress], int], order: RowOrder | None
    ) -> Iterator[tuple[Progress, int, Progress]]:
        """Walk through the rest of an epoch: for each step, progress before it, its rows, progress
        after it.

        Rows are those over all ranks. Tokens are counted only with an `order`.
        """
        tokens: Iterator[int] = iter(())
        if order is not None:
            lengths = self._lengths_of(progress.epoch)
            tokens = _tokens_in_order(lengths, order, begin=progress.epoch_rows)
        while True:
            batch, size = self.next_step(progress, requested=rule(progress))
            if not size:
                return
            step_begin = replace(progress, batch=batch)
            progress = step_begin.after_step(rows=size, tokens=sum(islice(tokens, size)))
            yield step_begin, size, progress


def _with_tokens(plan: EpochPlan, order: RowOrder, lengths: RowLengths) -> EpochPlan:
    """Return the plan with the real tokens of the rows that are stepped, of all in their order."""
    used = plan.slots if plan.sizes is None else sum(plan.sizes)
    real = lengths.real[order[:used]]
    tokens = int(real.sum())
    # An epoch may have more slots than rows.
    if len(real) and bool((real == real[0]).all()):
        tokens = plan.slots * int(real[0])
    return replace(plan, tokens=tokens)


def _tokens_in_order(lengths: RowLengths, order: RowOrder, *, begin: int) -> Iterator[int]:
    """Yield the real tokens of each row from one place in an order on, read in blocks."""
    for block in range(begin, len(order), _BLOCK_ROWS):
        yield from lengths.real[order[block : block + _BLOCK_ROWS]].tolist()


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
