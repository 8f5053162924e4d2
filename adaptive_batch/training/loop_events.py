"""What an AdaptiveLoop tells the function that it was given for events."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from adaptive_batch import distributed
from adaptive_batch._util import count
from adaptive_batch.data import Event
from adaptive_batch.schedules import Progress

from .step_result import StepResult

log = logging.getLogger("adaptive_batch")


class LoopEvents:
    """Tells where training begins, each step with its rows, and each end of an epoch, as a
    :class:`adaptive_batch.report.RunLog` writes them down.

    Args:
        event: function that is told; None tells nobody.
        num_rows: rows of the dataset.
    """

    def __init__(self, event: Event | None, *, num_rows: int) -> None:
        self._event = event
        self._num_rows = num_rows
        self._has_begun = False

    def forget_beginning(self) -> None:
        """Tell where training begins before the next step: it goes on from another place."""
        self._has_begun = False

    def begins(self, progress: Progress) -> None:
        """Tell where training begins or resumes, before the first step there."""
        if self._has_begun or self._event is None:
            return
        self._has_begun = True
        begins = "resuming" if progress.steps else "starting"
        self._event(
            "start",
            f"{begins} with epoch {progress.epoch}, step {progress.steps};"
            f" {count(self._num_rows, 'row')}",
            resumed=bool(progress.steps),
            rows=self._num_rows,
            ranks=distributed.world_size(),
            progress=progress.state_dict(),
        )

    def step(
        self,
        result: StepResult,
        progress: Progress,
        *,
        numbers: Sequence[int],
        lr: float,
        seconds: float,
        num_out_of_memory: int,
    ) -> None:
        """Tell of a step of the rows that have these numbers, after which progress is as given."""
        if self._event is None:
            return
        metrics = {}
        if result.grad_norm is not None:
            metrics["grad_norm"] = float(result.grad_norm)
        self._event(
            "step",
            "",
            step=progress.steps,
            epoch=progress.epoch,
            position=progress.epoch_rows,
            rows=numbers,
            asked=progress.batch,
            seconds=round(seconds, 6),
            loss=result.loss,
            lr=lr,
            batch_size=result.rows,
            micro_batches=result.micro_batches,
            padding_fraction=result.padding_fraction,
            samples_seen=progress.samples,
            tokens_seen=progress.tokens,
            oom_count=num_out_of_memory,
            **metrics,
        )

    def epoch(self, progress: Progress, reasons: dict[str, int]) -> None:
        """Tell of an epoch that is over, and how many rows were left out for which reason."""
        if self._event is None:
            return
        left_out = "".join(f", {rows} left out by {reason}" for reason, rows in reasons.items())
        self._event(
            "epoch",
            f"epoch {progress.epoch}: {count(progress.epoch_rows, 'row')} trained{left_out}",
            epoch=progress.epoch,
            used=progress.epoch_rows,
            left_out=sum(reasons.values()),
            reasons=reasons,
        )


def log_event(
    event: Event | None, kind: str, message: str, *, prints: bool = True, **facts: Any
) -> None:
    """Log an event on rank zero, unless `prints` is False, and tell the function for events."""
    if prints and distributed.is_rank_zero():
        log.warning("%s", message)
    if event is not None:
        event(kind, message, prints=False, **facts)
