"""Draws a figure on matplotlib's canvas: its lines, and the marks of events above them.

matplotlib comes with the extra `report` and is imported when something is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..history.timeline import EVENTS, Timeline
from .figure import SECONDS, Figure, Line
from .look import LIGHT, MARKS
from .series import thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

_MOST_MARKS = 40  # of one kind in one figure
_MOST_RULES = 12  # more lines across a figure hide what it shows
# Sizes in CSS pixels, which are matplotlib's points here. A figure is as wide as a phone, so its text is read as it is.
_FONT = 11
WIDTH, _LEFT, _RIGHT, _BOTTOM = 380, 68, 14, 40
_AXES_HEIGHT, _LANE_HEIGHT, _LEGEND_ROW, _GAP = 170, 12, 17, 8
_STYLES: Mapping[str, dict[str, Any]] = {
    "line": {"linewidth": 1.6},
    "thin": {"linewidth": 0.8, "alpha": 0.55},
    "faint": {"linewidth": 1.0, "linestyle": (0, (1, 1.5))},
    "steps": {"linewidth": 1.6, "drawstyle": "steps-pre"},
    "budget": {"linewidth": 1.2, "linestyle": (0, (5, 3))},
    "dots": {"linestyle": "none", "marker": "o", "markersize": 5},
    "crosses": {"linestyle": "none", "marker": "X", "markersize": 7},
    "ring": {"linestyle": "none", "marker": "o", "markersize": 12, "fillstyle": "none", "markeredgewidth": 1.5},
}


def settings() -> Any:
    """For ``matplotlib.rc_context``; its type is another in each release of matplotlib."""
    muted = dict.fromkeys(("xtick.color", "ytick.color", "axes.labelcolor"), LIGHT["muted"])
    sizes = dict.fromkeys(
        ("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"), _FONT
    )
    lines = {"axes.edgecolor": LIGHT["muted"], "grid.color": LIGHT["grid"], "text.color": LIGHT["text"]}
    return {**muted, **sizes, **lines, "axes.spines.top": False, "axes.spines.right": False, "axes.facecolor": "none"}


def events_of(timeline: Timeline) -> list[str]:
    """The kinds of events that a run has, in their order."""
    present = {event for event, _ in timeline.marked}
    return [event for event in EVENTS if event in present]


def _lanes(figure: Figure, timeline: Timeline) -> float:
    """The height of the marks above the axes."""
    return _LANE_HEIGHT * len(events_of(timeline)) + _GAP if figure.x_axis else _GAP


def _not_finite(figure: Figure) -> list[float]:
    return sorted({x for line in figure.lines if line.style != "faint" for x in line.series.not_finite})


def _num_named(figure: Figure) -> int:
    """How many entries its legend has."""
    return sum(bool(line.label) for line in figure.lines) + bool(_not_finite(figure))


def height_of(figure: Figure, timeline: Timeline) -> float:
    """Of a figure: what stands above its axes is not taken from them."""
    named = _num_named(figure)
    legend = _LEGEND_ROW * math.ceil(named / 2) if named > 1 else 0
    return _BOTTOM + _AXES_HEIGHT + _lanes(figure, timeline) + legend


def draw(figure: Figure, timeline: Timeline, canvas: Canvas, *, x: float, y: float) -> None:
    """Draw a figure on a canvas, its upper left corner at (x, y) from that of the canvas."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    width, height = (72 * inches for inches in canvas.get_size_inches())
    floor = height - y - height_of(figure, timeline) + _BOTTOM
    axes_width = WIDTH - _LEFT - _RIGHT
    axes = canvas.add_axes(((x + _LEFT) / width, floor / height, axes_width / width, _AXES_HEIGHT / height))
    for line in figure.lines:
        _draw_line(axes, line)
    axes.grid(axis="y", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_xlabel(figure.x_label)
    axes.set_ylabel(figure.y_label)
    axes.yaxis.set_label_coords((12 - _LEFT) / axes_width, 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.xaxis.set_major_formatter(FuncFormatter(_short))
    if figure.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=7))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(
            MaxNLocator(nbins=5, integer=all(value == int(value) for value in _values(figure)))
        )
    axes.yaxis.set_major_formatter(FuncFormatter(_short))
    if figure.x_axis is not None or figure.from_zero:
        axes.set_xlim(left=0)
    if figure.from_zero:
        axes.set_ylim(bottom=0, top=None if max(_values(figure), default=0) > 0 else 1)
    if figure.x_axis:
        _draw_events(axes, figure, timeline)
    _draw_not_finite(axes, figure)
    if _num_named(figure) > 1:
        above = 1 + _lanes(figure, timeline) / _AXES_HEIGHT
        axes.legend(
            loc="lower left", bbox_to_anchor=((10 - _LEFT) / (WIDTH - _LEFT - _RIGHT), above), ncols=2, frameon=False, borderaxespad=0, borderpad=0,
            handlelength=1.6, columnspacing=1.2,
        )  # fmt: skip


def _draw_line(axes: Axes, line: Line) -> None:
    style = dict(_STYLES[line.style])
    if len(line.series.finite) < 25:
        style.setdefault("marker", ".")  # a line of one point is not seen
    if line.style == "budget":
        style["marker"] = ""
    axes.plot(line.series.x, line.series.y, color=LIGHT[line.colour], label=line.label or "_", **style)


def _draw_events(axes: Axes, figure: Figure, timeline: Timeline) -> None:
    """Marks in lanes above the axes, a lane for each kind; few of them with a line across the axes."""
    per = SECONDS.get(figure.x_axis or "")
    for lane, event in enumerate(events_of(timeline)):
        places = {one.seconds / per if per else one.samples for marked, one in timeline.marked if marked == event}
        xs = thinned(sorted(places), most=_MOST_MARKS)
        marker, colour = MARKS[event]
        axes.plot(
            xs, [1 + _LANE_HEIGHT * (lane + 0.8) / _AXES_HEIGHT] * len(xs), linestyle="none", marker=marker, markersize=5.5,
            color=LIGHT[colour], transform=axes.get_xaxis_transform(), clip_on=False, label="_",
        )  # fmt: skip
        if event != "saved" and len(xs) <= _MOST_RULES:
            for x in xs:
                axes.axvline(x, color=LIGHT[colour], linewidth=0.7, alpha=0.7, linestyle=(0, (2, 3)), zorder=0.9)


def _draw_not_finite(axes: Axes, figure: Figure) -> None:
    """A cross at the upper edge where a value was nan or infinite."""
    xs = _not_finite(figure)
    if xs:
        axes.plot(
            thinned(xs, most=_MOST_MARKS), [0.98] * min(len(xs), _MOST_MARKS), linestyle="none", marker="x",
            color=LIGHT["vermilion"], transform=axes.get_xaxis_transform(), label="not finite",
        )  # fmt: skip


def _values(figure: Figure) -> list[float]:
    return [value for line in figure.lines for value in line.series.finite]


def _short(value: float, _: object = None) -> str:
    """A tick's number: 12k, 1.5M, 0.002."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.4g}".replace("e-0", "e-")
