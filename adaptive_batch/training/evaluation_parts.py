"""Evaluation of the batches of another library's trainer, in parts where memory runs out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from adaptive_batch import distributed
from adaptive_batch.data import NO_LIMIT, MicroBatch, split_by_rows
from adaptive_batch.distributed import sharding_of
from adaptive_batch.errors import DoesNotFitError, SettingError
from adaptive_batch.memory import RandomState, device_memory

from .options import StepOptions
from .parts import BatchSource, LabelCounter, SplitBatch, arrays_in, copy_containers
from .sizing import MicroBatchSizer
from .splitters import CustomSplit, RowSplitter
from .step import Attempts

log = logging.getLogger("adaptive_batch")

# Counts of a part: labels without the first of each row, all labels, and rows. The loss of a batch
# is the mean of the losses of its parts, weighted by one of the three, or it is their sum.
_Counts = tuple[float, float, int]
_LATER_LABELS, _LABELS, _ROWS, _SUM = range(4)
# Shares by which results may differ by rounding, in float32 and in 16 bits.
_TOLERANCE_FLOAT32 = 1e-3
_TOLERANCE_16_BITS = 0.05
# Share by which rounding alone changes a loss.
_ROUNDING = 1e-6


class EvaluationParts:
    """Runs batches without gradients, each at once until memory runs out.

    Each rank has its own limit of a part, which recovers as in training. Parts keep all columns of
    the batch. At the first split, the rows that differ most in their labels run again, together and
    in halves. This shows the weights of the losses of parts; if several fit, a later split decides.
    Outputs that depend on other rows are refused.

    Args:
        model: model to evaluate.
        split: function that returns :class:`SplitBatch` of a batch; None splits it by rows.
        num_labels: function that counts labels, see :class:`.AdaptiveStep`.
        is_sum: whether the loss is known to be a sum.
        is_exact: whether the model runs without autocast.
        join: function that joins the outputs of parts.
        state: function that returns the state that batches change, such as that of metrics: the
            same after a batch and after its parts.
        fix: fix of a batch that cannot run in parts, in the imperative.
        options: options of the step.

    Attributes:
        model: model to evaluate.
        sizer: limits a part.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        split: Callable[[Any], SplitBatch] | None,
        num_labels: Callable[[Any], Any] | None,
        is_sum: bool = False,
        is_exact: bool,
        join: Callable[[Sequence[Any]], Any],
        state: Callable[[], Sequence[torch.Tensor]] = tuple,
        fix: str,
        options: StepOptions,
    ) -> None:
        self.model = model
        self._join = join
        self._state = state
        self._fix = fix
        self._is_exact = is_exact
        self._has_others = distributed.world_size() > 1
        self._split: RowSplitter | CustomSplit = (
            RowSplitter(trims=False) if split is None else CustomSplit(split)
        )
        self._labels = LabelCounter(num_labels)
        # Weightings that no check has excluded, the likeliest first.
        self._possible_weightings = [_LATER_LABELS, _LABELS, _ROWS, _SUM]
        if is_sum:
            self._possible_weightings = [_SUM, _ROWS]
        self._parameter = next(model.parameters())
        memory = options.memory or device_memory(
            self._parameter.device, shared_by=distributed.local_world_size()
        )
        self.sizer = MicroBatchSizer(
            memory=memory,
            policy=options.oom_policy,
            on_change=partial(
                options.report_change, kind="validation_limit", prefix="evaluation: "
            ),
        )
        with distributed.alone():
            self._sharding = sharding_of(model)
        self._attempts = Attempts(
            self.sizer,
            memory,
            retries=options.on_out_of_memory == "shrink",
            remedies="shorten the rows, or keep fewer predictions on the device",
        )

    def run(
        self,
        batch: Any,
        forward: Callable[[Any], tuple[Any, Any]],
        *,
        snapshot: Callable[[], Callable[[], object]],
    ) -> tuple[Any, Any, list[float]]:
        """Return the loss and the outputs of a batch, and the factor of each part's metrics.

        Args:
            batch: batch on the device.
            forward: function that returns the loss of a batch or part, or a vector of numbers that
                are weighted like it, or None, and its outputs: nested tensors with an entry for
                each row.
            snapshot: function that returns a function that restores the caller's state.

        Raises:
            DoesNotFitError: one row alone ran out of memory, or parts have other results than the
                batch.
        """
        # Rows are counted only once there is a limit: many batches cannot be split.
        rows: BatchSource | None = None
        # Other ranks take no part in this batch.
        with distributed.alone():
            self.sizer.retry_if_due()
            if self.sizer.limit().amount < NO_LIMIT:
                rows = self._rows_of(batch)
            undo = snapshot()
            random_state = RandomState(self._parameter.device)

            def undo_attempt() -> None:
                nonlocal rows
                self._sharding.reset()
                undo()
                random_state.restore()
                if rows is None:
                    rows = self._rows_of(batch)
                    # The whole batch ran out of memory; the smaller limit depends on its size.
                    self._attempts.suspect_fullest(
                        [MicroBatch([*range(rows.num_rows)], rows.width)]
                    )

            for attempt in self._attempts.repeat(undo=undo_attempt, doing="in an evaluation"):
                with attempt:
                    if rows is None:
                        results = *forward(copy_containers(batch)), [1.0]
                    else:
                        results = self._run_in_parts(rows, forward, snapshot)
        return results

    def _rows_of(self, batch: Any) -> BatchSource:
        try:
            rows = self._split(batch)
        except SettingError as error:
            raise self._cannot_split(str(error)) from error
        if rows.is_packed:
            raise self._cannot_split("documents are packed into one row")
        return rows

    def _run_in_parts(
        self,
        rows: BatchSource,
        forward: Callable[[Any], tuple[Any, Any]],
        snapshot: Callable[[], Callable[[], object]],
    ) -> tuple[Any, Any, list[float]]:
        """Run parts; return the loss and outputs of the batch, and the factor of each part's
        metrics.
        """
        parts = split_by_rows(range(rows.num_rows), self.sizer.limit().amount)
        self._attempts.suspect_fullest([MicroBatch([*part], rows.width) for part in parts])
        losses, outputs, counts = self._run_each(rows, parts, forward)
        if len(parts) == 1:
            return losses[0], outputs[0], [1.0]
        distinct_factors = {tuple(_factors(each, counts)) for each in self._possible_weightings}
        if len(distinct_factors) > 1:
            self._check(rows, self._rows_to_compare(rows, len(parts[0])), forward, snapshot)
        weighting = self._possible_weightings[0]
        # Metrics of rows whose losses are added up are means over rows.
        metric_factors = _factors(_ROWS if weighting == _SUM else weighting, counts)
        return _add_up(weighting, losses, counts), self._join(outputs), metric_factors

    def _run_each(
        self,
        rows: BatchSource,
        parts: Sequence[Sequence[int]],
        forward: Callable[[Any], tuple[Any, Any]],
    ) -> tuple[list[Any], list[Any], list[_Counts]]:
        """Run each part; return the losses, the outputs and the counts of the parts."""
        losses = []
        outputs = []
        counts = []
        collective_error = self._cannot_split(
            "other ranks would wait for the collectives of its parts"
        )
        for numbers in parts:
            try:
                part = rows.part(numbers)
            except SettingError as error:
                raise self._cannot_split(str(error)) from error
            # Count before the function, which may pop the labels from the batch.
            counts.append((*self._labels.candidates(part, len(numbers)), len(numbers)))
            refusal = distributed.refuse_collectives(collective_error)
            with refusal if self._has_others else nullcontext():
                loss, output = forward(part)
            if any(tensor.shape[:1] != (len(numbers),) for tensor in arrays_in(output)):
                raise self._cannot_split("an output has no entry per row")
            losses.append(loss)
            outputs.append(output)
        return losses, outputs, counts

    def _rows_to_compare(self, rows: BatchSource, number: int) -> tuple[list[int], list[int]]:
        """Return two groups of rows, `number` in all: those with the fewest labels and those with
        the most, whose losses show best how rows are weighted.
        """
        labels = [self._labels.candidates(rows.part([row]), 1) for row in range(rows.num_rows)]
        by_labels = sorted(range(rows.num_rows), key=labels.__getitem__)
        middle = number // 2
        return sorted(by_labels[:middle]), sorted(by_labels[middle - number :])

    def _check(
        self,
        rows: BatchSource,
        halves: tuple[list[int], list[int]],
        forward: Callable[[Any], tuple[Any, Any]],
        snapshot: Callable[[], Callable[[], object]],
    ) -> None:
        """Run some rows together and in two halves, and keep the weightings that give the loss of
        the rows from the losses of the halves.

        Raises:
            DoesNotFitError: outputs, states or losses depend on the other rows of a part.
        """
        if not halves[0]:
            self._leave_unchecked("no two rows fit at once")
            return
        undo = snapshot()
        state_before = self._state()
        random_state = RandomState(self._parameter.device)
        rows_of_halves = [*halves[0], *halves[1]]
        together = sorted(rows_of_halves)
        (loss,), (outputs,), _ = self._run_each(rows, [together], forward)
        state = self._state()
        undo()
        losses, outputs_of_halves, counts = self._run_each(rows, halves, forward)
        state_of_halves = self._state()
        undo()
        if random_state.changed():
            random_state.restore()
            self._leave_unchecked("it draws random numbers")
            return
        # Evaluation may have cast the model since construction.
        is_float32 = self._is_exact and self._parameter.dtype.itemsize >= torch.float32.itemsize
        tolerance = _TOLERANCE_FLOAT32 if is_float32 else _TOLERANCE_16_BITS
        order = [together.index(row) for row in rows_of_halves]
        joined_outputs = self._join(outputs_of_halves)
        for output, of_halves in zip(arrays_in(outputs), arrays_in(joined_outputs), strict=True):
            self._compare_outputs(output[order], of_halves, tolerance)
        if len(state_before) != len(state):
            # A list has new states, which have no value from before: compare the results only.
            state_before = state
        if len(state) != len(state_of_halves) or any(
            _states_differ(before, after, after_halves, tolerance)
            for before, after, after_halves in zip(
                state_before, state, state_of_halves, strict=True
            )
        ):
            raise self._cannot_split("it changes an attribute, or counts batches in a metric")
        if loss is None:
            # Without losses, all weightings are alike.
            del self._possible_weightings[1:]
        elif not loss.isnan().all():
            self._keep_fitting_weightings(loss, losses, counts, tolerance)

    def _compare_outputs(
        self, output: torch.Tensor, of_halves: torch.Tensor, tolerance: float
    ) -> None:
        """Raise if floating-point outputs differ; log whole numbers that differ."""
        if output.is_floating_point():
            if _differ(output, of_halves, tolerance):
                raise self._cannot_split(f"outputs {tuple(output.shape)} depend on other rows")
        elif not torch.equal(output, of_halves):
            log.warning(
                "evaluation: whole numbers in the outputs differ between rows and halves of"
                " them: they depend on other rows, or on rounding, as generated tokens may"
            )

    def _keep_fitting_weightings(
        self,
        loss: torch.Tensor,
        losses: Sequence[torch.Tensor],
        counts: Sequence[_Counts],
        tolerance: float,
    ) -> None:
        """Keep the weightings under which the losses of two halves add up to that of the part.

        Args:
            loss: loss of the part.
            losses: losses of its halves.
            counts: counts of the halves.
            tolerance: share by which sums may differ by rounding.
        """
        # Compare with the largest of the losses: losses of both signs may cancel out. The loss of a
        # half without labels is NaN.
        magnitudes = torch.stack([loss, *losses]).float().abs().nan_to_num(0.0, posinf=math.inf)
        scale = magnitudes.amax(dim=0) + torch.finfo(torch.float32).tiny
        totals = [_add_up(weighting, losses, counts) for weighting in self._possible_weightings]
        # The difference is NaN if a weighting counts a half without labels.
        errors = (torch.stack(totals) - loss).abs().div(scale).nan_to_num(math.inf)
        # A number that is NaN for the whole part shows nothing.
        errors = errors.masked_fill(loss.isnan(), 0.0)
        # The loss may be a vector of numbers.
        differences = errors.reshape(len(totals), -1).amax(dim=1)
        smallest = differences.min()
        if smallest > tolerance:
            raise self._cannot_split(
                "a loss or logged number is not a mean or a sum over rows or labels"
            )
        # Keep those that are about as close as the best: wrong ones differ by more than rounding.
        fits = differences <= 10 * smallest + _ROUNDING
        self._possible_weightings = [
            weighting
            for weighting, does_fit in zip(self._possible_weightings, fits.tolist(), strict=True)
            if does_fit
        ]

    def _leave_unchecked(self, reason: str) -> None:
        """Use the likeliest weight from now on."""
        if self._has_others:
            raise self._cannot_split(f"its results cannot be checked, as {reason}")
        del self._possible_weightings[1:]
        log.warning(
            "evaluation: results of parts are not checked, as %s; they are those of the batch if no"
            " row depends on the others and the loss is a mean over labels",
            reason,
        )

    def _cannot_split(self, problem: str) -> DoesNotFitError:
        return DoesNotFitError(
            f"a batch of the evaluation ran out of memory, and cannot run in parts: {problem};"
            f" {self._fix}"
        )


def _differ(ours: torch.Tensor, halves: torch.Tensor, tolerance: float) -> bool:
    if ours.shape != halves.shape:
        return True
    if not ours.is_floating_point():
        return not torch.equal(ours, halves)
    return _are_apart(ours, halves, ours, tolerance)


def _states_differ(
    before: torch.Tensor, ours: torch.Tensor, halves: torch.Tensor, tolerance: float
) -> bool:
    """Return whether a part changes a state in another way than its halves do."""
    changes_in_place = before.is_floating_point() and before.shape == ours.shape == halves.shape
    if not changes_in_place or not before.isfinite().all() or before is ours:
        return _differ(ours, halves, tolerance)
    # A state may be a sum over many earlier batches, which would hide a difference.
    return _are_apart(ours, halves, ours - before, tolerance, rounding=_ROUNDING * before.norm())


def _are_apart(
    ours: torch.Tensor,
    halves: torch.Tensor,
    scale: torch.Tensor,
    tolerance: float,
    *,
    rounding: torch.Tensor | float = 0.0,
) -> bool:
    """Return whether two tensors differ by more than a share of the norm of `scale`.

    NaN and infinity are equal to themselves only.
    """
    are_equal = (ours == halves) | (ours.isnan() & halves.isnan())
    difference = (ours - halves).masked_fill(are_equal, 0.0).norm()
    most = tolerance * scale.nan_to_num(0.0, 0.0, 0.0).norm() + rounding
    # The difference may be NaN.
    return not difference <= most


def _factors(weighting: int, counts: Sequence[_Counts]) -> list[float]:
    """Return the factor of the loss of each part.

    Args:
        weighting: index of the count by which losses are averaged; `_SUM` if they add up.
        counts: counts of each part.
    """
    # Without any label, each loss is NaN or 0.
    if weighting == _SUM or not any(count[weighting] for count in counts):
        return [1.0] * len(counts)
    total = sum(count[weighting] for count in counts)
    return [count[weighting] / total for count in counts]


def _add_up(weighting: int, losses: Sequence[Any], counts: Sequence[_Counts]) -> Any:
    """Return the loss of all parts; None without losses."""
    if losses[0] is None:
        return None
    weighted = zip(_factors(weighting, counts), losses, strict=True)
    # Skip a factor of 0: the loss of a part without labels may be NaN.
    return sum(factor * loss for factor, loss in weighted if factor)
