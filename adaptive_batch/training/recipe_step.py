"""The step of the recipes, which sums token losses and divides the gradients once; validation and
the frozen reference of a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatch, MicroBatchLayout, MicroBatchLimit, micro_batches
from adaptive_batch.distributed import local_part
from adaptive_batch.schedules import NoiseSample, squared_norm

from .model_checks import evaluation_mode
from .packing import isolated_rows
from .sizing import MicroBatchSizer
from .step import DUMMY, Attempts, OutOfMemoryElsewhereError, RankReport, Step, Weighting
from .step_result import StepResult

Row = Any
Batch = dict[str, Any]


# Kind of micro-batch, which identifies its collectives.
REFERENCE = "reference"
# Key of a batch under which its loss finds the values of the reference.
REFERENCE_VALUES = "reference_values"
Result = TypeVar("Result")
# Minimum numbers of rows and of micro-batches that an evaluation reads at a time.
_ROWS_READ = 256
_MICRO_BATCHES_READ = 4


@dataclass(frozen=True)
class RowLoss:
    """Functions that make a batch of rows and compute its loss.

    Attributes:
        collate: ``collate(rows, length)`` makes one batch on the host, padded to `length` tokens.
        to_device: moves a batch to the device, in place.
        mean_loss: returns the loss of a batch on the device, averaged over its labels. It may empty
            the batch, and stores each of `metrics` in it.
        count_labels: returns the number of labels that `mean_loss` averages over, of a batch on the
            host or the device: an integer scalar tensor.
        row_length: returns the tokens of a row.
        num_real_tokens: returns the tokens of a row without padding.
        dummy_row: returns a row with labels, for a rank without rows; needed on several ranks.
        pack: ``pack(rows)`` makes one batch on the host without padding, and returns it with the
            number of tokens of each sequence; None if rows are always padded.
        counts_rows: whether `mean_loss` is a mean over rows, which `count_labels` counts. The share
            of a micro-batch is then known before its backward, and weights its loss.
        metrics: names of further means, over rows or labels as the loss.
        loss_of: computes the loss of a step from the means of `metrics`, in float32. It returns
            None if the loss is the mean of `mean_loss`, which rounds differently.
        after_forward: callback before each backward. An accelerator runs backward without Python,
            so that Python work costs least there.
    """

    collate: Callable[[Sequence[Row], int], Batch]
    to_device: Callable[[Batch], object]
    mean_loss: Callable[[Batch], torch.Tensor]
    count_labels: Callable[[Batch], torch.Tensor]
    row_length: Callable[[Row], int]
    num_real_tokens: Callable[[Row], int]
    dummy_row: Callable[[], Row] | None = None
    pack: Callable[[Sequence[Row]], tuple[Batch, list[int]]] | None = None
    counts_rows: bool = False
    metrics: tuple[str, ...] = ()
    loss_of: Callable[..., torch.Tensor | None] = lambda **metrics: None
    after_forward: Callable[[], object] = lambda: None

    @contextmanager
    def collated(
        self, rows: Sequence[Row], layout: MicroBatchLayout, length: int = 0
    ) -> Iterator[Batch]:
        """Make one batch on the host in a layout, padded to at least `length` tokens a row. Packed
        sequences are isolated inside the context.
        """
        if layout.pads or self.pack is None:
            longest = max(map(self.row_length, rows))
            yield self.collate(rows, length or layout.padded(longest))
            return
        batch, lengths = self.pack(rows)
        with isolated_rows(lengths):
            yield batch

    def loss_and_labels(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Move a batch to the device; return its mean loss and its number of labels."""
        self.to_device(batch)
        count = self.count_labels(batch)
        mean = self.mean_loss(batch)
        self.after_forward()
        return mean, count

    def some_row(self) -> Row:
        """Return a row with labels, for a rank without rows."""
        assert self.dummy_row is not None, "several ranks need a dummy row"
        return self.dummy_row()


def count_shifted_labels(batch: Batch, ignore_index: int) -> torch.Tensor:
    """Count the label tokens of a batch after the shift by one."""
    count: torch.Tensor = (batch["labels"][..., 1:] != ignore_index).sum()
    return count


class SmallBatch(NamedTuple):
    """The first micro-batch of each rank, as a sample of the gradient's noise."""

    rows: Any
    label_tokens: Any
    # Squared norm of the gradients of its summed loss.
    squared_norm: Any


class SumThenDivide(Weighting[StepResult]):
    """Sums the losses and gradients of the micro-batches of a step, and divides the gradients.

    Args:
        step: runs them.
        rows: rows of this rank.
        global_rows: rows of all ranks; needed where the loss counts rows.
        reference_values: values of each row from a :class:`RowReference`: `[rows, num_values]`;
            None without one.
        measures_noise: whether the noise is sampled, see :class:`SmallBatch`.
    """

    def __init__(
        self,
        step: RecipeStep,
        rows: Sequence[Row],
        *,
        global_rows: int,
        reference_values: torch.Tensor | None,
        measures_noise: bool,
    ) -> None:
        self._step = step
        self._loss = step.loss
        self._rows = rows
        self._reference_values = reference_values
        self._global_rows = global_rows
        self._measures_noise = measures_noise

    def divide(self, limit: MicroBatchLimit) -> list[MicroBatch]:
        """Divide the rows within a limit."""
        lengths = list(map(self._loss.row_length, self._rows))
        return micro_batches(lengths, limit, self._step.sizer.layout)

    def begin(self) -> None:
        """Begin an attempt with sums of 0."""
        is_split = self._step.num_micro_batches > 1
        assert self._step.scales_gradients or not is_split, (
            "with the optimizer in backward a step is one micro-batch"
        )
        sizer = self._step.sizer
        self.reduces_first = self._measures_noise and is_split
        # Otherwise the first micro-batch is not a random part of the step.
        assert not self.reduces_first or sizer.layout.keeps_order(sizer.limit())
        self._num_rows = len(self._rows)
        self._num_tokens = sum(map(self._loss.num_real_tokens, self._rows))
        self._run_tokens = 0
        self._num_labelled = 0
        # A single rank starts on the host and adds sums of its device without waiting for it.
        # Several ranks send the loss from the device.
        device = self._step.memory.device if distributed.world_size() > 1 else None
        self._loss_sum = torch.zeros((), device=device)
        self._label_tokens = torch.zeros((), dtype=torch.int64)
        self._metrics = dict.fromkeys(self._loss.metrics, self._loss_sum)
        self._small_batch: SmallBatch | None = None

    # --- a micro-batch

    def run(self, micro_batch: MicroBatch | None, is_last: bool, /) -> None:
        """Run forward and backward of a micro-batch. On several ranks, a missing micro-batch or one
        without labels is replaced by a dummy of weight 0.
        """
        row_loss = self._loss
        layout = self._step.sizer.layout
        num_labels = None
        if micro_batch is not None:
            rows = [self._rows[number] for number in micro_batch.rows]
            with row_loss.collated(rows, layout, micro_batch.length) as batch:
                has_tokens = "tokens" in batch
                run_tokens = batch["tokens"].numel() if has_tokens else micro_batch.run_tokens
                self._run_tokens += run_tokens
                num_labels = row_loss.count_labels(batch)
                if num_labels:
                    if self._reference_values is not None:
                        batch[REFERENCE_VALUES] = self._reference_values[micro_batch.rows]
                    self._backward(batch, num_labels)
        if not num_labels and distributed.world_size() > 1:
            # The dummy needs labels: the mean over no labels is NaN, and so is 0 times NaN.
            with row_loss.collated([row_loss.some_row()], layout) as batch:
                if self._reference_values is not None:
                    batch[REFERENCE_VALUES] = torch.zeros(1, self._reference_values.shape[1])
                self._backward(batch, None)
        if self.reduces_first and is_last and self._small_batch is None:
            self._small_batch = self._measure_small_batch()

    def _backward(self, batch: Batch, num_labels: torch.Tensor | None) -> None:
        """Run forward and backward of a batch.

        Args:
            batch: batch on the host.
            num_labels: number of its labels on the host; None for a dummy of weight 0.
        """
        mean, num_labels_on_device = self._loss.loss_and_labels(batch)
        ranks = distributed.world_size()
        if num_labels is None:
            loss = mean * 0
        elif self._loss.counts_rows:
            # Dividing by the number of such micro-batches in the step is exact if all of them have
            # the same number of rows.
            num_equal_parts = self._global_rows / (ranks * int(num_labels))
            loss = mean / num_equal_parts
            self._add(loss.detach(), num_labels, batch, weight=1 / num_equal_parts)
        else:
            loss = mean * num_labels_on_device
            # A single rank adds counts on its device, without waiting for it.
            counted = num_labels if ranks > 1 else num_labels_on_device
            self._add(loss.detach(), counted, batch, weight=num_labels_on_device)
        # The optimizer in backward steps each parameter as soon as its gradient is computed, so the
        # loss of this, the only micro-batch, is divided before backward.
        if not self._step.scales_gradients:
            self._sum_over_ranks()
            if not self._loss.counts_rows:
                if ranks == 1:
                    loss = mean
                elif self._label_tokens:
                    loss = loss * (ranks / self._label_tokens)
                else:
                    # No rank has labels: skip the backward, which would step the parameters.
                    return
        loss.backward()  # type: ignore[no-untyped-call]

    def _add(
        self,
        loss: torch.Tensor,
        labels: torch.Tensor,
        batch: Batch,
        *,
        weight: float | torch.Tensor,
    ) -> None:
        """Add the loss and labels of a micro-batch to the sums, and the metrics that its loss has
        stored in the batch.
        """
        self._num_labelled += 1
        self._loss_sum = self._loss_sum + self._as_sum(loss)
        self._label_tokens = self._label_tokens + labels
        for name, total in self._metrics.items():
            self._metrics[name] = total + self._as_sum(weight * batch[name])

    def _as_sum(self, value: torch.Tensor) -> torch.Tensor:
        # Ranks send sums of one dtype: that of the 0 with which a rank without labels begins.
        return value.to(self._loss_sum.dtype) if distributed.world_size() > 1 else value

    # --- the end of a step

    def end(self) -> StepResult:
        """Sum the label tokens over ranks, and divide the gradients by them."""
        if self._step.scales_gradients and self._sum_over_ranks():
            raise OutOfMemoryElsewhereError
        ranks = distributed.world_size()
        has_labels = bool(self._label_tokens) if ranks > 1 else self._num_labelled > 0
        if has_labels and self._step.scales_gradients and not self._loss.counts_rows:
            scale = ranks / self._label_tokens
            for parameter in self._step.model.parameters():
                if parameter.grad is not None:
                    # Gradients of offloaded parameters are on the host.
                    parameter.grad *= scale.to(parameter.grad.device)
        elif not has_labels and ranks > 1:
            self._step.drop_gradients()
        noise = None
        if self._small_batch is not None:
            noise = self._noise(self._small_batch)
        # Everything is queued on the device now. The code below waits for it by reading numbers.
        grad_norm = self._step.clip()
        num_micro_batches = self._num_labelled
        if ranks > 1:
            num_micro_batches = self._step.num_micro_batches if has_labels else 0
        loss, metrics = 0.0, dict.fromkeys(self._loss.metrics, 0.0)
        if has_labels:
            loss, metrics = self._means()
        # With tensor parallelism several ranks run the same rows, which the sums count repeatedly.
        copies = ranks // distributed.data_parallel_size()
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
            stop_requested=self._step.stop_requested,
        )

    def _sum_over_ranks(self) -> bool:
        """Sum counts, loss and metrics over ranks in two small collectives; return whether a rank
        ran out of memory.
        """
        has_failed = self._step.attempts.error is not None
        if distributed.world_size() == 1:
            return has_failed
        numbers = [self._num_rows, self._num_tokens, self._run_tokens, int(has_failed)]
        counts = torch.cat([self._label_tokens[None], self._label_tokens.new_tensor(numbers)])
        counts = counts.to(self._loss_sum.device)
        sums = torch.stack([self._loss_sum, *self._metrics.values()])
        distributed.all_reduce_sum(counts, sums)
        self._loss_sum, *metrics = sums
        self._metrics = dict(zip(self._metrics, metrics, strict=True))
        # The label tokens stay on the device, as reading them would wait for it.
        self._label_tokens = counts[0]
        self._num_rows, self._num_tokens, self._run_tokens, num_failed = counts[1:].tolist()
        return bool(num_failed)

    def _means(self) -> tuple[float, dict[str, float]]:
        """Return the mean loss and the metrics of a step with labels, over all ranks."""
        divisor: Any = self._label_tokens
        if self._loss.counts_rows:
            # _backward() weights micro-batches so that their weights add up to the ranks.
            divisor = distributed.world_size()
        loss = float(self._loss_sum.item() / divisor)
        metrics = {name: float(total.item() / divisor) for name, total in self._metrics.items()}
        tensors = {name: torch.tensor(value) for name, value in metrics.items()}
        loss_from_metrics = self._loss.loss_of(**tensors)
        if loss_from_metrics is not None:
            loss = float(loss_from_metrics)
        return loss, metrics

    # --- noise

    def _squared_norm(self) -> torch.Tensor:
        """Return the squared norm of this rank's part of the gradients."""
        shards = [
            local_part(parameter.grad)
            for parameter in self._step.model.parameters()
            if parameter.grad is not None
        ]
        return squared_norm(shards) if shards else torch.zeros(())

    def _measure_small_batch(self) -> SmallBatch:
        """Return the first micro-batch of each rank, whose reduced gradients are the only ones so
        far.
        """
        squared = self._squared_norm()
        if self._loss.counts_rows:
            # Convert to the gradients of a summed loss.
            squared = squared * (self._global_rows / distributed.world_size()) ** 2
        num_rows = 0
        if self._step.micro_batches:
            num_rows = len(self._step.micro_batches[0].rows)
        return SmallBatch(num_rows, self._label_tokens, squared)

    def _noise(self, small: SmallBatch) -> NoiseSample | None:
        """Return a sample of the noise over all ranks; None if the small batch has no labels, or
        all of them.
        """
        ranks = distributed.world_size()
        own: Any = (small.rows, small.label_tokens, small.squared_norm, self._squared_norm())
        # Some devices have no float64. Several ranks send the sums from the device.
        device = self._step.memory.device if ranks > 1 else None
        sums = torch.tensor(list(map(float, own)), dtype=torch.float64, device=device)
        distributed.all_reduce_sum(sums)
        rows, label_tokens, squared_of_small, squared_of_step = sums.tolist()
        if not 0 < label_tokens < self._label_tokens:
            return None
        label_ratio = label_tokens / rows * self._num_rows / self._label_tokens
        # The gradients of a summed loss become those of the mean as in end().
        squared_of_mean = squared_of_small * (ranks / label_tokens) ** 2
        return NoiseSample(rows, squared_of_mean, self._num_rows, squared_of_step, label_ratio)


@dataclass(frozen=True)
class RowReference:
    """Values of each row that a loss needs from a frozen reference.

    Attributes:
        values: function that returns the values of a batch on the device: `[rows, num_values]`. It
            may empty the batch.
        num_values: number of values of each row.
        sizer: limits a micro-batch of the reference. More rows fit than in training, since there
            are no gradients.
    """

    values: Callable[[dict[str, Any]], torch.Tensor]
    num_values: int
    sizer: MicroBatchSizer

    def zeros(self, num_rows: int) -> torch.Tensor:
        """Return values on the host for rows of weight 0."""
        return torch.zeros(num_rows, self.num_values)


class RecipeStep(Step):
    """Runs forward and backward of the rows of a step, in micro-batches within the sizer's limit.

    Args:
        model: model whose gradients are summed; they must be clear when :meth:`run` begins.
        loss: loss of its rows.
        sizer: limits a micro-batch.
        scale_gradients: whether gradients are divided after the last micro-batch. False with the
            optimizer in backward, which steps during the backward of the only micro-batch.
        measures_noise: whether steps may sample the gradient's noise.
        reference: frozen reference with its own micro-batches; None if the loss runs its reference
            or needs none.
        options: other arguments of :class:`Step`.

    Attributes:
        loss, reference: as given.
        scales_gradients: as `scale_gradients`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: RowLoss,
        sizer: MicroBatchSizer,
        *,
        scale_gradients: bool = True,
        measures_noise: bool = False,
        reference: RowReference | None = None,
        **options: Any,
    ) -> None:
        assert scale_gradients or not measures_noise, (
            "there are no gradients to measure with the optimizer in backward"
        )
        super().__init__(model, sizer, **options)
        self.loss = loss
        self.scales_gradients = scale_gradients
        self._measures_noise = measures_noise
        self.reference = reference

    def run(
        self,
        rows: Sequence[Row],
        report: RankReport,
        *,
        measures_noise: bool = False,
    ) -> StepResult:
        """Compute and clip the gradients of the mean loss over all label tokens, or over all rows
        if the loss counts rows. A collective.

        Args:
            rows: rows of this rank; empty if only other ranks have rows.
            report: report of this rank to the others. If the recipe accumulates batches, its batch
                size is the rows of one batch.
            measures_noise: whether the noise is sampled with the first micro-batch of each rank.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            GrowthFunctionError: ranks have different batches.
            RankLostError: this rank ran out of memory and cannot notify the others.
        """
        assert not measures_noise or self._measures_noise
        # The losses of rows are divided by their number.
        assert report.num_rows or not self.loss.counts_rows
        reference_values = None
        if self.reference is not None:
            reference_values = self._run_reference(self.reference, rows)
        weighting = SumThenDivide(
            self,
            rows,
            global_rows=report.num_rows,
            reference_values=reference_values,
            measures_noise=measures_noise,
        )
        return self.run_step(weighting, report)

    # --- without gradients

    def evaluate(self, rows: Iterable[Row], *, loss: RowLoss, sizer: MicroBatchSizer) -> float:
        """Return the mean loss over the label tokens of the `rows` of all ranks; NaN without any.

        Several ranks evaluate their own rows, in the same number of micro-batches.

        Args:
            rows: rows of this rank.
            loss: makes the batches; the loss of training computes their means.
            sizer: limits a micro-batch.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            RankLostError: this rank ran out of memory and cannot notify the others.
        """
        layout = self.sizer.layout
        attempts = Attempts(sizer, self.memory)
        loss_sum = 0.0
        label_tokens = 0

        def sum_losses(rows: Sequence[Row], length: int) -> tuple[float, int]:
            """Return the sum of the token losses of a micro-batch, and its label tokens."""
            with loss.collated(rows, layout, length) as batch:
                # On several ranks, others wait for the collectives of this micro-batch.
                if distributed.world_size() == 1 and not self.loss.count_labels(batch):
                    return 0.0, 0
                mean, num_labels = self.loss.loss_and_labels(batch)
                if not num_labels:
                    return 0.0, 0
                return (mean * num_labels).item(), int(num_labels)

        sizer.retry_if_due()
        with evaluation_mode(self.model):
            unread = iter(rows)
            chunk = _read(unread, loss, sizer.limit())
            while distributed.any_of_ranks(bool(chunk)):
                results = self.evaluate_rows(
                    chunk,
                    sum_losses,
                    attempts=attempts,
                    loss=loss,
                    kind="padded" if loss.pack is None else layout.kind,
                    doing="in validation",
                )
                # Sum each chunk first: one running sum would round differently.
                loss_sum += sum(loss for _, (loss, _) in results)
                label_tokens += sum(labels for _, (_, labels) in results)
                chunk = _read(unread, loss, sizer.limit())
        by_rank = distributed.all_gather((loss_sum, label_tokens))
        total_loss = sum(loss for loss, _ in by_rank)
        total_labels = sum(labels for _, labels in by_rank)
        return total_loss / total_labels if total_labels else float("nan")

    def _run_reference(self, reference: RowReference, rows: Sequence[Row]) -> torch.Tensor:
        """Run the reference on all rows of a step before the first micro-batch is trained, and
        return the values of each row on the device: `[rows, num_values]`. A collective.

        Random numbers and persistent buffers are restored afterwards.

        Args:
            reference: values to compute.
            rows: rows of this rank; empty if only other ranks have rows.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            RankLostError: this rank ran out of memory and cannot notify the others.
        """
        reference.sizer.retry_if_due()
        restore = self.snapshot()
        results = self.evaluate_rows(
            rows,
            self._reference_values,
            attempts=Attempts(reference.sizer, self.memory),
            loss=self.loss,
            kind=reference.sizer.layout.kind,
            doing="in the reference",
            evaluates=REFERENCE,
            undo=restore,
        )
        restore()
        if not results:
            return reference.zeros(0)
        # Micro-batches may have the rows in another order than the step.
        in_micro_batches = torch.cat([values for _, values in results])
        numbers = [number for micro_batch, _ in results for number in micro_batch.rows]
        in_order = torch.empty_like(in_micro_batches)
        in_order[numbers] = in_micro_batches
        return in_order

    def _reference_values(self, rows: Sequence[Row], length: int) -> torch.Tensor:
        assert self.reference is not None
        batch = self.loss.collate(rows, length)
        self.loss.to_device(batch)
        return self.reference.values(batch)

    def evaluate_rows(
        self,
        rows: Sequence[Row],
        forward: Callable[[Sequence[Row], int], Result],
        *,
        attempts: Attempts,
        loss: RowLoss,
        kind: str,
        doing: str,
        evaluates: bool | str = True,
        undo: Callable[[], object] = lambda: None,
    ) -> list[tuple[MicroBatch, Result]]:
        """Run a function on rows without gradients, in micro-batches within a limit.

        Args:
            rows: rows of this rank; empty if only other ranks have rows.
            forward: ``forward(rows, length)`` runs rows, padded to at least `length` tokens each.
            attempts: repeats the pass after an OOM.
            loss: returns the lengths of rows, and the dummy of a rank that has fewer micro-batches.
            kind: kind of the layout of micro-batches.
            doing: phrase for the error of a lost rank.
            evaluates: see :meth:`Step.run_forward`.
            undo: function that undoes the side effects of a failed attempt.

        Returns:
            Each micro-batch with the function's result.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            RankLostError: this rank ran out of memory and cannot notify the others.
        """
        # Use the time model of training, by which the layout avoids larger micro-batches that are
        # slower because of more padding.
        layout = replace(attempts.sizer.layout, kind=kind, time=self.sizer.layout.time)
        lengths = list(map(loss.row_length, rows))
        has_dummies = distributed.world_size() > 1
        dummies = [loss.some_row()] if has_dummies else []

        @torch.no_grad()
        def run_one(micro_batch: MicroBatch | None) -> Result:
            if micro_batch is None:
                return forward(dummies, layout.padded(loss.row_length(dummies[0])))
            return forward([rows[number] for number in micro_batch.rows], micro_batch.length)

        def undo_attempt() -> None:
            self.sharding.reset()
            undo()

        with self.compiling():
            for attempt in attempts.repeat(undo=undo_attempt, doing=doing):
                with attempt:
                    own = micro_batches(lengths, attempts.sizer.limit(), layout)
                    attempts.suspect_fullest(own or [DUMMY])
                    results = self.run_forward(
                        own,
                        run_one,
                        number=distributed.maximum(len(own)),
                        evaluates=evaluates,
                        attempts=attempts,
                    )
        return [(micro_batch, result) for micro_batch, result in results if micro_batch is not None]

    # --- trials

    def record_collectives_of_row(self) -> None:
        """Run one row as a trial, so that a rank can finish the collectives of its first
        micro-batch after an OOM. Needed unless a search has run trials. A collective.

        Raises:
            RankLostError: out of memory.
        """
        assert self.scales_gradients
        row = self.loss.some_row()

        def run_trials() -> None:
            for is_last in (False, True):
                self.try_rows([row], is_last=is_last)
            self.try_evaluation([row])
            if self.reference is not None:
                self.try_reference([row])

        self.record_collectives(run_trials, MicroBatch([0], self.loss.row_length(row)))

    def try_rows(self, rows: Sequence[Row], *, is_last: bool = True) -> None:
        """Run forward and backward of one micro-batch as a trial. The rows may have no label."""
        # The batch stays alive until the micro-batch has ended, as in training.
        with self.trial(is_last=is_last), self.loss.collated(rows, self.sizer.layout) as batch:
            if self.reference is not None:
                batch[REFERENCE_VALUES] = self.reference.zeros(len(rows))
            loss, num_labels = self.loss.loss_and_labels(batch)
            # The operations of SumThenDivide._backward(); the values do not matter.
            if self.scales_gradients and not self.loss.counts_rows:
                loss = loss * num_labels
            loss.backward()  # type: ignore[no-untyped-call]

    def try_reference(self, rows: Sequence[Row]) -> None:
        """Run one micro-batch of the reference as a trial."""
        assert self.reference is not None
        length = self.reference.sizer.layout.padded(max(map(self.loss.row_length, rows)))
        with torch.no_grad(), self.trial(evaluates=REFERENCE):
            self._reference_values(rows, length)

    def try_evaluation(self, rows: Sequence[Row]) -> None:
        """Run one micro-batch of :meth:`evaluate` as a trial."""
        collated = self.loss.collated(rows, self.sizer.layout)
        with collated as batch, torch.no_grad(), self.trial(evaluates=True):
            mean, num_labels = self.loss.loss_and_labels(batch)
            if num_labels:
                # Wait for the device, as evaluate() does.
                (mean * num_labels).item()

    def keep_gradients(self, rows: Sequence[Row]) -> None:
        """Leave the gradients that exist within a step: unsharded ones and, if noise is measured,
        the reduced ones of the first micro-batch.
        """
        if self._measures_noise:
            self.try_rows(rows)
        self.try_rows(rows, is_last=False)


def _read(unread: Iterator[Row], loss: RowLoss, limit: MicroBatchLimit) -> list[Row]:
    """Read at least `_ROWS_READ` rows and the rows of `_MICRO_BATCHES_READ` micro-batches; fewer at
    the end.
    """
    rows = []
    amount = 0
    for row in unread:
        rows.append(row)
        amount += loss.row_length(row) if limit.unit == "tokens" else 1
        if len(rows) >= _ROWS_READ and amount >= _MICRO_BATCHES_READ * limit.amount:
            break
    return rows
