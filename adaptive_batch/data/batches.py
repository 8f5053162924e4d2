"""The steps of training in their order: the holder of progress, batch size and rule."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler

from adaptive_batch import distributed
from adaptive_batch._util import count
from adaptive_batch.errors import CheckpointError, SettingError
from adaptive_batch.schedules import (
    ClampedBatch,
    Clock,
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

from .balance import balance_by_rows, balance_by_tokens
from .batching import Batching
from .layouts import MicroBatchLayout, MicroBatchLimit, micro_batches
from .order import EpochOrder, RowOrder, SamplerOrder
from .planned_epoch import PlannedEpoch, RowLengths, Rows

# Called as event(kind, message, **facts).
Event = Callable[..., object]


class Sizer(Protocol):
    """Limit and layout of a micro-batch.

    `max_batch_size` is the most rows that were tried and fit; None before a search.
    `waits_for_search` is true while a search has to find the limit before a step can run.
    """

    max_batch_size: int | None
    layout: MicroBatchLayout

    @property
    def waits_for_search(self) -> bool: ...

    def limit(self, batch_size: int) -> MicroBatchLimit: ...


class PlannedRows(NamedTuple):
    """The rows of one step.

    Attributes:
        progress: progress before the step, with the batch that is requested for it.
        numbers: row numbers of all ranks.
        own: row numbers of this rank.
        following: row numbers that this rank takes next if the next step is as large and ranks take
            rows in turn.
        tokens: real tokens of all ranks' rows; 0 if they are not counted ahead of training.
    """

    progress: Progress
    numbers: list[int]
    own: list[int]
    following: list[int]
    tokens: int = 0

    @property
    def after(self) -> Progress:
        """Progress when the step is done."""
        return self.progress.after_step(rows=len(self.numbers), tokens=self.tokens)


@dataclass
class EpochAhead:
    """An epoch that a walk ahead of training comes to.

    Attributes:
        batch_size: rows of a batch on one device, as a growth function makes them.
        plan: plan of the epoch; None after the walk has left it, as an order of rows is large.
        pace: pace of the rate's clock; None until the walk has left the epoch.
    """

    batch_size: int
    plan: PlannedEpoch | None
    pace: Pace | None = None


class StepAhead(NamedTuple):
    """A step that a walk ahead of training comes to.

    Attributes:
        progress: progress before the step, with the batch that is requested for it.
        after: progress after it.
        epoch: its epoch.
    """

    progress: Progress
    after: Progress
    epoch: EpochAhead

    @property
    def batch(self) -> int:
        """Batch that is requested for the step on one device, in rows or tokens."""
        return self.progress.batch

    @property
    def rows(self) -> int:
        """Rows of the step over all ranks."""
        return self.after.samples - self.progress.samples

    @property
    def tokens(self) -> int:
        """Real tokens of its rows; 0 if they are not counted."""
        return self.after.tokens - self.progress.tokens


class Batches(Sampler[list[int]]):
    """Yields the steps of an epoch with this rank's rows, as far ahead as requested; progress moves
    as steps are done. Nothing else holds progress, batch size or rule.

    Args:
        rows: rows of an epoch.
        batching: batching as configured.
        sizer: decides what one micro-batch may hold; rows are balanced across the ranks so that
            these are even.
        counts_tokens: the tokens of an epoch must be known, and those of steps that are handed out.
        order: order of a script's sampler; None for the configured order.
        event: is given each decision: its kind, a message, and facts by name.

    Attributes:
        batching: as configured; a schedule that follows the rate is put in coupled to it.
        sizer: as given.
        num_rows: rows of an epoch.
        ranks: number of ranks that training began with; a step has `batch_size` rows for each.
        batch_size: rows of a batch on one device now, which run at once if they fit; a step
            accumulates `gradient_accumulation_steps` of them.
        first_batch_size: batch size when training began; None before.
        saved_maximum: the bound when the checkpoint was saved; a schedule keeps it on a smaller
            device.
    """

    _progress: Progress
    _epoch: PlannedEpoch
    # A schedule is called on rank zero for all; False calls it on each, which `Step.agree_on_plan`
    # compares.
    asks_rank_zero = False
    # An epoch is divided into steps before it is trained, which may read lengths and ask rules,
    # also where no clock counts tokens.
    divides_ahead = True

    def __init__(
        self,
        rows: Rows,
        batching: Batching,
        sizer: Sizer,
        *,
        counts_tokens: bool = False,
        order: SamplerOrder | None = None,
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
        self._order_of = order
        self._counts_tokens = counts_tokens
        self._plans_tokens = counts_tokens or bool(batching.batch_tokens)
        self._event = event
        self._is_begun = False
        self._ahead: deque[PlannedRows] = deque()
        # The last epoch at whose beginning the growth function was called.
        self._grown_in = -1
        # The batch of a schedule that was logged last.
        self._logged = 0
        if batching.depends_on_lengths:
            # A row that cannot be measured is refused now.
            _ = rows.lengths
        # Row lengths of the current epoch and of the epoch of a constant batch, read on demand.
        self._lengths: RowLengths | None = None
        self._reference_lengths: RowLengths | None = None
        # A walk ahead plans the next epoch only once.
        planned = partial(
            self._plan_epoch, measure=self._measure, order_of=None if order is None else order.ahead
        )
        self._planned = lru_cache(maxsize=1)(planned)
        self._plan: EpochPlan | None = None
        self._reference: EpochPlan | None = None
        self._pace: Pace | None = None
        self._go_to(Progress(rows_per_epoch=self.num_rows))

    # --- where training is

    @property
    def progress(self) -> Progress:
        """Progress after the steps that are done, with the pace of the epoch."""
        pace = self.pace
        if self._progress.pace is not pace:
            self._progress = replace(self._progress, pace=pace)
        return self._progress

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
            keeps_batch: True keeps the saved batch size; False begins again from the configured
                one.

        Raises:
            CheckpointError: the lengths that the epoch was planned by are not in the state.
        """
        if steps is not None:
            if not steps.keys() >= {"lengths", "reference_lengths"}:
                raise CheckpointError(
                    "the checkpoint does not hold the row lengths of its epoch, as an earlier"
                    " version saved it; resume with that version, or begin a new run"
                )
            self.ranks = steps["ranks"]
            self.saved_maximum = steps["maximum"] or 0
            self._lengths = self._reference_lengths = None
            if steps["reference_lengths"]:
                self._lengths = self._reference_lengths = RowLengths.unpacked(
                    steps["reference_lengths"]
                )
            if steps["lengths"]:
                self._lengths = RowLengths.unpacked(steps["lengths"])
            if keeps_batch:
                self.batch_size = steps["batch_size"]
                self.first_batch_size = steps["first_batch_size"]
                self._grown_in = steps["grown_in"]
        self._is_begun = False
        self._ahead.clear()
        self._reference = None
        self._go_to(progress)
        if steps is not None:
            # Between two epochs, the lengths are those of the epoch that is over.
            begin = replace(self._epoch.begin, epoch=steps["epoch"])
            self._epoch = replace(self._epoch, begin=begin)

    def state_dict(self) -> dict[str, Any]:
        """Return where training is, as plain values, the same on all ranks; to be saved after
        ``optimizer.step()``.
        """
        reference = self._reference_lengths
        lengths = None if self._lengths is reference else self._lengths
        return {
            "progress": self.progress.state_dict(),
            "steps": {
                "batch_size": self.batch_size,
                "first_batch_size": self.first_batch_size,
                "grown_in": self._grown_in,
                "maximum": self.maximum(),
                "ranks": self.ranks,
                "epoch": self._epoch.begin.epoch,
                "lengths": lengths and lengths.packed,
                "reference_lengths": reference and reference.packed,
            },
        }

    # --- the batch that is requested

    @property
    def step_rows(self) -> int:
        """Rows of a step on one device, unless it is filled with tokens."""
        return self._rows_of_step(self.batch_size)

    def _rows_of_step(self, batch_size: int) -> int:
        return batch_size * self.batching.gradient_accumulation_steps

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

    def rule(self, batch_size: int) -> Callable[[Progress], int]:
        """Return the rows of a step on one device as a function of progress: the schedule's, or
        `batch_size` accumulated.
        """
        schedule = self.batching.batch_size_schedule
        if schedule is None or self.batching.batch_tokens:
            rows = self._rows_of_step(batch_size)
            return lambda progress: rows
        return lambda progress: request_batch(schedule, progress, maximum=self.maximum()).after

    def grows_at(self, progress: Progress) -> bool:
        """Return whether the growth function is called at this point: as an epoch begins, once."""
        return not progress.epoch_steps and progress.epoch > self._grown_in

    def _request(self, progress: Progress) -> int:
        """Ask the rules for the batch of the step at a progress: a growth function as an epoch
        begins, a schedule for each step; return the step's rows on one device.
        """
        batching = self.batching
        function = batching.batch_increase_function
        schedule = batching.batch_size_schedule
        is_over = batching.epochs is not None and progress.epoch >= batching.epochs
        if function is not None and self.grows_at(progress) and not is_over:
            epoch = progress.epoch
            batch = distributed.from_rank_zero(
                lambda: next_batch_size(
                    function, epoch=epoch, batch_size=self.batch_size, maximum=self.maximum()
                )
            )
            self._grown_in = epoch
            self._change(batch, "epoch", epoch)
        if schedule is not None and not batching.batch_tokens:

            def request() -> ClampedBatch:
                return request_batch(schedule, progress, maximum=self.maximum())

            batch = distributed.from_rank_zero(request) if self.asks_rank_zero else request()
            if batch.after != self.batch_size or not (progress.steps or self._logged):
                # a ramp may change it with each step: what is near to what was printed last is
                # written to the run log only
                prints = not 0.8 * self._logged < batch.after < 1.25 * self._logged
                if prints:
                    self._logged = batch.after
                self._change(batch, "step", progress.steps, prints=prints)
        return self.step_rows

    def _change(self, batch: ClampedBatch, unit: str, at: int, *, prints: bool = True) -> None:
        previous = self.batch_size
        self.batch_size = batch.after
        facts = {unit: at, "before": previous, "requested": batch.requested, "after": batch.after}
        message = f"{unit} {at}: {batch.describe(previous)}"
        self._event("batch_size", message, prints=prints, **facts)

    # --- epochs

    def _go_to(self, progress: Progress) -> None:
        """Plan the current epoch from a progress on."""
        self._progress = self._planned_from = progress
        self._planned.cache_clear()
        begin = progress.at_epoch_start()
        self._epoch = self._plan_epoch(
            begin, measure=self._lengths_of_epoch, order_of=self._order_of
        )
        self._plan = self._pace = None

    def _plan_epoch(
        self,
        begin: Progress,
        *,
        measure: Callable[[], RowLengths],
        order_of: EpochOrder | None,
    ) -> PlannedEpoch:
        """Plan the epoch that begins at a progress, by the lengths and the order that functions
        return.
        """
        return PlannedEpoch(
            self.num_rows,
            self.batching,
            replace(begin, rows_per_epoch=self.num_rows),
            self.ranks,
            self.sizer.layout.uniform in ("rows", "both"),
            measure,
            order_of,
        )

    def _measure(self) -> RowLengths:
        return RowLengths(self._rows.lengths, self._rows.real_lengths)

    def _lengths_of_epoch(self) -> RowLengths:
        """Return the row lengths of the current epoch's plan, which stay until the epoch ends."""
        if self._lengths is None:
            self._lengths = self._measure()
        return self._lengths

    def _lengths_of_reference(self) -> RowLengths:
        """Return the lengths of the constant epoch: the same throughout a run, so that a schedule
        of the rate keeps its end.
        """
        if self._reference_lengths is None:
            self._reference_lengths = self._lengths_of_epoch()
        return self._reference_lengths

    def _epoch_of(self, progress: Progress) -> PlannedEpoch:
        """Return the plan of the epoch of a progress."""
        if progress.epoch == self._epoch.begin.epoch:
            return self._epoch
        return self._planned(progress.at_epoch_start())

    def begin_epoch(self) -> None:
        """Grow the batch by the growth function, and plan the epoch's steps; or resume within an
        epoch.

        Raises:
            SettingError: with `drop_last` an epoch has no whole step.
        """
        progress = replace(self._progress, rows_per_epoch=self.num_rows)
        if not progress.epoch_rows:
            changed = self._rows.recount()
            if changed:
                message = f"{changed}: all rows are counted again"
                self._event("recounted", message, epoch=progress.epoch)
            self._lengths = None
        self._go_to(progress)
        self._request(progress)
        if self.first_batch_size is None:
            self.begin_with(self.batch_size)
        if self.batching.drop_last:
            if self.plan.steps == 0:
                rows = self.plan.rows
                remedy = f"a step of the requested batch is more than an epoch's {rows} rows"
                raise SettingError("drop_last", True, remedy)
            if self.reference.steps == 0:
                remedy = f"an epoch of {self.num_rows} rows has no whole step; set drop_last=False"
                raise SettingError("batch_size", self.batch_size, remedy)
        self._is_begun = True

    def take_batch(self, batch_size: int) -> None:
        """Set the batch size, as a search has found it or the user gives it."""
        self.batch_size = batch_size

    def begin_with(self, batch_size: int) -> None:
        """Set the initial batch size of training."""
        self.batch_size = self.first_batch_size = batch_size
        self._reference = self._pace = None

    def end_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        self._progress = self._progress.after_epoch()
        self._is_begun = False

    @property
    def order(self) -> RowOrder:
        """Row numbers of the current epoch in the order of their use."""
        return self._epoch_of(self._progress).order

    def describe_epoch(self) -> tuple[str, dict[str, Any]]:
        """Describe the epoch that is over: the rows that were trained, and those that no step has
        used, by reason; as text and as facts.
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

    # --- the clock of the rate

    @property
    def plan(self) -> EpochPlan:
        """The current epoch, divided into steps as its beginning shows it."""
        if self._plan is None:
            begin = self._planned_from
            self._plan = self._epoch_of(begin).divide(
                begin, self.rule(self.batch_size), counts_tokens=self._plans_tokens
            )
        return self._plan

    @property
    def reference(self) -> EpochPlan:
        """An epoch of a constant batch, in whose steps the schedule of the learning rate counts."""
        if self._reference is None:
            batch_size = self.first_batch_size or self.batch_size
            if self.batching.batch_size_schedule is not None:
                # The rate's schedule was chosen for the configured batch.
                batch_size = self.batching.batch_size
            rows = self._rows_of_step(batch_size)
            constant = replace(
                self._epoch,
                batching=replace(self.batching, batch_size_schedule=None),
                # A script's sampler may not be able to draw the first epoch again.
                begin=Progress() if self._order_of is None else self._epoch.begin,
                measure=self._lengths_of_reference,
            )
            self._reference = constant.divide(
                Progress(), lambda progress: rows, counts_tokens=self._plans_tokens
            )
        return self._reference

    @property
    def pace(self) -> Pace:
        """Pace of the rate's clock in the current epoch."""
        if self._pace is None:
            self._pace = self.pace_of(None)
        return self._pace

    def pace_of(self, plan: EpochPlan | None) -> Pace:
        """Return the pace of the rate's clock in an epoch with a plan; None for the current epoch.

        A schedule of the batch that follows the rate, and a script that drops no row, count by the
        constant batch: that is as good, and known without dividing the epoch.
        """
        follows_rate = isinstance(self.batching.batch_size_schedule, Seesaw)
        if follows_rate or not (self.divides_ahead or self._plans_tokens):
            plan = self.reference
        return Pace(self.reference, plan or self.plan)

    def couple(
        self, lr_scheduler: LRScheduler | None, *, lr_clock: Clock | str = "samples"
    ) -> None:
        """Couple a schedule that follows the learning rate, such as `seesaw`, to the rate's own.

        Both read one clock, that of an epoch of the constant batch, so that the rate's schedule
        takes the same amount of data however the batch grows.

        Args:
            lr_scheduler: scheduler of the rate, a function of the number of steps.
            lr_clock: unit of its clock: ``samples`` or ``tokens``.

        Raises:
            SettingError: a scheduler or a clock that it cannot follow.
        """
        clock = lr_clock if isinstance(lr_clock, Clock) else Clock.from_config(lr_clock)
        rate_left_at = relative_decay(schedule_factor(lr_scheduler))

        def decay(progress: Progress) -> float:
            of_constant_batch = replace(progress, pace=Pace(self.reference, self.reference))
            return rate_left_at(elapsed_steps(clock.decay, of_constant_batch))

        self.batching = self.batching.coupled(decay, clock)
        self._go_to(self._progress)

    # --- ahead of training

    def ahead(
        self, epochs: int, *, counts_tokens: bool = True, plans: bool = False
    ) -> Iterator[StepAhead]:
        """Walk through the remaining steps without training. A copy of a growth function is called
        once for each epoch, and a schedule once for each step.

        Args:
            epochs: epochs of training, including those that are done.
            counts_tokens: whether progress counts the tokens of the steps.
            plans: whether epochs get their paces as the walk leaves them.
        """
        function = copy_rule(self.batching.batch_increase_function)
        batch_size = self.batch_size
        progress = replace(self._progress, rows_per_epoch=self.num_rows)
        while progress.epoch < epochs:
            begin = progress
            batch_size = self._grown(function, begin, batch_size)
            plan = self._epoch_of(begin)
            epoch = EpochAhead(batch_size, plan)
            rule = self.rule(batch_size)
            sizes = []
            for at, size, progress in plan.walk(begin, rule, counts_tokens=counts_tokens):
                sizes.append(size)
                yield StepAhead(at, progress, epoch)
            if plans and begin.epoch == self._progress.epoch:
                epoch.pace = self.pace
            elif plans:
                divided = plan.divide(begin, rule, counts_tokens=self._plans_tokens, sizes=sizes)
                epoch.pace = self.pace_of(divided)
            epoch.plan = None
            progress = progress.after_epoch()

    def count_steps(self, epochs: int, *, sees_tokens: bool = True) -> int:
        """Count the steps of :meth:`ahead`; without reading lengths where a schedule sees no tokens
        in training.
        """
        sees_tokens = sees_tokens or bool(self.batching.batch_tokens)
        if self.batching.batch_size_schedule is not None:
            return sum(1 for _ in self.ahead(epochs, counts_tokens=sees_tokens))
        function = copy_rule(self.batching.batch_increase_function)
        batch_size = self.batch_size
        progress = replace(self._progress, rows_per_epoch=self.num_rows)
        num_steps = 0
        while progress.epoch < epochs:
            batch_size = self._grown(function, progress, batch_size)
            rows = self._rows_of_step(batch_size) * self.ranks
            num_steps += self._epoch_of(progress).num_steps_left(progress, global_rows=rows)
            progress = progress.after_epoch()
        return num_steps

    def _grown(
        self, function: Callable[[int, int], int] | None, progress: Progress, batch_size: int
    ) -> int:
        """Return the batch size at a progress, where a growth function may be asked."""
        if function is None or not self.grows_at(progress):
            return batch_size
        return next_batch_size(
            function, epoch=progress.epoch, batch_size=batch_size, maximum=self.maximum()
        ).after

    def num_micro_batches(self, step: StepAhead) -> int:
        """Return how many micro-batches this rank's rows of a step have, while the walk is in its
        epoch.
        """
        batching = self.batching
        at = step.progress
        assert step.epoch.plan is not None, "the walk has left the epoch"
        batch_size = step.epoch.batch_size
        if batching.batch_size_schedule is not None and not batching.batch_tokens:
            batch_size = at.batch
        numbers = step.epoch.plan.order[at.epoch_rows : step.after.epoch_rows].tolist()
        limit = self.sizer.limit(batch_size)
        rank_rows = [numbers[position] for position in self._rows_of_rank(numbers, limit)]
        lengths = self._epoch.lengths.all[rank_rows].tolist()
        return max(1, len(micro_batches(lengths, limit, self.sizer.layout)))

    # --- steps

    def steps(self) -> Iterator[PlannedRows]:
        """Yield the remaining steps of the current epoch; steps that were handed out before but are
        not done come again.
        """
        self._ahead.clear()
        if not self._is_begun:
            self.begin_epoch()
        epoch = self._epoch
        progress = self._progress
        num_rows = len(self._rows)
        if self._order_of is None and num_rows != self.num_rows:
            remedy = f"it had {self.num_rows} when training began; keep its length"
            raise SettingError("dataset", count(num_rows, "row"), remedy)
        # A run that resumes within an epoch has logged them before.
        if self.batching.batch_tokens and not progress.epoch_rows:
            for kind, message, facts in epoch.describe_token_steps():
                self._event(kind, message, epoch=progress.epoch, **facts)
        step = self._next_step(epoch, progress)
        while step is not None:
            self._ahead.append(step)
            yield step
            if self._progress.epoch > progress.epoch:
                return
            # Steps that are done have exact tokens; steps ahead only if their tokens are counted.
            progress = self._ahead[-1].after if self._ahead else self._progress
            step = self._next_step(epoch, progress)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's row numbers of the steps that are left of the current epoch."""
        for step in self.steps():
            yield step.own

    def _next_step(self, epoch: PlannedEpoch, progress: Progress) -> PlannedRows | None:
        """Return the rows of the step at a progress; None if the epoch is over."""
        if epoch.is_over(progress):
            return None
        batch, size = epoch.next_step(progress, requested=self._request(progress))
        if not size:
            # With drop_last fewer rows are left than are requested.
            return None
        begin = progress.epoch_rows
        two_steps = epoch.order[begin : begin + 2 * size].tolist()
        numbers = two_steps[:size]
        next_numbers = two_steps[size:]
        positions = self._rows_of_rank(numbers, self.limit)
        own = [numbers[position] for position in positions]
        following = [
            next_numbers[position] for position in positions if position < len(next_numbers)
        ]
        pace = self.pace
        if progress.batch != batch or progress.pace is not pace:
            progress = replace(progress, batch=batch, pace=pace)
        tokens = epoch.num_tokens(numbers) if self._counts_tokens else 0
        return PlannedRows(progress, numbers, own, following, tokens)

    def _rows_of_rank(self, numbers: Sequence[int], limit: MicroBatchLimit) -> Sequence[int]:
        """Return this rank's rows of a step, as positions among the `numbers` of all ranks.

        They are balanced by tokens where micro-batches are made by tokens or by length; else they
        are distributed in turn, as torch's sampler does.
        """
        ranks = distributed.data_parallel_size()
        if ranks == 1:
            return range(len(numbers))
        rank = distributed.data_parallel_rank()
        layout = self.sizer.layout
        if limit.unit == "tokens" or layout.uniform is not None or not layout.is_usual:
            lengths = self._epoch.lengths.all[torch.as_tensor(numbers, dtype=torch.int64)]
            return balance_by_tokens(lengths, ranks, limit, layout)[rank]
        return balance_by_rows(len(numbers), ranks)[rank]

    def count_tokens(self, tokens: int) -> None:
        """Set the real tokens, over all ranks, of the step that was handed out last."""
        self._ahead[-1] = self._ahead[-1]._replace(tokens=tokens)

    @property
    def newest(self) -> PlannedRows:
        """The step that was handed out last."""
        return self._ahead[-1]

    @property
    def oldest(self) -> PlannedRows:
        """The oldest step that was handed out and is not done."""
        return self._ahead[0]

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
        return self._epoch.num_tokens(step.numbers)

    def done(
        self, *, tokens: int | None = None, ends_epoch: bool = True, **measured: Any
    ) -> Progress:
        """Count the oldest step that was handed out as done; return the progress after it.

        Args:
            tokens: its real tokens over all ranks; None for those that were counted as it was
                handed out.
            ends_epoch: whether the next epoch begins with the last step of this one; else
                :meth:`end_epoch` begins it.
            measured: what else of progress the step has measured, such as its `noise_scale`.

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
            rows=len(step.numbers), tokens=tokens, batch=step.progress.batch, **measured
        )
        if ends_epoch and self.is_over:
            self.end_epoch()
        return self._progress

    @property
    def is_over(self) -> bool:
        """Return whether the current epoch has no step left."""
        return self._epoch.is_over(self._progress)
