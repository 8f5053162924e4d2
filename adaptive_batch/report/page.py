"""The report of a run: one page that needs no other file and no network, and the same figures as a
picture.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptive_batch import __version__
from adaptive_batch._util import atomic_write
from adaptive_batch.errors import SettingError

from .run_history import Event, Timeline, as_number
from .run_log import read_records

if TYPE_CHECKING:
    from adaptive_batch.estimate import MemoryEstimate

_TEMPLATE = Path(__file__).with_name("page.html.jinja")
_MOST_ROWS = 100  # of one kind in the table of events


def write_report(output_dir: str | Path, *, output: str | Path | None = None) -> tuple[Path, Path]:
    """Write the page and the picture of a run; return their paths.

    Args:
        output_dir: of the run; its ``run.jsonl``, ``probe.json`` and ``estimate.json`` are read,
            where they are there.
        output: the page; None for ``adaptive_batch/report.html`` in `output_dir`. The picture has
            its name, with .png.

    Raises:
        SettingError: there is neither log nor probe nor estimate, or the page cannot be written
            there.
        AdaptiveBatchError: matplotlib is not installed.
    """
    from .drawing import require_libraries

    require_libraries()
    from adaptive_batch.estimate import read_estimate

    folder = Path(output_dir) / "adaptive_batch"
    page = Path(output) if output is not None else folder / "report.html"
    if page.is_dir() or page.suffix == ".png" or (output is not None and not page.parent.is_dir()):
        raise SettingError(
            "--output", str(page), "give a file that ends in .html, in a folder that is there"
        )
    has_log = (folder / "run.jsonl").is_file()
    probe = read_probe(folder / "probe.json")
    estimate = read_estimate(folder / "estimate.json")
    if not has_log and probe is None and estimate is None:
        remedy = (
            "holds neither adaptive_batch/run.jsonl nor a probe.json or estimate.json; give a run's"
            " output_dir"
        )
        raise SettingError("OUTPUT_DIR", str(output_dir), remedy)
    timeline = Timeline.of(read_records(folder / "run.jsonl") if has_log else [])
    text, picture = render(
        timeline, probe, estimate, name=_printable(Path(output_dir).resolve().name)
    )
    _write(page, _printable(text))
    _write(page.with_suffix(".png"), picture)
    return page, page.with_suffix(".png")


def read_probe(path: Path) -> dict[str, Any] | None:
    """Return the newest result in a ``probe.json``; None where there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_estimate_picture(estimate: MemoryEstimate, path: Path) -> None:
    """Write the figures of an estimate as a PNG; an AdaptiveBatchError says that matplotlib is not
    installed.
    """
    from .drawing import require_libraries, to_png

    require_libraries()
    from .estimate_figures import estimate_figures, summary_lines

    figures = estimate_figures(estimate)
    columns = min(2, len(figures))
    wrapper = textwrap.TextWrapper(60 * columns, subsequent_indent="    ")
    lines = [part for line in summary_lines(estimate) for part in wrapper.wrap(line)]
    _write(
        path,
        to_png(figures, heading="Estimated memory", lines=lines, columns=columns),
        key="output_dir",
    )


def render(
    timeline: Timeline,
    probe: Mapping[str, Any] | None,
    estimate: MemoryEstimate | None = None,
    *,
    name: str,
) -> tuple[str, bytes]:
    """Return the page as HTML and the picture as PNG."""
    import jinja2

    from .drawing import DARK, GROUNDS, LIGHT, MARKS, marks_of, to_png, to_svg
    from .estimate_figures import estimate_figures
    from .run_figures import figures_of

    figures, missing = figures_of(timeline, probe)
    if estimate:
        figures = [*estimate_figures(estimate), *figures]
        missing = (
            missing if timeline.events or timeline.steps or probe else []
        )  # it may be an estimate and no run
    kind = (
        "Run report"
        if timeline.events or timeline.steps
        else "Probe report"
        if probe
        else "Memory estimate"
    )
    facts = facts_of(timeline, probe)
    notes = _notes_of(timeline, missing)
    events = marks_of(timeline)
    template = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template.filters.update(clock=_clock, duration=_duration, number=as_number)
    text = template.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        name=name,
        kind=kind,
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
    lines = [
        "     ".join(f"{k}: {v}" for k, v in facts[place : place + 7])
        for place in range(0, len(facts), 7)
    ]
    return text, to_png(figures, heading=f"{kind}: {name}", lines=[*lines, *notes], events=events)


def facts_of(timeline: Timeline, probe: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return (name, value) of what was recorded, a dozen facts; what was not is left out."""
    steps = timeline.steps
    events = timeline.events
    starts = [event.values for event in events if event.values["kind"] == "start"]
    validated = [
        as_number(e.values["val_loss"])
        for e in events
        if "val_loss" in e.values and not e.rolled_back
    ]
    facts: dict[str, float | str] = {
        "rows": as_number(starts[-1].get("rows")) if starts else math.nan
    }
    if steps:
        last = steps[-1]
        facts |= {"epochs": last.value("epoch") + 1, "steps": last.number}
        facts |= {"samples": last.samples, "tokens": last.value("tokens_seen")}
    bound, most = (as_number((probe or {}).get(key)) for key in ("max_batch_size", "maximum"))
    facts["bound"] = f"{bound:,.0f}+" if bound >= most > 0 else bound
    if steps:
        facts["first batch"] = steps[0].value("batch_size")
        before, rows = (
            steps[-2:][0],
            last.value("batch_size"),
        )  # the last step may be the short end of an epoch
        full = before.value("batch_size")
        is_short = rows < full and before.values.get("epoch") == last.values.get("epoch")
        facts["last batch"] = f"{full:,.0f} (last step {rows:,.0f})" if is_short else rows
        if "loss" in last.values:
            loss = last.value("loss")
            facts["final loss"] = f"{loss:.4g}" if math.isfinite(loss) else str(last.values["loss"])
    facts["final val_loss"] = (
        f"{validated[-1]:.4g}" if validated and math.isfinite(validated[-1]) else ""
    )
    if events or steps:
        facts["time"] = _duration(timeline.seconds)
        facts["restarts"] = str(sum(event.mark == "restarted" for event in events))
    facts["out of memory"] = last.value("oom_count") if steps else math.nan
    facts["began"] = _clock(as_number(starts[0].get("time"))) if starts else ""
    shown = {
        name: f"{fact:,.0f}" if isinstance(fact, int | float) and math.isfinite(fact) else fact
        for name, fact in facts.items()
    }
    return [(name, fact) for name, fact in shown.items() if isinstance(fact, str) and fact]


def _notes_of(timeline: Timeline, missing: list[str]) -> list[str]:
    """Return what a reader should know of the run, one sentence each; `missing` are titles of
    figures without data.
    """
    notes = []
    if timeline.events and not timeline.steps:
        notes.append("No optimizer step is recorded.")
    if timeline.other_runs:
        notes.append(
            f"Only the last run of the file is shown; other runs in it: {timeline.other_runs}."
        )
    notes += [f"{line[0].upper()}{line[1:]}." for line in timeline.losses_not_finite.lines()]
    if num := sum(map(len, timeline.rolled_back)):
        notes.append(
            f"Steps that restarts rolled back: {num:,}. The figures of loss show them dotted."
        )
    if missing:
        names = ", ".join(title[0].lower() + title[1:] for title in missing)
        notes.append(f"Not recorded, and so not shown: {names}.")
    return notes


def _printable(text: str) -> str:
    """Return a text with what no UTF-8 can hold, as of a folder's name that is none, written out."""
    return text.encode(errors="backslashreplace").decode()


def _duration(seconds: float) -> str:
    """Return a time as people write it: 48 s, 2:05 min, 3:20:00 h."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min" if minutes else f"{rest} s"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d} h"


def _clock(seconds: float) -> str:
    """Return a moment in UTC; empty where it is none."""
    try:
        return datetime.fromtimestamp(seconds, tz=timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return ""


def _shown_events(timeline: Timeline) -> list[Event | str]:
    """Return the events; of a kind that is there very often the first and the last, with a line on
    those between.
    """
    counts = Counter(event.values["kind"] for event in timeline.events)
    seen = Counter[str]()
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


def _write(path: Path, content: str | bytes, *, key: str = "--output") -> None:
    try:
        atomic_write(path, content)
    except OSError as error:
        raise SettingError(
            key, str(path), f"it cannot be written ({error}); give another file"
        ) from None
