"""The search for the fastest micro-batches within what fits: rows of training, timed through the
code that training runs.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

from adaptive_batch import distributed
from adaptive_batch.data import LAYOUT_KINDS, MicroBatchLayout, MicroBatchLimit, micro_batches
from adaptive_batch.probe import DryRun, FastestSearch, Pieces, Throughput, Trial

from .compilations import Compilation, Compilations, describe_all
from .model_checks import is_compiled
from .trials import LongestRows, TriedStep

log = logging.getLogger("adaptive_batch")

# Rows of training, at least, whose micro-batches are modelled.
_MODELLED_ROWS = 256
# Samples that are timed in the seconds that a search may take, where no other program slows them.
_TIMED = 20
# Tokens of a sample, at least: the time of fewer is noise.
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
        objective: name of what is sought.
    """

    kinds: Sequence[str]
    unit: str
    timed_rows: int
    objective: str = "throughput"


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
        self._steps = [
            self._in_order(step * self._step_rows, self._step_rows)
            for step in range(max(1, _MODELLED_ROWS // self._step_rows))
        ]
        self._lengths = [list(map(tried.row_length, rows)) for rows in self._steps]
        # The most of the longest rows that fit in each kind of layout.
        self._capacity = dict.fromkeys(choices.kinds, max_batch_size)
        self._compilations = Compilations()
        self._compiled: list[Compilation] = []

    def __call__(self, *, seconds: float) -> Throughput | None:
        """Find it, in about so many seconds, compilations not counted; None where nothing fits, or
        where each layout is compiled again for each shape.
        """
        layouts = [replace(self._layout, kind=kind) for kind in self._choices.kinds]
        if is_compiled(self._tried.engine.model):
            layouts = [layout for layout in layouts if self._settles(layout)]
            log.info("before micro-batches are timed: %s", describe_all(self._compiled))
        if not layouts:
            return None
        pieces = micro_batches(self._lengths[0][:8], self._limits(layouts[0])[0], layouts[0])
        # Some of the first time is for what is made once.
        for _ in range(2):
            (warm,) = self._time(self._steps[0][:8], [(pieces, layouts[0])])
        of_step = self._dry_run.time(
            [partial(self._tried.try_rows, self._steps[0][:1]), self._tried.step]
        )
        if warm is None or of_step is None:
            return None
        tokens = max(_LEAST_TOKENS, int(seconds / _TIMED * sum(self._lengths[0][:8]) / sum(warm)))
        rows = max(8, sum(so_far <= tokens for so_far in accumulate(self._lengths[0])))
        while any(self._capacity[layout.kind] for layout in layouts):
            search = FastestSearch(
                partial(self._time, self._steps[0][:rows]),
                steps=self._lengths,
                sample=self._lengths[0][:rows],
                layouts=[layout for layout in layouts if self._capacity[layout.kind]],
                limits=self._limits,
                step_seconds=of_step[1],
                objective=self._choices.objective,
            )
            fastest = search()
            if fastest is None:
                return None
            trial = self._try_largest(fastest)
            if trial.fits:
                return replace(
                    fastest.with_peak(trial.peak_bytes),
                    seconds=time.perf_counter() - self._began,
                    compile_seconds=sum(compilation.seconds for compilation in self._compiled),
                )
        return None

    def _limits(self, layout: MicroBatchLayout) -> list[MicroBatchLimit]:
        """Return the limits of a layout that are of use and may fit, ascending."""
        unit = self._choices.unit if layout.is_usual else "tokens"
        row_amount = layout.amount(1, self._longest, unit=unit)
        step_amount = self._step_rows
        if unit == "tokens":
            step_amount = max(map(layout.run_tokens, self._lengths))
        amount = max(row_amount, min(self._capacity[layout.kind] * row_amount, step_amount))
        amounts = []
        while amount >= row_amount:
            amounts.append(amount)
            amount //= 2
        return [MicroBatchLimit(amount, unit) for amount in reversed(amounts)]

    def _try_largest(self, fastest: Throughput) -> Trial:
        """Run a trial of the most of the longest rows that a choice allows; where they do not fit,
        no more than half of them are timed in its layout from now on.
        """
        layout = self._layout.of_kind(fastest.kind, time=fastest.time)
        longest_rows = layout.rows_within(fastest.limit, self._longest)
        with self._tried.engine.sizer.trying(layout):
            trial = self._dry_run(longest_rows)
        if not trial.fits:
            self._capacity[fastest.kind] = longest_rows // 2
        return trial

    def _settles(self, layout: MicroBatchLayout) -> bool:
        """Run micro-batches of ever new rows, in the smallest and the largest limit that fits, as
        long as something is compiled for them; return whether that ended.
        """
        limits = self._limits(layout)
        sizes = [limits[0], limits[-1]]
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

    def _time(self, sample: Sequence[Any], pieces: Sequence[Pieces]) -> list[list[float] | None]:
        """Return the seconds of each micro-batch of the sample's rows, in each of some layouts.

        None where they do not fit.
        """
        timings = []
        for of_layout, layout in pieces:
            last = len(of_layout)
            with self._tried.engine.sizer.trying(layout):
                seconds = self._dry_run.time(
                    [
                        partial(
                            self._tried.try_rows,
                            [sample[row] for row in piece.rows],
                            is_last=place == last,
                        )
                        for place, piece in enumerate(of_layout, start=1)
                    ]
                )
            timings.append(seconds)
        return timings
