"""Runs the batches of an evaluation that another library's trainer has made; a batch that runs out
of memory runs again in parts, whose results are joined.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from adaptive_batch.data import NO_LIMIT, MicroBatch, split_by_rows
from adaptive_batch.errors import DoesNotFitError, SettingError
from adaptive_batch.memory import RandomState, device_memory

from .adaptive_step import log_change
from .agreement import MicroBatchPlan
from .oom_retry import OOMRetry
from .options import StepOptions
from .parts import BatchSource, LabelCounter, SplitBatch, arrays_in, copy_containers
from .sizing import MicroBatchSizer
from .splitters import CustomSplit, RowSplitter
from .step import Step

log = logging.getLogger("adaptive_batch")

# Of a part are counted: labels without the first of each row, all labels, and rows.
_Counts = tuple[float, float, int]
_ROWS = 2
# Adds up the losses of parts; other weights are columns of the counts.
_SUM = 3
# Differences of losses that rounding may cause, as shares of the loss.
_TOLERANCE_FLOAT32 = 1e-3
_TOLERANCE = 1.5e-2
# A difference that weights of another kind hardly come to.
_ROUNDING = 1e-6
# Difference of outputs, as a share of their norm, that shows outputs of the whole batch.
_OTHER_OUTPUTS = 0.05
_PADDING = -100


class EvaluationParts:
    """Runs batches without gradients on one rank, each at once until memory runs out.

    The limit of a part is apart from training's, and is tried again as in training. Parts keep all
    columns of the batch. Of the first split, and of later ones at growing distances, one part runs
    again in halves: the losses show how parts are weighted, and a loss or an output that depends on
    the other rows is refused.

    Args:
        model: model that is evaluated.
        split: function that returns :class:`SplitBatch` of a batch; None splits it by rows.
        num_labels: function that counts labels, see :class:`.AdaptiveStep`.
        is_sum: whether the loss is known to be a sum.
        is_shifted: whether the loss leaves the first label of each row out, as far as is known.
        is_exact: whether the model runs without autocast.
        fix: fix of a batch that cannot run in parts, in the imperative.
        options: how a step runs.

    Attributes:
        model: as given.
        sizer: decides what a part may hold.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        split: Callable[[Any], SplitBatch] | None,
        num_labels: Callable[[Any], Any] | None,
        is_sum: bool,
        is_shifted: bool,
        is_exact: bool,
        fix: str,
        options: StepOptions,
    ) -> None:
        self.model = model
        self._fix = fix
        self._is_exact = is_exact
        self._split: RowSplitter | CustomSplit = (
            RowSplitter(trims=False) if split is None else CustomSplit(split)
        )
        self._labels = LabelCounter(num_labels)
        memory = options.memory or device_memory(next(model.parameters()).device)
        self.sizer = MicroBatchSizer(
            memory=memory,
            policy=options.oom_policy,
            on_change=partial(
                log_change, options.event, kind="validation_limit", prefix="evaluation: "
            ),
        )
        self._step = Step(
            model,
            self.sizer,
            memory=memory,
            retries=options.on_out_of_memory == "shrink",
            remedies="shorten the rows, or keep fewer predictions on the device",
        )
        self._retry = self._step.retry
        # Weights that no check has excluded, the likeliest first.
        self._weights = [0, 1, _ROWS, _SUM] if is_shifted else [1, 0, _ROWS, _SUM]
        if is_sum:
            self._weights.reverse()
        self._num_splits = 0

    def run(
        self,
        batch: Any,
        forward: Callable[[Any], tuple[Any, ...]],
        *,
        trial: Callable[[Any], tuple[Any, ...]],
        prepare: Callable[[Any], Any],
        snapshot: Callable[[], Callable[[], object]],
    ) -> tuple[tuple[Any, ...], list[float]]:
        """Return the results of a batch, and the weight of each part that has run.

        Args:
            batch: what the trainer has made.
            forward: function that returns loss, logits and labels, as Trainer's
                ``prediction_step``, of the batch as it is or of a prepared part.
            trial: the same for rows that are run again, which count in no metric.
            prepare: function that makes of the batch what is split.
            snapshot: function that returns the function which puts everything back as it is now.

        Raises:
            DoesNotFitError: one row alone ran out of memory, or the results of parts are not those
                of the batch.
        """
        rows: BatchSource | None = None
        kept = copy_containers(batch)

        def split() -> BatchSource:
            try:
                split_rows = self._split(prepare(kept))
            except SettingError as error:
                raise self._cannot_split(str(error)) from error
            self.sizer.begin_step(split_rows.num_rows)
            if split_rows.is_packed:
                raise self._cannot_split("documents are packed into one row")
            return split_rows

        if self.sizer.has_to_agree:
            self.sizer.agree()
        self.sizer.begin_step(NO_LIMIT)
        if self.sizer.limit_of_step.amount < NO_LIMIT:
            rows = split()
        undo = snapshot()

        def undo_attempt() -> None:
            nonlocal rows, undo
            undo()
            if rows is None:
                rows = split()
                undo = snapshot()
                self._retry.set_suspects([MicroBatch([*range(rows.num_rows)], rows.width)])

        for attempt in self._retry.attempts(undo=undo_attempt, doing="in an evaluation"):
            with attempt:
                if rows is None:
                    results = forward(batch), [1.0]
                else:
                    results = self._run_parts(rows, forward, trial)
        return results

    def _run_parts(
        self,
        rows: BatchSource,
        forward: Callable[[Any], tuple[Any, ...]],
        trial: Callable[[Any], tuple[Any, ...]],
    ) -> tuple[tuple[Any, ...], list[float]]:
        pieces = split_by_rows(range(rows.num_rows), self.sizer.limit_of_step.amount)
        results, counts = self._run_each(rows, pieces, forward, retry=self._retry)
        if len(pieces) == 1:
            return results[0], [1.0]
        self._num_splits += 1
        losses = self._losses(results, counts).values()
        # Also while the weights that are left give different losses.
        is_open = bool(losses) and max(losses) - min(losses) > _ROUNDING * abs(min(losses))
        if self._num_splits & (self._num_splits - 1) == 0 or is_open:
            self._check(rows, pieces[0], results[0], trial)
        weight, *_ = self._weights
        loss = self._losses(results, counts).get(weight)
        # Metrics of rows whose losses are added up are means over rows.
        return (loss, *self._outputs(results, counts)), _factors(min(weight, _ROWS), counts)

    def _run_each(
        self,
        rows: BatchSource,
        pieces: Sequence[Sequence[int]],
        run: Callable[[Any], tuple[Any, ...]],
        *,
        retry: OOMRetry,
    ) -> tuple[list[tuple[Any, ...]], list[_Counts]]:
        counts = []

        def run_part(micro_batch: MicroBatch | None) -> tuple[Any, ...]:
            assert micro_batch is not None, "evaluation in parts runs on one rank"
            part = rows.part(micro_batch.rows)
            num_rows = len(micro_batch.rows)
            # Before a function pops its labels.
            counts.append((*self._labels.candidates(part, num_rows), num_rows))
            return run(part)

        plan = MicroBatchPlan([MicroBatch([*piece], rows.width) for piece in pieces], len(pieces))
        results = self._step.run_forward(plan, run_part, retry=retry, evaluates=True)
        return [result for _, result in results], counts

    def _losses(
        self, results: Sequence[tuple[Any, ...]], counts: Sequence[_Counts]
    ) -> dict[int, torch.Tensor]:
        """Return the loss of all parts by each weight that is left; nothing without losses."""
        losses = {}
        for weight in self._weights:
            terms = [
                factor * loss
                for factor, (loss, *_) in zip(_factors(weight, counts), results, strict=True)
                if factor and loss is not None
            ]
            if terms:
                losses[weight] = torch.stack(terms).sum()
        return losses

    def _check(
        self,
        rows: BatchSource,
        piece: Sequence[int],
        whole: tuple[Any, ...],
        trial: Callable[[Any], tuple[Any, ...]],
    ) -> None:
        """Compare the results of a part with those of its halves.

        Raises:
            DoesNotFitError: they differ.
        """
        if len(piece) == 1:
            self._warn("no two rows fit at once")
            return
        random_state = RandomState(self._retry.memory.device)
        middle = len(piece) // 2
        # Its own retry, so that a failure is blamed on the parts and not on their halves.
        retry = self._retry.with_sizer(self.sizer)
        halves = [piece[:middle], piece[middle:]]
        results, counts = self._run_each(rows, halves, trial, retry=retry)
        if random_state.changed():
            random_state.restore()
            self._warn("it draws random numbers")
            return
        loss, *outputs = whole
        losses = self._losses(results, counts)
        if losses and not math.isnan(float(loss)):
            # NaN where a half without labels counts; losses of both signs may cancel out.
            values = [abs(float(each)) for each in (loss, *(half for half, *_ in results))]
            scale = max(filter(math.isfinite, values))
            differences = {weight: abs(float(each - loss)) for weight, each in losses.items()}
            least = min(filter(math.isfinite, differences.values()), default=math.inf)
            if least > self._tolerance * scale:
                raise self._cannot_split("the loss is not a mean or a sum over rows or labels")
            near = 10 * least + _ROUNDING * scale
            # The nearest first.
            self._weights = sorted(
                (weight for weight in self._weights if differences[weight] <= near),
                key=differences.__getitem__,
            )
        joined = self._outputs(results, counts)
        for one, other in zip(arrays_in(outputs), arrays_in(joined), strict=True):
            # Generated tokens may differ by rounding.
            if one.is_floating_point() and (
                one.shape != other.shape or (one - other).norm() > _OTHER_OUTPUTS * one.norm()
            ):
                raise self._cannot_split(f"a row's logits of {tuple(one.shape)} depend on others")

    def _warn(self, reason: str) -> None:
        if self._num_splits == 1:
            log.warning(
                "evaluation: results of parts are not checked, as %s; they are those of the batch"
                " if no row depends on the others and the loss is a mean over labels",
                reason,
            )

    def _outputs(self, results: Sequence[tuple[Any, ...]], counts: Sequence[_Counts]) -> list[Any]:
        num_rows = [rows for *_, rows in counts]
        _, logits, labels = zip(*results, strict=True)
        return [self._join(logits, num_rows, "logits"), self._join(labels, num_rows, "labels")]

    def _join(self, values: Sequence[Any], num_rows: Sequence[int], name: str) -> Any:
        """Join an output of all parts by rows; other columns are padded where parts differ."""
        first = values[0]
        if first is None:
            return None
        if isinstance(first, Mapping):
            items = {
                key: self._join([value[key] for value in values], num_rows, f"{name}.{key}")
                for key in first
            }
            return type(first)(items)  # type: ignore[call-arg]
        if isinstance(first, list | tuple):
            return type(first)(
                self._join(items, num_rows, f"{name}[{number}]")
                for number, items in enumerate(zip(*values, strict=True))
            )
        for value, rows in zip(values, num_rows, strict=True):
            if not isinstance(value, torch.Tensor) or value.shape[:1] != (rows,):
                form = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value)
                raise self._cannot_split(f"{name}, {form} of {rows} rows, has no entry per row")
        if first.dim() == 1:
            return torch.cat([*values])
        all_rows = [row for value in values for row in value]
        return pad_sequence(all_rows, batch_first=True, padding_value=_PADDING)

    @property
    def _tolerance(self) -> float:
        """Difference of losses that rounding may cause; evaluation may cast the model."""
        is_float32 = next(self.model.parameters()).dtype.itemsize >= torch.float32.itemsize
        return _TOLERANCE_FLOAT32 if self._is_exact and is_float32 else _TOLERANCE

    def _cannot_split(self, problem: str) -> DoesNotFitError:
        return DoesNotFitError(
            f"a batch of the evaluation ran out of memory, and cannot run in parts: {problem};"
            f" {self._fix}"
        )


def _factors(weight: int, counts: Sequence[_Counts]) -> list[float]:
    """Return what the loss of each part is multiplied by."""
    total: float = 0 if weight == _SUM else sum(count[weight] for count in counts)
    # The loss of no label is NaN or 0, of any part.
    return [count[weight] / total if total else 1.0 for count in counts]
