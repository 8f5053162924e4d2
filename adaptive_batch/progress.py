"""How far training has come. Every rule reads it; nothing else keeps time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Progress:
    """What training has consumed so far, over all ranks, and what a rule may want to know beside it.

    Attributes:
        epoch: epochs that are done.
        epoch_rows: rows of the current epoch that have been stepped.
        steps: optimizer steps.
        samples: rows.
        tokens: real tokens, padding not counted.
        epoch_steps: optimizer steps of the current epoch.
        epoch_tokens: real tokens of the current epoch.
        rows_per_epoch: rows that an epoch has; 0 where that is not known.
        batch: what the last step was asked to hold on one device, in rows or, by `batch_tokens`, in tokens; 0 before the first.
        noise_scale: the smoothed gradient noise scale, in rows; None where it is not measured or not known yet.
    """

    epoch: int = 0
    epoch_rows: int = 0
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    epoch_steps: int = 0
    epoch_tokens: int = 0
    rows_per_epoch: int = 0
    batch: int = 0
    noise_scale: float | None = None

    @property
    def epochs(self) -> float:
        """Epochs that are done, and the part of this one."""
        return self.epoch + (self.epoch_rows / self.rows_per_epoch if self.rows_per_epoch else 0.0)

    def after_step(self, *, rows: int, tokens: int) -> Progress:
        """After one optimizer step of that many rows and real tokens, over all ranks."""
        return replace(
            self,
            epoch_rows=self.epoch_rows + rows,
            steps=self.steps + 1,
            samples=self.samples + rows,
            tokens=self.tokens + tokens,
            epoch_steps=self.epoch_steps + 1,
            epoch_tokens=self.epoch_tokens + tokens,
        )

    def after_epoch(self) -> Progress:
        """At the start of the next epoch."""
        return replace(self, epoch=self.epoch + 1, epoch_rows=0, epoch_steps=0, epoch_tokens=0)

    def at_epoch_start(self) -> Progress:
        """Where the current epoch began, as far as what is counted goes."""
        return replace(
            self,
            epoch_rows=0,
            steps=self.steps - self.epoch_steps,
            samples=self.samples - self.epoch_rows,
            tokens=self.tokens - self.epoch_tokens,
            epoch_steps=0,
            epoch_tokens=0,
        )

    def state_dict(self) -> dict[str, Any]:
        """As plain numbers, which ``torch.load(weights_only=True)`` reads; ``Progress(**state)`` takes it back."""
        return asdict(self)


@dataclass(frozen=True)
class EpochPlan:
    """How an epoch divides into optimizer steps.

    Attributes:
        rows: rows that the epoch has, over all ranks.
        step_rows: rows of one full optimizer step, the global batch; where steps differ, their mean, rounded.
        steps: optimizer steps that the epoch has.
        sizes: rows of each step; None where all are `step_rows` but perhaps the last.
    """

    rows: int
    step_rows: int
    steps: int
    sizes: Sequence[int] | None = None

    @classmethod
    def of(cls, rows: int, *, step_rows: int, drop_last: bool, max_steps: int | None = None) -> EpochPlan:
        """Divide `rows` into steps; the last, short one is dropped or trained; `max_steps` cuts the epoch."""
        steps = rows // step_rows if drop_last else -(-rows // step_rows)
        return cls(rows, step_rows, steps if max_steps is None else min(steps, max_steps))

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], *, drop_last: bool, max_steps: int | None = None) -> EpochPlan:
        """Steps of given numbers of rows; the last one, which the end of the epoch cut, is dropped or trained."""
        kept = sizes[: len(sizes) - drop_last][:max_steps]
        return cls(sum(sizes), round(sum(kept) / max(1, len(kept))), len(kept), kept)

    def rows_of_step(self, step: int) -> int:
        """Rows of step number `step` of the epoch, counted from 0."""
        if self.sizes is not None:
            return self.sizes[step]
        return min(self.step_rows, self.rows - step * self.step_rows)

    @property
    def slots(self) -> int:
        """Rows that the epoch's steps have room for; a short last step counts in full where steps are of one size."""
        return self.steps * self.step_rows if self.sizes is None else sum(self.sizes)


def schedule_clock(progress: Progress, *, plan: EpochPlan, reference: EpochPlan) -> float:
    """The step that a constant batch would be at: epochs done plus the part of this one, in that batch's steps per epoch.

    Growing the batch then neither stretches nor cuts a schedule, and with a constant batch the clock is the number of
    optimizer steps, exactly.

    Args:
        progress: where training is.
        plan: the current epoch, divided by the current batch.
        reference: an epoch, divided by the batch that training began with.
    """
    return progress.epoch * reference.steps + progress.epoch_rows * reference.steps / plan.slots
