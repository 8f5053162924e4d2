"""The plan of one epoch: the order of its rows, and the steps that they make.

It is pure and needs no device; the time is close to linear in the rows.
"""

from __future__ import annotations

import base64
import math
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
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

from .sampling import Batching, RowOrder, row_order

# Most rows that are Python numbers at one time: tensors take a quarter of the memory.
_CHUNK = 65_536


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
            return self.token_steps.rows
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
        assert batching.batch_tokens
        least = batching.min_rows_per_batch
        return fill_steps(
            self.lengths.all,
            batching.batch_size_schedule or batching.batch_tokens,
            order=self._order()[:],
            begin=self.begin,
            ranks=self.ranks,
            # One row per rank is no minimum, so that long rows never exceed the tokens of a step.
            min_rows=least * self.ranks if least > 1 else 1,
            max_rows=batching.max_rows_per_batch and batching.max_rows_per_batch * self.ranks,
            long_rows=batching.long_rows,
            divisible=self.divisible,
        )

    @cached_property
    def _token_plan(self) -> EpochPlan:
        """The steps of an epoch by tokens that are trained."""
        return EpochPlan.from_sizes(self.token_steps.sizes.tolist(), **self.batching.ends)

    # --- steps

    def num_tokens(self, progress: Progress, rows: int) -> int:
        """Return the real tokens of the next `rows` rows."""
        place = progress.epoch_rows
        return int(self._ordered_tokens[place : place + rows].sum())

    def num_steps_left(self, progress: Progress, *, global_rows: int) -> int:
        """Return the number of remaining steps; by rows, steps of `global_rows` each."""
        batching = self.batching
        if batching.batch_tokens:
            return max(0, self._token_plan.steps - progress.epoch_steps)
        steps_left = batching.max_steps_per_epoch
        if steps_left is not None:
            steps_left = max(0, steps_left - progress.epoch_steps)
        rows_left = self.num_rows - progress.epoch_rows
        plan = EpochPlan.from_rows(
            rows_left, global_rows=global_rows, drop_last=batching.drop_last, max_steps=steps_left
        )
        return plan.steps

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
            rows = self._token_plan.rows_of_step(progress.epoch_steps)
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
            plan = self._token_plan
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
            long_rows = len(self.token_steps.dropped)
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

    def dropped_rows(self) -> Iterator[tuple[str, list[int]]]:
        """Yield a message and the row numbers of rows that are too long, and of those of a dropped
        last step.
        """
        steps = self.token_steps
        dropped = [
            (steps.dropped.tolist(), f"of more than batch_tokens={self.batching.batch_tokens}")
        ]
        if self.batching.drop_last:
            # EpochPlan.from_sizes drops the last step, whether it is full or not.
            dropped.append((steps.split()[-1].tolist(), "of the last step (drop_last)"))
        for rows, origin in dropped:
            if not rows:
                continue
            numbers = ", ".join(map(str, sorted(rows)[:10]))
            if len(rows) > 10:
                numbers += ", ..."
            verb = "is" if len(rows) == 1 else "are"
            message = f"{count(len(rows), 'row')} {origin} {verb} dropped: {numbers}"
            yield f"epoch {self.planned_at.epoch}: {message}", sorted(rows)


# --- steps by tokens


@dataclass(frozen=True, eq=False)
class TokenSteps:
    """The steps of an epoch by tokens.

    Attributes:
        rows: int64 ``[kept rows]``, row numbers in the order of use, each once.
        sizes: int64 ``[steps]``, rows of each step.
        budgets: requested tokens of each step on one device.
        dropped: int64, numbers of the rows that are in no step (``long_rows="drop"``).
    """

    rows: torch.Tensor
    sizes: torch.Tensor
    budgets: list[int]
    dropped: torch.Tensor

    def __len__(self) -> int:
        return len(self.sizes)

    def split(self) -> Sequence[torch.Tensor]:
        """Return the row numbers of each step."""
        return torch.split(self.rows, self.sizes.tolist())


def fill_steps(
    lengths: Sequence[int] | torch.Tensor,
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
        lengths: int ``[rows]``, tokens of each row, 1 or more.
        budget: most tokens of a step on one device, if it has more than `min_rows` rows: a number,
            or a function of progress that is called at the beginning of each step.
        order: int64, row numbers in the order of their use, each at most once.
        begin: progress at the beginning of the epoch; None for that of training.
        ranks: number of devices; a step is filled to this many times the budget.
        min_rows: fewest rows of a step on all devices, except the last.
        max_rows: most rows of a step on all devices; None for no limit.
        long_rows: treatment of a row that alone has more tokens than a step. ``error``: refuse each
            budget below the longest row of the epoch. ``drop``: the row waits for a budget that
            holds it, and is dropped only if none comes before the epoch ends. ``alone``: the row is
            a step by itself.
        divisible: whether the number of rows of each step but the last is a multiple of a power of
            two of 1/16 to 1/8 of it, so that the step divides into equal micro-batches. A step then
            has up to 1/8 fewer rows than would fit, but not fewer than `min_rows`.

    Raises:
        SettingError: a row is too long, or the shortest `min_rows` rows do not fit in one step. The
            message names the configured keys.
        GrowthFunctionError: the function failed, or gives another answer when it is called again.
    """
    lengths = torch.as_tensor(lengths, dtype=torch.int64)
    if len(lengths) and int(lengths.min()) < 1:
        row = int(lengths.argmin())
        raise SettingError("lengths", int(lengths[row]), f"row {row} must have 1 token or more")
    longest = 0
    if len(order):
        longest = int(lengths[order].max())
    kept = order
    if isinstance(budget, int):
        if long_rows == "drop":
            # They would wait for a larger budget in vain.
            kept = order[lengths[order] <= budget * ranks]
        _check_min_rows(lengths[kept], budget * ranks, min_rows)

    filler = _Filler(
        lengths[kept],
        min_rows=min_rows,
        max_rows=max_rows,
        drops_long_rows=long_rows == "drop",
        divisible=divisible,
    )
    progress = begin = begin or Progress()
    places = array("q")
    # Rows, real tokens and budget of each step.
    steps: list[tuple[int, int, int]] = []
    while filler.has_rows:
        asked = budget
        if not isinstance(asked, int):
            asked = request_batch(asked, progress, maximum=None).after
        if long_rows == "error" and longest > asked * ranks:
            key = "batch_tokens" if isinstance(budget, int) else KEY
            row = int(order[lengths[order].argmax()])
            needed = math.ceil(longest / ranks)
            remedy = (
                f"row {row} alone has {longest} tokens; give {needed} or more at step"
                f" {progress.steps}, or set long_rows to drop or alone"
            )
            raise SettingError(key, asked, remedy)
        step, tokens = filler.next_step(asked * ranks)
        if step:
            places.extend(step)
            steps.append((len(step), tokens, asked))
            progress = progress.after_step(rows=len(step), tokens=tokens, batch=asked)
    if not isinstance(budget, int):
        _check_answers(budget, begin, steps)
    used = kept[torch.tensor(places, dtype=torch.int64)]
    is_dropped = torch.ones(len(lengths), dtype=torch.bool)
    is_dropped[used] = False
    sizes = torch.tensor([rows for rows, _, _ in steps], dtype=torch.int64)
    return TokenSteps(used, sizes, [asked for _, _, asked in steps], order[is_dropped[order]])


def _check_min_rows(sizes: torch.Tensor, max_tokens: int, min_rows: int) -> None:
    """Raise SettingError if no `min_rows` rows fit in one step."""
    if 1 < min_rows <= len(sizes):
        needed = int(torch.topk(sizes, min_rows, largest=False).values.sum())
        if needed > max_tokens:
            remedy = (
                f"the {min_rows} shortest rows have {needed} tokens, and {max_tokens} are allowed;"
                " lower one, or raise the other"
            )
            raise SettingError("min_rows_per_batch", min_rows, remedy)


def _check_answers(
    rule: Schedule, progress: Progress, steps: Sequence[tuple[int, int, int]]
) -> None:
    """Raise GrowthFunctionError if a schedule gives other answers when it is called again."""
    for rows, tokens, asked in steps:
        again = request_batch(rule, progress, maximum=None).after
        if again != asked:
            raise GrowthFunctionError(
                f"{KEY} {rule!r} returned {asked}, and {again} when called again: with"
                " batch_tokens it must be a function of progress alone"
            )
        progress = progress.after_step(rows=rows, tokens=tokens, batch=asked)


class _Filler:
    """Rows in their order, each as its place and its tokens, that fill steps; see
    :func:`fill_steps`.

    Attributes:
        has_rows: whether a row is left for another step.
    """

    def __init__(
        self,
        sizes: torch.Tensor,
        *,
        min_rows: int,
        max_rows: int | None,
        drops_long_rows: bool,
        divisible: bool,
    ) -> None:
        self.has_rows = len(sizes) > 0
        self._min_rows = min_rows
        self._max_rows = max_rows
        self._drops_long_rows = drops_long_rows
        self._divisible = divisible
        chunks = (sizes[first : first + _CHUNK] for first in range(0, len(sizes), _CHUNK))
        self._coming = enumerate(chain.from_iterable(chunk.tolist() for chunk in chunks))
        self._waiting: list[tuple[int, int]] = []

    def next_step(self, budget: int) -> tuple[list[int], int]:
        """Return the places of the rows of the next step, and their tokens."""
        step: list[tuple[int, int]] = []
        tokens = 0
        too_long: list[tuple[int, int]] = []
        waiting = iter(self._waiting)
        self.has_rows = False
        for row in chain(waiting, self._coming):
            _, size = row
            if self._drops_long_rows and size > budget:
                too_long.append(row)
                continue
            # The minimum comes before the budget.
            is_beyond = tokens + size > budget or len(step) == self._max_rows
            if is_beyond and len(step) >= self._min_rows:
                num_kept = self._divisible_rows(len(step))
                tokens -= sum(size for _, size in step[num_kept:])
                self._waiting = sorted([*too_long, *step[num_kept:], row, *waiting])
                self.has_rows = True
                step = step[:num_kept]
                break
            step.append(row)
            tokens += size
        return [place for place, _ in step], tokens

    def _divisible_rows(self, rows: int) -> int:
        """Return `rows`, or with `divisible` up to an eighth fewer."""
        if not self._divisible:
            return rows
        # An eighth of the rows at most is left: 2 ** (floor(log2(rows)) - 3).
        multiple = 1 << max(0, rows.bit_length() - 4)
        fewer = rows - rows % multiple
        return fewer if fewer >= self._min_rows else rows
