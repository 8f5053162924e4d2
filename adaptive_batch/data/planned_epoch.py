"""The plan of one epoch: the order of its rows, and the steps that they make."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from adaptive_batch._util import count
from adaptive_batch.schedules import EpochPlan, Progress, needs_noise_scale

from .batching import Batching
from .order import RowOrder, row_order
from .token_sampler import TokenBatchPlan, plan_batches, plan_batches_by_rule


class Rows(Protocol):
    """A map-style dataset, and the tokens of each row, with and without padding: int64, `[rows]`.

    `recount` drops these lengths if a row that any rank has read has another length, and returns a
    sentence that names the row; else "". The next access counts all rows again.
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
        """Lengths as text; those without padding only if they differ."""
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


class TokenSteps(NamedTuple):
    """The steps of an epoch by tokens.

    Attributes:
        batches: rows of each step.
        budgets: requested tokens of each step on one device.
        plan: the steps that are trained.
    """

    batches: TokenBatchPlan
    budgets: list[int]
    plan: EpochPlan


@dataclass
class StepAhead:
    """A step that is not trained yet.

    Attributes:
        progress: progress before the step, with the batch that is requested for it.
        rows: number of rows, over all ranks.
        tokens: real tokens of these rows; 0 if they are not counted ahead of training.
    """

    progress: Progress
    rows: int
    tokens: int

    @property
    def batch(self) -> int:
        """Batch that is requested on one device, in rows or tokens."""
        return self.progress.batch

    @property
    def after(self) -> Progress:
        """Progress after the step."""
        return self.progress.after_step(rows=self.rows, tokens=self.tokens)


@dataclass(frozen=True, eq=False)
class PlannedEpoch:
    """Plan of an epoch: a pure function of its arguments, computed on demand.

    Attributes:
        num_rows: rows of the epoch.
        batching: batching as configured; a schedule is a function of progress.
        planned_at: progress from which the epoch is planned: its beginning, or within it.
        ranks: number of ranks; a step has `batch_size` rows for each.
        divisible: whether steps by tokens divide into equal micro-batches.
        measure: function that returns the lengths of the rows; called when they are needed.
        order_of: function that returns the order of an epoch; None for the configured order.
    """

    num_rows: int
    batching: Batching
    planned_at: Progress
    ranks: int
    divisible: bool
    measure: Callable[[], RowLengths]
    order_of: Callable[[int], RowOrder] | None = None

    @cached_property
    def begin(self) -> Progress:
        """Progress at the beginning of the epoch."""
        return replace(self.planned_at.at_epoch_start(), rows_per_epoch=self.num_rows)

    @cached_property
    def lengths(self) -> RowLengths:
        """Row lengths that the plan uses."""
        return self.measure()

    @cached_property
    def order(self) -> RowOrder:
        """Row numbers in the order of their use."""
        if self.batching.batch_tokens:
            return self.token_steps.batches.rows
        return self._order()

    def _order(self) -> RowOrder:
        """Return the order of the rows before steps by tokens are filled."""
        batching = self.batching
        epoch = self.planned_at.epoch
        if self.order_of is not None:
            return self.order_of(epoch)
        return row_order(
            self.num_rows,
            order=batching.sample_order,
            shuffle=batching.shuffle,
            window=batching.sample_window,
            seed=batching.seed,
            epoch=epoch,
            lengths=self.lengths.all if batching.depends_on_lengths else None,
        )

    @cached_property
    def _ordered_tokens(self) -> torch.Tensor:
        """Real tokens of each row, in the order of their use."""
        return self.lengths.real[self.order[:]]

    @cached_property
    def token_steps(self) -> TokenSteps:
        """The steps of an epoch by tokens."""
        batching = self.batching
        order = self._order()[:]
        if batching.batch_size_schedule is None:
            assert batching.batch_tokens
            batches = plan_token_batches(
                self.lengths.all,
                batching,
                ranks=self.ranks,
                order=order,
                divisible=self.divisible,
            )
            budgets = [batching.batch_tokens] * len(batches)
        else:
            batches, budgets = plan_batches_by_rule(
                self.lengths.all,
                batching.batch_size_schedule,
                order=order,
                progress=self.begin,
                ranks=self.ranks,
                **_row_limits(batching, self.ranks, self.divisible),
            )
        plan = EpochPlan.from_sizes(batches.sizes.tolist(), **batching.ends)
        return TokenSteps(batches, budgets, plan)

    # --- steps

    def num_tokens(self, progress: Progress, rows: int) -> int:
        """Return the real tokens of the next `rows` rows."""
        place = progress.epoch_rows
        return int(self._ordered_tokens[place : place + rows].sum())

    def num_steps_left(self, progress: Progress, *, global_rows: int) -> int:
        """Return the number of remaining steps; by rows, steps of `global_rows` each."""
        batching = self.batching
        if batching.batch_tokens:
            return max(0, self.token_steps.plan.steps - progress.epoch_steps)
        rows = self.num_rows - progress.epoch_rows
        steps = rows // global_rows
        if rows % global_rows and not batching.drop_last:
            steps += 1
        if batching.max_steps_per_epoch is None:
            return steps
        return min(steps, max(0, batching.max_steps_per_epoch - progress.epoch_steps))

    def is_over(self, progress: Progress) -> bool:
        """Return whether the epoch has no step left, however few rows it may have."""
        return self.num_steps_left(progress, global_rows=1) == 0

    def next_step(
        self, progress: Progress, rule: Callable[[Progress], int], *, counts_tokens: bool
    ) -> StepAhead | None:
        """Return the step at a progress; None if no step is left.

        Args:
            progress: progress before the step.
            rule: rows of a step on one device as a function of progress. With `batch_tokens`, it is
                called too, and the step is the planned one.
            counts_tokens: whether to count the tokens of the step.
        """
        if self.is_over(progress):
            return None
        batch = rule(progress)
        if self.batching.batch_tokens:
            batch = self.token_steps.budgets[progress.epoch_steps]
            rows = self.token_steps.plan.rows_of_step(progress.epoch_steps)
        else:
            rows = min(batch * self.ranks, self.num_rows - progress.epoch_rows)
            if self.batching.drop_last and rows < batch * self.ranks:
                return None
        tokens = self.num_tokens(progress, rows) if counts_tokens else 0
        return StepAhead(replace(progress, batch=batch), rows, tokens)

    def walk(
        self, progress: Progress, rule: Callable[[Progress], int], *, counts_tokens: bool
    ) -> Iterator[StepAhead]:
        """Yield the remaining steps from a progress on; see :meth:`next_step`."""
        step = self.next_step(progress, rule, counts_tokens=counts_tokens)
        while step is not None:
            yield step
            step = self.next_step(step.after, rule, counts_tokens=counts_tokens)

    def divide(self, rule: Callable[[Progress], int], *, counts_tokens: bool) -> EpochPlan:
        """Divide the epoch into steps, as they are known at `planned_at`.

        Args:
            rule: rows of a step on one device as a function of progress.
            counts_tokens: whether the plan has its tokens.
        """
        batching = self.batching
        at = self.planned_at
        if batching.batch_tokens:
            plan = self.token_steps.plan
        elif batching.batch_size_schedule is None:
            plan = EpochPlan.from_rows(
                self.num_rows, global_rows=rule(at) * self.ranks, **batching.ends
            )
            # It was another batch before a restart.
            if at.epoch_rows != at.epoch_steps * plan.global_rows:
                plan = self._divide_from(at, rule)
        elif needs_noise_scale(batching.batch_size_schedule):
            plan = replace(self._divide_from(at, rule), is_estimate=True)
        else:
            # Twice, since a rule that is not a function of progress then answers differently.
            plan, again = (self._divide_from(self.begin, rule) for _ in range(2))
            plan = replace(plan, is_estimate=plan != again)
        return self._with_tokens(plan) if counts_tokens else plan

    def _divide_from(self, progress: Progress, rule: Callable[[Progress], int]) -> EpochPlan:
        """Divide an epoch whose rows are trained up to a progress: the steps so far count as large
        as they were on average.
        """
        rows = progress.epoch_rows
        steps = progress.epoch_steps
        done = [rows * (step + 1) // steps - rows * step // steps for step in range(steps)]
        is_schedule = self.batching.batch_size_schedule is not None
        left = [step.rows for step in self.walk(progress, rule, counts_tokens=is_schedule)]
        plan = EpochPlan.from_sizes(done + left)
        return replace(plan, rows=self.num_rows, most_steps=self.batching.max_steps_per_epoch)

    def _with_tokens(self, plan: EpochPlan) -> EpochPlan:
        """Return a plan with the real tokens of the rows that are stepped."""
        used = plan.slots if plan.sizes is None else sum(plan.sizes)
        real = self._ordered_tokens[:used]
        tokens = int(real.sum())
        # An epoch may have more slots than rows.
        if len(real) and bool((real == real[0]).all()):
            tokens = plan.slots * int(real[0])
        return replace(plan, tokens=tokens)

    def left_out(self, progress: Progress) -> dict[str, int]:
        """Count the rows that no step of a finished epoch used, by reason."""
        long_rows = 0
        if self.batching.batch_tokens:
            long_rows = len(self.token_steps.batches.dropped)
        rest = self.num_rows - progress.epoch_rows - long_rows
        max_steps = self.batching.max_steps_per_epoch
        if max_steps is not None and progress.epoch_steps >= max_steps:
            reason = "max_steps_per_epoch"
        elif self.batching.drop_last:
            reason = "drop_last"
        else:
            # The audit reports it.
            reason = "an error"
        reasons = {reason: rest, "long_rows": long_rows}
        return {reason: rows for reason, rows in reasons.items() if rows}

    def steps_over_budget(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield the kind, message and facts of an event if steps have more than `batch_tokens`
        because of `min_rows_per_batch`.
        """
        min_rows = self.batching.min_rows_per_batch
        if min_rows == 1:
            return
        batches, budgets, _ = self.token_steps
        tokens_of_steps = [int(self.lengths.all[rows].sum()) for rows in batches.tolist()]
        too_large = [
            tokens
            for tokens, budget in zip(tokens_of_steps, budgets, strict=True)
            if tokens > budget * self.ranks
        ]
        if too_large:
            message = (
                f"epoch {self.planned_at.epoch}: {len(too_large)} of"
                f" {count(len(batches), 'step')} have more than batch_tokens, up to"
                f" {max(too_large)} over all ranks, for min_rows_per_batch={min_rows}"
            )
            yield "over_budget", message, {"steps": len(too_large)}

    def dropped_rows(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield the kind, message and facts of an event for rows that are too long, and of one for
        those of the last step.
        """
        batches = self.token_steps.batches
        dropped = [
            (batches.dropped.tolist(), f"of more than batch_tokens={self.batching.batch_tokens}")
        ]
        if self.batching.drop_last:
            # EpochPlan.from_sizes drops the last step, whether it is full or not.
            dropped.append((batches[-1], "of the last step (drop_last)"))
        for rows, origin in dropped:
            if not rows:
                continue
            numbers = ", ".join(map(str, sorted(rows)[:10]))
            if len(rows) > 10:
                numbers += ", ..."
            verb = "is" if len(rows) == 1 else "are"
            message = f"{count(len(rows), 'row')} {origin} {verb} dropped: {numbers}"
            yield "dropped", f"epoch {self.planned_at.epoch}: {message}", {"rows": sorted(rows)}


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
        SettingError: a row is too long, or the fewest rows do not fit.
    """
    assert batching.batch_tokens
    return plan_batches(
        lengths,
        batching.batch_tokens * ranks,
        order=order,
        last_rows=batching.min_rows_per_batch * ranks,
        **_row_limits(batching, ranks, divisible),
    )


def _row_limits(batching: Batching, ranks: int, divisible: bool) -> dict[str, Any]:
    """Return the limits of a step by tokens, over all ranks."""
    least = batching.min_rows_per_batch
    return {
        # One row per rank is not a minimum, so that long rows never exceed the tokens of a step.
        "min_rows": least * ranks if least > 1 else 1,
        "max_rows": batching.max_rows_per_batch and batching.max_rows_per_batch * ranks,
        "long_rows": batching.long_rows,
        "divisible": divisible,
    }
