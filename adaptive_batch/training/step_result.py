"""What a step added up to, on all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from adaptive_batch.schedules import NoiseSample, Progress

PLACE_OF_STEP = ("step", "epoch", "position", "rows", "asked", "seconds")


class StepResult(NamedTuple):
    """What the micro-batches of one optimizer step added up to, on all ranks.

    Attributes:
        loss: mean loss of a label token, or of a row where the loss is a mean over rows; 0 where
            the step had none.
        num_labels: tokens that have a label, counted after the shift, or rows where the loss is a
            mean over rows, or the sum of their weights where `num_labels` returns it; a scalar
            tensor where that saves waiting for a device.
        rows: rows of the step.
        tokens: real tokens of the step, padding not counted.
        micro_batches: forward and backward passes that were run, by each rank.
        padding_fraction: share of the padded tokens that were padding.
        metrics: further means over the rows of the step, by name.
        grad_norm: norm of all gradients before they were clipped, where that is measured; a scalar
            tensor.
        noise: sample of the gradient's noise, where that is measured; None of a step whose rows
            were all in the small batch, or none of whose labels were on one side.
        ends: whether any rank was asked to end before the step.
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
    ends: bool = False

    @property
    def label_tokens(self) -> torch.Tensor:
        """The same number as a scalar tensor."""
        return torch.as_tensor(self.num_labels)

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
        :data:`PLACE_OF_STEP` are metrics.

        Args:
            progress: what training has consumed after the step.
            numbers: numbers of the step's rows.
            seconds: duration of the step.
            rates: learning rate of the step as ``lr``, and what else followed the batch.
            num_out_of_memory: out-of-memory errors so far.
        """
        record = {
            "step": progress.steps,
            "epoch": progress.epoch,
            "position": progress.epoch_rows,
            "rows": numbers,
            "asked": progress.batch,
            "seconds": round(seconds, 6),
            "loss": self.loss,
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
        """Whether the loss and, where it was measured, the norm of the gradients are numbers; waits
        for the norm.
        """
        return math.isfinite(self.loss) and (
            self.grad_norm is None or math.isfinite(float(self.grad_norm))
        )
