"""The result of an estimate: memory of a step, rows that fit on each device, tables, and file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path

from adaptive_batch._util import atomic_write, count, format_bound, format_bytes
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import MemoryCurve

from .fake_step import Resident


@dataclass(frozen=True)
class CurveCheck:
    """Check of the memory curve against a traced step of a third size.

    Attributes:
        rows: rows of the step.
        counted_bytes: traced peak.
        expected_bytes: peak of the curve.
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
        """Describe the error of a curve that is off."""
        counted = format_bytes(self.counted_bytes)
        expected = format_bytes(self.expected_bytes)
        return (
            f"a traced step of {count(self.rows, 'row')} holds {counted}, but the curve of two"
            f" sizes gives {expected}; the curve is scaled, so check the rows on a device"
        )


@dataclass(frozen=True)
class LengthEstimate:
    """Memory of a training step with rows of one length.

    Attributes:
        sequence_length: tokens of a row.
        resident: bytes before a forward.
        traced_curve: peak of forward and backward by rows, from two traced sizes.
        one_row_bytes: peak of a single row, which often runs other operations.
        optimizer_peak_bytes: peak of clipping and the optimizer's step; None with the optimizer in
            backward.
        check: comparison of the curve with a third size; None if it was not traced.
        margin: share by which the peak can exceed the traced one, since the order of compiled
            kernels is unknown; 0 for an eager step.
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
        """Peak of forward and backward by rows, with the margin, scaled to a check that is off."""
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
        """Return the most rows that fit; None if any number does."""
        if (self.optimizer_peak_bytes or 0) > budget_bytes or self.one_row_bytes > budget_bytes:
            return 0
        rows = self.curve.max_rows(budget_bytes)
        # The curve does not apply to a single row, which fits here.
        return None if rows is None else max(1, rows)

    def peak_bytes(self, rows: int) -> int:
        """Return the peak of a step, the optimizer's step included, in bytes."""
        # A single row often runs other operations than those of the curve.
        peak = self.one_row_bytes if rows == 1 else self.curve.peak_bytes(rows)
        return max(peak, self.optimizer_peak_bytes or 0)

    def first_too_large(self, budget_bytes: int) -> str | None:
        """Describe the first part of a run that does not fit; None if a row fits."""
        resident = self.resident
        if not budget_bytes:
            return "context and headroom take the whole device"
        needed = 0
        for name, size in (
            ("the parameters", resident.parameters),
            ("the buffers", resident.buffers),
            ("the optimizer's state", resident.optimizer),
            ("the kept gradients", resident.gradients),
        ):
            needed += size
            if needed > budget_bytes:
                return (
                    f"{name} ({format_bytes(size)}, {format_bytes(needed)} with the parts before)"
                )
        for name, peak in (
            ("the optimizer's step", self.optimizer_peak_bytes or 0),
            ("forward and backward of one row", self.one_row_bytes),
        ):
            if peak > budget_bytes:
                return f"{name} ({format_bytes(peak)} at the peak)"
        return None


@dataclass(frozen=True)
class Fit:
    """The rows of one length that fit on one device.

    Attributes:
        sequence_length: tokens of a row.
        max_batch_size: most rows that run without a retry of the allocator.
        allocated_bytes, reserved_bytes: peaks at `max_batch_size`, or of one row if no row fits.
        first_too_large: first part of a run that does not fit; None if a row fits.
        bytes_per_row: memory of one more row at the peak.
        composition: bytes by kind at the peak of forward and backward.
        optimizer_bytes: peak of clipping and the optimizer's step.
    """

    sequence_length: int
    max_batch_size: int
    allocated_bytes: int
    reserved_bytes: int
    first_too_large: str | None = None
    bytes_per_row: float = 0.0
    composition: dict[str, int] = field(default_factory=dict)
    optimizer_bytes: int = 0

    def explain(self) -> str:
        """Describe the peak with its bytes by kind, the largest first."""
        total = sum(self.composition.values())
        parts = sorted(self.composition.items(), key=lambda item: -item[1])
        # Less than half a percent is not worth a word.
        shares = ", ".join(
            f"{name} {format_bytes(size)}" for name, size in parts if size > 0.005 * total
        )
        rows = count(max(1, self.max_batch_size), "row")
        of_length = _format_length(self.sequence_length)
        lines = [f"peak of {rows}{of_length}: {format_bytes(total)}: {shares}"]
        if self.optimizer_bytes > total:
            size = format_bytes(self.optimizer_bytes)
            lines.append(f"  the optimizer's step needs more: {size}, for any batch")
        return "\n  ".join(lines)


@dataclass(frozen=True)
class Target:
    """A device, and the memory of it that a training step may use.

    Attributes:
        name: name with the memory.
        total_bytes: memory of the device.
        budget_bytes: memory for the allocator.
        taken: other uses with their bytes: headroom, the CUDA context.
        lengths: rows that fit for each estimated length.
    """

    name: str
    total_bytes: int
    budget_bytes: int
    taken: tuple[tuple[str, int], ...] = ()
    lengths: tuple[Fit, ...] = ()


@dataclass(frozen=True)
class Change:
    """A change of the configuration and its estimate.

    Attributes:
        overrides: ``key=value`` arguments of the change.
        cost: disadvantage of the change.
        bounds: rows that fit on each device; None for any number.
        refused: reason for a missing estimate, or "".
    """

    overrides: tuple[str, ...]
    cost: str
    bounds: tuple[int | None, ...] = ()
    refused: str = ""


@dataclass(frozen=True)
class MemoryEstimate:
    """The rows that fit for each device and length.

    Attributes:
        devices: devices with the rows that fit.
        maximum: limit of the rows.
        world_size: ranks that share the model; all figures are per rank.
        left_out: uncounted memory, one sentence each.
        changes: single changes with their estimates for the first length.
        refused: changes that could not be estimated.
        seconds: duration of the estimate.
        lengths: memory of a step on the first kind of device; not saved in files.
    """

    devices: tuple[Target, ...]
    maximum: int
    world_size: int = 1
    left_out: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    refused: tuple[Change, ...] = ()
    seconds: float = 0.0
    lengths: tuple[LengthEstimate, ...] = field(default=(), compare=False, repr=False)

    def fits(self, device: str, rows: int = 1) -> bool:
        """Return whether rows of each length fit on a device without allocator retries.

        Args:
            device: name or size of a device of the estimate, or `Target.name`.
            rows: number of rows.

        Raises:
            SettingError: the estimate does not have the device.
        """
        # devices.py imports this module.
        from .devices import find_device

        targets = {target.name: target for target in self.devices}
        name = device if device in targets else find_device(device, "device").describe()
        if name not in targets:
            names = ", ".join(target_name.partition(" (")[0] for target_name in targets)
            raise SettingError("device", device, f"the estimate has {names}; give one of them")
        return all(fit.max_batch_size >= rows for fit in targets[name].lengths)

    def format_rows(self, rows: int | None) -> str:
        """Format the rows that fit; a plus means that more may fit."""
        return format_bound(rows, self.maximum)

    def table(self) -> str:
        """Return the rows that fit on each device, with limits and composition, as aligned text."""
        lines = self._rows_of_table()
        if any(length.margin for length in self.lengths):
            lines.append(
                "compiled: these figures are upper bounds; adaptive-batch emulate gives exact ones"
            )
        on_ranks = f" on each of {self.world_size} ranks" if self.world_size > 1 else ""
        for device in self.devices:
            budget = format_bytes(device.budget_bytes)
            total = format_bytes(device.total_bytes)
            taken = "".join(f", {format_bytes(size)} for {name}" for name, size in device.taken)
            lines.append(f"{device.name}: {budget} may be used{on_ranks} of {total}{taken}")
            for fit in device.lengths:
                if fit.first_too_large is not None:
                    of_length = _format_length(fit.sequence_length)
                    lines.append(f"  a row{of_length}: too large: {fit.first_too_large}")
                lines.append(f"  {fit.explain()}")
        checks = [length.check for length in self.lengths if length.check and length.check.is_off]
        lines += [f"warning: {check.warning}" for check in checks]
        lines += [f"left out: {sentence}" for sentence in self.left_out]
        return "\n".join(lines)

    def _rows_of_table(self) -> list[str]:
        """Return the aligned lines of devices and lengths."""
        fits = [fit for device in self.devices for fit in device.lengths]
        # Without a caching allocator, reserved memory equals allocated memory.
        has_reserved = any(fit.reserved_bytes != fit.allocated_bytes for fit in fits)
        has_tokens = any(fit.sequence_length > 1 for fit in fits)
        rows = []
        for device in self.devices:
            for fit in device.lengths:
                row = {"device": device.name}
                if has_tokens:
                    row["length"] = str(fit.sequence_length)
                row["max_batch_size"] = self.format_rows(fit.max_batch_size)
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

    def table_of_changes(self) -> str:
        """Return the effect of each single change as aligned text, the best first."""
        if not self.changes:
            return ""
        rows = [{"key=value": "(unchanged)"}]
        rows += [{"key=value": " ".join(change.overrides)} for change in self.changes]
        for number, device in enumerate(self.devices):
            changed = [change.bounds[number] for change in self.changes]
            bounds = [device.lengths[0].max_batch_size, *changed]
            for row, bound in zip(rows, bounds, strict=True):
                row[device.name] = self.format_rows(bound)
        # One for each line of the table: heading, unchanged, changes.
        costs = ["cost", "", *(change.cost for change in self.changes)]
        of_length = _format_length(self.devices[0].lengths[0].sequence_length)
        lines = [f"effect of one change, in rows{of_length}:"]
        for line, cost in zip(_table(rows), costs, strict=True):
            lines.append(f"{line}  {cost}".rstrip())
        return "\n".join(lines)

    def save(self, path: Path) -> None:
        """Write the estimate as JSON, atomically."""
        # asdict() would convert the large lengths, which are not saved.
        values = asdict(replace(self, lengths=()))
        del values["lengths"]
        atomic_write(path, json.dumps(values, indent=2))


def rank_changes(changes: Sequence[Change], now: Sequence[int]) -> tuple[Change, ...]:
    """Return the changes with more rows on some device, the greatest gain first.

    Among equal gains, the change with the fewest keys comes first.
    """
    gains: dict[Change, float] = {}
    for change in changes:
        if change.refused:
            continue
        # None: any number of rows fits.
        bounds = [math.inf if bound is None else bound for bound in change.bounds]
        if any(bound > current for bound, current in zip(bounds, now, strict=True)):
            # Where nothing fits now, the first row counts as a doubling.
            gains[change] = sum(
                bound / max(current, 0.5) for bound, current in zip(bounds, now, strict=True)
            )
    return tuple(sorted(gains, key=lambda change: (-gains[change], len(change.overrides))))


def _format_length(tokens: int) -> str:
    """Format the length of a row; "" if rows are not token sequences."""
    return f" of {tokens} tokens" if tokens > 1 else ""


def _table(rows: Sequence[dict[str, str]]) -> list[str]:
    """Format a table of rows (cells by heading), with the first column left-aligned and the others
    right-aligned.
    """
    columns = [[heading, *(row[heading] for row in rows)] for heading in rows[0]]
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for first, *others in zip(*columns, strict=True):
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        lines.append(" ".join(cells))
    return lines
