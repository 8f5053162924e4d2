"""Figures as SVG whose colours a page decides, and all of them as one PNG."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from typing import Any

from adaptive_batch.errors import AdaptiveBatchError

from ..history.timeline import Timeline
from .drawing import WIDTH, draw, events_of, height_of, settings
from .figure import Figure
from .look import LIGHT, MARKS

# In CSS pixels, as in a figure.
_SHEET_GAP, _SHEET_TITLE, _SHEET_LINE = 24, 22, 16


def require_matplotlib() -> None:
    """Raise where matplotlib is not installed, before anything is read.

    Raises:
        AdaptiveBatchError: it is not; the message says what installs it.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise AdaptiveBatchError(
            f"the report is drawn with matplotlib ({error}): pip install 'adaptive-batch[report]'"
        ) from None


def to_svg(figure: Figure, timeline: Timeline) -> str:
    """One figure as an SVG element for a page.

    Its colours are CSS variables (``var(--blue)``), its text is text, its ids begin with the figure's name, and its
    title and description are those of the figure.
    """
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    height = height_of(figure, timeline)
    with matplotlib.rc_context({**settings(), "svg.fonttype": "none", "svg.hashsalt": figure.name}):
        canvas = Canvas(figsize=(WIDTH / 72, height / 72))
        draw(figure, timeline, canvas, x=0, y=0)
        drawn = io.StringIO()
        canvas.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style .*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font: ([0-9.]+px)[^;\"]*", r"font-size: \1", svg)
    for name, colour in LIGHT.items():
        svg = svg.replace(colour, f"var(--{name})")
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{figure.name}-", svg)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="{figure.name}-title {figure.name}-desc">'
        f'<title id="{figure.name}-title">{html.escape(figure.title)}</title>'
        f'<desc id="{figure.name}-desc">{html.escape(figure.description)}</desc>'
    )
    return head + svg[svg.index(">") + 1 :].strip()


def to_png(
    figures: Sequence[Figure], timeline: Timeline, *, heading: str, lines: Sequence[str], columns: int = 2
) -> bytes:
    """All figures on one sheet, for people without a browser.

    Args:
        figures: in their order.
        timeline: whose events are marked.
        heading: the first line.
        lines: of text below it.
        columns: figures side by side.
    """
    import matplotlib
    from matplotlib.figure import Figure as Canvas
    from matplotlib.lines import Line2D

    sheet_rows = [figures[place : place + columns] for place in range(0, len(figures), columns)]
    heights = [max(height_of(figure, timeline) for figure in row) + _SHEET_TITLE + _SHEET_GAP for row in sheet_rows]
    top = 2 * _SHEET_GAP + _SHEET_LINE * len(lines)
    width, height = columns * WIDTH + (columns + 1) * _SHEET_GAP, top + sum(heights) + 2 * _SHEET_GAP
    with matplotlib.rc_context({**settings(), "text.parse_math": False}):
        sheet = Canvas(figsize=(width / 72, height / 72), facecolor="white", dpi=120)

        def write(x: float, y: float, text: str, **style: Any) -> None:
            sheet.text(x / width, 1 - y / height, text, va="top", **style)

        write(_SHEET_GAP, 14, heading, fontsize=16, fontweight="bold")
        write(_SHEET_GAP, 14 + _SHEET_GAP, "\n".join(lines), linespacing=1.3, color=LIGHT["muted"])
        y: float = top
        for row, row_height in zip(sheet_rows, heights, strict=True):
            for column, figure in enumerate(row):
                x = _SHEET_GAP + column * (WIDTH + _SHEET_GAP)
                write(x, y, figure.title, fontsize=12, fontweight="bold")
                # Axes of one row stand at one height.
                lowered = row_height - _SHEET_GAP - height_of(figure, timeline)
                draw(figure, timeline, sheet, x=x, y=y + lowered)
            y += row_height
        handles = [
            Line2D([], [], linestyle="none", marker=MARKS[event][0], color=LIGHT[MARKS[event][1]], label=event)
            for event in events_of(timeline)
        ]
        if handles:
            sheet.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False)
        drawn = io.BytesIO()
        sheet.savefig(drawn, format="png", metadata={"Software": None})
    return drawn.getvalue()
