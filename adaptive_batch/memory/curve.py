"""The peak of forward and backward as a function of the rows: a maximum of straight lines, one for
each operation.

The bytes alive after an operation are linear in the rows, so traces of two sizes that ran the same
program determine every line, and the peak at any size. Only the upper envelope of the lines is
kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Trace:
    """The bytes alive after each operation of a trial.

    Attributes:
        program: hash of the operations, comparable within one process.
        live_bytes: bytes alive after each operation.
    """

    program: int
    live_bytes: Sequence[int]


@dataclass(frozen=True)
class Line:
    """Bytes alive after one operation of a trace: ``fixed_bytes + bytes_per_row * rows``."""

    fixed_bytes: Fraction
    bytes_per_row: Fraction
    operation: int

    def at(self, rows: int) -> int:
        """Return the bytes alive with `rows` rows."""
        return math.ceil(self.fixed_bytes + self.bytes_per_row * rows)


@dataclass(frozen=True)
class MemoryCurve:
    """The peak of forward and backward by rows: the upper envelope of lines, sorted by slope."""

    lines: tuple[Line, ...]

    @classmethod
    def from_traces(cls, fewer: tuple[int, Trace], more: tuple[int, Trace]) -> MemoryCurve:
        """Return the curve through two (rows, trace) pairs of the same program."""
        few_rows, few_trace = fewer
        many_rows, many_trace = more
        assert few_trace.program == many_trace.program, "the traces have different operations"
        assert few_rows < many_rows, (few_rows, many_rows)
        # The highest operation of each rise; of equal ones, the first.
        highest: dict[int, int] = {}
        for operation, (few_bytes, many_bytes) in enumerate(
            zip(few_trace.live_bytes, many_trace.live_bytes, strict=True)
        ):
            rise = max(0, many_bytes - few_bytes)
            if rise not in highest or many_bytes > many_trace.live_bytes[highest[rise]]:
                highest[rise] = operation
        lines = []
        for rise, operation in sorted(highest.items()):
            slope = Fraction(rise, many_rows - few_rows)
            fixed_bytes = many_trace.live_bytes[operation] - slope * many_rows
            lines.append(Line(fixed_bytes, slope, operation))
        return cls(tuple(_upper_envelope(lines)))

    def peak_bytes(self, rows: int) -> int:
        """Return the peak with `rows` rows."""
        return max(line.at(rows) for line in self.lines)

    def highest(self, rows: int) -> Line:
        """Return the first line that reaches the peak with `rows` rows."""
        return max(
            self.lines,
            key=lambda line: (line.fixed_bytes + line.bytes_per_row * rows, -line.operation),
        )

    def max_rows(self, budget_bytes: int) -> int | None:
        """Return the most rows whose peak stays within the budget; None if any number does."""
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
    """Return the lines that are highest at some number of rows; `lines` are sorted by slope."""
    envelope: list[Line] = []
    for line in lines:
        # A line leaves if the steeper new one crosses it before it becomes the highest.
        while envelope and _crossing(envelope[-1], line) <= _first_rows(envelope):
            envelope.pop()
        envelope.append(line)
    return envelope


def _first_rows(envelope: Sequence[Line]) -> Fraction | int:
    """Return the rows from which the last line of an envelope is the highest."""
    return _crossing(envelope[-2], envelope[-1]) if len(envelope) > 1 else 1


def _crossing(flatter: Line, steeper: Line) -> Fraction:
    """Return the number of rows at which two lines cross."""
    return (flatter.fixed_bytes - steeper.fixed_bytes) / (
        steeper.bytes_per_row - flatter.bytes_per_row
    )
