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
