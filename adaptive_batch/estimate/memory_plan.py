"""How many rows fit on a device that is not here, what they need, and what would let more fit: a plan, its table, its file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adaptive_batch.errors import sized
from adaptive_batch.memory import GIB, Line, MemoryCurve

from .attribution import Held
from .devices import MIB
from .fake_step import Resident

_FORMAT = 1


@dataclass(frozen=True)
class Target:
    """A device that is planned for.

    Attributes:
        name: as it is shown.
        total_bytes: what it has.
        budget_bytes: what a training step may hold of it.
        taken: what takes the rest, each with its bytes: headroom, the driver's context.
        source: where `total_bytes` is from; empty where it was given.
    """

    name: str
    total_bytes: int
    budget_bytes: int
    taken: tuple[tuple[str, int], ...] = ()
    source: str = ""


@dataclass(frozen=True)
class Kinds:
    """What the bytes at one line of a curve are, beside what is resident: each ``fixed + each * rows``.

    Attributes:
        line: of the curve.
        activations: of forward, that wait for backward: fixed bytes, and bytes a row.
        gradients: of parameters, that this step has made by then.
    """

    line: Line
    activations: tuple[float, float]
    gradients: int

    def at(self, rows: int, resident: Resident) -> dict[str, float]:
        """Bytes by kind at that many rows, in the order in which a figure stacks them."""
        activations = self.activations[0] + self.activations[1] * rows
        rest = float(self.line.at(rows)) - resident.total - activations - self.gradients
        return {
            "parameters": resident.parameters,
            "buffers": resident.buffers,
            "optimizer state": resident.optimizer,
            "gradients": resident.gradients + self.gradients,
            "activations": activations,
            "at work in backward": max(0.0, rest),
        }


@dataclass(frozen=True)
class LengthEstimate:
    """What a training step holds with rows of one length.

    Attributes:
        sequence_length: tokens of each row.
        resident: before a forward.
        curve: of forward and backward.
        kinds: what each line of the curve is made of.
        one_row_bytes: the peak of a single row, which often runs other operations.
        optimizer_peak_bytes: of clipping and the optimizer's step; None with the optimizer in backward.
        checked: rows of another trial, its peak, and what the curve says of it; None where there was none.
        held: what was alive at each line of the curve in that trial.
    """

    sequence_length: int
    resident: Resident
    curve: MemoryCurve
    kinds: tuple[Kinds, ...]
    one_row_bytes: int
    optimizer_peak_bytes: int | None
    checked: tuple[int, int, int] | None = None
    held: tuple[tuple[int, Held], ...] = ()

    def max_rows(self, budget_bytes: int) -> int | None:
        """Most rows that fit; 0 where not one does, None where any number does."""
        if (self.optimizer_peak_bytes or 0) > budget_bytes or self.one_row_bytes > budget_bytes:
            return 0
        rows = self.curve.max_rows(budget_bytes)
        return None if rows is None else max(1, rows)

    def peak_bytes(self, rows: int) -> int:
        """Most bytes that a step of that many rows holds, the optimizer's phase included."""
        of_rows = self.one_row_bytes if rows == 1 else self.curve.peak_bytes(rows)
        return max(of_rows, self.optimizer_peak_bytes or 0)

    def first_too_large(self, budget_bytes: int) -> str | None:
        """The first thing that does not fit, in the order in which a run would need it; None where a row fits."""
        needed = 0
        for name, size in (
            ("the parameters", self.resident.parameters),
            ("the buffers", self.resident.buffers),
            ("the optimizer's state", self.resident.optimizer),
            ("the gradients that stay", self.resident.gradients),
        ):
            needed += size
            if needed > budget_bytes:
                return f"{name} ({sized(size)}, {sized(needed)} with what comes before)"
        if (self.optimizer_peak_bytes or 0) > budget_bytes:
            return f"the optimizer's step ({sized(self.optimizer_peak_bytes or 0)} at its peak)"
        if self.one_row_bytes > budget_bytes:
            return f"forward and backward of one row ({sized(self.one_row_bytes)} at their peak)"
        return None

    def why_no_row(self, budget_bytes: int) -> str | None:
        """The same as a sentence."""
        what = self.first_too_large(budget_bytes)
        return what and f"{what} {'does' if what.startswith('the optimizer') else 'do'} not fit"

    def composition(self, rows: int) -> dict[str, float]:
        """Bytes by kind where that many rows hold most."""
        highest = self.curve.highest(rows)
        return next(kinds for kinds in self.kinds if kinds.line == highest).at(rows, self.resident)

    def explain(self, rows: int) -> str:
        """What the peak at that many rows is made of, and where in the step it is."""
        line = self.curve.highest(rows)
        parts = sorted(self.composition(rows).items(), key=lambda item: -item[1])
        total = sum(size for _, size in parts)
        shares = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts if size > 0.005 * total)
        text = f"peak of {rows} x {self.sequence_length} tokens: {line.at(rows) / GIB:.2f} GiB: {shares}"
        held = next((held for operation, held in self.held if operation == line.operation), None)
        if held is None:
            return text
        text += f"\n  reached in {held.where}"
        made = sum(size for _, size in held.by_place)
        largest = _grouped(held)[:3]
        if made:
            text += "; most of what comes and goes: " + ", ".join(
                f"{name} {100 * size / made:.0f}%" for name, size in largest
            )
        return text


@dataclass(frozen=True)
class Change:
    """One thing to change, planned in the same way.

    Attributes:
        overrides: the exact ``key=value`` to type.
        cost: what it costs.
        bounds: rows that fit under it on each device, in the order of the plan's; None for any number.
        refused: why it could not be planned; empty where it was.
    """

    overrides: tuple[str, ...]
    cost: str
    bounds: tuple[int | None, ...] = ()
    refused: str = ""


@dataclass(frozen=True)
class MemoryEstimate:
    """The answer: for each device and length, the rows that fit.

    Attributes:
        targets: devices.
        lengths: of rows, each with its curve.
        maximum: rows above which a real search would not look.
        world_size: ranks that share the model; what is said is of each.
        left_out: what is not counted as it would be, a sentence each.
        changes: single changes and what they would bring, at the first of `lengths`.
        refused: those that could not be planned.
        seconds: that planning took.
    """

    targets: tuple[Target, ...]
    lengths: tuple[LengthEstimate, ...]
    maximum: int
    world_size: int = 1
    left_out: tuple[str, ...] = ()
    changes: tuple[Change, ...] = field(default=())
    refused: tuple[Change, ...] = field(default=())
    seconds: float = 0.0

    def bound(self, length: LengthEstimate, target: Target) -> int:
        """Most rows that fit on a device, none above `maximum`."""
        rows = length.max_rows(target.budget_bytes)
        return self.maximum if rows is None else min(rows, self.maximum)

    def table(self) -> str:
        """Aligned text: a line for each device and length, what is fixed, and what makes the peaks."""
        width = max(6, *(len(target.name) for target in self.targets))
        lines = [
            f"{'device':<{width}} {'length':>7} {'max_batch_size':>14} {'tokens':>8} {'peak GiB':>9} {'GiB a row':>10} {'free GiB':>9}"
        ]
        for target in self.targets:
            for length in self.lengths:
                rows = self.bound(length, target)
                peak = length.peak_bytes(max(1, rows))
                row = length.curve.highest(max(2, rows)).bytes_per_row / GIB
                free = f"{(target.budget_bytes - peak) / GIB:.2f}" if rows else "-"
                said = f"{rows}+" if rows == self.maximum else str(rows)
                lines.append(
                    f"{target.name:<{width}} {length.sequence_length:>7} {said:>14} {rows * length.sequence_length:>8} "
                    f"{peak / GIB:>9.2f} {float(row):>10.4f} {free:>9}"
                )
        for target in self.targets:
            unit, unit_name = (GIB, "GiB") if target.total_bytes >= GIB else (MIB, "MiB")
            taken = "".join(f", {size / unit:.2f} for {name}" for name, size in target.taken)
            may_use, of_all = target.budget_bytes / unit, target.total_bytes / unit
            lines.append(f"{target.name}: {may_use:.2f} {unit_name} may be used of {of_all:.2f}{taken}")
            for length in self.lengths:
                if why := length.why_no_row(target.budget_bytes):
                    lines.append(f"  {length.sequence_length} tokens: {why}")
        resident = self.lengths[0].resident
        of_each = f" on each of {self.world_size} ranks" if self.world_size > 1 else ""
        gradients = f", gradients that stay {resident.gradients / GIB:.2f}" if resident.gradients else ""
        lines.append(
            f"fixed{of_each}: {resident.total / GIB:.2f} GiB: parameters {resident.parameters / GIB:.2f}, optimizer state "
            f"{resident.optimizer / GIB:.2f}{gradients}, buffers {resident.buffers / GIB:.2f}"
        )
        if (of_step := self.lengths[0].optimizer_peak_bytes) is not None:
            lines.append(f"optimizer's step: {of_step / GIB:.2f} GiB at its peak, whatever the batch")
        for length in self.lengths:
            rows = max(1, *(self.bound(length, target) for target in self.targets))
            lines.append(length.explain(rows))
        for tried, counted, expected in (length.checked for length in self.lengths if length.checked):
            exact = "to the byte" if counted == expected else f"within {abs(counted - expected) / counted:.2%}"
            if abs(counted - expected) <= 1e-3 * counted:
                lines.append(f"checked: a third size, {tried} rows, lies on the curve {exact}")
            else:
                lines.append(
                    f"NOT a maximum of straight lines: {tried} rows hold {counted / GIB:.2f} GiB, and the curve says "
                    f"{expected / GIB:.2f}; believe the bound no further than that"
                )
        return "\n".join(lines)

    def table_of_changes(self) -> str:
        """Aligned text: what each single change would bring, the best first."""
        if not self.changes:
            return ""
        length = self.lengths[0]
        now = [self.bound(length, target) for target in self.targets]
        width = max(len(" ".join(change.overrides)) for change in self.changes)
        names = [target.name for target in self.targets]
        columns = [max(10, len(name)) for name in names]
        head = " ".join(f"{name:>{column}}" for name, column in zip(names, columns, strict=True))
        lines = [
            f"what one change would bring, in rows of {length.sequence_length} tokens:",
            f"{'key=value':<{width}} {head}  what it costs",
            f"{'(as it is)':<{width}} " + " ".join(f"{rows:>{c}}" for rows, c in zip(now, columns, strict=True)),
        ]
        for change in self.changes:
            bounds = " ".join(f"{self.said(most):>{c}}" for most, c in zip(change.bounds, columns, strict=True))
            lines.append(f"{' '.join(change.overrides):<{width}} {bounds}  {change.cost}")
        return "\n".join(lines)

    def said(self, rows: int | None) -> str:
        """Rows that fit, as text: with a plus where more would."""
        return f"{self.maximum}+" if rows is None or rows >= self.maximum else str(rows)

    def as_json(self) -> dict[str, Any]:
        """All of it, as plain values; sizes in bytes."""
        return {
            "format": _FORMAT,
            "world_size": self.world_size,
            "maximum": self.maximum,
            "seconds": round(self.seconds, 2),
            "left_out": list(self.left_out),
            "devices": [
                {
                    "name": target.name,
                    "total_bytes": target.total_bytes,
                    "budget_bytes": target.budget_bytes,
                    "taken": dict(target.taken),
                    "source": target.source,
                    "lengths": [self._answer(length, target) for length in self.lengths],
                }
                for target in self.targets
            ],
            "lengths": [
                {
                    "sequence_length": length.sequence_length,
                    "resident": vars(length.resident),
                    "optimizer_peak_bytes": length.optimizer_peak_bytes,
                    "one_row_bytes": length.one_row_bytes,
                    "lines": [
                        {
                            "fixed_bytes": float(kinds.line.fixed_bytes),
                            "bytes_per_row": float(kinds.line.bytes_per_row),
                            "activations": dict(zip(("fixed_bytes", "bytes_per_row"), kinds.activations, strict=True)),
                            "gradients": kinds.gradients,
                        }
                        for kinds in length.kinds
                    ],
                    "checked": length.checked
                    and dict(zip(("rows", "peak_bytes", "said"), length.checked, strict=True)),
                }
                for length in self.lengths
            ],
            "changes": [
                {"overrides": list(c.overrides), "cost": c.cost, "bounds": list(c.bounds), "refused": c.refused}
                for c in (*self.changes, *self.refused)
            ],
        }

    def _answer(self, length: LengthEstimate, target: Target) -> dict[str, Any]:
        rows = self.bound(length, target)
        return {
            "sequence_length": length.sequence_length,
            "max_batch_size": rows,
            "peak_bytes": length.peak_bytes(max(1, rows)),
            "bytes_per_row": float(length.curve.highest(max(2, rows)).bytes_per_row),
            "first_too_large": length.first_too_large(target.budget_bytes),
            "composition": {name: round(size) for name, size in length.composition(max(1, rows)).items()},
        }

    def save(self, path: Path) -> None:
        """Write it as JSON, aside and renamed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        aside.write_text(json.dumps(self.as_json(), indent=2))
        os.replace(aside, path)


def ranked(changes: Sequence[Change], now: Sequence[int]) -> tuple[Change, ...]:
    """Changes that let more fit on some device, the one with the greatest gain first; what is least to type breaks ties."""

    def gain(change: Change) -> float:
        return sum(
            (float("inf") if rows is None else rows) / max(0.5, before)
            for rows, before in zip(change.bounds, now, strict=True)
        )

    better = [
        c for c in changes if not c.refused and any(r is None or r > n for r, n in zip(c.bounds, now, strict=True))
    ]
    return tuple(sorted(better, key=lambda change: (-gain(change), len(change.overrides))))


def _grouped(held: Held) -> list[tuple[str, int]]:
    """Bytes by place, that of like layers together, largest first."""
    sizes: dict[str, int] = {}
    layers: dict[str, set[str]] = {}
    for where, size in held.by_place:
        parts = where.module.split(".")
        name = ".".join("*" if part.isdigit() else part for part in parts) or "the loss"
        name = f"{name} ({where.operation}{', backward' if where.backward else ''})"
        sizes[name] = sizes.get(name, 0) + size
        layers.setdefault(name, set()).add(where.module)
    return sorted(sizes.items(), key=lambda item: -item[1])
