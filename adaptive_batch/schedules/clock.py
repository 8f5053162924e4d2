"""The time that a learning-rate schedule reads: how much of training is done, in steps of a constant batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from adaptive_batch.errors import SettingError

from .epoch_plan import EpochPlan
from .progress import Progress

UNITS = ("samples", "tokens", "steps")
_WHAT_WOULD_DO = f"give one of {', '.join(UNITS)}, or a block such as {{warmup: steps, decay: tokens}}"


@dataclass(frozen=True)
class Clock:
    """What a schedule's time counts.

    Attributes:
        warmup: until the scheduler's `num_warmup_steps` are over.
        decay: afterwards.
    """

    warmup: str = "samples"
    decay: str = "samples"

    @classmethod
    def from_config(cls, value: object) -> Clock:
        """Read the key `lr_clock`.

        Raises:
            SettingError: neither a unit nor a block of two.
        """
        if value is None:
            return cls()
        if isinstance(value, Mapping):
            for key in value:
                if key not in ("warmup", "decay"):
                    raise SettingError(
                        f"lr_clock.{key}", value[key], "there is no such key; there are warmup and decay"
                    )
            units = {key: value.get(key) or "samples" for key in ("warmup", "decay")}
        else:
            units = {"warmup": value, "decay": value}
        for unit in units.values():
            if unit not in UNITS:
                raise SettingError("lr_clock", value, _WHAT_WOULD_DO)
        return cls(**units)

    def __str__(self) -> str:
        return self.decay if self.warmup == self.decay else f"warm-up in {self.warmup}, decay in {self.decay}"

    @property
    def counts_tokens(self) -> bool:
        """Whether the tokens of an epoch must be known."""
        return "tokens" in (self.warmup, self.decay)


def schedule_clock(progress: Progress, *, plan: EpochPlan, reference: EpochPlan, unit: str = "samples") -> float:
    """The step that a constant batch would be at.

    By samples or tokens: the epochs that are done plus the part of this one, in the constant batch's steps per epoch.
    Growing the batch then neither stretches nor cuts a schedule. With a constant batch (by tokens: of steps with equally
    many) the clock is the number of optimizer steps, exactly. By steps it is that number whatever the batch.

    Args:
        progress: where training is.
        plan: the current epoch, divided by the current batch.
        reference: an epoch, divided by the batch that training began with.
        unit: ``samples``, ``tokens`` or ``steps``.
    """
    if unit == "steps":
        return progress.steps
    begin = progress.epoch * reference.steps
    if unit == "tokens":
        return begin + progress.epoch_tokens * reference.steps / plan.tokens
    if not plan.is_open:
        slots = reference.slots if plan.stepped_rows == reference.stepped_rows else plan.slots
        return begin + progress.epoch_rows * reference.steps / slots
    by_steps = progress.epoch_steps / plan.most_steps if plan.most_steps else 0.0
    return begin + max(progress.epoch_rows / plan.rows, by_steps) * reference.steps


def after_warmup(clock: float, *, ended_at: float, warmup: int, total: float) -> float:
    """The clock after a warm-up that was counted in another unit: what is left of the decay is spread over what is left.

    Args:
        clock: in the unit of the decay.
        ended_at: what it was when the warm-up was over.
        warmup: steps of warm-up, of the scheduler.
        total: where the schedule ends.
    """
    if ended_at >= total:
        return clock
    return warmup + (clock - ended_at) * (total - warmup) / (total - ended_at)


class TrainingClock:
    """The time that the schedule of the learning rate reads, as training goes on.

    Args:
        clock: what it counts.
        reference: an epoch, divided by the batch that training began with.
        warmup_steps: of the scheduler.
        total_steps: where the schedule ends.
    """

    def __init__(
        self, clock: Clock | None = None, *, reference: EpochPlan, warmup_steps: int = 0, total_steps: int = 0
    ) -> None:
        self._clock = clock or Clock()
        self._reference = reference
        self._warmup, self._total = warmup_steps, total_steps
        self._warmup_ended_at: float | None = None

    def decay(self, progress: Progress, plan: EpochPlan) -> float:
        """Return the time by the unit of the decay."""
        return schedule_clock(progress, plan=plan, reference=self._reference, unit=self._clock.decay)

    def at(self, progress: Progress, plan: EpochPlan) -> float:
        """Return the clock of the warm-up until that is over, then what the clock of the decay makes of it.

        Args:
            progress: before the step.
            plan: of the epoch.
        """
        decay = self.decay(progress, plan)
        if self._clock.warmup == self._clock.decay:
            return decay
        warmup = schedule_clock(progress, plan=plan, reference=self._reference, unit=self._clock.warmup)
        if warmup < self._warmup:
            return warmup
        if self._warmup_ended_at is None:
            self._warmup_ended_at = decay
        return after_warmup(decay, ended_at=self._warmup_ended_at, warmup=self._warmup, total=self._total)

    def state_dict(self) -> dict[str, float | None]:
        """Return when the warm-up ended, by the unit of the decay."""
        return {"warmup_ended_at": self._warmup_ended_at}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Resume from a saved state."""
        self._warmup_ended_at = state["warmup_ended_at"]
