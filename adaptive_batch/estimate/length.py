"""The memory of a training step with rows of one length, on any device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from adaptive_batch._util import count, format_bytes
from adaptive_batch.memory import MemoryCurve

from .fake_step import Resident


@dataclass(frozen=True)
class CurveCheck:
    """A step of a third size, to compare the memory curve with.

    Attributes:
        rows: rows of the step.
        counted_bytes: peak that was counted.
        expected_bytes: peak by the curve.
    """

    rows: int
    counted_bytes: int
    expected_bytes: int

    @property
    def is_off(self) -> bool:
        """Return whether the curve is off by more than a thousandth."""
        return abs(self.counted_bytes - self.expected_bytes) > 1e-3 * self.counted_bytes

    @property
    def warning(self) -> str:
        """Return how far the curve is off; empty where it is not."""
        if not self.is_off:
            return ""
        counted = format_bytes(self.counted_bytes)
        expected = format_bytes(self.expected_bytes)
        return (
            f"{count(self.rows, 'row')} hold {counted}, and the curve of two sizes gives"
            f" {expected}; the former is used, so probe the rows on a device"
        )


@dataclass(frozen=True)
class LengthEstimate:
    """Memory that a training step holds with rows of one length, on any device.

    Attributes:
        resident: before a forward.
        traced_curve: peak of forward and backward by rows, through two traced sizes.
        one_row_bytes: the peak of a single row, which often runs other operations.
        optimizer_peak_bytes: of clipping and the optimizer's step; None with the optimizer in
            backward.
        margin: share by which the peak can exceed what was counted, as the order of a compiled
            step's kernels is not known; 0 of an eager step.
    """

    sequence_length: int
    resident: Resident
    traced_curve: MemoryCurve
    one_row_bytes: int
    optimizer_peak_bytes: int | None
    check: CurveCheck | None = None
    margin: float = 0.0

    @property
    def curve(self) -> MemoryCurve:
        """Peak of forward and backward by rows, with the margin.

        Where the check is off, the curve is scaled to the peak that was counted.
        """
        scale = 1 + Fraction(self.margin)
        if self.check is not None and self.check.is_off:
            scale *= Fraction(self.check.counted_bytes, self.check.expected_bytes)
        lines = (
            replace(
                line,
                fixed_bytes=line.fixed_bytes * scale,
                bytes_per_row=line.bytes_per_row * scale,
            )
            for line in self.traced_curve.lines
        )
        return MemoryCurve(tuple(lines))

    def max_rows(self, budget_bytes: int) -> int | None:
        """Return the rows that fit; 0 where not one does, None where any number does."""
        if (self.optimizer_peak_bytes or 0) > budget_bytes or self.one_row_bytes > budget_bytes:
            return 0
        rows = self.curve.max_rows(budget_bytes)
        if rows is None:
            return None
        return max(1, rows)

    def peak_bytes(self, rows: int) -> int:
        """Return the peak of a step of that many rows, the optimizer's phase included, in bytes."""
        peak = self.curve.peak_bytes(rows)
        # A single row often runs other operations.
        if rows == 1:
            peak = self.one_row_bytes
        return max(peak, self.optimizer_peak_bytes or 0)

    def first_too_large(self, budget_bytes: int) -> str | None:
        """Return the first thing of a run that does not fit; None where a row fits."""
        resident = self.resident
        needed = 0
        for name, size in (
            ("the parameters", resident.parameters),
            ("the buffers", resident.buffers),
            ("the optimizer's state", resident.optimizer),
            ("the gradients that stay", resident.gradients),
        ):
            needed += size
            if needed > budget_bytes:
                return (
                    f"{name} ({format_bytes(size)}, {format_bytes(needed)} with what comes before)"
                )
        for name, peak in (
            ("the optimizer's step", self.optimizer_peak_bytes or 0),
            ("forward and backward of one row", self.one_row_bytes),
        ):
            if peak > budget_bytes:
                return f"{name} ({format_bytes(peak)} at the peak)"
        return None
