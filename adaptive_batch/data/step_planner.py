"""Which rows each optimizer step takes, and which of them each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from adaptive_batch import distributed
from adaptive_batch._util import count
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import (
    Clock,
    EpochPlan,
    Pace,
    Progress,
    Seesaw,
    decay_of,
    time_by,
)

from .balance import balance_by_rows, balance_by_tokens
from .batching import Batching
from .epoch_planner import EpochPlanner, Rows
from .layouts import MicroBatchLimit, micro_batches
from .order import EpochOrder, RowOrder
from .requested_batch import Event, RequestedBatch, Sizer

# Row numbers that are read at once.
_BLOCK_ROWS = 1024


class EpochClock:
    """Divides the current epoch and a constant one into steps, when they are asked for.

    Args:
        epochs: divides epochs into steps.
        batch: batch that is requested for a step on one device.
        divides_ahead: see :class:`StepPlanner`.
    """

    def __init__(self, epochs: EpochPlanner, batch: RequestedBatch, *, divides_ahead: bool) -> None:
        self._epochs = epochs
        self._batch = batch
        self._divides_ahead = divides_ahead
        self._at = Progress()
        self._plan: EpochPlan | None = None
        self._reference: EpochPlan | None = None
        self._pace: Pace | None = None

    def go_to(self, progress: Progress) -> None:
        """Take it that the current epoch is planned from a progress on."""
        self._at = progress
        self._plan = None
        self._pace = None

    def forget(self) -> None:
        """Divide both epochs again, as training resumes elsewhere."""
        self._plan = None
        self.forget_reference()

    def forget_reference(self) -> None:
        """Divide the constant epoch again: training begins with another batch."""
        self._reference = None
        self._pace = None

    @property
    def plan(self) -> EpochPlan:
        """The current epoch, divided into steps as its beginning shows it."""
        if self._plan is None:
            rule = self._batch.rule(self._batch.batch_size)
            self._plan = self._epochs.divide(self._at, rule)
        return self._plan

    @property
    def reference(self) -> EpochPlan:
        """An epoch of a constant batch, in whose steps the schedule of the learning rate counts."""
        if self._reference is None:
            # with a batch schedule, the configured batch is the one that the rate's schedule was
            # chosen for
            batching = self._batch.batching
            scheduled = batching.batch_size_schedule is not None
            self._reference = self._epochs.constant(
                batching.batch_size
                if scheduled
                else self._batch.first_batch_size or self._batch.batch_size
            )
        return self._reference

    @property
    def pace(self) -> Pace:
        """What the clock of the rate counts by in the current epoch."""
        if self._pace is None:
            self._pace = self.pace_of(None)
        return self._pace

    def pace_of(self, plan: EpochPlan | None) -> Pace:
        """Return what the clock of the rate counts by, in an epoch that is divided by a plan; None
        for the current one.

        A schedule of the batch that follows the rate, and a script that drops no row, count by the
        constant batch: that is as good, and known without dividing the epoch.
        """
        follows_rate = isinstance(self._batch.batching.batch_size_schedule, Seesaw)
        if follows_rate or not self._divides_ahead:
            plan = self.reference
        return Pace(self.reference, plan or self.plan)

    def couple(self, schedule: Callable[[float], float], clock: Clock) -> None:
        """Couple a batch schedule that follows the rate to the rate's own, a function of the clock.

        Both read one clock, that of an epoch of the constant batch: however the batch grows, the
        rate's schedule takes as much data.

        Raises:
            SettingError: the clock counts steps or two units, or an epoch ends by steps: there are
                fewer then for the same data.
        """
        batching = self._batch.batching
        rule = batching.batch_size_schedule
        assert isinstance(rule, Seesaw)
        if clock.warmup != clock.decay or clock.decay == "steps":
            remedy = f"{rule} takes fewer steps for the same data; give samples or tokens"
            raise SettingError("lr_clock", str(clock), remedy)
        if batching.max_steps_per_epoch is not None:
            remedy = (
                f"{rule} takes fewer steps for the same data, so that these would be more of it;"
                " set it to null, in a new run"
            )
            raise SettingError(
                "max_steps_per_epoch",
                batching.max_steps_per_epoch,
                f"{remedy}, and take fewer rows of the dataset",
            )
        rate_left_at = decay_of(schedule)

        def decay(progress: Progress) -> float:
            of_constant_batch = replace(progress, pace=Pace(self.reference, self.reference))
            return rate_left_at(time_by(clock.decay, of_constant_batch))

        self._epochs.follow(rule.coupled(batching.batch_tokens or batching.batch_size, decay))


class PlannedRows(NamedTuple):
    """The rows of one step.

    Attributes:
        progress: progress before the step, with the batch that is requested for it.
        numbers: row numbers of all ranks.
        positions: positions of this rank's rows among them.
        own: row numbers of this rank.
        next_numbers: row numbers of the next step, as far as it is as large.
    """

    progress: Progress
    numbers: list[int]
    positions: Sequence[int]
    own: list[int]
    next_numbers: list[int]

    @property
    def following(self) -> Iterator[int]:
        """Row numbers that this rank is likely to take next: where ranks take rows in turn, those
        at the same positions.
        """
        return (
            self.next_numbers[position]
            for position in self.positions
            if position < len(self.next_numbers)
        )


class StepPlanner:
    """Plans the rows of each step, to each rank its own, while the batch follows the rules.

    Args:
        rows: rows of an epoch.
        batching: batching as configured.
        sizer: decides what one micro-batch may hold; rows are balanced across the ranks so that
            these are even.
        ranks: a step has `batch_size` rows for each of so many; None for those that there are.
        counts_tokens: the tokens of an epoch must be known.
        divides_ahead: whether an epoch is divided into steps before it is trained, which may read
            lengths and ask rules, also where no clock counts tokens.
        asks_rank_zero: see :class:`RequestedBatch`.
        order: orders the rows of an epoch; None for the configured order.
        event: is given each decision: its kind, a message, and facts by name.

    Attributes:
        epochs: divides epochs into steps, also ahead of training.
        batch: batch that is requested for a step on one device.
        clock: divides the current epoch and a constant one, by which the rate's clock counts.
    """

    def __init__(
        self,
        rows: Rows,
        batching: Batching,
        sizer: Sizer,
        *,
        ranks: int | None = None,
        counts_tokens: bool = False,
        divides_ahead: bool = True,
        asks_rank_zero: bool = False,
        order: EpochOrder | None = None,
        event: Event = lambda kind, message, **facts: None,
    ) -> None:
        self._rows = rows
        self.batch = RequestedBatch(batching, sizer, asks_rank_zero=asks_rank_zero, event=event)
        self.epochs = EpochPlanner(
            rows,
            self.batch,
            ranks=ranks or distributed.data_parallel_size(),
            divisible=sizer.layout.uniform in ("rows", "both"),
            counts_tokens=counts_tokens,
            order=order,
        )
        self.clock = EpochClock(
            self.epochs,
            self.batch,
            divides_ahead=divides_ahead or counts_tokens or bool(batching.batch_tokens),
        )
        self._event = event
        # The rows of the current epoch, in their order.
        self._order: RowOrder = torch.zeros(0, dtype=torch.int64)
        # Row numbers of a part of it, and the place where that begins.
        self._block: list[int] = []
        self._block_begin = 0

    @property
    def batching(self) -> Batching:
        """What a step holds, as configured."""
        return self.batch.batching

    @property
    def ranks(self) -> int:
        """The ranks that a step has its rows for."""
        return self.epochs.ranks

    @property
    def limit(self) -> MicroBatchLimit:
        """What one micro-batch may hold now."""
        return self.batch.sizer.limit(self.batch.batch_size)

    # --- epochs

    def begin(
        self,
        progress: Progress,
        *,
        batch_size: int | None = None,
        first_batch_size: int | None = None,
    ) -> Progress:
        """Begin the first epoch of this run, or resume it; find the constant batch that schedules
        count in.

        Args:
            progress: where training is.
            batch_size: see :meth:`begin_epoch`.
            first_batch_size: see :meth:`RequestedBatch.begin`.
        """
        progress = self.begin_epoch(progress, batch_size=batch_size)
        self.batch.begin(first_batch_size)
        self.clock.forget_reference()
        if self.clock.reference.steps == 0:
            remedy = (
                f"an epoch of {self.epochs.num_rows} rows has no whole step; set drop_last=False"
            )
            raise SettingError("batch_size", self.batch.batch_size, remedy)
        return progress

    def begin_with(self, batch_size: int) -> None:
        """Take the batch that training begins with, as a search has found it."""
        self.batch.take(batch_size)
        self.batch.begin(batch_size)
        self.clock.forget_reference()

    def begin_epoch(self, progress: Progress, *, batch_size: int | None = None) -> Progress:
        """Grow the batch by the growth function, and plan the epoch's steps; or resume within an
        epoch.

        Where `batch_size` is known, no rule is called here; :meth:`next_step` calls them all the
        same.
        """
        progress = replace(progress, rows_per_epoch=self.epochs.num_rows)
        self.clock.go_to(progress)
        if not progress.epoch_rows:
            changed = self._rows.recount()
            if changed:
                message = f"{changed}: all rows are counted again"
                self._event("recounted", message, epoch=progress.epoch)
            self.epochs.begin(progress.epoch)
        if batch_size is not None:
            self.batch.take(batch_size)
        else:
            self.batch.request(progress)
        if self.batching.drop_last and self.clock.plan.steps == 0:
            rows = self.clock.plan.rows
            remedy = f"a step of the requested batch is more than an epoch's {rows} rows"
            raise SettingError("drop_last", True, remedy)
        return progress

    def start_epoch(self, progress: Progress) -> None:
        """Order the rows of the epoch from progress on; log the rows that no step can hold."""
        batching = self.batching
        epoch = progress.epoch
        self._order = self.epochs.order(progress)
        self._block = []
        if not batching.batch_tokens:
            return
        batches = self.epochs.token_steps(progress).batches
        # A run that resumes within an epoch has logged them before.
        if progress.epoch_rows:
            return
        self._log_over_budget(progress)
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
            message = f"epoch {epoch}: {dropped}: {numbers}"
            self._event("dropped", message, epoch=epoch, rows=sorted(rows))

    def _log_over_budget(self, progress: Progress) -> None:
        """Log the steps of an epoch that have more than `batch_tokens` for `min_rows_per_batch`."""
        least = self.batching.min_rows_per_batch
        if least == 1:
            return
        steps = self.epochs.token_steps(progress)
        tokens = [int(self.epochs.lengths.all[rows].sum()) for rows in steps.batches.tolist()]
        over = [
            number
            for number, budget in zip(tokens, steps.budgets, strict=True)
            if number > budget * self.ranks
        ]
        if over:
            message = (
                f"epoch {progress.epoch}: {len(over)} of {count(len(tokens), 'step')} have more"
                f" than batch_tokens, up to {max(over)} over all ranks, for"
                f" min_rows_per_batch={least}"
            )
            self._event("over_budget", message, epoch=progress.epoch, steps=len(over))

    def num_steps(self, progress: Progress, epochs: int, *, sees_tokens: bool = True) -> int:
        """Return the optimizer steps that are left of so many epochs, as the rules answer now."""
        sizes = self.batch.ahead(progress, epochs)
        return self.epochs.num_steps(progress, sizes, sees_tokens=sees_tokens)

    # --- steps

    def next_step(self, progress: Progress) -> PlannedRows | None:
        """Return the rows of the step at a progress; None where the epoch is over."""
        if self.epochs.is_over(progress):
            return None
        batch, size = self.epochs.next_step(progress, requested=self.batch.request(progress))
        if not size:
            # With drop_last fewer rows are left than are requested.
            return None
        begin = progress.epoch_rows
        two_steps = self._numbers(begin, begin + 2 * size)
        numbers = two_steps[:size]
        positions = self.rows_of_rank(numbers)
        own = [numbers[position] for position in positions]
        pace = self.clock.pace
        if progress.batch != batch or progress.pace is not pace:
            progress = replace(progress, batch=batch, pace=pace)
        return PlannedRows(progress, numbers, positions, own, two_steps[size:])

    def _numbers(self, begin: int, end: int) -> list[int]:
        """Return the row numbers at some places of the epoch's order, of which several steps are
        read at once.
        """
        offset = begin - self._block_begin
        if offset < 0 or offset + end - begin > len(self._block):
            # What a script's sampler draws is not drawn before it is needed.
            more_rows = _BLOCK_ROWS if isinstance(self._order, torch.Tensor) else 0
            self._block = self._order[begin : end + more_rows].tolist()
            self._block_begin = begin
            offset = 0
        return self._block[offset : offset + end - begin]

    def size_of_step(
        self, step: PlannedRows, rows: Sequence[Mapping[str, Any]], *, in_tokens: bool
    ) -> int:
        """Return the size of a step over all ranks, in rows or real tokens; this rank has `rows` of
        it.
        """
        if not in_tokens:
            return len(step.numbers)
        if distributed.data_parallel_size() == 1:
            return sum(map(self._rows.num_real_tokens, rows))
        return self.epochs.num_tokens(step.numbers)

    def rows_of_rank(
        self, numbers: Sequence[int], limit: MicroBatchLimit | None = None
    ) -> Sequence[int]:
        """Return this rank's rows of a step, as positions among `numbers`.

        They are balanced by tokens where micro-batches are made by tokens or by length; else they
        are distributed in turn, as torch's sampler does.

        Args:
            numbers: row numbers of all ranks.
            limit: what a micro-batch may hold; None for what it may hold now.
        """
        ranks = distributed.data_parallel_size()
        if ranks == 1:
            return range(len(numbers))
        rank = distributed.data_parallel_rank()
        layout = self.batch.sizer.layout
        limit = limit or self.limit
        if limit.unit == "tokens" or layout.uniform is not None or not layout.is_usual:
            lengths = self.epochs.lengths.all[torch.as_tensor(numbers, dtype=torch.int64)]
            return balance_by_tokens(lengths, ranks, limit, layout)[rank]
        return balance_by_rows(len(numbers), ranks)[rank]

    def num_micro_batches(self, numbers: Sequence[int], *, batch_size: int) -> int:
        """Return how many micro-batches this rank's rows of a step have, of which `batch_size` run
        at once if they fit; `numbers` are the rows of all ranks.
        """
        sizer = self.batch.sizer
        limit = sizer.limit(batch_size)
        rank_rows = [numbers[position] for position in self.rows_of_rank(numbers, limit)]
        lengths = self.epochs.lengths.all[rank_rows].tolist()
        return max(1, len(micro_batches(lengths, limit, sizer.layout)))

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs besides progress, as plain values."""
        return {**self.batch.state_dict(), **self.epochs.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, in a planner that was built as the saved one was."""
        self.epochs.load_state_dict(state)
        self.batch.load_state_dict(state)
        self.clock.forget()
