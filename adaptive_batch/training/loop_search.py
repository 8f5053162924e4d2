"""How many of a dataset's longest rows fit: trials of the steps that a loop will run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from adaptive_batch import distributed
from adaptive_batch.data import AdaptiveBatches, mean_rows
from adaptive_batch.distributed import reshard
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import RandomState
from adaptive_batch.probe import OBJECTIVES, ProbeResult

from .bound_search import BoundSearch, ProbeOptions, SearchScope
from .rate import AdaptiveRate
from .row_step import RowsOfStep, RowStep
from .throughput_search import Choices
from .trials import TriedStep, WorstRows


class LoopSearch:
    """Searches for the most of the longest rows whose whole training step fits, and knows what its
    trials have left out.

    Args:
        step: forward and backward of rows.
        optimizer: optimizer of the model's parameters.
        batches: batches that training takes.
        rate: learning rate of each step.
        seeks_batch_size: whether the first search finds the batch that training begins with.
    """

    def __init__(
        self,
        step: RowStep,
        optimizer: Optimizer,
        batches: AdaptiveBatches,
        rate: AdaptiveRate,
        *,
        seeks_batch_size: bool,
    ) -> None:
        self._step = step
        self._optimizer = optimizer
        self._batches = batches
        self._rate = rate
        self._seeks_batch_size = seeks_batch_size
        # Whether what fits was tried with the gradients of earlier micro-batches there.
        self._accumulates = False

    @property
    def _is_due(self) -> bool:
        return self._seeks_batch_size and self._step.sizer.max_batch_size is None

    def find_if_due(self) -> None:
        """Find the batch that training begins with, where it is sought and has not been found."""
        if self._is_due:
            self.find(ProbeOptions())

    def find(self, options: ProbeOptions) -> ProbeResult:
        """Find the most rows, and run no more at once; see :meth:`.AdaptiveLoop.find_bound`."""
        planner = self._batches.planner
        # Of a step that was left out: a trial is none of training's steps.
        self._rate.restore()
        reshard(self._step.step.parts.model)
        ranks = distributed.data_parallel_size()
        rows_of_epoch = max(1, planner.epochs.num_rows // ranks)
        options = replace(options, maximum=min(options.maximum, rows_of_epoch))
        step_rows = self._batches.rows_on_largest_rank(self._batches.batch_size)
        # On fewer ranks than training began with, even a rule's batch that is cut to the bound is
        # more rows than that.
        has_several = (
            planner.batching.grow_beyond_maximum
            or self._step.sizer.may_split
            or planner.ranks > ranks
        )
        # Reading a row of some datasets draws random numbers.
        with RandomState(self._step.step.memory.device):
            scope = SearchScope(
                self._worst_rows(),
                accumulates=has_several,
                whole_step_rows=step_rows,
                choices=self._choices(step_rows, options.objective),
            )
        try:
            result = self._search(scope, options)
            if scope.splits_step(result):
                scope = replace(scope, accumulates=True)
                result = self._search(scope, options)
        finally:
            self._step.dataset.forget()
        self._step.sizer.set_bound(result)
        self._accumulates = scope.accumulates
        if self._seeks_batch_size and not self._batches.progress.steps:
            planner.begin_with(result.batch_size)
        return result

    def _search(self, scope: SearchScope, options: ProbeOptions) -> ProbeResult:
        step = self._step
        parts = step.step.parts
        if scope.accumulates and step.keeps_gradients:
            # What is kept can be dropped once FSDP has run.
            parts.record_collectives_of(RowsOfStep(step, step.dataset.longest(1)))
        tried = TriedStep(
            parts,
            self._optimizer,
            self._try_rows,
            step.clip,
            row_length=step.dataset.length,
            keep_gradients=(
                partial(self._try_rows, is_last=False) if step.keeps_gradients else None
            ),
        )
        return BoundSearch(tried, scope, options).run()

    def _choices(self, timed_rows: int, objective: str) -> Choices | None:
        """Return what the fastest micro-batches are chosen from; None where as much at once as fits
        is wanted, or steps are cut as a saved state's were.
        """
        is_sought = self._step.chooses_fastest and OBJECTIVES[objective].needs_times
        if not is_sought or self._step.sizer.throughput is not None:
            return None
        batch_tokens = self._batches.planner.batching.batch_tokens
        if batch_tokens:
            timed_rows = mean_rows(batch_tokens, self._step.dataset.lengths)
        return Choices(self._step.layouts.kinds(), "tokens", timed_rows, objective)

    def _worst_rows(self) -> WorstRows:
        dataset = self._step.dataset
        numbers = self._batches.planner.epochs.order(self._batches.progress.at_epoch_start())
        (longest,) = dataset.longest(1)

        def in_order(begin: int, num_rows: int) -> list[Any]:
            places = torch.arange(begin, begin + num_rows) % len(numbers)
            return [dataset[row] for row in numbers[places].tolist()]

        return WorstRows(
            dataset.longest, dataset.length(longest), dataset.describe(longest), in_order
        )

    def _try_rows(self, rows: Sequence[Any], *, is_last: bool = True) -> None:
        self._step.step.parts.try_part(
            lambda: (self._step.make_batch(rows), len(rows)), is_last=is_last
        )

    def check_fits(self, num_rows: int) -> None:
        """Refuse a step of more rows than the bound, which was tried for steps of one micro-batch.

        Raises:
            SettingError: the bound has to be sought again.
        """
        if self._step.chooses_fastest and not self._step.sizer.tried_length:
            raise SettingError(
                "micro_batch_tokens", "auto", "call find_bound first, or give a number"
            )
        max_batch_size = self._step.sizer.max_batch_size
        if (
            max_batch_size is not None
            and num_rows > max_batch_size
            and not (self._accumulates or self._step.sizer.may_split)
        ):
            fits = (
                f"{max_batch_size} rows fit at once where no gradients are there yet, and from a"
                " step's second micro-batch on there are"
            )
            remedy = (
                f"{fits}; call find_bound again, which sees this batch, or give {max_batch_size}"
                " or less"
            )
            raise SettingError("batch_size", num_rows, remedy)

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return what fits, as plain values."""
        return {**self._step.step.state_dict(), "bound_accumulates": self._accumulates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; what was found since counts more."""
        has_found = self._step.sizer.max_batch_size is not None
        self._step.step.load_state_dict(state)
        if has_found:
            return
        self._accumulates = state["bound_accumulates"]
        if state["sizer"]["throughput"] and self._step.chooses_fastest:
            self._step.sizer.load_throughput(state["sizer"], kinds=self._step.layouts.kinds())
