"""Which batch size to try next, decided by the trials so far alone.

Three searches for the largest number of rows that fits. Each is a state machine without a device:
it names a candidate, records how the trial of it went, and names the next one until the search is
over. Its state is the list of trials.

    Halving        start, start/2, ... until one fits       an OOM for each halving
    BinarySearch   bisection of 1..maximum                  exact; log2(maximum) trials, many OOMs
    Predictive     from the peaks that trials report        about five trials, mostly without an OOM

Whatever the answers are, also contradictory ones, every candidate lies between the largest size
that fitted and the smallest that did not. So no size is tried twice, each search ends, and only a
size that was tried is ever the best.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

from adaptive_batch.memory import MemoryCurve, Trace

from .extrapolation import UNCERTAIN, Point, next_rows

# Share of the budget to which an expected curve is trusted at first, where bytes are not counted.
SURE = 0.95
# A peak that differs from the expected one by more than this part of its rise refutes the curve.
ALIKE = 0.1
# The same where bytes are counted: another peak is of another step.
EQUAL = 1e-6
# An expectation at which the allocator only asked again is lowered by this part, doubled each time.
NEAR = 0.05
# After an OOM, a gap of this part of the rows is not worth a trial that may be another OOM.
CLOSE = 0.012


@dataclass(frozen=True)
class Trial:
    """How one trial went.

    Attributes:
        fits: whether the whole training step fitted in memory, without the allocator giving back
            its cache and asking again.
        peak_bytes: most bytes held in forward and backward, what was resident included; None where
            not known or not fitting.
        optimizer_peak_bytes: the same for the optimizer's step, which does not grow with the batch.
        trace: bytes alive after each operation of forward and backward, where the device counts
            them.
        retried: it ran to its end, and does not fit because the allocator gave back its cache and
            asked again.
        held_bytes: most bytes held before memory ran out; None where it did not, or where that is
            not known.
    """

    batch_size: int
    fits: bool
    peak_bytes: int | None = None
    optimizer_peak_bytes: int | None = None
    trace: Trace | None = field(default=None, repr=False, compare=False)
    retried: bool = False
    held_bytes: int | None = None


def measured_curve(trials: Iterable[Trial]) -> MemoryCurve | None:
    """Return the curve through the two largest sizes that fit, or None.

    There is one where both ran the same operations and their bytes were counted.
    """
    traced = sorted(
        {t.batch_size: t.trace for t in trials if t.fits and t.trace is not None}.items()
    )
    if len(traced) < 2 or traced[-2][1].program != traced[-1][1].program:
        return None
    return MemoryCurve.from_traces(*traced[-2:])


class Search(ABC):
    """A search: while there is a candidate, try it and record the trial.

    The answer lies in an open interval.

    Attributes:
        maximum: the most rows that are tried, as far as is known so far.
    """

    def __init__(self, limit: int) -> None:
        assert limit >= 1, limit
        self.maximum = limit
        self._useful_rows = limit
        self._trials: list[Trial] = []

    @property
    @abstractmethod
    def candidate(self) -> int | None:
        """Rows to try next; None when the search is over."""

    @property
    def best(self) -> int:
        """Largest number of rows that was tried and fits; 0 when none did."""
        return max((trial.batch_size for trial in self._trials if trial.fits), default=0)

    @property
    def _too_many(self) -> int:
        """Fewest rows known not to fit; one above the limit while all have fitted."""
        return min(
            (trial.batch_size for trial in self._trials if not trial.fits), default=self.maximum + 1
        )

    def try_at_most(self, rows: int) -> None:
        """Try no more rows than this for now, nor more than are of use."""
        self.maximum = min(self._useful_rows, max(1, rows, self.best))

    def record(self, trial: Trial) -> None:
        """Record how the trial of the candidate went."""
        assert trial.batch_size == self.candidate, (trial.batch_size, self.candidate)
        self._trials.append(trial)


class Halving(Search):
    """`start` rows, then half of it, until one fits; never looks above `start`."""

    def __init__(self, *, start: int) -> None:
        super().__init__(start)

    @property
    def candidate(self) -> int | None:
        # The first, or more than it, as it took less time than was thought.
        if all(trial.fits for trial in self._trials) and self.best < self.maximum:
            return self.maximum
        half = self._too_many // 2
        if half <= self.best:
            return None
        return half


class BinarySearch(Search):
    """Plain bisection of ``1..maximum``, exact and blind to peaks.

    It is the search of torchtune's RFC (pull request 2199).
    """

    def __init__(self, *, maximum: int) -> None:
        super().__init__(maximum)

    @property
    def candidate(self) -> int | None:
        middle = (self.best + self._too_many) // 2
        if middle <= self.best:
            return None
        return middle


class Predictive(Search):
    """Chooses each next size so that it fits by the peaks of the trials before.

    Starts from the fewest rows, and stops where the next row would not fit. Ends on the exact
    maximum while nothing runs out of memory, and within 1.2% below it otherwise. Without peaks it
    doubles, then bisects. Where trials tell the bytes alive at each operation, two of them tell the
    maximum, and a third tries it. Where a curve is expected, the first trial is at what it allows,
    the next at what it allows once it is scaled to the peak that was measured; where peaks are not
    counted to the byte, it then ends within 3% below the maximum.

    Args:
        budget_bytes: most bytes that a trial may hold.
        maximum: most rows that are of use.
        resident_bytes: bytes held before any trial: parameters, optimizer state. They are in every
            peak and do not grow.
        granularity_bytes: peaks are known to this many bytes; an accelerator's allocator reserves
            memory in blocks.
        expected: what peaks should be, from an estimate or earlier trials; believed only as far as
            trials bear it out.
        fewest: rows that are tried first where nothing is expected.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        maximum: int,
        fewest: int = 1,
        resident_bytes: int = 0,
        granularity_bytes: int = 1,
        expected: MemoryCurve | None = None,
    ) -> None:
        super().__init__(maximum)
        self._budget_bytes = budget_bytes
        self._resident_bytes = resident_bytes
        self._free_bytes = max(1, budget_bytes - resident_bytes)
        self._rounding = 2 * granularity_bytes / self._free_bytes
        self._granularity_bytes = granularity_bytes
        self._expected = expected
        self._fewest = fewest

    @property
    def candidate(self) -> int | None:
        best = self.best
        too_many = self._too_many
        failed = any(not trial.fits for trial in self._trials)
        if self._expected is not None and self._bears_out(self._expected):
            return self._rows_by_expectation(self._expected)
        if not self._trials:
            return min(self._fewest, self.maximum)
        if best == 0:
            return self._rows_below_expected()
        resolution = 1.0
        if failed:
            resolution = max(1, CLOSE * best)
        if too_many - best <= resolution:
            return None
        measured = measured_curve(self._trials)
        traced = too_many if measured is None else self._allowed(measured, self._budget_bytes)
        # From `too_many` on, a trial has shown that the traces are wrong.
        if traced < too_many:
            return traced if traced > best else None
        refuted = self._refutes_budget()
        if refuted is not None:
            return self._rows_from_below(refuted)
        points = self._points()
        # The device does not report the peak.
        if not points or points[-1].rows != best:
            return (best + too_many) // 2 if failed else min(2 * best, self.maximum)
        target = next_rows(points, rounding=self._rounding, resident_known=self._resident_bytes > 0)
        if target is None:
            return None
        # A prediction was too high once: keep part of the gap in reserve, less after a near miss.
        if failed:
            is_near_miss = 1.03 * best < too_many < 1.2 * best
            part = 0.7 if is_near_miss else 0.5
            target = min(target, best + part * (too_many - best))
        return max(best + 1, min(math.floor(target + 1e-6), too_many - 1))

    def _rows_below_expected(self) -> int | None:
        """Return fewer rows than an expectation that was too high; None where none was."""
        too_many = self._too_many
        if self._expected is None or too_many == 1:
            return None
        part = 1 - NEAR * 2 ** (len(self._trials) - 1) if self._trials[-1].retried else 0.5
        return max(1, math.floor(too_many * max(part, 0.5)))

    def _bears_out(self, curve: MemoryCurve) -> bool:
        """Return whether nothing that was tried contradicts a curve."""
        if any(not trial.fits for trial in self._trials):
            return False
        is_counted = self._granularity_bytes == 1
        may_differ = EQUAL if is_counted else ALIKE
        return all(abs(self._scale(curve, trial) - 1) <= may_differ for trial in self._trials)

    def _scale(self, curve: MemoryCurve, trial: Trial) -> float:
        """Return a trial's peak over the expected one, both without what was resident.

        It is infinity where the peak is not known.
        """
        if trial.peak_bytes is None:
            return math.inf
        rise = curve.peak_bytes(trial.batch_size) - self._resident_bytes
        if rise <= 0:
            return math.inf
        return (trial.peak_bytes - self._resident_bytes) / rise

    def _rows_by_expectation(self, curve: MemoryCurve) -> int | None:
        """Return what a curve allows, scaled to the last trial; None where no more than fits."""
        # Memory that is counted tensor by tensor; an allocator gives whole blocks.
        is_exact = self._granularity_bytes == 1
        if not self._trials:
            sure = 1 if is_exact else SURE
            return max(1, self._allowed(curve, sure * self._budget_bytes))
        scale = self._scale(curve, self._trials[-1])
        resident = self._resident_bytes
        room = (self._budget_bytes - self._resident_bytes) / scale
        rows = self._allowed(curve, resident + room)
        best = self.best
        # Of many rows noise decides over the last percent, and an error is not worth it.
        if not is_exact and CLOSE * rows > 1:
            rows = math.floor(rows * (1 - UNCERTAIN))
            if rows - best <= CLOSE * best:
                return None
            return rows
        # Of few rows one more is much. Up to two blocks may have been half empty, so where no more
        # than these is missing, it may fit.
        if not is_exact and rows <= best < self.maximum:
            missing_bytes = curve.peak_bytes(best + 1) - resident - room
            is_near = missing_bytes <= 2 * self._granularity_bytes / scale
            if not is_near:
                return None
            return best + 1
        if rows <= best:
            return None
        return rows

    def _allowed(self, curve: MemoryCurve, budget_bytes: float) -> int:
        rows = curve.max_rows(int(budget_bytes))
        return self.maximum if rows is None else min(rows, self.maximum)

    def _refutes_budget(self) -> Trial | None:
        """Return the trial that held most when memory ran out with part of the budget left.

        None where that was not so, or where an allocator in blocks may just have asked for the
        rest.
        """
        if self._granularity_bytes > 1:
            return None
        early = [
            trial
            for trial in self._trials
            if trial.held_bytes is not None and trial.held_bytes < self._budget_bytes
        ]
        return max(early, key=lambda trial: trial.held_bytes or 0, default=None)

    def _rows_from_below(self, refuted: Trial) -> int:
        """Return the rows to try where the device gives less than the budget.

        What it has held it can hold, so the rows of that come first. Then steps from the largest
        that fitted double until one fails, and the gap is halved.
        """
        best = self.best
        too_many = self._too_many
        held_bytes = refuted.held_bytes or 0
        curve = measured_curve(self._trials)
        if curve is not None:
            sure_rows = self._allowed(curve, held_bytes)
        else:
            # The peak of a row does not grow with the rows.
            share = (held_bytes - self._resident_bytes) / self._free_bytes
            last = self._points()[-1:]
            sure_rows = max((math.floor(rows * share / full) for rows, full in last), default=0)
        if best < sure_rows < too_many:
            return sure_rows
        fewer = [trial.batch_size for trial in self._trials if trial.batch_size < best]
        step = 2 * (best - max(fewer, default=0))
        # What was held misses what fits by about one operation of that trial.
        if sure_rows == best:
            step = math.floor(CLOSE * refuted.batch_size)
        return best + max(1, min(step, (too_many - best) // 2))

    def _points(self) -> list[Point]:
        peaks = [(trial.batch_size, trial.peak_bytes or 0) for trial in self._trials if trial.fits]
        shares = [(rows, (peak - self._resident_bytes) / self._free_bytes) for rows, peak in peaks]
        return [Point(rows, share) for rows, share in shares if share > 0]
