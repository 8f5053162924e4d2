"""What the micro-batches of a step add up to, on this rank and on all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from adaptive_batch import distributed
from adaptive_batch.schedules import NoiseSample

from .row_loss import Batch, RowLoss
from .step_result import StepResult


class SmallBatch(NamedTuple):
    """The small batch of a step's noise, on this rank."""

    rows: Any
    label_tokens: Any
    # Squared norm of the gradients, summed over its label tokens.
    squared_norm: Any
    # Micro-batches that have labels.
    micro_batches: int


class StepSums:
    """What the micro-batches of a step add up to: on this rank, and on all after
    :meth:`all_reduce_sum`.
    """

    def __init__(
        self,
        *,
        rows: int,
        tokens: int,
        device: torch.device,
        global_rows: int = 0,
        metrics: Sequence[str] = (),
    ) -> None:
        self.rows = rows
        # Of all ranks, where the loss counts rows.
        self.global_rows = global_rows
        self.tokens = tokens
        self.padded = 0
        self.failed = 0
        self.micro_batches = 0
        # On one rank they add to what lies on the device; several count on the host, where the
        # other counts are.
        self.loss = torch.zeros((), device=device if distributed.world_size() > 1 else None)
        self.label_tokens = torch.zeros((), dtype=torch.int64)
        self.metrics = dict.fromkeys(metrics, self.loss)
        self.small: SmallBatch | None = None

    def add(self, token_loss: torch.Tensor, label_tokens: torch.Tensor) -> None:
        """Add a micro-batch that has labels."""
        self.micro_batches += 1
        # The dtype is that of a rank without labels.
        if distributed.world_size() > 1:
            token_loss = token_loss.to(self.loss.dtype)
        self.loss = self.loss + token_loss
        self.label_tokens = self.label_tokens + label_tokens

    def add_metrics(self, batch: Batch, *, weight: float | torch.Tensor) -> None:
        """Add the metrics that the loss has left in a batch."""
        for name, total in self.metrics.items():
            value = weight * batch[name]
            # All ranks send one dtype.
            if distributed.world_size() > 1:
                value = value.to(total.dtype)
            self.metrics[name] = total + value

    def all_reduce_sum(self) -> None:
        """Add up over the ranks, in two small collectives: counts as whole numbers, and the loss as
        it is, with the metrics.
        """
        if distributed.world_size() == 1:
            return
        numbers = self.label_tokens.new_tensor([self.rows, self.tokens, self.padded, self.failed])
        counts = torch.cat([self.label_tokens[None], numbers]).to(self.loss.device)
        means = torch.stack([self.loss, *self.metrics.values()])
        distributed.all_reduce_sum(counts, means)
        self.loss, *values = means
        self.metrics = dict(zip(self.metrics, values, strict=True))
        self.label_tokens = counts[0]
        self.rows, self.tokens, self.padded, self.failed = counts[1:].tolist()

    @property
    def have_labels(self) -> bool:
        """Whether the step has labels to learn from, on all ranks once they have added up."""
        if distributed.world_size() > 1:
            return bool(self.label_tokens)
        return self.micro_batches > 0

    def result(
        self,
        loss: RowLoss,
        num_pieces: int,
        *,
        grad_norm: torch.Tensor | None,
        noise: NoiseSample | None,
    ) -> StepResult:
        """Return what a step has added up to, once ranks have.

        Args:
            loss: loss of its rows.
            num_pieces: micro-batches that each rank has run.
            grad_norm: norm of all gradients before they were clipped; None where it is not
                measured.
            noise: sample of the noise; None where it is not measured.
        """
        copies = copies_of_each_row()
        mean_loss = 0.0
        metrics = dict.fromkeys(loss.metrics, 0.0)
        has_labels = self.have_labels
        if has_labels:
            mean_loss, metrics = self._means(loss)
        micro_batches = self.micro_batches
        if distributed.world_size() > 1:
            micro_batches = num_pieces if has_labels else 0
        return StepResult(
            loss=mean_loss,
            num_labels=self.label_tokens // copies,
            rows=self.rows // copies,
            tokens=self.tokens // copies,
            micro_batches=micro_batches,
            padding_fraction=max(0.0, 1 - self.tokens / max(1, self.padded)),
            grad_norm=grad_norm,
            noise=noise,
            metrics=metrics,
        )

    def _means(self, loss: RowLoss) -> tuple[float, dict[str, float]]:
        """Return the loss and the metrics of a step that has labels, summed over all ranks."""
        of_all = {"loss": self.loss, **self.metrics}
        if loss.counts_rows:
            ranks = distributed.world_size()
            means = {name: value.item() / ranks for name, value in of_all.items()}
        else:
            means = {
                name: float(value.item() / self.label_tokens) for name, value in of_all.items()
            }
        mean_loss = means.pop("loss")
        metrics = {name: torch.tensor(value) for name, value in means.items()}
        combined = loss.loss_of(**metrics)
        return mean_loss if combined is None else float(combined), means

    def noise(self, squared_norm: torch.Tensor, *, device: torch.device) -> NoiseSample | None:
        """Return a sample of the noise, over all ranks; None where the small batch has none of the
        labels, or all of them.

        Args:
            squared_norm: squared norm of this rank's gradients, of the whole step.
            device: where ranks add up.
        """
        assert self.small is not None, "no small batch ran"
        rows, labels, squared, micro_batches = self.small
        whole = squared_norm
        ranks = distributed.world_size()
        # Counted in micro-batches, so that one rank waits for nothing on its device.
        is_part = 0 < micro_batches < self.micro_batches
        if ranks > 1:
            own_sums = [
                torch.as_tensor(value, dtype=torch.float64, device=device)
                for value in (rows, labels, squared, whole)
            ]
            total = torch.stack(own_sums)
            distributed.all_reduce_sum(total)
            rows, labels, squared, whole = total
            is_part = bool(0 < labels < self.label_tokens)
        if not is_part:
            return None
        ratio = labels / rows * self.rows / self.label_tokens
        return NoiseSample(rows, squared * (ranks / labels) ** 2, self.rows, whole, ratio)


def copies_of_each_row() -> int:
    """Return how many ranks run the same rows, as with tensor parallelism."""
    return distributed.world_size() // distributed.data_parallel_size()
