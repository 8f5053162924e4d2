"""The result of an estimate: rows that fit on each device, what they hold, its tables, its file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path

from adaptive_batch._util import atomic_write, count, format_bound, format_bytes, from_json
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import Line, MemoryCurve

from .fake_step import Resident


@dataclass(frozen=True)
class Fit:
    """How many rows of one length fit on one device.

    Attributes:
        max_batch_size: most rows with which no allocation has to be tried again.
        max_batch_size_with_retries: most rows that fit at all, where the allocator gives back what
            it has cached and tries again.
        allocated_bytes, reserved_bytes: peaks at `max_batch_size`, or with one row where none fits:
            of what tensors hold, and of what the allocator takes from the device for them.
        first_too_large: the first thing that does not fit, in the order in which a run would need
            it; None where a row fits.
        bytes_per_row: what one row more adds to the peak.
        composition: bytes by kind at the peak of forward and backward.
        site: the operation there with the largest transient allocations; empty if they were not
            looked up.
    """

    sequence_length: int
    max_batch_size: int
    max_batch_size_with_retries: int
    allocated_bytes: int
    reserved_bytes: int
    first_too_large: str | None = None
    bytes_per_row: float = 0.0
    composition: dict[str, int] = field(default_factory=dict)
    site: str = ""

    def explain(self) -> str:
        """Return what the peak is made of, and where in the step it is."""
        total = sum(self.composition.values())
        parts = sorted(self.composition.items(), key=lambda item: -item[1])
        shares = ", ".join(
            f"{name} {format_bytes(size)}" for name, size in parts if size > 0.005 * total
        )
        rows = count(max(1, self.max_batch_size), "row")
        text = f"peak of {rows}{_of_length(self.sequence_length)}: {format_bytes(total)}: {shares}"
        return f"{text}\n    reached in {self.site}" if self.site else text

    def describe_too_large(self) -> str:
        """Return why not one row fits; empty where one does."""
        if self.max_batch_size_with_retries > self.max_batch_size == 0:
            rows = count(self.max_batch_size_with_retries, "row")
            return (
                "no row runs without the allocator giving its cache back in mid-step;"
                f" {rows} with it, which is slow"
            )
        return f"too large: {self.first_too_large}" if self.first_too_large else ""


@dataclass(frozen=True)
class Target:
    """A device, and how much of it a training step may use.

    Attributes:
        budget_bytes: what an allocator may take of it.
        taken: what the rest is for, each with its bytes: headroom, the CUDA context.
        source: where `total_bytes` is from; empty where it was given as a size.
        lengths: what fits, for each length that was estimated.
        reference_rows: for each length, the most rows of a reference that runs without gradients in
            micro-batches of its own, by what is allocated; empty where there is none.
    """

    name: str
    total_bytes: int
    budget_bytes: int
    taken: tuple[tuple[str, int], ...] = ()
    source: str = ""
    lengths: tuple[Fit, ...] = ()
    reference_rows: tuple[int, ...] = ()

    def is_called(self, name: str) -> bool:
        """Return whether a name or a size stands for this device."""
        from .devices import find_device

        if name in (self.name, self.name.partition(" (")[0]):
            return True
        try:
            return find_device(name).describe() == self.name
        except SettingError:
            return False


@dataclass(frozen=True)
class MemoryBreakdown:
    """One line of a memory curve, and what its bytes are.

    Attributes:
        activations: made by forward and kept for backward: fixed bytes, and bytes per row.
        gradients: bytes of parameters' gradients that this step has made by then.
        site: the operation of the line and the largest transient allocations there; empty if they
            were not looked up.
    """

    fixed_bytes: Fraction
    bytes_per_row: Fraction
    activations: tuple[float, float]
    gradients: int
    site: str = ""

    def at(self, rows: int, resident: Resident) -> dict[str, float]:
        """Bytes by kind at that many rows, in the order in which a figure stacks them."""
        total = math.ceil(self.fixed_bytes + self.bytes_per_row * rows)
        activations = self.activations[0] + self.activations[1] * rows
        return {
            "parameters": resident.parameters,
            "buffers": resident.buffers,
            "optimizer state": resident.optimizer,
            "gradients": resident.gradients + self.gradients,
            "activations": activations,
            "backward temporaries": max(0.0, total - resident.total - activations - self.gradients),
        }


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

    def __str__(self) -> str:
        if self.is_off:
            counted = format_bytes(self.counted_bytes)
            expected = format_bytes(self.expected_bytes)
            return (
                f"warning: {count(self.rows, 'row')} hold {counted}, and the curve of two sizes"
                f" gives {expected}; the former is used, so probe the rows on a device"
            )
        error = abs(self.counted_bytes - self.expected_bytes) / self.counted_bytes
        accuracy = "to the byte"
        if error:
            accuracy = f"within {error:.2%}"
        return f"checked: a third size, {count(self.rows, 'row')}, lies on the curve {accuracy}"


@dataclass(frozen=True)
class LengthEstimate:
    """What a training step holds with rows of one length, on any device.

    Attributes:
        resident: before a forward.
        breakdowns: one for each line of the curve of forward and backward.
        one_row_bytes: the peak of a single row, which often runs other operations.
        optimizer_peak_bytes: of clipping and the optimizer's step; None with the optimizer in
            backward.
        margin: share by which the peak can exceed what was counted, as the order of a compiled
            step's kernels is not known; 0 of an eager step.
    """

    sequence_length: int
    resident: Resident
    breakdowns: tuple[MemoryBreakdown, ...]
    one_row_bytes: int
    optimizer_peak_bytes: int | None
    check: CurveCheck | None = None
    margin: float = 0.0

    @property
    def curve(self) -> MemoryCurve:
        """Peak of forward and backward with the margin, by rows; operations are the places of the
        breakdowns.

        Where the check is off, the curve is scaled to the peak that was counted.
        """
        scale = 1 + Fraction(self.margin)
        if self.check is not None and self.check.is_off:
            scale *= Fraction(self.check.counted_bytes, self.check.expected_bytes)
        lines = [
            Line(breakdown.fixed_bytes * scale, breakdown.bytes_per_row * scale, place)
            for place, breakdown in enumerate(self.breakdowns)
        ]
        return MemoryCurve(tuple(lines))

    def max_rows(self, budget_bytes: int) -> int | None:
        """Return the rows that fit; 0 where not one does, None where any number does."""
        if (self.optimizer_peak_bytes or 0) > budget_bytes or self.one_row_bytes > budget_bytes:
            return 0
        rows = self.curve.max_rows(budget_bytes)
        if rows is None:
            return None
        return max(1, rows)

    def counted_fit(self, budget_bytes: int, *, maximum: int) -> Fit:
        """Return what fits where each byte that is allocated is one that is reserved."""
        rows = self.max_rows(budget_bytes)
        if rows is None or rows > maximum:
            rows = maximum
        peak = self.peak_bytes(max(1, rows))
        return Fit(self.sequence_length, rows, rows, peak, peak, self.first_too_large(budget_bytes))

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

    def composition(self, rows: int) -> dict[str, float]:
        """Return bytes by kind at the peak of that many rows."""
        return self.breakdowns[self.curve.highest(rows).operation].at(rows, self.resident)

    def explained(self, fit: Fit) -> Fit:
        """Return a fit of this length with what its peak is made of."""
        rows = max(1, fit.max_batch_size)
        parts = {name: round(size) for name, size in self.composition(rows).items()}
        return replace(
            fit,
            bytes_per_row=float(self.curve.highest(max(2, rows)).bytes_per_row),
            composition=parts,
            site=self.breakdowns[self.curve.highest(rows).operation].site,
        )


@dataclass(frozen=True)
class Change:
    """One change of the configuration, estimated in the same way.

    Attributes:
        overrides: the exact ``key=value`` to type.
        bounds: rows that fit under it on each device; None for any number.
        refused: why it could not be estimated; empty where it was.
    """

    overrides: tuple[str, ...]
    cost: str
    bounds: tuple[int | None, ...] = ()
    refused: str = ""


@dataclass(frozen=True)
class MemoryEstimate:
    """For each device and length, the rows that fit.

    Attributes:
        maximum: rows above which a real search would not look.
        world_size: ranks that share the model; all figures are of one of them.
        left_out: what is not counted as it would be on the device, a sentence each.
        changes: single changes and what they would bring, at the first of `lengths`.
        refused: those that could not be estimated.
    """

    devices: tuple[Target, ...]
    lengths: tuple[LengthEstimate, ...]
    maximum: int
    world_size: int = 1
    left_out: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    refused: tuple[Change, ...] = ()
    seconds: float = 0.0

    def bound(self, length: LengthEstimate, device: Target) -> int:
        """Return the rows that fit on a device without allocator retries, none above `maximum`."""
        return self.fit(length, device).max_batch_size

    def fit(self, length: LengthEstimate, device: Target) -> Fit:
        """Return what fits of one length on a device."""
        return device.lengths[self.lengths.index(length)]

    def fits(self, device: str, rows: int = 1) -> bool:
        """Return whether that many rows, of each length, fit on a device without allocator retries.

        Args:
            device: a name or a size, as it was given to the estimate or as :attr:`devices` have it.

        Raises:
            SettingError: it is not among the devices of this estimate.
        """
        for target in self.devices:
            if target.is_called(device):
                return all(fit.max_batch_size >= rows for fit in target.lengths)
        names = ", ".join(target.name for target in self.devices)
        raise SettingError("device", device, f"this is an estimate for {names}; give one of them")

    def format_rows(self, rows: int | None) -> str:
        """Return the rows that fit, as text: with a plus where more may fit."""
        return format_bound(rows, self.maximum)

    def table(self) -> str:
        """Return aligned text: the rows that fit on each device, what limits them, what they are
        made of.
        """
        lines = self._rows_of_table()
        if any(length.margin for length in self.lengths):
            lines.append(
                "compiled: a step needs at most this; adaptive-batch emulate counts what it needs"
            )
        for device in self.devices:
            budget = format_bytes(device.budget_bytes)
            total = format_bytes(device.total_bytes)
            taken = "".join(f", {format_bytes(size)} for {name}" for name, size in device.taken)
            lines.append(f"{device.name}: {budget} may be used of {total}{taken}")
            for fit in device.lengths:
                of_length = _of_length(fit.sequence_length)
                if too_large := fit.describe_too_large():
                    lines.append(f"  a row{of_length}: {too_large}")
                lines.append(f"  {fit.explain()}")
            for fit, reference_rows in zip(device.lengths, device.reference_rows, strict=False):
                rows = self.format_rows(reference_rows)
                of_length = _of_length(fit.sequence_length)
                lines.append(f"  the reference alone: {rows} rows{of_length} at once")
        lines += self._resident_lines()
        lines += [str(length.check) for length in self.lengths if length.check]
        lines += [f"left out: {sentence}" for sentence in self.left_out]
        return "\n".join(lines)

    def _rows_of_table(self) -> list[str]:
        """Return the aligned lines of devices and lengths."""
        fits = [fit for device in self.devices for fit in device.lengths]
        has_reserved = any(fit.reserved_bytes != fit.allocated_bytes for fit in fits)
        has_tokens = any(fit.sequence_length > 1 for fit in fits)
        rows = []
        for device in self.devices:
            for fit in device.lengths:
                row = {"device": device.name}
                if has_tokens:
                    row["length"] = str(fit.sequence_length)
                row["max_batch_size"] = self.format_rows(fit.max_batch_size)
                if has_reserved:
                    row["with retries"] = self.format_rows(fit.max_batch_size_with_retries)
                if has_tokens:
                    row["tokens"] = str(fit.max_batch_size * fit.sequence_length)
                row["allocated" if has_reserved else "peak"] = format_bytes(fit.allocated_bytes)
                if has_reserved:
                    row["reserved"] = format_bytes(fit.reserved_bytes)
                row["a row"] = format_bytes(fit.bytes_per_row)
                row["free"] = "-"
                if fit.max_batch_size:
                    row["free"] = format_bytes(device.budget_bytes - fit.reserved_bytes)
                rows.append(row)
        return _table(rows)

    def _resident_lines(self) -> list[str]:
        """Return the lines about what a step holds whatever the batch."""
        resident = self.lengths[0].resident
        on_ranks = ""
        if self.world_size > 1:
            on_ranks = f" on each of {self.world_size} ranks"
        gradients = ""
        if resident.gradients:
            gradients = f", gradients that stay {format_bytes(resident.gradients)}"
        lines = [
            f"fixed{on_ranks}: {format_bytes(resident.total)}: parameters"
            f" {format_bytes(resident.parameters)}, optimizer state"
            f" {format_bytes(resident.optimizer)}{gradients}, buffers"
            f" {format_bytes(resident.buffers)}"
        ]
        step_bytes = self.lengths[0].optimizer_peak_bytes
        if step_bytes is not None:
            size = format_bytes(step_bytes)
            lines.append(f"optimizer's step: {size} at its peak, whatever the batch")
        return lines

    def table_of_changes(self) -> str:
        """Return aligned text: what each single change would bring, the best first."""
        if not self.changes:
            return ""
        length = self.lengths[0]
        overrides = [" ".join(change.overrides) for change in self.changes]
        columns = [["key=value", "(as it is)", *overrides]]
        for number, device in enumerate(self.devices):
            bounds = [change.bounds[number] for change in self.changes]
            cells = [self.bound(length, device), *bounds]
            columns.append([device.name, *map(self.format_rows, cells)])
        costs = ["  what it costs", "", *(f"  {change.cost}" for change in self.changes)]
        of_length = _of_length(length.sequence_length)
        lines = [f"what one change would bring, in rows{of_length}:"]
        for line, cost in zip(_aligned(columns), costs, strict=True):
            lines.append(f"{line}{cost}")
        return "\n".join(lines)

    def save(self, path: Path) -> None:
        """Write it as JSON, whole or not at all."""
        # Fractions of the curve become numbers.
        atomic_write(path, json.dumps(asdict(self), indent=2, default=float))


def read_estimate(path: Path) -> MemoryEstimate | None:
    """Return the estimate that a file holds; None where there is none that can be read."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        estimate: MemoryEstimate = from_json(MemoryEstimate, saved)
    except (OSError, ValueError, TypeError, OverflowError):
        return None
    if not estimate.devices or not estimate.lengths:
        return None
    if not all(length.breakdowns for length in estimate.lengths):
        return None
    return estimate


def ranked(changes: Sequence[Change], now: Sequence[int]) -> tuple[Change, ...]:
    """Return the changes that let more fit on some device, the one with the greatest gain first.

    The one with the fewest keys breaks ties.
    """
    gains: dict[Change, float] = {}
    for change in changes:
        lets_more_fit = False
        gain = 0.0
        for rows, current_rows in zip(change.bounds, now, strict=False):
            changed_rows = math.inf if rows is None else rows
            lets_more_fit = lets_more_fit or changed_rows > current_rows
            gain += changed_rows / max(0.5, current_rows)
        if lets_more_fit:
            gains[change] = gain
    return tuple(sorted(gains, key=lambda change: (-gains[change], len(change.overrides))))


def _of_length(tokens: int) -> str:
    """Return the length of a row as text; empty where rows are no tokens."""
    return f" of {tokens} tokens" if tokens > 1 else ""


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the lines of a table whose rows have a cell for each heading."""
    return _aligned([[heading, *(row[heading] for row in rows)] for heading in rows[0]])


def _aligned(columns: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for first, *others in zip(*columns, strict=True):
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        lines.append(" ".join(cells))
    return lines
