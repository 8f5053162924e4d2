"""What a figure shows, and how that is said in words; drawn elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .series import Series

Colour = Literal["blue", "vermilion", "green", "purple", "muted"]
Style = Literal["line", "thin", "faint", "steps", "budget", "dots", "crosses", "ring", "area", "level"]

SECONDS = {"minutes": 60, "hours": 3600}  # in each unit of a time axis


@dataclass(frozen=True)
class Line:
    """What one line, or one kind of point, shows.

    Attributes:
        label: for the legend.
        series: the points.
        colour: by name; never the only thing that tells two lines apart.
        style: "line" joins points, "thin" and "faint" do so behind others, "steps" holds each value back to the point
            before, "budget" is dashed and named, "dots", "crosses" and a "ring" are points, "area" is what lies between two edges,
            "level" is a dotted level line.
        below: of an area, its lower edge at each point.
    """

    label: str
    series: Series
    colour: Colour
    style: Style = "line"
    below: tuple[float, ...] = ()


@dataclass(frozen=True)
class Frame:
    """The part of the plane that figures show which are compared: along x whole numbers, along y from 0.

    In a frame areas and level lines are named beside them, where there is room; a legend names the rest.

    Attributes:
        x_from, x_to: where x begins and ends.
        y_to: where y ends.
    """

    x_from: int
    x_to: int
    y_to: float


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: for anchors and ids.
        title: what it shows.
        description: its main numbers in words, for those who do not see it.
        x_label, y_label: with units.
        lines: what is drawn, the hindmost first.
        x_axis: what events are marked by; None where the x axis is no axis of the run.
        logarithmic: whether y is.
        from_zero: whether y begins at 0.
        frame: what it shows of the plane; None for all that is drawn.
    """

    name: str
    title: str
    description: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    x_axis: Literal["samples", "minutes", "hours"] | None = "samples"
    logarithmic: bool = False
    from_zero: bool = False
    frame: Frame | None = None


def in_words(series: Series) -> str:
    """First, last, smallest and largest."""
    finite = series.finite
    if not finite:
        return f"None of {len(series.y)} values is finite."
    if min(finite) == max(finite):
        words = f"Always {finite[0]:.4g}."
    else:
        words = f"From {finite[0]:.4g} to {finite[-1]:.4g}; smallest {min(finite):.4g}, largest {max(finite):.4g}."
    if not (count := len(series.not_finite)):
        return words
    return f"{words} {'1 value is' if count == 1 else f'{count:,} values are'} not finite."
