"""What the steps of a run came to, and the end of a run whose epoch has trained nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from adaptive_batch._util import count
from adaptive_batch.data import Batches, PlannedRows
from adaptive_batch.errors import NonfiniteLossError, SettingError
from adaptive_batch.schedules import NoiseScale
from adaptive_batch.training import FullBatchLoss, NonfiniteSteps, StepResult

from .job import Job
from .log import TrainingLog
from .settings import Settings
from .store import Saver
from .trainer import Trainer

_MUCH_PADDING = 0.3


def keys_against_padding(settings: Settings) -> str:
    """Return which key would remove padding; empty where none would."""
    if settings.uniform_micro_batches in ("lengths", "both"):
        return (
            f"uniform_micro_batches={settings.uniform_micro_batches} pads all of a step to one"
            " length"
        )
    # A step that must run whole cannot be divided by length.
    can_split = settings.uniform_micro_batches is None and not settings.optimizer_in_bwd
    if can_split and settings.micro_batch.micro_batch_tokens is None:
        instead = ", without micro_batch_size," if settings.micro_batch.is_given else ""
        return (
            f"micro_batch_tokens=auto{instead} groups the rows of a step by length, or packs them"
            " where they can be"
        )
    if settings.sample_order != "seqlen":
        return "sample_order=seqlen with a sample_window brings rows of like length into a step"
    if settings.pad_to_multiple_of > 1:
        return "a lower pad_to_multiple_of leaves less"
    return ""


@dataclass
class _EpochCounts:
    """Steps of an epoch without a label, and tokens that its steps ran, with padding and without.

    A checkpoint of an earlier version has no tokens.
    """

    unlabelled: int = 0
    tokens: int = 0
    padded_tokens: float = 0.0


class StepTally:
    """Tallies what steps measured: loss and gradients that are not finite, labels that are missing,
    padding, the noise of the gradients.

    Args:
        job: job of the run.
        trainer: trainer whose gradients are dropped where they are not finite.
        log: log of the run, which is given each epoch's counts.
        saver: saver of the run, which loads what a checkpoint holds of its parts.
        remedy: function that returns what can be done after a run is stopped.
        full_batch_rows: rows that `full_batch_loss` averages over.

    Attributes:
        full_batch_loss: loss over a fixed number of rows, however many a step has.
    """

    def __init__(
        self,
        job: Job,
        trainer: Trainer,
        log: TrainingLog,
        saver: Saver,
        *,
        remedy: Callable[[], str],
        full_batch_rows: int,
    ) -> None:
        settings = job.settings
        self._job = job
        self._settings = settings
        self._log = log
        nonfinite = NonfiniteSteps(
            settings.on_nonfinite_loss,
            trainer.engine,
            event=log.event,
            is_taken=settings.optimizer_in_bwd,
            remedy=remedy,
        )
        self._nonfinite = saver.add("nonfinite", nonfinite)
        self.full_batch_loss = saver.add("full_batch_loss", FullBatchLoss(full_batch_rows))
        self._noise_scale = saver.add("noise_scale", NoiseScale())
        self._epoch = _EpochCounts()
        saver.add("epoch", self)

    def measures_noise(self, step: PlannedRows) -> bool:
        """Return whether the noise of the gradients is sampled in a step."""
        return self._settings.measures_noise and self._noise_scale.is_due(step.progress.steps)

    def drops(self, step: PlannedRows, result: StepResult, *, lr: float) -> bool:
        """Return whether the gradients of a step are dropped, as they are not finite."""
        return self._nonfinite.drops(result, step.progress, lr=lr)

    def add(self, step: PlannedRows, result: StepResult) -> dict[str, float | None]:
        """Tally a step; return what progress keeps of it, by name."""
        num_rows = len(step.numbers)
        assert result.rows == num_rows, f"a step of {num_rows} rows trained {result.rows} of them"
        self._epoch.unlabelled += not result.micro_batches
        self._epoch.tokens += result.tokens
        if result.padding_fraction < 1:
            self._epoch.padded_tokens += result.tokens / (1 - result.padding_fraction)
        if not self._settings.measures_noise:
            return {}
        if result.noise is not None:
            self._noise_scale.update(result.noise)
        elif result.micro_batches == 1 and self._log.is_new("one micro-batch"):
            message = (
                f"step {step.progress.steps + 1} is one micro-batch, which shows no gradient noise:"
                " such steps do not count; a smaller micro_batch_size divides them"
            )
            self._log.event("noise_not_measured", message, step=step.progress.steps + 1)
        return {"noise_scale": self._noise_scale.value}

    def end_epoch(self, batches: Batches) -> None:
        """Log what the epoch came to, and begin to tally the next one.

        Raises:
            NonfiniteLossError: no step of the epoch was finite, and all were skipped.
            SettingError: no step of the epoch had a label.
        """
        progress = batches.progress
        num_steps = progress.epoch_steps
        if num_steps and self._epoch.unlabelled == num_steps:
            remedy = "no row of a whole epoch has a label; see its train_on_input and masks"
            raise SettingError("dataset", str(self._job.cfg.dataset), remedy)
        num_nonfinite = self._nonfinite.count()
        self._log_epoch(batches, num_nonfinite)
        self._epoch = _EpochCounts()
        skips = self._settings.on_nonfinite_loss == "skip"
        if skips and num_nonfinite == num_steps > 0:
            raise NonfiniteLossError(
                f"epoch {progress.epoch}: the loss or the gradients of all {num_nonfinite} steps"
                " are not finite, so nothing was trained; check the weights that it began with,"
                " the data and dtype"
            )

    def _log_epoch(self, batches: Batches, num_nonfinite: int) -> None:
        """Log the rows of an epoch that were trained and left out, and how many steps had no label
        or no finite loss.
        """
        event = self._log.event
        of_steps = f"of {count(batches.progress.epoch_steps, 'step')}"
        if self._epoch.unlabelled:
            message = (
                f"{self._epoch.unlabelled} {of_steps} had no label at all, and changed nothing"
            )
            event("no_labels", message, steps=self._epoch.unlabelled)
        if num_nonfinite:
            end = ", and were skipped" if self._settings.on_nonfinite_loss == "skip" else ""
            message = f"{num_nonfinite} {of_steps} had a loss or gradients that are not finite{end}"
            event("nonfinite_steps", message, steps=num_nonfinite)
        message, facts = batches.describe_epoch()
        event("epoch", f"{message}{self._padding_of_epoch()}", **facts)

    def _padding_of_epoch(self) -> str:
        """Return what part of the tokens that ran were padding, with the key that would remove it,
        where that is much.
        """
        share = 0.0
        if self._epoch.padded_tokens:
            share = 1 - self._epoch.tokens / self._epoch.padded_tokens
        key = keys_against_padding(self._settings)
        if share <= _MUCH_PADDING or not key:
            return ""
        padding = f"; {share:.0%} of the tokens that ran were padding"
        if not self._log.is_new(key):
            return padding
        return f"{padding}: {key}"

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain numbers."""
        return asdict(self._epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume counting from a saved state."""
        self._epoch = _EpochCounts(**state)
