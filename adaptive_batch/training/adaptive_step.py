"""The step of any script: split a batch into parts that fit, and repeat it after an OOM.

def forward_backward(part):
    loss = model(**part.batch).loss * part.share
    loss.backward()
    return loss.detach()

step = AdaptiveStep(model, forward_backward)
for batch in loader:
    losses = step(batch)
    optimizer.step()
    optimizer.zero_grad()

Each part is weighted by its share of the labels, so that the gradients of the parts add up to those
of the batch. With a single part, gradients are bitwise equal to the script's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batch import distributed
from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import check_bool, check_state, check_whole, instance_of
from adaptive_batch.data import (
    MicroBatch,
    MicroBatchLayout,
    MicroBatchLimit,
    micro_batches,
    split_by_rows,
)
from adaptive_batch.distributed import sharding_of
from adaptive_batch.errors import DoesNotFitError, SettingError
from adaptive_batch.memory import device_memory, expand_segments_in_script
from adaptive_batch.probe import ProbeResult

from .bound_search import (
    LongestRows,
    ProbeOptions,
    SearchScope,
    TriedStep,
    find_limit,
    length_in_sample,
)
from .model_checks import (
    check_parameters,
    check_ranks,
    gradients_must_come,
    is_compiled,
    is_replicated,
)
from .options import StepOptions, Terms
from .parts import BatchSource, LabelCounter, Part, SplitBatch, copy_containers
from .sizing import MicroBatchSizer
from .split_check import SplitCheck
from .splitters import CustomSplit, RowSplitter
from .step import OutOfMemoryElsewhereError, RankReport, Step, Weighting
from .step_result import norm_to_clip

private = PrivateNames("memory estimates")
if TYPE_CHECKING:
    from adaptive_batch.estimate import FakeDevice, MemoryEstimate
log = logging.getLogger("adaptive_batch")

_LENGTHS_REMEDY = (
    "nothing shows the tokens of a row; give split=, whose SplitBatch has lengths, or"
    " micro_batch_size"
)
_STATISTICS_REMEDY = (
    "return a mapping of names to numbers or tensors that add up over parts, such as"
    ' {"loss": losses.sum(), "labels": count}, the same names and shapes for each part'
)


class PartStep(Step):
    """Runs a function on the parts of a batch, checks some splits, and repeats a step after an OOM.

    Args:
        model: model whose gradients are summed.
        forward_backward: function that runs forward and backward of a part.
        micro_batch_size, micro_batch_tokens, num_labels, statistics: see :class:`.AdaptiveStep`.
        options: options of a step.
        name: name of the function in errors.

    Attributes:
        terms: names of the caller's API, for errors.
        forward_backward, name: as given.
        labels: counts the labels of a part.
        statistics: computes the statistics of a batch; None without a function.
        check: checks that a batch may be split.
        counts_over_ranks: whether labels and statistics are summed over all ranks.
        bound_excludes_gradients: whether the bound was found without the gradients of an earlier
            part in memory.

    Raises:
        SettingError: an argument cannot be used.
    """

    terms = Terms()

    def __init__(
        self,
        model: nn.Module,
        forward_backward: Callable[[Part], Any],
        *,
        micro_batch_size: int | str | None,
        micro_batch_tokens: int | str | None,
        num_labels: Callable[[Any], Any] | None,
        statistics: Callable[[Part], Mapping[str, Any]] | None,
        options: StepOptions,
        name: str,
    ) -> None:
        device = next(model.parameters()).device
        expand_segments_in_script(device)
        memory = options.memory or device_memory(device, shared_by=distributed.local_world_size())
        sizer = MicroBatchSizer(
            micro_batch_size=micro_batch_size,
            micro_batch_tokens=micro_batch_tokens,
            layout=MicroBatchLayout(kind=options.micro_batch_layout or "padded"),
            memory=memory,
            policy=options.oom_policy,
            on_change=options.report_change,
        )
        sharding = sharding_of(
            model,
            overlaps=options.overlap_reduction,
            finishes=not is_replicated(model),
            syncs_every_micro_batch=options.sync_gradients_every_micro_batch,
        )
        check_ranks(model, sharding)
        super().__init__(
            model,
            sizer,
            memory=memory,
            sharding=sharding,
            retries=options.on_out_of_memory == "shrink",
            max_grad_norm=norm_to_clip(options.max_grad_norm, options.on_nonfinite_loss),
        )
        self.forward_backward = forward_backward
        self.name = name
        self.counts_over_ranks = (
            options.count_labels_over == "ranks" and distributed.world_size() > 1
        )
        self.labels = LabelCounter(num_labels)
        self.statistics = None if statistics is None else BatchStatistics(statistics, self)
        self.check = SplitCheck(self)
        self.bound_excludes_gradients = False
        # After an OOM, a rank can finish a micro-batch only if its collectives are recorded.
        self._records_collectives = (
            sharding.is_sharded and self.attempts.retries and not is_compiled(model)
        )
        if sizer.waits_for_search:
            log.info("auto: batches are not split before a search has found the limit")

    def run_rows(self, rows: BatchSource, report: RankReport) -> list[Any]:
        """Run forward and backward of a batch, in parts that fit.

        Args:
            rows: rows of this rank.
            report: report of this rank to the others.

        Returns:
            The function's result of each part with labels, in order.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            RankLostError: this rank ran out of memory and cannot notify the others.
            SettingError: the loss of the batch is not the sum of its parts' shares.
        """
        self.sizer.is_packed = rows.is_packed
        self.sizer.noun = rows.noun
        if self._records_collectives:
            self.record_collectives_of(rows)
        try:
            return self.run_step(LabelShares(self, rows), report)
        except DoesNotFitError as error:
            if not rows.treatment:
                raise
            # A value that should be divided may be what does not fit.
            raise DoesNotFitError(f"{error}; of the batch, {rows.treatment}") from error

    def num_labels(self, batch: Any, num_rows: int) -> float:
        """Return the number of labels of a batch of `num_rows` rows, or the sum of their weights.
        The shares of parts are computed from it.
        """
        return self.labels.count(batch, num_rows, counts_first=self.check.counts_first_label)

    # --- what fits

    def search(self, tried: TriedStep, scope: SearchScope, options: ProbeOptions) -> ProbeResult:
        """Find the most rows that fit, and limit micro-batches to them; see :func:`find_limit`."""
        result = find_limit(tried, scope, options)[-1]
        self.sizer.check(result)
        self.sizer.set_bound(result)
        fits_whole = result.max_batch_size >= (scope.whole_step_rows or 0)
        self.bound_excludes_gradients = fits_whole and not scope.accumulates
        return result

    def record_collectives_of(self, rows: BatchSource) -> None:
        """Run one row as a trial to record its collectives before an OOM. A batch that cannot be
        divided runs whole.
        """
        self._records_collectives = False

        def make_row() -> tuple[Any, int]:
            try:
                return rows.dummy(), 1
            except SettingError:
                # Rows of `split=`, which have no treatment, raise an error of the script.
                if not rows.treatment:
                    raise
                return rows.part(range(rows.num_rows)), rows.num_rows

        def run_trials() -> None:
            for is_last in (False, True):
                self.try_part(make_row, is_last=is_last)

        self.record_collectives(run_trials, MicroBatch([0], 1))

    def try_part(self, make: Callable[[], tuple[Any, int]], *, is_last: bool = True) -> None:
        """Run a batch as one part in a trial, and drop its result.

        Args:
            make: function that returns the batch and its number of rows. It runs inside the trial,
                which measures the memory of the batch too.
            is_last: whether gradients are reduced.
        """
        statistics: Mapping[str, Any] = {}
        if self.statistics is not None:
            with self.trial(evaluates=self.statistics.KIND):
                batch, num_rows = make()
                statistics = self.statistics.of_part(Part(batch, num_rows, is_trial=True))
                # Free it: the next trial makes its own batch.
                del batch
        with self.trial(is_last=is_last):
            batch, num_rows = make()
            self.forward_backward(
                Part(batch, num_rows, is_last=is_last, is_trial=True, statistics=statistics)
            )

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return the limits as plain values; the script saves the random numbers."""
        return {"sizer": self.sizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; the bound of a later search is kept.

        Raises:
            SettingError: the state does not belong to a step.
        """
        check_state(state, ("sizer",), owner="a step")
        self.sizer.load_search(state["sizer"])
        self.sizer.load_state_dict(state["sizer"])


class LabelShares(Weighting[list[Any]]):
    """Makes the parts of a batch with their shares, and collects the function's results.

    Args:
        step: runs the parts.
        rows: rows of this rank.
    """

    def __init__(self, step: PartStep, rows: BatchSource) -> None:
        self._step = step
        self._rows = rows
        self.drop()

    def drop(self) -> None:
        """Free the parts, statistics and results of a failed attempt."""
        self._parts: list[Part | None] = []
        self._sums: Mapping[str, Any] = {}
        self._results: list[Any] = []

    def divide(self, limit: MicroBatchLimit) -> list[MicroBatch]:
        """Divide the rows within a limit.

        Raises:
            SettingError: the limit is in tokens, and lengths of rows are not known.
        """
        if self._step.check.keeps_columns:
            self._rows = self._rows.uncut()
        rows = self._rows
        layout = self._step.sizer.layout
        if rows.is_packed:
            layout = replace(layout, kind="packed")
        needs_lengths = not layout.keeps_order(limit)
        if not needs_lengths and not rows.knows_lengths:
            # Reading lengths from tensors would wait for the device.
            width = rows.width
            pieces = split_by_rows(range(rows.num_rows), limit.amount)
            return [MicroBatch(piece, width) for piece in pieces]
        if rows.lengths is None:
            raise SettingError("micro_batch_tokens", "of a batch", _LENGTHS_REMEDY)
        return micro_batches(rows.lengths, limit, layout)

    def begin(self) -> None:
        """Make the parts with their shares and statistics, before the first backward.

        Raises:
            SettingError: the loss of the batch is not the sum of its parts' shares.
        """
        step = self._step
        # After an OOM here, this rank runs only the collectives, like a rank without rows.
        batches = step.prepare(self._make_batches) or []
        if step.num_micro_batches == 1 and not step.counts_over_ranks:
            all_rows = range(self._rows.num_rows)
            # None: without a batch, this rank runs only the collectives of the part.
            self._parts = [Part(batch, len(all_rows), rows=all_rows) for batch in batches] or [None]
        else:
            kept_columns_before = step.check.keeps_columns
            # Its check of the split may find that parts must keep all columns.
            self._parts = self._parts_with_shares(batches)
            if step.check.keeps_columns and not kept_columns_before:
                # Parts are wider now and may not fit, so divide the rows again, at most once.
                step.divide_rows(self)
                self.begin()
                return
        if step.statistics is not None:
            self._sums = step.statistics.of_batch(self._rows, self._parts)

    def _make_batches(self) -> list[Any]:
        return [self._rows.part(micro_batch.rows) for micro_batch in self._step.micro_batches]

    def _parts_with_shares(self, batches: Sequence[Any]) -> list[Part | None]:
        """Return the parts with their shares of the labels, 0 without labels; None for parts that
        only other ranks have.
        """
        step = self._step
        own = step.micro_batches
        # Labels of each part without and with the first label of each row.
        candidates = [
            step.labels.candidates(batch, len(micro_batch.rows))
            # After an OOM, this rank has no batches.
            for batch, micro_batch in zip(batches, own, strict=False)
        ]
        if step.num_micro_batches > 1:
            # The check decides which of the two counts is right.
            step.check.check(self._rows, own, candidates, num_parts=step.num_micro_batches)
        counts = [step.check.count(*labels) for labels in candidates]
        total: float = sum(counts)
        if step.counts_over_ranks:
            # FSDP takes the mean over ranks.
            total = sum(distributed.all_gather(total)) / distributed.world_size()
        if candidates and not total:
            message = "a batch has no labels, so its parts do not run"
            step.check.warn("labels", message, on_each_rank=True)
        # A part without labels runs no loss, but its statistics may count.
        with_labels = [number for number, count in enumerate(counts) if count]
        parts: list[Part | None] = [None] * step.num_micro_batches
        for number, (batch, count) in enumerate(zip(batches, counts, strict=True)):
            rows = own[number].rows
            part = Part(batch, len(rows), rows=rows)
            if len(own) > 1 or step.counts_over_ranks:
                part = part._replace(
                    share=count / total if count else 0.0,
                    is_first=bool(with_labels) and number == with_labels[0],
                    is_last=bool(with_labels) and number == with_labels[-1],
                )
            parts[number] = part
        return parts

    def run(self, micro_batch: MicroBatch | None, is_last: bool, /) -> None:
        """Call the function with the next part, or with a dummy of share 0 if other ranks wait."""
        # Remove the part, so that it is freed before the next one runs.
        part = self._parts.pop(0)
        forward_backward = self._step.forward_backward
        if part is not None and part.share:
            self._results.append(forward_backward(part._replace(statistics=self._sums)))
        elif self._step.sharding.needs_dummy(is_last=is_last):
            dummy = Part(self._rows.dummy(), 1, share=0.0, is_first=False, is_last=is_last)
            forward_backward(dummy._replace(statistics=self._sums))

    def end(self) -> list[Any]:
        """Return the function's results of the parts with labels."""
        if distributed.any_of_ranks(self._step.attempts.error is not None):
            raise OutOfMemoryElsewhereError
        return self._results


class BatchStatistics:
    """Sums the results of a function over the parts of a batch, in a pass without gradients before
    the first backward.

    The model stays in training mode. Random numbers and persistent buffers are restored afterwards,
    so that the forward of the loss draws the same numbers.

    Args:
        function: ``function(part)`` returns a mapping of names to numbers or tensors.
        step: runs the parts of a batch.
    """

    # Kind of micro-batch, which identifies its collectives: the function may run the model less
    # often than the loss does.
    KIND = "statistics"

    def __init__(self, function: Callable[[Part], Mapping[str, Any]], step: PartStep) -> None:
        self._function = function
        self._step = step

    def of_part(self, part: Part) -> Mapping[str, Any]:
        """Return the statistics of a part.

        Raises:
            SettingError: the function did not return a mapping.
        """
        with torch.no_grad():
            statistics = self._function(part._replace(batch=copy_containers(part.batch)))
        if not isinstance(statistics, Mapping):
            raise SettingError("statistics", type(statistics).__name__, _STATISTICS_REMEDY)
        return dict(statistics)

    def of_batch(self, rows: BatchSource, parts: Sequence[Part | None]) -> Mapping[str, Any]:
        """Return the sums over the parts of a batch. A collective.

        Args:
            rows: rows of the batch.
            parts: parts of the batch, the same number on all ranks; None for parts that only other
                ranks have.

        Raises:
            OutOfMemoryElsewhereError: a rank ran out of memory; all ranks raise it.
            SettingError: parts have different statistics.
        """
        step = self._step
        remaining = list(parts)

        def forward(_: MicroBatch | None) -> Mapping[str, Any]:
            part = remaining.pop(0)
            if part is None and step.sharding.needs_dummy(is_last=not remaining):
                part = Part(rows.dummy(), 1, share=0.0)
            return {} if part is None else self.of_part(part)

        restore = step.snapshot()
        results = step.run_forward(
            step.micro_batches,
            forward,
            number=step.num_micro_batches,
            evaluates=self.KIND,
            attempts=step.attempts,
        )
        restore()
        of_parts = [statistics for micro_batch, statistics in results if micro_batch is not None]
        if step.counts_over_ranks:
            # A gathered tensor would be on the device of the rank that sent it.
            on_host = [_moved(statistics, torch.device("cpu")) for statistics in of_parts]
            of_all_ranks = list(chain(*distributed.all_gather(on_host)))
            return _moved(self.sum_of(of_all_ranks), step.memory.device)
        if not of_parts:
            # This rank runs only dummies, whose loss has weight 0, so any statistics will do.
            of_parts = [statistics for _, statistics in results if statistics][:1]
        return self.sum_of(of_parts)

    @staticmethod
    def sum_of(statistics: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the sum over parts of each value by name.

        Raises:
            SettingError: parts have different names or shapes.
        """
        if not statistics:
            return {}
        total, *others = statistics
        for other in others:
            shapes, other_shapes = _shapes(total), _shapes(other)
            if shapes != other_shapes:
                problem = f"shapes {shapes} of one part and {other_shapes} of another"
                raise SettingError("statistics", problem, _STATISTICS_REMEDY)
            total = {name: value + other[name] for name, value in total.items()}
        return total


def _shapes(statistics: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(torch.as_tensor(value).shape) for name, value in statistics.items()}


def _moved(statistics: Mapping[str, Any], device: torch.device) -> Mapping[str, Any]:
    """Return statistics with their tensors on a device."""
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in statistics.items()
    }


class AdaptiveStep(PartStep):
    """Calls a function of your script for each part of a batch, with smaller parts after an OOM.

    Your script keeps its data, optimizer, learning rate and scaler. Autocast,
    ``scaler.scale(loss)``, ``accelerator.backward``, clipping and accumulation stay in the script.
    The step adds to existing gradients. The number of parts changes a gradient only by rounding.
    With one part, gradients are bit-for-bit identical to those of the script alone.

    After an OOM, the step restores gradients, RNG state and running statistics. Other side effects
    of `forward_backward`, such as metrics, happen in each attempt.

    On several ranks, shard the model with `fully_shard` or wrap it in DDP. All ranks call the step
    together and repeat it together.

    Args:
        model: model on its device. Do not add modules to it after the first step.
        forward_backward: function ``forward_backward(part)`` that runs forward and backward of
            ``part.batch`` and multiplies the mean loss by ``part.share``; see :class:`Part`. The
            step returns the results of this function.
        micro_batch_size: maximum number of rows in a part. ``auto``: the result of
            :meth:`find_bound`. None: the whole batch.
        micro_batch_tokens: maximum number of tokens in a part, including padding; or ``auto``. Give
            either this argument or `micro_batch_size`. The length of each row must be known (see
            :class:`RowsOfBatch`) or given by `split`.
        split: function that returns the :class:`SplitBatch` of a batch, for rows that belong
            together, such as pairs, and for tensors whose first dimension is not the rows. None
            splits each tensor by its first dimension.
        num_labels: function that returns the number of labels that the loss of a batch averages
            over. For a weighted mean, it returns the sum of their weights. None counts the
            ``labels`` that are not -100, or the rows of a batch without ``labels``. The check of
            the first split determines whether the first label of each row counts.
        statistics: function ``statistics(part)`` that returns a mapping of names to numbers or
            tensors. It runs on each part without gradients before the first backward.
            ``part.statistics`` then contains the sums over the parts; with
            ``count_labels_over="ranks"``, the sums over the parts of all ranks.
        options: options of a step.

    Attributes:
        model: model that trains.
        memory: memory of the model's device.
        sharding: FSDP or DDP modules of the model.
        sizer: limit of a part.
        is_trial: whether a trial or a check of a split is running instead of training.
        micro_batches: micro-batches of the last batch on this rank.
        num_micro_batches: number of micro-batches of the last batch, on the rank with the most.

    Raises:
        SettingError: an argument cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        forward_backward: Callable[[Part], Any],
        *,
        micro_batch_size: int | str | None = None,
        micro_batch_tokens: int | str | None = None,
        split: Callable[[Any], SplitBatch] | None = None,
        num_labels: Callable[[Any], Any] | None = None,
        statistics: Callable[[Part], Mapping[str, Any]] | None = None,
        options: StepOptions | None = None,
    ) -> None:
        options = instance_of(StepOptions, "options", options)
        options.check_of_step()
        for key, function in (
            ("forward_backward", forward_backward),
            ("split", split),
            ("num_labels", num_labels),
            ("statistics", statistics),
        ):
            if not callable(function) and (function is not None or key == "forward_backward"):
                raise SettingError(key, function, "give a function")
        if not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
            raise SettingError("model", type(model).__name__, "give an nn.Module with parameters")
        super().__init__(
            model,
            forward_backward,
            micro_batch_size=micro_batch_size,
            micro_batch_tokens=micro_batch_tokens,
            num_labels=num_labels,
            statistics=statistics,
            options=options,
            name=getattr(forward_backward, "__name__", type(forward_backward).__name__),
        )
        self._split_batch: RowSplitter | CustomSplit = (
            RowSplitter(trims=not is_compiled(model)) if split is None else CustomSplit(split)
        )

    @classmethod
    def of(
        cls, model: nn.Module, **arguments: Any
    ) -> Callable[[Callable[[Part], Any]], AdaptiveStep]:
        """Return a decorator that turns a `forward_backward` function into an AdaptiveStep."""

        def decorate(forward_backward: Callable[[Part], Any]) -> AdaptiveStep:
            return cls(model, forward_backward, **arguments)

        return decorate

    @property
    def max_batch_size(self) -> int | None:
        """Maximum number of rows that fit at once, found by :meth:`find_bound`; None before the
        search.
        """
        return self.sizer.max_batch_size

    # --- a step

    def __call__(self, batch: Any) -> list[Any]:
        """Run forward and backward of a batch, in parts that fit.

        Args:
            batch: batch of the script, on the host or on the device.

        Returns:
            The results of `forward_backward` for the parts with labels, in order.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            RankLostError: this rank ran out of memory and cannot notify the others; end the
                process.
            SettingError: the batch cannot be split, for example because its loss is not the sum
                of the weighted losses of its parts.
        """
        rows = self._split_batch(batch)
        try:
            return self.run_rows(rows, RankReport())
        finally:
            # Warn even if the step raises DoesNotFitError.
            if self.bound_excludes_gradients and self.num_micro_batches > 1:
                self.bound_excludes_gradients = False
                log.warning(
                    "a batch is split, but find_bound tried parts without the gradients of other"
                    " parts in memory: call it with batch_size="
                )

    # --- what fits

    def find_bound(
        self,
        optimizer: Optimizer,
        sample: Callable[[int], Any],
        *,
        device_memory: int | float | str | None = None,
        headroom: float | str = "auto",
        maximum: int = 4096,
        batch_size: int | None = None,
        accumulates: bool = False,
    ) -> ProbeResult:
        """Find the maximum number of rows whose whole training step fits, and limit parts to it.
        Weights, optimizer, gradients and RNG state are restored bit for bit.

        Args:
            optimizer: optimizer of the model's parameters.
            sample: function ``sample(n)`` that returns a collated batch of the `n` longest rows
                that training may have.
            device_memory: memory that a trial may use: a size such as ``"12GiB"``, or a fraction
                such as 0.9. None: the available memory.
            headroom: fraction of that memory that stays free; see :class:`ProbeOptions`.
            maximum: maximum number of rows to try.
            batch_size: number of rows in the batches of your script. If they do not fit at once,
                the search is repeated with the gradients of an earlier part in memory. None if they
                fit.
            accumulates: whether your script accumulates the gradients of several batches.

        Raises:
            DoesNotFitError: one row does not fit.
            SettingError: an argument cannot be used, or a configured size is above what fits.
        """
        options = ProbeOptions(device_memory, headroom, maximum)
        check_parameters(self.model, optimizer)
        if not callable(sample):
            raise SettingError("sample", sample, "give a function of a number of rows")
        if batch_size is not None:
            check_whole("batch_size", batch_size)
        check_bool("accumulates", accumulates)
        rows = LongestRows.of_sample(sample, self._split_batch.split_sample, self.memory.device)
        if self.sizer.limit().unit == "tokens" and not rows.length:
            raise SettingError("micro_batch_tokens", "auto", _LENGTHS_REMEDY)
        scope = SearchScope(
            rows, accumulates=accumulates or self.sizer.may_split, whole_step_rows=batch_size
        )
        try_sample = partial(self._try_sample, has_gradients=accumulates)
        return self.search(TriedStep(self, optimizer, try_sample), scope, options)

    def _try_sample(
        self, make_batch: Callable[[], Any], *, has_gradients: bool, is_last: bool = True
    ) -> None:
        """Run forward and backward of a batch as one part, in a trial.

        Args:
            make_batch: function that makes the batch.
            has_gradients: whether the gradients of earlier batches are in memory.
            is_last: whether gradients are reduced.
        """

        def make_whole() -> tuple[Any, int]:
            rows = self._split_batch.split_sample(make_batch())
            return rows.part(range(rows.num_rows)), rows.num_rows

        def try_whole() -> None:
            must_come = gradients_must_come(self.model, self.forward_backward)
            # Before the reduction, FSDP's parameters have no gradients to check.
            with must_come if is_last else nullcontext():
                self.try_part(make_whole, is_last=is_last)

        if not has_gradients:
            try_whole()
            return
        gradients = self.save_gradients()
        if self.sizer.may_split:
            # From the second part on, the gradients of the batch are in memory too.
            gradients.fill_new()
        try_whole()
        gradients.add_up()

    def estimate(
        self,
        optimizer: Optimizer,
        sample: Callable[[int], Any],
        devices: Any,
        *,
        maximum: int = 4096,
        context: int | None = None,
        headroom: int | float | str = "auto",
    ) -> MemoryEstimate:
        """Estimate how many rows of a sample fit in a training step on CUDA devices that are not
        available.

        Args:
            optimizer: optimizer of the model's parameters; the estimate creates its state.
            sample: function ``sample(n)`` as in :meth:`find_bound`.
            devices: one device or several: a name such as ``"H100"``, or a size such as
                ``"80GiB"``.
            maximum: maximum number of rows to estimate.
            context: bytes of the CUDA context on each device. None: 770 MiB on an H100 or H200, and
                500 MiB on other devices.
            headroom: memory that also stays free: a number of bytes, a size or a fraction; ``auto``
                as in :func:`adaptive_batch.estimate_memory`.

        Raises:
            SettingError: an argument cannot be used, or the model reads values of fake tensors.
        """
        from adaptive_batch.estimate import DevicesAsHost, estimate_step

        check_parameters(self.model, optimizer)
        if not callable(sample):
            raise SettingError("sample", sample, "give a function of a number of rows")
        # A model on the meta device draws no random numbers; the sample may.
        device = self.memory.device
        if device.type == "meta":
            device = torch.device("cpu")
        longest = length_in_sample(sample, self._split_batch.split_sample, device)

        def forward_backward(fake: FakeDevice, num_rows: int) -> None:
            with private.disable_current_modes():
                tensors = {"batch": sample(num_rows)}
            # FakeDevice.move_batch() replaces the tensors in place.
            fake.move_batch(tensors)
            with DevicesAsHost():
                part = Part(tensors["batch"], num_rows, is_trial=True)
                if self.statistics is not None:
                    part = part._replace(statistics=self.statistics.of_part(part))
                self.forward_backward(part)

        return estimate_step(
            self.model,
            optimizer,
            forward_backward,
            lambda: None,
            devices,
            sequence_length=max(1, longest),
            accumulates=self.sizer.may_split,
            maximum=check_whole("maximum", maximum),
            context=context,
            headroom=headroom,
        )
