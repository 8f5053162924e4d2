"""Runs a function on each part of a batch that fits, each with its share of the loss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatch, micro_batches, split_by_rows
from adaptive_batch.errors import SettingError

from .agreement import Division, Question
from .batch_statistics import STATISTICS, BatchStatistics
from .model_checks import has_batch_norm, is_compiled
from .oom_retry import OutOfMemoryElsewhereError
from .options import Terms
from .parts import LabelCounter, Part, Splittable
from .split_check import SplitCheck
from .step_runner import StepRunner

log = logging.getLogger("adaptive_batch")

LENGTHS_REMEDY = (
    "nothing shows the tokens of a row; give split=, whose SplitBatch has lengths, or"
    " micro_batch_size"
)

# What a rank without rows runs, as errors name it.
_IDLE = MicroBatch([0], 1)


class PartRunner:
    """Runs a script's function on the parts of a batch: divided alike on all ranks, checked before
    the first split, and again where memory runs out.

    Args:
        forward_backward: function that runs forward and backward of a part.
        runner: agrees with other ranks, and retries.
        terms: names of the caller's API, for errors.
        num_labels: function that returns the labels of a batch; see :class:`.AdaptiveStep`.
        statistics: function that returns statistics of a part; see :class:`.AdaptiveStep`.
        counts_over_ranks: whether labels and statistics are those of all ranks.
        event: function that writes down what was compiled again; see :class:`.CompilationLog`.

    Attributes:
        runner, terms: as given.
        pieces: rows of each part of the last batch, on this rank.
        num_pieces: parts of the last batch, on the rank that has most.
    """

    def __init__(
        self,
        forward_backward: Callable[[Part], Any],
        runner: StepRunner,
        *,
        terms: Terms,
        num_labels: Callable[[Any], Any] | None,
        statistics: Callable[[Part], Mapping[str, Any]] | None,
        counts_over_ranks: bool,
        event: Callable[..., object],
    ) -> None:
        self.runner = runner
        self.terms = terms
        self.pieces: list[MicroBatch] = []
        self.num_pieces = 0
        self._forward_backward = forward_backward
        self._event = event
        self._sharding = runner.sharding
        self._counts_over_ranks = counts_over_ranks
        self._labels = LabelCounter(num_labels)
        self._statistics = BatchStatistics(statistics, runner, over_ranks=counts_over_ranks)
        self._check = SplitCheck(
            runner,
            forward_backward,
            self._labels,
            self._statistics,
            terms=terms,
            name=getattr(forward_backward, "__name__", type(forward_backward).__name__),
        )
        # A rank can be brought to the end of a micro-batch whose collectives are known.
        self._learns_collectives = (
            self._sharding.is_sharded and runner.retry.retries and not is_compiled(runner.model)
        )
        self._has_split = False

    def run(self, rows: Splittable, question: Question) -> list[Any]:
        """Run a batch that is ready to be split; the rest as when called with a batch.

        Args:
            rows: rows of this rank.
            question: what this rank says of the step to the others; its batch size is the rows of
                the step on the rank that has most.
        """
        self.runner.retry.is_packed = rows.is_packed
        self.learn_collectives(rows)
        divide = partial(self._divide, rows)
        division = self.runner.agree_on(divide, question)
        results = self.runner.run_step(partial(self._attempt, rows), divide, division)
        self.runner.compilations.log_new(self._event)
        return results

    def _divide(self, rows: Splittable) -> list[MicroBatch]:
        if self._check.keeps_columns:
            rows = rows.uncut()
        limit = self.runner.sizer.limit_of_step
        if rows.knows_lengths or not self.runner.sizer.layout.keeps_order(limit):
            if rows.lengths is None:
                raise SettingError("micro_batch_tokens", "of a batch", LENGTHS_REMEDY)
            return micro_batches(rows.lengths, limit, self.runner.sizer.layout)
        width = rows.width
        pieces = split_by_rows(range(rows.num_rows), limit.amount)
        return [MicroBatch(piece, length=width) for piece in pieces]

    def _attempt(self, rows: Splittable, division: Division) -> list[Any]:
        """Run the parts of a batch, on all ranks as many."""
        self.pieces = division.pieces
        self.num_pieces = division.num_pieces
        if not self.num_pieces:
            return []
        if self.num_pieces > 1 and not self._has_split:
            self._has_split = True
            if has_batch_norm(self.runner.model):
                log.warning(
                    "the model has BatchNorm, whose statistics are those of a micro-batch: a split"
                    " changes results"
                )
        keeps_columns = self._check.keeps_columns
        if keeps_columns:
            rows = rows.uncut()
        parts = self._parts(rows, self.pieces, self.num_pieces)
        if self._check.keeps_columns and not keeps_columns:
            return self._attempt(rows, Division.agreed(self._divide(rows)))
        statistics = self._statistics.of_batch(rows, parts, self.pieces)
        results = []

        def run(piece: MicroBatch | None, is_last: bool) -> None:
            # The last reference but the function's own, so that its memory is free when the next
            # one runs.
            part = parts.pop(0)
            if part is not None and part.share:
                if statistics:
                    part = part._replace(statistics=statistics)
                results.append(self._forward_backward(part))
            elif self._sharding.needs_dummy(is_last=is_last):
                dummy = Part(
                    rows.dummy(),
                    1,
                    share=0.0,
                    is_first=False,
                    is_last=is_last,
                    statistics=statistics,
                )
                self._forward_backward(dummy)

        self.runner.run_micro_batches(division, run, idle=_IDLE)
        if distributed.any_of_ranks(self.runner.retry.has_failed):
            raise OutOfMemoryElsewhereError
        return results

    def _parts(
        self, rows: Splittable, pieces: Sequence[MicroBatch], num_pieces: int
    ) -> list[Part | None]:
        """Return the parts with their shares, counted before the first backward: 0 of one that has
        no label. None where this rank has fewer than others.
        """

        def make() -> list[Any]:
            return [rows.part(piece.rows) for piece in pieces]

        over_ranks = self._counts_over_ranks
        # Where this rank has no memory for them, it takes part in what ranks do together as one
        # without rows.
        batches = self.runner.retry.prepare(make) or []
        if num_pieces == 1 and not over_ranks:
            return [Part(batch, rows.num_rows) for batch in batches] or [None]
        counts = [
            self._labels.candidates(batch, len(piece.rows))
            for batch, piece in zip(batches, pieces, strict=False)
        ]
        if num_pieces > 1:
            self._check.check(rows, pieces, counts, num_parts=num_pieces)
        labels = [count[self._check.counts_first_label] for count in counts]
        total: float = sum(labels)
        if over_ranks:
            # FSDP takes the mean over ranks.
            total = sum(distributed.all_gather(total)) / distributed.world_size()
        labelled = [number for number, count in enumerate(labels) if count]
        parts: list[Part | None] = [None] * num_pieces
        for number, (batch, count) in enumerate(zip(batches, labels, strict=True)):
            num_rows = len(pieces[number].rows)
            if len(pieces) == 1 and not over_ranks:
                parts[number] = Part(batch, num_rows)
            elif count:
                parts[number] = Part(
                    batch,
                    num_rows,
                    share=count / total,
                    is_first=number == labelled[0],
                    is_last=number == labelled[-1],
                )
            else:
                # No loss is run of it, but statistics may count something else than labels.
                parts[number] = Part(batch, num_rows, share=0.0, is_first=False, is_last=False)
        return parts

    def learn_collectives(self, rows: Splittable) -> None:
        """Run once, so that even the first micro-batch can fail on one rank and come to its end."""
        if not self._learns_collectives:
            return
        self._learns_collectives = False

        def run() -> None:
            for is_last in (False, True):
                self.try_part(lambda: (rows.dummy(), 1), is_last=is_last)

        self.runner.learn_collectives(run, _IDLE)

    def num_labels(self, batch: Any, num_rows: int) -> float:
        """Return the labels of a batch of so many rows, as a part's share counts them."""
        return self._labels.count(batch, num_rows, counts_first=self._check.counts_first_label)

    def try_part(self, make: Callable[[], tuple[Any, int]], *, is_last: bool = True) -> None:
        """Run a batch as one part, as a trial, and forget what it returned.

        Args:
            make: function that makes the batch, which is part of what is tried, and returns it with
                the number of its rows.
            is_last: whether gradients are reduced.
        """
        statistics = {}
        if self._statistics.are_needed:
            with self.runner.trial(evaluates=STATISTICS):
                batch, num_rows = make()
                statistics = self._statistics.of_part(Part(batch, num_rows, is_trial=True))
                # Made again below, where its memory is part of what is tried.
                del batch
        with self.runner.trial(is_last=is_last):
            batch, num_rows = make()
            self._forward_backward(
                Part(batch, num_rows, is_last=is_last, is_trial=True, statistics=statistics)
            )

    def run_alone(self, part: Part) -> None:
        """Run a part that is the whole batch, with its own statistics."""
        statistics = self._statistics.of_part(part)
        self._forward_backward(part._replace(statistics=statistics))
