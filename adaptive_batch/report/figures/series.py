"""Numbers over a run, few enough for a figure; what stands out stays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Number = TypeVar("Number", int, float)

_LARGEST = 1e100  # beyond it a scale cannot be drawn: such a number is marked as not finite


@dataclass(frozen=True)
class Series:
    """Points in the order in which they came.

    Attributes:
        x, y: of the points; a y that is not finite is a gap.
        not_finite: x of the points whose y was recorded as nan or infinite.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    not_finite: tuple[float, ...] = ()

    @classmethod
    def of(cls, x: Sequence[float], y: Sequence[float]) -> Series:
        """Points in which each y that cannot be drawn is told apart."""
        drawn = tuple(value if abs(value) < _LARGEST else math.nan for value in y)  # also where y is nan
        return cls(tuple(x), drawn, tuple(at for at, value in zip(x, drawn, strict=True) if math.isnan(value)))

    @property
    def finite(self) -> list[float]:
        """Every y that can be drawn."""
        return [value for value in self.y if math.isfinite(value)]

    def downsampled(self, *, buckets: int) -> Series:
        """At most two points and a gap for each of so many equal parts: the smallest and the largest, in their order."""
        if len(self.x) <= 2 * buckets:
            return self
        x: list[float] = []
        y: list[float] = []
        for bucket in range(buckets):
            begin, end = (len(self.x) * edge // buckets for edge in (bucket, bucket + 1))
            places = [place for place in range(begin, end) if math.isfinite(self.y[place])]
            ends = {min(places, key=self.y.__getitem__), max(places, key=self.y.__getitem__)} if places else set()
            for place in sorted(ends):
                x.append(self.x[place])
                y.append(self.y[place])
            if len(places) < end - begin:
                x.append(self.x[end - 1])
                y.append(math.nan)
        return Series(tuple(x), tuple(y), thinned(self.not_finite, most=buckets))

    def running_mean(self, *, window: int, points: int) -> Series:
        """The mean of a point and the `window` - 1 before it, at so many points; what is not finite is left out."""
        places = thinned(range(len(self.x)), most=points)
        means = []
        for place in places:
            values = [value for value in self.y[max(0, place + 1 - window) : place + 1] if math.isfinite(value)]
            means.append(math.fsum(values) / len(values) if values else math.nan)
        return Series(tuple(self.x[place] for place in places), tuple(means))


def thinned(values: Sequence[Number], *, most: int) -> tuple[Number, ...]:
    """The values, or `most` of them spread evenly, the last among them, and the first where there is room for two."""
    if len(values) <= most:
        return tuple(values)
    if most == 1:
        return (values[-1],)
    return tuple(values[round(place * (len(values) - 1) / (most - 1))] for place in range(most))
