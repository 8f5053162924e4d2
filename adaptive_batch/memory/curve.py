"""The peak of forward and backward as a function of the rows: a maximum of straight lines, one for
each operation.

The bytes alive after an operation are linear in the rows, so traces of two sizes that ran the same
program determine every line, and the peak at any size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    """Bytes alive after an operation: ``fixed_bytes + bytes_per_row * rows``."""

    fixed_bytes: Fraction
    bytes_per_row: Fraction

    def at(self, rows: int) -> int:
        """Return the bytes alive with `rows` rows."""
        return math.ceil(self.fixed_bytes + self.bytes_per_row * rows)


@dataclass(frozen=True)
class MemoryCurve:
    """The peak of forward and backward by rows: the maximum of lines."""

    lines: tuple[Line, ...]

    @classmethod
    def from_traces(cls, fewer: tuple[int, Trace], more: tuple[int, Trace]) -> MemoryCurve:
        """Return the curve through two (rows, trace) pairs of the same program."""
        few_rows, few_trace = fewer
        many_rows, many_trace = more
        assert few_trace.program == many_trace.program, "the traces have different operations"
        assert few_rows < many_rows, (few_rows, many_rows)
        # Most bytes of the larger trace by rise: of parallel lines, only the highest matters.
        highest: dict[int, int] = {}
        for few_bytes, many_bytes in zip(few_trace.live_bytes, many_trace.live_bytes, strict=True):
            rise = max(0, many_bytes - few_bytes)
            highest[rise] = max(many_bytes, highest.get(rise, 0))
        lines = []
        for rise, many_bytes in highest.items():
            slope = Fraction(rise, many_rows - few_rows)
            lines.append(Line(many_bytes - slope * many_rows, slope))
        return cls(tuple(lines))

    def peak_bytes(self, rows: int) -> int:
        """Return the peak with `rows` rows."""
        return max(line.at(rows) for line in self.lines)

    def highest(self, rows: int) -> Line:
        """Return the line of the peak with `rows` rows; where lines cross, the steeper one."""
        return max(
            self.lines,
            key=lambda line: (line.fixed_bytes + line.bytes_per_row * rows, line.bytes_per_row),
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
