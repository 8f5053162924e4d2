"""Which rows each optimizer step takes: by a constant batch, a growth function, a schedule, or a budget of tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset

from adaptive_batch import distributed
from adaptive_batch.errors import GrowthFunctionError, SettingError
from adaptive_batch.schedules import (
    EpochPlan,
    Progress,
    Schedule,
    ask,
    check_increment,
    check_schedule,
    needs_noise_scale,
    next_batch_size,
    rows_of_next_step,
    walk,
)

from .balance import balance_by_rows, balance_by_tokens
from .micro_batches import MicroBatchLayout, MicroBatchLimit
from .stream import RowSampler
from .token_sampler import TokenBatchPlan, plan_batches
from .varying_budget import plan_batches_by_rule

log = logging.getLogger("adaptive_batch")

Event = Callable[..., object]  # event(kind, message, **facts)


@dataclass(frozen=True)
class Batching:
    """What a step holds, in which order rows come, and where an epoch ends, as configured.

    Attributes:
        batch_size: rows of a micro-batch on one device, before a rule changes it.
        gradient_accumulation_steps: `batch_size` times this is a step.
        batch_tokens: real tokens of a step on one device, in place of a number of rows; None for rows.
        batch_increase_function: ``f(epoch, batch_size) -> rows to add``, asked as an epoch starts; None adds none.
        batch_size_schedule: ``rule(progress) -> rows of a step on one device`` (tokens, with `batch_tokens`); None for none.
        grow_beyond_maximum: a rule may pass what fits at once.
        shuffle: with the order ``dataloader``, False keeps the dataset's own order.
        seed: of the order.
        sample_order: ``dataloader``, ``random`` or ``seqlen``.
        sample_window: rows within which ``seqlen`` sorts; None for the whole dataset.
        min_rows_per_batch, max_rows_per_batch: of a step by tokens.
        long_rows: what becomes of a row above `batch_tokens`: ``error``, ``drop`` or ``alone``.
        drop_last: the last, short step of an epoch is dropped.
        max_steps_per_epoch: optimizer steps after which an epoch ends; None for no limit.
        epochs: after which the growth function is not asked any more; None for no limit.
        refuses_empty_epochs: an epoch that has no whole step is an error.
    """

    batch_size: int
    gradient_accumulation_steps: int = 1
    batch_tokens: int | None = None
    batch_increase_function: Callable[[int, int], int] | None = None
    batch_size_schedule: Schedule | None = None
    grow_beyond_maximum: bool = False
    shuffle: bool = True
    seed: int = 0
    sample_order: str = "dataloader"
    sample_window: int | None = None
    min_rows_per_batch: int = 1
    max_rows_per_batch: int | None = None
    long_rows: str = "error"
    drop_last: bool = False
    max_steps_per_epoch: int | None = None
    epochs: int | None = None
    refuses_empty_epochs: bool = True

    def check_rules(self) -> None:
        """Refuse a growth function or a schedule that cannot be called, and two at once.

        Raises:
            SettingError: naming it.
        """
        if self.batch_increase_function is not None:
            check_increment(self.batch_increase_function)
        if self.batch_size_schedule is not None:
            check_schedule(self.batch_size_schedule)
            if self.batch_increase_function is not None:
                remedy = "give it or batch_increase_function, not both"
                raise SettingError("batch_size_schedule", self.batch_size_schedule, remedy)


class Rows(Protocol):
    """The rows of an epoch.

    Attributes:
        dataset: map-style.
        lengths: tokens of each row: int64, `[rows]`.
        real_lengths: tokens of each row that are not padding: int64, `[rows]`.
    """

    @property
    def dataset(self) -> Dataset[Any]: ...
    @property
    def lengths(self) -> torch.Tensor: ...
    @property
    def real_lengths(self) -> torch.Tensor: ...
    def num_real_tokens(self, row: Any) -> int:
        """Return the tokens of a row that are not padding."""


class Limits(Protocol):
    """What one micro-batch may hold.

    Attributes:
        bound: the most rows that were tried and fit; None where none was sought.
    """

    bound: int | None

    def of(self, batch_size: int) -> MicroBatchLimit:
        """Return the limit at a batch size."""


def plan_token_batches(
    lengths: torch.Tensor, batching: Batching, *, ranks: int, order: torch.Tensor | None, divisible: bool
) -> TokenBatchPlan:
    """Plan the steps of an epoch that hold `batch_tokens` on each device.

    Args:
        lengths: tokens of each row: int64, `[rows]`.
        batching: with `batch_tokens`.
        ranks: devices.
        order: row numbers in the order in which to take them; None takes all as they come.
        divisible: each step divides into equal micro-batches.
    """
    assert batching.batch_tokens
    return plan_batches(
        lengths,
        batching.batch_tokens * ranks,
        order=order,
        min_rows=batching.min_rows_per_batch * ranks,
        max_rows=batching.max_rows_per_batch and batching.max_rows_per_batch * ranks,
        count="real",
        long_rows=batching.long_rows,
        divisible=divisible,
    )


class StepPlanner:
    """Hands out the rows of each step, to each rank its own, and knows how an epoch divides into steps.

    Args:
        rows: of an epoch.
        batching: as configured.
        layout: of micro-batches; rows are dealt to the ranks so that these are even.
        ranks: a step has `batch_size` rows for each of so many; None for those that there are.
        counts_tokens: the tokens of an epoch must be known.
        event: is given each decision: its kind, a message, and facts by name.

    Attributes:
        batching: as configured.
        sampler: the rows of an epoch, in their order.
        ranks: a step has `batch_size` rows for each of so many.
        batch_size: rows of a micro-batch, or with a schedule of a step, that a step is asked to have now.
        first_batch_size: what it was when training began; the schedule of the learning rate counts in steps of this.
        limits: what fits; None where that is not known yet.
        saved_maximum: what a schedule might ask for when the checkpoint was saved; it is kept on a smaller device.
        event: as given.
        reference: an epoch of a constant batch.
    """

    def __init__(
        self,
        rows: Rows,
        batching: Batching,
        *,
        layout: MicroBatchLayout | None = None,
        ranks: int | None = None,
        counts_tokens: bool = False,
        event: Event = lambda kind, message, **facts: None,
    ) -> None:
        self._rows, self._layout = rows, layout or MicroBatchLayout()
        self.batching = batching
        self.ranks = ranks or distributed.data_parallel_size()
        self._counts_tokens = counts_tokens
        self._ends: dict[str, Any] = {"drop_last": batching.drop_last, "max_steps": batching.max_steps_per_epoch}
        self.sampler = RowSampler(
            rows.dataset,
            shuffle=batching.shuffle,
            seed=batching.seed,
            order=batching.sample_order,
            lengths=rows.lengths if batching.sample_order == "seqlen" else None,
            window=batching.sample_window,
        )
        self.batch_size = batching.batch_size
        self.first_batch_size: int | None = None
        self.limits: Limits | None = None
        self.saved_maximum = 0
        self.event = event
        self._is_open = batching.batch_size_schedule is not None and needs_noise_scale(batching.batch_size_schedule)
        self._token_batches = lru_cache(maxsize=2)(self._plan_tokens)
        self._grown_in = -1  # the last epoch whose beginning has asked the growth function
        self._logged = 0  # the batch that a schedule asked for when that was logged last
        self._plan: EpochPlan | None = None
        self._at, self._rule_now = Progress(), self._rule()

    @property
    def plan(self) -> EpochPlan:
        """The current epoch, divided into steps as its beginning shows it."""
        if self._plan is None:
            self._plan = self._divide(self._at, self._rule_now)
        return self._plan

    # --- what a step is asked to hold -------------------------------------------------------------------------------

    def begin(self, progress: Progress) -> Progress:
        """Begin the first epoch of this run, or go on within it; find the constant batch that schedules count in."""
        progress = self.begin_epoch(progress)
        self._count_in()
        return progress

    def look_at(self, progress: Progress, *, batch_size: int) -> None:
        """Plan the epoch as :meth:`begin` does, with a batch size that is known, and do nothing."""
        self.batch_size = batch_size
        self._set_epoch(replace(progress, rows_per_epoch=len(self.sampler)))
        self._check_plan()
        self._count_in()

    def _set_epoch(self, progress: Progress) -> None:
        self._at, self._rule_now, self._plan = progress, self._rule(), None

    def _check_plan(self) -> None:
        if self.batching.refuses_empty_epochs and self.batching.drop_last and self.plan.steps == 0:
            raise SettingError(
                "drop_last",
                True,
                f"a step of the batch that is asked for is more than an epoch's {self.plan.rows} rows",
            )

    def _count_in(self) -> None:
        """Set the constant batch that schedules count in."""
        if self.first_batch_size is None:
            self.first_batch_size = self.batch_size
        # a schedule says what a step holds, so the configured batch is the one that the rate's schedule was chosen for
        scheduled = self.batching.batch_size_schedule is not None
        self.reference = self._constant(self.batching.batch_size if scheduled else self.first_batch_size)
        if self.reference.steps == 0:
            raise SettingError(
                "batch_size",
                self.batch_size,
                f"an epoch of {len(self.sampler)} rows has no whole step; set drop_last=False",
            )

    def begin_epoch(self, progress: Progress) -> Progress:
        """Grow the batch where a growth function says so, and plan the epoch's steps; or go on within an epoch."""
        if progress.epoch_steps == 0:
            self._grow(progress.epoch)
        progress = replace(progress, rows_per_epoch=len(self.sampler))
        self._set_epoch(progress)
        self._check_plan()
        self._follow(progress)
        return progress

    def start_epoch(self, progress: Progress) -> None:
        """Hand out the rows of the epoch from where it stands; list those that no step has room for."""
        batching, epoch = self.batching, progress.epoch
        if not batching.batch_tokens:
            self.sampler.start_epoch(epoch, position=progress.epoch_rows)
            return
        batches = self._batches(progress)
        self.sampler.start_epoch(epoch, position=progress.epoch_rows, rows=batches.rows)
        left_out = {
            f"of more than batch_tokens={batching.batch_tokens}": batches.dropped.tolist(),
            "of the last step (drop_last)": batches[-1] if batching.drop_last else [],
        }
        for which, rows in left_out.items():
            if rows and not progress.epoch_steps:
                some = ", ".join(map(str, sorted(rows)[:10])) + (", ..." if len(rows) > 10 else "")
                message = f"epoch {epoch}: {len(rows)} rows {which} are dropped: {some}"
                self.event("dropped", message, epoch=epoch, rows=sorted(rows))

    def next_step(self, progress: Progress) -> tuple[Progress, list[dict[str, Any]]]:
        """This rank's rows of the step that comes next; and progress with what was asked for.

        After the last step of the epoch the stream has taken none, for any rank.
        """
        if self.batching.batch_tokens:
            step = progress.epoch_steps
            size = self.plan.rows_of_step(step) if step < self.plan.steps else 0
            return replace(progress, batch=self._budget(progress)), self._take(size)
        asked = self._follow(progress) if self._goes_on(progress) else 0
        step_rows = asked * self.ranks
        size = rows_of_next_step(progress, step_rows=step_rows, rows=len(self.sampler), **self._ends)
        return replace(progress, batch=asked), self._take(size)

    def size_of_step(self, rows: Sequence[Mapping[str, Any]], *, in_tokens: bool) -> int:
        """What the step whose `rows` this rank holds has on all ranks: rows, or real tokens."""
        taken = self.sampler.taken
        if not in_tokens:
            return len(taken)
        if distributed.data_parallel_size() == 1:
            return sum(map(self._rows.num_real_tokens, rows))
        return int(self._rows.real_lengths[taken].sum())

    def _take(self, size: int) -> list[dict[str, Any]]:
        """Deal the next rows to the ranks, and read this one's."""
        mine = self.deal(self.sampler.next_numbers(size), self.limit)
        return self.sampler.take(size, only=mine)

    def deal(self, numbers: Sequence[int], capacity: MicroBatchLimit) -> Sequence[int]:
        """Which of a step's rows are this rank's: their positions among `numbers`.

        They are dealt by their tokens where micro-batches are made by tokens, and one after another as torch's sampler deals
        them where not.
        """
        ranks, rank, shapes = distributed.data_parallel_size(), distributed.data_parallel_rank(), self._layout
        if ranks == 1:
            return range(len(numbers))
        if capacity.unit == "tokens" or shapes.uniform is not None:
            lengths = self._rows.lengths[torch.as_tensor(numbers, dtype=torch.int64)]
            return balance_by_tokens(lengths, ranks, capacity, shapes)[rank]
        return balance_by_rows(len(numbers), ranks)[rank]

    def _goes_on(self, progress: Progress) -> bool:
        """Whether the epoch has room for a step of any size."""
        return rows_of_next_step(progress, step_rows=1, rows=len(self.sampler), **self._ends) > 0

    def left_out(self, progress: Progress) -> dict[str, int]:
        """Rows of an epoch that is over which no step has used, by reason."""
        long_rows = len(self._batches(progress).dropped) if self.batching.batch_tokens else 0
        rest = len(self.sampler) - progress.epoch_rows - long_rows
        most = self._ends["max_steps"]
        why = "drop_last" if self._ends["drop_last"] else "an error"  # which the audit does not let pass
        why = "max_steps_per_epoch" if most is not None and progress.epoch_steps >= most else why
        return {reason: rows for reason, rows in ((why, rest), ("long_rows", long_rows)) if rows}

    def _follow(self, progress: Progress) -> int:
        """Ask for the rows of the next step on one device, and let the capacity follow what changes."""
        rule = self.batching.batch_size_schedule
        if rule is None or self.batching.batch_tokens:
            return self.batch_size * self.batching.gradient_accumulation_steps
        asked = ask(rule, progress, maximum=self.maximum)
        if asked.after != self.batch_size or not (progress.steps or self._logged):
            # a ramp may change it with each step: what is near to what was said last goes into the record alone
            says = not 0.8 * self._logged < asked.after < 1.25 * self._logged
            self._logged = asked.after if says else self._logged
            self.event(
                "batch_size",
                f"step {progress.steps}: {asked.describe(self.batch_size)}",
                says=says,
                step=progress.steps,
                before=self.batch_size,
                requested=asked.requested,
                after=asked.after,
            )
        self.batch_size = asked.after
        return asked.after

    @property
    def maximum(self) -> int | None:
        """What a rule may not pass; None where it may grow freely, or where what fits is not known."""
        bound = self.limits.bound if self.limits else None
        if self.batching.grow_beyond_maximum or bound is None:
            return None
        # a schedule goes on as it was on a smaller device, in more micro-batches
        return max(bound, self.saved_maximum if self.batching.batch_size_schedule else 0)

    @property
    def limit(self) -> MicroBatchLimit:
        """What one micro-batch may hold at the batch size of now."""
        return self.limits.of(self.batch_size) if self.limits else MicroBatchLimit(self.batch_size)

    def _grow(self, epoch: int) -> None:
        """Ask the growth function for the rows to add."""
        function = self.batching.batch_increase_function
        if function is None or epoch <= self._grown_in or (self.batching.epochs or epoch + 1) <= epoch:
            return
        growth = distributed.from_rank_zero(
            lambda: next_batch_size(function, epoch=epoch, batch_size=self.batch_size, maximum=self.maximum)
        )
        self._grown_in = epoch
        self.event(
            "batch_size",
            growth.describe(),
            epoch=epoch,
            before=growth.before,
            requested=growth.requested,
            after=growth.after,
        )
        self.batch_size = growth.after

    # --- how an epoch divides ---------------------------------------------------------------------------------------

    def _rule(self, batch_size: int | None = None) -> Callable[[Progress], int]:
        """What a step on one device is asked to hold, as a function of progress alone."""
        rule, batching = self.batching.batch_size_schedule, self.batching
        if rule is None or batching.batch_tokens:
            rows = (batch_size or self.batch_size) * batching.gradient_accumulation_steps
            return lambda progress: rows
        return lambda progress: ask(rule, progress, maximum=self.maximum).after

    def _divide(self, progress: Progress, rule: Callable[[Progress], int]) -> EpochPlan:
        """The epoch at whose beginning, or within which, progress is."""
        batching = self.batching
        if batching.batch_tokens:
            batches = self._batches(progress)
            plan = EpochPlan.of_sizes(batches.sizes.tolist(), **self._ends)
            return replace(plan, tokens=self._tokens(batches.rows, plan))
        ranks, order = self.ranks, None
        if batching.batch_size_schedule is None:
            plan = EpochPlan.of(len(self.sampler), step_rows=rule(progress) * ranks, **self._ends)
            if progress.epoch_rows != progress.epoch_steps * plan.step_rows:  # it was another batch before a restart
                plan = self._mixed(progress, rule)
            if self._counts_tokens:
                order = self.sampler.order(progress.epoch)
            return plan if order is None else replace(plan, tokens=self._tokens(order, plan))
        order = self.sampler.order(progress.epoch)
        before = [0, *self._rows.real_lengths[order].cumsum(0).tolist()]
        options: dict[str, Any] = {"batch": rule, "ranks": ranks, "rows": len(order), "tokens_before": before}
        if self._is_open:
            plan = self._mixed(progress, rule, before)
        else:
            begin = progress.at_epoch_start()
            sizes, again = ([size for _, size in walk(begin, **options, **self._ends)] for _ in range(2))
            plan = EpochPlan.of_sizes(sizes, max_steps=self._ends["max_steps"])
            plan = replace(plan, is_open=sizes != again)
        plan = replace(plan, rows=len(order), is_open=self._is_open or plan.is_open)
        return replace(plan, tokens=self._tokens(order, plan))

    def _mixed(
        self, progress: Progress, rule: Callable[[Progress], int], tokens_before: list[int] | None = None
    ) -> EpochPlan:
        """An epoch whose steps so far are not those that the rule would have asked for: these, as large as they were on average."""
        rows, steps = progress.epoch_rows, progress.epoch_steps
        done = [rows * (step + 1) // steps - rows * step // steps for step in range(steps)]
        options: dict[str, Any] = {"batch": rule, "ranks": self.ranks, "rows": len(self.sampler)}
        left = [size for _, size in walk(progress, tokens_before=tokens_before, **options, **self._ends)]
        return replace(EpochPlan.of_sizes(done + left), rows=len(self.sampler), most_steps=self._ends["max_steps"])

    def _constant(self, batch_size: int) -> EpochPlan:
        """The first epoch, divided by a batch that does not change."""
        batching = self.batching
        if batching.batch_tokens:
            batches = self._token_plan(self.sampler.order(0))
            return EpochPlan.of_sizes(batches.sizes.tolist(), **self._ends)
        step_rows = batch_size * batching.gradient_accumulation_steps * self.ranks
        return EpochPlan.of(len(self.sampler), step_rows=step_rows, **self._ends)

    def _tokens(self, order: torch.Tensor, plan: EpochPlan) -> int:
        """Real tokens of the rows that are stepped, in their order."""
        if not (self._counts_tokens or self.batching.batch_tokens):
            return 0
        used = plan.slots if plan.sizes is None else sum(plan.sizes)
        lengths = self._rows.real_lengths[order[:used]]
        alike = len(lengths) > 0 and bool((lengths == lengths[0]).all())
        return plan.slots * int(lengths[0]) if alike else int(lengths.sum())

    # --- steps by tokens --------------------------------------------------------------------------------------------

    def _batches(self, progress: Progress) -> TokenBatchPlan:
        return self._token_batches(progress.at_epoch_start())[0]

    def _budget(self, progress: Progress) -> int:
        budgets = self._token_batches(progress.at_epoch_start())[1]
        return budgets[progress.epoch_steps] if progress.epoch_steps < len(budgets) else progress.batch

    @property
    def _divisible(self) -> bool:
        return self._layout.uniform in ("rows", "both")

    def _token_plan(self, order: torch.Tensor) -> TokenBatchPlan:
        return plan_token_batches(
            self._rows.lengths, self.batching, ranks=self.ranks, order=order, divisible=self._divisible
        )

    def _plan_tokens(self, begin: Progress) -> tuple[TokenBatchPlan, list[int]]:
        """The rows of each step of an epoch, and the tokens that each was asked to hold."""
        batching, order = self.batching, self.sampler.order(begin.epoch)
        rule = batching.batch_size_schedule
        if rule is None:
            assert batching.batch_tokens
            batches = self._token_plan(order)
            return batches, [batching.batch_tokens] * len(batches)
        ranks = self.ranks
        begin = replace(begin, batch=begin.batch * ranks)

        def ask_for(progress: Progress) -> int:  # for all ranks, while progress counts what is asked for on one
            return ask(rule, replace(progress, batch=progress.batch // ranks), maximum=None).after * ranks

        batches, budgets = plan_batches_by_rule(
            self._rows.lengths,
            ask_for,
            order=order,
            progress=begin,
            min_rows=batching.min_rows_per_batch * ranks,
            max_rows=batching.max_rows_per_batch and batching.max_rows_per_batch * ranks,
            long_rows=batching.long_rows,
            divisible=self._divisible,
        )
        asked, progress = budgets.tolist(), begin
        for number, rows in enumerate(batches.tolist()):
            if ask_for(progress) != asked[number]:
                raise GrowthFunctionError(
                    f"batch_size_schedule {rule!r} answered {asked[number] // ranks}, and something else when asked again: with "
                    "batch_tokens it must be a function of progress alone"
                )
            progress = replace(progress, batch=asked[number])
            progress = progress.after_step(rows=len(rows), tokens=int(self._rows.lengths[rows].sum()))
        return batches, [budget // ranks for budget in asked]

    # --- looking ahead ----------------------------------------------------------------------------------------------

    def ahead(
        self, progress: Progress, batch_sizes: Mapping[int, int], *, counts_tokens: bool = True
    ) -> Iterator[tuple[Progress, list[int], EpochPlan]]:
        """Goes through what is left of training without training.

        Args:
            progress: where training is.
            batch_sizes: `batch_size` of each epoch to go through, as a growth function will make it.
            counts_tokens: count the tokens of each step in progress.

        Returns:
            For each step: progress before it, the numbers of its rows, the plan of its epoch.
        """
        progress = replace(progress, rows_per_epoch=len(self.sampler))
        for epoch, batch_size in batch_sizes.items():
            rule = self._rule(batch_size)
            plan = self._divide(progress, rule)
            order = self._batches(progress).rows if self.batching.batch_tokens else self.sampler.order(epoch)
            lengths = self._rows.real_lengths if counts_tokens else torch.zeros(len(self.sampler), dtype=torch.int64)
            before = [0, *lengths[order].cumsum(0).tolist()]
            for at, size in self._walk(progress, rule, plan, before):
                begin = at.epoch_rows
                yield at, order[begin : begin + size].tolist(), plan
                progress = at.after_step(rows=size, tokens=before[begin + size] - before[begin])
            progress = progress.after_epoch()

    def _walk(
        self, progress: Progress, rule: Callable[[Progress], int], plan: EpochPlan, tokens_before: list[int]
    ) -> Iterator[tuple[Progress, int]]:
        """The rest of an epoch, step by step, as training will take it."""
        if not self.batching.batch_tokens:
            yield from walk(
                progress,
                batch=rule,
                ranks=self.ranks,
                rows=len(self.sampler),
                tokens_before=tokens_before,
                **self._ends,
            )
            return
        for step in range(progress.epoch_steps, plan.steps):
            progress, size = replace(progress, batch=self._budget(progress)), plan.rows_of_step(step)
            yield progress, size
            begin = progress.epoch_rows
            progress = progress.after_step(rows=size, tokens=tokens_before[begin + size] - tokens_before[begin])

    def steps_left(self, progress: Progress) -> int:
        """Optimizer steps that are left where the batch stays as it is."""
        assert self.batching.epochs is not None
        epochs_left = self.batching.epochs - progress.epoch - 1
        if self.batching.batch_tokens:
            stays = dict.fromkeys(range(progress.epoch, self.batching.epochs), self.batch_size)
            return sum(1 for _ in self.ahead(progress, stays))
        return self.plan.steps - progress.epoch_steps + epochs_left * self._constant(self.batch_size).steps

    def num_steps(self, progress: Progress, epochs: int) -> int:
        """Return the optimizer steps that are left of so many epochs, as the rules answer now."""
        sizes, batch_size, function = {}, self.batch_size, self.batching.batch_increase_function
        for epoch in range(progress.epoch, epochs):
            if function is not None and epoch > self._grown_in and (epoch > progress.epoch or not progress.epoch_steps):
                batch_size = next_batch_size(function, epoch=epoch, batch_size=batch_size, maximum=self.maximum).after
            sizes[epoch] = batch_size
        return sum(1 for _ in self.ahead(progress, sizes, counts_tokens=self.batching.batch_size_schedule is not None))

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs beside progress, as plain values."""
        return {
            "rows": len(self.sampler),
            "ranks": self.ranks,
            "batch_size": self.batch_size,
            "first_batch_size": self.first_batch_size,
            "grown_in": self._grown_in,
            "maximum": self.maximum,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, in a planner that was built as the saved one was."""
        self.ranks, self.batch_size, self._grown_in = state["ranks"], state["batch_size"], state["grown_in"]
        self.first_batch_size = state["first_batch_size"]
        self.saved_maximum = state["maximum"] or 0

    def ask_ahead(self, progress: Progress) -> int:
        """Ask the rule once, for nothing, so that its mistakes show before weights load; returns its answer."""
        answer = 0
        batching = self.batching
        if batching.batch_increase_function and not progress.epoch_steps:
            answer = next_batch_size(
                batching.batch_increase_function, epoch=progress.epoch, batch_size=self.batch_size, maximum=None
            ).after
        if batching.batch_size_schedule:
            asked = ask(batching.batch_size_schedule, replace(progress, rows_per_epoch=len(self.sampler)), maximum=None)
            answer = asked.after
        return answer
