"""A run as one page to look at, with the same as a picture beside it.

The page needs nothing beside itself: styles and figures are in it, and there is no script and no link to anywhere.
"""

from __future__ import annotations

import html
import json
import os
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adaptive_batch import __version__
from adaptive_batch.errors import SettingError
from adaptive_batch.estimate import MemoryEstimate, read_estimate

from .figures.drawing import events_of
from .figures.facts import clock, duration, facts_of
from .figures.images import require_matplotlib, to_png, to_svg
from .figures.look import mark_to_svg, style_sheet
from .figures.of_run import figures_of
from .figures.plan_figure import answers, changes, in_short, plan_figures
from .history.timeline import Decision, Timeline
from .run_log import read_records

_MOST_ROWS = 100  # of one kind in the table of decisions


def write_report(output_dir: str | Path, *, output: str | Path | None = None) -> tuple[Path, Path]:
    """Write the page and the picture of a run.

    Args:
        output_dir: of the run; its ``adaptive_batch/run.jsonl``, ``adaptive_batch/probe.json`` and
            ``adaptive_batch/estimate.json`` are read, where they are there.
        output: the page; None for ``adaptive_batch/report.html`` in `output_dir`. The picture has its name, with .png.

    Returns:
        The paths of the page and of the picture.

    Raises:
        SettingError: there is neither record nor probe nor plan, or the page cannot be written there.
        AdaptiveBatchError: matplotlib is not installed.
    """
    require_matplotlib()
    folder = Path(output_dir) / "adaptive_batch"
    page = Path(output) if output is not None else folder / "report.html"
    if page.is_dir() or page.suffix == ".png" or (output is not None and not page.parent.is_dir()):
        raise SettingError("--output", str(page), "give a file that ends in .html, in a folder that is there")
    has_records, probe = (folder / "run.jsonl").is_file(), read_probe(folder / "probe.json")
    plan = read_estimate(folder / "estimate.json")
    if not has_records and probe is None and plan is None:
        raise SettingError(
            "OUTPUT_DIR",
            str(output_dir),
            "holds neither adaptive_batch/run.jsonl nor a probe.json or estimate.json; give a run's output_dir",
        )
    timeline = Timeline.of(read_records(folder / "run.jsonl") if has_records else [])
    text, picture = render(timeline, probe, plan, name=Path(output_dir).resolve().name)
    png = page.with_suffix(".png")
    _write(page, text.encode())
    _write(png, picture)
    return page, png


def read_probe(path: Path) -> dict[str, Any] | None:
    """The newest result in a ``probe.json``; None where there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_plan_picture(plan: MemoryEstimate, path: Path) -> None:
    """Write a plan's figures as a PNG.

    Raises:
        AdaptiveBatchError: matplotlib is not installed.
    """
    require_matplotlib()
    figures = plan_figures(plan)
    columns = min(2, len(figures))
    lines = [part for line in in_short(plan) for part in textwrap.wrap(line, 68 * columns, subsequent_indent="    ")]
    _write(
        path, to_png(figures, Timeline.of([]), heading="Planned memory", lines=lines, columns=columns), key="output_dir"
    )


def render(
    timeline: Timeline, probe: Mapping[str, Any] | None, plan: MemoryEstimate | None = None, *, name: str
) -> tuple[str, bytes]:
    """The page as HTML and the picture as PNG.

    Args:
        timeline: of the run.
        probe: the result of its probe, as in ``probe.json``.
        plan: for devices that are not here.
        name: of the run.
    """
    figures, missing = figures_of(timeline, probe)
    if plan:
        figures = [*plan_figures(plan), *figures]
        missing = missing if timeline.decisions or timeline.steps or probe else []  # it may be a plan and no run
    facts, notes = facts_of(timeline, probe), _notes(timeline, missing)
    drawn = "\n".join(
        f'<figure id="{figure.name}"><figcaption>{html.escape(figure.title)}</figcaption>{to_svg(figure, timeline)}'
        f"<p>{html.escape(figure.description)}</p></figure>"
        for figure in figures
    )
    marks = "".join(f"<li>{mark_to_svg(event)} {event}</li>" for event in events_of(timeline))
    text = _PAGE.format(
        name=html.escape(name),
        style=style_sheet(),
        facts="".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in facts),
        notes="".join(f"<p>{html.escape(note)}</p>" for note in notes),
        marks=f'<ul class="marks" aria-label="Marks above the figures">{marks}</ul>' if marks else "",
        figures=drawn,
        plan=_plan(plan) if plan else "",
        decisions=_decisions(timeline),
        version=html.escape(__version__),
    )
    facts_lines = ["     ".join(f"{k}: {v}" for k, v in facts[place : place + 7]) for place in range(0, len(facts), 7)]
    return text, to_png(figures, timeline, heading=f"Run report: {name}", lines=[*facts_lines, *notes])


def _notes(timeline: Timeline, missing: list[str]) -> list[str]:
    notes = []
    if not timeline.steps:
        notes.append("No optimizer step is recorded.")
    if timeline.earlier_runs:
        runs = "an earlier run" if timeline.earlier_runs == 1 else f"{timeline.earlier_runs} earlier runs"
        notes.append(f"The file also holds {runs}; only the last run is shown.")
    if again := sum(map(len, timeline.taken_back)):
        steps = "1 step was" if again == 1 else f"{again:,} steps were"
        notes.append(f"{steps} taken back by restarts and done again, which the figures of loss show dotted.")
    if missing:
        names = ", ".join(title[0].lower() + title[1:] for title in missing)
        notes.append(f"Not recorded, and so not shown: {names}.")
    return notes


def _decisions(timeline: Timeline) -> str:
    """The table of decisions, folded; of a kind that is there very often the first and the last."""
    if not timeline.decisions:
        return ""
    counts, seen = Counter(decision.values["kind"] for decision in timeline.decisions), Counter[str]()
    rows = []
    for decision in timeline.decisions:
        kind = decision.values["kind"]
        seen[kind] += 1
        if counts[kind] <= _MOST_ROWS or not _MOST_ROWS // 2 < seen[kind] <= counts[kind] - _MOST_ROWS // 2:
            rows.append(_row(decision))
        elif seen[kind] == _MOST_ROWS // 2 + 1:
            left_out = counts[kind] - 2 * (_MOST_ROWS // 2)
            rows.append(
                f'<tr><td colspan="4">{left_out:,} more of the kind {html.escape(kind)} are in run.jsonl</td></tr>'
            )
    return (
        f"<details open><summary>Decisions ({len(timeline.decisions):,})</summary>"
        '<div class="wide" role="region" tabindex="0" aria-label="Decisions"><table><thead><tr>'
        '<th scope="col">step</th><th scope="col">time</th><th scope="col">kind</th><th scope="col">what was decided</th>'
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _plan(plan: MemoryEstimate) -> str:
    """The tables of a plan, and what it leaves out."""
    length = plan.lengths[0].sequence_length
    tables = [
        ("Planned memory", answers(plan)),
        (f"What one change would bring, in rows of {length:,} tokens", changes(plan)),
    ]
    left_out = "".join(f"<p>Left out: {html.escape(sentence)}.</p>" for sentence in plan.left_out)
    return "".join(_table(title, head, lines) for title, (head, lines) in tables if lines) + left_out


def _table(title: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A folded table whose first column names each line."""
    columns = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in head)
    rows = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>{"".join(f"<td>{html.escape(value)}</td>" for value in values)}</tr>'
        for name, *values in lines
    )
    return (
        f'<details open><summary>{html.escape(title)}</summary><div class="wide" role="region" tabindex="0" '
        f'aria-label="{html.escape(title)}"><table><thead><tr>{columns}</tr></thead><tbody>{rows}</tbody></table></div></details>'
    )


def _row(decision: Decision) -> str:
    values = decision.values
    when = values.get("time")
    at = clock(when) if isinstance(when, (int, float)) else ""
    message = html.escape(str(values.get("message", "")))
    if "\n" in message:
        first, rest = message.split("\n", 1)
        message = f"{first}<pre>{rest}</pre>"
    back = " <em>(taken back by a restart)</em>" if decision.taken_back else ""
    return (
        f'<tr{" class=back" if decision.taken_back else ""}><td class="number">{decision.step:,}</td>'
        f'<td class="number" title="{at}">{duration(decision.seconds)}</td>'
        f"<td>{html.escape(values['kind'])}</td><td>{message}{back}</td></tr>"
    )


def _write(path: Path, content: bytes, *, key: str = "--output") -> None:
    """Aside, then renamed: a page that is looked at is whole."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_bytes(content)
        os.replace(aside, path)
    except OSError as error:
        raise SettingError(key, str(path), f"it cannot be written ({error}); give another file") from None


_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{name}: run report</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>Run report <small>{name}</small></h1>
<dl>{facts}</dl>
{notes}
{marks}
</header>
<main>
<div class="figures">
{figures}
</div>
{plan}
{decisions}
</main>
<footer>adaptive_batch {version}. Time is that in which the run ran; a stop and its restart are joined.</footer>
</body>
</html>
"""
