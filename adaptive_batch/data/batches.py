"""The steps of training in order, with progress, batch size and rule."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler

from adaptive_batch import distributed
from adaptive_batch._util import count
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import (
    ClampedBatch,
    EpochPlan,
    Pace,
    Progress,
    Seesaw,
    copy_rule,
    elapsed_steps,
    next_batch_size,
    relative_decay,
    request_batch,
    schedule_factor,
)

from .layouts import (
    MicroBatchLayout,
    MicroBatchLimit,
    balance_by_rows,
    balance_by_tokens,
    micro_batches,
)
from .planned_epoch import PlannedEpoch, RowLengths, Rows, StepAhead
from .sampling import Batching, SamplerOrder

# Called as event(kind, message, **facts).
Event = Callable[..., object]
Ask = Callable[[], ClampedBatch]


class Sizer(Protocol):
    """Limit and layout of a micro-batch.

    `max_batch_size` is the most rows that were tried and fit; None before a search.
    """

    max_batch_size: int | None
    layout: MicroBatchLayout

    def limit(self, batch_size: int) -> MicroBatchLimit: ...


@dataclass
class PlannedRows(StepAhead):
    """A step that was handed out, with its row numbers.

    Attributes:
        batch_size: rows of a batch on one device; a step may accumulate several of them.
        numbers: row numbers of all ranks.
        own: row numbers of this rank.
    """

    batch_size: int
    numbers: list[int]
    own: list[int]


class Batches(Sampler[list[int]]):
    """The steps of training: this rank's rows of each step, handed out as far ahead as requested.
    Progress moves as steps are done. No other object holds progress, batch size or rule.

    Args:
        rows: rows of an epoch.
        batching: batching as configured.
        sizer: limit and layout of a micro-batch; rows are balanced across the ranks so that their
            micro-batches are even.
        counts_tokens: whether a clock or a rule needs the tokens of an epoch and of its steps ahead
            of training.
        order: order of a script's sampler; None for the configured order.
        in_script: whether a script runs the steps. It does not compare the answers of rules on
            different ranks, so rank zero asks for all; and an epoch is divided into steps only if
            tokens are counted, as that may read all lengths.
        event: function that is given each decision: its kind, a message, and facts by name.

    Attributes:
        batching: as configured; :meth:`couple` replaces a schedule that follows the rate.
        sizer: as given.
        num_rows: rows of an epoch.
        ranks: number of ranks that training began with; a step has `batch_size` rows for each.
        batch_size: current rows of a batch on one device, which run at once if they fit; a step
            accumulates `gradient_accumulation_steps` of them.
        first_batch_size: batch size when training began; None before.
        saved_maximum: maximum batch size when the checkpoint was saved; a schedule keeps it on a
            smaller device.
    """

    def __init__(
        self,
        rows: Rows,
        batching: Batching,
        sizer: Sizer,
        *,
        counts_tokens: bool = False,
        order: SamplerOrder | None = None,
        in_script: bool = False,
        event: Event = lambda kind, message, **facts: None,
    ) -> None:
        self.batching = batching
        self.sizer = sizer
        self.num_rows = len(rows if order is None else order)
        self.ranks = distributed.data_parallel_size()
        self.batch_size = batching.batch_size
        self.first_batch_size: int | None = None
        self.saved_maximum = 0
        self._rows = rows
        self._order_of: Callable[[int], torch.Tensor] | None = order
        self._counts_tokens = counts_tokens
        self._plans_tokens = counts_tokens or bool(batching.batch_tokens)
        self._in_script = in_script
        self._event = event
        # A dry run asks its own rank.
        self._from_rank_zero: Callable[[Ask], ClampedBatch] = distributed.from_rank_zero
        # The last epoch at whose beginning the growth function was called.
        self._grown_in = -1
        # The batch of a schedule that was printed last; 0 before the first.
        self._printed_batch = 0
        if counts_tokens or batching.depends_on_lengths:
            # A row that cannot be measured is refused now. Measuring is a collective, and one rank
            # alone may read the progress.
            _ = rows.lengths
        # Row lengths of the current epoch and of the epoch of a constant batch, read on demand.
        self._lengths: RowLengths | None = None
        self._reference_lengths: RowLengths | None = None
        self._progress = Progress(rows_per_epoch=self.num_rows)
        # Steps that are handed out and not done.
        self._ahead: deque[PlannedRows] = deque()
        # The current epoch, or between two epochs the one that is over.
        self._epoch = self._plan_epoch(self._progress)
        # Whether the rules have been asked for the first batch of the current epoch.
        self._is_begun = False
        # The current epoch and an epoch of a constant batch, divided into steps on demand.
        self._plan: EpochPlan | None = None
        self._reference: EpochPlan | None = None

    # --- progress

    @property
    def progress(self) -> Progress:
        """Progress after the steps that are done, with the pace of the epoch."""
        return replace(self._progress, pace=self.pace)

    def resume(
        self,
        progress: Progress,
        steps: Mapping[str, Any] | None = None,
        *,
        keeps_batch: bool = True,
    ) -> None:
        """Go to another place in training, before its epoch begins here.

        Args:
            progress: that place.
            steps: ``steps`` of the state that was saved there; None without a state.
            keeps_batch: whether to keep the saved batch size, and not the configured one.
        """
        planned_at = progress
        if steps is not None:
            # Between two epochs, the saved lengths are those of the epoch that is over.
            planned_at = replace(progress, epoch=steps["epoch"])
            self.ranks = steps["ranks"]
            self.saved_maximum = steps["maximum"] or 0
            self._reference_lengths = None
            if steps["reference_lengths"]:
                self._reference_lengths = RowLengths.unpacked(steps["reference_lengths"])
            # The state has no lengths of its epoch if they are those of the reference.
            self._lengths = self._reference_lengths
            if steps["lengths"]:
                self._lengths = RowLengths.unpacked(steps["lengths"])
            if keeps_batch:
                self.batch_size = steps["batch_size"]
                self.first_batch_size = steps["first_batch_size"]
                self._grown_in = steps["grown_in"]
        self._progress = progress
        self._ahead.clear()
        self._is_begun = False
        self._reference = None
        self._set_epoch(self._plan_epoch(planned_at))

    def state_dict(self) -> dict[str, Any]:
        """Return the progress and the plan's state as plain values, the same on all ranks. Save
        them after ``optimizer.step()``.
        """
        reference = self._reference_lengths
        # Lengths may have many rows, so those that both epochs share are saved once.
        lengths = None if self._lengths is reference else self._lengths
        return {
            "progress": self._progress.state_dict(),
            "steps": {
                "batch_size": self.batch_size,
                "first_batch_size": self.first_batch_size,
                "grown_in": self._grown_in,
                "maximum": self.maximum(),
                "ranks": self.ranks,
                "epoch": self._epoch.planned_at.epoch,
                "lengths": lengths and lengths.packed,
                "reference_lengths": reference and reference.packed,
            },
        }

    # --- the requested batch

    @property
    def limit(self) -> MicroBatchLimit:
        """Current limit of a micro-batch."""
        return self.sizer.limit(self.batch_size)

    def maximum(self) -> int | None:
        """Return the largest batch of a rule; None if it may grow freely or is unknown."""
        max_batch_size = self.sizer.max_batch_size
        if self.batching.grow_beyond_maximum or max_batch_size is None:
            return None
        # On a smaller device a schedule continues as it was, in more micro-batches.
        if self.batching.batch_size_schedule:
            return max(max_batch_size, self.saved_maximum)
        return max_batch_size

    def set_batch_size(self, batch_size: int) -> None:
        """Set the batch size, between two epochs or after :meth:`resume`."""
        self.batch_size = batch_size

    def begin_with(self, batch_size: int) -> None:
        """Set the initial batch size of training."""
        self.batch_size = self.first_batch_size = batch_size
        self._reference = None

    def _grow(self) -> None:
        """Call the growth function, once at the beginning of each epoch."""
        batching = self.batching
        function = batching.batch_increase_function
        epoch = self._progress.epoch
        is_over = batching.epochs is not None and epoch >= batching.epochs
        # A run that resumes at the beginning of an epoch may have grown there before.
        is_due = self._progress.epoch_steps == 0 and epoch > self._grown_in and not is_over
        if function is None or not is_due:
            return
        batch = self._from_rank_zero(
            lambda: next_batch_size(
                function, epoch=epoch, batch_size=self.batch_size, maximum=self.maximum()
            )
        )
        self._grown_in = epoch
        self._change(batch, "epoch", epoch)

    def _request(self, progress: Progress) -> int:
        """Return the rows of the step at a progress on one device, unless it is filled with tokens.
        If a schedule decides them, ask it and set the batch size.
        """
        if not self.batching.schedules_rows:
            return self.batch_size * self.batching.gradient_accumulation_steps

        def ask() -> ClampedBatch:
            return self._ask_schedule(progress)

        batch = self._from_rank_zero(ask) if self._in_script else ask()
        is_first = progress.steps == 0 and self._printed_batch == 0
        if batch.after != self.batch_size or is_first:
            # A ramp may change the batch in each step: print only a change by a fifth or more.
            is_near = 0.8 * self._printed_batch < batch.after < 1.25 * self._printed_batch
            if not is_near:
                self._printed_batch = batch.after
            self._change(batch, "step", progress.steps, prints=not is_near)
        return batch.after

    def _ask_schedule(self, progress: Progress) -> ClampedBatch:
        schedule = self.batching.batch_size_schedule
        assert schedule is not None
        return request_batch(schedule, progress, maximum=self.maximum())

    def _rows_at(self, progress: Progress) -> int:
        """Return the rows of the step at a progress as the rules answer now; set no batch size."""
        if self.batching.schedules_rows:
            return self._ask_schedule(progress).after
        return self._request(progress)

    def _change(self, batch: ClampedBatch, unit: str, at: int, *, prints: bool = True) -> None:
        previous = self.batch_size
        self.batch_size = batch.after
        facts = {unit: at, "before": previous, "requested": batch.requested, "after": batch.after}
        message = f"{unit} {at}: {batch.describe(previous)}"
        self._event("batch_size", message, prints=prints, **facts)

    # --- epochs

    def begin_epoch(self) -> None:
        """Grow the batch by the growth function, and plan the epoch's steps; or resume within an
        epoch.

        Raises:
            SettingError: an epoch has no step, as `long_rows` drops each row, or no whole step with
                `drop_last`.
        """
        # Within an epoch, the plan keeps its lengths even if a row has changed.
        if self._progress.epoch_rows == 0:
            changed_row = self._rows.recount()
            if changed_row:
                message = f"{changed_row}: all rows are counted again"
                self._event("recounted", message, epoch=self._progress.epoch)
        self._enter_epoch()
        if self.batching.drop_last and 0 in (self.plan.steps, self.constant_epoch.steps):
            remedy = f"an epoch of {self.num_rows} rows has no whole step; set drop_last=False"
            raise SettingError("batch_size", self.batch_size, remedy)
        if self._progress.epoch_rows == 0 and self.is_over:
            remedy = "no row of the epoch has so few tokens; give more, or set long_rows to alone"
            raise SettingError("batch_tokens", self.batching.batch_tokens, remedy)

    def _enter_epoch(self) -> None:
        """Plan the current epoch, and ask the rules for its first batch."""
        self._progress = replace(self._progress, rows_per_epoch=self.num_rows)
        if not self._progress.epoch_rows:
            self._lengths = None
        self._set_epoch(self._plan_epoch(self._progress))
        if self._order_of is not None:
            # The constant epoch has the rows that the sampler draws now, as a clock may count their
            # tokens.
            _ = self._epoch.order
            self._reference = None
        self._grow()
        self._request(self._progress)
        if self.first_batch_size is None:
            self.begin_with(self.batch_size)
        self._is_begun = True

    def end_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        self._progress = self._progress.after_epoch()
        self._is_begun = False

    @property
    def is_over(self) -> bool:
        """Return whether the current epoch has no step left."""
        return self._epoch.is_over(self._progress)

    @property
    def order(self) -> torch.Tensor:
        """Row numbers of the current epoch in the order of their use."""
        return self._epoch.order

    def describe_epoch(self) -> tuple[str, dict[str, Any]]:
        """Describe the epoch that is over, as text and as facts: how many rows were trained, and
        how many no step has used, for each reason.
        """
        progress = self._progress
        reasons = self._epoch.left_out(progress)
        left_out = "".join(f", {rows} left out by {reason}" for reason, rows in reasons.items())
        message = f"epoch {progress.epoch}: {count(progress.epoch_rows, 'row')} trained{left_out}"
        return message, {
            "epoch": progress.epoch,
            "used": progress.epoch_rows,
            "left_out": sum(reasons.values()),
            "reasons": reasons,
        }

    def _plan_epoch(self, progress: Progress) -> PlannedEpoch:
        """Plan the epoch of a progress."""
        return PlannedEpoch(
            self.num_rows,
            self.batching,
            progress,
            self.ranks,
            divisible=self.sizer.layout.uniform in ("rows", "both"),
            measure=self._lengths_of_epoch,
            order_of=self._order_of,
        )

    def _set_epoch(self, epoch: PlannedEpoch) -> None:
        self._epoch = epoch
        self._plan = None

    def _lengths_of_epoch(self) -> RowLengths:
        """Return the row lengths of the current epoch's plan, which stay until the epoch ends."""
        if self._lengths is None:
            self._lengths = RowLengths(self._rows.lengths, self._rows.real_lengths)
        return self._lengths

    def _lengths_of_reference(self) -> RowLengths:
        """Return the lengths of the constant epoch: the same throughout a run, so that a schedule
        of the rate keeps its end.
        """
        if self._reference_lengths is None:
            self._reference_lengths = self._lengths_of_epoch()
        return self._reference_lengths

    # --- the clock of the rate

    @property
    def plan(self) -> EpochPlan:
        """The current epoch, divided into steps as they are known where it was planned."""
        if self._plan is None:
            self._plan = self._epoch.divide(self._rows_at, counts_tokens=self._plans_tokens)
        return self._plan

    @property
    def constant_epoch(self) -> EpochPlan:
        """An epoch of a constant batch, in whose steps the schedule of the learning rate counts."""
        if self._reference is None:
            batch_size = self.first_batch_size or self.batch_size
            if self.batching.batch_size_schedule is not None:
                # The rate's schedule was chosen for the configured batch.
                batch_size = self.batching.batch_size
            batching = replace(self.batching, batch_size=batch_size, batch_size_schedule=None)
            order_of = self._order_of
            # Reading the clock must not draw from a script's sampler.
            if isinstance(order_of, SamplerOrder):
                order_of = order_of.last_drawn
            constant = replace(
                self._epoch,
                batching=batching,
                planned_at=Progress(),
                measure=self._lengths_of_reference,
                order_of=order_of,
            )
            self._reference = constant.divide(
                lambda progress: batching.step_rows, counts_tokens=self._plans_tokens
            )
        return self._reference

    @property
    def pace(self) -> Pace:
        """Pace of the rate's clock in the current epoch.

        A schedule of the batch that follows the rate, and a script that drops no row, count by the
        constant batch: that is as good, and known without dividing the epoch. At the beginning of
        an epoch, which may not be planned yet, the clock does not depend on its steps.
        """
        follows_rate = isinstance(self.batching.batch_size_schedule, Seesaw)
        drops_nothing = self._in_script and not self._plans_tokens
        if follows_rate or drops_nothing or not self._progress.epoch_rows:
            return Pace(self.constant_epoch, self.constant_epoch)
        return Pace(self.constant_epoch, self.plan)

    def couple(self, lr_scheduler: LRScheduler | None, *, lr_clock: str = "samples") -> None:
        """Couple a schedule that follows the learning rate, such as `seesaw`, to the rate's own.

        Both read one clock, that of an epoch of the constant batch, so that the rate's schedule
        takes the same amount of data however the batch grows.

        Args:
            lr_scheduler: scheduler of the rate, a function of the number of steps.
            lr_clock: unit of its clock: ``samples`` or ``tokens``.

        Raises:
            SettingError: it cannot follow the scheduler or the clock, or an epoch ends by steps. It
                takes fewer steps for the same data, so steps do not measure it.
        """
        batching = self.batching
        rule = batching.batch_size_schedule
        assert isinstance(rule, Seesaw)
        if lr_clock not in ("samples", "tokens"):
            remedy = f"{rule} takes fewer steps for the same data; give samples or tokens"
            raise SettingError("lr_clock", lr_clock, remedy)
        if batching.max_steps_per_epoch is not None:
            remedy = (
                f"{rule} takes fewer steps for the same data, so that these would be more of it;"
                " set it to null, in a new run, and take fewer rows of the dataset"
            )
            raise SettingError("max_steps_per_epoch", batching.max_steps_per_epoch, remedy)
        rate_left_at = relative_decay(schedule_factor(lr_scheduler))

        def decay(progress: Progress) -> float:
            of_constant_batch = replace(
                progress, pace=Pace(self.constant_epoch, self.constant_epoch)
            )
            return rate_left_at(elapsed_steps(lr_clock, of_constant_batch))

        coupled = rule.coupled(batching.batch_tokens or batching.batch_size, decay)
        self.batching = replace(batching, batch_size_schedule=coupled)
        self._set_epoch(self._plan_epoch(self._progress))

    # --- ahead of training

    def dry_run(self, *, counts_tokens: bool) -> Batches:
        """Return a copy to walk through the remaining steps with, which leaves training as it is.

        It asks no other rank and logs nothing. It calls a copy of the growth function. In place of
        an order that a script's sampler has not drawn yet, it takes the one that was drawn last.

        Args:
            counts_tokens: whether progress counts the tokens of the steps.
        """
        dry_run = copy.copy(self)
        dry_run._leave_no_trace(counts_tokens=counts_tokens)
        return dry_run

    def _leave_no_trace(self, *, counts_tokens: bool) -> None:
        function = copy_rule(self.batching.batch_increase_function)
        self.batching = replace(self.batching, batch_increase_function=function)
        self._counts_tokens = counts_tokens
        self._event = lambda kind, message, **facts: None
        self._from_rank_zero = lambda ask: ask()
        if isinstance(self._order_of, SamplerOrder):
            self._order_of = self._order_of.last_drawn

    def remaining(self, epochs: int, *, paces: bool = False) -> Iterator[StepAhead]:
        """Walk through the remaining steps of a :meth:`dry_run` until `epochs` epochs are done.

        Args:
            epochs: epochs of training, including those that are done.
            paces: whether to divide each epoch first, so that progress has its pace.
        """
        while self._progress.epoch < epochs:
            if not self._is_begun:
                self._enter_epoch()
            for step in self._epoch.walk(
                self._progress, self._request, counts_tokens=self._counts_tokens
            ):
                if paces:
                    step.progress = replace(step.progress, pace=self.pace)
                yield step
                self._progress = step.after
            self.end_epoch()

    def count_steps(self, epochs: int, *, counts_tokens: bool = True) -> int:
        """Count the remaining steps until `epochs` epochs are done, as the rules answer now.

        Args:
            epochs: epochs of training, including those that are done.
            counts_tokens: whether a schedule sees the tokens of the steps.
        """
        dry_run = self.dry_run(counts_tokens=counts_tokens)
        if self.batching.batch_size_schedule is not None:
            return sum(1 for _ in dry_run.remaining(epochs))
        # Without a schedule, the steps of an epoch are equal or planned: no need to walk each one.
        num_steps = 0
        while dry_run._progress.epoch < epochs:
            if not dry_run._is_begun:
                dry_run._enter_epoch()
            progress = dry_run._progress
            global_rows = dry_run._request(progress) * dry_run.ranks
            num_steps += dry_run._epoch.num_steps_left(progress, global_rows=global_rows)
            dry_run.end_epoch()
        return num_steps

    def num_micro_batches(self, step: StepAhead) -> int:
        """Return how many micro-batches this rank's rows of a step have, in the current epoch."""
        own = self._own_rows(self._rows_from(step.progress.epoch_rows, step.rows))
        lengths = self._epoch.lengths.all[own].tolist()
        return max(1, len(micro_batches(lengths, self.limit, self.sizer.layout)))

    # --- steps

    def steps(self) -> Iterator[PlannedRows]:
        """Yield the remaining steps of the current epoch; steps that were handed out before but are
        not done come again.
        """
        self._ahead.clear()
        if not self._is_begun:
            self.begin_epoch()
        epoch = self._progress.epoch
        # A run that resumes within an epoch has logged its dropped rows before.
        if self.batching.batch_tokens and not self._progress.epoch_rows:
            for message, rows in self._epoch.dropped_rows():
                self._event("dropped", message, epoch=epoch, rows=rows)
        while self._progress.epoch == epoch:
            num_rows = len(self._rows)
            if self._order_of is None and num_rows != self.num_rows:
                remedy = f"it had {self.num_rows} when training began; keep its length"
                raise SettingError("dataset", count(num_rows, "row"), remedy)
            # Continue after the last step that was handed out.
            progress = self._ahead[-1].after if self._ahead else self.progress
            step = self._epoch.next_step(progress, self._request, counts_tokens=self._counts_tokens)
            if step is None:
                return
            numbers = self._rows_from(step.progress.epoch_rows, step.rows)
            own = self._own_rows(numbers)
            planned = PlannedRows(
                step.progress, step.rows, step.tokens, self.batch_size, numbers, own
            )
            self._ahead.append(planned)
            yield planned

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's row numbers of the steps that are left of the current epoch."""
        for step in self.steps():
            yield step.own

    def rows_after(self, step: PlannedRows) -> list[int]:
        """Return this rank's row numbers of the next step if it has as many rows as `step`."""
        return self._own_rows(self._rows_from(step.after.epoch_rows, step.rows))

    def _rows_from(self, begin: int, rows: int) -> list[int]:
        """Return the row numbers of the current epoch from a position on."""
        numbers: list[int] = self._epoch.order[begin : begin + rows].tolist()
        return numbers

    def _own_rows(self, numbers: list[int]) -> list[int]:
        """Return this rank's rows of a step with the `numbers` of all ranks.

        If the layout pads rows and keeps their order, ranks take rows in turn, as with torch's
        DistributedSampler. Otherwise ranks get about the same number of tokens.
        """
        ranks = distributed.data_parallel_size()
        if ranks == 1:
            return list(numbers)
        layout = self.sizer.layout
        limit = self.limit
        positions: Sequence[Sequence[int]]
        if layout.pads and layout.keeps_order(limit):
            positions = balance_by_rows(len(numbers), ranks)
        else:
            lengths = self._epoch.lengths.all[torch.as_tensor(numbers, dtype=torch.int64)]
            positions = balance_by_tokens(lengths, ranks, limit, layout)
        return [numbers[position] for position in positions[distributed.data_parallel_rank()]]

    def count_tokens(self, tokens: int) -> None:
        """Set the real tokens, over all ranks, of the step that was handed out last."""
        self._ahead[-1].tokens = tokens

    @property
    def oldest(self) -> PlannedRows:
        """The oldest step that was handed out and is not done."""
        return self._ahead[0]

    def size_of_step(
        self, step: PlannedRows, rows: Sequence[Mapping[str, Any]], *, in_tokens: bool
    ) -> int:
        """Return the size of a step over all ranks, in rows or real tokens; `rows` are its rows of
        this rank.
        """
        if not in_tokens:
            return step.rows
        if distributed.data_parallel_size() == 1:
            return sum(map(self._rows.num_real_tokens, rows))
        return self._epoch.num_tokens(step.progress, step.rows)

    def done(self, *, tokens: int | None = None, **measured: Any) -> Progress:
        """Count the oldest step that was handed out as done; return the progress after it. Call
        :meth:`end_epoch` if the epoch :attr:`is_over`.

        Args:
            tokens: its real tokens over all ranks; None for those that were counted as it was
                handed out.
            measured: other values of progress that the step has measured, such as `noise_scale`.

        Raises:
            ValueError: no step is waiting.
        """
        if not self._ahead:
            raise ValueError(
                "no batch is waiting: call step() once for each batch that was handed out"
            )
        step = self._ahead.popleft()
        if tokens is None:
            tokens = step.tokens
        self._progress = self._progress.after_step(
            rows=step.rows, tokens=tokens, batch=step.batch, **measured
        )
        return self._progress
