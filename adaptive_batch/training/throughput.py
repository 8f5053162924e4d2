"""Search for the layout and size of micro-batches that train the most real tokens per second.

The largest size that fits is rarely the fastest: beyond some size, more tokens at once hardly help,
while uneven rows need more padding. A few sizes of each layout run the same steps in turn, and the
time of their micro-batches decides.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import itemgetter, mul
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from adaptive_batch import distributed
from adaptive_batch.data import (
    MicroBatch,
    MicroBatchLayout,
    MicroBatchLimit,
    MicroBatchTime,
    micro_batches,
)
from adaptive_batch.probe import DryRun, Throughput, TimedTrial

from .model_checks import Compilations, is_compiled

if TYPE_CHECKING:
    from .bound_search import SearchScope, TriedStep

log = logging.getLogger("adaptive_batch")

# Timed sizes of each layout, as shares of its largest one.
_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
# Rounds in which all sizes run in turn.
_ROUNDS = 4
# The timed rows have the tokens of this number of the largest micro-batches, or of one step if that
# has fewer.
_LARGEST_IN_SAMPLE = 2
# Minimum number of rows from which the timed rows are taken.
_SAMPLED_ROWS = 256
# Minimum number of timed tokens: the time of fewer is noise.
_MIN_TOKENS = 1024
# Rows of a pass that warms up a compiled model, and the maximum number of passes.
_WARM_ROWS = 8
_WARM_PASSES = 6
# Maximum number of compiled variants of a function in a layout: torch's default.
_MAX_VARIANTS = 8


class Candidate(NamedTuple):
    """A layout and a limit, and the micro-batches into which they divide the timed rows."""

    layout: MicroBatchLayout
    limit: MicroBatchLimit
    micro_batches: list[MicroBatch]

    @property
    def run_tokens(self) -> int:
        """Tokens of all micro-batches, padding included."""
        return sum(micro_batch.run_tokens for micro_batch in self.micro_batches)


class ThroughputSearch:
    """Finds the layout and limit whose micro-batches take the least time for the first rows of
    training.

    A compiled model first runs micro-batches of new shapes in each layout until nothing is
    compiled, so that no compilation is timed. A layout that keeps recompiling is not chosen, since
    training would recompile too.

    Args:
        tried: step of training that trials run.
        dry_run: entered dry run; measures and undoes trials.
        scope: candidate layouts, and rows of trials with an order of training.
        max_batch_size: the most rows of trials that fit at once.
    """

    def __init__(
        self,
        tried: TriedStep,
        dry_run: DryRun,
        scope: SearchScope,
        max_batch_size: int,
    ) -> None:
        assert scope.rows.in_order is not None, "timed rows need the order of training"
        self._tried = tried
        self._dry_run = dry_run
        self._kinds = scope.layouts
        self._in_order = scope.rows.in_order
        self._sizer = tried.engine.sizer
        self._longest = self._sizer.layout.padded(scope.rows.length)
        self._step_rows = scope.timed_rows or max_batch_size
        self._max_batch_size = max_batch_size
        self._rows = self._in_order(0, max(self._step_rows, _SAMPLED_ROWS))
        self._lengths = list(map(tried.row_length, self._rows))
        tokens_of_first_rows = list(accumulate(self._lengths))
        largest_tokens = max_batch_size * self._longest
        step_tokens = tokens_of_first_rows[self._step_rows - 1]
        timed_tokens = max(_MIN_TOKENS, min(_LARGEST_IN_SAMPLE * largest_tokens, step_tokens))
        # Lengths of the first rows, which are timed.
        self._timed_lengths = self._lengths[: bisect_left(tokens_of_first_rows, timed_tokens) + 1]

    def run(self) -> Throughput | None:
        """Time a few sizes of each layout, and return the fastest that fits; None if none fits, or
        all layouts keep recompiling.
        """
        began = time.perf_counter()
        layouts = [replace(self._sizer.layout, kind=kind) for kind in self._kinds]
        if is_compiled(self._tried.engine.model):
            layouts = list(filter(self._stops_compiling, layouts))
        candidates: list[Candidate] = []
        for layout in map(self._with_time_model, layouts):
            smallest, largest = self._limits(layout)
            for share in _SHARES:
                amount = max(smallest.amount, int(share * largest.amount))
                candidate = self._candidate(layout, replace(largest, amount=amount))
                # Two sizes may divide the steps alike.
                if all(candidate.micro_batches != each.micro_batches for each in candidates):
                    candidates.append(candidate)
        timed = self._time_in_turn(candidates)
        num_tokens = sum(self._timed_lengths)
        trials = tuple(
            TimedTrial(
                candidate.layout.kind,
                candidate.limit,
                tokens_per_second=num_tokens / seconds,
                padding=1 - num_tokens / candidate.run_tokens,
            )
            for candidate, seconds in timed
        )
        for (layout, limit, _), seconds in sorted(timed, key=itemgetter(1)):
            # The timed rows are shorter than the longest, so the choice may not fit.
            with self._sizer.trying(layout):
                trial = self._dry_run(layout.rows_within(limit, self._longest))
            if trial.fits:
                return Throughput(
                    layout.kind,
                    limit,
                    num_tokens / seconds,
                    layout.time,
                    trials,
                    seconds=time.perf_counter() - began,
                )
        return None

    def _limits(self, layout: MicroBatchLayout) -> tuple[MicroBatchLimit, MicroBatchLimit]:
        """Return the smallest and the largest useful limit of a layout that may fit."""
        unit = self._sizer.limit().unit if layout.kind == "padded" else "tokens"
        smallest = layout.amount(1, self._longest, unit=unit)
        # More than the largest whole step is of no use.
        step_amount = self._step_rows
        if unit == "tokens":
            step_amount = max(
                layout.run_tokens(self._lengths[begin : begin + self._step_rows])
                for begin in range(0, len(self._lengths), self._step_rows)
            )
        largest = max(smallest, min(self._max_batch_size * smallest, step_amount))
        return MicroBatchLimit(smallest, unit), MicroBatchLimit(largest, unit)

    def _stops_compiling(self, layout: MicroBatchLayout) -> bool:
        """Run new rows in micro-batches of a layout until nothing is compiled; return False if a
        function has too many variants.
        """
        smallest, largest = self._limits(layout)
        quarter = max(smallest.amount, largest.amount // 4)
        with Compilations() as compilations:
            for begin in range(0, _WARM_PASSES * _WARM_ROWS, _WARM_ROWS):
                rows = self._in_order(begin, _WARM_ROWS)
                lengths = list(map(self._tried.row_length, rows))
                number_before = compilations.number
                for amount in (quarter, largest.amount):
                    limit = replace(largest, amount=amount)
                    for micro_batch in micro_batches(lengths, limit, layout):
                        self._time(rows, layout, [micro_batch])
                most_variants = max(map(len, compilations.variants.values()), default=0)
                if distributed.any_of_ranks(most_variants > _MAX_VARIANTS):
                    log.info("%s micro-batches are excluded: they are recompiled", layout.kind)
                    return False
                if not distributed.any_of_ranks(compilations.number > number_before):
                    break
        return True

    def _with_time_model(self, layout: MicroBatchLayout) -> MicroBatchLayout:
        """Return a layout with the fixed time of a micro-batch and its time per token.

        They follow from the times of the smallest and of the largest micro-batches. A layout that
        needs no time model, or cannot be measured, is returned unchanged.
        """
        if layout.kind != "grouped":
            return layout
        timed = self._time_in_turn(
            [self._candidate(layout, limit) for limit in self._limits(layout)]
        )
        if len(timed) < 2:
            return layout
        (small, small_seconds), (large, large_seconds) = timed
        small_number, large_number = len(small.micro_batches), len(large.micro_batches)
        # Solve seconds = fixed * number + token * tokens for both.
        determinant = small_number * large.run_tokens - large_number * small.run_tokens
        if determinant <= 0:
            return layout
        fixed = (small_seconds * large.run_tokens - large_seconds * small.run_tokens) / determinant
        fixed = max(0.0, fixed)
        token = (small_seconds - fixed * small_number) / small.run_tokens
        return replace(layout, time=MicroBatchTime(fixed, token=max(token, 1e-12)))

    def _candidate(self, layout: MicroBatchLayout, limit: MicroBatchLimit) -> Candidate:
        """Divide the timed rows into steps, and these into micro-batches."""
        numbered = []
        for begin in range(0, len(self._timed_lengths), self._step_rows):
            step_lengths = self._timed_lengths[begin : begin + self._step_rows]
            for micro_batch in micro_batches(step_lengths, limit, layout):
                # The rows of a micro-batch are positions in its step.
                numbers = [begin + row for row in micro_batch.rows]
                numbered.append(replace(micro_batch, rows=numbers))
        return Candidate(layout, limit, numbered)

    def _time_in_turn(self, candidates: Sequence[Candidate]) -> list[tuple[Candidate, float]]:
        """Return the candidates that fit, each with its median seconds.

        Each round is normalized to the speed of the fastest round.
        """
        # Seconds of the rounds of each candidate that fits, by its number.
        timings: dict[int, list[float]] = {number: [] for number in range(len(candidates))}
        for _ in range(_ROUNDS):
            for number in list(timings):
                layout, _, batches = candidates[number]
                seconds = self._time(self._rows, layout, batches)
                if seconds is None:
                    del timings[number]
                else:
                    timings[number].append(seconds)
        round_seconds = [sum(seconds) for seconds in zip(*timings.values(), strict=True)]
        speeds = [min(round_seconds) / seconds for seconds in round_seconds]
        return [
            (candidates[number], median(map(mul, seconds_of_rounds, speeds)))
            for number, seconds_of_rounds in timings.items()
        ]

    def _time(
        self, rows: Sequence[Any], layout: MicroBatchLayout, batches: Sequence[MicroBatch]
    ) -> float | None:
        """Return the seconds of micro-batches of rows; None if they do not fit."""
        runs = [
            partial(
                self._tried.try_rows,
                [rows[row] for row in micro_batch.rows],
                is_last=micro_batch is batches[-1],
            )
            for micro_batch in batches
        ]
        with self._sizer.trying(layout):
            return self._dry_run.time_runs(runs)
