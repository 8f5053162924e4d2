"""The report of a run: a self-contained page with a picture, the audit and the events.

The picture has the recorded metrics and the trials of the search. matplotlib and jinja2 come with
the extra ``report`` and are imported lazily.
"""

from __future__ import annotations

import base64
import io
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from time import localtime, strftime
from typing import TYPE_CHECKING, Any

from adaptive_batch import __version__
from adaptive_batch._util import atomic_write, format_bytes
from adaptive_batch.errors import AdaptiveBatchError, SettingError

from .auditing import audit_records
from .run_log import Entry, Record, Run, last_run, records_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Functions that draw the panels of the picture, by title.
Panels = Mapping[str, Callable[["Axes"], None]]

_TEMPLATE = Path(__file__).with_name("page.html.jinja")
# Number of the first and of the last events in the table.
_MOST_EVENTS = 500
_GIB = 2**30
# The Okabe-Ito colours, distinguishable by colour-blind readers.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#59636e")
_MARK_COLOURS = {"restarted": "#009e73", "out of memory": "#d55e00", "loss not finite": "#c4001a"}
# Larger values break the scaling of matplotlib's axes.
_LARGEST = 1e100
# (title, label of the y axis, labels of the metrics); drawn if the first metric is recorded.
_PANELS: Sequence[tuple[str, str, Mapping[str, str]]] = (
    ("Rows per step", "rows", {"batch_size": "rows"}),
    ("Micro-batches per step", "micro-batches", {"micro_batches": "micro-batches"}),
    ("Learning rate", "learning rate", {"lr": "learning rate"}),
    (
        "Loss",
        "loss per token",
        {"loss": "loss", "loss_per_full_batch": "mean of a full batch", "val_loss": "validation"},
    ),
    ("Padding", "share of tokens", {"padding_fraction": "padding"}),
    ("Speed", "label tokens/s, one device", {"tokens_per_second_per_gpu": "tokens/s"}),
    (
        "Peak memory of steps",
        "GiB",
        {
            "peak_memory_reserved": "reserved",
            "peak_memory_alloc": "allocated",
            "peak_memory_active": "active",
        },
    ),
    (
        "Gradient noise scale",
        "rows",
        {"gradient_noise_scale": "noise scale", "batch_size": "rows per step"},
    ),
)
# Metrics that are measured; the others are settings.
_MEASURED = ("loss", "padding_fraction", "tokens_per_second_per_gpu")


def write_report(output_dir: str | Path, *, output: str | Path | None = None) -> tuple[Path, Path]:
    """Write the page and the picture of a run and return their paths.

    Args:
        output_dir: folder of the run.
        output: path of the page; None for ``adaptive_batch/report.html`` in `output_dir`. The
            picture has the same name with .png.

    Raises:
        SettingError: the folder has no run log, or the page cannot be written.
        AdaptiveBatchError: matplotlib or jinja2 is not installed.
    """
    try:
        import jinja2
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise AdaptiveBatchError(
            f"the report needs matplotlib and jinja2 ({error}): pip install"
            " 'adaptive-batch[report]'"
        ) from None
    page = Path(output or Path(output_dir) / "adaptive_batch" / "report.html")
    if page.suffix == ".png":
        remedy = "the picture gets this name; give a file that ends in .html"
        raise SettingError("--output", str(page), remedy)
    records = records_of(output_dir)
    run, _ = last_run(record for record in records if record is not None)
    # The name of a folder can have bytes that are no text, which a page cannot hold.
    name = Path(output_dir).resolve().name.encode(errors="backslashreplace").decode()
    picture = draw_picture({**search_panel(run), **run_panels(run)}, heading=name)
    template = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = template.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        name=name,
        version=__version__,
        facts=run_facts(run),
        picture=base64.b64encode(picture).decode(),
        proof=audit_records(records),
        events=list(_rows_of_events(run)),
        most=_MOST_EVENTS,
    )
    try:
        atomic_write(page, text.encode(errors="backslashreplace"))
        atomic_write(page.with_suffix(".png"), picture)
    except OSError as error:
        remedy = f"it cannot be written ({error}); give another file"
        raise SettingError("--output", str(page), remedy) from None
    return page, page.with_suffix(".png")


def run_facts(run: Run) -> dict[str, str]:
    """Return the recorded facts of a run by name."""
    start: Record = {}
    step: Record = {}
    bound: Record = {}
    for entry in run.entries:
        if entry.kind == "start":
            start = entry.record
        elif entry.kind == "step" and entry.counts:
            step = entry.record
        elif entry.kind == "bound":
            bound = entry.record
    counts = Counter((entry.kind, entry.counts) for entry in run.entries)
    marks = Counter(map(_mark, run.entries))
    losses = [loss for _, loss in points(run, "loss")]
    window = _window(losses)
    facts = {
        "bound": bound.get("max_batch_size"),
        "rows": start.get("rows"),
        "epochs": as_number(step.get("epoch")) + 1,
        "steps": counts["step", True],
        "samples": step.get("samples_seen"),
        "tokens": step.get("tokens_seen"),
        "restarts": marks["restarted"],
        "steps rolled back": counts["step", False],
        "steps without a finite loss": marks["loss not finite"],
        "out of memory": step.get("oom_count"),
        f"final loss (mean of {window})": fmean(losses[-window:] or [math.nan]),
        "final val_loss": [math.nan, *(loss for _, loss in points(run, "val_loss"))][-1],
    }
    # Values that are not recorded are NaN.
    numbers = {fact: as_number(value) for fact, value in facts.items()}
    return {
        fact: f"{number:,.0f}" if number.is_integer() else f"{number:.4g}"
        for fact, number in numbers.items()
        if math.isfinite(number)
    }


def _rows_of_events(run: Run) -> Iterator[Sequence[str]]:
    """Yield a table row for each event; of many events, only for the first and the last ones."""
    events = [entry for entry in run.entries if entry.kind != "step"]
    if len(events) > 2 * _MOST_EVENTS:
        events = [*events[:_MOST_EVENTS], *events[-_MOST_EVENTS:]]
    for entry in events:
        time = strftime("%Y-%m-%d %H:%M:%S", localtime(entry.record.get("time", 0)))
        rolled_back = "" if entry.counts else "(rolled back by a restart) "
        message = f"{rolled_back}{entry.record.get('message', '')}"
        yield f"{entry.steps:,}", time, entry.kind, message


# --- picture


def points(run: Run, metric: str) -> list[tuple[int, float]]:
    """Return (optimizer step, value) for each finite value of a metric."""
    kind = "validation" if metric == "val_loss" else "step"
    numbers = [
        (entry.steps, as_number(entry.record.get(metric)))
        for entry in run.entries
        if entry.counts and entry.kind == kind
    ]
    # The comparison is False for NaN.
    return [(step, number) for step, number in numbers if abs(number) < _LARGEST]


def _mark(entry: Entry) -> str | None:
    """Return the mark of an entry in the picture: restart, OOM or nonfinite loss; else None."""
    if entry.record.get("out_of_memory") is True:
        return "out of memory"
    if entry.kind == "start" and entry.record.get("resumed"):
        return "restarted"
    # The log holds NaN as text.
    is_nonfinite = str(entry.record.get("loss")) in ("nan", "inf", "-inf")
    if entry.kind == "step" and entry.counts and is_nonfinite:
        return "loss not finite"
    return None


def run_panels(run: Run) -> Panels:
    """Return the panels of a run whose metrics are recorded."""
    panels = {}
    for title, y_label, labels in _PANELS:
        series = {metric: points(run, metric) for metric in labels}
        first_metric, *_ = labels
        if series[first_metric]:
            panels[title] = partial(_draw_metrics, run, series, labels, y_label)
    return panels


def _draw_metrics(
    run: Run,
    series: Mapping[str, Sequence[tuple[int, float]]],
    labels: Mapping[str, str],
    y_label: str,
    axes: Axes,
) -> None:
    """Draw settings in steps, measured metrics with their running means, and the marked events."""
    for colour, (metric, recorded) in zip(_COLOURS, series.items(), strict=False):
        if not recorded:
            continue
        steps, values = zip(*recorded, strict=True)
        is_measured = metric in _MEASURED
        style: Any = {"color": colour, "drawstyle": "default" if is_measured else "steps-pre"}
        window = _window(values) if is_measured else 1
        if window > 1:
            axes.plot(steps, values, alpha=0.4, linewidth=0.8, **style)
            label = f"{labels[metric]}, mean of {window}"
            axes.plot(steps[window - 1 :], running_mean(values, window), label=label, **style)
        else:
            marker = "." if len(values) < 25 else None
            axes.plot(steps, values, label=labels[metric], marker=marker, **style)
    all_values = [value for recorded in series.values() for _, value in recorded]
    # One value far above the others would flatten them on a linear scale.
    if min(all_values) > 0 and max(all_values) > 50 * median(all_values):
        axes.set_yscale("log")
    elif "loss" not in y_label:
        axes.set_ylim(bottom=min(0, *all_values))
    for mark, colour in _MARK_COLOURS.items():
        places = [entry.steps for entry in run.entries if _mark(entry) == mark]
        if places:
            # In this transform, y runs from 0 at the bottom of the panel to 1 at its top.
            transform = axes.get_xaxis_transform()
            axes.vlines(places, 0, 1, colour, ":", label=mark, transform=transform)
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel(y_label)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend()


def search_panel(run: Run) -> Panels:
    """Return the panel of the trials of a run's last search, if it has one."""
    searches = [
        entry.record["search"]
        for entry in run.entries
        if entry.kind == "bound" and "search" in entry.record
    ]
    return {"Trials of the search": partial(_draw_trials, searches[-1])} if searches else {}


def _draw_trials(search: Mapping[str, Any], axes: Axes) -> None:
    budget = search["budget_bytes"] / _GIB
    for colour, fits, label, marker in (
        (_COLOURS[0], True, "fits", "o"),
        (_COLOURS[1], False, "does not fit", "X"),
    ):
        trials = [trial for trial in search["trials"] if trial["fits"] == fits]
        rows = [trial["batch_size"] for trial in trials]
        # An OOM has no peak; draw it at the budget.
        peaks = [
            budget if trial["peak_bytes"] is None else trial["peak_bytes"] / _GIB
            for trial in trials
        ]
        if trials:
            axes.scatter(rows, peaks, color=colour, marker=marker, label=label)
    allowed = f"{format_bytes(search['budget_bytes'])} allowed"
    axes.axhline(budget, color=_COLOURS[-1], linestyle="--", label=allowed)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows at once")
    axes.set_ylabel("peak memory (GiB)")
    axes.legend()


def draw_picture(panels: Panels, *, heading: str) -> bytes:
    """Draw all panels and return the PNG."""
    import matplotlib
    from matplotlib.figure import Figure

    num_columns = min(2, max(1, len(panels)))
    num_rows = max(1, math.ceil(len(panels) / num_columns))
    style: Any = {
        "font.size": 9,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": "#d8dee4",
        "legend.frameon": False,
        "text.parse_math": False,
    }
    with matplotlib.rc_context(style):
        size = (6 * num_columns, 3.2 * num_rows + 0.8)
        sheet = Figure(figsize=size, layout="constrained", dpi=110)
        sheet.suptitle(heading, fontweight="bold")
        for number, (title, draw) in enumerate(panels.items(), start=1):
            axes = sheet.add_subplot(num_rows, num_columns, number)
            axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
            draw(axes)
        drawn = io.BytesIO()
        sheet.savefig(drawn, format="png", metadata={"Software": None})
    return drawn.getvalue()


def _window(values: Sequence[float]) -> int:
    """Return the window of a running mean, a fixed share of the run; 1 for few values."""
    return max(1, len(values) // 40)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the trailing mean of each value from the first full window on."""
    sums = [0.0, *accumulate(values)]
    return [(sums[end] - sums[end - window]) / window for end in range(window, len(sums))]


def as_number(value: object) -> float:
    """Convert a recorded value, such as "inf", to a float; nan if it is not a number."""
    if isinstance(value, bool):
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan
