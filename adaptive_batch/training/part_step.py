"""A step of a script: its function runs on parts of a batch, each with its share of the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from adaptive_batch.data import MicroBatch

from .agreement import RankReport
from .batch_statistics import STATISTICS, BatchStatistics
from .label_shares import LabelShares
from .model_checks import is_compiled
from .options import Terms
from .parts import BatchSource, LabelCounter, Part
from .sizing import MicroBatchSizer
from .split_check import SplitCheck
from .step import Step


class PartStep(Step):
    """Runs a script's function on the parts of a batch: divided alike on all ranks, checked before
    the first split, and again where memory runs out.

    Args:
        model: model whose gradients are summed.
        forward_backward: function that runs forward and backward of a part.
        sizer: decides what a part may hold.
        terms: names of the caller's API, for errors.
        num_labels: function that returns the labels of a batch; see :class:`.AdaptiveStep`.
        statistics: function that returns statistics of a part; see :class:`.AdaptiveStep`.
        counts_over_ranks: whether labels and statistics are those of all ranks.
        event: function that writes down what was compiled again; see :class:`.CompilationLog`.
        options: see :class:`Step`.

    Attributes:
        forward_backward, terms: as given.
    """

    def __init__(
        self,
        model: nn.Module,
        forward_backward: Callable[[Part], Any],
        sizer: MicroBatchSizer,
        *,
        terms: Terms,
        num_labels: Callable[[Any], Any] | None,
        statistics: Callable[[Part], Mapping[str, Any]] | None,
        counts_over_ranks: bool,
        event: Callable[..., object],
        **options: Any,
    ) -> None:
        super().__init__(model, sizer, **options)
        self.forward_backward = forward_backward
        self.terms = terms
        self._event = event
        self._counts_over_ranks = counts_over_ranks
        self._labels = LabelCounter(num_labels)
        self._statistics = BatchStatistics(statistics, self, over_ranks=counts_over_ranks)
        self._check = SplitCheck(
            self,
            forward_backward,
            self._labels,
            self._statistics,
            terms=terms,
            name=getattr(forward_backward, "__name__", type(forward_backward).__name__),
        )
        # A rank can be brought to the end of a micro-batch whose collectives are known.
        self._records_collectives = (
            self.sharding.is_sharded and self.retry.retries and not is_compiled(model)
        )

    def run(self, rows: BatchSource, report: RankReport) -> list[Any]:
        """Run forward and backward of a batch; see :meth:`.AdaptiveStep.__call__`.

        Args:
            rows: rows of this rank.
            report: what this rank reports to the others; its batch size is the rows of the step on
                the rank that has most.
        """
        self.sizer.is_packed = rows.is_packed
        self.sizer.noun = rows.noun
        self.record_collectives_of(rows)
        weighting = LabelShares(
            self,
            self.forward_backward,
            rows,
            labels=self._labels,
            statistics=self._statistics,
            check=self._check,
            counts_over_ranks=self._counts_over_ranks,
        )
        results = self.run_step(weighting, self.agree(weighting, report))
        self.compilations.log_new(self._event)
        return results

    def num_labels(self, batch: Any, num_rows: int) -> float:
        """Return the labels of a batch of `num_rows` rows, as a part's share counts them."""
        return self._labels.count(batch, num_rows, counts_first=self._check.counts_first_label)

    def run_alone(self, part: Part) -> None:
        """Run a part that is the whole batch, with its own statistics."""
        statistics = self._statistics.of_part(part)
        self.forward_backward(part._replace(statistics=statistics))

    # --- trials

    def record_collectives_of(self, rows: BatchSource) -> None:
        """Run one row as a trial, to record collectives before a micro-batch can fail."""
        if not self._records_collectives:
            return
        self._records_collectives = False

        def run() -> None:
            for is_last in (False, True):
                self.try_part(lambda: (rows.dummy(), 1), is_last=is_last)

        self.record_collectives(run, MicroBatch([0], 1))

    def try_part(self, make: Callable[[], tuple[Any, int]], *, is_last: bool = True) -> None:
        """Run a batch as one part, as a trial, and forget what it returned.

        Args:
            make: function that makes the batch, which is part of what is tried, and returns it with
                the number of its rows.
            is_last: whether gradients are reduced.
        """
        statistics = {}
        if self._statistics.are_needed:
            with self.trial(evaluates=STATISTICS):
                batch, num_rows = make()
                statistics = self._statistics.of_part(Part(batch, num_rows, is_trial=True))
                # Made again below, where its memory is part of what is tried.
                del batch
        with self.trial(is_last=is_last):
            batch, num_rows = make()
            self.forward_backward(
                Part(batch, num_rows, is_last=is_last, is_trial=True, statistics=statistics)
            )
