"""A run along its steps and its time: what a figure is drawn from. What restarts took back is apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .lineage import Record, follow, trace

# Kinds of events, in the order in which a figure lists them.
EVENTS = ("batch size changed", "out of memory", "capacity changed", "saved", "restarted", "preempted")

_STAYS = {"out of memory", "restarted", "preempted"}  # it happened, whatever a restart took back


@dataclass(frozen=True)
class Step:
    """One optimizer step, as recorded.

    Attributes:
        number: of the step, counted from 1 over all restarts.
        samples: rows that training has consumed after it.
        seconds: since the run began, without the time between a stop and its restart.
        values: the whole record.
    """

    number: int
    samples: float
    seconds: float
    values: Record

    def value(self, name: str) -> float:
        """A metric as a number; nan where it is not recorded, or is no number."""
        return as_number(self.values.get(name))


@dataclass(frozen=True)
class Decision:
    """Anything recorded that is no step.

    Attributes:
        event: one of :data:`EVENTS`, or None where it is not marked in figures.
        step: optimizer steps that were done.
        samples: rows that had been consumed.
        seconds: since the run began, as of a step.
        values: the whole record.
        taken_back: a restart went back to before it.
    """

    event: str | None
    step: int
    samples: float
    seconds: float
    values: Record
    taken_back: bool = False


@dataclass(frozen=True)
class Timeline:
    """The last run in a file of records.

    Attributes:
        steps: that count, in order.
        taken_back: stretches of steps that were done, and that a restart went back to before.
        decisions: in the order in which they were taken.
        seconds: in which the run ran.
        earlier_runs: runs that the file holds before this one.
    """

    steps: tuple[Step, ...]
    taken_back: tuple[tuple[Step, ...], ...]
    decisions: tuple[Decision, ...]
    seconds: float
    earlier_runs: int

    @property
    def restarts(self) -> int:
        """How often the run was resumed."""
        return sum(decision.event == "restarted" for decision in self.decisions)

    @cached_property
    def marked(self) -> list[tuple[str, Decision]]:
        """The events that count, with what they are."""
        return [(one.event, one) for one in self.decisions if one.event and not one.taken_back]

    @classmethod
    def of(cls, records: Sequence[Record]) -> Timeline:
        """Read records in the order in which they were written. Of several runs the last one is told."""
        named = [record for record in records if isinstance(record.get("kind"), str)]
        lineage = trace(named)
        steps: list[Step] = []
        taken_back: list[list[Step]] = []
        decisions: list[Decision] = []
        beginning = last = Step(0, 0.0, 0.0, {})  # the newest one, be it taken back or not
        seconds, before, takes_back = 0.0, math.nan, False
        for record, entry in zip(named, follow(named, lineage), strict=True):
            if not entry.in_run:
                continue
            kind, now = record["kind"], as_number(record.get("time"))
            if kind != "start" and now > before:
                seconds += now - before
            before = now if math.isfinite(now) else before
            if kind == "step":
                samples = as_number(record.get("samples_seen"))
                last = Step(entry.steps, samples if math.isfinite(samples) else entry.steps, seconds, record)
                if entry.counts:
                    steps.append(last)
                else:
                    if not takes_back:
                        taken_back.append([])
                    taken_back[-1].append(last)
                takes_back = not entry.counts
                continue
            if kind in ("start", "epoch_restarted"):
                last = next((step for step in reversed(steps) if step.number <= entry.steps), beginning)
                takes_back = False
            event = _event(record)
            back = not entry.counts and event not in _STAYS
            decisions.append(Decision(event, entry.steps, last.samples, seconds, record, taken_back=back))
        earlier = len(lineage.begun - {lineage.run})
        return cls(tuple(steps), tuple(map(tuple, taken_back)), tuple(decisions), seconds, earlier)


def as_number(value: object) -> float:
    """A recorded value as a number: text such as "nan" and "inf" too; nan where it is none."""
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            return math.nan
    return math.nan


def _event(record: Record) -> str | None:
    kind = record["kind"]
    if kind == "start":
        return "restarted" if record.get("resumed") else None
    if kind == "preempted":
        return "preempted"
    if kind in ("checkpoint", "resume_point"):
        return "saved"
    if record.get("out_of_memory") is True:
        return "out of memory"
    changed = record.get("before") != record.get("after")
    if kind == "batch_size" and changed:
        return "batch size changed"
    return "capacity changed" if kind in ("capacity", "validation_capacity") and changed else None
