"""Which rows each optimizer step takes: by a constant batch, a growth function, a schedule, or a budget of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from adaptive_batch import distributed
from adaptive_batch.data import (
    MicroBatchLimit,
    RowSampler,
    TokenBatchPlan,
    balance_by_rows,
    balance_by_tokens,
    plan_batches_by_rule,
)
from adaptive_batch.errors import GrowthFunctionError, SettingError
from adaptive_batch.memory import RandomState
from adaptive_batch.report import RunLog
from adaptive_batch.schedules import (
    EpochPlan,
    Progress,
    ask,
    needs_noise_scale,
    next_batch_size,
    rows_of_next_step,
    walk,
)

from .capacity import LimitFinder
from .parts import TrainingParts


class StepPlanner:
    """Hands out the rows of each step, and knows how an epoch divides into steps.

    Args:
        parts: of the run, with their data built.
        seed: of the order of rows.
        max_steps_per_epoch: optimizer steps after which an epoch ends; None for no limit.

    Attributes:
        stream: the rows of an epoch, in their order.
        batch_size: rows of a micro-batch, or with a schedule of a step, that a step is asked to have now.
        first_batch_size: what it was when training began; the schedule of the learning rate counts in steps of this.
        plan: of the current epoch.
        reference: an epoch of a constant batch.
    """

    def __init__(self, parts: TrainingParts, *, seed: int, max_steps_per_epoch: int | None) -> None:
        settings = parts.settings
        self._parts = parts
        self._settings = settings
        self._ends: dict[str, Any] = {"drop_last": settings.drop_last, "max_steps": max_steps_per_epoch}
        self.stream = RowSampler(
            parts.dataset,
            shuffle=parts.cfg.shuffle,
            seed=0 if settings.sample_order == "dataloader" else seed,  # 0 is the seed of torchtune's sampler
            order=settings.sample_order,
            lengths=parts.lengths if settings.sample_order == "seqlen" else None,
            window=settings.sample_window,
        )
        self.batch_size = settings.batch_size
        self.first_batch_size: int | None = None
        self._is_open = settings.batch_size_schedule is not None and needs_noise_scale(settings.batch_size_schedule)
        self._token_batches = lru_cache(maxsize=2)(self._plan_tokens)
        self._capacity: LimitFinder | None = None
        self._said = 0  # the batch that a schedule asked for when that was said last

    # --- what a step is asked to hold -------------------------------------------------------------------------------

    def use(self, capacity: LimitFinder, record: RunLog, *, saved_bound: int | None = None) -> None:
        """Set what fits, what fitted when the checkpoint was saved, and where decisions are written down."""
        self._capacity, self._record, self._saved_bound = capacity, record, saved_bound or 0
        bound = capacity.bound
        if (
            self._settings.optimizer_in_bwd
            and self._settings.batch_size_schedule
            and bound
            and self._saved_bound > bound
        ):
            raise SettingError(
                "optimizer_in_bwd",
                True,
                f"the checkpoint's schedule may ask for {self._saved_bound} rows, of which {bound} fit here, and they cannot be "
                "split into micro-batches; go on with more memory, or start anew with optimizer_in_bwd=False",
            )

    def begin(self, progress: Progress) -> Progress:
        """Begin the first epoch of this run, or go on within it; find the constant batch that schedules count in."""
        progress = self.begin_epoch(progress)
        self._count_in()
        return progress

    def look_at(self, progress: Progress, *, batch_size: int) -> None:
        """Plan the epoch as :meth:`begin` does, with a batch size that is known, and do nothing."""
        self.batch_size = batch_size
        self.plan = self._plan(replace(progress, rows_per_epoch=len(self.stream)), self._rule())
        self._check_plan()
        self._count_in()

    def _check_plan(self) -> None:
        if self.plan.steps == 0 and self._settings.adaptive and self._settings.drop_last:
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
        scheduled = self._settings.batch_size_schedule is not None
        self.reference = self._constant(self._settings.batch_size if scheduled else self.first_batch_size)
        if self.reference.steps == 0:
            raise SettingError(
                "batch_size",
                self.batch_size,
                f"an epoch of {len(self.stream)} rows has no whole step; set drop_last=False",
            )

    def begin_epoch(self, progress: Progress) -> Progress:
        """Grow the batch where a growth function says so, and plan the epoch's steps; or go on within an epoch."""
        if progress.epoch_steps == 0:
            self._grow(progress.epoch)
        progress = replace(progress, rows_per_epoch=len(self.stream))
        self.plan = self._plan(progress, self._rule())
        self._check_plan()
        self._follow(progress)
        return progress

    def start_epoch(self, progress: Progress) -> None:
        """Hand out the rows of the epoch from where it stands; list those that no step has room for."""
        settings, epoch = self._settings, progress.epoch
        if not settings.batch_tokens:
            self.stream.start_epoch(epoch, position=progress.epoch_rows)
            return
        batches = self._batches(progress)
        self.stream.start_epoch(epoch, position=progress.epoch_rows, rows=batches.rows)
        left_out = {
            f"of more than batch_tokens={settings.batch_tokens}": batches.dropped.tolist(),
            "of the last step (drop_last)": batches[-1] if settings.drop_last else [],
        }
        for which, rows in left_out.items():
            if rows and not progress.epoch_steps:
                some = ", ".join(map(str, sorted(rows)[:10])) + (", ..." if len(rows) > 10 else "")
                message = f"epoch {epoch}: {len(rows)} rows {which} are dropped: {some}"
                self._record.decision("dropped", message, epoch=epoch, rows=sorted(rows))

    def next_step(self, progress: Progress) -> tuple[Progress, list[dict[str, Any]]]:
        """This rank's rows of the step that comes next; and progress with what was asked for.

        After the last step of the epoch the stream has taken none, for any rank.
        """
        if self._settings.batch_tokens:
            step = progress.epoch_steps
            size = self.plan.rows_of_step(step) if step < self.plan.steps else 0
            return replace(progress, batch=self._budget(progress)), self._take(size)
        asked = self._follow(progress) if self._goes_on(progress) else 0
        step_rows = asked * self._parts.ranks
        size = rows_of_next_step(progress, step_rows=step_rows, rows=len(self.stream), **self._ends)
        return replace(progress, batch=asked), self._take(size)

    def size_of_step(self, rows: Sequence[Mapping[str, Any]], *, in_tokens: bool) -> int:
        """What the step whose `rows` this rank holds has on all ranks: rows, or real tokens."""
        taken = self.stream.taken
        if not in_tokens:
            return len(taken)
        if distributed.data_parallel_size() == 1:
            return sum(map(self._parts.num_real_tokens, rows))
        return int(self._parts.real_lengths[taken].sum())

    def _take(self, size: int) -> list[dict[str, Any]]:
        """Deal the next rows to the ranks, and read this one's."""
        mine = self.deal(self.stream.next_numbers(size), self._parts.accumulator.capacity)
        return self.stream.take(size, only=mine)

    def deal(self, numbers: Sequence[int], capacity: MicroBatchLimit) -> Sequence[int]:
        """Which of a step's rows are this rank's: their positions among `numbers`.

        They are dealt by their tokens where micro-batches are made by tokens, and one after another as torch's sampler deals
        them where not.
        """
        ranks, rank, shapes = distributed.data_parallel_size(), distributed.data_parallel_rank(), self._parts.shapes
        if ranks == 1:
            return range(len(numbers))
        if capacity.unit == "tokens" or shapes.uniform is not None:
            lengths = self._parts.lengths[torch.as_tensor(numbers, dtype=torch.int64)]
            return balance_by_tokens(lengths, ranks, capacity, shapes)[rank]
        return balance_by_rows(len(numbers), ranks)[rank]

    def _goes_on(self, progress: Progress) -> bool:
        """Whether the epoch has room for a step of any size."""
        return rows_of_next_step(progress, step_rows=1, rows=len(self.stream), **self._ends) > 0

    def left_out(self, progress: Progress) -> dict[str, int]:
        """Rows of an epoch that is over which no step has used, by reason."""
        long_rows = len(self._batches(progress).dropped) if self._settings.batch_tokens else 0
        rest = len(self.stream) - progress.epoch_rows - long_rows
        most = self._ends["max_steps"]
        why = "drop_last" if self._ends["drop_last"] else "an error"  # which the audit does not let pass
        why = "max_steps_per_epoch" if most is not None and progress.epoch_steps >= most else why
        return {reason: rows for reason, rows in ((why, rest), ("long_rows", long_rows)) if rows}

    def _follow(self, progress: Progress) -> int:
        """Ask for the rows of the next step on one device, and let the capacity follow what changes."""
        rule = self._settings.batch_size_schedule
        if rule is None or self._settings.batch_tokens:
            self._parts.accumulator.capacity = self._capacity.of(self.batch_size)
            return self.batch_size * self._settings.gradient_accumulation_steps
        asked = ask(rule, progress, maximum=self.maximum)
        if asked.after != self.batch_size or not (progress.steps or self._said):
            # a ramp may change it with each step: what is near to what was said last goes into the record alone
            says = not 0.8 * self._said < asked.after < 1.25 * self._said
            self._said = asked.after if says else self._said
            self._record.decision(
                "batch_size",
                f"step {progress.steps}: {asked.describe(self.batch_size)}",
                says=says,
                step=progress.steps,
                before=self.batch_size,
                requested=asked.requested,
                after=asked.after,
            )
        self.batch_size = asked.after
        self._parts.accumulator.capacity = self._capacity.of(self.batch_size)
        return asked.after

    @property
    def maximum(self) -> int | None:
        """What a rule may not pass; None where it may grow freely, or where what fits is not known."""
        if self._settings.grow_beyond_maximum or self._capacity is None or self._capacity.bound is None:
            return None
        # a schedule goes on as it was on a smaller device, in more micro-batches
        return max(self._capacity.bound, self._saved_bound if self._settings.batch_size_schedule else 0)

    def _grow(self, epoch: int) -> None:
        """Ask the growth function for the rows to add."""
        function = self._settings.batch_increase_function
        if function is None or epoch >= self._settings.epochs:
            return
        growth = distributed.from_rank_zero(
            lambda: next_batch_size(function, epoch=epoch, batch_size=self.batch_size, maximum=self.maximum)
        )
        self._record.decision(
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
        rule, settings = self._settings.batch_size_schedule, self._settings
        if rule is None or settings.batch_tokens:
            rows = (batch_size or self.batch_size) * settings.gradient_accumulation_steps
            return lambda progress: rows
        return lambda progress: ask(rule, progress, maximum=self.maximum).after

    def _plan(self, progress: Progress, rule: Callable[[Progress], int]) -> EpochPlan:
        """The epoch at whose beginning, or within which, progress is."""
        settings = self._settings
        if settings.batch_tokens:
            batches = self._batches(progress)
            plan = EpochPlan.of_sizes(batches.sizes.tolist(), **self._ends)
            return replace(plan, tokens=self._tokens(batches.rows, plan))
        ranks, order = self._parts.ranks, None
        if settings.batch_size_schedule is None:
            plan = EpochPlan.of(len(self.stream), step_rows=rule(progress) * ranks, **self._ends)
            if progress.epoch_rows != progress.epoch_steps * plan.step_rows:  # it was another batch before a restart
                plan = self._mixed(progress, rule)
            if self._counts:
                order = self.stream.order(progress.epoch)
            return plan if order is None else replace(plan, tokens=self._tokens(order, plan))
        order = self.stream.order(progress.epoch)
        before = [0, *self._parts.real_lengths[order].cumsum(0).tolist()]
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
        options: dict[str, Any] = {"batch": rule, "ranks": self._parts.ranks, "rows": len(self.stream)}
        left = [size for _, size in walk(progress, tokens_before=tokens_before, **options, **self._ends)]
        return replace(EpochPlan.of_sizes(done + left), rows=len(self.stream), most_steps=self._ends["max_steps"])

    def _constant(self, batch_size: int) -> EpochPlan:
        """The first epoch, divided by a batch that does not change."""
        settings = self._settings
        if settings.batch_tokens:
            batches = self._parts.token_batches(self.stream.order(0))
            return EpochPlan.of_sizes(batches.sizes.tolist(), **self._ends)
        step_rows = batch_size * settings.gradient_accumulation_steps * self._parts.ranks
        return EpochPlan.of(len(self.stream), step_rows=step_rows, **self._ends)

    @property
    def _counts(self) -> bool:
        return self._settings.lr_clock.counts_tokens

    def _tokens(self, order: torch.Tensor, plan: EpochPlan) -> int:
        """Real tokens of the rows that are stepped, in their order."""
        if not (self._counts or self._settings.batch_tokens):
            return 0
        used = plan.slots if plan.sizes is None else sum(plan.sizes)
        lengths = self._parts.real_lengths[order[:used]]
        alike = len(lengths) > 0 and bool((lengths == lengths[0]).all())
        return plan.slots * int(lengths[0]) if alike else int(lengths.sum())

    # --- steps by tokens --------------------------------------------------------------------------------------------

    def _batches(self, progress: Progress) -> TokenBatchPlan:
        return self._token_batches(progress.at_epoch_start())[0]

    def _budget(self, progress: Progress) -> int:
        budgets = self._token_batches(progress.at_epoch_start())[1]
        return budgets[progress.epoch_steps] if progress.epoch_steps < len(budgets) else progress.batch

    def _plan_tokens(self, begin: Progress) -> tuple[TokenBatchPlan, list[int]]:
        """The rows of each step of an epoch, and the tokens that each was asked to hold."""
        settings, order = self._settings, self.stream.order(begin.epoch)
        rule = settings.batch_size_schedule
        if rule is None:
            assert settings.batch_tokens
            batches = self._parts.token_batches(order)
            return batches, [settings.batch_tokens] * len(batches)
        ranks = self._parts.ranks
        begin = replace(begin, batch=begin.batch * ranks)

        def ask_for(progress: Progress) -> int:  # for all ranks, while progress counts what is asked for on one
            return ask(rule, replace(progress, batch=progress.batch // ranks), maximum=None).after * ranks

        batches, budgets = plan_batches_by_rule(
            self._parts.lengths,
            ask_for,
            order=order,
            progress=begin,
            min_rows=settings.min_rows_per_batch * ranks,
            max_rows=settings.max_rows_per_batch and settings.max_rows_per_batch * ranks,
            long_rows=settings.long_rows,
            divisible=settings.uniform_micro_batches in ("rows", "both"),
        )
        asked, progress = budgets.tolist(), begin
        for number, rows in enumerate(batches.tolist()):
            if ask_for(progress) != asked[number]:
                raise GrowthFunctionError(
                    f"batch_size_schedule {rule!r} answered {asked[number] // ranks}, and something else when asked again: with "
                    "batch_tokens it must be a function of progress alone"
                )
            progress = replace(progress, batch=asked[number])
            progress = progress.after_step(rows=len(rows), tokens=int(self._parts.lengths[rows].sum()))
        return batches, [budget // ranks for budget in asked]

    # --- looking ahead ----------------------------------------------------------------------------------------------

    def ahead(
        self, progress: Progress, batch_sizes: Mapping[int, int]
    ) -> Iterator[tuple[Progress, list[int], EpochPlan]]:
        """Goes through what is left of training without training.

        Args:
            progress: where training is.
            batch_sizes: `batch_size` of each epoch to go through, as a growth function will make it.

        Returns:
            For each step: progress before it, the numbers of its rows, the plan of its epoch.
        """
        progress = replace(progress, rows_per_epoch=len(self.stream))
        for epoch, batch_size in batch_sizes.items():
            rule = self._rule(batch_size)
            plan = self._plan(progress, rule)
            order = self._batches(progress).rows if self._settings.batch_tokens else self.stream.order(epoch)
            before = [0, *self._parts.real_lengths[order].cumsum(0).tolist()]
            for at, size in self._walk(progress, rule, plan, before):
                begin = at.epoch_rows
                yield at, order[begin : begin + size].tolist(), plan
                progress = at.after_step(rows=size, tokens=before[begin + size] - before[begin])
            progress = progress.after_epoch()

    def _walk(
        self, progress: Progress, rule: Callable[[Progress], int], plan: EpochPlan, tokens_before: list[int]
    ) -> Iterator[tuple[Progress, int]]:
        """The rest of an epoch, step by step, as training will take it."""
        if not self._settings.batch_tokens:
            yield from walk(
                progress,
                batch=rule,
                ranks=self._parts.ranks,
                rows=len(self.stream),
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
        epochs_left = self._settings.epochs - progress.epoch - 1
        if self._settings.batch_tokens:
            stays = dict.fromkeys(range(progress.epoch, self._settings.epochs), self.batch_size)
            return sum(1 for _ in self.ahead(progress, stays))
        return self.plan.steps - progress.epoch_steps + epochs_left * self._constant(self.batch_size).steps

    def ask_ahead(self, progress: Progress) -> int:
        """Ask the rule once, for nothing, so that its mistakes show before weights load; returns its answer."""
        answer = 0
        settings = self._settings
        random_state = RandomState(self._parts.device)
        if settings.batch_increase_function and not progress.epoch_steps:
            answer = next_batch_size(
                settings.batch_increase_function, epoch=progress.epoch, batch_size=self.batch_size, maximum=None
            ).after
        if settings.batch_size_schedule:
            asked = ask(settings.batch_size_schedule, replace(progress, rows_per_epoch=len(self.stream)), maximum=None)
            answer = asked.after
        random_state.restore()
        return answer
