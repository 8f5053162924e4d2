"""What the steps of an epoch came to, and the end of a run whose epoch has trained nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaptive_batch.data import StepPlanner
from adaptive_batch.errors import NonfiniteLossError, SettingError
from adaptive_batch.schedules import Progress
from adaptive_batch.training import NonfiniteSteps, StepResult

from .job import Job
from .log import TrainingLog


class EpochCounts:
    """Counts the steps of an epoch that had no label, or no finite loss.

    Args:
        job: what is trained.
        log: is told of each epoch's counts.
        nonfinite: counts the steps that were not finite.
    """

    def __init__(self, job: Job, log: TrainingLog, nonfinite: NonfiniteSteps) -> None:
        self._job = job
        self._log = log
        self._nonfinite = nonfinite
        self._num_unlabelled = 0

    def add(self, result: StepResult) -> None:
        """Count a step."""
        self._num_unlabelled += not result.micro_batches

    def end_epoch(self, progress: Progress, planner: StepPlanner) -> None:
        """Log what the epoch came to, and begin to count the next one.

        Raises:
            NonfiniteLossError: no step of the epoch was finite, and all were skipped.
            SettingError: no step of the epoch had a label.
        """
        num_steps = progress.epoch_steps
        if num_steps and self._num_unlabelled == num_steps:
            remedy = "no row of a whole epoch has a label; see its train_on_input and masks"
            raise SettingError("dataset", str(self._job.cfg.dataset), remedy)
        num_nonfinite = self._nonfinite.count()
        self._log.epoch_ends(
            progress, planner, unlabelled=self._num_unlabelled, nonfinite=num_nonfinite
        )
        self._num_unlabelled = 0
        skips = self._job.settings.on_nonfinite_loss == "skip"
        if skips and num_nonfinite == num_steps > 0:
            raise NonfiniteLossError(
                f"epoch {progress.epoch}: the loss or the gradients of all {num_nonfinite} steps"
                " are not finite, so nothing was trained; check the weights that it began with,"
                " the data and dtype"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain numbers."""
        return {"unlabelled": self._num_unlabelled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from a saved state."""
        self._num_unlabelled = state["unlabelled"]
