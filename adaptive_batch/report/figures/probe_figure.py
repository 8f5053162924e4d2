"""The figure of a probe: what each trial held in memory, what was allowed, and the bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from adaptive_batch.memory import GIB

from ..history.timeline import as_number
from .figure import Figure, Line
from .series import Series


def probe_figure(probe: Mapping[str, Any] | None) -> Figure | None:
    """Peak memory against the rows of each trial, and the budget; None where there is no trial.

    Args:
        probe: as in ``probe.json``.
    """
    trials = probe.get("trials") if probe else None
    rows: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    budget = as_number(probe.get("budget_bytes")) / GIB if probe else math.nan
    for trial in trials if isinstance(trials, list) else []:
        if isinstance(trial, Mapping) and math.isfinite(tried := as_number(trial.get("batch_size"))):
            peak = as_number(trial.get("peak_bytes")) / GIB
            fits = trial.get("fits") is True
            # What ran out of memory has no peak; it is drawn where the budget ends.
            rows[fits].append((tried, budget if math.isnan(peak) and not fits and budget > 0 else peak))
    known = {fits: sorted(set(points)) for fits, points in rows.items()}
    places = [tried for points in known.values() for tried, _ in points]
    if not places or not probe:
        return None
    bound, length = as_number(probe.get("max_batch_size")), as_number(probe.get("sequence_length"))
    at_length = f" of {length:.0f} tokens" if length > 0 else ""
    lines: list[Line] = []
    if budget > 0:
        span = Series.of((0.0, 1.04 * max(places)), (budget, budget))
        lines.append(Line(f"budget {budget:.3g} GiB", span, "muted", "budget"))
    if known[True]:
        lines.append(Line("fits", _points(known[True]), "blue", "dots"))
    if known[False]:
        lines.append(Line("does not fit", _points(known[False]), "vermilion", "crosses"))
    if at_bound := [point for point in known[True] if point[0] == bound]:
        lines.append(Line(f"bound: {bound:.0f} rows", _points(at_bound[-1:]), "green", "ring"))
    described = (
        f"Trials that fit: {len(rows[True])}; that do not: {len(rows[False])}. "
        + (f"The largest that fits has {bound:.0f} rows{at_length}. " if bound > 0 else "None is known to fit. ")
        + (f"Allowed are {budget:.3g} GiB." if budget > 0 else "")
    )
    return Figure(
        "probe", "Peak memory of trials", described.strip(), f"rows{at_length} at once", "peak memory (GiB)",
        tuple(lines), x_axis=None, from_zero=True,
    )  # fmt: skip


def _points(points: Sequence[tuple[float, float]]) -> Series:
    return Series.of([x for x, _ in points], [y for _, y in points])
