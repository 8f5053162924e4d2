"""The figures of an estimate: what the rows that fit hold on each device, by kind, and what it
allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from adaptive_batch._util import format_bytes
from adaptive_batch.estimate import Fit, MemoryEstimate, Target
from adaptive_batch.memory import GIB

from .drawing import LIGHT, Figure, add_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of the kinds, the lowest first.
_COLOURS = ("blue", "ochre", "purple", "green", "vermilion", "muted")
_WIDTH = 0.6


def estimate_figures(estimate: MemoryEstimate) -> list[Figure]:
    """Return a figure for each length, with a bar for each device."""
    lengths = zip(*(target.lengths for target in estimate.devices), strict=True)
    return [_figure(estimate, fits, number) for number, fits in enumerate(lengths, start=1)]


def summary_lines(estimate: MemoryEstimate) -> list[str]:
    """Return a line for each device."""
    lines = []
    for target in estimate.devices:
        fits = (
            f"{_rows_that_fit(estimate, fit)} of {fit.sequence_length:,} tokens"
            for fit in target.lengths
        )
        lines.append(
            f"{target.name}: {'; '.join(fits)}. {format_bytes(target.budget_bytes)} may be used."
        )
    return lines


def _rows_that_fit(estimate: MemoryEstimate, fit: Fit) -> str:
    rows = estimate.format_rows(fit.max_batch_size)
    return {"0": "no row", "1": "1 row"}.get(rows, f"{rows} rows")


def _figure(estimate: MemoryEstimate, fits: Sequence[Fit], number: int) -> Figure:
    places = range(len(fits))
    kinds = [kind for kind in fits[0].composition if any(fit.composition[kind] for fit in fits)]
    colours = dict(zip(fits[0].composition, _COLOURS, strict=True))

    def draw(axes: Axes) -> None:
        bottoms = [0.0] * len(fits)
        for kind in kinds:
            heights = [fit.composition[kind] / GIB for fit in fits]
            colour = LIGHT[colours[kind]]
            axes.bar(places, heights, _WIDTH, bottoms, color=colour, alpha=0.5, label=kind)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        steps = [fit.optimizer_bytes / GIB for fit in fits]
        if any(step > bottom for step, bottom in zip(steps, bottoms, strict=True)):
            axes.bar(
                places,
                steps,
                _WIDTH,
                facecolor="none",
                edgecolor=LIGHT["purple"],
                linestyle=":",
                label="optimizer's step",
            )
        budgets = [target.budget_bytes / GIB for target in estimate.devices]
        begins = [place - _WIDTH / 2 for place in places]
        ends = [begin + _WIDTH for begin in begins]
        axes.hlines(budgets, begins, ends, LIGHT["text"], linewidth=1.6, label="may be used")
        axes.set_xticks(list(places), [_label(estimate, *pair) for pair in _pairs(estimate, fits)])
        axes.set_ylabel("peak memory (GiB)")
        add_legend(axes)

    words = []
    for target, fit in _pairs(estimate, fits):
        shares = [f"{kind} {format_bytes(fit.composition[kind])}" for kind in kinds]
        rows = _rows_that_fit(estimate, fit)
        needs = f"{rows}, {format_bytes(fit.reserved_bytes)}"
        if not fit.max_batch_size:
            needs = f"{rows} fits; one needs {format_bytes(fit.reserved_bytes)}"
        words.append(f"{target.name}: {needs}: {', '.join(shares)}.")
    on_ranks = f" on each of {estimate.world_size} ranks" if estimate.world_size > 1 else ""
    title = f"Estimated memory{on_ranks}, rows of {fits[0].sequence_length:,} tokens"
    return Figure(f"estimate-{number}", title, " ".join(words), draw)


def _pairs(estimate: MemoryEstimate, fits: Sequence[Fit]) -> list[tuple[Target, Fit]]:
    return list(zip(estimate.devices, fits, strict=True))


def _label(estimate: MemoryEstimate, target: Target, fit: Fit) -> str:
    return f"{target.name.split(' (')[0]}\n{_rows_that_fit(estimate, fit)}"
