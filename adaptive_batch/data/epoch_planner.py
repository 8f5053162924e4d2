"""How an epoch divides into optimizer steps, ahead of training: by a constant batch, a rule, or a
budget of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch

from adaptive_batch._util import count
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import (
    EpochPlan,
    Progress,
    Schedule,
    needs_noise_scale,
)

from .batching import Batching
from .epoch_lengths import EpochLengths
from .order import EpochOrder, RowOrder, row_order
from .requested_batch import RequestedBatch
from .token_steps import StepsOfEpoch, TokenSteps

# Rows whose tokens are looked up at once: a list of them is small, and few calls are made.
_BLOCK_ROWS = 2048


class Rows(Protocol):
    """A map-style dataset, and the tokens of each row, with and without padding: int64, `[rows]`.

    `recount` has them counted again where a row that was read, on any rank, is not as long as they
    say, and returns which; "" for none.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Any: ...
    @property
    def lengths(self) -> torch.Tensor: ...
    @property
    def real_lengths(self) -> torch.Tensor: ...
    def num_real_tokens(self, row: Any) -> int: ...
    def recount(self) -> str: ...


class _RealTokens:
    """The tokens of an epoch's rows, padding not counted.

    Args:
        rows: rows of an epoch.
        are_needed: whether the tokens of an epoch must be known.
    """

    def __init__(self, rows: Rows, *, are_needed: bool) -> None:
        self._rows = rows
        self._are_needed = are_needed

    def of_epoch(self, plan: EpochPlan, order: Callable[[], RowOrder]) -> int:
        """Return the tokens of the rows that are stepped, of all in their order; 0 where nothing
        needs them.
        """
        if not self._are_needed:
            return 0
        used = plan.slots if plan.sizes is None else sum(plan.sizes)
        lengths = self._rows.real_lengths[order()[:used]]
        alike = len(lengths) > 0 and bool((lengths == lengths[0]).all())
        # An epoch may have more slots than rows.
        if alike:
            return plan.slots * int(lengths[0])
        return int(lengths.sum())

    def in_order(self, order: RowOrder, *, begin: int) -> Iterator[int]:
        """Yield the tokens of each row from one place in an order on, read in blocks."""
        for block in range(begin, len(order), _BLOCK_ROWS):
            yield from self._rows.real_lengths[order[block : block + _BLOCK_ROWS]].tolist()


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
        depends_on_lengths: which rows a step holds does.
        num_rows: rows of an epoch.
        lengths: lengths that the current epoch is planned by.
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
        self._tokens = _RealTokens(rows, are_needed=counts_tokens or bool(batching.batch_tokens))
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
        self.depends_on_lengths = bool(batching.batch_tokens) or batching.sample_order == "seqlen"
        if self.depends_on_lengths:
            # A row that cannot be measured is refused now.
            _ = rows.lengths
        self.lengths = EpochLengths(lambda: rows.lengths, self._row_order)
        self._is_estimate = schedule is not None and needs_noise_scale(schedule)
        self._token_steps = self._new_token_steps()

    @property
    def _batching(self) -> Batching:
        """What a step holds, as configured; a schedule that follows the rate is put in later."""
        return self._batch.batching

    def _new_token_steps(self) -> TokenSteps:
        return TokenSteps(self._batching, self.lengths, ranks=self.ranks, divisible=self._divisible)

    def follow(self, schedule: Schedule) -> None:
        """Follow a schedule from now on that is coupled to the rate's."""
        self._batch.follow(schedule)
        self._token_steps = self._new_token_steps()

    def begin(self, progress: Progress) -> bool:
        """Plan what is left of an epoch by the lengths as they are now; return whether what is left
        was planned by others.
        """
        if not self.depends_on_lengths:
            return False
        rows = progress.epoch_rows
        differs = self.lengths.begin(progress.epoch, rows=rows)
        return differs and rows > 0

    def state_dict(self) -> dict[str, Any]:
        """Return the ranks that steps are for, and the lengths that the current epoch is planned
        by, as plain values.
        """
        return {"ranks": self.ranks, **self.lengths.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Plan the epoch as it was planned when the state was saved."""
        self.ranks = state["ranks"]
        self.lengths.load_state_dict(state)
        self._token_steps = self._new_token_steps()

    def next_step(self, progress: Progress, *, requested: int) -> tuple[int, int]:
        """Return the batch of the next step on one device, and the step's rows over all ranks; 0
        rows where the epoch is over.

        Args:
            progress: progress before the step.
            requested: rows that are requested for it on one device; with `batch_tokens` its tokens
                are those that were planned.
        """
        if self._batching.batch_tokens:
            steps = self._token_steps.of_epoch(progress)
            step = progress.epoch_steps
            if step >= steps.plan.steps:
                return progress.batch, 0
            return steps.budgets[step], steps.plan.rows_of_step(step)
        return requested, self._rows_of_next_step(progress, requested * self.ranks)

    def is_over(self, progress: Progress) -> bool:
        """Return whether the epoch has no step left."""
        if self._batching.batch_tokens:
            return progress.epoch_steps >= self._token_steps.of_epoch(progress).plan.steps
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
            plan = self._token_steps.of_epoch(progress).plan
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
        return replace(plan, tokens=self._tokens.of_epoch(plan, lambda: self.order(progress)))

    def constant(self, batch_size: int) -> EpochPlan:
        """Divide the first epoch by a batch that does not change."""
        batching = self._batching
        if batching.batch_tokens:
            order = self._row_order(epoch=0, lengths=self._rows.lengths)[:]
            batches = self._token_steps.constant(order, self._rows.lengths)
            plan = EpochPlan.of_sizes(batches.sizes.tolist(), **batching.ends)
            return replace(plan, tokens=self._tokens.of_epoch(plan, lambda: batches.rows))
        global_rows = self._batch.rows_of_step(batch_size) * self.ranks
        plan = EpochPlan.of(self.num_rows, global_rows=global_rows, **batching.ends)
        return replace(plan, tokens=self._tokens.of_epoch(plan, lambda: self.order(Progress())))

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
        if not self.depends_on_lengths:
            return self._row_order(epoch=progress.epoch)
        return self.lengths.order(progress.epoch)

    def token_steps(self, progress: Progress) -> StepsOfEpoch:
        """Return the steps of the current epoch, by tokens."""
        return self._token_steps.of_epoch(progress)

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
            tokens = self._tokens.in_order(order, begin=progress.epoch_rows)
        while True:
            batch, size = self.next_step(progress, requested=rule(progress))
            if not size:
                return
            step_begin = replace(progress, batch=batch)
            progress = step_begin.after_step(rows=size, tokens=sum(islice(tokens, size)))
            yield step_begin, size, progress
