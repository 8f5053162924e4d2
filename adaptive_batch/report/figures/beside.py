"""Where names stand beside what they name, so that none hides another: of areas to their right, of level lines on these."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .figure import Colour, Figure, Frame, Line

# In CSS pixels, as in a figure.
_LINE_HEIGHT, _ABOVE, _LETTER = 13, 9, 6.6
_LONGEST = 11  # letters of a line to the right of a figure
_THINNEST = 0.005  # part of the axes' height that an area has where it is named to its right


@dataclass(frozen=True)
class Name:
    """A name with its place.

    Attributes:
        text: of one line or several.
        middle: of the text, above the lower edge of the axes.
        named: the middle of what it names, there too.
        colour: of what it names.
        at_end: of a level line, whether it stands where the line ends; else where it begins.
    """

    text: str
    middle: float
    named: float
    colour: Colour
    at_end: bool = False

    @property
    def half(self) -> float:
        """Half of the text's height."""
        return _LINE_HEIGHT * (self.text.count("\n") + 1) / 2

    def span(self, width: float) -> tuple[float, float]:
        """Where it begins and ends along a level line, about."""
        own = _LETTER * len(self.text)
        return (width - own, width) if self.at_end else (0.0, own)


def without_place(figure: Figure) -> list[Line]:
    """The areas that end too thin to be named where they end; a legend names them."""
    return [line for line in _areas(figure) if not _ends_thick(line, figure.frame)]


def right_of_areas(figure: Figure, *, height: float) -> list[Name]:
    """The names of the other areas, the lowest first.

    Args:
        figure: in a frame.
        height: of its axes.
    """
    assert figure.frame is not None
    found = []
    for line in _areas(figure):
        if _ends_thick(line, figure.frame):
            at = sum(_end(line, figure.frame)) / 2 * height / figure.frame.y_to
            found.append(Name("\n".join(textwrap.wrap(line.label, _LONGEST)), at, at, line.colour))
    return _spread(found, highest=height)


def on_level_lines(figure: Figure, *, width: float, height: float) -> list[Name]:
    """The names of level lines, the highest first: above the line where it begins, or else where least goes through the name.

    Args:
        figure: in a frame.
        width, height: of its axes.
    """
    assert figure.frame is not None
    per = height / figure.frame.y_to
    level = [
        (line.series.y[0] * per, line) for line in figure.lines if line.style in ("budget", "level") and line.label
    ]
    placed: list[Name] = []
    for at, line in sorted(level, key=lambda one: -one[0]):

        def hidden(name: Name) -> float:
            lines = sum(abs(name.middle - other) < name.half + 1 for other, _ in level)
            pixels = sum(_overlap(name, other, width) for other in placed)
            edges = sum(_goes_through(area, figure.frame, name, width, per) for area in _areas(figure))
            beyond = name.middle < name.half or name.middle + name.half > height
            # A name on a name cannot be read; one through which a line goes can, and one across an edge easily.
            return pixels + 16 * beyond + 4 * lines + edges

        places = [Name(line.label, at + up, at, line.colour, end) for up in (_ABOVE, -_ABOVE) for end in (False, True)]
        placed.append(min(places, key=hidden))  # the first of those that are as good
    return placed


def _areas(figure: Figure) -> list[Line]:
    return [line for line in figure.lines if line.style == "area" and line.label]


def _end(line: Line, frame: Frame) -> tuple[float, float]:
    """Lower and upper edge of an area where it ends, of what the frame shows."""
    return min(line.below[-1], frame.y_to), min(line.series.y[-1], frame.y_to)


def _ends_thick(line: Line, frame: Frame | None) -> bool:
    if frame is None:
        return False
    low, high = _end(line, frame)
    return high - low >= _THINNEST * frame.y_to


def _goes_through(area: Line, frame: Frame | None, name: Name, width: float, per: float) -> bool:
    """Whether the upper edge of an area goes through a name on a level line."""
    assert frame is not None
    begin, end = name.span(width)
    places = [
        frame.x_from + (begin + (end - begin) * part / 8) / width * (frame.x_to - frame.x_from) for part in range(9)
    ]
    heights = [_edge_at(area, place) * per for place in places]
    return min(heights) < name.middle + name.half and max(heights) > name.middle - name.half


def _edge_at(area: Line, place: float) -> float:
    points = list(zip(area.series.x, area.series.y, strict=True))
    for (x, low), (following, high) in pairwise(points):
        if x <= place <= following:
            return low + (high - low) * (place - x) / (following - x)
    return points[-1][1]


def _overlap(name: Name, other: Name, width: float) -> float:
    """Pixels along which two names on level lines lie on each other."""
    if abs(name.middle - other.middle) >= name.half + other.half:
        return 0.0
    (begin, end), (others_begin, others_end) = name.span(width), other.span(width)
    return max(0.0, min(end, others_end) - max(begin, others_begin))


def _spread(names: Sequence[Name], *, highest: float) -> list[Name]:
    """Names moved apart until none lies on another: up from below, then down from where the axes end."""
    ordered = sorted(names, key=lambda name: (name.middle, name.named))
    middles: list[float] = []
    free = 0.0
    for name in ordered:
        middles.append(max(name.middle, free + name.half))
        free = middles[-1] + name.half
    free = highest
    for place in reversed(range(len(middles))):
        middles[place] = min(middles[place], free - ordered[place].half)
        free = middles[place] - ordered[place].half
    return [replace(name, middle=middle) for name, middle in zip(ordered, middles, strict=True)]
