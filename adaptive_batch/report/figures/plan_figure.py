"""The figures of a memory plan: what a step holds, by kind, against the rows, and what each device allows; and its tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from adaptive_batch.estimate import LengthEstimate, MemoryEstimate, Target
from adaptive_batch.memory import GIB

from .figure import Colour, Figure, Frame, Line, Style
from .series import Series

_COLOURS: dict[str, Colour] = {
    "parameters": "blue",
    "buffers": "blue",
    "optimizer state": "purple",
    "gradients": "green",
    "activations": "vermilion",
    "backward temporaries": "muted",
}
_LEAST = 0.01  # of what is held; a kind that never has as much is shown with the one below it


def plan_figures(plan: MemoryEstimate) -> list[Figure]:
    """A figure for each length, all of one height in GiB."""
    frames = [(length, _last_row(plan, length)) for length in plan.lengths]
    highest = max(target.budget_bytes for target in plan.devices)
    # Where nothing fits, the least that a step holds is higher than what any device allows.
    least = max(length.peak_bytes(1) for length in plan.lengths)
    y_to = max(1.12 * highest, 1.1 * least) / GIB
    return [
        _figure(plan, length, number, Frame(1, last, y_to)) for number, (length, last) in enumerate(frames, start=1)
    ]


def answers(plan: MemoryEstimate) -> tuple[list[str], list[list[str]]]:
    """The head and the lines of the table of devices and lengths."""
    lines = []
    for target in plan.devices:
        for fit in (plan.fit(length, target) for length in plan.lengths):
            rows, peak = fit.max_batch_size, fit.allocated_bytes
            free = f"{(target.budget_bytes - peak) / GIB:.2f}" if rows else "none fits"
            lines.append([
                target.name, f"{fit.sequence_length:,}", plan.format_rows(rows), f"{rows * fit.sequence_length:,}",
                f"{peak / GIB:.2f}", f"{target.budget_bytes / GIB:.2f}", free,
            ])  # fmt: skip
    return ["device", "tokens of a row", "rows that fit", "tokens", "peak (GiB)", "allowed (GiB)", "free (GiB)"], lines


def changes(plan: MemoryEstimate) -> tuple[list[str], list[list[str]]]:
    """The head and the lines of the table of single changes; no lines where none was planned."""

    head = ["key=value", *(target.name for target in plan.devices), "what it costs"]
    now = [plan.bound(plan.lengths[0], target) for target in plan.devices]
    lines = [["(as it is)", *map(plan.format_rows, now), ""]] if plan.changes else []
    lines += [[" ".join(one.overrides), *map(plan.format_rows, one.bounds), one.cost] for one in plan.changes]
    return head, lines


def in_short(plan: MemoryEstimate) -> list[str]:
    """A line for each device."""
    lines = []
    for target in plan.devices:
        fits = [f"{_said_rows(plan, one, target)} of {one.sequence_length:,} tokens" for one in plan.lengths]
        lines.append(f"{target.name}: {'; '.join(fits)}. {target.budget_bytes / GIB:.2f} GiB may be used.")
    return lines


def _said_rows(plan: MemoryEstimate, length: LengthEstimate, target: Target) -> str:
    said = plan.format_rows(plan.bound(length, target))
    return {"0": "no row", "1": "1 row"}.get(said, f"{said} rows")


def _last_row(plan: MemoryEstimate, length: LengthEstimate) -> int:
    """Where a figure ends: a little beyond the largest bound."""
    most = max(plan.bound(length, target) for target in plan.devices)
    return max(4, min(math.ceil(1.12 * most), plan.maximum))


def _figure(plan: MemoryEstimate, length: LengthEstimate, number: int, frame: Frame) -> Figure:
    rows = _corners(length, frame.x_to)
    kinds, small = _merged([_composition(length, count) for count in rows])
    lines, words, below = [], [], [0.0] * len(rows)
    for kind, sizes in kinds.items():
        above = [low + size / GIB for low, size in zip(below, sizes, strict=True)]
        lines.append(Line(kind, Series.of(rows, above), _COLOURS[kind], "area", tuple(below)))
        below = above
    lines.reverse()  # where an area has no height, its edge is hidden by that of the one below
    if (of_step := length.optimizer_peak_bytes or 0) > _step_bytes(length, 1):
        lines.append(_level("optimizer's step", of_step, frame, "level"))
        words.append(f"The optimizer's step holds {of_step / GIB:.2f} GiB, whatever the rows.")
    for target in plan.devices:
        bound, fits = plan.bound(length, target), _said_rows(plan, length, target)
        lines.append(_level(f"{target.name.split(' (')[0]}: {fits}", target.budget_bytes, frame, "budget"))
        if bound:
            lines.append(Line("", Series.of((bound,), (length.peak_bytes(bound) / GIB,)), "muted", "dots"))
            words.append(f"{target.name}: {fits}, {length.peak_bytes(bound) / GIB:.2f} GiB.")
        else:
            words.append(f"{target.name}: {fits} fits; one needs {length.peak_bytes(1) / GIB:.2f} GiB.")
    most = max(1, *(plan.bound(length, target) for target in plan.devices))
    words.append(f"Forward and backward of {most} row{'s' if most > 1 else ''}: {_shares(length, most)}.")
    if small:
        words.append(f"Less than {_LEAST:.0%}, and shown with the kind below: {', '.join(small)}.")
    title = f"Planned memory, rows of {length.sequence_length:,} tokens"
    ranks = f", each of {plan.world_size} ranks" if plan.world_size > 1 else ""
    return Figure(
        f"plan-{number}", title, " ".join(words), f"rows at once{ranks}", "peak memory (GiB)", tuple(lines),
        x_axis=None, from_zero=True, frame=frame,
    )  # fmt: skip


def _level(label: str, size: int, frame: Frame, style: Style) -> Line:
    return Line(label, Series.of((frame.x_from, frame.x_to), (size / GIB, size / GIB)), "muted", style)


def _step_bytes(length: LengthEstimate, rows: int) -> int:
    """The peak of forward and backward."""
    return length.one_row_bytes if rows == 1 else length.curve.peak_bytes(rows)


def _composition(length: LengthEstimate, rows: int) -> dict[str, float]:
    """Bytes by kind, whose sum is the peak of forward and backward.

    Of a single row, which often runs other operations, only the sum is known: what comes and goes is divided as the curve says.
    """
    kinds = length.composition(rows)
    resident = {
        "parameters": length.resident.parameters,
        "buffers": length.resident.buffers,
        "optimizer state": length.resident.optimizer,
        "gradients": length.resident.gradients,
    }
    passing = sum(kinds.values()) - length.resident.total
    factor = (_step_bytes(length, rows) - length.resident.total) / passing if passing else 1.0
    return {kind: (stays := resident.get(kind, 0)) + factor * (size - stays) for kind, size in kinds.items()}


def _corners(length: LengthEstimate, last: int) -> list[int]:
    """Rows between which each kind is a straight line: the ends, and both sides of where another operation makes the peak."""
    places = {1, 2, last}
    for flatter, steeper in pairwise(length.curve.lines):
        overtakes = (flatter.fixed_bytes - steeper.fixed_bytes) / (steeper.bytes_per_row - flatter.bytes_per_row)
        places |= {math.floor(overtakes), math.floor(overtakes) + 1}
    return sorted(place for place in places if 1 <= place <= last)


def _merged(points: Sequence[dict[str, float]]) -> tuple[dict[str, list[float]], list[str]]:
    """Each kind's bytes at each point, small ones added to the one below (or above, of the lowest), and which those are."""
    totals = [sum(point.values()) for point in points]
    kept: dict[str, list[float]] = {}
    small, waiting = [], [0.0] * len(points)
    for kind in points[0]:
        sizes = [point[kind] for point in points]
        if any(size and size >= _LEAST * total for size, total in zip(sizes, totals, strict=True)):
            kept[kind] = [size + more for size, more in zip(sizes, waiting, strict=True)]
            waiting = [0.0] * len(points)
        else:
            if any(sizes):
                small.append(kind)
            into = kept[next(reversed(kept))] if kept else waiting
            for place, size in enumerate(sizes):
                into[place] += size
    return kept, small


def _shares(length: LengthEstimate, rows: int) -> str:
    parts = {kind: size for kind, size in _composition(length, rows).items() if size > 0}
    total = sum(parts.values())
    return ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in parts.items() if size >= _LEAST * total)
