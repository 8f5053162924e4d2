"""How many rows to try next, from the peaks of the trials so far.

That is what is safe, or what a confirmed curve allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

# Share of the budget up to which measured peaks stayed flat or gentle before they turned steep.
KNEE = 3 / 8
# No peak grows faster than rows ** 1.35: the targets go to 1.3, and a little more.
STEEPEST = 1.35
# The rows' part of the peak below which the ops that will fill the budget have not shown yet.
GENTLE = 1 / 4
# A line, however straight, is believed up to this many times the rows that were tried.
LEAP = 32
# Peaks that agree to this part of their rise carry no noise, which is rather 1e-2.
EXACT = 1e-4
# The error that a noisy peak may have.
UNCERTAIN = 0.01
# The error that it has as a rule: the root mean square of +-1% is 0.006.
NOISE = 0.007
# Shares of the budget that a noisy search aims at on its way.
HALFWAY = 0.9
NEARLY = 0.975
# Steps near the end of a noisy search, so that its answer is within 1% of the truth.
FINE = 0.01
# An estimated end as near as this is reached.
REACHED = 0.002


class Point(NamedTuple):
    """One trial that fitted: its rows, and its peak as a share of the budget.

    Peak and budget are without what was resident.
    """

    rows: float
    share: float


def next_rows(points: Sequence[Point], rounding: float, resident_known: bool) -> float | None:
    """Return the rows to try after some trials, in growing order; None if not one row more fits.

    The peak is a maximum of straight lines in the rows, one for each op, none of them below 0 at 0
    rows: convex, and often flat at first. Two things follow. Growing rows as budget / peak always
    fits. And beyond two trials the peak lies on or above the line through them: where that line
    leaves the budget nothing fits any more, but before it does a steeper line may have taken over.
    So:

    1. Grow safely: a little less than budget / peak, since real peaks bend upwards here and there.
    2. A line is a guess until a third trial lies on it, a curve ``fixed + c * rows ** power`` until
       a fourth does. Then follow it; from below the knee only to a little past it, where what takes
       over there shows.
    3. Once the resident bytes are taken off, a line that hardly grows is not the one that fills the
       budget: do not follow.
    4. Peaks that dip below a line are noisy, and no three will agree: follow a curve through those
       that rise clear of it.
    """
    last = points[-1]
    safe = _grow(last, STEEPEST)
    if len(points) == 1:
        return max(2.0, safe)
    previous = points[-2]
    if len(points) > 2 and last.share / previous.share <= (last.rows / previous.rows) ** 1.001:
        # It has not bent.
        safe = _grow(last, 1.1)
    proportional = _straight(Point(0, 0.0), previous, last, rounding)
    power = _proven_power(points, rounding)
    row = (last.share - previous.share) / (last.rows - previous.rows)
    # A byte or so is lost in floats.
    full = 1 + 1e-9 if proportional or power == 1 else 1.05
    if last.share + row > full:
        return None
    # Nothing is fixed, so this is the steepest line there can be.
    if proportional:
        return _reach(previous, last, 1, 1.0)
    # Otherwise a peak that is flat close below the budget would take a trial for each row.
    if resident_known and row * last.rows < GENTLE * last.share:
        return max(safe, 1.25 * last.rows)
    if power:
        end = _reach(previous, last, power, 1.0)
        if end < last.rows + 0.95:
            return None
        if last.share > KNEE:
            return min(end, LEAP * last.rows)
        # Below the knee, go no further than is safe from the knee on.
        knee_rows = _reach(previous, last, power, KNEE)
        return max(safe, min(end, _grow(Point(knee_rows, KNEE), 2)))
    if _noisy(points, rounding):
        return _next_rows_in_noise(points, safe)
    return safe


def _proven_power(points: Sequence[Point], rounding: float) -> float | None:
    """Return the exponent of a curve ``fixed + c * rows ** power`` that the last trial lies on: 1
    of a line through the two before it, 0.3 to 3 of a curve through the three before it; None where
    it lies on neither.
    """
    last = points[-1]
    if len(points) < 3 or last.share <= points[-2].share:
        return None
    if _straight(points[-3], points[-2], last, rounding):
        return 1
    if len(points) < 4 or not points[-4].share < points[-3].share < points[-2].share:
        return None
    first, second, third = points[-4:-1]
    # Bisection: with a higher exponent the curve through the first two rises more beyond them.
    low = 0.3
    high = 3.0
    for _ in range(50):
        power = (low + high) / 2
        if _at(first, second, power, third.rows) < third.share:
            low = power
        else:
            high = power
    tolerance = max(EXACT * (last.share - first.share), rounding)
    return low if abs(last.share - _at(first, second, low, last.rows)) <= tolerance else None


def _next_rows_in_noise(points: Sequence[Point], safe: float) -> float | None:
    """Follow ``fixed + c * rows ** power`` as far as noise lets it be known.

    The answer is None where the end is near enough. What is fixed is the mean of the trials that do
    not rise clear of noise. The first that does tells no power, so the steepest is taken from it,
    to `HALFWAY`; the next two tell one, good for a step to `NEARLY`; from there each estimate of
    the end is as good as its peak, so their mean is taken, a little below. Where a row is more than
    noise a line through the last two will do, held back by noise.
    """
    last = points[-1]
    lowest = min(point.share for point in points)
    flat = [point.share for point in points if point.share < lowest * (1 + 2 * UNCERTAIN)]
    fixed = sum(flat) / len(flat)
    risen = [point for point in points if point.share - fixed > 3 * UNCERTAIN * fixed]
    if last not in risen:
        return max(safe, LEAP * last.rows)
    rise = last.share - fixed
    room = max(0.0, 1 - fixed)
    if FINE * last.rows * math.pow(room / rise, 1 / STEEPEST) < 1:
        low = Point(points[-2].rows, points[-2].share * (1 - NOISE))
        high = Point(last.rows, last.share * (1 + NOISE))
        return max(safe, _reach(low, high, 1.05, 1.0))
    power = STEEPEST
    if len(risen) > 1:
        rows, share = risen[0]
        power = math.log(rise / (share - fixed)) / math.log(last.rows / rows)
        power = min(max(power, 0.85), STEEPEST)
    if last.share < NEARLY - 2 * UNCERTAIN:
        goal = HALFWAY if len(risen) == 1 else NEARLY
        return max(safe, last.rows * math.pow(max(1.0, (goal - fixed) / rise), 1 / power))
    near = [point for point in risen if point.share > NEARLY - 4 * UNCERTAIN]
    ends = [point.rows * math.pow(room / (point.share - fixed), 1 / power) for point in near]
    end = sum(ends) / len(ends)
    if end < last.rows * (1 + REACHED):
        return None
    return max(last.rows * (1 + FINE), end * (1 - FINE))


def _noisy(points: Sequence[Point], rounding: float) -> bool:
    """Return whether a peak lies where a maximum of lines never does.

    That is below the first peak, or below the line through the two before it.
    """
    if points[1].share < points[0].share - rounding:
        return True
    for first, second, third in zip(points, points[1:], points[2:], strict=False):
        tolerance = max(10 * EXACT * abs(third.share - first.share), rounding)
        if third.share - _at(first, second, 1, third.rows) < -tolerance:
            return True
    return False


def _grow(point: Point, power: float) -> float:
    """Return the rows that fill the budget if the whole peak grows like ``rows ** power``."""
    return point.rows * math.pow(min(1.0, point.share), -1 / power)


def _at(first: Point, second: Point, power: float, rows: float) -> float:
    """Return the share at `rows` on the curve ``fixed + c * rows ** power`` through two points."""
    start = math.pow(first.rows, power)
    end = math.pow(second.rows, power)
    rise = second.share - first.share
    return first.share + rise * (math.pow(rows, power) - start) / (end - start)


def _reach(first: Point, second: Point, power: float, share: float) -> float:
    """Return the rows at which ``fixed + c * rows ** power`` through two points reaches `share`.

    Where it is flat, return those of the second point.
    """
    if second.share <= first.share:
        return second.rows
    start = math.pow(first.rows, power)
    end = math.pow(second.rows, power)
    part = (share - first.share) / (second.share - first.share)
    return math.pow(max(0.0, start + part * (end - start)), 1 / power)


def _straight(first: Point, second: Point, third: Point, rounding: float) -> bool:
    """Return whether three points lie on one line, as exactly as bytes can say."""
    tolerance = max(EXACT * abs(third.share - first.share), rounding)
    return abs(third.share - _at(first, second, 1, third.rows)) <= tolerance
