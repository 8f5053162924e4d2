"""The peak of forward and backward as a function of the rows: a maximum of straight lines, one for
each operation.

What is alive after an operation is a straight line in the rows, so two sizes that ran the same
program tell every line, and with them the peak at any size. Only the lines that are highest
somewhere are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Trace:
    """The bytes alive after each operation of a trial; `program` is the same for the same
    operations, within one process.
    """

    program: int
    live_bytes: Sequence[int]


@dataclass(frozen=True)
class Line:
    """Bytes alive after one operation, by its number in the trace: ``fixed_bytes + bytes_per_row *
    rows``; the slope is 0 or more.
    """

    fixed_bytes: Fraction
    bytes_per_row: Fraction
    operation: int

    def at(self, rows: int) -> int:
        """Return the bytes alive at that many rows."""
        return math.ceil(self.fixed_bytes + self.bytes_per_row * rows)


@dataclass(frozen=True)
class MemoryCurve:
    """Most bytes alive in forward and backward, by rows: of all lines those that are the highest at
    some number of rows, in order.
    """

    lines: tuple[Line, ...]

    @classmethod
    def from_traces(cls, fewer: tuple[int, Trace], more: tuple[int, Trace]) -> MemoryCurve:
        """Return the curve through two sizes, each as rows and trace, that ran the same program."""
        few, low = fewer
        many, high = more
        assert low.program == high.program, "they ran other operations"
        assert few < many, (few, many)
        steps = many - few
        # Of the lines that rise as fast, the highest is enough, and the first of those that are
        # alike.
        highest: dict[int, tuple[int, int]] = {}
        for operation, (below, above) in enumerate(
            zip(low.live_bytes, high.live_bytes, strict=True)
        ):
            rise = max(0, above - below)
            if rise not in highest or above > highest[rise][0]:
                highest[rise] = above, operation
        lines = [
            Line(Fraction(above) - Fraction(rise * many, steps), Fraction(rise, steps), operation)
            for rise, (above, operation) in sorted(highest.items())
        ]
        return cls(tuple(_upper_envelope(lines)))

    def peak_bytes(self, rows: int) -> int:
        """Return the most bytes alive at that many rows."""
        return max(line.at(rows) for line in self.lines)

    def highest(self, rows: int) -> Line:
        """Return the line that makes the peak at that many rows; the first of several."""
        return max(
            self.lines,
            key=lambda line: (line.fixed_bytes + line.bytes_per_row * rows, -line.operation),
        )

    def max_rows(self, budget_bytes: int) -> int | None:
        """Return the most rows whose peak stays within the budget; 0 where not one does, None where
        any number does.
        """
        limits = []
        for line in self.lines:
            if line.bytes_per_row:
                limits.append(math.floor((budget_bytes - line.fixed_bytes) / line.bytes_per_row))
            elif line.fixed_bytes > budget_bytes:
                return 0
        if not limits:
            return None
        return max(0, min(limits))


def _upper_envelope(lines: Iterable[Line]) -> list[Line]:
    """Return of lines by growing slope, those that are the highest at some number of rows from 1
    on.
    """
    hull: list[Line] = []
    for line in lines:
        while hull and _overtakes(hull[-1], line) <= (
            _overtakes(hull[-2], hull[-1]) if len(hull) > 1 else 1
        ):
            hull.pop()
        hull.append(line)
    return hull


def _overtakes(flatter: Line, steeper: Line) -> Fraction:
    """Return the rows from which the steeper of two lines is the higher."""
    return (flatter.fixed_bytes - steeper.fixed_bytes) / (
        steeper.bytes_per_row - flatter.bytes_per_row
    )
