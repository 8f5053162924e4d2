"""What the clock of a rate counts by: the current epoch, and one of a constant batch, each divided
into steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import Clock, EpochPlan, Pace, Progress, Seesaw, decay_of, time_by

from .epoch_planner import EpochPlanner
from .requested_batch import RequestedBatch


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

    def go_to(self, progress: Progress) -> None:
        """Take it that the current epoch is planned from a progress on."""
        self._at = progress
        self._plan = None

    def forget(self) -> None:
        """Divide both epochs again, as training resumes elsewhere."""
        self._plan = None
        self._reference = None

    def forget_reference(self) -> None:
        """Divide the constant epoch again: training begins with another batch."""
        self._reference = None

    @property
    def plan(self) -> EpochPlan:
        """The current epoch, divided into steps as its beginning shows it."""
        if self._plan is None:
            self._plan = self._epochs.divide(self._at, self._epochs.rule(self._batch.size))
        return self._plan

    @property
    def reference(self) -> EpochPlan:
        """An epoch of a constant batch, in whose steps the schedule of the learning rate counts."""
        if self._reference is None:
            # with a batch schedule, the configured batch is the one that the rate's schedule was
            # chosen for
            batching = self._epochs.batching
            scheduled = batching.batch_size_schedule is not None
            self._reference = self._epochs.constant(
                batching.batch_size if scheduled else self._batch.first or self._batch.size
            )
        return self._reference

    def pace(self, plan: EpochPlan | None = None) -> Pace:
        """Return what the clock of the rate counts by, in an epoch that is divided by a plan; None
        for the current one.

        A schedule of the batch that follows the rate, and a script that drops no row, count by the
        constant batch: that is as good, and known without dividing the epoch.
        """
        follows_rate = isinstance(self._epochs.batching.batch_size_schedule, Seesaw)
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
        batching = self._epochs.batching
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
