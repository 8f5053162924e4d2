"""The weighting of the recipes: gradients are sums of token losses, divided once by the number of
label tokens; or means over rows, each weighted by its share of the step's rows.

The order of operations is torchtune's, so that losses have its bits. FSDP takes the mean over
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatch, micro_batches
from adaptive_batch.distributed import local_part
from adaptive_batch.schedules import NoiseSample, squared_norm

from .agreement import MicroBatchPlan
from .oom_retry import OutOfMemoryElsewhereError
from .reference_pass import REFERENCE_VALUES
from .row_loss import Batch, Row, RowLoss
from .step import Step, Weighting
from .step_result import StepResult


class SmallBatch(NamedTuple):
    """The first micro-batch of each rank, of which the gradient's noise is sampled."""

    rows: Any
    label_tokens: Any
    # Squared norm of its gradients, summed over its label tokens.
    squared_norm: Any
    has_labels: bool


class SumThenDivide(Weighting[StepResult]):
    """The rows of a step: adds up what their micro-batches leave, and divides the gradients.

    Args:
        step: runs them.
        loss: their loss.
        rows: rows of this rank.
        global_rows: rows of all ranks; needed where the loss counts rows.
        scales_gradients: False with the optimizer in backward, whose only micro-batch is stepped as
            it comes.
        measures_noise: whether the noise is sampled, see :class:`SmallBatch`.
        clip: function that clips the gradients and returns the norm that they had.

    Attributes:
        reference_values: numbers of each row that a reference has computed, if it runs in
            micro-batches of its own: `[rows, numbers]`.
    """

    def __init__(
        self,
        step: Step,
        loss: RowLoss,
        rows: Sequence[Row],
        *,
        global_rows: int,
        scales_gradients: bool,
        measures_noise: bool,
        clip: Callable[[], torch.Tensor | None],
    ) -> None:
        self._step = step
        self._loss = loss
        self._rows = rows
        self.reference_values: torch.Tensor | None = None
        self._global_rows = global_rows
        self._scales_gradients = scales_gradients
        self._measures_noise = measures_noise
        self._clip = clip
        if not rows:
            self.idle = MicroBatch([0], loss.row_length(loss.some_row()))

    def divide(self) -> list[MicroBatch]:
        """Divide the rows within the limit."""
        lengths = list(map(self._loss.row_length, self._rows))
        sizer = self._step.sizer
        return micro_batches(lengths, sizer.limit_of_step, sizer.layout)

    def begin(self, plan: MicroBatchPlan) -> MicroBatchPlan:
        """Begin an attempt, whose sums are 0."""
        assert self._scales_gradients or plan.number == 1, (
            "with the optimizer in backward a step is one micro-batch"
        )
        sizer = self._step.sizer
        self.reduces_first = self._measures_noise and plan.number > 1
        # Elsewhere the first micro-batch is no random part of the step.
        assert not self.reduces_first or sizer.layout.keeps_order(sizer.limit_of_step)
        self._num_rows = len(self._rows)
        self._num_tokens = sum(map(self._loss.num_real_tokens, self._rows))
        self._run_tokens = 0
        self._num_labelled = 0
        # One rank adds to what lies on its device; several count on the host, where the other
        # counts are.
        device = self._step.memory.device if distributed.world_size() > 1 else None
        self._loss_sum = torch.zeros((), device=device)
        self._label_tokens = torch.zeros((), dtype=torch.int64)
        self._metrics = dict.fromkeys(self._loss.metrics, self._loss_sum)
        self._small: SmallBatch | None = None
        return plan

    # --- a micro-batch

    def run(self, micro_batch: MicroBatch | None, is_last: bool, /) -> None:
        """Run forward and backward of a micro-batch. On several ranks, run a dummy with weight 0 if
        there is none or it has no labels.
        """
        loss = self._loss
        layout = self._step.sizer.layout
        labels = None
        if micro_batch is not None:
            rows = [self._rows[number] for number in micro_batch.rows]
            with loss.collated(rows, layout, micro_batch.length) as batch:
                has_tokens = "tokens" in batch
                run_tokens = batch["tokens"].numel() if has_tokens else micro_batch.run_tokens
                self._run_tokens += run_tokens
                labels = loss.count_labels(batch)
                if labels:
                    if self.reference_values is not None:
                        batch[REFERENCE_VALUES] = self.reference_values[micro_batch.rows]
                    self._backward(batch, labels)
        if not labels and distributed.world_size() > 1:
            # The mean of no label would be 0/0, and 0 times that is no zero.
            with loss.collated([loss.some_row()], layout) as batch:
                if self.reference_values is not None:
                    batch[REFERENCE_VALUES] = torch.zeros(1, self.reference_values.shape[1])
                self._backward(batch, None)
        if self.reduces_first and is_last and self._small is None:
            self._small = self._small_batch()

    def _backward(self, batch: Batch, labels: torch.Tensor | None) -> None:
        """Add the gradients of a batch of so many labels; None for one of weight 0."""
        mean, count = self._loss.loss_and_labels(batch)
        together = distributed.world_size() > 1
        if self._loss.counts_rows:
            loss = mean * 0
            if labels is not None:
                # The mean is divided by how many such micro-batches the step has: a whole number,
                # and exact, where they are alike.
                num_such = self._global_rows / (distributed.world_size() * int(labels))
                loss = mean / num_such
                self._add(loss.detach(), labels, batch, weight=1 / num_such)
        else:
            loss = mean * (0 if labels is None else count)
            if labels is not None:
                self._add(loss.detach(), labels if together else count, batch, weight=count)
        # With the optimizer in backward each parameter is stepped as soon as its gradient is there,
        # so this, the only micro-batch of the step, is divided at once.
        if not self._scales_gradients:
            self._all_reduce()
            if not self._loss.counts_rows and not together:
                loss = mean
            elif not self._loss.counts_rows:
                # On no rank is there anything to step by.
                if not self._label_tokens:
                    return
                loss = loss * (distributed.world_size() / self._label_tokens)
        loss.backward()  # type: ignore[no-untyped-call]

    def _add(
        self,
        loss: torch.Tensor,
        labels: torch.Tensor,
        batch: Batch,
        *,
        weight: float | torch.Tensor,
    ) -> None:
        """Add a micro-batch that has labels, and the metrics that its loss left in the batch."""
        self._num_labelled += 1
        self._loss_sum = self._loss_sum + self._as_sum(loss)
        self._label_tokens = self._label_tokens + labels
        for name, total in self._metrics.items():
            self._metrics[name] = total + self._as_sum(weight * batch[name])

    def _as_sum(self, value: torch.Tensor) -> torch.Tensor:
        # All ranks send the dtype of one without labels.
        return value.to(self._loss_sum.dtype) if distributed.world_size() > 1 else value

    # --- the end of a step

    def end(self) -> StepResult:
        """Count the label tokens of all ranks, and divide the gradients by them."""
        if self._scales_gradients and self._all_reduce():
            raise OutOfMemoryElsewhereError
        ranks = distributed.world_size()
        has_labels = bool(self._label_tokens) if ranks > 1 else self._num_labelled > 0
        if has_labels and self._scales_gradients and not self._loss.counts_rows:
            scale = ranks / self._label_tokens
            for parameter in self._step.model.parameters():
                if parameter.grad is not None:
                    # It is on the host where parameters are offloaded.
                    parameter.grad *= scale.to(parameter.grad.device)
        elif not has_labels and ranks > 1:
            self._step.drop_gradients()
        noise = None
        if self._small is not None:
            noise = self._noise(self._small)
        # Before numbers are read, which waits for the device.
        grad_norm = self._clip()
        num_micro_batches = self._num_labelled
        if ranks > 1:
            num_micro_batches = self._step.plan.number if has_labels else 0
        loss, metrics = 0.0, dict.fromkeys(self._loss.metrics, 0.0)
        if has_labels:
            loss, metrics = self._means()
        copies = copies_of_each_row()
        return StepResult(
            loss=loss,
            num_labels=self._label_tokens // copies,
            rows=self._num_rows // copies,
            tokens=self._num_tokens // copies,
            micro_batches=num_micro_batches,
            padding_fraction=max(0.0, 1 - self._num_tokens / max(1, self._run_tokens)),
            metrics=metrics,
            grad_norm=grad_norm,
            noise=noise,
            ends=self._step.plan.ends,
        )

    def _all_reduce(self) -> bool:
        """Add up over the ranks, in two small collectives: counts as whole numbers, and the loss as
        it is, with the metrics. Return whether a rank ran out of memory.
        """
        failed = int(self._step.retry.has_failed)
        if distributed.world_size() == 1:
            return bool(failed)
        numbers = [self._num_rows, self._num_tokens, self._run_tokens, failed]
        counts = torch.cat([self._label_tokens[None], self._label_tokens.new_tensor(numbers)])
        counts = counts.to(self._loss_sum.device)
        means = torch.stack([self._loss_sum, *self._metrics.values()])
        distributed.all_reduce_sum(counts, means)
        self._loss_sum, *values = means
        self._metrics = dict(zip(self._metrics, values, strict=True))
        self._label_tokens = counts[0]
        self._num_rows, self._num_tokens, self._run_tokens, failed = counts[1:].tolist()
        return bool(failed)

    def _means(self) -> tuple[float, dict[str, float]]:
        """Return the loss and the metrics of a step that has labels, over all ranks."""
        sums = [self._loss_sum, *self._metrics.values()]
        if self._loss.counts_rows:
            mean_loss, *values = [value.item() / distributed.world_size() for value in sums]
        else:
            mean_loss, *values = [float(value.item() / self._label_tokens) for value in sums]
        metrics = dict(zip(self._metrics, values, strict=True))
        combined = self._loss.loss_of(
            **{name: torch.tensor(value) for name, value in metrics.items()}
        )
        return mean_loss if combined is None else float(combined), metrics

    # --- noise

    def _squared_norm(self) -> torch.Tensor:
        """Return the squared norm of what this rank holds of the gradients."""
        shards = [
            local_part(parameter.grad)
            for parameter in self._step.model.parameters()
            if parameter.grad is not None
        ]
        return squared_norm(shards) if shards else torch.zeros(())

    def _small_batch(self) -> SmallBatch:
        """Return the small batch, whose gradients are all that there are so far, and reduced."""
        squared = self._squared_norm()
        if self._loss.counts_rows:
            # As if losses had been summed.
            squared = squared * (self._global_rows / distributed.world_size()) ** 2
        num_rows = sum(len(first.rows) for first in self._step.plan.micro_batches[:1])
        return SmallBatch(num_rows, self._label_tokens, squared, self._num_labelled > 0)

    def _noise(self, small: SmallBatch) -> NoiseSample | None:
        """Return a sample of the noise, over all ranks; None where the small batch has none of the
        labels, or all of them.
        """
        rows, labels, squared, has_labels = small
        whole = self._squared_norm()
        ranks = distributed.world_size()
        # Counted in micro-batches, so that one rank waits for nothing on its device.
        is_part = has_labels and self._num_labelled > 1
        if ranks > 1:
            device = self._step.memory.device
            own_sums = [
                torch.as_tensor(value, dtype=torch.float64, device=device)
                for value in (rows, labels, squared, whole)
            ]
            total = torch.stack(own_sums)
            distributed.all_reduce_sum(total)
            rows, labels, squared, whole = total
            is_part = bool(0 < labels < self._label_tokens)
        if not is_part:
            return None
        ratio = labels / rows * self._num_rows / self._label_tokens
        return NoiseSample(rows, squared * (ranks / labels) ** 2, self._num_rows, whole, ratio)


def copies_of_each_row() -> int:
    """Return how many ranks run the same rows, as with tensor parallelism."""
    return distributed.world_size() // distributed.data_parallel_size()
