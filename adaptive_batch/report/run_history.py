"""Which recorded steps count, and the run along them.

A run that was stopped and resumed has *attempts*: what one process recorded from its ``start``, or from where an epoch
began again because its data had changed. An attempt resumes at a step of an earlier one, and rolls back what that one did
after this step. The attempts that lead to the last one are the history of the run; each counts up to the step where
the next one resumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

Record = Mapping[str, Any]

# Kinds of events that figures mark, in the order in which they are listed.
EVENTS = ("batch size changed", "out of memory", "capacity changed", "saved", "restarted", "preempted")
_NEVER_ROLLED_BACK = {"out of memory", "restarted", "preempted"}  # they happened, whatever a restart rolled back


@dataclass
class _Attempt:
    run: int
    parent: int | None = None
    fork: int = 0  # the last step of the parent that counts
    first: int = 0  # steps that were done before its own first one
    last: int = 0
    last_of_epoch: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """A record in its place.

    Attributes:
        record: what was written; None for a torn line.
        steps: optimizer steps that were done up to it, itself included.
        counts: whether it is part of the history of the last run.
        in_run: whether it belongs to the last run, rolled back or not.
        is_fork: whether a later attempt resumed at these very steps, so that the step that follows here is rolled back.
    """

    record: Record | None
    steps: int
    counts: bool
    in_run: bool
    is_fork: bool


class RunHistory:
    """The history of the last run in a file, found in one pass over its records.

    Args:
        records: of one file, in order; None for a torn line.

    Attributes:
        num_records: lines read, torn ones included.
    """

    def __init__(self, records: Iterable[Record | None]) -> None:
        self.num_records = 0
        self._attempts = [_Attempt(0)]  # what comes before any start
        self._names: list[object] = [None]  # of the runs
        self._begun: set[int] = set()  # runs whose beginning is recorded
        for record in records:
            self.num_records += 1
            kind = record.get("kind") if record else None
            if record is None:
                continue
            if kind == "start":
                self._attempts.append(self._started(record))
            elif kind == "epoch_restarted":
                self._attempts.append(self._restarted(whole(record, "epoch") or 0))
            elif kind == "step" and (step := whole(record, "step")) is not None:
                attempt = self._attempts[-1]
                attempt.last = max(attempt.last, step)
                attempt.last_of_epoch[whole(record, "epoch") or 0] = step
        self._kept = dict(self._chain())
        self._run = self._attempts[-1].run

    @property
    def has_beginning(self) -> bool:
        """Whether the beginning of the last run is recorded."""
        return self._run in self._begun

    @property
    def num_other_runs(self) -> int:
        """Runs in the file that are not the last one."""
        return len({attempt.run for attempt in self._attempts} - {0, self._run})

    def entries(self, records: Iterable[Record | None]) -> Iterator[Entry]:
        """Read the same records again, each with its place. What was appended meanwhile is left out."""
        place = steps = 0
        for record in islice(records, self.num_records):
            kind = record.get("kind") if record else None
            if kind in ("start", "epoch_restarted"):
                place += 1
                if place == len(self._attempts):
                    return  # a line that was half written at the first reading
                steps = self._attempts[place].first
            elif kind == "step" and record is not None:
                steps = whole(record, "step") or 0
            kept = self._kept.get(place)
            is_fork = kept == steps and place + 1 < len(self._attempts)
            in_run = self._attempts[place].run == self._run
            yield Entry(record, steps, kept is not None and steps <= kept, in_run, is_fork)

    def _started(self, start: Record) -> _Attempt:
        name = start.get("run")
        if not start.get("resumed"):
            self._names.append(name)
            self._begun.add(len(self._names) - 1)
            return _Attempt(len(self._names) - 1)
        run = self._attempts[-1].run
        if name is not None and name != self._names[run]:
            if name not in self._names:
                self._names.append(name)
            run = len(self._names) - 1 - self._names[::-1].index(name)
        steps = steps_at(start)
        mine = [place for place, attempt in enumerate(self._attempts) if attempt.run == run]
        if not mine:
            return _Attempt(run, first=steps, last=steps)
        # An attempt without a step of its own counts too: an epoch may have ended in it.
        reached = [place for place in mine if self._attempts[place].first <= steps <= self._attempts[place].last]
        parent = (reached or mine)[-1]
        return _Attempt(run, parent, min(steps, self._attempts[parent].last), steps, steps)

    def _restarted(self, epoch: int) -> _Attempt:
        """Return an attempt that resumes where an epoch of the newest history began."""
        for place, kept in self._chain():
            attempt = self._attempts[place]
            before = [min(step, kept) for number, step in attempt.last_of_epoch.items() if number < epoch]
            if before and (begin := max(before)) > attempt.first:
                return _Attempt(attempt.run, place, begin, begin, begin)
        return _Attempt(self._attempts[-1].run)

    def _chain(self) -> Iterator[tuple[int, int]]:
        """Yield the attempts that lead to the last one, newest first, each with the last of its steps that counts."""
        place: int | None = len(self._attempts) - 1
        kept = self._attempts[-1].last
        while place is not None:
            yield place, kept
            attempt = self._attempts[place]
            place, kept = attempt.parent, min(kept, attempt.fork)


@dataclass(frozen=True)
class Step:
    """One optimizer step, as recorded.

    Attributes:
        number: counted from 1 over all restarts.
        samples: rows that training has consumed after it.
        seconds: since the run began, without the time between a stop and its restart.
        values: the whole record.
    """

    number: int
    samples: float
    seconds: float
    values: Record

    def value(self, name: str) -> float:
        """Return a metric as a number; nan where it is not recorded, or is no number."""
        return as_number(self.values.get(name))


@dataclass(frozen=True)
class Event:
    """A record that is no step.

    Attributes:
        mark: one of :data:`EVENTS`, or None where figures do not mark it.
        step, samples, seconds: when it happened, as of a step.
        values: the whole record.
        rolled_back: whether a restart went back to before it.
    """

    mark: str | None
    step: int
    samples: float
    seconds: float
    values: Record
    rolled_back: bool = False


@dataclass(frozen=True)
class Timeline:
    """The last run of a file, in memory.

    Attributes:
        steps: that count, in order.
        rolled_back: stretches of steps that a restart went back to before.
        events: in order.
        seconds: in which the run ran.
        other_runs: how many more runs the file holds.
    """

    steps: tuple[Step, ...]
    rolled_back: tuple[tuple[Step, ...], ...]
    events: tuple[Event, ...]
    seconds: float
    other_runs: int

    @property
    def restarts(self) -> int:
        """How often the run was resumed."""
        return sum(event.mark == "restarted" for event in self.events)

    @cached_property
    def marked(self) -> list[tuple[str, Event]]:
        """The events that figures mark, each with its mark."""
        return [(event.mark, event) for event in self.events if event.mark and not event.rolled_back]

    @classmethod
    def of(cls, records: Sequence[Record]) -> Timeline:
        """Read records in the order in which they were written."""
        named = [record for record in records if isinstance(record.get("kind"), str)]
        history = RunHistory(named)
        steps: list[Step] = []
        rolled_back: list[list[Step]] = []
        events: list[Event] = []
        beginning = newest = Step(0, 0.0, 0.0, {})
        seconds, before, in_stretch = 0.0, math.nan, False
        for record, entry in zip(named, history.entries(named), strict=True):
            if not entry.in_run:
                continue
            kind, now = record["kind"], as_number(record.get("time"))
            if kind != "start" and now > before:
                seconds += now - before
            before = now if math.isfinite(now) else before
            if kind == "step":
                samples = as_number(record.get("samples_seen"))
                newest = Step(entry.steps, samples if math.isfinite(samples) else entry.steps, seconds, record)
                if entry.counts:
                    steps.append(newest)
                elif in_stretch:
                    rolled_back[-1].append(newest)
                else:
                    rolled_back.append([newest])
                in_stretch = not entry.counts
                continue
            if kind in ("start", "epoch_restarted"):
                newest = next((step for step in reversed(steps) if step.number <= entry.steps), beginning)
                in_stretch = False
            mark = _mark(record)
            back = not entry.counts and mark not in _NEVER_ROLLED_BACK
            events.append(Event(mark, entry.steps, newest.samples, seconds, record, back))
        return cls(tuple(steps), tuple(map(tuple, rolled_back)), tuple(events), seconds, history.num_other_runs)


def steps_at(start: Record) -> int:
    """Return the steps that were done where a start resumes."""
    progress = start.get("progress")
    return (whole(progress, "steps") or 0) if isinstance(progress, Mapping) else 0


def whole(record: Record, name: str) -> int | None:
    """Return a whole number of a record; None where it has none of that name."""
    value = record.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_number(value: object) -> float:
    """Return a recorded value as a number: text such as "nan" and "inf" too; nan where it is none."""
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            return math.nan
    return math.nan


def _mark(record: Record) -> str | None:
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
