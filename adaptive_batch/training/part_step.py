"""The step of a script, whose function runs forward and backward of each part of a batch.

Each part is weighted by its share of the labels, so that the gradients of the parts add up to those
of the batch. With a single part, gradients are bitwise equal to the script's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from adaptive_batch import distributed
from adaptive_batch._util import check_state
from adaptive_batch.data import MicroBatch, MicroBatchLayout, micro_batches, split_by_rows
from adaptive_batch.distributed import sharding_of
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import device_memory, expand_segments_in_script
from adaptive_batch.probe import ProbeResult

from .bound_search import ProbeOptions, SearchScope, TriedStep, find_limit
from .model_checks import check_ranks, is_compiled, is_replicated
from .oom_retry import OutOfMemoryElsewhereError
from .options import StepOptions, Terms
from .parts import BatchSource, LabelCounter, Part, copy_containers
from .sizing import ConfiguredSize, MicroBatchSizer
from .split_check import SplitCheck
from .step import MicroBatchPlan, RankReport, Step, StepSnapshot, Weighting

log = logging.getLogger("adaptive_batch")

LENGTHS_REMEDY = (
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
        statistics: computes the statistics of a batch.
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
        size = ConfiguredSize(
            micro_batch_size=micro_batch_size, micro_batch_tokens=micro_batch_tokens
        )
        device = next(model.parameters()).device
        expand_segments_in_script(device)
        memory = options.memory or device_memory(device, shared_by=distributed.local_world_size())
        sizer = MicroBatchSizer(
            size,
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
        )
        self.forward_backward = forward_backward
        self.name = name
        self.counts_over_ranks = (
            options.count_labels_over == "ranks" and distributed.world_size() > 1
        )
        self.labels = LabelCounter(num_labels)
        self.statistics = BatchStatistics(statistics, self)
        self.check = SplitCheck(self)
        self.bound_excludes_gradients = False
        # After an OOM, a rank can finish a micro-batch only if its collectives are recorded.
        self._records_collectives = (
            sharding.is_sharded and self.retry.retries and not is_compiled(model)
        )
        if sizer.waits_for_search:
            log.info("auto: batches are not split before a search has found the limit")

    def run_rows(self, rows: BatchSource, report: RankReport) -> list[Any]:
        """Run forward and backward of a batch, in parts that fit.

        Args:
            rows: rows of this rank.
            report: report of this rank to the others; its batch size is the largest number of rows
                on any rank.

        Returns:
            The function's result of each part with labels, in order.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            RankLostError: this rank ran out of memory and cannot notify the others.
            SettingError: the loss of the batch is not the sum of its parts' shares.
        """
        self.sizer.is_packed = rows.is_packed
        self.sizer.noun = rows.noun
        self.record_collectives_of(rows)
        weighting = LabelShares(self, rows)
        return self.run_step(weighting, self.agree_on_plan(weighting, report))

    def num_labels(self, batch: Any, num_rows: int) -> float:
        """Return the number of labels of a batch of `num_rows` rows, as shares count them."""
        return self.labels.count(batch, num_rows, counts_first=self.check.counts_first_label)

    # --- what fits

    def search(self, tried: TriedStep, scope: SearchScope, options: ProbeOptions) -> ProbeResult:
        """Find the most rows that fit, and limit micro-batches to them; see :func:`find_limit`."""
        results = find_limit(tried, scope, options, sizer=self.sizer)
        fits_whole = results[-1].max_batch_size >= (scope.whole_step_rows or 0)
        self.bound_excludes_gradients = fits_whole and not scope.accumulates
        return results[-1]

    def record_collectives_of(self, rows: BatchSource) -> None:
        """Run one row as a trial, once, to record its collectives before an OOM."""
        if not self._records_collectives:
            return
        self._records_collectives = False

        def run() -> None:
            for is_last in (False, True):
                self.try_part(lambda: (rows.dummy(), 1), is_last=is_last)

        self.record_collectives(run, MicroBatch([0], 1))

    def try_part(self, make: Callable[[], tuple[Any, int]], *, is_last: bool = True) -> None:
        """Run a batch as one part in a trial, and drop its result.

        Args:
            make: function that returns the batch and its number of rows. It runs inside the trial,
                which measures the memory of the batch too.
            is_last: whether gradients are reduced.
        """
        statistics: Mapping[str, Any] = {}
        if self.statistics.are_needed:
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
        self._given_rows = rows
        self.drop()

    @property
    def _rows(self) -> BatchSource:
        # The check may have found after construction that parts must keep all columns.
        return self._given_rows.uncut() if self._step.check.keeps_columns else self._given_rows

    def drop(self) -> None:
        """Free the parts, statistics and results of a failed attempt."""
        self._parts: list[Part | None] = []
        self._sums: Mapping[str, Any] = {}
        self._results: list[Any] = []

    def divide(self) -> list[MicroBatch]:
        """Divide the rows within the limit.

        Raises:
            SettingError: the limit is in tokens, and lengths of rows are not known.
        """
        rows = self._rows
        layout = self._step.sizer.layout
        if rows.is_packed:
            layout = layout.of_kind("packed", time=layout.time)
        limit = self._step.sizer.limit_of_step
        if rows.knows_lengths or not layout.keeps_order(limit):
            if rows.lengths is None:
                raise SettingError("micro_batch_tokens", "of a batch", LENGTHS_REMEDY)
            return micro_batches(rows.lengths, limit, layout)
        width = rows.width
        pieces = split_by_rows(range(rows.num_rows), limit.amount)
        return [MicroBatch(piece, width) for piece in pieces]

    def begin(self, plan: MicroBatchPlan) -> MicroBatchPlan:
        """Make the parts with their shares and statistics, before the first backward.

        Returns:
            The plan; another one if the split check finds that parts must keep all columns.

        Raises:
            SettingError: the loss of the batch is not the sum of its parts' shares.
        """
        step = self._step
        rows = self._rows
        own = plan.micro_batches
        # After an OOM here, this rank runs only the collectives, like a rank without rows.
        batches = step.retry.prepare(lambda: [rows.part(each.rows) for each in own]) or []
        if plan.number == 1 and not step.counts_over_ranks:
            self._parts = [Part(batch, rows.num_rows) for batch in batches] or [None]
        else:
            kept_columns = step.check.keeps_columns
            self._parts = self._parts_with_shares(plan, batches)
            if step.check.keeps_columns and not kept_columns:
                return self.begin(
                    MicroBatchPlan.agreed(self.divide(), stop_requested=plan.stop_requested)
                )
        if step.statistics.are_needed:
            self._sums = step.statistics.of_batch(rows, self._parts, plan)
        return plan

    def _parts_with_shares(self, plan: MicroBatchPlan, batches: Sequence[Any]) -> list[Part | None]:
        """Return the parts with their shares of the labels, 0 without labels; None for parts that
        only other ranks have.
        """
        step = self._step
        own = plan.micro_batches
        counts = [
            step.labels.candidates(batch, len(micro_batch.rows))
            for batch, micro_batch in zip(batches, own, strict=False)
        ]
        if plan.number > 1:
            step.check.check(self._rows, own, counts, num_parts=plan.number)
        labels = [count[step.check.counts_first_label] for count in counts]
        total: float = sum(labels)
        if step.counts_over_ranks:
            # FSDP takes the mean over ranks.
            total = sum(distributed.all_gather(total)) / distributed.world_size()
        with_labels = [number for number, count in enumerate(labels) if count]
        parts: list[Part | None] = [None] * plan.number
        for number, (batch, count) in enumerate(zip(batches, labels, strict=True)):
            part = Part(batch, len(own[number].rows))
            if len(own) > 1 or step.counts_over_ranks:
                # A part without labels runs no loss, but its statistics may count.
                part = part._replace(
                    share=count / total if count else 0.0,
                    is_first=number in with_labels[:1],
                    is_last=number in with_labels[-1:],
                )
            parts[number] = part
        return parts

    def run(self, micro_batch: MicroBatch | None, is_last: bool, /) -> None:
        """Call the function with the next part, or with a dummy of share 0 if other ranks wait."""
        # Remove the part, so that it is freed before the next one runs.
        part = self._parts.pop(0)
        function = self._step.forward_backward
        if part is not None and part.share:
            self._results.append(function(part._replace(statistics=self._sums)))
        elif self._step.sharding.needs_dummy(is_last=is_last):
            function(
                Part(
                    self._rows.dummy(),
                    1,
                    share=0.0,
                    is_first=False,
                    is_last=is_last,
                    statistics=self._sums,
                )
            )

    def end(self) -> list[Any]:
        """Return the function's results of the parts with labels."""
        if distributed.any_of_ranks(self._step.retry.has_failed):
            raise OutOfMemoryElsewhereError
        return self._results


class BatchStatistics:
    """Sums the results of a function over the parts of a batch, in a pass without gradients before
    the first backward.

    The model stays in training mode. Random numbers and persistent buffers are restored afterwards,
    so that the forward of the loss draws the same numbers.

    Args:
        function: ``function(part)`` returns a mapping of names to numbers or tensors; None without
            statistics.
        step: runs the parts of a batch.
    """

    # Kind of micro-batch, which identifies its collectives: the function may run the model less
    # often than the loss does.
    KIND = "statistics"

    def __init__(
        self, function: Callable[[Part], Mapping[str, Any]] | None, step: PartStep
    ) -> None:
        self._function = function
        self._step = step
        self._snapshot = StepSnapshot(step.model, step.memory.device)

    @property
    def are_needed(self) -> bool:
        """True if there is a function."""
        return self._function is not None

    def of_part(self, part: Part) -> Mapping[str, Any]:
        """Return the statistics of a part; empty without a function.

        Raises:
            SettingError: the function did not return a mapping.
        """
        if self._function is None:
            return {}
        with torch.no_grad():
            statistics = self._function(part._replace(batch=copy_containers(part.batch)))
        if not isinstance(statistics, Mapping):
            raise SettingError("statistics", type(statistics).__name__, _STATISTICS_REMEDY)
        return dict(statistics)

    def of_batch(
        self, rows: BatchSource, parts: Sequence[Part | None], plan: MicroBatchPlan
    ) -> Mapping[str, Any]:
        """Return the sums over the parts of a batch. A collective.

        Args:
            rows: rows of the batch.
            parts: parts of the batch, the same number on all ranks; None for parts that only other
                ranks have.
            plan: their micro-batches.

        Raises:
            OutOfMemoryElsewhereError: a rank ran out of memory; all ranks raise it.
            SettingError: parts have different statistics.
        """
        remaining = list(parts)

        def forward(_: MicroBatch | None) -> Mapping[str, Any]:
            part = remaining.pop(0)
            if part is None and self._step.sharding.needs_dummy(is_last=not remaining):
                part = Part(rows.dummy(), 1, share=0.0)
            return {} if part is None else self.of_part(part)

        restore = self._snapshot.take()
        results = self._step.run_forward(plan, forward, retry=self._step.retry, evaluates=self.KIND)
        restore()
        of_parts = [statistics for micro_batch, statistics in results if micro_batch is not None]
        if self._step.counts_over_ranks:
            on_host = [_moved(statistics, torch.device("cpu")) for statistics in of_parts]
            of_all_ranks = list(chain(*distributed.all_gather(on_host)))
            return _moved(self.sum_of(of_all_ranks), self._step.memory.device)
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
            if other.keys() != total.keys():
                value = f"{sorted(total)} of one part and {sorted(other)} of another"
                raise SettingError("statistics", value, _STATISTICS_REMEDY)
            for name in total:
                shapes = [tuple(torch.as_tensor(each[name]).shape) for each in (total, other)]
                if shapes[0] != shapes[1]:
                    value = f"{name} of shape {shapes[0]} in one part and {shapes[1]} in another"
                    raise SettingError("statistics", value, _STATISTICS_REMEDY)
            total = {name: value + other[name] for name, value in total.items()}
        return total


def _moved(statistics: Mapping[str, Any], device: torch.device) -> Mapping[str, Any]:
    """Return statistics with their tensors on a device."""
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in statistics.items()
    }
