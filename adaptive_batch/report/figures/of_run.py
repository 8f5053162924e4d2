"""Which figures a run has, and what is in each; drawn elsewhere.

A figure is there where its numbers were recorded. Where they were not, its title is listed as missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal

from ..history.timeline import Step, Timeline, as_number
from .figure import SECONDS, Colour, Figure, Line, Style, in_words
from .probe_figure import probe_figure
from .series import Series

POINTS = 300  # parts of a line in a figure some 400 pixels wide
_MOST_MINUTES = 180  # above it, time is in hours


def figures_of(timeline: Timeline, probe: Mapping[str, Any] | None) -> tuple[list[Figure], list[str]]:
    """Every figure that has data, and the titles of those that have none."""
    steps = timeline.steps
    possible: list[tuple[str, Figure | None]] = [
        ("Peak memory of trials", probe_figure(probe)),
        ("Rows per step", _metric(steps, "batch_size", "Rows per step", "rows", "blue")),
        ("Micro-batches per step", _metric(steps, "micro_batches", "Micro-batches per step", "micro-batches", "green")),
        ("Learning rate", _metric(steps, "lr", "Learning rate", "lr", "purple")),
        ("Loss over samples", _loss(timeline, "samples")),
        ("Loss over time", _loss(timeline, "hours" if timeline.seconds > _MOST_MINUTES * 60 else "minutes")),
        ("Padding", _padding(steps)),
        ("Tokens per second", _tokens_per_second(steps)),
        ("Peak memory of steps", _peak_memory(steps)),
        ("Gradient noise scale", _noise_scale(steps)),
    ]
    return [figure for _, figure in possible if figure], [title for title, figure in possible if figure is None]


def _series(steps: Sequence[Step], name: str, *, axis: str = "samples", factor: float = 1.0) -> Series | None:
    """A metric over the run; None where no step has it."""
    having = [step for step in steps if name in step.values and step.values[name] is not None]
    if not having:
        return None
    return Series.of([_at(step, axis) for step in having], [step.value(name) * factor for step in having])


def _at(step: Step, axis: str) -> float:
    return step.samples if axis == "samples" else step.seconds / SECONDS[axis]


def _metric(steps: Sequence[Step], name: str, title: str, y_label: str, colour: Colour) -> Figure | None:
    series = _series(steps, name)
    if series is None:
        return None
    line = Line(y_label, series.downsampled(buckets=POINTS), colour, "line" if name == "lr" else "steps")
    return Figure(name, title, in_words(series), "samples", y_label, (line,), from_zero=True)


def _with_mean(series: Series, label: str, colour: Colour) -> tuple[Line, ...]:
    """The values behind, their running mean in front; few values alone."""
    if len(series.x) < 20:
        return (Line(label, series, colour),)
    window = max(5, len(series.x) // 40)
    mean = series.running_mean(window=window, points=POINTS)
    return (
        Line(f"{label} of a step", series.downsampled(buckets=POINTS), colour, "thin"),
        Line(f"mean of {window} steps", mean, colour),
    )


def _loss(timeline: Timeline, axis: Literal["samples", "minutes", "hours"]) -> Figure | None:
    steps = timeline.steps
    loss = _series(steps, "loss", axis=axis)
    validation = [
        (d, as_number(d.values["val_loss"]))
        for d in timeline.decisions
        if _is_validation(d.values) and not d.taken_back
    ]
    if loss is None and not validation:
        return None
    lines: list[Line] = []
    back = [_series(piece, "loss", axis=axis) for piece in timeline.taken_back]
    for piece in [piece for piece in back if piece][-20:]:
        label = "" if any(line.style == "faint" for line in lines) else "taken back"
        lines.append(Line(label, piece.downsampled(buckets=POINTS // 4), "muted", "faint"))
    words = []
    full = _series(steps, "loss_per_full_batch", axis=axis)
    if loss:
        values, *mean = _with_mean(loss, "loss", "blue")
        over_full = Line("mean of a full batch", full.downsampled(buckets=POINTS), "purple", "steps") if full else None
        lines += [values, *([over_full] if over_full else []), *mean]
        words.append(in_words(loss))
    if full:
        words.append(f"Over full batches: {in_words(full)}")
    if validation:
        xs = [d.samples if axis == "samples" else d.seconds / SECONDS[axis] for d, _ in validation]
        series = Series.of(xs, [value for _, value in validation])
        lines.append(Line("val_loss", series.downsampled(buckets=POINTS // 8), "vermilion", "dots"))
        words.append(f"On validation rows: {in_words(series)}")
    drawn = [value for line in lines for value in line.series.finite]
    logarithmic = bool(drawn) and min(drawn) > 0 and max(drawn) > 50 * median(drawn)
    return Figure(
        "loss-over-samples" if axis == "samples" else "loss-over-time",
        "Loss over samples" if axis == "samples" else "Loss over time",
        " ".join(words),
        "samples" if axis == "samples" else f"{axis} in which it ran",
        "loss per token" + (" (log)" if logarithmic else ""),
        tuple(lines),
        x_axis=axis,
        logarithmic=logarithmic,
    )


def _is_validation(record: Mapping[str, Any]) -> bool:
    return record["kind"] == "validation" and "val_loss" in record


def _padding(steps: Sequence[Step]) -> Figure | None:
    series = _series(steps, "padding_fraction", factor=100)
    if series is None:
        return None
    lines = _with_mean(series, "padding", "green")
    return Figure("padding", "Padding", in_words(series), "samples", "padding (% of tokens)", lines, from_zero=True)


def _tokens_per_second(steps: Sequence[Step]) -> Figure | None:
    series = _series(steps, "tokens_per_second_per_gpu")
    if series is None:
        return None
    lines = _with_mean(series, "tokens/s", "purple")
    return Figure(
        "tokens-per-second", "Tokens per second", in_words(series), "samples", "label tokens/s, one device", lines,
        from_zero=True,
    )  # fmt: skip


def _peak_memory(steps: Sequence[Step]) -> Figure | None:
    names: tuple[tuple[str, str, Colour], ...] = (
        ("peak_memory_reserved", "reserved", "muted"),
        ("peak_memory_alloc", "allocated", "blue"),
        ("peak_memory_active", "active", "vermilion"),
    )
    found = [(label, colour, series) for name, label, colour in names if (series := _series(steps, name))]
    if not found:
        return None
    styles: tuple[Style, ...] = ("budget", "line", "faint")
    lines = tuple(
        Line(label, series.downsampled(buckets=POINTS), colour, style)
        for (label, colour, series), style in zip(found, styles, strict=False)
    )
    words = " ".join(f"{label}: {in_words(series)}" for label, _, series in found)
    return Figure("peak-memory", "Peak memory of steps", words, "samples", "peak memory (GiB)", lines, from_zero=True)


def _noise_scale(steps: Sequence[Step]) -> Figure | None:
    series = _series(steps, "gradient_noise_scale")
    if series is None or not series.finite:
        return None
    lines = [Line("gradient noise scale", series.downsampled(buckets=POINTS), "vermilion")]
    if batch := _series(steps, "batch_size"):
        lines.insert(0, Line("rows per step", batch.downsampled(buckets=POINTS), "blue", "steps"))
    drawn = [value for line in lines for value in line.series.finite]
    logarithmic = min(drawn) > 0 and max(drawn) > 30 * min(drawn)
    return Figure(
        "noise-scale", "Gradient noise scale", in_words(series), "samples", "rows" + (" (log)" if logarithmic else ""),
        tuple(lines), logarithmic=logarithmic, from_zero=not logarithmic,
    )  # fmt: skip
