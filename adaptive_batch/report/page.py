"""The report of a run: a page, and the same figures as a picture.

The page needs no other file and no network.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptive_batch import __version__
from adaptive_batch._util import atomic_write
from adaptive_batch.errors import SettingError

from .auditing import Audit, audit_records
from .run_history import Event, Step, Timeline, as_number, mean_window
from .run_log import read_records

if TYPE_CHECKING:
    from adaptive_batch.estimate import MemoryEstimate

_TEMPLATE = Path(__file__).with_name("page.html.jinja")
# Characters of a line of text beside two columns of figures; matplotlib breaks none.
_COLUMNS_OF_PICTURE = 120
# Rows of one kind in the table of events: a long run may save a thousand times.
_MOST_ROWS = 100


def write_report(output_dir: str | Path, *, output: str | Path | None = None) -> tuple[Path, Path]:
    """Write the page and the picture of a run; return their paths.

    Args:
        output_dir: folder of the run; its ``run.jsonl`` and ``estimate.json`` are read, where they
            are there, and ``probe.json`` where the log has no search.
        output: path of the page; None for ``adaptive_batch/report.html`` in `output_dir`. The
            picture has its name, with .png.

    Raises:
        SettingError: there is neither log nor probe nor estimate, or the page cannot be written
            there.
        AdaptiveBatchError: matplotlib is not installed.
    """
    from .drawing import require_libraries

    # A missing library is named before a long log is read.
    require_libraries()
    from adaptive_batch.estimate import read_estimate

    folder = Path(output_dir) / "adaptive_batch"
    page = folder / "report.html"
    is_in_folder = True
    if output is not None:
        page = Path(output)
        is_in_folder = page.parent.is_dir()
    # The picture, which ends in .png, would overwrite a page of the same name.
    if page.is_dir() or page.suffix == ".png" or not is_in_folder:
        remedy = "give a file that ends in .html, in a folder that is there"
        raise SettingError("--output", str(page), remedy)
    has_log = (folder / "run.jsonl").is_file()
    probe = read_probe(folder / "probe.json")
    estimate = read_estimate(folder / "estimate.json")
    if not has_log and probe is None and estimate is None:
        remedy = (
            "holds neither adaptive_batch/run.jsonl nor a probe.json or estimate.json; give a run's"
            " output_dir"
        )
        raise SettingError("OUTPUT_DIR", str(output_dir), remedy)
    records = read_records(folder / "run.jsonl") if has_log else []
    # A later `adaptive_probe` in the folder is another search than the run's.
    own_searches = [record["search"] for record in records if "search" in record]
    if own_searches:
        probe = own_searches[-1]
    name = _printable(Path(output_dir).resolve().name)
    proof = audit_records(records, records) if has_log else None
    text, picture = render(Timeline.of(records), probe, estimate, name=name, proof=proof)
    _write(page, _printable(text))
    _write(page.with_suffix(".png"), picture)
    return page, page.with_suffix(".png")


def read_probe(path: Path) -> dict[str, Any] | None:
    """Return the newest result in a ``probe.json``; None where there is none that can be read."""
    try:
        probe = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return probe if isinstance(probe, dict) else None


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
    wrapper = textwrap.TextWrapper(_COLUMNS_OF_PICTURE * columns // 2, subsequent_indent="    ")
    lines: list[str] = []
    for line in summary_lines(estimate):
        lines += wrapper.wrap(line)
    picture = to_png(figures, heading="Estimated memory", lines=lines, columns=columns)
    _write(path, picture, key="output_dir")


def render(
    timeline: Timeline,
    probe: Mapping[str, Any] | None,
    estimate: MemoryEstimate | None = None,
    *,
    name: str,
    proof: Audit | None = None,
) -> tuple[str, bytes]:
    """Return the page as HTML and the picture as PNG."""
    import jinja2

    from .drawing import DARK, GROUNDS, LIGHT, MARKS, marks_of, to_png, to_svg
    from .estimate_figures import estimate_figures
    from .run_figures import figures_of

    figures, missing, constants = figures_of(timeline, probe)
    kind = _kind_of(timeline, probe)
    if estimate:
        figures = [*estimate_figures(estimate), *figures]
        # An estimate alone has no run whose figures could be missing.
        if kind == "Memory estimate":
            missing = []
    facts = facts_of(timeline, probe)
    notes = _notes_of(timeline, missing, constants)
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
        settings=_settings_of(timeline),
        proof=proof,
        events=_shown_events(timeline),
        num_events=len(timeline.events),
        light=LIGHT,
        dark=DARK,
        grounds=GROUNDS,
    )
    lines = _lines_of_picture(facts)
    return text, to_png(figures, heading=f"{kind}: {name}", lines=[*lines, *notes], events=events)


def _lines_of_picture(facts: Sequence[tuple[str, str]]) -> list[str]:
    """Return the facts as lines that the picture does not cut."""
    lines: list[str] = []
    for fact, value in facts:
        text = f"{fact}: {value}"
        if lines and len(lines[-1]) + 5 + len(text) <= _COLUMNS_OF_PICTURE:
            lines[-1] += f"     {text}"
        else:
            lines += textwrap.wrap(text, _COLUMNS_OF_PICTURE, subsequent_indent="    ")
    return lines


def _kind_of(timeline: Timeline, probe: Mapping[str, Any] | None) -> str:
    """Return the kind of report, by the first of run, probe and estimate that is there."""
    if timeline.events or timeline.steps:
        return "Run report"
    if probe:
        return "Probe report"
    return "Memory estimate"


def facts_of(timeline: Timeline, probe: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return (name, value) of what was recorded, a dozen facts; what was not is left out."""
    steps = timeline.steps
    events = timeline.events
    starts = [event.values for event in events if event.values["kind"] == "start"]
    # The order of the facts is that of the page.
    facts: dict[str, float | str] = {}
    if starts:
        facts["rows"] = as_number(starts[-1].get("rows"))
    if steps:
        last = steps[-1]
        facts["epochs"] = last.value("epoch") + 1
        facts["steps"] = last.number
        facts["samples"] = last.samples
        facts["tokens"] = last.value("tokens_seen")
    if probe:
        bound = as_number(probe.get("max_batch_size"))
        # At the maximum the probe stopped, and more rows may fit.
        is_at_maximum = bound >= as_number(probe.get("maximum")) > 0
        facts["bound"] = f"{bound:,.0f}+" if is_at_maximum else bound
    in_reference = [event.values for event in events if event.values["kind"] == "reference_bound"]
    if in_reference:
        facts["bound of the reference"] = as_number(in_reference[-1].get("max_batch_size"))
    if steps:
        facts["first batch"] = steps[0].value("batch_size")
        facts["last batch"] = _last_batch(steps)
        if "loss" in last.values:
            facts["final loss"] = _final_loss(steps)
    validation_losses = [
        as_number(event.values["val_loss"])
        for event in events
        if "val_loss" in event.values and not event.rolled_back
    ]
    if validation_losses and math.isfinite(validation_losses[-1]):
        facts["final val_loss"] = f"{validation_losses[-1]:.4g}"
    if events or steps:
        facts["time"] = _duration(timeline.seconds)
        facts["restarts"] = str(sum(event.mark == "restarted" for event in events))
    if steps:
        facts["out of memory"] = last.value("oom_count")
    if starts:
        facts["began"] = _clock(as_number(starts[0].get("time")))
    texts = [(name, _as_text(fact)) for name, fact in facts.items()]
    return [(name, text) for name, text in texts if text]


def _settings_of(timeline: Timeline) -> dict[str, Any]:
    """Return what the last start recorded of its configuration; empty where it did not."""
    recorded = [event.values for event in timeline.events if event.values["kind"] == "config"]
    settings = recorded[-1].get("settings") if recorded else None
    return settings if isinstance(settings, dict) else {}


def _final_loss(steps: Sequence[Step]) -> str:
    """Return the mean loss of the last steps, as many as its figure takes the mean over; of few
    steps, and where it is not finite, that of the last.
    """
    window = mean_window(len(steps))
    with_loss = [step for step in steps[-window:] if step.values.get("loss") is not None]
    losses = [step.value("loss") for step in with_loss]
    if len(losses) > 1 and all(map(math.isfinite, losses)):
        return f"{sum(losses) / len(losses):.4g} (mean of {len(losses)} steps)"
    loss = steps[-1].value("loss")
    return f"{loss:.4g}" if math.isfinite(loss) else str(steps[-1].values["loss"])


def _last_batch(steps: Sequence[Step]) -> float | str:
    """Return the batch size at the end of a run, with that of a short last step behind it."""
    last = steps[-1]
    previous = steps[-2:][0]
    last_rows = last.value("batch_size")
    full_rows = previous.value("batch_size")
    # The last step of an epoch may have fewer rows: that is no change of the batch size.
    is_same_epoch = previous.values.get("epoch") == last.values.get("epoch")
    if last_rows < full_rows and is_same_epoch:
        return f"{full_rows:,.0f} (last step {last_rows:,.0f})"
    return last_rows


def _as_text(fact: float | str) -> str:
    """Return a fact as text; empty where it is a number that is not finite."""
    if isinstance(fact, str):
        return fact
    return f"{fact:,.0f}" if math.isfinite(fact) else ""


def _notes_of(timeline: Timeline, missing: list[str], constants: list[str]) -> list[str]:
    """Return what a reader should know of the run, one sentence each.

    Args:
        timeline: run.
        missing: titles of figures without data.
        constants: titles and values of what was the same in all steps.
    """
    notes = []
    if timeline.events and not timeline.steps:
        notes.append("No optimizer step is recorded.")
    if timeline.other_runs:
        notes.append(
            f"Only the last run of the file is shown; other runs in it: {timeline.other_runs}."
        )
    notes += [f"{line[0].upper()}{line[1:]}." for line in timeline.losses_not_finite.lines()]
    num_rolled_back = sum(map(len, timeline.rolled_back))
    if num_rolled_back:
        notes.append(
            f"Steps that restarts rolled back: {num_rolled_back:,}."
            " The figures of loss show them dotted."
        )
    if constants:
        notes.append(f"The same in all steps: {_listed(constants)}.")
    if missing:
        notes.append(f"Not recorded, and so not shown: {_listed(missing)}.")
    return notes


def _listed(titles: Sequence[str]) -> str:
    """Return titles as they stand in a sentence."""
    return ", ".join(title[0].lower() + title[1:] for title in titles)


def _printable(text: str) -> str:
    """Return a text in which what UTF-8 cannot hold is written out."""
    # The name of a folder may be any bytes.
    return text.encode(errors="backslashreplace").decode()


def _duration(seconds: float) -> str:
    """Return a time as people write it: 48 s, 2:05 min, 3:20:00 h."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d} h"


def _clock(seconds: float) -> str:
    """Return a moment in UTC; empty where it is none."""
    # A log may hold any number as its time.
    try:
        return datetime.fromtimestamp(seconds, tz=timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return ""


def _shown_events(timeline: Timeline) -> list[Event | str]:
    """Return the events, with a line of text in place of many of one kind.

    Of a kind that is there very often, the first and the last are returned.
    """
    counts = Counter(event.values["kind"] for event in timeline.events)
    seen = Counter[str]()
    half = _MOST_ROWS // 2
    shown: list[Event | str] = []
    for event in timeline.events:
        kind = event.values["kind"]
        seen[kind] += 1
        is_in_the_middle = half < seen[kind] <= counts[kind] - half
        if counts[kind] <= _MOST_ROWS or not is_in_the_middle:
            shown.append(event)
        elif seen[kind] == half + 1:
            shown.append(f"{counts[kind] - 2 * half:,} more of the kind {kind} are in run.jsonl")
    return shown


def _write(path: Path, content: str | bytes, *, key: str = "--output") -> None:
    try:
        atomic_write(path, content)
    except OSError as error:
        remedy = f"it cannot be written ({error}); give another file"
        raise SettingError(key, str(path), remedy) from None
