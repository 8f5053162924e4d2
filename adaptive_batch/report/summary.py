"""A run in a dozen facts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from .run_history import Timeline, as_number


def facts_of(timeline: Timeline, probe: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return (name, value) of what was recorded; what was not is left out."""
    steps, events = timeline.steps, timeline.events
    facts: list[tuple[str, str]] = []

    def add(name: str, value: float, text: str = "") -> None:
        if math.isfinite(value):
            facts.append((name, text or f"{value:,.0f}"))

    starts = [event.values for event in events if event.values["kind"] == "start"]
    if starts:
        add("rows", as_number(starts[-1].get("rows")))
    if steps:
        add("epochs", steps[-1].value("epoch") + 1)
        add("steps", steps[-1].number)
        add("samples", steps[-1].samples)
        add("tokens", steps[-1].value("tokens_seen"))
    add("bound", as_number(probe.get("max_batch_size")) if probe else math.nan)
    if steps:
        add("first batch", steps[0].value("batch_size"))
        before, last = steps[-2:][0], steps[-1]  # the last step may be the short end of an epoch
        rows, full = last.value("batch_size"), before.value("batch_size")
        is_short = rows < full and before.values.get("epoch") == last.values.get("epoch")
        add("last batch", rows, f"{full:,.0f} (last step {rows:,.0f})" if is_short else "")
        if "loss" in last.values:
            loss = last.value("loss")
            facts.append(("final loss", f"{loss:.4g}" if math.isfinite(loss) else str(last.values["loss"])))
    validated = [e.values["val_loss"] for e in events if "val_loss" in e.values and not e.rolled_back]
    if validated:
        add("final val_loss", as_number(validated[-1]), f"{as_number(validated[-1]):.4g}")
    if events or steps:
        restarts = sum(event.mark == "restarted" for event in events)
        facts += [("time", duration(timeline.seconds)), ("restarts", f"{restarts}")]
    add("out of memory", steps[-1].value("oom_count") if steps else math.nan)
    if starts and (began := clock(as_number(starts[0].get("time")))):
        facts.append(("began", began))
    return facts


def notes_of(timeline: Timeline, missing: list[str]) -> list[str]:
    """Return what a reader should know of the run, one sentence each.

    Args:
        timeline: of the run.
        missing: titles of figures that have no data.
    """
    notes = []
    if not timeline.steps:
        notes.append("No optimizer step is recorded.")
    if timeline.other_runs:
        notes.append(f"Only the last run of the file is shown; other runs in it: {timeline.other_runs}.")
    if num := sum(map(len, timeline.rolled_back)):
        notes.append(f"Steps that restarts rolled back: {num:,}. The figures of loss show them dotted.")
    if missing:
        names = ", ".join(title[0].lower() + title[1:] for title in missing)
        notes.append(f"Not recorded, and so not shown: {names}.")
    return notes


def duration(seconds: float) -> str:
    """Return a time as people write it: 48 s, 2:05 min, 3:20:00 h."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min" if minutes else f"{rest} s"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d} h"


def clock(seconds: float) -> str:
    """Return a moment in UTC; empty where it is none."""
    try:
        return datetime.fromtimestamp(seconds, tz=timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return ""
