"""The result of an estimate: rows that fit on each device, what they hold, its tables, its file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from adaptive_batch._util import atomic_write, count, format_bound, format_bytes, from_json
from adaptive_batch.errors import SettingError

from .length import LengthEstimate


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
        optimizer_bytes: peak of clipping and the optimizer's step.
    """

    sequence_length: int
    max_batch_size: int
    max_batch_size_with_retries: int
    allocated_bytes: int
    reserved_bytes: int
    first_too_large: str | None = None
    bytes_per_row: float = 0.0
    composition: dict[str, int] = field(default_factory=dict)
    optimizer_bytes: int = 0

    def explain(self) -> str:
        """Return the bytes of the peak by kind."""
        total = sum(self.composition.values())
        parts = sorted(self.composition.items(), key=lambda item: -item[1])
        shares = ", ".join(
            f"{name} {format_bytes(size)}" for name, size in parts if size > 0.005 * total
        )
        rows = count(max(1, self.max_batch_size), "row")
        of_length = _of_length(self.sequence_length)
        lines = [f"peak of {rows}{of_length}: {format_bytes(total)}: {shares}"]
        if self.optimizer_bytes > total:
            size = format_bytes(self.optimizer_bytes)
            lines.append(f"  the optimizer's step holds more: {size}, whatever the batch")
        return "\n  ".join(lines)

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
        lengths: what fits, for each length that was estimated.
        reference_rows: for each length, the most rows of a reference that runs without gradients in
            micro-batches of its own, by what is allocated; empty where there is none.
    """

    name: str
    total_bytes: int
    budget_bytes: int
    taken: tuple[tuple[str, int], ...] = ()
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
        devices: each with what fits, for each length.
        maximum: rows above which a real search would not look.
        world_size: ranks that share the model; all figures are of one of them.
        left_out: what is not counted as it would be on the device, a sentence each.
        changes: single changes and what they would bring, at the first of `lengths`.
        refused: those that could not be estimated.
        lengths: what a step holds on the first kind of device; no file has it.
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
        on_ranks = f" on each of {self.world_size} ranks" if self.world_size > 1 else ""
        for device in self.devices:
            budget = format_bytes(device.budget_bytes)
            total = format_bytes(device.total_bytes)
            taken = "".join(f", {format_bytes(size)} for {name}" for name, size in device.taken)
            lines.append(f"{device.name}: {budget} may be used{on_ranks} of {total}{taken}")
            for fit in device.lengths:
                if too_large := fit.describe_too_large():
                    lines.append(f"  a row{_of_length(fit.sequence_length)}: {too_large}")
                lines.append(f"  {fit.explain()}")
            for fit, reference_rows in zip(device.lengths, device.reference_rows, strict=False):
                rows = self.format_rows(reference_rows)
                of_length = _of_length(fit.sequence_length)
                lines.append(f"  the reference alone: {rows} rows{of_length} at once")
        checks = [length.check for length in self.lengths if length.check and length.check.is_off]
        lines += [f"warning: {check.warning}" for check in checks]
        lines += [f"left out: {sentence}" for sentence in self.left_out]
        return "\n".join(lines)

    def _rows_of_table(self) -> list[str]:
        """Return the aligned lines of devices and lengths."""
        fits = [fit for device in self.devices for fit in device.lengths]
        has_reserved = any(fit.reserved_bytes != fit.allocated_bytes for fit in fits)
        has_retries = any(fit.max_batch_size_with_retries > fit.max_batch_size for fit in fits)
        has_tokens = any(fit.sequence_length > 1 for fit in fits)
        rows = []
        for device in self.devices:
            for fit in device.lengths:
                row = {"device": device.name}
                if has_tokens:
                    row["length"] = str(fit.sequence_length)
                row["max_batch_size"] = self.format_rows(fit.max_batch_size)
                if has_retries:
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

    def table_of_changes(self) -> str:
        """Return aligned text: what each single change would bring, the best first."""
        if not self.changes:
            return ""
        rows = [{"key=value": "(as it is)"}]
        rows += [{"key=value": " ".join(change.overrides)} for change in self.changes]
        for number, device in enumerate(self.devices):
            changed = [change.bounds[number] for change in self.changes]
            bounds = [device.lengths[0].max_batch_size, *changed]
            for row, bound in zip(rows, bounds, strict=True):
                row[device.name] = self.format_rows(bound)
        costs = ["what it costs", "", *(change.cost for change in self.changes)]
        of_length = _of_length(self.devices[0].lengths[0].sequence_length)
        lines = [f"what one change would bring, in rows{of_length}:"]
        for line, cost in zip(_table(rows), costs, strict=True):
            lines.append(f"{line}  {cost}".rstrip())
        return "\n".join(lines)

    def save(self, path: Path) -> None:
        """Write it as JSON, whole or not at all."""
        values = asdict(replace(self, lengths=()))
        del values["lengths"]
        atomic_write(path, json.dumps(values, indent=2))


def read_estimate(path: Path) -> MemoryEstimate | None:
    """Return the estimate that a file holds; None where there is none that can be read."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        estimate: MemoryEstimate = from_json(MemoryEstimate, saved, optional=["lengths"])
    except (OSError, ValueError, TypeError, OverflowError):
        return None
    if not estimate.devices or not all(device.lengths for device in estimate.devices):
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


def _table(rows: Sequence[dict[str, str]]) -> list[str]:
    """Return the aligned lines of a table whose rows have a cell for each heading: the first column
    to the left, the others to the right.
    """
    columns = [[heading, *(row[heading] for row in rows)] for heading in rows[0]]
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for first, *others in zip(*columns, strict=True):
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        lines.append(" ".join(cells))
    return lines
