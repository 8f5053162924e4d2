"""The report of a run: one page that needs no other file and no network, and the same figures as a picture."""

from __future__ import annotations

import json
import os
import textwrap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptive_batch import __version__
from adaptive_batch.errors import SettingError

from .run_history import Event, Timeline, as_number
from .run_log import read_records

if TYPE_CHECKING:
    from adaptive_batch.estimate import MemoryEstimate

_TEMPLATE = Path(__file__).with_name("page.html.jinja")
_MOST_ROWS = 100  # of one kind in the table of events


def write_report(output_dir: str | Path, *, output: str | Path | None = None) -> tuple[Path, Path]:
    """Write the page and the picture of a run.

    Args:
        output_dir: of the run; its ``adaptive_batch/run.jsonl``, ``adaptive_batch/probe.json`` and
            ``adaptive_batch/estimate.json`` are read, where they are there.
        output: the page; None for ``adaptive_batch/report.html`` in `output_dir`. The picture has its name, with .png.

    Returns:
        The paths of the page and of the picture.

    Raises:
        SettingError: there is neither log nor probe nor estimate, or the page cannot be written there.
        AdaptiveBatchError: matplotlib is not installed.
    """
    from .drawing import require_libraries

    require_libraries()
    from adaptive_batch.estimate import read_estimate

    folder = Path(output_dir) / "adaptive_batch"
    page = Path(output) if output is not None else folder / "report.html"
    if page.is_dir() or page.suffix == ".png" or (output is not None and not page.parent.is_dir()):
        raise SettingError("--output", str(page), "give a file that ends in .html, in a folder that is there")
    has_log, probe = (folder / "run.jsonl").is_file(), read_probe(folder / "probe.json")
    estimate = read_estimate(folder / "estimate.json")
    if not has_log and probe is None and estimate is None:
        raise SettingError(
            "OUTPUT_DIR",
            str(output_dir),
            "holds neither adaptive_batch/run.jsonl nor a probe.json or estimate.json; give a run's output_dir",
        )
    timeline = Timeline.of(read_records(folder / "run.jsonl") if has_log else [])
    text, picture = render(timeline, probe, estimate, name=Path(output_dir).resolve().name)
    png = page.with_suffix(".png")
    _write(page, text.encode())
    _write(png, picture)
    return page, png


def read_probe(path: Path) -> dict[str, Any] | None:
    """Return the newest result in a ``probe.json``; None where there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_estimate_picture(estimate: MemoryEstimate, path: Path) -> None:
    """Write the figures of an estimate as a PNG.

    Raises:
        AdaptiveBatchError: matplotlib is not installed.
    """
    from .drawing import require_libraries, to_png

    require_libraries()
    from .estimate_figures import estimate_figures, summary_lines

    figures = estimate_figures(estimate)
    columns = min(2, len(figures))
    lines = [
        part for line in summary_lines(estimate) for part in textwrap.wrap(line, 60 * columns, subsequent_indent="    ")
    ]
    _write(path, to_png(figures, heading="Estimated memory", lines=lines, columns=columns), key="output_dir")


def render(
    timeline: Timeline, probe: Mapping[str, Any] | None, estimate: MemoryEstimate | None = None, *, name: str
) -> tuple[str, bytes]:
    """Return the page as HTML and the picture as PNG.

    Args:
        timeline: of the run.
        probe: the result of its probe, as in ``probe.json``.
        estimate: of memory on other devices.
        name: of the run.
    """
    import jinja2

    from .drawing import DARK, GROUNDS, LIGHT, MARKS, marks_of, to_png, to_svg
    from .estimate_figures import estimate_figures
    from .run_figures import figures_of
    from .summary import clock, duration, facts_of, notes_of

    figures, missing = figures_of(timeline, probe)
    if estimate:
        figures = [*estimate_figures(estimate), *figures]
        missing = missing if timeline.events or timeline.steps or probe else []  # it may be an estimate and no run
    facts, notes, events = facts_of(timeline, probe), notes_of(timeline, missing), marks_of(timeline)
    template = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template.filters.update(clock=clock, duration=duration, number=as_number)
    text = template.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        name=name,
        version=__version__,
        facts=facts,
        notes=notes,
        marks=[(event, *MARKS[event]) for event in events],
        figures=[(figure, to_svg(figure)) for figure in figures],
        estimate=estimate,
        events=_shown_events(timeline),
        num_events=len(timeline.events),
        light=LIGHT,
        dark=DARK,
        grounds=GROUNDS,
    )
    lines = ["     ".join(f"{k}: {v}" for k, v in facts[place : place + 7]) for place in range(0, len(facts), 7)]
    return text, to_png(figures, heading=f"Run report: {name}", lines=[*lines, *notes], events=events)


def _shown_events(timeline: Timeline) -> list[Event | str]:
    """Return the events; of a kind that is there very often the first and the last, with a line on those between."""
    counts, seen = Counter(event.values["kind"] for event in timeline.events), Counter[str]()
    half = _MOST_ROWS // 2
    shown: list[Event | str] = []
    for event in timeline.events:
        kind = event.values["kind"]
        seen[kind] += 1
        if counts[kind] <= _MOST_ROWS or not half < seen[kind] <= counts[kind] - half:
            shown.append(event)
        elif seen[kind] == half + 1:
            shown.append(f"{counts[kind] - 2 * half:,} more of the kind {kind} are in run.jsonl")
    return shown


def _write(path: Path, content: bytes, *, key: str = "--output") -> None:
    """Write aside, then rename: a page that is looked at is complete."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_bytes(content)
        os.replace(aside, path)
    except OSError as error:
        raise SettingError(key, str(path), f"it cannot be written ({error}); give another file") from None
