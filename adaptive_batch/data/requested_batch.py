"""The batch that is requested for a step: as configured, as it is set, and as rules change it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from adaptive_batch import distributed
from adaptive_batch.schedules import (
    ClampedBatch,
    Progress,
    Schedule,
    next_batch_size,
    request_batch,
)

from .batching import Batching
from .layouts import MicroBatchLayout, MicroBatchLimit

# Called as event(kind, message, **facts).
Event = Callable[..., object]


class Sizer(Protocol):
    """What one micro-batch may hold, where so many rows run at once if they fit; and how its rows
    lie in it.

    `max_batch_size` is the most rows that were tried and fit; None where that is unknown.
    `waits_for_search` says whether what fits has to be found before anything can run.
    """

    max_batch_size: int | None
    layout: MicroBatchLayout

    @property
    def waits_for_search(self) -> bool: ...

    def limit(self, batch_size: int) -> MicroBatchLimit: ...


class NoSizer:
    """What fits where no step says so: a number of rows that rules may not pass, or anything.

    Args:
        maximum: that number; None for anything.
        batch_tokens: tokens of a step on one device; None where it holds rows.
    """

    waits_for_search = False

    def __init__(self, maximum: int | None = None, batch_tokens: int | None = None) -> None:
        self.max_batch_size = maximum
        self.layout = MicroBatchLayout()
        self._batch_tokens = batch_tokens

    def limit(self, batch_size: int) -> MicroBatchLimit:
        if self._batch_tokens is not None:
            # Rows are dealt to ranks by their tokens.
            return MicroBatchLimit(self._batch_tokens, "tokens")
        return MicroBatchLimit(batch_size)


class RequestedBatch:
    """The batch that is requested for a step on one device, and what no rule may pass.

    Args:
        batching: batching as configured.
        sizer: knows what fits; None where nothing limits it.
        asks_rank_zero: a schedule is called on rank zero for all; False calls it on each, which
            :meth:`Step.agree` compares.
        event: is given each change: its kind, a message, and facts by name.

    Attributes:
        batching: as configured; a schedule that follows the rate is put in coupled to it.
        sizer: as given, or one without a limit.
        batch_size: rows of a batch that is requested now, which run at once if they fit; a step
            accumulates `gradient_accumulation_steps` of them.
        first_batch_size: what it was when training began; None before.
        saved_maximum: the bound when the checkpoint was saved; a schedule keeps it on a smaller
            device.
    """

    def __init__(
        self,
        batching: Batching,
        sizer: Sizer | None = None,
        *,
        asks_rank_zero: bool = False,
        event: Event = lambda kind, message, **facts: None,
    ) -> None:
        self.batching = batching
        self.sizer = sizer or NoSizer()
        self._asks_rank_zero = asks_rank_zero
        self._event = event
        self.batch_size = batching.batch_size
        self.first_batch_size: int | None = None
        self.saved_maximum = 0
        # The last epoch at whose beginning the growth function was called.
        self._grown_in = -1
        # The batch of a schedule that was logged last.
        self._logged = 0

    @property
    def step_rows(self) -> int:
        """Rows of a step on one device, unless it is filled with tokens."""
        return self.rows_of_step(self.batch_size)

    def rows_of_step(self, batch_size: int) -> int:
        """Return the rows of a step on one device: those of a batch, accumulated."""
        return batch_size * self.batching.gradient_accumulation_steps

    def take(self, batch_size: int) -> None:
        """Take what a search has found, or the user has set."""
        self.batch_size = batch_size

    def begin(self, first_batch_size: int | None = None) -> None:
        """Let training begin, or resume, with the batch size as it is now.

        Args:
            first_batch_size: batch size that training began with; None for what is known of it.
        """
        self.first_batch_size = first_batch_size or self.first_batch_size or self.batch_size

    def maximum(self) -> int | None:
        """Return what a rule may not pass; None where it may grow freely, or the bound is not
        known.
        """
        max_batch_size = self.sizer.max_batch_size
        if self.batching.grow_beyond_maximum or max_batch_size is None:
            return None
        # On a smaller device a schedule continues as it was, in more micro-batches.
        if self.batching.batch_size_schedule:
            return max(max_batch_size, self.saved_maximum)
        return max_batch_size

    def forget_saved_maximum(self) -> None:
        """Let a schedule follow the maximum that is found here, not that of the checkpoint."""
        self.saved_maximum = 0

    # --- the rules: a growth function is called as an epoch begins, a schedule for each step

    def follow(self, schedule: Schedule) -> None:
        """Follow a schedule from now on that is coupled to the rate's."""
        self.batching = replace(self.batching, batch_size_schedule=schedule)

    def rule(self, batch_size: int) -> Callable[[Progress], int]:
        """Return the rows of a step on one device as a function of progress: the schedule's, or
        `batch_size` accumulated.
        """
        schedule = self.batching.batch_size_schedule
        if schedule is None or self.batching.batch_tokens:
            rows = self.rows_of_step(batch_size)
            return lambda progress: rows
        return lambda progress: request_batch(schedule, progress, maximum=self.maximum()).after

    def grows_at(self, progress: Progress) -> bool:
        """Return whether the growth function is called at this point: as an epoch begins, once."""
        return not progress.epoch_steps and progress.epoch > self._grown_in

    def request(self, progress: Progress) -> int:
        """Take the batch that the rules request for the step at a progress; return the step's rows
        on one device.
        """
        batching = self.batching
        is_over = batching.epochs is not None and progress.epoch >= batching.epochs
        if batching.batch_increase_function is not None and self.grows_at(progress) and not is_over:
            self._grow(batching.batch_increase_function, progress.epoch)
        if batching.batch_size_schedule is not None and not batching.batch_tokens:
            self._ask(batching.batch_size_schedule, progress)
        return self.step_rows

    def _grow(self, function: Callable[[int, int], int], epoch: int) -> None:
        size = self.batch_size
        batch = distributed.from_rank_zero(
            lambda: next_batch_size(function, epoch=epoch, batch_size=size, maximum=self.maximum())
        )
        self._grown_in = epoch
        self._change(batch, "epoch", epoch)

    def ahead(self, progress: Progress, epochs: int) -> dict[int, int]:
        """Return the batch size in each epoch that is left of so many, as the growth function
        answers now.
        """
        function = self.batching.batch_increase_function
        size = self.batch_size
        sizes = {}
        for epoch in range(progress.epoch, epochs):
            if function is not None and (epoch > progress.epoch or self.grows_at(progress)):
                size = next_batch_size(
                    function, epoch=epoch, batch_size=size, maximum=self.maximum()
                ).after
            sizes[epoch] = size
        return sizes

    def _ask(self, schedule: Schedule, progress: Progress) -> None:
        def request() -> ClampedBatch:
            return request_batch(schedule, progress, maximum=self.maximum())

        batch = distributed.from_rank_zero(request) if self._asks_rank_zero else request()
        if batch.after != self.batch_size or not (progress.steps or self._logged):
            # a ramp may change it with each step: what is near to what was printed last is written
            # to the run log only
            prints = not 0.8 * self._logged < batch.after < 1.25 * self._logged
            if prints:
                self._logged = batch.after
            self._change(batch, "step", progress.steps, prints=prints)

    def _change(self, batch: ClampedBatch, unit: str, at: int, *, prints: bool = True) -> None:
        previous = self.batch_size
        self.batch_size = batch.after
        facts = {unit: at, "before": previous, "requested": batch.requested, "after": batch.after}
        message = f"{unit} {at}: {batch.describe(previous)}"
        self._event("batch_size", message, prints=prints, **facts)

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {
            "batch_size": self.batch_size,
            "first_batch_size": self.first_batch_size,
            "grown_in": self._grown_in,
            "maximum": self.maximum(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; see also :meth:`begin_again`."""
        self.saved_maximum = state["maximum"] or 0
        self.batch_size = state["batch_size"]
        self.first_batch_size = state["first_batch_size"]
        self._grown_in = state["grown_in"]

    def begin_again(self) -> None:
        """Take the configured batch in place of a saved one; growth begins again."""
        self.batch_size = self.batching.batch_size
        self.first_batch_size = None
        self._grown_in = -1
