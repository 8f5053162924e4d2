"""Draws a figure on matplotlib's canvas: its lines, and the marks of events above them.

matplotlib comes with the extra `report` and is imported when something is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..history.timeline import EVENTS, Timeline
from .beside import on_level_lines, right_of_areas, without_place
from .figure import SECONDS, Figure, Frame, Line
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
_NAMES, _FRAME_HEIGHT = 90, 230  # to the right of axes whose areas are named there; of these axes
_AXES_HEIGHT, _LANE_HEIGHT, _LEGEND_ROW, _GAP = 170, 12, 17, 8
_STYLES: Mapping[str, dict[str, Any]] = {
    "line": {"linewidth": 1.6},
    "thin": {"linewidth": 0.8, "alpha": 0.55},
    "faint": {"linewidth": 1.0, "linestyle": (0, (1, 1.5))},
    "steps": {"linewidth": 1.6, "drawstyle": "steps-pre"},
    "budget": {"linewidth": 1.2, "linestyle": (0, (5, 3)), "marker": ""},
    "dots": {"linestyle": "none", "marker": "o", "markersize": 5, "clip_on": False},
    "crosses": {"linestyle": "none", "marker": "X", "markersize": 7},
    "ring": {"linestyle": "none", "marker": "o", "markersize": 12, "fillstyle": "none", "markeredgewidth": 1.5},
    "area": {"linewidth": 1.0, "marker": ""},
    "level": {"linewidth": 1.2, "linestyle": (0, (1, 1.5)), "marker": ""},
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
    """How many things a figure has to name in its legend."""
    named = without_place(figure) if figure.frame else [line for line in figure.lines if line.label]
    return len(named) + bool(_not_finite(figure))


def _num_in_legend(figure: Figure) -> int:
    """What is alone in a figure is named by its axis."""
    named = _num_named(figure)
    return named if named > 1 or figure.frame else 0


def height_of(figure: Figure, timeline: Timeline) -> float:
    """Of a figure: what stands above its axes is not taken from them."""
    legend = _LEGEND_ROW * math.ceil(_num_in_legend(figure) / 2)
    return _BOTTOM + _height_of_axes(figure) + _lanes(figure, timeline) + legend


def _height_of_axes(figure: Figure) -> float:
    return _FRAME_HEIGHT if figure.frame else _AXES_HEIGHT


def draw(figure: Figure, timeline: Timeline, canvas: Canvas, *, x: float, y: float) -> None:
    """Draw a figure on a canvas, its upper left corner at (x, y) from that of the canvas."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    width, height = (72 * inches for inches in canvas.get_size_inches())
    floor = height - y - height_of(figure, timeline) + _BOTTOM
    axes_width = WIDTH - _LEFT - (_NAMES if figure.frame else _RIGHT)
    axes = canvas.add_axes(((x + _LEFT) / width, floor / height, axes_width / width, _height_of_axes(figure) / height))
    for line in figure.lines:
        _draw_line(axes, line, is_named=not figure.frame or line in without_place(figure))
    axes.grid(axis="y", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_xlabel(figure.x_label)
    axes.set_ylabel(figure.y_label)
    axes.yaxis.set_label_coords((12 - _LEFT) / axes_width, 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=figure.frame is not None))
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
    if figure.frame:
        _draw_names(axes, figure, figure.frame, width=axes_width)
    if figure.x_axis:
        _draw_events(axes, figure, timeline)
    _draw_not_finite(axes, figure)
    if _num_in_legend(figure):
        above = 1 + _lanes(figure, timeline) / _height_of_axes(figure)
        axes.legend(
            loc="lower left", bbox_to_anchor=((10 - _LEFT) / axes_width, above), ncols=2, frameon=False, borderaxespad=0, borderpad=0,
            handlelength=1.6, columnspacing=1.2,
        )  # fmt: skip


def _draw_line(axes: Axes, line: Line, *, is_named: bool) -> None:
    style, label = dict(_STYLES[line.style]), line.label if is_named and line.label else "_"
    if line.style == "area":
        axes.fill_between(
            line.series.x, line.below, line.series.y, color=LIGHT[line.colour], alpha=0.35, linewidth=0, label=label
        )
        label = "_"
    if len(line.series.finite) < 25:
        style.setdefault("marker", ".")  # a line of one point is not seen
    axes.plot(line.series.x, line.series.y, color=LIGHT[line.colour], label=label, **style)


def _draw_names(axes: Axes, figure: Figure, frame: Frame, *, width: float) -> None:
    """Show the frame, with names beside what they name."""
    axes.set_xlim(frame.x_from, frame.x_to)
    axes.set_ylim(0, frame.y_to)
    height = _height_of_axes(figure)
    style: dict[str, Any] = {"transform": axes.transAxes, "va": "center", "color": LIGHT["text"], "linespacing": 1.05}
    for name in on_level_lines(figure, width=width, height=height):
        x, side = (1 - 5 / width, "right") if name.at_end else (5 / width, "left")
        axes.text(x, name.middle / height, name.text, ha=side, **style)
    for name in right_of_areas(figure, height=height):
        axes.text(1 + 14 / width, name.middle / height, name.text, **style)
        axes.plot(
            [1 + 2 / width, 1 + 11 / width], [name.named / height, name.middle / height], color=LIGHT[name.colour],
            linewidth=1, transform=axes.transAxes, clip_on=False, label="_",
        )  # fmt: skip


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
