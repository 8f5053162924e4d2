"""The search for the fastest micro-batches within what fits: rows of training, timed through the
code that training runs.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from adaptive_batch import distributed
from adaptive_batch.data import LAYOUT_KINDS, MicroBatchLayout, MicroBatchLimit, micro_batches
from adaptive_batch.probe import DryRun, FastestSearch, Pieces, Throughput, Trial

from .compilations import Compilation, Compilations, describe_all
from .model_checks import is_compiled
from .trials import LongestRows, TriedStep

log = logging.getLogger("adaptive_batch")

# What is timed holds so many of the largest micro-batches, of up to so many rows, or of a step.
_LARGEST_IN_SAMPLE = 3
_MOST_ROWS = 256
# Tokens of it, at least: the time of fewer is noise.
_LEAST_TOKENS = 1024
# Rows whose micro-batches are run at once until nothing is compiled any more, and how often.
_WARM_ROWS = 8
_WARM_PASSES = 6
# Variants of one function in a layout: as many as torch allows by default.
_MOST_VARIANTS = 8


@dataclass(frozen=True)
class Choices:
    """What the fastest micro-batches are chosen from.

    Attributes:
        kinds: of layouts.
        unit: of a padded limit, ``rows`` or ``tokens``; others are by tokens.
        timed_rows: of a step on one device, whose micro-batches are timed; 0 for as many as fit.
    """

    kinds: Sequence[str]
    unit: str
    timed_rows: int


def kinds_to_choose_from(
    why_unfit: Callable[[str], str], *, configured: str | None, uniform: str | None = None
) -> tuple[str, ...]:
    """Return the kinds of layouts that a configuration leaves to choose from; ranks ask together.

    Args:
        why_unfit: function that returns why a kind that does not pad would not train the model as
            padded rows do; empty where it would.
        configured: kind that is configured; None leaves the choice.
        uniform: what all micro-batches have alike, see :class:`.MicroBatchLayout`.
    """
    if configured or uniform:
        return (configured or "padded",)
    return tuple(
        kind
        for kind, layout in LAYOUT_KINDS.items()
        if (layout.pads and layout.sorts) or (not layout.pads and not why_unfit(kind))
    )


class ThroughputSearch:
    """Finds what trains most real tokens a second.

    Of a compiled model each layout first runs micro-batches of ever new shapes until nothing is
    compiled any more, so that no compilation is timed. A layout that is still compiled again for
    new shapes is not chosen, as training would be, too.

    Args:
        tried: step of training that trials run.
        dry_run: entered; measures and undoes what runs.
        choices: layouts to choose from.
        worst: rows of trials, with those of training in their order.
        max_batch_size: the most of the longest rows that fit at once.
    """

    def __init__(
        self,
        tried: TriedStep,
        dry_run: DryRun,
        choices: Choices,
        worst: LongestRows,
        max_batch_size: int,
    ) -> None:
        assert worst.in_order is not None, "rows of no order are not trained on"
        self._began = time.perf_counter()
        self._tried = tried
        self._dry_run = dry_run
        self._choices = choices
        self._in_order = worst.in_order
        self._layout = tried.engine.sizer.layout
        self._longest = self._layout.padded(worst.length)
        self._step_rows = choices.timed_rows or max_batch_size
        self._max_batch_size = max_batch_size
        self._rows = self._in_order(0, max(self._step_rows, _MOST_ROWS))
        self._lengths = list(map(tried.row_length, self._rows))
        self._compilations = Compilations()
        self._compiled: list[Compilation] = []

    def __call__(self) -> Throughput | None:
        """Find it; None if nothing fits, or if all layouts are compiled again for new shapes."""
        layouts = [replace(self._layout, kind=kind) for kind in self._choices.kinds]
        if is_compiled(self._tried.engine.model):
            layouts = [layout for layout in layouts if self._settles(layout)]
            log.info("before micro-batches are timed: %s", describe_all(self._compiled))
        of_step = self._dry_run.time(
            [partial(self._tried.try_rows, self._rows[:1]), self._tried.step]
        )
        if of_step is None:
            return None
        search = FastestSearch(
            self._time,
            steps=self._sample(layouts),
            layouts=layouts,
            limits=self._limits,
            step_seconds=of_step[1],
        )
        for found in search():
            trial = self._try_largest(found)
            if trial.fits:
                return replace(
                    found.with_peak(trial.peak_bytes),
                    seconds=time.perf_counter() - self._began,
                    compile_seconds=sum(compilation.seconds for compilation in self._compiled),
                )
        return None

    def _sample(self, layouts: Sequence[MicroBatchLayout]) -> list[list[int]]:
        """Return the lengths of the rows of the first steps that are timed."""
        largest = [self._limits(layout)[1] for layout in layouts]
        fills = [
            limit.amount * (1 if limit.unit == "tokens" else self._longest) for limit in largest
        ]
        tokens = max([_LEAST_TOKENS, *(_LARGEST_IN_SAMPLE * amount for amount in fills)])
        num_rows = bisect_right(list(accumulate(self._lengths)), tokens) + 1
        sample = self._lengths[: max(8, num_rows)]
        return self._in_steps(sample)

    def _in_steps(self, lengths: Sequence[int]) -> list[list[int]]:
        starts = range(0, len(lengths), self._step_rows)
        return [list(lengths[begin : begin + self._step_rows]) for begin in starts]

    def _limits(self, layout: MicroBatchLayout) -> tuple[MicroBatchLimit, MicroBatchLimit]:
        """Return the smallest and the largest limit of a layout that are of use and may fit."""
        unit = self._choices.unit if layout.is_usual else "tokens"
        row_amount = layout.amount(1, self._longest, unit=unit)
        step_amount = self._step_rows
        if unit == "tokens":
            step_amount = max(map(layout.run_tokens, self._in_steps(self._lengths)))
        amount = max(row_amount, min(self._max_batch_size * row_amount, step_amount))
        return MicroBatchLimit(row_amount, unit), MicroBatchLimit(amount, unit)

    def _try_largest(self, found: Throughput) -> Trial:
        """Run a trial of the most of the longest rows that a choice allows."""
        layout = self._layout.of_kind(found.kind, time=found.time)
        with self._tried.engine.sizer.trying(layout):
            return self._dry_run(layout.rows_within(found.limit, self._longest))

    def _settles(self, layout: MicroBatchLayout) -> bool:
        """Run micro-batches of ever new rows, in the largest limit and in a quarter of it, as long
        as something is compiled for them; return whether that ended.
        """
        smallest, largest = self._limits(layout)
        quarter = replace(largest, amount=max(smallest.amount, largest.amount // 4))
        sizes = [quarter, largest]
        variants: Counter[str] = Counter()
        self._compilations.new()
        for begin in range(0, _WARM_PASSES * _WARM_ROWS, _WARM_ROWS):
            rows = self._in_order(begin, _WARM_ROWS)
            lengths = list(map(self._tried.row_length, rows))
            is_warm = True
            pieces = [piece for limit in sizes for piece in micro_batches(lengths, limit, layout)]
            for piece in pieces:
                with self._tried.engine.sizer.trying(layout):
                    micro_batch = partial(self._tried.try_rows, [rows[row] for row in piece.rows])
                    if self._dry_run.time([micro_batch]) is None:
                        # What is too large the search finds again.
                        sizes = sizes[:1]
                        continue
                new = self._compilations.new()
                self._compiled += new
                variants.update(graph.function for graph in new if graph.reason)
                if distributed.any_of_ranks(bool(new)):
                    is_warm = False
                if distributed.any_of_ranks(max(variants.values(), default=0) >= _MOST_VARIANTS):
                    reason = next((graph.reason for graph in new if graph.reason), "on a rank")
                    log.info(
                        "%s micro-batches are not chosen: new shapes are compiled again (%s)",
                        layout.kind,
                        reason,
                    )
                    return False
            if is_warm:
                break
        return True

    def _time(self, cuts: Sequence[Pieces]) -> list[list[float] | None]:
        """Return the seconds of each micro-batch of rows in some layouts, None where one does not
        fit.
        """
        timings = []
        for pieces, layout in cuts:
            last = len(pieces)
            with self._tried.engine.sizer.trying(layout):
                seconds = self._dry_run.time(
                    [
                        partial(
                            self._tried.try_rows,
                            [self._rows[row] for row in piece.rows],
                            is_last=place == last,
                        )
                        for place, piece in enumerate(pieces, start=1)
                    ]
                )
            timings.append(seconds)
        return timings
