"""Search strategies for the maximum batch size.

Each strategy is a state machine without a device. It proposes a candidate, records the result of
its trial, and proposes the next one until the search ends. Its state is the list of trials.

    Halving        start, start/2, ... until one fits       an OOM for each halving
    BinarySearch   bisection of 1..maximum                  exact; log2(maximum) trials, many OOMs
    Predictive     extrapolates the peaks of trials         about five trials, mostly without an OOM

Every candidate lies between the largest size that fits and the smallest that does not, even after
contradictory results. So each search ends, no size is tried twice, and the result has been tried.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from adaptive_batch.memory import MemoryCurve, Trace

# After an OOM, the search ends at a gap of this share of the rows.
END_GAP = 0.012

# Extrapolation of peaks.

# Share of the budget up to which measured peaks were flat before they turned steep.
KNEE = 3 / 8
# Peaks grow at most like rows ** 1.35 (measured: up to 1.3).
STEEPEST = 1.35
# If rows cause less than this share of the peak, operations with a steeper slope may still lie
# below it.
MIN_ROW_SHARE = 1 / 4
# A line is extrapolated at most to this multiple of the tried rows.
MAX_EXTRAPOLATION = 32
# Peaks that agree to this share of their rise have no noise; noise is about 1e-2.
EXACT = 1e-4
# Maximum error of a noisy peak.
UNCERTAIN = 0.01
# Typical error of a noisy peak: the root mean square of +-1% is 0.006.
NOISE = 0.007
# Intermediate targets of a noisy search, as shares of the budget.
HALFWAY = 0.9
NEARLY = 0.975
# Step near the end of a noisy search, so that its result is within 1%.
FINE = 0.01
# An estimated end this close counts as reached.
END_TOLERANCE = 0.002


@dataclass(frozen=True)
class Trial:
    """Result of one trial.

    Attributes:
        batch_size: rows.
        fits: whether the training step fits without a retry of the allocator.
        peak_bytes: peak of forward and backward, resident bytes included; None if unknown or if the
            step does not fit.
        optimizer_peak_bytes: peak of the optimizer's step, which does not grow with the batch.
        trace: bytes alive after each operation of forward and backward, if the device counts them.
        retried: the step ran, but does not fit since the allocator freed its cache and retried.
        held_bytes: peak before an OOM; None without an OOM or if unknown.
    """

    batch_size: int
    fits: bool
    peak_bytes: int | None = None
    optimizer_peak_bytes: int | None = None
    trace: Trace | None = field(default=None, repr=False, compare=False)
    retried: bool = False
    held_bytes: int | None = None


def measured_curve(trials: Iterable[Trial]) -> MemoryCurve | None:
    """Return the curve through the two largest sizes that fit.

    It is None unless their bytes were counted and both ran the same operations.
    """
    traces = {trial.batch_size: trial.trace for trial in trials if trial.fits and trial.trace}
    if len(traces) < 2:
        return None
    fewer, more = sorted(traces)[-2:]
    if traces[fewer].program != traces[more].program:
        return None
    return MemoryCurve.from_traces((fewer, traces[fewer]), (more, traces[more]))


class Search(ABC):
    """Base class of search strategies: try the candidate and record the trial until there is none.

    Attributes:
        maximum: limit of the tried rows.
    """

    def __init__(self, limit: int) -> None:
        assert limit >= 1, limit
        self.maximum = limit
        self._limit = limit
        self._trials: list[Trial] = []

    @property
    @abstractmethod
    def candidate(self) -> int | None:
        """Rows to try next; None at the end of the search."""

    @property
    def best(self) -> int:
        """Largest tried number of rows that fits, or 0."""
        return max((trial.batch_size for trial in self._trials if trial.fits), default=0)

    @property
    def _too_many(self) -> int:
        """Fewest tried rows that do not fit; `maximum` + 1 if all fit."""
        return min(
            (trial.batch_size for trial in self._trials if not trial.fits), default=self.maximum + 1
        )

    def try_at_most(self, rows: int) -> None:
        """Limit the next trials to `rows`, within the initial maximum."""
        self.maximum = min(self._limit, max(1, rows, self.best))

    def record(self, trial: Trial) -> None:
        """Record the trial of the candidate."""
        assert trial.batch_size == self.candidate, (trial.batch_size, self.candidate)
        self._trials.append(trial)


class Halving(Search):
    """Halves `start` until the size fits."""

    def __init__(self, *, start: int) -> None:
        super().__init__(start)

    @property
    def candidate(self) -> int | None:
        # The first trial, or a larger one once more rows run in the time limit.
        if all(trial.fits for trial in self._trials) and self.best < self.maximum:
            return self.maximum
        half = self._too_many // 2
        if half <= self.best:
            return None
        return half


class BinarySearch(Search):
    """Bisection of ``1..maximum`` without peaks, as in torchtune's RFC (pull request 2199)."""

    def __init__(self, *, maximum: int) -> None:
        super().__init__(maximum)

    @property
    def candidate(self) -> int | None:
        middle = (self.best + self._too_many) // 2
        if middle <= self.best:
            return None
        return middle


class Predictive(Search):
    """Chooses each size such that it fits according to the peaks of earlier trials.

    The result is the exact maximum if no trial runs out of memory, else within 1.2% below it.
    Without peaks, the search doubles and then bisects. If trials report the bytes alive after each
    operation, two of them determine the maximum and a third tries it.

    Args:
        budget_bytes: limit of a trial's memory.
        maximum: limit of the rows.
        resident_bytes: bytes held before any trial (parameters, optimizer state), part of every
            peak.
        granularity_bytes: resolution of peaks; an accelerator's allocator reserves blocks.
        min_rows: rows of the first trial; fewer are never tried.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        maximum: int,
        min_rows: int = 1,
        resident_bytes: int = 0,
        granularity_bytes: int = 1,
    ) -> None:
        super().__init__(maximum)
        self._budget_bytes = budget_bytes
        self._resident_bytes = resident_bytes
        self._free_bytes = max(1, budget_bytes - resident_bytes)
        # A peak may have two partly free blocks.
        self._rounding = 2 * granularity_bytes / self._free_bytes
        self._granularity_bytes = granularity_bytes
        self._min_rows = min_rows

    @property
    def candidate(self) -> int | None:
        best = self.best
        too_many = self._too_many
        failed = any(not trial.fits for trial in self._trials)
        if not self._trials:
            return min(self._min_rows, self.maximum)
        if best == 0:
            return None
        gap = too_many - best
        if gap <= 1 or (failed and gap <= END_GAP * best):
            return None
        measured = measured_curve(self._trials)
        if measured is not None:
            rows = self._allowed(measured, self._budget_bytes)
            # A failed trial of so many rows or fewer contradicts the curve; then continue below.
            if rows < too_many:
                return rows if rows > best else None
        early_oom = self._worst_early_oom()
        if early_oom is not None:
            return self._rows_after_early_oom(early_oom)
        points = self._points()
        has_peak_of_best = bool(points) and points[-1].rows == best
        if not has_peak_of_best:
            # Without peaks, double the rows until they do not fit, then bisect.
            return (best + too_many) // 2 if failed else min(2 * best, self.maximum)
        target = next_rows(points, rounding=self._rounding, resident_known=self._resident_bytes > 0)
        if target is None:
            return None
        # After an OOM, use only a part of the gap, more of it after a near miss.
        if failed:
            is_near_miss = 1.03 * best < too_many < 1.2 * best
            target = min(target, best + (0.7 if is_near_miss else 0.5) * gap)
        # Floats may lie just below a whole number.
        rows = math.floor(target + 1e-6)
        return max(best + 1, min(rows, too_many - 1))

    def _allowed(self, curve: MemoryCurve, budget_bytes: float) -> int:
        """Return the most rows within a budget by a curve, at most the maximum."""
        rows = curve.max_rows(int(budget_bytes))
        return self.maximum if rows is None else min(rows, self.maximum)

    def _worst_early_oom(self) -> Trial | None:
        """Return the trial that ran out of memory below the budget with the highest peak; None
        without one.
        """
        # An allocator that reserves whole blocks often fails below the budget.
        if self._granularity_bytes > 1:
            return None
        # `held_bytes` is set only after an OOM.
        early = [
            trial
            for trial in self._trials
            if trial.held_bytes is not None and trial.held_bytes < self._budget_bytes
        ]
        return max(early, key=lambda trial: trial.held_bytes or 0, default=None)

    def _rows_after_early_oom(self, early_oom: Trial) -> int:
        """Return the rows to try next on a device with less memory than the budget.

        First try the rows that need the memory before the OOM. Then double steps from the largest
        size that fits until one fails, and halve the gap.
        """
        best = self.best
        too_many = self._too_many
        held_bytes = early_oom.held_bytes or 0
        safe_rows = 0
        points = self._points()
        curve = measured_curve(self._trials)
        if curve is not None:
            safe_rows = self._allowed(curve, held_bytes)
        elif points:
            # Assume that the peak per row does not grow with the rows.
            held_share = (held_bytes - self._resident_bytes) / self._free_bytes
            safe_rows = math.floor(points[-1].rows * held_share / points[-1].share)
        if best < safe_rows < too_many:
            return safe_rows
        smaller_sizes = [trial.batch_size for trial in self._trials if trial.batch_size < best]
        last_step = best - max(smaller_sizes, default=0)
        step = 2 * last_step
        if safe_rows == best:
            # Only the allocation that failed is unknown, so few more rows can fit.
            step = math.floor(END_GAP * early_oom.batch_size)
        return best + max(1, min(step, (too_many - best) // 2))

    def _points(self) -> list[Point]:
        """Return the trials that fit as points, in the order of trials."""
        peaks = [(trial.batch_size, trial.peak_bytes or 0) for trial in self._trials if trial.fits]
        points = [
            Point(rows, (peak - self._resident_bytes) / self._free_bytes) for rows, peak in peaks
        ]
        # Unknown peaks have no positive share, which the extrapolation needs.
        return [point for point in points if point.share > 0]


# Extrapolation of peaks: the next rows of a Predictive search without a curve.


class Point(NamedTuple):
    """A trial that fits.

    Attributes:
        rows: rows.
        share: peak as a share of the budget, both without resident bytes.
    """

    rows: float
    share: float


def next_rows(points: Sequence[Point], rounding: float, resident_known: bool) -> float | None:
    """Return the rows to try next after trials in growing order; None if no larger size fits.

    Args:
        points: trials that fit, by rows.
        rounding: largest error of a peak, as a share of the budget.
        resident_known: whether shares exclude the bytes that are resident before a trial.

    The peak is a maximum of straight lines in the rows, one for each op, with intercepts of 0 or
    more. So it is convex, and often flat at first. Growing the rows by budget / peak always fits.
    Beyond two trials, the peak lies on or above the line through them: no size beyond that line's
    end fits, and a steeper line may end earlier. Hence:

    1. Grow safely, by slightly less than budget / peak, since real peaks bend upwards in places.
    2. Do not follow a line that hardly grows above the resident bytes: another line fills the
    budget.
    3. Follow a line if a third trial lies on it, and a curve ``fixed + c * rows ** power`` if a
    fourth does. Steeper lines often show above the share `KNEE`, so from below it, follow a line
    only to slightly beyond it.
    4. A peak below the line is noisy, so no three trials will lie on a line: fit a curve to the
    peaks that rise clearly above the noise.
    """
    last = points[-1]
    safe_rows = _grow(last, STEEPEST)
    if len(points) == 1:
        return max(2.0, safe_rows)
    previous = points[-2]
    if len(points) > 2 and last.share / previous.share <= (last.rows / previous.rows) ** 1.001:
        # Rule 1: the peak grows at most proportionally, so a larger step is safe.
        safe_rows = _grow(last, 1.1)
    is_proportional = _straight(Point(0, 0.0), previous, last, rounding)
    power = _proven_power(points, rounding)
    share_per_row = (last.share - previous.share) / (last.rows - previous.rows)
    # One more row exceeds the budget. The slope between two trials is off by up to 5%; on a proven
    # line only rounding of floats is uncertain.
    largest_share = 1 + 1e-9 if is_proportional or power == 1 else 1.05
    if last.share + share_per_row > largest_share:
        return None
    # A line through the origin is the steepest possible one.
    if is_proportional:
        return _reach(previous, last, power=1, share=1.0)
    # Rule 2: skip rows, or a flat peak just below the budget would take one trial for each row.
    if resident_known and share_per_row * last.rows < MIN_ROW_SHARE * last.share:
        return max(safe_rows, 1.25 * last.rows)
    # Rule 3.
    if power is not None:
        end = _reach(previous, last, power, share=1.0)
        # Rounding may put the end slightly below one more row.
        if end < last.rows + 0.95:
            return None
        if last.share > KNEE:
            return min(end, MAX_EXTRAPOLATION * last.rows)
        # Below the knee, go no further than is safe from the knee on.
        knee_rows = _reach(previous, last, power, share=KNEE)
        safe_from_knee = _grow(Point(knee_rows, KNEE), 2)
        return max(safe_rows, min(end, safe_from_knee))
    # Rule 4.
    if _noisy(points, rounding):
        return _next_rows_in_noise(points, safe_rows)
    return safe_rows


def _proven_power(points: Sequence[Point], rounding: float) -> float | None:
    """Return the exponent of ``share = fixed + c * rows ** power`` if the last trials prove it.

    It is 1 if the last three trials lie on a line. Otherwise, if the last four lie on one such
    curve, it is the exponent of this curve, between 0.3 and 3. Otherwise it is None.
    """
    last = points[-1]
    # A flat peak shows no curve.
    if len(points) < 3 or last.share <= points[-2].share:
        return None
    if _straight(points[-3], points[-2], last, rounding):
        return 1
    if len(points) < 4 or not points[-4].share < points[-3].share < points[-2].share:
        return None
    first, second, third = points[-4:-1]
    # Find the exponent of the curve through the first three points by bisection: a higher exponent
    # raises the curve beyond its first two points.
    low = 0.3
    high = 3.0
    for _ in range(50):
        power = (low + high) / 2
        if _at(first, second, power, third.rows) < third.share:
            low = power
        else:
            high = power
    # The curve is proven if the last point lies on it too.
    tolerance = max(EXACT * (last.share - first.share), rounding)
    return low if abs(last.share - _at(first, second, low, last.rows)) <= tolerance else None


def _next_rows_in_noise(points: Sequence[Point], safe_rows: float) -> float | None:
    """Return the next rows on a curve ``fixed + c * rows ** power`` through noisy peaks.

    The fixed part is the mean of the flat trials, which do not rise clearly above the noise. After
    the first risen trial, assume the steepest power and aim at `HALFWAY`. Two risen trials
    determine the power; then aim at `NEARLY`. From there, return slightly less than the mean of the
    estimated ends, or None if that is close to the last trial. If the peak of one row exceeds the
    noise, follow the line through the last two trials, lowered by the noise.
    """
    last = points[-1]
    lowest = min(point.share for point in points)
    flat = [point.share for point in points if point.share < lowest * (1 + 2 * UNCERTAIN)]
    fixed = sum(flat) / len(flat)
    risen = [point for point in points if point.share - fixed > 3 * UNCERTAIN * fixed]
    if last not in risen:
        return max(safe_rows, MAX_EXTRAPOLATION * last.rows)
    last_rise = last.share - fixed
    rise_at_end = max(0.0, 1 - fixed)

    def rows_at(rise: float, point: Point, power: float) -> float:
        """Return the rows at which the curve through a point rises to `rise` above `fixed`."""
        return point.rows * math.pow(rise / (point.share - fixed), 1 / power)

    # So few rows fill the budget that a step of FINE is less than a row: follow the line.
    if FINE * rows_at(rise_at_end, last, STEEPEST) < 1:
        low = Point(points[-2].rows, points[-2].share * (1 - NOISE))
        high = Point(last.rows, last.share * (1 + NOISE))
        return max(safe_rows, _reach(low, high, 1.05, 1.0))
    power = STEEPEST
    if len(risen) > 1:
        first = risen[0]
        power = math.log(last_rise / (first.share - fixed)) / math.log(last.rows / first.rows)
        power = min(max(power, 0.85), STEEPEST)
    # Far from the end, aim at an intermediate share.
    if last.share < NEARLY - 2 * UNCERTAIN:
        target_share = HALFWAY if len(risen) == 1 else NEARLY
        target_rise = max(last_rise, target_share - fixed)
        return max(safe_rows, rows_at(target_rise, last, power))
    # Near the end, average the ends that follow from each near peak.
    near = [point for point in risen if point.share > NEARLY - 4 * UNCERTAIN]
    ends = [rows_at(rise_at_end, point, power) for point in near]
    end = sum(ends) / len(ends)
    if end < last.rows * (1 + END_TOLERANCE):
        return None
    return max(last.rows * (1 + FINE), end * (1 - FINE))


def _noisy(points: Sequence[Point], rounding: float) -> bool:
    """Return whether a peak contradicts a maximum of lines.

    Such a peak lies below the first one, or below the line through the previous two.
    """
    if points[1].share < points[0].share - rounding:
        return True
    for first, second, third in zip(points, points[1:], points[2:], strict=False):
        tolerance = max(10 * EXACT * abs(third.share - first.share), rounding)
        share_on_line = _at(first, second, 1, third.rows)
        if third.share < share_on_line - tolerance:
            return True
    return False


def _grow(point: Point, power: float) -> float:
    """Return the rows that fill the budget if the peak grows like ``rows ** power``."""
    return point.rows * math.pow(min(1.0, point.share), -1 / power)


def _at(first: Point, second: Point, power: float, rows: float) -> float:
    """Return the share at `rows` on the curve ``fixed + c * rows ** power`` through two points."""
    # The curve is a line in rows ** power.
    start = math.pow(first.rows, power)
    end = math.pow(second.rows, power)
    rise = second.share - first.share
    return first.share + rise * (math.pow(rows, power) - start) / (end - start)


def _reach(first: Point, second: Point, power: float, share: float) -> float:
    """Return the rows at which ``fixed + c * rows ** power`` through two points reaches `share`.

    For a flat curve, return the rows of the second point.
    """
    if second.share <= first.share:
        return second.rows
    # The curve is a line in rows ** power.
    start = math.pow(first.rows, power)
    end = math.pow(second.rows, power)
    part = (share - first.share) / (second.share - first.share)
    return math.pow(max(0.0, start + part * (end - start)), 1 / power)


def _straight(first: Point, second: Point, third: Point, rounding: float) -> bool:
    """Return whether three points lie on a line, within the resolution of bytes."""
    tolerance = max(EXACT * abs(third.share - first.share), rounding)
    return abs(third.share - _at(first, second, 1, third.rows)) <= tolerance
