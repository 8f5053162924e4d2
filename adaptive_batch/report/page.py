"""The report of a run: a self-contained page with a picture, the settings, the audit and the
events.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptive_batch import __version__
from adaptive_batch._util import atomic_write, count
from adaptive_batch.errors import AdaptiveBatchError, SettingError

from .auditing import audit_records
from .picture import (
    RunData,
    as_number,
    describe_bound,
    draw_picture,
    estimate_panels,
    event_mark,
    mean_window,
    probe_panels,
    run_panels,
)
from .run_log import Run, last_run, read_records

if TYPE_CHECKING:
    from adaptive_batch.estimate import MemoryEstimate

_TEMPLATE = Path(__file__).with_name("page.html.jinja")
# Limit of table rows for one kind of event.
_MOST_ROWS = 100


def write_report(output_dir: str | Path, *, output: str | Path | None = None) -> tuple[Path, Path]:
    """Write the page and the picture of a run and return their paths.

    Args:
        output_dir: folder of the run, with a ``run.jsonl``, ``probe.json`` or ``estimate.json``. A
            search in the log replaces ``probe.json``.
        output: path of the page; None for ``adaptive_batch/report.html`` in `output_dir`. The
            picture has the same name with .png.

    Raises:
        SettingError: the folder lacks these files, or the page cannot be written.
        AdaptiveBatchError: matplotlib or jinja2 is not installed.
    """
    # Fail before reading a long log.
    _require_libraries()
    import jinja2

    from adaptive_batch.estimate import read_estimate

    folder = Path(output_dir) / "adaptive_batch"
    page = Path(output or folder / "report.html")
    # The picture would overwrite a page that ends in .png.
    if page.is_dir() or page.suffix == ".png" or (output and not page.parent.is_dir()):
        remedy = "give a file that ends in .html in an existing folder"
        raise SettingError("--output", str(page), remedy)
    has_log = (folder / "run.jsonl").is_file()
    probe = read_probe(folder / "probe.json")
    estimate = read_estimate(folder / "estimate.json")
    if not has_log and probe is None and estimate is None:
        remedy = (
            "it has no adaptive_batch/run.jsonl, probe.json or estimate.json; give the output_dir"
            " of a run"
        )
        raise SettingError("OUTPUT_DIR", str(output_dir), remedy)
    records = read_records(folder / "run.jsonl") if has_log else []
    run, num_other_runs = last_run(records)
    data = RunData.from_entries(run.entries)
    for entry in run.entries:
        # A later `adaptive_probe` in the folder may have written another search.
        probe = entry.record.get("search", probe)
    name = _printable(Path(output_dir).resolve().name)
    panels, constants, missing = run_panels(data)
    picture = draw_picture(
        [
            *(estimate_panels(estimate) if estimate else ()),
            *(probe_panels(probe) if probe else ()),
            *panels,
        ],
        heading=name,
        events=sorted({mark for mark, _ in data.marks()}) if panels else (),
    )
    notes = [f"The same in all steps: {', '.join(constants)}."] if constants else []
    if has_log:
        notes += _notes_of(run, num_other_runs)
        notes.append(f"Not recorded: {', '.join(missing)}.")
    template = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = template.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        name=name,
        version=__version__,
        facts=run_facts(run, data, probe),
        notes=notes,
        picture=base64.b64encode(picture).decode(),
        estimate=estimate,
        settings=_settings_of(run),
        proof=audit_records(records) if has_log else None,
        events=list(_rows_of_events(run, data)),
    )
    _write(page, _printable(text))
    _write(page.with_suffix(".png"), picture)
    return page, page.with_suffix(".png")


def write_estimate_picture(estimate: MemoryEstimate, path: Path) -> None:
    """Write the figures of an estimate as a PNG.

    Raises:
        AdaptiveBatchError: matplotlib is not installed.
    """
    _require_libraries()
    picture = draw_picture(estimate_panels(estimate), heading="Estimated memory")
    _write(path, picture, key="output_dir")


def read_probe(path: Path) -> dict[str, Any] | None:
    """Return the newest result in a ``probe.json``; None if it is missing or unreadable."""
    try:
        probe = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return probe if isinstance(probe, dict) else None


def run_facts(run: Run, data: RunData, probe: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the recorded facts of a run by name."""
    counting = [entry for entry in run.entries if entry.counts]
    steps = [entry.record for entry in counting if entry.kind == "step"]
    starts = [entry.record for entry in run.entries if entry.kind == "start"]
    facts: dict[str, float | str] = {}
    if starts:
        facts["rows"] = as_number(starts[-1].get("rows"))
    if steps:
        facts["epochs"] = as_number(steps[-1].get("epoch")) + 1
        facts["steps"] = as_number(steps[-1].get("step"))
        facts["samples"] = as_number(steps[-1].get("samples_seen"))
        facts["tokens"] = as_number(steps[-1].get("tokens_seen"))
    if probe:
        facts["bound"] = describe_bound(probe)
    for entry in run.entries:
        if entry.kind == "reference_bound":
            facts["bound of the reference"] = as_number(entry.record.get("max_batch_size"))
    if steps:
        facts["first batch"] = as_number(steps[0].get("batch_size"))
        # The last step of an epoch may be short.
        facts["last batch"] = max(as_number(step.get("batch_size")) for step in steps[-2:])
        window = mean_window(len(steps))
        losses = [as_number(step.get("loss")) for step in steps[-window:]]
        finite = [loss for loss in losses if math.isfinite(loss)]
        if finite:
            mean = f" (mean of {len(finite)} steps)" if len(finite) > 1 else ""
            facts["final loss"] = f"{sum(finite) / len(finite):.4g}{mean}"
    for entry in counting:
        if "val_loss" in entry.record:
            facts["final val_loss"] = f"{as_number(entry.record['val_loss']):.4g}"
    if run.entries:
        facts["time"] = _duration(data.seconds[-1])
        facts["restarts"] = str(sum(event_mark(entry) == "restarted" for entry in run.entries))
    if steps:
        facts["out of memory"] = as_number(steps[-1].get("oom_count"))
    if starts:
        facts["began"] = _clock(as_number(starts[0].get("time")))
    texts = {
        name: fact if isinstance(fact, str) else f"{fact:,.0f}" if math.isfinite(fact) else ""
        for name, fact in facts.items()
    }
    return {name: text for name, text in texts.items() if text}


def _notes_of(run: Run, num_other_runs: int) -> Iterator[str]:
    """Yield notes on a run, one sentence each."""
    if not any(entry.kind == "step" for entry in run.entries):
        yield "No optimizer step is recorded."
    if num_other_runs:
        yield f"Only the last run of the file is shown; it has {num_other_runs} others."
    lost = [entry.steps for entry in run.entries if event_mark(entry) == "loss not finite"]
    if lost:
        yield f"The loss is not finite from step {lost[0]:,} on, in {len(lost):,} steps."
    rolled_back = [entry for entry in run.entries if entry.kind == "step" and not entry.counts]
    if rolled_back:
        yield f"{count(len(rolled_back), 'step', ',')} rolled back by restarts, not drawn."


def _settings_of(run: Run) -> dict[str, Any]:
    """Return the configuration in the record of the last start, or {}."""
    recorded = [entry.record.get("settings") for entry in run.entries if entry.kind == "config"]
    return recorded[-1] if recorded and isinstance(recorded[-1], dict) else {}


def _rows_of_events(run: Run, data: RunData) -> Iterator[Sequence[str]]:
    """Yield a table row for each event; of a very frequent kind, only the first and last ones."""
    counts = Counter(entry.kind for entry in run.entries)
    seen = Counter[object]()
    half = _MOST_ROWS // 2
    for entry, seconds in zip(run.entries, data.seconds, strict=True):
        if entry.kind == "step":
            continue
        seen[entry.kind] += 1
        is_in_the_middle = half < seen[entry.kind] <= counts[entry.kind] - half
        if counts[entry.kind] <= _MOST_ROWS or not is_in_the_middle:
            message = str(entry.record.get("message", ""))
            rolled_back = "" if entry.counts else "(rolled back by a restart) "
            kind = str(entry.kind)
            yield f"{entry.steps:,}", _duration(seconds), kind, rolled_back + message
        elif seen[entry.kind] == half + 1:
            more = counts[entry.kind] - 2 * half
            yield "", "", str(entry.kind), f"{more:,} more of this kind are in run.jsonl"


def _require_libraries() -> None:
    """Raise an AdaptiveBatchError if a library of the extra ``report`` is not installed."""
    try:
        import jinja2  # noqa: F401
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise AdaptiveBatchError(
            f"the report needs matplotlib and jinja2 ({error}): pip install"
            " 'adaptive-batch[report]'"
        ) from None


def _printable(text: str) -> str:
    """Return a text with characters escaped that UTF-8 cannot encode."""
    # The name of a folder can be arbitrary bytes.
    return text.encode(errors="backslashreplace").decode()


def _duration(seconds: float) -> str:
    """Format a duration: 48 s, 2:05 min, 3:20:00 h."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d} h"


def _clock(seconds: float) -> str:
    """Format a timestamp in UTC; return "" if it is invalid."""
    # The time in a log can be any number.
    try:
        return datetime.fromtimestamp(seconds, tz=timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return ""


def _write(path: Path, content: str | bytes, *, key: str = "--output") -> None:
    try:
        atomic_write(path, content)
    except OSError as error:
        remedy = f"it cannot be written ({error}); give another file"
        raise SettingError(key, str(path), remedy) from None
