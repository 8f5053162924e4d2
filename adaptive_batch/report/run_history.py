"""Which recorded steps count, and the run along them.

A run that was stopped and resumed has *attempts*: what one process recorded from its ``start``, or
from where an epoch began again because its data had changed. An attempt resumes at a step of an
earlier one, and rolls back what that one did after this step. The attempts that lead to the last
one are the history of the run; each counts up to the step where the next one resumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

from adaptive_batch._util import count

Record = Mapping[str, Any]

_IN_NEXT_STEP = {
    "limit",
    "nonfinite_loss",
}  # logged before the record of the step in which they happened
NOT_FINITE = "loss not finite"
_NEVER_ROLLED_BACK = {
    "out of memory",
    "restarted",
    "preempted",
}  # they happened, whatever a restart rolled back


@dataclass(frozen=True, eq=False)
class _Run:
    name: object = None
    has_beginning: bool = False


@dataclass
class _Attempt:
    run: _Run
    parent: int | None = None
    first: int = 0  # steps that were done before its own first one; those of the parent that count
    last: int = 0
    last_of_epoch: dict[int, int] = field(default_factory=dict)


class RunHistory:
    """The history of the last run in a file, found in one pass over its records; None stands for a
    torn line.
    """

    def __init__(self, records: Iterable[Record | None]) -> None:
        self.num_records = 0  # torn ones included
        self._attempts = [_Attempt(_Run())]  # what comes before any start
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
        self._kept: dict[int, float] = dict(self._chain())
        self._kept[len(self._attempts) - 1] = math.inf
        self._run = self._attempts[-1].run
        self.has_beginning = self._run.has_beginning
        self.num_other_runs = len(
            {attempt.run for attempt in self._attempts} - {self._attempts[0].run, self._run}
        )

    def entries(
        self, records: Iterable[Record | None]
    ) -> Iterator[tuple[Record | None, int, bool]]:
        """Read the same records again; what was appended meanwhile is left out.

        Yields:
            Each record of the last run and each torn line, with the optimizer steps that were done
            up to it, itself included, and whether it is part of the history, not rolled back.
        """
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
            if record is None or self._attempts[place].run is self._run:
                within = steps + (kind in _IN_NEXT_STEP)
                yield record, steps, within <= self._kept.get(place, -1)

    def _started(self, start: Record) -> _Attempt:
        name = start.get("run")
        run = self._attempts[-1].run
        if not start.get("resumed"):
            return _Attempt(_Run(name, has_beginning=True))
        if name not in (None, run.name):
            run = next(
                (one.run for one in reversed(self._attempts) if one.run.name == name), _Run(name)
            )
        steps = steps_at(start)
        mine = [place for place, attempt in enumerate(self._attempts) if attempt.run is run]
        # An attempt without a step of its own counts too: an epoch may have ended in it.
        reached = [
            place
            for place in mine
            if self._attempts[place].first <= steps <= self._attempts[place].last
        ]
        parents: list[int | None] = [None, *mine, *reached]
        return _Attempt(run, parents[-1], steps, steps)

    def _restarted(self, epoch: int) -> _Attempt:
        """Return an attempt that resumes where an epoch of the newest history began."""
        for place, kept in self._chain():
            attempt = self._attempts[place]
            before = [
                min(step, kept) for number, step in attempt.last_of_epoch.items() if number < epoch
            ]
            if before and (begin := max(before)) > attempt.first:
                return _Attempt(attempt.run, place, begin, begin)
        return _Attempt(self._attempts[-1].run)

    def _chain(self) -> Iterator[tuple[int, int]]:
        """Yield the attempts that lead to the last one, newest first, each with the last of its
        steps that counts.
        """
        place: int | None = len(self._attempts) - 1
        kept = self._attempts[-1].last
        while place is not None:
            attempt = self._attempts[place]
            kept = min(kept, attempt.last)
            yield place, kept
            place = attempt.parent
            kept = min(kept, attempt.first)


@dataclass(frozen=True)
class Step:
    """One optimizer step, as recorded.

    `samples` were consumed after it, `seconds` have passed since the run began, without those
    between a stop and its restart.
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
    """A record that is no step: when it happened, as of a step, and its mark in figures, or None."""

    mark: str | None
    step: int
    samples: float
    seconds: float
    values: Record
    rolled_back: bool = False


@dataclass(frozen=True)
class Timeline:
    """The last run of a file, in memory: the steps that count, stretches that were rolled back,
    events, seconds in which it ran.
    """

    steps: Sequence[Step]
    rolled_back: Sequence[Sequence[Step]]
    events: Sequence[Event]
    seconds: float
    other_runs: int

    @cached_property
    def marked(self) -> list[tuple[str, Event | Step]]:
        """The events that figures mark, each with its mark, and the steps whose loss or gradients
        are not finite.
        """
        those = [event for event in self.events if not event.rolled_back]
        logged = {
            whole(event.values, "step"): event
            for event in those
            if event.values["kind"] == "nonfinite_loss"
        }
        steps = [
            step for step in self.steps if logged.pop(step.number, None) or not_finite(step.values)
        ]
        wrong: list[Event | Step] = [
            *steps,
            *logged.values(),
        ]  # of what ended a run there is no step
        return [(event.mark, event) for event in those if event.mark] + [
            (NOT_FINITE, one) for one in wrong
        ]

    @cached_property
    def losses_not_finite(self) -> LossesNotFinite:
        """The steps whose loss is nan or infinite."""
        losses = LossesNotFinite()
        for step in self.steps:
            losses.add(step.number, step.values)
        return losses

    @classmethod
    def of(cls, records: Sequence[Record]) -> Timeline:
        """Read records in the order in which they were written."""
        named = [record for record in records if isinstance(record.get("kind"), str)]
        history = RunHistory(named)
        steps: list[Step] = []
        rolled_back: list[list[Step]] = []
        events: list[Event] = []
        beginning = newest = Step(0, 0.0, 0.0, {})
        seconds = 0.0
        before = math.nan
        in_stretch = False
        for record, number, counts in history.entries(named):
            assert record is not None
            kind = record["kind"]
            now = as_number(record.get("time"))
            if kind != "start" and now > before:
                seconds += now - before
            before = now if math.isfinite(now) else before
            if kind == "step":
                samples = as_number(record.get("samples_seen"))
                newest = Step(
                    number, samples if math.isfinite(samples) else number, seconds, record
                )
                if not counts and not in_stretch:
                    rolled_back.append([])
                (steps if counts else rolled_back[-1]).append(newest)
                in_stretch = not counts
                continue
            if kind in ("start", "epoch_restarted"):
                newest = next(
                    (step for step in reversed(steps) if step.number <= number), beginning
                )
                in_stretch = False
            mark = _mark(record)
            back = not counts and mark not in _NEVER_ROLLED_BACK
            events.append(Event(mark, number, newest.samples, seconds, record, back))
        return cls(steps, rolled_back, events, seconds, history.num_other_runs)


class LossesNotFinite:
    """Counts the steps whose loss is nan or infinite, and keeps the first of each."""

    def __init__(self) -> None:
        self._found: dict[
            str, tuple[int, int]
        ] = {}  # by what the loss is: the first step, and how many

    def add(self, number: int, step: Record) -> None:
        """Look at the record of a step."""
        if kind := not_finite(step):
            first, num = self._found.get(kind, (number, 0))
            self._found[kind] = first, num + 1

    def lines(self) -> list[str]:
        """Return a line for nan and for infinite, where there were such."""
        return [
            f"loss is {kind} at step {first:,} ({count(num, 'step', ',')})"
            for kind, (first, num) in self._found.items()
        ]


def not_finite(step: Record) -> str:
    """Return whether the recorded loss of a step is ``NaN`` or ``infinite``; empty where it is
    neither, or not recorded.
    """
    return {"nan": "NaN", "inf": "infinite", "-inf": "infinite"}.get(str(step.get("loss")), "")


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
    try:
        return math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _mark(record: Record) -> str | None:
    if record.get("out_of_memory") is True:
        return "out of memory"
    changed = record.get("before") != record.get("after")
    marks = {
        "start": record.get("resumed") and "restarted",
        "preempted": "preempted",
        "checkpoint": "saved",
        "resume_point": "saved",
        "batch_size": changed and "batch size changed",
        "limit": changed and "limit changed",
        "validation_limit": changed and "limit changed",
    }
    return marks.get(record["kind"]) or None
