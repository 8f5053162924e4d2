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
from .run_history import Step, Timeline, as_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GIB = 2**30
_MOST_MINUTES = 180  # above it, time is in hours
_FEW = 20  # values that are shown without their running mean
_MOST_STRETCHES = 20  # of steps that restarts rolled back


def figures_of(
    timeline: Timeline, probe: Mapping[str, Any] | None
) -> tuple[list[Figure], list[str]]:
    """Return every figure that has data, of a run and of its ``probe.json``, and the titles of
    those that have none.
    """

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
        curve = _Curve(points, label, colour, {"drawstyle": drawstyle})
        return title, _over_the_run(
            timeline,
            name or key,
            title,
            label,
            [curve] if drawstyle else _with_mean(points, "value", colour),
        )

    possible = [
        ("Peak memory of trials", _probe(probe)),
        metric("batch_size", "Rows per step", "rows", "blue", "steps-pre"),
        metric("micro_batches", "Micro-batches per step", "micro-batches", "green", "steps-pre"),
        metric("lr", "Learning rate", "lr", "purple", "default"),
        ("Loss over samples", _loss(timeline, over_time=False)),
        ("Loss over time", _loss(timeline, over_time=True)),
        metric("padding_fraction", "Padding", "padding (% of tokens)", "green", name="padding", factor=100),
        metric("tokens_per_second_per_gpu", "Tokens per second", "label tokens/s, one device", "purple", name="tokens-per-second"),
        ("Peak memory of steps", _peak_memory(timeline)),
        ("Gradient noise scale", _noise_scale(timeline)),
    ]  # fmt: skip
    if probe and probe.get("throughput"):
        possible.insert(1, ("Speed of micro-batches", _throughput(probe["throughput"])))
    return [figure for _, figure in possible if figure], [
        title for title, figure in possible if figure is None
    ]


@dataclass(frozen=True)
class _Curve:
    """A line of a figure over the run; `words` come before its main numbers in the description,
    None leaves these out.
    """

    points: Points
    label: str
    colour: str
    style: Mapping[str, Any] = field(default_factory=dict)
    words: str | None = ""


def _over_the_run(
    timeline: Timeline, name: str, title: str, y_label: str, curves: Sequence[_Curve], *,
    x_label: str = "samples", seconds: float | None = None, is_logarithmic: bool = False, begins_at_zero: bool = True,
) -> Figure:  # fmt: skip

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
    """Return a metric over samples, or over time in a unit of so many seconds; None where no step
    has it.
    """
    having = [step for step in steps if step.values.get(key) is not None]
    if not having:
        return None
    xs = [step.seconds / seconds if seconds else step.samples for step in having]
    return Points.of(xs, [step.value(key) * factor for step in having])


def _with_mean(points: Points, label: str, colour: str) -> list[_Curve]:
    """Return the values, and their running mean in front; few values alone."""
    if len(points.x) < _FEW:
        return [_Curve(points, label, colour)]
    window = max(5, len(points.x) // 40)
    mean = points.running_mean(window)
    style = {"linewidth": 1.6, "zorder": 3}
    values = _Curve(points, f"{label} of a step", colour, {"linewidth": 0.8, "alpha": 0.55})
    return [values, _Curve(mean, f"mean of {window} steps", colour, style, words=None)]


def _loss(timeline: Timeline, *, over_time: bool) -> Figure | None:
    unit = "hours" if timeline.seconds > _MOST_MINUTES * 60 else "minutes"
    seconds = {"hours": 3600, "minutes": 60}[unit] if over_time else None
    loss, full = (
        _points(timeline.steps, key, seconds=seconds) for key in ("loss", "loss_per_full_batch")
    )
    validations = [
        event
        for event in timeline.events
        if event.values["kind"] == "validation"
        and "val_loss" in event.values
        and not event.rolled_back
    ]
    if loss is None and not validations:
        return None
    stretches = [
        points
        for steps in timeline.rolled_back
        if (points := _points(steps, "loss", seconds=seconds))
    ]
    curves = [
        _Curve(
            points,
            "" if number else "rolled back",
            "muted",
            {"linewidth": 1, "linestyle": ":"},
            words=None,
        )
        for number, points in enumerate(stretches[-_MOST_STRETCHES:])
    ]
    if loss:
        curves += _with_mean(loss, "loss", "blue")
    if full:
        curves.append(
            _Curve(
                full,
                "mean of a full batch",
                "purple",
                {"drawstyle": "steps-pre"},
                "Over full batches: ",
            )
        )
    if validations:
        validated = Points.of(
            [event.seconds / seconds if seconds else event.samples for event in validations],
            [as_number(event.values["val_loss"]) for event in validations],
        )
        style = {
            "linestyle": "none",
            "marker": "o",
            "markersize": 5,
            "markevery": len(validations) // 80 + 1,
        }
        curves.append(_Curve(validated, "val_loss", "vermilion", style, "On validation rows: "))
    drawn = [value for curve in curves for value in curve.points.finite]
    return _over_the_run(
        timeline,
        "loss-over-time" if over_time else "loss-over-samples",
        "Loss over time" if over_time else "Loss over samples",
        "loss per token",
        curves,
        x_label=f"{unit} in which it ran" if over_time else "samples",
        seconds=seconds,
        is_logarithmic=bool(drawn) and min(drawn) > 0 and max(drawn) > 50 * median(drawn),
        begins_at_zero=False,
    )


def _peak_memory(timeline: Timeline) -> Figure | None:
    curves = [
        _Curve(points, label, colour, {"linestyle": linestyle}, f"{label}: ")
        for key, label, colour, linestyle in (
            ("reserved", "reserved", "muted", "--"),
            ("alloc", "allocated", "blue", "-"),
            ("active", "active", "vermilion", ":"),
        )
        if (points := _points(timeline.steps, f"peak_memory_{key}"))
    ]
    title = "Peak memory of steps"
    return (
        _over_the_run(timeline, "peak-memory", title, "peak memory (GiB)", curves)
        if curves
        else None
    )


def _noise_scale(timeline: Timeline) -> Figure | None:
    noise, batch = (_points(timeline.steps, key) for key in ("gradient_noise_scale", "batch_size"))
    if noise is None or not noise.finite:
        return None
    curves = (
        [_Curve(batch, "rows per step", "blue", {"drawstyle": "steps-pre"}, words=None)]
        if batch
        else []
    )
    curves.append(_Curve(noise, "gradient noise scale", "vermilion"))
    drawn = noise.finite + (batch.finite if batch else [])
    is_logarithmic = min(drawn) > 0 and max(drawn) > 30 * min(drawn)
    title = "Gradient noise scale"
    return _over_the_run(
        timeline, "noise-scale", title, "rows", curves, is_logarithmic=is_logarithmic
    )


def _probe(probe: Mapping[str, Any] | None) -> Figure | None:
    """Return what each trial held in memory, what was allowed, and the bound; None where there is
    no trial.
    """
    trials = probe.get("trials") if probe else None
    if not probe or not isinstance(trials, list):
        return None
    budget, bound, length, most = (
        as_number(probe.get(key))
        for key in ("budget_bytes", "max_batch_size", "sequence_length", "maximum")
    )
    allowed = format_bytes(budget) if 0 < budget < 2**64 else ""  # more is no amount of memory
    budget = budget / _GIB if allowed else math.nan
    fits: list[tuple[float, float]] = []
    too_large: list[tuple[float, float]] = []
    for trial in trials:
        if isinstance(trial, Mapping) and math.isfinite(rows := as_number(trial.get("batch_size"))):
            peak = as_number(trial.get("peak_bytes")) / _GIB
            if trial.get("fits") is True:
                fits.append((rows, peak))
            else:  # what ran out of memory has no peak; it is drawn where the budget ends
                too_large.append((rows, budget if math.isnan(peak) else peak))
    if not fits and not too_large:
        return None
    of_tokens = f" of {length:.0f} tokens" if 0 < length < math.inf else ""
    at_bound = [point for point in fits if point[0] == bound][-1:]
    found = f"{bound:.0f}{'+' if bound >= most > 0 else ''} row{'s' * (bound != 1)}"

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
                f"bound: {found}",
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
    is_known = 0 < bound < math.inf
    words += (
        f"The largest that fits has {found}{of_tokens}. " if is_known else "None is known to fit. "
    )
    words += f"Allowed are {allowed}." if allowed else ""
    return Figure("probe", "Peak memory of trials", words.strip(), draw)


def _throughput(found: Any) -> Figure | None:
    """Return the speed of each micro-batch that was timed, and of the one that was chosen; None
    where none can be read.
    """
    trials: dict[str, list[tuple[float, float]]] = {}
    try:
        for trial in found["trials"]:
            point = float(trial["limit"]["amount"]), float(trial["tokens_per_second"])
            trials.setdefault(str(trial["kind"]), []).append(point)
        chosen = (found["limit"]["amount"], found["tokens_per_second"])
        limit = found["limit"]
        words = (
            f"Fastest: {found['kind']}, up to {limit['amount']:,} {limit['unit']} at once,"
            f" {chosen[1]:,.0f} tokens/s."
        )
    except (KeyError, TypeError, ValueError):
        return None

    def draw(axes: Axes) -> None:
        for (kind, points), colour in zip(
            trials.items(), ("blue", "vermilion", "purple"), strict=False
        ):
            xs, ys = zip(*sorted(points), strict=True)
            plot(axes, Points.of(xs, ys), kind, colour, marker="o", markersize=5)
        ring = {"linestyle": "none", "marker": "o", "markersize": 12, "fillstyle": "none"}
        plot(axes, Points.of([chosen[0]], [chosen[1]]), "chosen", "green", **ring)
        from_zero(axes)
        axes.set_xlim(left=0)
        add_legend(axes)
        axes.set_xlabel(f"{limit['unit']} at once")
        axes.set_ylabel("real tokens/s")

    return Figure("throughput", "Speed of micro-batches", words, draw)
