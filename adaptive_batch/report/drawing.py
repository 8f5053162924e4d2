"""Colours, axes and files that all figures share. matplotlib comes with the extra ``report`` and is
imported when something is drawn.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, TypeVar

from adaptive_batch.errors import AdaptiveBatchError

from .run_history import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Value = TypeVar("Value")

# The Okabe-Ito colours, which colour-blind people tell apart, darkened until each has a contrast of
# 3 on white.
LIGHT: Mapping[str, str] = {
    "text": "#1f2328",
    "muted": "#59636e",
    "grid": "#d8dee4",
    "blue": "#0072b2",
    "vermilion": "#c64f00",
    "green": "#00805f",
    "purple": "#9c4a88",
    "ochre": "#8a6d00",
    "red": "#c4001a",
}
# What a page shows in their place on a dark ground.
DARK: Mapping[str, str] = {
    "text": "#e6edf3",
    "muted": "#9aa5b1",
    "grid": "#343b44",
    "blue": "#58b1ea",
    "vermilion": "#ff8f4d",
    "green": "#35c99d",
    "purple": "#dd92c8",
    "ochre": "#d9b84a",
    "red": "#ff6b78",
}
# Of the page, and of a figure.
GROUNDS = {
    "light": ("#ffffff", "#f6f8fa"),
    "dark": ("#0d1117", "#161b22"),
}
# matplotlib's marker of each kind of event, the same as a character, and its colour; the shapes
# alone tell them apart.
MARKS: Mapping[str, tuple[str, str, str]] = {
    "batch size changed": ("^", "▲", "blue"),
    "loss not finite": ("D", "◆", "red"),
    "out of memory": ("X", "✖", "vermilion"),
    "limit changed": ("v", "▼", "purple"),
    "saved": ("o", "●", "muted"),
    "restarted": (">", "▶", "green"),
    "preempted": ("s", "■", "vermilion"),
}
# In points, which are CSS pixels on a page. A figure is as wide as a phone, so its text is read as
# it is.
_WIDTH = 380
_HEIGHT = 280
_FONT = 11
# Of one kind in one figure: marks above it, lines across it.
_MOST_MARKS = 40
_MOST_RULES = 12
# Height of a row of marks above the axes, in points.
_LANE = 12
# matplotlib cannot scale an axis beyond it: such a number is marked as not finite.
_LARGEST = 1e100
# Begins the id of marks that have values.
_VALUES = "value-"
# Points of a running mean.
_POINTS = 300
# For matplotlib.rc_context, whose type is another in each release.
_STYLE: Any = {
    **dict.fromkeys(
        ("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"),
        _FONT,
    ),
    **dict.fromkeys(
        ("xtick.color", "ytick.color", "axes.labelcolor", "axes.edgecolor"), LIGHT["muted"]
    ),
    **dict.fromkeys(
        ("axes.spines.top", "axes.spines.right", "legend.frameon", "text.parse_math"), False
    ),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "axes.grid.axis": "y",
    "axes.facecolor": "none",
    "text.color": LIGHT["text"],
    "grid.color": LIGHT["grid"],
    # Text stays text.
    "svg.fonttype": "none",
    "path.simplify_threshold": 0.5,
}


@dataclass(frozen=True)
class Figure:
    """One figure, not drawn yet; `description` has its main numbers in words, for those who do not
    see it.
    """

    name: str
    title: str
    description: str
    draw: Callable[[Axes], None]


@dataclass(frozen=True)
class Points:
    """Numbers over a run. A y that cannot be drawn is nan."""

    x: Sequence[float]
    y: Sequence[float]

    @classmethod
    def of(cls, x: Sequence[float], y: Sequence[float]) -> Points:
        """Make nan of each y that cannot be drawn."""
        return cls(x, [value if abs(value) < _LARGEST else math.nan for value in y])

    @property
    def finite(self) -> list[float]:
        """Every y that can be drawn."""
        return [value for value in self.y if math.isfinite(value)]

    def running_mean(self, window: int) -> Points:
        """Return the mean of a point and the `window` - 1 before it, at up to 300 points; what is
        not finite is left out.
        """
        last = len(self.x) - 1
        places: list[int] = []
        if self.x:
            places = sorted({round(part * last / (_POINTS - 1)) for part in range(_POINTS)})
        windows = [
            Points((), self.y[max(0, place + 1 - window) : place + 1]).finite for place in places
        ]
        means = [math.fsum(values) / len(values) if values else math.nan for values in windows]
        return Points([self.x[place] for place in places], means)

    def in_words(self) -> str:
        """Return first, last, smallest and largest as a sentence."""
        finite = self.finite
        if not finite:
            return f"None of {len(self.y)} values is finite."
        if min(finite) == max(finite):
            words = f"Always {finite[0]:.4g}."
        else:
            words = (
                f"From {finite[0]:.4g} to {finite[-1]:.4g}; smallest {min(finite):.4g}, largest"
                f" {max(finite):.4g}."
            )
        left_out = len(self.y) - len(finite)
        if left_out:
            words += f" Values that are not finite: {left_out:,}."
        return words


def plot(axes: Axes, points: Points, label: str, colour: str, **style: Any) -> None:
    """Draw a line, and a cross at the upper edge where a value is nan or infinite."""
    # A line of one point is not seen.
    if len(points.finite) < 25:
        style.setdefault("marker", ".")
    axes.plot(points.x, points.y, color=LIGHT[colour], label=label or "_", **style)
    _add_values(axes, points, label, colour)
    crosses = _thinned([x for x, y in zip(points.x, points.y, strict=True) if math.isnan(y)])
    if crosses:
        name = "not finite" if "not finite" not in axes.get_legend_handles_labels()[1] else "_"
        style = {"linestyle": "none", "marker": "x", "color": LIGHT["red"], "label": name}
        axes.plot(crosses, [0.98] * len(crosses), transform=axes.get_xaxis_transform(), **style)


def _add_values(axes: Axes, points: Points, label: str, colour: str) -> None:
    """Lay unseen marks over a line, whose values a page shows where the pointer rests on one."""
    pairs = [pair for pair in zip(points.x, points.y, strict=True) if math.isfinite(pair[1])]
    shown = _thinned(pairs)
    if shown:
        style: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 9, "alpha": 0}
        xs, ys = zip(*shown, strict=True)
        axes.plot(xs, ys, color=LIGHT[colour], gid=f"{_VALUES}{label}", label="_", **style)


def _titled(svg: str, axes: Axes) -> str:
    """Give the marks of :func:`_add_values` their values as titles."""
    for line in axes.get_lines():
        name = str(line.get_gid() or "")
        if not name.startswith(_VALUES):
            continue
        what = name.removeprefix(_VALUES) or axes.get_ylabel()
        points: Any = line.get_xydata()
        texts = [
            escape(f"{axes.get_xlabel()} {_short(x)}: {what} {_short(y)}")
            for x, y in points.tolist()
        ]
        before, opening, rest = svg.partition(f'<g id="{escape(name)}">')
        marks, closing, after = rest.partition("</g>\n")
        head, *uses = re.split(r"(?=<use )", marks)
        # What lies beyond the axes is not drawn.
        if len(uses) == len(texts):
            uses = [
                use.replace("/>", f"><title>{text}</title></use>", 1)
                for use, text in zip(uses, texts, strict=True)
            ]
        svg = "".join([before, opening, head, *uses, closing, after])
    return svg


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def from_zero(axes: Axes) -> None:
    """Begin the y axis at 0."""
    highest = axes.dataLim.y1
    top = 1.0
    if highest > 0:
        # matplotlib's own margin is a share of the data's range, which may lie far above 0.
        top = max(axes.get_ylim()[1], 1.05 * highest)
    axes.set_ylim(bottom=0, top=top)


def mark_events(axes: Axes, timeline: Timeline, *, seconds: float | None = None) -> None:
    """Draw the events of a run above its axes, a row for each kind; few of them with a line across
    the axes.

    The x axis is samples, or time in a unit of so many `seconds`.
    """
    axes.set_xlim(left=0)
    for lane, event in enumerate(marks_of(timeline)):
        marked = [step for mark, step in timeline.marked if mark == event]
        places: set[float] = {step.samples for step in marked}
        if seconds:
            places = {step.seconds / seconds for step in marked}
        xs = _thinned(sorted(places))
        marker, _, colour = MARKS[event]
        style: dict[str, Any] = {
            "linestyle": "none",
            "marker": marker,
            "markersize": 5.5,
            "clip_on": False,
        }
        transform = _above(axes, axes.get_xaxis_transform(), _LANE * (lane + 0.8))
        axes.plot(xs, [1] * len(xs), color=LIGHT[colour], transform=transform, label="_", **style)
        if event != "saved" and len(xs) <= _MOST_RULES:
            for x in xs:
                axes.axvline(
                    x,
                    color=LIGHT[colour],
                    linewidth=0.7,
                    alpha=0.7,
                    linestyle=(0, (2, 3)),
                    zorder=0.9,
                )
    add_legend(axes, above=_LANE * (len(marks_of(timeline)) + 0.5))


def add_legend(axes: Axes, *, above: float = 8) -> None:
    """Name the lines, so many points above the axes. A single one is named by its axis."""
    if len(axes.get_legend_handles_labels()[1]) > 1:
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0}
        transform = _above(axes, axes.transAxes, above, left=40)
        axes.legend(
            ncols=2,
            handlelength=1.6,
            columnspacing=1,
            borderpad=0,
            bbox_transform=transform,
            **place,
        )


def _above(axes: Axes, transform: Any, points: float, *, left: float = 0) -> Any:
    """Return a transform that is moved in points: what the layout leaves for it then does not
    depend on the size of the axes.
    """
    from matplotlib.transforms import ScaledTranslation

    return transform + ScaledTranslation(-left / 72, points / 72, axes.figure.dpi_scale_trans)


def marks_of(timeline: Timeline) -> list[str]:
    """Return the kinds of events that a run has, in their order."""
    present = {mark for mark, _ in timeline.marked}
    return [event for event in MARKS if event in present]


def require_libraries() -> None:
    """Raise an AdaptiveBatchError, before anything is read, where a library of the extra ``report``
    is not installed.
    """
    try:
        import jinja2  # noqa: F401
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise AdaptiveBatchError(
            f"the report is drawn with matplotlib and jinja2 ({error}): pip install"
            " 'adaptive-batch[report]'"
        ) from None


def to_svg(figure: Figure) -> str:
    """Return a figure as an SVG element that a page names by ``NAME-title`` and ``NAME-text``; all
    its ids begin with its name.
    """
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": figure.name}):
        canvas = Canvas(figsize=(_WIDTH / 72, _HEIGHT / 72), layout="constrained")
        axes = canvas.subplots()
        figure.draw(axes)
        drawn = io.StringIO()
        without = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        canvas.savefig(drawn, format="svg", transparent=True, metadata=without)
    svg = _titled(drawn.getvalue(), axes).partition("<svg ")[2]
    # Figures of one page share no id.
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{figure.name}-", svg)
    return f'<svg role="img" aria-labelledby="{figure.name}-title {figure.name}-text" {svg}'


def to_png(
    figures: Sequence[Figure],
    *,
    heading: str,
    lines: Sequence[str],
    events: Sequence[str] = (),
    columns: int = 2,
) -> bytes:
    """Return all figures on one sheet, with lines of text below the heading and the kinds of events
    explained.
    """
    import matplotlib
    from matplotlib.figure import Figure as Canvas
    from matplotlib.lines import Line2D

    num_rows = max(1, math.ceil(len(figures) / columns))
    top = 50 + 16 * len(lines) + 20 * bool(events)
    height = num_rows * (_HEIGHT + 30)
    with matplotlib.rc_context(_STYLE):
        sheet = Canvas(
            figsize=(columns * (_WIDTH + 20) / 72, (top + height) / 72),
            layout="constrained",
            dpi=120,
        )
        parts: Any = sheet.subfigures(2, 1, height_ratios=[top, height])
        head, body = parts
        head.text(0.015, 1 - 14 / top, heading, va="top", fontsize=16, fontweight="bold")
        head.text(
            0.015, 1 - 42 / top, "\n".join(lines), va="top", linespacing=1.3, color=LIGHT["muted"]
        )
        places = body.subfigures(num_rows, columns, squeeze=False, wspace=0.03, hspace=0.03).flat
        for figure, place in zip(figures, places, strict=False):
            place.suptitle(figure.title, x=0.02, ha="left", fontsize=12, fontweight="bold")
            figure.draw(place.subplots())
        handles = [
            Line2D(
                [],
                [],
                linestyle="none",
                marker=MARKS[event][0],
                color=LIGHT[MARKS[event][2]],
                label=event,
            )
            for event in events
        ]
        if handles:
            head.legend(
                handles=handles,
                loc="lower left",
                ncols=len(handles),
                handletextpad=0.2,
                columnspacing=1.2,
            )
        drawn = io.BytesIO()
        sheet.savefig(drawn, format="png", facecolor="white", metadata={"Software": None})
    return drawn.getvalue()


def _thinned(values: Sequence[Value]) -> Sequence[Value]:
    """Return up to 40 of the values, spread evenly, the last among them."""
    return values[:: -(len(values) // _MOST_MARKS + 1)][::-1]
