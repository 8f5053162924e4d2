"""The plan of one epoch: the order of its rows, and the steps that they make."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch

from adaptive_batch._util import count
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import EpochPlan, Progress, needs_noise_scale

from .batching import Batching
from .order import EpochOrder, RowOrder, row_order
from .token_sampler import TokenBatchPlan, plan_batches, plan_batches_by_rule

# Rows whose tokens are looked up at once: a list of them is small, and few calls are made.
_BLOCK_ROWS = 2048


class Rows(Protocol):
    """A map-style dataset, and the tokens of each row, with and without padding: int64, `[rows]`.

    `recount` drops them where a row that was read, on any rank, has another length, and returns
    which row; "" for none. The next access counts them again.
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
        budgets: tokens on one device that are requested for each.
        plan: how the epoch divides into them.
    """

    batches: TokenBatchPlan
    budgets: list[int]
    plan: EpochPlan


@dataclass(frozen=True, eq=False)
class PlannedEpoch:
    """Plan of an epoch: a pure function of its arguments, computed on demand.

    Attributes:
        num_rows: rows of the epoch.
        batching: batching as configured; a schedule is a function of progress.
        begin: progress where the epoch begins.
        ranks: number of ranks; a step has `batch_size` rows for each.
        divisible: steps by tokens divide into equal micro-batches.
        measure: returns the lengths of the rows; called when they are needed.
        order_of: orders the rows of an epoch; None for the configured order.
    """

    num_rows: int
    batching: Batching
    begin: Progress
    ranks: int
    divisible: bool
    measure: Callable[[], RowLengths]
    order_of: EpochOrder | None = None

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
        lengths = self.lengths.all if batching.depends_on_lengths else None
        if self.order_of is not None:
            return self.order_of(epoch=self.begin.epoch, lengths=lengths)
        return row_order(
            self.num_rows,
            order=batching.sample_order,
            shuffle=batching.shuffle,
            window=batching.sample_window,
            seed=batching.seed,
            epoch=self.begin.epoch,
            lengths=lengths,
        )

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

    def num_tokens(self, numbers: Sequence[int]) -> int:
        """Return the real tokens of some rows."""
        return int(self.lengths.real[numbers].sum())

    # --- steps

    def next_step(self, progress: Progress, *, requested: int) -> tuple[int, int]:
        """Return the batch of the next step on one device, and the step's rows over all ranks; 0
        rows where the epoch is over.

        Args:
            progress: progress before the step.
            requested: rows that are requested for it on one device; with `batch_tokens` its tokens
                are those that were planned.
        """
        batching = self.batching
        step = progress.epoch_steps
        if batching.batch_tokens:
            if step >= self.token_steps.plan.steps:
                return progress.batch, 0
            return self.token_steps.budgets[step], self.token_steps.plan.rows_of_step(step)
        global_rows = requested * self.ranks
        left = self.num_rows - progress.epoch_rows
        is_cut = batching.max_steps_per_epoch is not None and step >= batching.max_steps_per_epoch
        if is_cut or (batching.drop_last and left < global_rows):
            return requested, 0
        return requested, min(global_rows, left)

    def num_steps_left(self, progress: Progress, *, global_rows: int) -> int:
        """Return the number of remaining steps; by rows, steps of `global_rows` each."""
        if self.batching.batch_tokens:
            return max(0, self.token_steps.plan.steps - progress.epoch_steps)
        most_steps = self.batching.max_steps_per_epoch
        if most_steps is not None:
            most_steps = max(0, most_steps - progress.epoch_steps)
        rest = EpochPlan.from_rows(
            self.num_rows - progress.epoch_rows,
            global_rows=global_rows,
            drop_last=self.batching.drop_last,
            max_steps=most_steps,
        )
        return rest.steps

    def is_over(self, progress: Progress) -> bool:
        """Return whether the epoch has no step left, however few rows it may have."""
        return self.num_steps_left(progress, global_rows=1) == 0

    def walk(
        self, progress: Progress, rule: Callable[[Progress], int], *, counts_tokens: bool
    ) -> Iterator[tuple[Progress, int, Progress]]:
        """Walk through the rest of the epoch without training.

        Args:
            progress: where training is.
            rule: rows of a step on one device as a function of progress.
            counts_tokens: whether progress counts the tokens of the steps.

        Returns:
            For each step: progress before it, its rows over all ranks, progress after it.
        """
        tokens: Iterator[int] = iter(())
        if counts_tokens:
            tokens = self._tokens_from(progress.epoch_rows)
        while True:
            batch, size = self.next_step(progress, requested=rule(progress))
            if not size:
                return
            step_begin = replace(progress, batch=batch)
            progress = step_begin.after_step(rows=size, tokens=sum(islice(tokens, size)))
            yield step_begin, size, progress

    def _tokens_from(self, place: int) -> Iterator[int]:
        """Yield the real tokens of each row from a place in the order on, read in blocks."""
        order = self.order
        for block in range(place, len(order), _BLOCK_ROWS):
            yield from self.lengths.real[order[block : block + _BLOCK_ROWS]].tolist()

    def divide(
        self,
        progress: Progress,
        rule: Callable[[Progress], int],
        *,
        counts_tokens: bool,
        sizes: Sequence[int] | None = None,
    ) -> EpochPlan:
        """Divide the epoch into steps, as they are seen where training is.

        Args:
            progress: where training is: at the beginning of the epoch, or within it.
            rule: rows of a step on one device as a function of progress.
            counts_tokens: whether the plan has its tokens.
            sizes: rows of all steps of a schedule, if it has been asked; None asks it.
        """
        batching = self.batching
        if batching.batch_tokens:
            plan = self.token_steps.plan
        elif batching.batch_size_schedule is None:
            plan = EpochPlan.from_rows(
                self.num_rows, global_rows=rule(progress) * self.ranks, **batching.ends
            )
            # It was another batch before a restart.
            if progress.epoch_rows != progress.epoch_steps * plan.global_rows:
                plan = self._divide_rest(progress, rule)
        elif sizes is not None:
            plan = EpochPlan.from_sizes(sizes, max_steps=batching.max_steps_per_epoch)
            plan = replace(plan, rows=self.num_rows)
        elif needs_noise_scale(batching.batch_size_schedule):
            plan = replace(self._divide_rest(progress, rule), is_estimate=True)
        else:
            # Twice, since a rule that is not a function of progress then answers differently.
            sizes, again = (
                [size for _, size, _ in self.walk(self.begin, rule, counts_tokens=True)]
                for _ in range(2)
            )
            plan = EpochPlan.from_sizes(sizes, max_steps=batching.max_steps_per_epoch)
            plan = replace(plan, rows=self.num_rows, is_estimate=sizes != again)
        return self._with_tokens(plan) if counts_tokens else plan

    def _divide_rest(self, progress: Progress, rule: Callable[[Progress], int]) -> EpochPlan:
        """Divide an epoch whose steps so far are not the rule's: these count as large as they were
        on average.
        """
        rows = progress.epoch_rows
        steps = progress.epoch_steps
        done = [rows * (step + 1) // steps - rows * step // steps for step in range(steps)]
        is_rule = self.batching.batch_size_schedule is not None
        left = [size for _, size, _ in self.walk(progress, rule, counts_tokens=is_rule)]
        plan = EpochPlan.from_sizes(done + left)
        return replace(plan, rows=self.num_rows, most_steps=self.batching.max_steps_per_epoch)

    def _with_tokens(self, plan: EpochPlan) -> EpochPlan:
        """Return a plan with the real tokens of the rows that are stepped."""
        used = plan.slots if plan.sizes is None else sum(plan.sizes)
        real = self.lengths.real[self.order[:used]]
        tokens = int(real.sum())
        # An epoch may have more slots than rows.
        if len(real) and bool((real == real[0]).all()):
            tokens = plan.slots * int(real[0])
        return replace(plan, tokens=tokens)

    def left_out(self, progress: Progress) -> dict[str, int]:
        """Count the rows that no step of a finished epoch has used, by reason."""
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
            # The audit does not let it pass.
            reason = "an error"
        reasons = {reason: rest, "long_rows": long_rows}
        return {reason: rows for reason, rows in reasons.items() if rows}

    def describe_token_steps(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield a kind of event, a message and facts for the steps that have more than
        `batch_tokens` for `min_rows_per_batch`, and for the rows that are in no step.
        """
        batching = self.batching
        epoch = self.begin.epoch
        batches, budgets, _ = self.token_steps
        least = batching.min_rows_per_batch
        if least > 1:
            tokens = [int(self.lengths.all[rows].sum()) for rows in batches.tolist()]
            most = [budget * self.ranks for budget in budgets]
            over = [held for held, budget in zip(tokens, most, strict=True) if held > budget]
            if over:
                message = (
                    f"epoch {epoch}: {len(over)} of {count(len(tokens), 'step')} have more than"
                    f" batch_tokens, up to {max(over)} over all ranks, for"
                    f" min_rows_per_batch={least}"
                )
                yield "over_budget", message, {"steps": len(over)}
        rows_by_reason = {
            f"of more than batch_tokens={batching.batch_tokens}": batches.dropped.tolist(),
        }
        if batching.drop_last:
            rows_by_reason["of the last step (drop_last)"] = batches[-1]
        for reason, rows in rows_by_reason.items():
            if not rows:
                continue
            numbers = ", ".join(map(str, sorted(rows)[:10]))
            if len(rows) > 10:
                numbers += ", ..."
            verb = "is" if len(rows) == 1 else "are"
            dropped = f"{count(len(rows), 'row')} {reason} {verb} dropped"
            yield "dropped", f"epoch {epoch}: {dropped}: {numbers}", {"rows": sorted(rows)}


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
        SettingError: a row is too long, or the limits contradict each other.
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
    """Return the limits of a step by tokens, over all ranks."""
    least = batching.min_rows_per_batch
    return {
        # One row per rank is not a minimum, so that long rows never exceed the tokens of a step.
        "min_rows": least * ranks if least > 1 else 1,
        "max_rows": batching.max_rows_per_batch and batching.max_rows_per_batch * ranks,
        "long_rows": batching.long_rows,
        "divisible": divisible,
    }
