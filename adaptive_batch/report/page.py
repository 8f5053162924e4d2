"""The report of a run: a self-contained page with a picture, the settings, the audit and the
events.

The picture has the recorded metrics, the trials of the search and the estimate. matplotlib and
jinja2 come with the extra ``report`` and are imported lazily.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from adaptive_batch import __version__
from adaptive_batch._util import atomic_write, format_bytes, from_json
from adaptive_batch.errors import AdaptiveBatchError, SettingError

from .auditing import audit_records
from .run_log import Entry, iterate_records, last_run, log

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    records = list(iterate_records(folder / "run.jsonl")) if has_log else []
    run, _ = last_run(record for record in records if record is not None)
    search = last_search(run.entries, folder / "probe.json")
    estimate = read_estimate(folder / "estimate.json")
    if not has_log and search is None and estimate is None:
        remedy = (
            "it has no adaptive_batch/run.jsonl, probe.json or estimate.json that this version can"
            " read; give the output_dir of a run"
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
        proof=audit_records(records) if has_log else None,
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
    without a readable one.
    """
    # Imports torch, which the audit does not need.
    from adaptive_batch.probe import ProbeResult

    # The log has the run's own search; a later `adaptive_probe` may have written probe.json.
    logged = [
        entry.record["search"]
        for entry in entries
        if entry.kind == "bound" and "search" in entry.record
    ]
    sources: list[Any] = logged[-1:]
    if path.is_file():
        sources.append(path)
    for source in sources:
        try:
            record = json.loads(path.read_text(encoding="utf-8")) if source is path else source
            search: ProbeResult = from_json(ProbeResult, record)
            return search
        # An earlier version may have saved other fields.
        except (OSError, ValueError, TypeError) as error:
            log.warning("%s: a search cannot be read, and is left out: %s", path.parent, error)
    return None


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


# --- picture

_GIB = 2**30
# The Okabe-Ito colours, distinguishable by colour-blind readers.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#59636e")
EVENT_COLOURS = {"restarted": "#009e73", "out of memory": "#d55e00", "loss not finite": "#c4001a"}
# Limit of lines for one kind of event.
_MOST_LINES = 40
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


@dataclass(frozen=True)
class Panel:
    """One panel of the picture, not drawn yet."""

    title: str
    draw: Callable[[Axes], None]


@dataclass
class RunData:
    """Entries of a run with the samples and the running time up to each of them.

    Attributes:
        entries: entries of the run.
        samples, seconds: samples and running time up to each entry.
    """

    entries: list[Entry] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def from_entries(cls, entries: Sequence[Entry]) -> RunData:
        """Read the entries of a run, in order."""
        data = cls()
        # Samples by step: a restart returns to an earlier step.
        samples = {0: 0.0}
        seconds = 0.0
        previous_time = math.nan
        for entry in entries:
            time = as_number(entry.record.get("time"))
            # Skip the time between a stop and a restart.
            if entry.kind != "start" and time > previous_time:
                seconds += time - previous_time
            if math.isfinite(time):
                previous_time = time
            if entry.kind == "step":
                seen = as_number(entry.record.get("samples_seen"))
                samples[entry.steps] = seen if math.isfinite(seen) else entry.steps
            data.entries.append(entry)
            data.samples.append(samples.get(entry.steps, entry.steps))
            data.seconds.append(seconds)
        return data

    def points(self, metric: str) -> list[tuple[float, float]]:
        """Return (samples, value) for each finite value of a metric."""
        points = []
        for entry, samples in zip(self.entries, self.samples, strict=True):
            value = as_number(entry.record.get(metric))
            is_validation = metric == "val_loss" and entry.kind == "validation"
            has_metric = entry.counts and (entry.kind == "step" or is_validation)
            # False for nan.
            if has_metric and abs(value) < _LARGEST:
                points.append((samples, value))
        return points

    def marks(self) -> list[tuple[str, float]]:
        """Return (mark, samples) for each marked event."""
        marks = [
            (event_mark(entry), samples)
            for entry, samples in zip(self.entries, self.samples, strict=True)
        ]
        return [(mark, samples) for mark, samples in marks if mark is not None]


def event_mark(entry: Entry) -> str | None:
    """Return the mark of an entry in the picture: restart, OOM or nonfinite loss; else None."""
    if entry.record.get("out_of_memory") is True:
        return "out of memory"
    if entry.kind == "start" and entry.record.get("resumed"):
        return "restarted"
    # The log holds nan as text.
    is_nonfinite = str(entry.record.get("loss")) in ("nan", "inf", "-inf")
    if entry.kind == "step" and entry.counts and is_nonfinite:
        return "loss not finite"
    return None


def run_panels(data: RunData) -> list[Panel]:
    """Return the panels of a run whose metrics are recorded."""
    panels = []
    for title, y_label, labels in _PANELS:
        points = {metric: data.points(metric) for metric in labels}
        first_metric, *_ = labels
        if points[first_metric]:
            series = {metric: points[metric] for metric in labels if points[metric]}
            panels.append(Panel(title, _drawing(series, labels, y_label, data.marks())))
    return panels


def _drawing(
    series: Mapping[str, Sequence[tuple[float, float]]],
    labels: Mapping[str, str],
    y_label: str,
    marks: Sequence[tuple[str, float]],
) -> Callable[[Axes], None]:
    """Return the drawing of metrics, of the means of measured ones, and of the marked events."""

    def draw(axes: Axes) -> None:
        for colour, (metric, points) in zip(_COLOURS, series.items(), strict=False):
            _draw_metric(axes, metric, points, labels[metric], colour)
        values = [value for points in series.values() for _, value in points]
        # One value far above the others would flatten them on a linear scale.
        if min(values) > 0 and max(values) > 50 * median(values):
            axes.set_yscale("log")
        elif "loss" not in y_label:
            axes.set_ylim(bottom=min(0, *values))
        for event, colour in EVENT_COLOURS.items():
            places = [samples for mark, samples in marks if mark == event]
            # Of many events, draw one in every few.
            for place in places[:: len(places) // _MOST_LINES + 1]:
                axes.axvline(place, color=colour, linewidth=0.8, linestyle=":", zorder=0.9)
        axes.set_xlabel("samples")
        axes.set_ylabel(y_label)
        if len(series) > 1:
            axes.legend()

    return draw


def _draw_metric(
    axes: Axes, metric: str, points: Sequence[tuple[float, float]], label: str, colour: str
) -> None:
    """Draw a setting in steps, or a measured metric with its running mean."""
    xs, ys = zip(*points, strict=True)
    is_measured = metric in _MEASURED
    style: Any = {"color": colour, "drawstyle": "default" if is_measured else "steps-pre"}
    window = mean_window(len(ys)) if is_measured else 1
    if window > 1:
        axes.plot(xs, ys, alpha=0.4, linewidth=0.8, **style)
        label = f"{label}, mean of {window}"
        axes.plot(xs[window - 1 :], running_mean(ys, window), label=label, **style)
    else:
        marker = "." if len(ys) < 25 else None
        axes.plot(xs, ys, label=label, marker=marker, **style)


def search_panels(search: ProbeResult) -> list[Panel]:
    """Return the panel of the trials of a search, if it has any."""
    budget = search.budget_bytes / _GIB

    def draw(axes: Axes) -> None:
        for colour, fits, label, marker in (
            (_COLOURS[0], True, "fits", "o"),
            (_COLOURS[1], False, "does not fit", "X"),
        ):
            trials = [trial for trial in search.trials if trial.fits == fits]
            # An OOM has no peak; draw it at the budget.
            peaks = [
                budget if trial.peak_bytes is None else trial.peak_bytes / _GIB for trial in trials
            ]
            rows = [trial.batch_size for trial in trials]
            if trials:
                axes.scatter(rows, peaks, color=colour, marker=marker, label=label)
        allowed = f"{format_bytes(search.budget_bytes)} allowed"
        axes.axhline(budget, color=_COLOURS[-1], linestyle="--", label=allowed)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("rows at once")
        axes.set_ylabel("peak memory (GiB)")
        axes.legend()

    title = f"Trials of the search: {search.bound} rows fit"
    return [Panel(title, draw)] if search.trials else []


def estimate_panels(estimate: MemoryEstimate) -> list[Panel]:
    """Return one panel for each length, with one bar for each device."""

    def panel(number: int) -> Panel:
        fits = [target.lengths[number] for target in estimate.devices]
        names = [
            f"{target.name.partition(' (')[0]}\n{estimate.format_rows(fit.max_batch_size)} rows"
            for target, fit in zip(estimate.devices, fits, strict=True)
        ]

        def draw(axes: Axes) -> None:
            # The bars of each kind of memory stand on those of the kinds before.
            bottoms = [0.0] * len(fits)
            for colour, kind in zip(_COLOURS, fits[0].composition, strict=True):
                heights = [fit.composition[kind] / _GIB for fit in fits]
                axes.bar(names, heights, 0.6, bottoms, color=colour, alpha=0.6, label=kind)
                bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
            for place, (target, fit) in enumerate(zip(estimate.devices, fits, strict=True)):
                ends = place - 0.3, place + 0.3
                budget = target.budget_bytes / _GIB
                step = fit.optimizer_bytes / _GIB
                # The legend has each line once.
                labels = ("may be used", "optimizer's step") if place == 0 else (None, None)
                axes.plot(ends, [budget, budget], color="black", label=labels[0])
                axes.plot(ends, [step, step], color=_COLOURS[-1], linestyle=":", label=labels[1])
            axes.set_ylabel("peak memory (GiB)")
            axes.legend()

        length = fits[0].sequence_length
        return Panel(f"Estimated memory, rows of {length:,} tokens", draw)

    return [panel(number) for number in range(len(estimate.devices[0].lengths))]


def draw_picture(panels: Sequence[Panel], *, heading: str, events: Collection[str] = ()) -> bytes:
    """Draw all panels and a legend of `events`, and return the PNG."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

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
        axes_of_panels = sheet.subplots(num_rows, num_columns, squeeze=False).flat
        # The last row may have a free place.
        for axes in axes_of_panels[len(panels) :]:
            axes.remove()
        for panel, axes in zip(panels, axes_of_panels, strict=False):
            axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")
            panel.draw(axes)
        if events:
            handles = [
                Line2D([], [], color=EVENT_COLOURS[event], linestyle=":", label=event)
                for event in events
            ]
            sheet.legend(handles=handles, loc="outside lower center", ncols=len(handles))
        drawn = io.BytesIO()
        sheet.savefig(drawn, format="png", metadata={"Software": None})
    return drawn.getvalue()


def mean_window(num_values: int) -> int:
    """Return the window of a running mean; 1 for few values."""
    # A fixed share of the run is equally smooth in long and short runs.
    return max(5, num_values // 40) if num_values >= 20 else 1


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
