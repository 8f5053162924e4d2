"""The report of a run: a self-contained page with a picture, the settings, the audit and the
events.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from adaptive_batch import __version__
from adaptive_batch._util import atomic_write, from_json
from adaptive_batch.errors import AdaptiveBatchError, SettingError

from .auditing import audit
from .picture import (
    RunData,
    as_number,
    draw_picture,
    estimate_panels,
    mean_window,
    run_panels,
    search_panels,
)
from .run_log import Entry, last_run, read_records

if TYPE_CHECKING:
    from adaptive_batch.estimate import MemoryEstimate
    from adaptive_batch.probe import ProbeResult

_TEMPLATE = Path(__file__).with_name("page.html.jinja")
# Number of first and of last events of one kind in the table.
_MOST_ROWS = 50


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
    # A missing library fails here, before a long log is read.
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
    records = read_records(folder / "run.jsonl") if has_log else []
    run, _ = last_run(records)
    search = last_search(run.entries, folder / "probe.json")
    estimate = read_estimate(folder / "estimate.json")
    if not has_log and search is None and estimate is None:
        remedy = (
            "it has no adaptive_batch/run.jsonl, probe.json or estimate.json; give the output_dir"
            " of a run"
        )
        raise SettingError("OUTPUT_DIR", str(output_dir), remedy)
    data = RunData.from_entries(run.entries)
    settings: object = None
    for entry in run.entries:
        if entry.kind == "config":
            settings = entry.record.get("settings")
    # The name of a folder can have bytes that are no text, which a page cannot hold.
    name = Path(output_dir).resolve().name.encode(errors="backslashreplace").decode()
    panels = run_panels(data)
    # Only the panels of the run mark events.
    events = sorted({mark for mark, _ in data.marks()}) if panels else []
    if search:
        panels = [*search_panels(search), *panels]
    if estimate:
        panels = [*estimate_panels(estimate), *panels]
    picture = draw_picture(panels, heading=name, events=events)
    template = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = template.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        name=name,
        version=__version__,
        facts=run_facts(data, search),
        picture=base64.b64encode(picture).decode(),
        estimate=estimate,
        settings=settings if isinstance(settings, dict) else {},
        proof=audit(output_dir) if has_log else None,
        events=list(_rows_of_events(data)),
        most=_MOST_ROWS,
    )
    _write(page, text.encode(errors="backslashreplace"))
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


def last_search(entries: Sequence[Entry], path: Path) -> ProbeResult | None:
    """Return the last search of a run for its batch, or the newest one in a ``probe.json``; None
    if it is missing or damaged.
    """
    # Imports torch, which the audit does not need.
    from adaptive_batch.probe import ProbeResult

    # The log has the run's own search; a later `adaptive_probe` may have written probe.json.
    logged = [
        entry.record["search"]
        for entry in entries
        if entry.kind == "bound" and "search" in entry.record
    ]
    try:
        record = logged[-1] if logged else json.loads(path.read_text(encoding="utf-8"))
        search: ProbeResult = from_json(ProbeResult, record)
    except (OSError, ValueError, TypeError):
        return None
    return search


def run_facts(data: RunData, search: ProbeResult | None) -> dict[str, str]:
    """Return the recorded facts of a run by name."""
    starts = [entry.record for entry in data.entries if entry.kind == "start"]
    all_steps = [entry for entry in data.entries if entry.kind == "step"]
    steps = [entry.record for entry in all_steps if entry.counts]
    marks = [mark for mark, _ in data.marks()]
    facts: dict[str, object] = {}
    if search:
        facts["bound"] = search.bound
    if starts:
        facts |= {
            "rows": starts[-1].get("rows"),
            "steps": len(steps),
            "time": _duration(data.seconds[-1]),
            "restarts": marks.count("restarted"),
            "steps rolled back": len(all_steps) - len(steps),
            "steps without a finite loss": marks.count("loss not finite"),
        }
    if steps:
        window = mean_window(len(steps))
        losses = [as_number(step.get("loss")) for step in steps[-window:]]
        finite = [loss for loss in losses if math.isfinite(loss)]
        facts |= {
            "epochs": as_number(steps[-1].get("epoch")) + 1,
            "samples": steps[-1].get("samples_seen"),
            "tokens": steps[-1].get("tokens_seen"),
            "first batch": steps[0].get("batch_size"),
            # The last step of an epoch may be short.
            "last batch": max(as_number(step.get("batch_size")) for step in steps[-2:]),
            "out of memory": steps[-1].get("oom_count"),
            f"final loss (mean of {window})": f"{fmean(finite):.4g}" if finite else None,
        }
    val_losses = data.points("val_loss")
    if val_losses:
        _, final_val_loss = val_losses[-1]
        facts["final val_loss"] = f"{final_val_loss:.4g}"
    texts = {
        name: fact if isinstance(fact, str) else f"{as_number(fact):,.0f}"
        for name, fact in facts.items()
    }
    # as_number() returns nan for values that are not recorded.
    return {name: text for name, text in texts.items() if text not in ("nan", "inf", "-inf")}


def _rows_of_events(data: RunData) -> Iterator[Sequence[str]]:
    """Yield a table row for each event; of a very frequent kind, only the first and last ones."""
    num_after = Counter(entry.kind for entry in data.entries)
    num_before = Counter[str]()
    for entry, seconds in zip(data.entries, data.seconds, strict=True):
        num_after[entry.kind] -= 1
        is_shown = min(num_before[entry.kind], num_after[entry.kind]) < _MOST_ROWS
        num_before[entry.kind] += 1
        if is_shown and entry.kind != "step":
            rolled_back = "" if entry.counts else "(rolled back by a restart) "
            message = f"{rolled_back}{entry.record.get('message', '')}"
            yield f"{entry.steps:,}", _duration(seconds), entry.kind, message


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


def _duration(seconds: float) -> str:
    """Format a duration in hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _write(path: Path, content: str | bytes, *, key: str = "--output") -> None:
    try:
        atomic_write(path, content)
    except OSError as error:
        remedy = f"it cannot be written ({error}); give another file"
        raise SettingError(key, str(path), remedy) from None
