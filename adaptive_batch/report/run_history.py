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

# Kinds that are logged before the record of the step in which they happened.
_IN_NEXT_STEP = {"limit", "reference_limit", "nonfinite_loss"}
NOT_FINITE = "loss not finite"
# Below it, a running mean would say little.
_FEW_VALUES = 20
# The mark in figures, by the kind of an event.
_MARKS = {
    "preempted": "preempted",
    "checkpoint": "saved",
    "resume_point": "saved",
    "batch_size": "batch size changed",
    "limit": "limit changed",
    "validation_limit": "limit changed",
    "reference_limit": "limit changed",
}
_CHANGES = {"batch_size", "limit", "validation_limit", "reference_limit"}
# Marks of what happened, whatever a restart rolled back.
_NEVER_ROLLED_BACK = {"out of memory", "restarted", "preempted"}


@dataclass(frozen=True, eq=False)
class _Run:
    name: object = None
    has_beginning: bool = False


@dataclass
class _Attempt:
    """What one process recorded.

    Attributes:
        parent: place of the attempt that it resumed; None where that is not in the file.
        first: steps that were done before its own first one, so those of the parent that count.
        last: number of its last step.
        last_of_epoch: number of its last step in each epoch.
    """

    run: _Run
    parent: int | None = None
    first: int = 0
    last: int = 0
    last_of_epoch: dict[int, int] = field(default_factory=dict)


class RunHistory:
    """The history of the last run in a file.

    One pass over its records is enough; None stands for a torn line.
    """

    def __init__(self, records: Iterable[Record | None]) -> None:
        # Torn lines are counted too.
        self.num_records = 0
        # The first attempt holds what comes before any start.
        self._attempts = [_Attempt(_Run())]
        for record in records:
            self.num_records += 1
            if record is None:
                continue
            kind = record.get("kind")
            if kind == "start":
                self._attempts.append(self._started(record))
            elif kind == "epoch_restarted":
                self._attempts.append(self._restarted(whole(record, "epoch") or 0))
            elif kind == "step":
                self._add_step(record)
        self._kept: dict[int, float] = dict(self._chain())
        # Nothing rolls back the last attempt: its steps to come count too.
        self._kept[len(self._attempts) - 1] = math.inf
        self._run = self._attempts[-1].run
        self.has_beginning = self._run.has_beginning
        runs = {attempt.run for attempt in self._attempts}
        self.num_other_runs = len(runs - {self._attempts[0].run, self._run})

    def _add_step(self, record: Record) -> None:
        """Count a step for the newest attempt."""
        step = whole(record, "step")
        if step is None:
            return
        attempt = self._attempts[-1]
        attempt.last = max(attempt.last, step)
        attempt.last_of_epoch[whole(record, "epoch") or 0] = step

    def entries(
        self, records: Iterable[Record | None]
    ) -> Iterator[tuple[Record | None, int, bool]]:
        """Read the same records again; what was appended meanwhile is left out.

        Yields:
            Each record of the last run and each torn line, with the optimizer steps that were done
            up to it, itself included, and whether it is part of the history, not rolled back.
        """
        place = 0
        steps = 0
        for record in islice(records, self.num_records):
            kind = record.get("kind") if record else None
            if kind in ("start", "epoch_restarted"):
                place += 1
                # A line that was half written at the first reading may be whole now.
                if place == len(self._attempts):
                    return
                steps = self._attempts[place].first
            elif kind == "step" and record is not None:
                steps = whole(record, "step") or 0
            if record is None or self._attempts[place].run is self._run:
                within = steps + (kind in _IN_NEXT_STEP)
                yield record, steps, within <= self._kept.get(place, -1)

    def _started(self, start: Record) -> _Attempt:
        """Return the attempt that begins with a start."""
        name = start.get("run")
        if not start.get("resumed"):
            return _Attempt(_Run(name, has_beginning=True))
        run = self._attempts[-1].run
        # A script's own loop records no name: its starts resume the newest run.
        if name not in (None, run.name):
            runs = (attempt.run for attempt in reversed(self._attempts))
            run = next(
                (earlier_run for earlier_run in runs if earlier_run.name == name), _Run(name)
            )
        steps = steps_at(start)
        places_of_run = [
            place for place, attempt in enumerate(self._attempts) if attempt.run is run
        ]
        # The newest attempt that began at or before these steps did them last, even where their
        # records are lost: an older attempt's records of them do not count.
        places_before = [place for place in places_of_run if self._attempts[place].first <= steps]
        parents: list[int | None] = [None, *places_of_run, *places_before]
        return _Attempt(run, parents[-1], steps, steps)

    def _restarted(self, epoch: int) -> _Attempt:
        """Return an attempt that resumes where an epoch of the newest history began."""
        for place, kept in self._chain():
            attempt = self._attempts[place]
            # Where the attempt has no step of an earlier epoch, an older one has.
            last_steps = [
                min(step, kept) for number, step in attempt.last_of_epoch.items() if number < epoch
            ]
            begin = max(last_steps, default=attempt.first)
            if begin > attempt.first:
                return _Attempt(attempt.run, place, begin, begin)
        return _Attempt(self._attempts[-1].run)

    def _chain(self) -> Iterator[tuple[int, int]]:
        """Yield the attempts that lead to the last one, each with its last step that counts.

        The newest comes first.
        """
        place: int | None = len(self._attempts) - 1
        kept = self._attempts[-1].last
        while place is not None:
            attempt = self._attempts[place]
            kept = min(kept, attempt.last)
            yield place, kept
            place = attempt.parent
            # What the parent did after this step was rolled back.
            kept = min(kept, attempt.first)


@dataclass(frozen=True)
class Step:
    """One optimizer step, as recorded.

    Attributes:
        number: number of the step, from 1.
        samples: samples consumed after it.
        seconds: time since the run began, without that between a stop and its restart.
        values: record of the log.
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
    """A record that is no step: its place in the run, as of a step, and its mark, or None."""

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
        steps: steps that count.
        rolled_back: stretches of steps that restarts rolled back.
        events: records that are no steps.
        seconds: time in which it ran.
        other_runs: number of other runs in the file.
    """

    steps: Sequence[Step]
    rolled_back: Sequence[Sequence[Step]]
    events: Sequence[Event]
    seconds: float
    other_runs: int

    @cached_property
    def marked(self) -> list[tuple[str, Event | Step]]:
        """The events that figures mark, each with its mark.

        Steps whose loss or gradients are not finite are among them.
        """
        events = [event for event in self.events if not event.rolled_back]
        marked: list[tuple[str, Event | Step]] = [
            (event.mark, event) for event in events if event.mark
        ]
        logged = {
            whole(event.values, "step"): event
            for event in events
            if event.values["kind"] == "nonfinite_loss"
        }
        # A step that has an event of its own is marked once.
        for step in self.steps:
            event = logged.pop(step.number, None)
            if event or not_finite(step.values):
                marked.append((NOT_FINITE, step))
        # What ended a run has an event and no step.
        marked += [(NOT_FINITE, event) for event in logged.values()]
        return marked

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
        beginning = Step(0, 0.0, 0.0, {})
        newest = beginning
        seconds = 0.0
        previous_time = math.nan
        in_stretch = False
        for record, number, counts in history.entries(named):
            # Torn lines, which are None, were left out above.
            assert record is not None
            kind = record["kind"]
            time = as_number(record.get("time"))
            # The time before a start is that between a stop and a restart.
            if kind != "start" and time > previous_time:
                seconds += time - previous_time
            if math.isfinite(time):
                previous_time = time
            if kind == "step":
                samples = as_number(record.get("samples_seen"))
                if not math.isfinite(samples):
                    samples = number
                newest = Step(number, samples, seconds, record)
                if counts:
                    steps.append(newest)
                elif in_stretch:
                    rolled_back[-1].append(newest)
                else:
                    rolled_back.append([newest])
                in_stretch = not counts
                continue
            # The run is back at an earlier step, and so are the events that follow.
            if kind in ("start", "epoch_restarted"):
                earlier_steps = (step for step in reversed(steps) if step.number <= number)
                newest = next(earlier_steps, beginning)
                in_stretch = False
            mark = _mark(record)
            is_rolled_back = not counts and mark not in _NEVER_ROLLED_BACK
            events.append(Event(mark, number, newest.samples, seconds, record, is_rolled_back))
        return cls(steps, rolled_back, events, seconds, history.num_other_runs)


class LossesNotFinite:
    """Counts the steps whose loss is nan or infinite, and keeps the first of each."""

    def __init__(self) -> None:
        # By what the loss is: the first step, and the number of steps.
        self._steps: dict[str, tuple[int, int]] = {}

    def add(self, number: int, step: Record) -> None:
        """Look at the record of a step."""
        kind = not_finite(step)
        if kind:
            first, num = self._steps.get(kind, (number, 0))
            self._steps[kind] = (first, num + 1)

    def lines(self) -> list[str]:
        """Return a line for nan and for infinite, where there were such."""
        return [
            f"loss is {kind} at step {first:,} ({count(num, 'step', ',')})"
            for kind, (first, num) in self._steps.items()
        ]


def not_finite(step: Record) -> str:
    """Return ``NaN`` or ``infinite`` where the recorded loss of a step is that, else nothing."""
    # JSON has no nan, so the log holds it as text.
    return {"nan": "NaN", "inf": "infinite", "-inf": "infinite"}.get(str(step.get("loss")), "")


def steps_at(start: Record) -> int:
    """Return the steps that were done where a start resumes."""
    progress = start.get("progress")
    if not isinstance(progress, Mapping):
        return 0
    return whole(progress, "steps") or 0


def whole(record: Record, name: str) -> int | None:
    """Return a whole number of a record; None where it has none of that name."""
    value = record.get(name)
    # A bool is an int to Python.
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value


def mean_window(num_values: int) -> int:
    """Return how many values of a run a mean is taken over; 1 where they are few."""
    if num_values < _FEW_VALUES:
        return 1
    # A fixed share of the run is as smooth in a long run as in a short one.
    return max(5, num_values // 40)


def as_number(value: object) -> float:
    """Return a recorded value as a number, text such as "inf" too; nan where it is none."""
    if isinstance(value, bool):
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _mark(record: Record) -> str | None:
    """Return the mark of an event in figures; None where it has none."""
    if record.get("out_of_memory") is True:
        return "out of memory"
    kind = record["kind"]
    if kind == "start":
        return "restarted" if record.get("resumed") else None
    # A record of a value that stayed the same is no change.
    if kind in _CHANGES and record.get("before") == record.get("after"):
        return None
    return _MARKS.get(kind)
