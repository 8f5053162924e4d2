"""Which batch size to try next, told only what the trials before it said.

Three searches for the largest number of rows that fits. Each is a state machine without a device: it names a candidate,
is told how the trial of it went, and names the next one until the search is over. Its state is the list of trials.

    Halving        start, start/2, ... until one fits       an OOM for each halving
    BinarySearch   bisection of 1..maximum                  exact; log2(maximum) trials, many of them OOMs
    Predictive     from the peaks that trials report        about five trials, mostly without an OOM

Whatever the answers are, also contradictory ones, every candidate lies between the largest size that fitted and the
smallest that did not. So no size is tried twice, each search ends, and only a size that was tried is ever the best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

KNEE = 3 / 8  # share of the budget up to which measured peaks stayed flat or gentle before they turned steep
STEEPEST = 1.35  # no peak grows faster than rows ** 1.35: the targets go to 1.3, and a little more
GENTLE = 1 / 4  # the rows' part of the peak below which the ops that will fill the budget have not shown yet
LEAP = 32  # a line, however straight, is believed up to this many times the rows that were tried
EXACT = 1e-4  # peaks that agree to this part of their rise carry no noise, which is rather 1e-2
NOISE = 0.007  # what a noisy peak may be off by: the root mean square of +-1% is 0.006
FINE = 0.0099  # near the end of a noisy search, steps that keep the answer within 1% of the truth
CLOSE = 0.012  # after an OOM, a gap of this part of the rows is not worth a trial that may be another OOM


@dataclass(frozen=True)
class Trial:
    """How one trial went.

    Args:
        batch_size: rows that were tried.
        fits: whether the whole training step fitted in memory.
        peak_bytes: most bytes held in forward and backward, what was resident before included; None where the device
            could not say. Of a trial that does not fit it is not read.
        optimizer_peak_bytes: the same for the optimizer's step, which does not grow with the batch. For the record: a
            step that passes the budget by this alone is reported with ``fits=False``.
    """

    batch_size: int
    fits: bool
    peak_bytes: int | None = None
    optimizer_peak_bytes: int | None = None


class Search(Protocol):
    """A search that is told what happened: while there is a candidate, try it and record the trial."""

    @property
    def candidate(self) -> int | None:
        """Rows to try next; None when the search is over."""

    @property
    def best(self) -> int:
        """Largest number of rows that was tried and fits; 0 when none did."""

    def record(self, trial: Trial) -> None:
        """Take in how the trial of the candidate went.

        Raises:
            ValueError: the trial is not of the candidate, or the search is over.
        """


class _Recorded:
    """What the three searches share: the trials so far, and the open interval in which the answer lies."""

    def __init__(self, name: str, limit: int) -> None:
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise ValueError(f"{name}={limit!r}: give a whole number of rows, at least 1")
        self._limit = limit
        self._trials: list[Trial] = []

    @property
    def candidate(self) -> int | None:
        raise NotImplementedError

    @property
    def best(self) -> int:
        return max((trial.batch_size for trial in self._trials if trial.fits), default=0)

    @property
    def _too_many(self) -> int:
        """Fewest rows known not to fit; one above the limit while all have fitted."""
        return min((trial.batch_size for trial in self._trials if not trial.fits), default=self._limit + 1)

    def record(self, trial: Trial) -> None:
        candidate = self.candidate
        if candidate is None:
            raise ValueError(f"batch_size={trial.batch_size}: the search is over, its best is {self.best}")
        if trial.batch_size != candidate:
            raise ValueError(f"batch_size={trial.batch_size}: the size to try next is {candidate}")
        self._trials.append(trial)


class Halving(_Recorded):
    """`start`, then half of it, until one fits; never looks above `start`.

    Args:
        start: rows to try first.

    Raises:
        ValueError: `start` is not a whole number of rows, at least 1.
    """

    def __init__(self, *, start: int) -> None:
        super().__init__("start", start)

    @property
    def candidate(self) -> int | None:
        if self.best:
            return None
        return (self._too_many // 2 or None) if self._trials else self._limit


class BinarySearch(_Recorded):
    """Plain bisection of ``1..maximum``, as in torchtune's RFC (pull request 2199): exact, and blind to peaks.

    Args:
        maximum: most rows that are of use.

    Raises:
        ValueError: `maximum` is not a whole number of rows, at least 1.
    """

    def __init__(self, *, maximum: int) -> None:
        super().__init__("maximum", maximum)

    @property
    def candidate(self) -> int | None:
        middle = (self.best + self._too_many) // 2
        return middle if middle > self.best else None


class Predictive(_Recorded):
    """Chooses each next size so that it fits by what the peaks have shown, and stops where the next row would not.

    Starts from one row, so that it is known at once when nothing fits. Ends on the exact maximum while nothing runs out
    of memory, and within 1.2% below it otherwise. Without peaks it doubles, then bisects.

    Args:
        budget_bytes: most bytes that a trial may hold.
        maximum: most rows that are of use.
        resident_bytes: bytes held before any trial: parameters, optimizer state. They are in every peak and do not
            grow, so the search is shorter, and more rarely mistaken, when it knows them.

    Raises:
        ValueError: `budget_bytes` or `maximum` is below 1, or `resident_bytes` below 0.
    """

    def __init__(self, *, budget_bytes: int, maximum: int, resident_bytes: int = 0) -> None:
        super().__init__("maximum", maximum)
        if budget_bytes < 1:
            raise ValueError(f"budget_bytes={budget_bytes!r}: give a number of bytes, at least 1")
        if resident_bytes < 0:
            raise ValueError(f"resident_bytes={resident_bytes!r}: give a number of bytes, 0 or more")
        self._resident_bytes = resident_bytes
        self._free_bytes = max(1, budget_bytes - resident_bytes)

    @property
    def candidate(self) -> int | None:
        if not self._trials:
            return 1
        best, too_many = self.best, self._too_many
        failed = any(not trial.fits for trial in self._trials)
        if best == 0 or too_many - best <= (max(1, CLOSE * best) if failed else 1):
            return None
        points = self._points()
        if not points or points[-1].rows != best:  # the device could not say
            return (best + too_many) // 2 if failed else min(2 * best, self._limit)
        target = _next_rows(points, rounding=2 / self._free_bytes, resident_known=self._resident_bytes > 0)
        if target is None:
            return None
        if failed:  # a prediction was too high once: keep part of the gap in reserve, less of it after a near miss
            part = 0.7 if 1.03 * best < too_many < 1.2 * best else 0.5
            target = min(target, best + part * (too_many - best))
        return max(best + 1, min(math.floor(target + 1e-6), too_many - 1))

    def _points(self) -> list[_Point]:
        peaks = [(trial.batch_size, trial.peak_bytes or 0) for trial in self._trials if trial.fits]
        shares = [(rows, (peak - self._resident_bytes) / self._free_bytes) for rows, peak in peaks]
        return [_Point(rows, share) for rows, share in shares if share > 0]


class _Point(NamedTuple):
    """One trial that fitted: its rows, and its peak as a share of the budget, both without what was resident."""

    rows: float
    share: float


def _next_rows(points: Sequence[_Point], rounding: float, resident_known: bool) -> float | None:
    """Rows to try after these trials, which are in growing order; None when not one row more fits.

    The peak is a maximum of straight lines in the rows, one for each op, none of them below 0 at 0 rows: convex, and
    often flat at first. Two things follow. Growing rows as budget / peak always fits. And beyond two trials the peak
    lies on or above the line through them: where that line leaves the budget nothing fits any more, but before it does
    a steeper line may have taken over. So:

    1. Grow safely: a little less than budget / peak, since real peaks bend upwards here and there.
    2. A line is a guess until a third trial lies on it, a curve ``fixed + c * rows ** power`` until a fourth does. Then
       follow it; from below the knee only to a little past it, where what takes over there shows.
    3. Once the resident bytes are taken off, a line that hardly grows is not the one that fills the budget: do not follow.
    4. Peaks that dip below a line are noisy, and no three will agree: follow the line through two far apart, held back.
    """
    last = points[-1]
    if len(points) == 1:
        return max(2.0, _grow(last, STEEPEST))
    before = points[-2]
    bends = last.share / before.share > (last.rows / before.rows) ** 1.001
    safe = _grow(last, STEEPEST if bends or len(points) == 2 else 1.1)
    noisy = _noisy(points, rounding)
    triples = zip(points, points[1:], points[2:], strict=False)
    proportional = _straight(_Point(0, 0.0), before, last, rounding)
    exact = proportional or (not noisy and any(_straight(*triple, rounding) for triple in triples))
    row = (last.share - before.share) / (last.rows - before.rows)
    if last.share + row > (1 if exact else 1.05):
        return None
    if proportional:  # nothing is fixed, so this is the steepest line there can be
        return min(_reach(before, last, 1, 1.0), LEAP * last.rows)
    if resident_known and row * last.rows < GENTLE * last.share:
        return max(safe, 1.25 * last.rows)  # or a peak that is flat close below the budget takes a trial for each row
    if len(points) >= 3 and last.share > before.share and _straight(points[-3], before, last, rounding):
        return _follow(before, last, 1, safe)
    if len(points) >= 4 and (power := _power(*points[-4:-1])):
        error = last.share - _at(points[-4], before, power, last.rows)
        if abs(error) <= max(EXACT * (last.share - points[-4].share), rounding):
            target = _follow(before, last, power, safe)
            return target if target >= last.rows + 0.95 else None
    return _next_rows_in_noise(points, safe) if noisy else safe


def _follow(before: _Point, last: _Point, power: float, safe: float) -> float:
    """Rows at which a proven curve fills the budget; below the knee, halfway to what is safe from the knee on."""
    end = _reach(before, last, power, 1.0)
    if last.share > KNEE:
        return min(end, LEAP * last.rows)
    knee = _Point(_reach(before, last, power, KNEE), KNEE)
    return max(safe, min(end, _grow(knee, 2)))


def _next_rows_in_noise(points: Sequence[_Point], safe: float) -> float:
    """Follow the line from the nearest trial clear of noise, held back by noise; near the end in small steps."""
    last = points[-1]
    first = next((point for point in reversed(points[:-1]) if last.share - point.share > 0.1), points[0])
    low, high = _Point(first.rows, first.share * (1 - NOISE)), _Point(last.rows, last.share * (1 + NOISE))
    target = max(safe, _reach(low, high, 1.05, 1.0))
    if last.share > 0.97:
        target = min(max(target, last.rows * (1 + FINE)), last.rows * 1.03)
    return min(target, LEAP * last.rows)


def _noisy(points: Sequence[_Point], rounding: float) -> bool:
    """Whether a peak dips below the first, or the line through two before it, as a maximum of lines never does."""
    dips = (
        _above(*triple) < -max(10 * EXACT * abs(triple[2].share - triple[0].share), rounding)
        for triple in zip(points, points[1:], points[2:], strict=False)
    )
    return points[-1].share > 1 + rounding or points[1].share < points[0].share - rounding or any(dips)


def _grow(point: _Point, power: float) -> float:
    """Rows at which the budget is full if the whole peak grows like ``rows ** power``."""
    return point.rows * math.pow(min(1.0, point.share), -1 / power)


def _at(first: _Point, second: _Point, power: float, rows: float) -> float:
    """Share at `rows` on the curve ``fixed + c * rows ** power`` through two points."""
    start, end = math.pow(first.rows, power), math.pow(second.rows, power)
    return first.share + (second.share - first.share) * (math.pow(rows, power) - start) / (end - start)


def _reach(first: _Point, second: _Point, power: float, share: float) -> float:
    """Rows at which ``fixed + c * rows ** power`` through two points reaches `share`; the last rows if flat."""
    if second.share <= first.share:
        return second.rows
    start, end = math.pow(first.rows, power), math.pow(second.rows, power)
    part = (share - first.share) / (second.share - first.share)
    return math.pow(max(0.0, start + part * (end - start)), 1 / power)


def _above(first: _Point, second: _Point, third: _Point) -> float:
    """How far the third point lies above the line through the first two."""
    return third.share - _at(first, second, 1, third.rows)


def _straight(first: _Point, second: _Point, third: _Point, rounding: float) -> bool:
    """Whether three points lie on one line, as exactly as bytes can say."""
    return abs(_above(first, second, third)) <= max(EXACT * abs(third.share - first.share), rounding)


def _power(first: _Point, second: _Point, third: _Point) -> float | None:
    """Exponent of the curve ``fixed + c * rows ** power`` through three points, 0.3 to 3; None if they do not rise."""
    if not first.share < second.share < third.share:
        return None
    low, high = 0.3, 3.0
    for _ in range(50):
        power = (low + high) / 2
        low, high = (power, high) if _at(first, second, power, third.rows) < third.share else (low, power)
    return low
