"""The figures of a run and of its probe.

A figure is there where its numbers were recorded. Where they were not, its title is listed as
missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from adaptive_batch._util import format_bytes

from .drawing import LIGHT, Figure, Points, add_legend, from_zero, mark_events, plot
from .run_history import Event, Step, Timeline, as_number, mean_window

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GIB = 2**30
# Above it, time is in hours.
_MOST_MINUTES = 180
# Stretches of steps that restarts rolled back: more of them would hide the loss.
_MOST_STRETCHES = 20


def figures_of(
    timeline: Timeline, probe: Mapping[str, Any] | None
) -> tuple[list[Figure], list[str], list[str]]:
    """Return every figure that has data, the titles of the figures that have none, and what was
    the same in all steps, which needs no figure: title and value.

    Args:
        timeline: run.
        probe: contents of its ``probe.json``; None where there is none.
    """
    constants = []

    def metric(
        key: str,
        title: str,
        label: str,
        colour: str,
        drawstyle: str = "",
        *,
        name: str = "",
        factor: float = 1.0,
    ) -> tuple[str, Figure | None]:
        points = _points(timeline.steps, key, factor=factor)
        if points is None:
            return title, None
        # A setting is drawn as it is; a measurement scatters, and is drawn with its mean.
        if drawstyle and len(points.finite) == len(points.x) > 1 and len(set(points.finite)) == 1:
            constants.append(f"{title} {points.finite[0]:,g}")
            return title, None
        if drawstyle:
            curves = [_Curve(points, label, colour, {"drawstyle": drawstyle})]
        else:
            curves = _with_mean(points, "value", colour)
        return title, _over_the_run(timeline, name or key, title, label, curves)

    possible = [
        ("Peak memory of trials", _probe(probe)),
        metric("batch_size", "Rows per step", "rows", "blue", "steps-pre"),
        metric("micro_batches", "Micro-batches per step", "micro-batches", "green", "steps-pre"),
        metric("lr", "Learning rate", "lr", "purple", "default"),
        ("Loss over samples", _loss(timeline, over_time=False)),
        ("Loss over time", _loss(timeline, over_time=True)),
        metric(
            "padding_fraction",
            "Padding",
            "padding (% of tokens)",
            "green",
            name="padding",
            factor=100,
        ),
        metric(
            "tokens_per_second_per_gpu",
            "Tokens per second",
            "label tokens/s, one device",
            "purple",
            name="tokens-per-second",
        ),
        ("Peak memory of steps", _peak_memory(timeline)),
        ("Gradient noise scale", _noise_scale(timeline)),
    ]
    if probe and probe.get("throughput"):
        possible.insert(1, ("Speed of micro-batches", _throughput(probe["throughput"])))
    figures = [figure for _, figure in possible if figure]
    constant_titles = [constant.rpartition(" ")[0] for constant in constants]
    missing_titles = [
        title for title, figure in possible if figure is None and title not in constant_titles
    ]
    return figures, missing_titles, constants


@dataclass(frozen=True)
class _Curve:
    """A line of a figure over the run.

    Attributes:
        words: text before its main numbers in the description; None leaves these out.
    """

    points: Points
    label: str
    colour: str
    style: Mapping[str, Any] = field(default_factory=dict)
    words: str | None = ""


def _over_the_run(
    timeline: Timeline,
    name: str,
    title: str,
    y_label: str,
    curves: Sequence[_Curve],
    *,
    x_label: str = "samples",
    seconds: float | None = None,
    is_logarithmic: bool = False,
    begins_at_zero: bool = True,
) -> Figure:
    """Return a figure of curves over samples or over time, with the events of the run."""

    def draw(axes: Axes) -> None:
        for curve in curves:
            plot(axes, curve.points, curve.label, curve.colour, **curve.style)
        if is_logarithmic:
            axes.set_yscale("log")
        elif begins_at_zero:
            from_zero(axes)
        mark_events(axes, timeline, seconds=seconds)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label + " (log)" * is_logarithmic)

    words = [curve.words + curve.points.in_words() for curve in curves if curve.words is not None]
    return Figure(name, title, " ".join(words), draw)


def _points(
    steps: Sequence[Step], key: str, *, seconds: float | None = None, factor: float = 1.0
) -> Points | None:
    """Return a metric over samples, or over time; None where no step has it.

    Args:
        steps: steps, of which those without the metric are left out.
        key: name of the metric in the log.
        seconds: unit of time; None for samples.
        factor: factor on each value.
    """
    steps_with_it = [step for step in steps if step.values.get(key) is not None]
    if not steps_with_it:
        return None
    xs = _places(steps_with_it, seconds)
    return Points.of(xs, [step.value(key) * factor for step in steps_with_it])


def _places(marks: Sequence[Step | Event], seconds: float | None) -> list[float]:
    """Return where steps or events lie on an axis of samples, or of time in this unit."""
    if seconds is None:
        return [mark.samples for mark in marks]
    return [mark.seconds / seconds for mark in marks]


def _with_mean(points: Points, label: str, colour: str) -> list[_Curve]:
    """Return the values, and their running mean in front; few values alone."""
    window = mean_window(len(points.x))
    if window == 1:
        return [_Curve(points, label, colour)]
    mean = points.running_mean(window)
    style = {"linewidth": 1.6, "zorder": 3}
    values = _Curve(points, f"{label} of a step", colour, {"linewidth": 0.8, "alpha": 0.55})
    return [values, _Curve(mean, f"mean of {window} steps", colour, style, words=None)]


def _loss(timeline: Timeline, *, over_time: bool) -> Figure | None:
    """Return the loss, with that of validation and that of steps rolled back; None without any."""
    name = "loss-over-samples"
    title = "Loss over samples"
    x_label = "samples"
    seconds: float | None = None
    if over_time:
        name = "loss-over-time"
        title = "Loss over time"
        is_long = timeline.seconds > _MOST_MINUTES * 60
        x_label = "hours in which it ran" if is_long else "minutes in which it ran"
        seconds = 3600 if is_long else 60
    loss = _points(timeline.steps, "loss", seconds=seconds)
    full_batches = _points(timeline.steps, "loss_per_full_batch", seconds=seconds)
    validation = _validation_loss(timeline, seconds)
    if loss is None and validation is None:
        return None
    curves = _rolled_back(timeline, seconds)
    if loss:
        curves += _with_mean(loss, "loss", "blue")
    if full_batches:
        style = {"drawstyle": "steps-pre"}
        words = "Over full batches: "
        curves.append(_Curve(full_batches, "mean of a full batch", "purple", style, words))
    if validation:
        curves.append(validation)
    losses: list[float] = []
    for curve in curves:
        losses += curve.points.finite
    # A single loss far above the others would leave them a flat line.
    is_logarithmic = bool(losses) and min(losses) > 0 and max(losses) > 50 * median(losses)
    return _over_the_run(
        timeline,
        name,
        title,
        "loss per token",
        curves,
        x_label=x_label,
        seconds=seconds,
        is_logarithmic=is_logarithmic,
        begins_at_zero=False,
    )


def _rolled_back(timeline: Timeline, seconds: float | None) -> list[_Curve]:
    """Return the loss of steps that restarts rolled back, the newest stretches of them."""
    stretches = [_points(steps, "loss", seconds=seconds) for steps in timeline.rolled_back]
    recorded = [points for points in stretches if points]
    style = {"linewidth": 1, "linestyle": ":"}
    curves = []
    # The legend names only the first of them: all are drawn alike.
    label = "rolled back"
    for points in recorded[-_MOST_STRETCHES:]:
        curves.append(_Curve(points, label, "muted", style, words=None))
        label = ""
    return curves


def _validation_loss(timeline: Timeline, seconds: float | None) -> _Curve | None:
    """Return the loss on validation rows; None where it was not computed."""
    validations = [
        event
        for event in timeline.events
        if event.values["kind"] == "validation"
        and "val_loss" in event.values
        and not event.rolled_back
    ]
    if not validations:
        return None
    losses = [as_number(event.values["val_loss"]) for event in validations]
    points = Points.of(_places(validations, seconds), losses)
    style = {
        "linestyle": "none",
        "marker": "o",
        "markersize": 5,
        "markevery": len(validations) // 80 + 1,
    }
    return _Curve(points, "val_loss", "vermilion", style, "On validation rows: ")


def _peak_memory(timeline: Timeline) -> Figure | None:
    """Return the peak memory of each step, in three counts; None where none is recorded."""
    curves = []
    for key, label, colour, linestyle in (
        ("reserved", "reserved", "muted", "--"),
        ("alloc", "allocated", "blue", "-"),
        ("active", "active", "vermilion", ":"),
    ):
        points = _points(timeline.steps, f"peak_memory_{key}")
        if points:
            curves.append(_Curve(points, label, colour, {"linestyle": linestyle}, f"{label}: "))
    if not curves:
        return None
    title = "Peak memory of steps"
    return _over_the_run(timeline, "peak-memory", title, "peak memory (GiB)", curves)


def _noise_scale(timeline: Timeline) -> Figure | None:
    """Return the gradient noise scale, with the batch size; None where none is finite."""
    noise = _points(timeline.steps, "gradient_noise_scale")
    batch = _points(timeline.steps, "batch_size")
    if noise is None or not noise.finite:
        return None
    curves = []
    drawn = noise.finite
    # The batch size is in the figure to be compared: a noise scale above it asks for more rows.
    if batch:
        style = {"drawstyle": "steps-pre"}
        curves.append(_Curve(batch, "rows per step", "blue", style, words=None))
        drawn = noise.finite + batch.finite
    curves.append(_Curve(noise, "gradient noise scale", "vermilion"))
    is_logarithmic = min(drawn) > 0 and max(drawn) > 30 * min(drawn)
    title = "Gradient noise scale"
    return _over_the_run(
        timeline, "noise-scale", title, "rows", curves, is_logarithmic=is_logarithmic
    )


def _probe(probe: Mapping[str, Any] | None) -> Figure | None:
    """Return what each trial held in memory, the budget and the bound; None without a trial."""
    if not probe or not isinstance(probe.get("trials"), list):
        return None
    budget_bytes = as_number(probe.get("budget_bytes"))
    bound = as_number(probe.get("max_batch_size"))
    length = as_number(probe.get("sequence_length"))
    maximum = as_number(probe.get("maximum"))
    allowed = ""
    budget = math.nan
    # A larger number is no amount of memory, and would leave the trials a flat line.
    if 0 < budget_bytes < 2**64:
        allowed = format_bytes(budget_bytes)
        budget = budget_bytes / _GIB
    fits, too_large = _trial_points(probe["trials"], budget)
    if not fits and not too_large:
        return None
    of_tokens = f" of {length:.0f} tokens" if 0 < length < math.inf else ""
    at_bound = [point for point in fits if point[0] == bound][-1:]
    # At the maximum the probe stopped, and more rows may fit.
    plus = "+" if bound >= maximum > 0 else ""
    largest_batch = f"{bound:.0f}{plus} row{'s' * (bound != 1)}"

    def draw(axes: Axes) -> None:
        if budget > 0:
            axes.axhline(
                budget,
                color=LIGHT["muted"],
                linewidth=1.2,
                linestyle="--",
                label=f"budget {allowed}",
            )
        for points, label, colour, style in (
            (fits, "fits", "blue", {"marker": "o", "markersize": 5}),
            (too_large, "does not fit", "vermilion", {"marker": "X", "markersize": 7}),
            (
                at_bound,
                f"bound: {largest_batch}",
                "green",
                {"marker": "o", "markersize": 12, "fillstyle": "none"},
            ),
        ):
            if points:
                xs, ys = zip(*sorted(set(points)), strict=True)
                plot(axes, Points.of(xs, ys), label, colour, linestyle="none", **style)
        from_zero(axes)
        axes.set_xlim(left=0)
        add_legend(axes)
        axes.set_xlabel(f"rows{of_tokens} at once")
        axes.set_ylabel("peak memory (GiB)")

    words = f"Trials that fit: {len(fits)}; that do not: {len(too_large)}. "
    if 0 < bound < math.inf:
        words += f"The largest that fits has {largest_batch}{of_tokens}. "
    else:
        words += "None is known to fit. "
    if allowed:
        words += f"Allowed are {allowed}."
    return Figure("probe", "Peak memory of trials", words.strip(), draw)


def _trial_points(
    trials: Sequence[Any], budget: float
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return rows and peak in GiB of each trial that fits, and of each that does not."""
    fits = []
    too_large = []
    for trial in trials:
        if not isinstance(trial, Mapping):
            continue
        rows = as_number(trial.get("batch_size"))
        if not math.isfinite(rows):
            continue
        peak = as_number(trial.get("peak_bytes")) / _GIB
        if trial.get("fits") is True:
            fits.append((rows, peak))
            continue
        # What ran out of memory has no peak; it is drawn where the budget ends.
        if math.isnan(peak):
            peak = budget
        too_large.append((rows, peak))
    return fits, too_large


def _throughput(throughput: Any) -> Figure | None:
    """Return the speed of each micro-batch that was timed; None where none can be read.

    The one that was chosen is marked.
    """
    trials: dict[str, list[tuple[float, float]]] = {}
    # The file may be of another version, or edited: a report is drawn without this figure then.
    try:
        for trial in throughput["trials"]:
            point = float(trial["limit"]["amount"]), float(trial["tokens_per_second"])
            trials.setdefault(str(trial["kind"]), []).append(point)
        limit = throughput["limit"]
        amount = limit["amount"]
        speed = throughput["tokens_per_second"]
        words = (
            f"Fastest: {throughput['kind']}, up to {amount:,} {limit['unit']} at once,"
            f" {speed:,.0f} tokens/s."
        )
    except (KeyError, TypeError, ValueError):
        return None

    def draw(axes: Axes) -> None:
        colours = ("blue", "vermilion", "purple")
        for (kind, points), colour in zip(trials.items(), colours, strict=False):
            xs, ys = zip(*sorted(points), strict=True)
            plot(axes, Points.of(xs, ys), kind, colour, marker="o", markersize=5)
        # A ring leaves the point of the trial inside it visible.
        ring = {"linestyle": "none", "marker": "o", "markersize": 12, "fillstyle": "none"}
        plot(axes, Points.of([amount], [speed]), "chosen", "green", **ring)
        from_zero(axes)
        axes.set_xlim(left=0)
        add_legend(axes)
        axes.set_xlabel(f"{limit['unit']} at once")
        axes.set_ylabel("real tokens/s")

    return Figure("throughput", "Speed of micro-batches", words, draw)
