"""The head of a report: a run in a dozen facts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from ..history.timeline import Step, Timeline, as_number


def facts_of(timeline: Timeline, probe: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return (name, value) of what was recorded; what was not is left out."""
    steps, decisions = timeline.steps, timeline.decisions
    facts: list[tuple[str, str]] = []

    def add(name: str, value: float, text: str = "") -> None:
        if math.isfinite(value):
            facts.append((name, text or f"{value:,.0f}"))

    starts = [decision.values for decision in decisions if decision.values["kind"] == "start"]
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
        facts += _last_batch(steps)
        if "loss" in steps[-1].values:
            loss = steps[-1].value("loss")
            facts.append(("final loss", f"{loss:.4g}" if math.isfinite(loss) else str(steps[-1].values["loss"])))
    validated = [d.values["val_loss"] for d in decisions if "val_loss" in d.values and not d.taken_back]
    if validated:
        add("final val_loss", as_number(validated[-1]), f"{as_number(validated[-1]):.4g}")
    if decisions or steps:
        facts.append(("time", duration(timeline.seconds)))
        facts.append(("restarts", f"{timeline.restarts}"))
    add("out of memory", steps[-1].value("oom_count") if steps else math.nan)
    if starts and (began := clock(as_number(starts[0].get("time")))):
        facts.append(("began", began))
    return facts


def _last_batch(steps: Sequence[Step]) -> list[tuple[str, str]]:
    """The rows of the last step; where it is the short end of an epoch, of the one before too."""
    last = steps[-1].value("batch_size")
    before = next(
        (
            step.value("batch_size")
            for step in steps[-2:-1]
            if step.values.get("epoch") == steps[-1].values.get("epoch")
        ),
        last,
    )
    if not math.isfinite(last):
        return []
    return [("last batch", f"{before:,.0f} (last step {last:,.0f})" if last < before else f"{last:,.0f}")]


def duration(seconds: float) -> str:
    """As people say it: 48 s, 2:05 min, 3:20:00 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d} h"


def clock(seconds: float) -> str:
    """A moment, in UTC; empty where it is none."""
    try:
        return datetime.fromtimestamp(seconds, tz=timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return ""
