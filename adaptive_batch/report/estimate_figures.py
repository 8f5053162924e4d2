"""The figures of an estimate: what a step holds, by kind, against the rows, and what each device
allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle, pairwise
from typing import TYPE_CHECKING

from adaptive_batch._util import format_bytes
from adaptive_batch.estimate import LengthEstimate, MemoryEstimate, Target
from adaptive_batch.memory import GIB

from .drawing import LIGHT, Figure, Points, add_legend, plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of the kinds, the lowest first.
_COLOURS = (
    "blue",
    "ochre",
    "purple",
    "green",
    "vermilion",
    "muted",
)
# Of the devices.
_DASHES = ("--", "-.", ":", (0, (8, 2)))


def estimate_figures(estimate: MemoryEstimate) -> list[Figure]:
    """Return a figure for each length, all of one height in GiB."""
    highest = max(target.budget_bytes for target in estimate.devices)
    # Where nothing fits, the least that a step holds is higher than what any device allows.
    largest_step = max(length.peak_bytes(1) for length in estimate.lengths)
    top = max(1.12 * highest, 1.1 * largest_step) / GIB
    return [
        _figure(estimate, length, number, top)
        for number, length in enumerate(estimate.lengths, start=1)
    ]


def summary_lines(estimate: MemoryEstimate) -> list[str]:
    """Return a line for each device."""
    lines = []
    for target in estimate.devices:
        fits = (
            f"{_rows_that_fit(estimate, length, target)} of {length.sequence_length:,} tokens"
            for length in estimate.lengths
        )
        lines.append(
            f"{target.name}: {'; '.join(fits)}. {format_bytes(target.budget_bytes)} may be used."
        )
    return lines


def _rows_that_fit(estimate: MemoryEstimate, length: LengthEstimate, target: Target) -> str:
    rows = estimate.format_rows(estimate.bound(length, target))
    return {"0": "no row", "1": "1 row"}.get(rows, f"{rows} rows")


def _figure(estimate: MemoryEstimate, length: LengthEstimate, number: int, top: float) -> Figure:
    largest_bound = max(estimate.bound(length, target) for target in estimate.devices)
    last = max(4, min(math.ceil(1.12 * largest_bound), estimate.maximum))
    rows = _corners(length, last)
    parts = [_composition(length, count) for count in rows]
    of_optimizer = (length.optimizer_peak_bytes or 0) / GIB

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        below = [0.0] * len(rows)
        for kind, colour in zip(parts[0], _COLOURS, strict=True):
            above = [low + part[kind] / GIB for low, part in zip(below, parts, strict=True)]
            if any(part[kind] > 0 for part in parts):
                axes.fill_between(
                    rows, below, above, color=LIGHT[colour], alpha=0.4, linewidth=0, label=kind
                )
            below = above
        if of_optimizer > _step_bytes(length, 1) / GIB:
            axes.axhline(
                of_optimizer, color=LIGHT["purple"], linewidth=1.4, label="optimizer's step"
            )
        for target, dashes in zip(estimate.devices, cycle(_DASHES), strict=False):
            label = f"{target.name.split(' (')[0]}: {_rows_that_fit(estimate, length, target)}"
            axes.axhline(
                target.budget_bytes / GIB,
                color=LIGHT["text"],
                linewidth=1.2,
                linestyle=dashes,
                label=label,
            )
            bound = estimate.bound(length, target)
            if bound:
                at_bound = Points([bound], [estimate.fit(length, target).reserved_bytes / GIB])
                plot(axes, at_bound, "", "text", marker="o", clip_on=False)
        axes.set_xlim(1, last)
        axes.set_ylim(0, top)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        label = "rows at once"
        if estimate.world_size > 1:
            label += f", each of {estimate.world_size} ranks"
        axes.set_xlabel(label)
        axes.set_ylabel("peak memory (GiB)")
        add_legend(axes)

    of_step = format_bytes(length.optimizer_peak_bytes or 0)
    words = []
    if of_optimizer:
        words.append(f"The optimizer's step holds {of_step} with any number of rows.")
    for target in estimate.devices:
        bound = estimate.bound(length, target)
        fits = _rows_that_fit(estimate, length, target)
        needs = f"{format_bytes(estimate.fit(length, target).reserved_bytes)}."
        if bound:
            words.append(f"{target.name}: {fits}, {needs}")
        else:
            words.append(f"{target.name}: {fits} fits; one needs {needs}")
    shares = [
        f"{kind} {format_bytes(size)}"
        for kind, size in _composition(length, max(1, largest_bound)).items()
        if size > 0
    ]
    words.append(f"Forward and backward, {max(1, largest_bound)} at once: {', '.join(shares)}.")
    title = f"Estimated memory, rows of {length.sequence_length:,} tokens"
    return Figure(f"estimate-{number}", title, " ".join(words), draw)


def _step_bytes(length: LengthEstimate, rows: int) -> int:
    """Return the peak of forward and backward."""
    # A single row often runs other operations.
    if rows == 1:
        return length.one_row_bytes
    return length.curve.peak_bytes(rows)


def _composition(length: LengthEstimate, rows: int) -> dict[str, float]:
    """Return bytes by kind, whose sum is the peak of forward and backward; those of a single row
    are divided as the curve says.
    """
    kinds = length.composition(rows)
    resident = length.resident
    stays = [resident.parameters, resident.buffers, resident.optimizer, resident.gradients, 0, 0]
    passing = sum(kinds.values()) - resident.total
    factor = 1.0
    if passing:
        factor = (_step_bytes(length, rows) - resident.total) / passing
    return {
        kind: kept + factor * (size - kept)
        for (kind, size), kept in zip(kinds.items(), stays, strict=True)
    }


def _corners(length: LengthEstimate, last: int) -> Sequence[int]:
    """Return rows between which each kind is a straight line: the ends, and both sides of where the
    peak moves.
    """
    places = {1, 2, last}
    for flatter, steeper in pairwise(length.curve.lines):
        overtakes = (flatter.fixed_bytes - steeper.fixed_bytes) / (
            steeper.bytes_per_row - flatter.bytes_per_row
        )
        places |= {math.floor(overtakes), math.floor(overtakes) + 1}
    return sorted(place for place in places if 1 <= place <= last)
