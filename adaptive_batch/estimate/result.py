"""The result of an estimate: how many rows fit on each device, what they hold, what would let more
fit; its tables, its file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from adaptive_batch._util import atomic_write, count, format_bound, format_bytes
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import Line, MemoryCurve

from .fake_step import Resident
from .roofline import DeviceSpeed

_MODELLED = "modelled tokens/s"


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
        modelled_tokens_per_second: the most of forward and backward of `max_batch_size` rows by the
            device's data sheet (:mod:`.roofline`), which no trial has timed; None where the device
            is not known, or no row fits.
    """

    sequence_length: int
    max_batch_size: int
    max_batch_size_with_retries: int
    allocated_bytes: int
    reserved_bytes: int
    first_too_large: str | None = None
    modelled_tokens_per_second: float | None = None


@dataclass(frozen=True)
class Target:
    """A device, and how much of it a training step may use.

    Attributes:
        budget_bytes: what an allocator may take of it.
        taken: what the rest is for, each with its bytes: headroom, the CUDA context.
        source: where `total_bytes` is from; empty where it was given as a size.
        speed: by its data sheet; None where it was given as a size.
        lengths: what fits, for each length that was estimated.
    """

    name: str
    total_bytes: int
    budget_bytes: int
    taken: tuple[tuple[str, int], ...] = ()
    source: str = ""
    speed: DeviceSpeed | None = None
    lengths: tuple[Fit, ...] = ()


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
    """A step of a third size, to compare the memory curve with: bytes that were counted, and bytes
    by the curve.
    """

    rows: int
    counted_bytes: int
    expected_bytes: int

    def __str__(self) -> str:
        off = abs(self.counted_bytes - self.expected_bytes) / self.counted_bytes
        if off > 1e-3:
            counted = format_bytes(self.counted_bytes)
            expected = format_bytes(self.expected_bytes)
            return (
                f"do not rely on the maximum batch size: {self.rows} rows hold {counted}, and the"
                f" curve gives {expected}"
            )
        return (
            f"checked: a third size, {count(self.rows, 'row')}, lies on the curve"
            f" {f'within {off:.2%}' if off else 'to the byte'}"
        )


@dataclass(frozen=True)
class LengthEstimate:
    """What a training step holds with rows of one length, on any device.

    Attributes:
        resident: before a forward.
        breakdowns: one for each line of the curve of forward and backward.
        one_row_bytes: the peak of a single row, which often runs other operations.
        optimizer_peak_bytes: of clipping and the optimizer's step; None with the optimizer in
            backward.
    """

    sequence_length: int
    resident: Resident
    breakdowns: tuple[MemoryBreakdown, ...]
    one_row_bytes: int
    optimizer_peak_bytes: int | None
    check: CurveCheck | None = None

    @property
    def curve(self) -> MemoryCurve:
        """The peak of forward and backward, by rows; its operations are the places of the
        breakdowns.
        """
        return MemoryCurve(
            tuple(
                Line(one.fixed_bytes, one.bytes_per_row, place)
                for place, one in enumerate(self.breakdowns)
            )
        )

    def max_rows(self, budget_bytes: int) -> int | None:
        """Most rows that fit; 0 where not one does, None where any number does."""
        if (self.optimizer_peak_bytes or 0) > budget_bytes or self.one_row_bytes > budget_bytes:
            return 0
        rows = self.curve.max_rows(budget_bytes)
        return None if rows is None else max(1, rows)

    def counted_fit(self, budget_bytes: int, *, maximum: int) -> Fit:
        """What fits where each byte that is allocated is one that is taken."""
        rows = self.max_rows(budget_bytes)
        rows = maximum if rows is None else min(rows, maximum)
        peak = self.peak_bytes(max(1, rows))
        return Fit(self.sequence_length, rows, rows, peak, peak, self.first_too_large(budget_bytes))

    def peak_bytes(self, rows: int) -> int:
        """Most bytes that a step of that many rows holds, the optimizer's phase included."""
        of_rows = self.one_row_bytes if rows == 1 else self.curve.peak_bytes(rows)
        return max(of_rows, self.optimizer_peak_bytes or 0)

    def first_too_large(self, budget_bytes: int) -> str | None:
        """The first thing that does not fit, in the order in which a run would need it; None where
        a row fits.
        """
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
        """Bytes by kind where that many rows hold most."""
        return self.breakdowns[self.curve.highest(rows).operation].at(rows, self.resident)

    def explain(self, rows: int) -> str:
        """What the peak at that many rows is made of, and where in the step it is."""
        parts = sorted(self.composition(rows).items(), key=lambda item: -item[1])
        total = sum(size for _, size in parts)
        shares = ", ".join(
            f"{name} {format_bytes(size)}" for name, size in parts if size > 0.005 * total
        )
        highest = self.curve.highest(rows)
        text = (
            f"peak of {rows} x {count(self.sequence_length, 'token')}:"
            f" {format_bytes(highest.at(rows))}: {shares}"
        )
        site = self.breakdowns[highest.operation].site
        return f"{text}\n  reached in {site}" if site else text


@dataclass(frozen=True)
class Change:
    """One change of the configuration, estimated in the same way.

    Attributes:
        overrides: the exact ``key=value`` to type.
        bounds: rows that fit under it on each device; None for any number.
        modelled_tokens_per_second: of a rank, on each device; as in :class:`Fit`.
        refused: why it could not be estimated; empty where it was.
    """

    overrides: tuple[str, ...]
    cost: str
    bounds: tuple[int | None, ...] = ()
    refused: str = ""
    modelled_tokens_per_second: tuple[float | None, ...] = ()


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
        """Most rows that fit on a device without allocator retries, none above `maximum`."""
        return self.fit(length, device).max_batch_size

    def fit(self, length: LengthEstimate, device: Target) -> Fit:
        """What fits of one length on a device."""
        return device.lengths[self.lengths.index(length)]

    def fits(self, device: str, rows: int = 1) -> bool:
        """Return whether that many rows, of each length, fit on a device without allocator retries.

        Args:
            device: as :attr:`devices` name it, with its capacity or without: ``"H100"``, ``"24.00
                GiB"``.

        Raises:
            SettingError: it is not among the devices of this estimate.
        """
        for one in self.devices:
            if device in (one.name, one.name.partition(" (")[0]):
                return all(fit.max_batch_size >= rows for fit in one.lengths)
        names = ", ".join(one.name for one in self.devices)
        raise SettingError("device", device, f"this is an estimate for {names}; give one of them")

    def format_rows(self, rows: int | None) -> str:
        """Rows that fit, as text: with a plus where more may fit."""
        return format_bound(rows, self.maximum)

    def table(self) -> str:
        """Aligned text: a line for each device and length, what is resident, and what makes the
        peaks.
        """
        pairs = [
            (device, *pair)
            for device in self.devices
            for pair in zip(self.lengths, device.lengths, strict=True)
        ]
        reserves = any(fit.reserved_bytes != fit.allocated_bytes for _, _, fit in pairs)
        held = ["allocated", "reserved"] if reserves else ["peak"]
        retries = ["with retries"] if reserves else []
        modelled = [_MODELLED] if any(fit.modelled_tokens_per_second for _, _, fit in pairs) else []
        cells = [
            [
                "device",
                "length",
                "max_batch_size",
                *retries,
                "tokens",
                *held,
                *modelled,
                "a row",
                "free",
            ]
        ]
        for device, length, fit in pairs:
            rows = fit.max_batch_size
            peak = format_bytes(fit.allocated_bytes)
            cells.append([
                device.name, str(length.sequence_length), self.format_rows(rows),
                *([self.format_rows(fit.max_batch_size_with_retries)] if reserves else ()), str(rows * length.sequence_length), peak,
                *([format_bytes(fit.reserved_bytes)] if reserves else ()),
                *([_rounded(fit.modelled_tokens_per_second)] if modelled else ()), format_bytes(self._bytes_per_row(length, rows)),
                format_bytes(device.budget_bytes - fit.reserved_bytes) if rows else "-",
            ])  # fmt: skip
        lines = _aligned(cells)
        if modelled:
            lines.append(
                f"{_MODELLED}: at most, of forward and backward by data sheets; no trial has"
                " timed it"
            )
        for device in self.devices:
            budget = format_bytes(device.budget_bytes)
            total = format_bytes(device.total_bytes)
            taken = "".join(f", {format_bytes(size)} for {name}" for name, size in device.taken)
            lines.append(f"{device.name}: {budget} may be used of {total}{taken}")
            lines += [
                f"  {count(fit.sequence_length, 'token')}: too large: {fit.first_too_large}"
                for fit in device.lengths
                if fit.first_too_large
            ]
        resident = self.lengths[0].resident
        of_step = self.lengths[0].optimizer_peak_bytes
        on_each = f" on each of {self.world_size} ranks" if self.world_size > 1 else ""
        gradients = (
            f", gradients that stay {format_bytes(resident.gradients)}"
            if resident.gradients
            else ""
        )
        lines.append(
            f"fixed{on_each}: {format_bytes(resident.total)}: parameters"
            f" {format_bytes(resident.parameters)}, optimizer state"
            f" {format_bytes(resident.optimizer)}{gradients}, buffers"
            f" {format_bytes(resident.buffers)}"
        )
        if of_step is not None:
            lines.append(
                f"optimizer's step: {format_bytes(of_step)} at its peak, whatever the batch"
            )
        for length in self.lengths:
            lines.append(
                length.explain(max(1, *(self.bound(length, device) for device in self.devices)))
            )
        lines += [str(length.check) for length in self.lengths if length.check]
        return "\n".join(lines)

    def table_of_changes(self) -> str:
        """Aligned text: what each single change would bring, the best first."""
        if not self.changes:
            return ""
        length = self.lengths[0]
        now = [self.bound(length, device) for device in self.devices]
        columns = [["key=value", "(as it is)", *(" ".join(one.overrides) for one in self.changes)]]
        for number, device in enumerate(self.devices):
            bounds = [now[number], *(one.bounds[number] for one in self.changes)]
            columns.append([device.name, *map(self.format_rows, bounds)])
            if speed := self.fit(length, device).modelled_tokens_per_second:
                speeds = [speed, *(one.modelled_tokens_per_second[number] for one in self.changes)]
                columns.append([_MODELLED, *map(_rounded, speeds)])
        costs = ("  what it costs", "", *(f"  {one.cost}" for one in self.changes))
        lines = [
            f"{line}{cost}"
            for line, cost in zip(_aligned(zip(*columns, strict=True)), costs, strict=True)
        ]
        return "\n".join(
            [
                (
                    "what one change would bring, in rows of"
                    f" {count(length.sequence_length, 'token')}:"
                ),
                *lines,
            ]
        )

    def _bytes_per_row(self, length: LengthEstimate, rows: int) -> float:
        return float(length.curve.highest(max(2, rows)).bytes_per_row)

    def as_json(self) -> dict[str, Any]:
        """All of it as dicts and lists, with what each size is made of; sizes in bytes."""
        values = asdict(self)
        for device in values["devices"]:
            for length, fit in zip(self.lengths, device["lengths"], strict=True):
                rows = fit["max_batch_size"]
                parts = length.composition(max(1, rows)).items()
                fit["bytes_per_row"] = self._bytes_per_row(length, rows)
                fit["composition"] = {name: round(size) for name, size in parts}
        return values

    def save(self, path: Path) -> None:
        """Write it as JSON, whole or not at all."""
        atomic_write(
            path, json.dumps(self.as_json(), indent=2, default=float)
        )  # a fraction of the curve as a number


def read_estimate(path: Path) -> MemoryEstimate | None:
    """Return the estimate that a file holds; None where there is none that can be read."""
    try:
        estimate: MemoryEstimate = _from_json(
            MemoryEstimate, json.loads(path.read_text(encoding="utf-8"))
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    is_whole = (
        estimate.devices
        and estimate.lengths
        and all(length.breakdowns for length in estimate.lengths)
    )
    return estimate if is_whole else None


def _from_json(kind: Any, value: Any) -> Any:
    """Build a value of an annotated type (dataclass, tuple, ``X | None``, number, text) from what
    JSON holds.
    """
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(
            **{one.name: _from_json(hints[one.name], value[one.name]) for one in fields(kind)}
        )  # type: ignore[operator]
    if get_origin(kind) is UnionType:
        return None if value is None else _from_json(get_args(kind)[0], value)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise TypeError(f"{value!r} is not a list")
        kinds = get_args(kind)
        kinds = kinds[:1] * len(value) if kinds[-1] is Ellipsis else kinds
        return tuple(_from_json(*pair) for pair in zip(kinds, value, strict=True))
    if kind in (float, Fraction):
        return kind(value)
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


def _rounded(speed: float | None) -> str:
    return f"{float(f'{speed:.3g}'):.0f}" if speed else "-"


def ranked(changes: Sequence[Change], now: Sequence[int]) -> tuple[Change, ...]:
    """Changes that let more fit on some device, the one with the greatest gain first; what is least
    to type breaks ties.
    """
    gains: dict[Change, float] = {}
    for change in changes:
        pairs = [
            (math.inf if rows is None else rows, before)
            for rows, before in zip(change.bounds, now, strict=False)
        ]
        if any(rows > before for rows, before in pairs):
            gains[change] = sum(rows / max(0.5, before) for rows, before in pairs)
    return tuple(sorted(gains, key=lambda change: (-gains[change], len(change.overrides))))


def _aligned(cells: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    columns = list(zip(*cells, strict=True))
    padded = [
        [
            cell.rjust(max(map(len, column))) if number else cell.ljust(max(map(len, column)))
            for cell in column
        ]
        for number, column in enumerate(columns)
    ]
    return [" ".join(row) for row in zip(*padded, strict=True)]
