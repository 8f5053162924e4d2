"""The plan of one epoch: the order of its rows, and the steps that they make.

It is pure and needs no device; the time is close to linear in the rows.
"""

from __future__ import annotations

import base64
import math
import reprlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from adaptive_batch._util import count
from adaptive_batch.errors import GrowthFunctionError, SettingError
from adaptive_batch.schedules import (
    KEY,
    EpochPlan,
    Progress,
    Schedule,
    needs_noise_scale,
    request_batch,
)

from .sampling import Batching, row_order


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
        """Lengths as compressed text; those without padding only if they differ."""
        is_padded = not torch.equal(self.all, self.real)
        return [
            base64.b64encode(
                zlib.compress(lengths.to(torch.int32).numpy().tobytes(), level=1)
            ).decode()
            for lengths in ([self.all, self.real] if is_padded else [self.all])
        ]

    @classmethod
    def unpacked(cls, packed: Sequence[str]) -> RowLengths:
        """Return the lengths that `packed` holds as text."""
        tensors = [
            torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(text))), dtype=torch.int32)
            for text in packed
        ]
        # With one text, no row is padded: its lengths are those without padding too.
        return cls(tensors[0].to(torch.int64), tensors[-1].to(torch.int64))


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
    order_of: Callable[[int], torch.Tensor] | None = None

    @cached_property
    def begin(self) -> Progress:
        """Progress at the beginning of the epoch."""
        return replace(self.planned_at.at_epoch_start(), rows_per_epoch=self.num_rows)

    @cached_property
    def lengths(self) -> RowLengths:
        """Row lengths that the plan uses."""
        return self.measure()

    @cached_property
    def order(self) -> torch.Tensor:
        """Row numbers in the order of their use."""
        if self.batching.batch_tokens:
            return self.token_steps.rows
        return self._order()

    def _order(self) -> torch.Tensor:
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
        return self.lengths.real[self.order]

    @cached_property
    def token_steps(self) -> TokenSteps:
        """The steps of an epoch by tokens."""
        batching = self.batching
        assert batching.batch_tokens
        min_rows = 1
        # The default of 1 row per rank is no minimum: otherwise a step of one long row for each
        # rank would exceed its tokens.
        if batching.min_rows_per_batch > 1:
            min_rows = batching.min_rows_per_batch * self.ranks
        return fill_steps(
            self.lengths.all,
            batching.batch_size_schedule or batching.batch_tokens,
            order=self._order(),
            begin=self.begin,
            ranks=self.ranks,
            min_rows=min_rows,
            max_rows=batching.max_rows_per_batch and batching.max_rows_per_batch * self.ranks,
            long_rows=batching.long_rows,
            divisible=self.divisible,
        )

    @cached_property
    def _token_plan(self) -> EpochPlan:
        """The trained steps of an epoch by tokens, without those that its end cuts off."""
        return EpochPlan.from_sizes(self.token_steps.sizes, **self.batching.ends)

    # --- steps

    def num_tokens(self, progress: Progress, rows: int) -> int:
        """Return the real tokens of the next `rows` rows."""
        place = progress.epoch_rows
        return int(self._ordered_tokens[place : place + rows].sum())

    def num_steps_left(self, progress: Progress, *, global_rows: int) -> int:
        """Return the number of remaining steps of the epoch. Unless steps are filled with tokens,
        each has `global_rows` rows.
        """
        batching = self.batching
        if batching.batch_tokens:
            return max(0, self._token_plan.steps - progress.epoch_steps)
        max_steps = batching.max_steps_per_epoch
        if max_steps is not None:
            max_steps = max(0, max_steps - progress.epoch_steps)
        remaining = EpochPlan.from_rows(
            self.num_rows - progress.epoch_rows,
            global_rows=global_rows,
            drop_last=batching.drop_last,
            max_steps=max_steps,
        )
        return remaining.steps

    def is_over(self, progress: Progress) -> bool:
        """Return whether the epoch has no step left, however few rows it may have."""
        return self.num_steps_left(progress, global_rows=1) == 0

    def next_step(
        self, progress: Progress, rule: Callable[[Progress], int], *, counts_tokens: bool
    ) -> StepAhead | None:
        """Return the step at a progress; None if no step is left.

        Args:
            progress: progress before the step.
            rule: rows of a step on one device as a function of progress. Not called with
                `batch_tokens`, which plans the steps ahead.
            counts_tokens: whether to count the tokens of the step.
        """
        if self.is_over(progress):
            return None
        if self.batching.batch_tokens:
            batch = self.token_steps.budgets[progress.epoch_steps]
            rows = self.token_steps.sizes[progress.epoch_steps]
        else:
            batch = rule(progress)
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
            plan = self._token_plan
        elif batching.batch_size_schedule is None:
            plan = EpochPlan.from_rows(
                self.num_rows, global_rows=rule(at) * self.ranks, **batching.ends
            )
            # The epoch began with another batch size if a restart within it changed the size.
            if at.epoch_rows != at.epoch_steps * plan.global_rows:
                plan = self._divide_from(at, rule)
        elif needs_noise_scale(batching.batch_size_schedule):
            plan = replace(self._divide_from(at, rule), is_estimate=True)
        else:
            # A rule that is not a function of progress gives other steps at the second time. Then
            # training may have other steps too, so the plan is only an estimate.
            plan = self._divide_from(self.begin, rule)
            again = self._divide_from(self.begin, rule)
            plan = replace(plan, is_estimate=plan != again)
        return self._with_tokens(plan) if counts_tokens else plan

    def _divide_from(self, progress: Progress, rule: Callable[[Progress], int]) -> EpochPlan:
        """Return the plan of a partly trained epoch: its finished steps, and further steps with the
        sizes that `rule` gives. The sizes of the finished steps are not saved, so each gets their
        mean, rounded so that the sum is right.
        """
        rows = progress.epoch_rows
        steps = progress.epoch_steps
        finished = [rows * (step + 1) // steps - rows * step // steps for step in range(steps)]
        # A schedule may depend on the tokens trained so far.
        has_schedule = self.batching.batch_size_schedule is not None
        remaining = [step.rows for step in self.walk(progress, rule, counts_tokens=has_schedule)]
        plan = EpochPlan.from_sizes(finished + remaining)
        return replace(plan, rows=self.num_rows, most_steps=self.batching.max_steps_per_epoch)

    def _with_tokens(self, plan: EpochPlan) -> EpochPlan:
        """Return a plan with the real tokens of the rows that its steps train."""
        row_tokens = self._ordered_tokens[: plan.stepped_rows]
        if len(row_tokens) and bool((row_tokens == row_tokens[0]).all()):
            # A clock by samples counts a short last step in full, see EpochPlan.slots. If rows are
            # equally long, count its tokens in full too, so that both clocks show the same.
            return replace(plan, tokens=plan.slots * int(row_tokens[0]))
        return replace(plan, tokens=int(row_tokens.sum()))

    def left_out(self, progress: Progress) -> dict[str, int]:
        """Count the rows that no step of a finished epoch used, by reason."""
        long_rows = 0
        if self.batching.batch_tokens:
            long_rows = len(self.token_steps.dropped)
        rest = self.num_rows - progress.epoch_rows - long_rows
        max_steps = self.batching.max_steps_per_epoch
        if max_steps is not None and progress.epoch_steps >= max_steps:
            reason = "max_steps_per_epoch"
        elif self.batching.drop_last:
            reason = "drop_last"
        else:
            # No option leaves rows out here. The audit of the run reports this reason as a failure.
            reason = "an error"
        reasons = {reason: rest, "long_rows": long_rows}
        return {reason: rows for reason, rows in reasons.items() if rows}

    def dropped_rows(self) -> Iterator[tuple[str, list[int]]]:
        """Yield a message and the row numbers for the rows that are too long, then for the rows of
        a dropped last step.
        """
        steps = self.token_steps
        dropped = {f"of more than batch_tokens={self.batching.batch_tokens}": steps.dropped}
        if self.batching.drop_last:
            # EpochPlan.from_sizes drops the last step, whether it is full or not.
            dropped["of the last step (drop_last)"] = steps.rows[-steps.sizes[-1] :]
        for description, rows in dropped.items():
            if len(rows):
                numbers = sorted(rows.tolist())
                dropped_rows = f"{count(len(rows), 'row')} {description} dropped"
                epoch = self.planned_at.epoch
                yield f"epoch {epoch}: {dropped_rows}: {reprlib.repr(numbers)}", numbers


# --- steps by tokens


@dataclass(frozen=True, eq=False)
class TokenSteps:
    """The steps of an epoch by tokens.

    Attributes:
        rows: int64 ``[kept rows]``, row numbers in the order of use, each once.
        sizes: rows of each step.
        budgets: requested tokens of each step on one device.
        dropped: int64, numbers of the rows that are in no step (``long_rows="drop"``).
    """

    rows: torch.Tensor
    sizes: list[int]
    budgets: list[int]
    dropped: torch.Tensor


def fill_steps(
    lengths: torch.Tensor,
    budget: int | Schedule,
    *,
    order: torch.Tensor,
    begin: Progress | None = None,
    ranks: int = 1,
    min_rows: int = 1,
    max_rows: int | None = None,
    long_rows: str = "error",
    divisible: bool = False,
) -> TokenSteps:
    """Fill the steps of an epoch to a budget of tokens. Each row of `order` is in one step, or
    listed as dropped.

    Rows are taken in order. A step is closed when it has `min_rows` rows and the next row would
    take it beyond its budget or `max_rows`. So a step of `min_rows` long rows may have more tokens
    than its budget. The last step has the remaining rows, which may be fewer than `min_rows`.

    Args:
        lengths: int64 ``[rows]``, tokens of each row, 1 or more.
        budget: most tokens of a step on one device, if it has more than `min_rows` rows: a number,
            or a function of progress that is called at the beginning of each step.
        order: int64, row numbers in the order of their use, each at most once.
        begin: progress at the beginning of the epoch; None for that of training.
        ranks: number of devices; a step is filled to this many times the budget.
        min_rows: fewest rows of a step on all devices, except the last.
        max_rows: most rows of a step on all devices; None for no limit.
        long_rows: treatment of a row that alone has more tokens than a step. ``error``: refuse each
            budget below the longest row of the epoch. ``drop``: leave it out; only with a budget
            that is a number. ``alone``: the row is a step by itself.
        divisible: whether the number of rows of each step but the last is a multiple of a power of
            two of 1/16 to 1/8 of it, so that the step divides into equal micro-batches. A step then
            has up to 1/8 fewer rows than would fit, but not fewer than `min_rows`.

    Raises:
        SettingError: a row is too long. The message names the configured key.
        GrowthFunctionError: the function failed, or gives other answers when it is called again.
    """
    is_dropped = torch.zeros(len(order), dtype=torch.bool)
    if long_rows == "drop":
        assert isinstance(budget, int), "long_rows=drop is refused with a schedule"
        is_dropped = lengths[order] > budget * ranks
    kept = order[~is_dropped]
    longest = 0
    if len(kept):
        longest = int(lengths[kept].max())
    # Tokens of the rows before each row of `kept`, and of all of them.
    tokens_before = torch.cat([kept.new_zeros(1), lengths[kept].cumsum(0)])

    def divide() -> tuple[list[int], list[int]]:
        """Return the rows and the budget of each step."""
        sizes: list[int] = []
        budgets: list[int] = []
        progress = begin or Progress()
        first = 0
        while first < len(kept):
            step_budget = budget
            if not isinstance(step_budget, int):
                step_budget = request_batch(step_budget, progress, maximum=None).after
            if long_rows == "error" and longest > step_budget * ranks:
                key, others = "batch_tokens", "drop or alone"
                if not isinstance(budget, int):
                    key, others = KEY, "alone"
                row = int(order[lengths[order].argmax()])
                remedy = (
                    f"row {row} alone has {longest} tokens; give {math.ceil(longest / ranks)} or"
                    f" more at step {progress.steps}, or set long_rows to {others}"
                )
                raise SettingError(key, step_budget, remedy)
            most_tokens = tokens_before[first] + step_budget * ranks
            end = int(torch.searchsorted(tokens_before, most_tokens, right=True)) - 1
            rows = end - first
            if max_rows is not None:
                rows = min(rows, max_rows)
            # A step may exceed its budget to have its minimum of rows.
            rows = max(rows, min_rows)
            if first + rows >= len(kept):
                rows = len(kept) - first
            elif divisible:
                rows = _divisible_rows(rows, min_rows)
            tokens = int(tokens_before[first + rows] - tokens_before[first])
            progress = progress.after_step(rows=rows, tokens=tokens, batch=step_budget)
            sizes.append(rows)
            budgets.append(step_budget)
            first += rows
        return sizes, budgets

    sizes, budgets = divide()
    if not isinstance(budget, int) and divide() != (sizes, budgets):
        raise GrowthFunctionError(
            f"{KEY} {budget!r} returned other batches when it was called again: with batch_tokens"
            " it must be a function of progress alone"
        )
    return TokenSteps(kept, sizes, budgets, order[is_dropped])


def _divisible_rows(rows: int, min_rows: int) -> int:
    """Return up to an eighth fewer rows, so that a step divides into equal micro-batches."""
    # The largest power of two that is at most an eighth of the rows, but at least 1.
    multiple = 1 << max(0, rows.bit_length() - 4)
    fewer = rows - rows % multiple
    return fewer if fewer >= min_rows else rows
