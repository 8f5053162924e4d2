"""How far training has come. Every rule reads it; nothing else keeps time."""

from __future__ import annotations

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
        batch_before_epoch, noise_scale_before_epoch: the same two where the current epoch began.
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
    batch_before_epoch: int = 0
    noise_scale_before_epoch: float | None = None

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
        return replace(
            self,
            epoch=self.epoch + 1,
            epoch_rows=0,
            epoch_steps=0,
            epoch_tokens=0,
            batch_before_epoch=self.batch,
            noise_scale_before_epoch=self.noise_scale,
        )

    def at_epoch_start(self) -> Progress:
        """Where the current epoch began."""
        return replace(
            self,
            batch=self.batch_before_epoch,
            noise_scale=self.noise_scale_before_epoch,
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
