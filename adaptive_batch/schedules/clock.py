"""The clock of a learning-rate schedule: how much of training is done, in steps of a constant
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from adaptive_batch.errors import SettingError

from .progress import Progress

UNITS = ("samples", "tokens", "steps")


@dataclass(frozen=True)
class Clock:
    """The units of a schedule's clock: until the scheduler's `num_warmup_steps` are over, and
    afterwards.
    """

    warmup: str = "samples"
    decay: str = "samples"

    @classmethod
    def from_config(cls, value: object) -> Clock:
        """Read the key `lr_clock`; raise SettingError for what is neither a unit nor a block of
        two.
        """
        if value is None:
            return cls()
        units: dict[str, Any] = {"warmup": value, "decay": value}
        if isinstance(value, Mapping):
            units = dict(value)
        units = {key: "samples" if unit is None else unit for key, unit in units.items()}
        if not units.keys() <= {"warmup", "decay"} or not all(
            unit in UNITS for unit in units.values()
        ):
            remedy = (
                f"give one of {', '.join(UNITS)}, or a block such as {{warmup: steps, decay:"
                " tokens}"
            )
            raise SettingError("lr_clock", value, remedy)
        return cls(**units)

    def __str__(self) -> str:
        if self.warmup == self.decay:
            return self.decay
        return f"warm-up in {self.warmup}, decay in {self.decay}"

    @property
    def counts_tokens(self) -> bool:
        """Whether the tokens of an epoch must be known."""
        return "tokens" in (self.warmup, self.decay)


class TrainingClock:
    """The clock of the learning rate's schedule: the step that training with a constant batch would
    have reached.

    By samples or tokens: the epochs that are done plus the part of this one, in the constant
    batch's steps per epoch. Growing the batch then neither stretches nor cuts a schedule. With a
    constant batch (by tokens: of steps with equally many) the clock is the number of optimizer
    steps, exactly. By steps it is that number whatever the batch.

    Args:
        clock: units.
        warmup_steps: steps of the scheduler's warm-up.
        total_steps: steps of the scheduler in all.
    """

    def __init__(
        self, clock: Clock | None = None, *, warmup_steps: int = 0, total_steps: int = 0
    ) -> None:
        self._clock = clock or Clock()
        self._warmup_steps = warmup_steps
        self._total_steps = total_steps
        self._warmup_ended_at: float | None = None

    def at(self, progress: Progress) -> float:
        """Return the time before a step: the warm-up's until that is over, then the rest of the
        decay spread over the rest of training.
        """
        decay = time_by(self._clock.decay, progress)
        if self._clock.warmup == self._clock.decay:
            return decay
        warmup = time_by(self._clock.warmup, progress)
        if warmup < self._warmup_steps:
            return warmup
        if self._warmup_ended_at is None:
            self._warmup_ended_at = decay
        ended_at = self._warmup_ended_at
        total = self._total_steps
        if ended_at >= total:
            return decay
        return self._warmup_steps + (decay - ended_at) * (total - self._warmup_steps) / (
            total - ended_at
        )

    def state_dict(self) -> dict[str, float | None]:
        """Return when the warm-up ended, by the unit of the decay."""
        return {"warmup_ended_at": self._warmup_ended_at}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Resume from a saved state."""
        self._warmup_ended_at = state["warmup_ended_at"]


def time_by(unit: str, progress: Progress) -> float:
    """Return how much of training is done, in steps of a constant batch.

    Args:
        unit: ``steps``, the steps that were really taken; ``samples`` or ``tokens``, by which the
            part of an epoch that is done is counted.
        progress: what training has consumed; but for steps with its pace.
    """
    if unit == "steps":
        return progress.steps
    assert progress.pace is not None, f"a clock of {unit} needs the pace of the epoch"
    reference = progress.pace.reference
    plan = progress.pace.plan
    epochs_done = progress.epoch * reference.steps
    if unit == "tokens":
        return epochs_done + progress.epoch_tokens * reference.steps / plan.tokens
    if not plan.is_estimate:
        slots = plan.slots
        # Where both train the same rows, time passes as in the constant batch, to the last bit.
        if plan.stepped_rows == reference.stepped_rows:
            slots = reference.slots
        return epochs_done + progress.epoch_rows * reference.steps / slots
    by_steps = 0.0
    if plan.most_steps:
        by_steps = progress.epoch_steps / plan.most_steps
    return epochs_done + max(progress.epoch_rows / plan.rows, by_steps) * reference.steps


def decay_of(schedule: Callable[[float], float]) -> Callable[[float], float]:
    """Return a schedule's value over its highest up to then: 1 as long as it rises."""
    # The highest value up to each whole time.
    peaks = [0.0]

    def decay(time: float) -> float:
        while len(peaks) < int(time) + 2:
            peaks.append(max(peaks[-1], schedule(len(peaks) - 1)))
        now = schedule(time)
        peak = max(peaks[int(time) + 1], now)
        return now / peak if peak > 0 else 1.0

    return decay
