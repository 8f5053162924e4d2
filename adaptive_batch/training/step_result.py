"""The result of a step on all ranks, the loss over full batches, and losses that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from adaptive_batch._util import count
from adaptive_batch.errors import NonfiniteLossError
from adaptive_batch.schedules import NoiseSample, Progress

PLACE_OF_STEP = ("step", "epoch", "position", "rows", "asked", "seconds")

# Consequence of a step that is not finite, by the value of `on_nonfinite_loss`.
_CONSEQUENCES = {
    "warn": "it is taken; see on_nonfinite_loss",
    "stop": "on_nonfinite_loss=stop ends training",
    "skip": "it is skipped: weights and optimizer do not change",
}
ON_NONFINITE_LOSS = tuple(_CONSEQUENCES)


class StepResult(NamedTuple):
    """Result of an optimizer step, over all ranks.

    Attributes:
        loss: mean loss over label tokens, or over rows if the loss counts rows; 0 without labels.
        num_labels: label tokens after the shift; rows if the loss counts rows; or the sum of the
            weights that `num_labels` returns. A scalar tensor if a number would wait for a device.
        rows: number of rows in the step.
        tokens: number of real tokens in the step, without padding.
        micro_batches: number of forward and backward passes on each rank.
        padding_fraction: fraction of padding in the tokens that ran.
        metrics: other means over the rows of the step, by name.
        grad_norm: norm of all gradients before clipping, a scalar tensor; None if not measured.
        noise: sample of the gradient's noise. None if not measured, or if the small batch has all
            rows, no labels or all labels.
        stop_requested: whether any rank was requested to stop before the step.
    """

    loss: float
    num_labels: float | torch.Tensor
    rows: int
    tokens: int
    micro_batches: int
    padding_fraction: float
    metrics: Mapping[str, float]
    grad_norm: torch.Tensor | None = None
    noise: NoiseSample | None = None
    stop_requested: bool = False

    def record(
        self,
        progress: Progress,
        *,
        numbers: Sequence[int],
        seconds: float,
        rates: Mapping[str, float],
        num_out_of_memory: int,
    ) -> dict[str, Any]:
        """Return the record of the step in a run log; waits for the norm. Keys that are not in
        :data:`PLACE_OF_STEP` are metrics. The loss of a step without a label is None.

        Args:
            progress: progress after the step.
            numbers: numbers of the step's rows.
            seconds: duration of the step.
            rates: learning rate of the step as ``lr``, and other scaled values.
            num_out_of_memory: out-of-memory errors so far.
        """
        record = {
            "step": progress.steps,
            "epoch": progress.epoch,
            "position": progress.epoch_rows,
            "rows": numbers,
            "asked": progress.batch,
            "seconds": round(seconds, 6),
            "loss": self.loss if self.micro_batches else None,
            **rates,
            "batch_size": self.rows,
            "micro_batches": self.micro_batches,
            "padding_fraction": self.padding_fraction,
            "samples_seen": progress.samples,
            "tokens_seen": progress.tokens,
            "oom_count": num_out_of_memory,
            **self.metrics,
        }
        if self.grad_norm is not None:
            record["grad_norm"] = float(self.grad_norm)
        return record

    @property
    def is_finite(self) -> bool:
        """True if the loss and the norm of the gradients, if measured, are finite; waits for the
        norm.
        """
        if not math.isfinite(self.loss):
            return False
        return self.grad_norm is None or math.isfinite(float(self.grad_norm))


class FullBatchLoss:
    """Averages the loss of one or several steps over the label tokens of a full batch.

    Steps are not divided: the step that completes a full batch belongs to it with all rows.

    Args:
        rows: rows of a full batch on all ranks.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._seen = 0
        self._loss_sum = 0.0
        self._label_tokens = 0.0

    def add(self, loss: float, *, label_tokens: float, rows: int) -> float | None:
        """Count a step.

        Args:
            loss: mean loss over the label tokens of the step.
            label_tokens: number of these tokens.
            rows: rows of the step on all ranks.

        Returns:
            The mean loss of the full batch if this step completes it and it has a label, else None.
            If the step alone is a full batch, its loss is returned to the bit.
        """
        if self._seen == 0 and rows >= self.rows:
            return loss if label_tokens else None
        self._seen += rows
        self._loss_sum += loss * label_tokens
        self._label_tokens += label_tokens
        if self._seen < self.rows:
            return None
        mean = self._loss_sum / self._label_tokens if self._label_tokens else None
        self._seen = 0
        self._loss_sum = 0.0
        self._label_tokens = 0.0
        return mean

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers."""
        return {
            "rows": self.rows,
            "seen": self._seen,
            "loss_sum": self._loss_sum,
            "label_tokens": self._label_tokens,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state, with its number of rows."""
        self.rows = state["rows"]
        self._seen = state["seen"]
        self._loss_sum = state["loss_sum"]
        self._label_tokens = state["label_tokens"]


def norm_to_clip(max_grad_norm: float | None, on_nonfinite_loss: str) -> float | None:
    """Return the norm to clip gradients to; infinity only measures it."""
    if max_grad_norm is None and on_nonfinite_loss != "warn":
        return math.inf
    return max_grad_norm


class NonfiniteSteps:
    """Checks each step for NaN and infinity before the optimizer takes it.

    Args:
        policy: ``warn`` checks the loss and takes the step. ``skip`` and ``stop`` also check the
            norm of the gradients, if measured, and clear the gradients; ``stop`` raises.
        drop_gradients: function that clears the gradients of a step.
        event: ``event(kind, message, **facts)`` logs each step that is not finite. Of several in a
            row, the first and every hundredth are printed.
        is_taken: whether the optimizer in backward has already taken the step.
        remedy: function that returns the end of the error of ``stop``.
    """

    def __init__(
        self,
        policy: str,
        drop_gradients: Callable[[], object],
        *,
        event: Callable[..., object],
        is_taken: bool = False,
        remedy: Callable[[], str] = lambda: "lower the learning rate, or skip such steps",
    ) -> None:
        self._policy = policy
        self._drop_gradients = drop_gradients
        self._event = event
        self._remedy = remedy
        self._is_taken = is_taken
        self._num_in_a_row = self._num_since_counted = 0
        # Loss and learning rate of the last finite step, for messages.
        self._last_finite = ""

    def drop_if_nonfinite(self, result: StepResult, progress: Progress, *, lr: float) -> bool:
        """Count a step, and clear its gradients if it is not finite, unless the policy is ``warn``.

        Args:
            result: result of the step, the same on all ranks.
            progress: progress before the step.
            lr: learning rate of the step.

        Returns:
            Whether the gradients were cleared, so that the step is not taken.

        Raises:
            NonfiniteLossError: the policy is ``stop``.
        """
        step = progress.steps + 1
        problem = self._problem(result)
        if problem is None:
            self._num_in_a_row = 0
            self._last_finite = f"; step {step} had loss {result.loss:.4g} and lr {lr:g}"
            return False
        self._num_in_a_row += 1
        self._num_since_counted += 1
        message = (
            f"step {step}: {problem}, lr {lr:g}{self._last_finite}; {_CONSEQUENCES[self._policy]}"
        )
        is_first_or_hundredth = self._num_in_a_row == 1 or self._num_in_a_row % 100 == 0
        self._event(
            "nonfinite_loss",
            message,
            # The error of "stop" is printed instead.
            prints=is_first_or_hundredth and self._policy != "stop",
            step=step,
            loss=result.loss,
            skipped=self._policy == "skip",
        )
        if self._policy == "warn":
            return False
        self._drop_gradients()
        if self._policy == "skip":
            return True
        if self._is_taken:
            message += "; the weights have been stepped by it"
        raise NonfiniteLossError(f"{message}; {self._remedy()}")

    def end_epoch(self, progress: Progress) -> None:
        """Log the number of steps of an epoch that were not finite.

        Args:
            progress: progress after the last step of the epoch.

        Raises:
            NonfiniteLossError: no step was finite, and all were skipped.
        """
        num_nonfinite = self._num_since_counted
        self._num_since_counted = 0
        if not num_nonfinite:
            return
        num_steps = progress.epoch_steps
        message = (
            f"{num_nonfinite} of {count(num_steps, 'step')} had a loss or gradients that are not"
            " finite"
        )
        self._event("nonfinite_steps", message, steps=num_nonfinite)
        if self._policy == "skip" and num_nonfinite == num_steps:
            raise NonfiniteLossError(
                f"epoch {progress.epoch}: the loss or the gradients of all {num_steps} steps are"
                " not finite, so nothing was trained; check the weights that it began with, the"
                " data and dtype"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers."""
        return {"since_counted": self._num_since_counted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state."""
        self._num_since_counted = state["since_counted"]

    def _problem(self, result: StepResult) -> str | None:
        """Return the value that is not finite, for the message; None if the step is finite."""
        if not math.isfinite(result.loss):
            return f"the loss is {result.loss}"
        if self._policy != "warn" and not result.is_finite:
            # The loss is finite, so the norm is not.
            return f"the norm of the gradients is {result.grad_norm}"
        return None
