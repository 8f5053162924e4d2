"""The figures of a run and of its probe.

A figure is there where its numbers were recorded. Where they were not, its title is listed as missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from .drawing import LIGHT, Figure, Points, add_legend, from_zero, mark_events, plot
from .run_history import Event, Step, Timeline, as_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GIB = 2**30
_MOST_MINUTES = 180  # above it, time is in hours
_FEW = 20  # values that are shown without their running mean
_MOST_STRETCHES = 20  # of steps that restarts rolled back


def figures_of(timeline: Timeline, probe: Mapping[str, Any] | None) -> tuple[list[Figure], list[str]]:
    """Return every figure that has data, and the titles of those that have none.

    Args:
        timeline: of the run.
        probe: the result of its probe, as in ``probe.json``.
    """

    def metric(key: str, title: str, label: str, colour: str, **options: Any) -> tuple[str, Figure | None]:
        return title, _metric(timeline, key, title, label, colour, **options)

    possible = [
        ("Peak memory of trials", _probe(probe)),
        metric("batch_size", "Rows per step", "rows", "blue", drawstyle="steps-pre"),
        metric("micro_batches", "Micro-batches per step", "micro-batches", "green", drawstyle="steps-pre"),
        metric("lr", "Learning rate", "lr", "purple", drawstyle="default"),
        ("Loss over samples", _loss(timeline, "loss-over-samples", over_time=False)),
        ("Loss over time", _loss(timeline, "loss-over-time", over_time=True)),
        metric("padding_fraction", "Padding", "padding (% of tokens)", "green", name="padding", factor=100),
        metric(
            "tokens_per_second_per_gpu", "Tokens per second", "label tokens/s, one device", "purple", name="tokens-per-second"
        ),
        ("Peak memory of steps", _peak_memory(timeline)),
        ("Gradient noise scale", _noise_scale(timeline)),
    ]  # fmt: skip
    return [figure for _, figure in possible if figure], [title for title, figure in possible if figure is None]


def _points(steps: Sequence[Step], key: str, *, seconds: float | None = None, factor: float = 1.0) -> Points | None:
    """Return a metric over samples, or over time in a unit of so many seconds; None where no step has it."""
    having = [step for step in steps if step.values.get(key) is not None]
    if not having:
        return None
    xs = [step.seconds / seconds if seconds else step.samples for step in having]
    return Points.of(xs, [step.value(key) * factor for step in having])


def _label(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)


def _plot_with_mean(axes: Axes, points: Points, label: str, colour: str) -> None:
    """Draw the values behind, their running mean in front; few values alone."""
    if len(points.x) < _FEW:
        plot(axes, points, label, colour)
        return
    window = max(5, len(points.x) // 40)
    plot(axes, points, f"{label} of a step", colour, linewidth=0.8, alpha=0.55)
    plot(axes, points.running_mean(window), f"mean of {window} steps", colour, linewidth=1.6, zorder=3)


def _metric(
    timeline: Timeline, key: str, title: str, label: str, colour: str, *, name: str = "", factor: float = 1.0,
    drawstyle: str | None = None,
) -> Figure | None:  # fmt: skip
    """Return one metric over samples; with its running mean where no style of drawing is given."""
    points = _points(timeline.steps, key, factor=factor)
    if points is None:
        return None

    def draw(axes: Axes) -> None:
        if drawstyle:
            plot(axes, points, label, colour, drawstyle=drawstyle)
        else:
            _plot_with_mean(axes, points, "value", colour)
        from_zero(axes)
        mark_events(axes, timeline)
        _label(axes, "samples", label)

    return Figure(name or key, title, points.in_words(), draw)


def _loss(timeline: Timeline, name: str, *, over_time: bool) -> Figure | None:
    unit = "hours" if timeline.seconds > _MOST_MINUTES * 60 else "minutes"
    seconds = {"hours": 3600, "minutes": 60}[unit] if over_time else None
    loss, full = (_points(timeline.steps, key, seconds=seconds) for key in ("loss", "loss_per_full_batch"))
    validations = [event for event in timeline.events if _is_validation(event)]
    if loss is None and not validations:
        return None
    stretches = [points for steps in timeline.rolled_back if (points := _points(steps, "loss", seconds=seconds))]
    validated = Points.of(
        [event.seconds / seconds if seconds else event.samples for event in validations],
        [as_number(event.values["val_loss"]) for event in validations],
    )
    shown = [loss, full, validated, *stretches[-_MOST_STRETCHES:]]
    drawn = [value for points in shown if points for value in points.finite]
    is_logarithmic = bool(drawn) and min(drawn) > 0 and max(drawn) > 50 * median(drawn)

    def draw(axes: Axes) -> None:
        for number, points in enumerate(stretches[-_MOST_STRETCHES:]):
            plot(axes, points, "" if number else "rolled back", "muted", linewidth=1, linestyle=":")
        if loss:
            _plot_with_mean(axes, loss, "loss", "blue")
        if full:
            plot(axes, full, "mean of a full batch", "purple", drawstyle="steps-pre")
        if validations:
            every = len(validations) // 80 + 1
            plot(axes, validated, "val_loss", "vermilion", linestyle="none", marker="o", markersize=5, markevery=every)
        if is_logarithmic:
            axes.set_yscale("log")
        mark_events(axes, timeline, seconds=seconds)
        _label(
            axes, f"{unit} in which it ran" if over_time else "samples", "loss per token" + " (log)" * is_logarithmic
        )

    words = [loss.in_words()] if loss else []
    words += [f"Over full batches: {full.in_words()}"] if full else []
    words += [f"On validation rows: {validated.in_words()}"] if validations else []
    return Figure(name, "Loss over time" if over_time else "Loss over samples", " ".join(words), draw)


def _is_validation(event: Event) -> bool:
    return event.values["kind"] == "validation" and "val_loss" in event.values and not event.rolled_back


def _peak_memory(timeline: Timeline) -> Figure | None:
    known = [
        (label, colour, linestyle, points)
        for label, colour, linestyle in (
            ("reserved", "muted", "--"),
            ("alloc", "blue", "-"),
            ("active", "vermilion", ":"),
        )
        if (points := _points(timeline.steps, f"peak_memory_{label}"))
    ]
    if not known:
        return None

    def draw(axes: Axes) -> None:
        for label, colour, linestyle, points in known:
            plot(axes, points, "allocated" if label == "alloc" else label, colour, linestyle=linestyle)
        from_zero(axes)
        mark_events(axes, timeline)
        _label(axes, "samples", "peak memory (GiB)")

    words = " ".join(f"{label}: {points.in_words()}" for label, _, _, points in known)
    return Figure("peak-memory", "Peak memory of steps", words.replace("alloc:", "allocated:"), draw)


def _noise_scale(timeline: Timeline) -> Figure | None:
    noise, batch = (_points(timeline.steps, key) for key in ("gradient_noise_scale", "batch_size"))
    if noise is None or not noise.finite:
        return None
    drawn = noise.finite + (batch.finite if batch else [])
    is_logarithmic = min(drawn) > 0 and max(drawn) > 30 * min(drawn)

    def draw(axes: Axes) -> None:
        if batch:
            plot(axes, batch, "rows per step", "blue", drawstyle="steps-pre")
        plot(axes, noise, "gradient noise scale", "vermilion")
        if is_logarithmic:
            axes.set_yscale("log")
        else:
            from_zero(axes)
        mark_events(axes, timeline)
        _label(axes, "samples", "rows" + " (log)" * is_logarithmic)

    return Figure("noise-scale", "Gradient noise scale", noise.in_words(), draw)


def _probe(probe: Mapping[str, Any] | None) -> Figure | None:
    """Return what each trial held in memory, what was allowed, and the bound; None where there is no trial."""
    trials = probe.get("trials") if probe else None
    if not probe or not isinstance(trials, list):
        return None
    budget, bound, length = (as_number(probe.get(key)) for key in ("budget_bytes", "max_batch_size", "sequence_length"))
    budget = budget / _GIB if 0 < budget < math.inf else math.nan
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
    is_known = 0 < bound < math.inf

    def draw(axes: Axes) -> None:
        if budget > 0:
            axes.axhline(budget, color=LIGHT["muted"], linewidth=1.2, linestyle="--", label=f"budget {budget:.3g} GiB")
        at_bound = [point for point in fits if point[0] == bound]
        for points, label, colour, style in (
            (fits, "fits", "blue", {"marker": "o", "markersize": 5}),
            (too_large, "does not fit", "vermilion", {"marker": "X", "markersize": 7}),
            (
                at_bound[-1:],
                f"bound: {bound:.0f} rows",
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
        _label(axes, f"rows{of_tokens} at once", "peak memory (GiB)")

    words = f"Trials that fit: {len(fits)}; that do not: {len(too_large)}. "
    words += f"The largest that fits has {bound:.0f} rows{of_tokens}. " if is_known else "None is known to fit. "
    words += f"Allowed are {budget:.3g} GiB." if budget > 0 else ""
    return Figure("probe", "Peak memory of trials", words.strip(), draw)
