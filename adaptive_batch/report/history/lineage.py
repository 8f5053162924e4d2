"""Which recorded steps count: a run that was stopped and went on has steps that were taken back and done again.

A *segment* is what one process recorded from a ``start``, or from where an epoch began anew. It goes on from a step of an
earlier segment; what that one did after this step is taken back. The segments that lead to the last one are the run's
history, and each of them counts up to the step from which the next one went on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Lineage:
    """The history of the last run of a record.

    Attributes:
        kept: segment to the last of its steps that counts; segments that do not lead to the last one are not in it.
        afters: steps that the first step of each segment comes after.
        runs: the run that each segment belongs to, by number.
        begun: numbers of the runs whose beginning is recorded.
        num_records: lines of the record, torn ones included; what is written later is not part of this lineage.
    """

    kept: Mapping[int, int]
    afters: tuple[int, ...]
    runs: tuple[int, ...]
    begun: frozenset[int]
    num_records: int

    @property
    def run(self) -> int:
        """The run that the last segment belongs to."""
        return self.runs[-1]

    @property
    def is_whole(self) -> bool:
        """Whether the beginning of the last run is recorded."""
        return self.run in self.begun


@dataclass(frozen=True)
class Entry:
    """A record in its place.

    Attributes:
        record: what was written; None for a torn line.
        steps: steps of its segment's history up to it, itself included.
        counts: it is part of the history of the last run.
        in_run: it belongs to the last run, be it taken back or not.
        is_left: the history goes on elsewhere from these very steps, so the step that follows here is taken back.
    """

    record: Record | None
    steps: int
    counts: bool
    in_run: bool
    is_left: bool


@dataclass
class _Segment:
    run: int
    parent: int | None
    fork: int  # the last step of the parent that counts
    after: int  # steps that its own first step comes after
    steps: int
    last_of_epoch: dict[int, int] = field(default_factory=dict)


def trace(records: Iterable[Record | None]) -> Lineage:
    """Finds out which steps count.

    Args:
        records: of one file, in order; None for a torn line.
    """
    segments = [_Segment(0, None, 0, 0, 0)]  # what stands before any start
    names: list[object] = [None]
    begun = set()
    count = 0
    for record in records:
        count += 1
        kind = record.get("kind") if record else None
        if record is None:
            continue
        if kind == "start":
            if not record.get("resumed"):
                names.append(record.get("run"))
                begun.add(len(names) - 1)
                segments.append(_Segment(len(names) - 1, None, 0, 0, 0))
            else:
                segments.append(_resumed(segments, _run_of(record, names, segments[-1].run), steps_at(record)))
        elif kind == "epoch_restarted":
            segments.append(_restarted(segments, whole(record, "epoch") or 0))
        elif kind == "step" and (step := whole(record, "step")) is not None:
            segments[-1].steps = max(segments[-1].steps, step)
            segments[-1].last_of_epoch[whole(record, "epoch") or 0] = step
    kept = dict(_chain(segments, len(segments) - 1))
    afters, runs = tuple(segment.after for segment in segments), tuple(segment.run for segment in segments)
    return Lineage(kept, afters, runs, frozenset(begun), count)


def follow(records: Iterable[Record | None], lineage: Lineage) -> Iterator[Entry]:
    """Goes through the records of a lineage again, and says of each whether it counts."""
    segment = steps = 0
    for record in islice(records, lineage.num_records):
        kind = record.get("kind") if record else None
        if kind in ("start", "epoch_restarted"):
            segment += 1
            if segment == len(lineage.runs):
                return  # a line that was half written when the lineage was traced, by a run that goes on meanwhile
            steps = lineage.afters[segment]
        elif kind == "step" and record is not None:
            steps = whole(record, "step") or 0
        counts = segment in lineage.kept and steps <= lineage.kept[segment]
        is_left = segment + 1 < len(lineage.runs) and lineage.kept.get(segment) == steps
        yield Entry(record, steps, counts, lineage.runs[segment] == lineage.run, is_left)


def steps_at(start: Record) -> int:
    """Steps that were done where a start goes on."""
    progress = start.get("progress")
    return (whole(progress, "steps") or 0) if isinstance(progress, Mapping) else 0


def whole(record: Record, name: str) -> int | None:
    """A whole number of a record; None where it has none of that name."""
    value = record.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(record: Record, name: str) -> float | None:
    """A number of a record, nan and infinities included, which are written as text; None where it has none."""
    value = record.get(name)
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except (ValueError, OverflowError):
        return None


def _run_of(start: Record, names: list[object], current: int) -> int:
    """The number of the run that a start goes on with."""
    name = start.get("run")
    if name is None or name == names[current]:
        return current
    if name in names:
        return len(names) - 1 - names[::-1].index(name)
    if names[current] is None:
        return current  # it had no name yet, as records of older versions
    names.append(name)
    return len(names) - 1


def _resumed(segments: list[_Segment], run: int, steps: int) -> _Segment:
    """What goes on after so many steps: where these were done last, or else where the run's record ends."""
    mine = [index for index, segment in enumerate(segments) if segment.run == run]
    if not mine:
        return _Segment(run, None, 0, steps, steps)
    # one that has done no step yet counts too: an epoch may have ended in it
    holds = [index for index in mine if segments[index].after <= steps <= segments[index].steps]
    parent = (holds or mine)[-1]
    return _Segment(run, parent, min(steps, segments[parent].steps), steps, steps)


def _restarted(segments: list[_Segment], epoch: int) -> _Segment:
    """What goes on where an epoch of the newest history began."""
    for index, kept in _chain(segments, len(segments) - 1):
        segment = segments[index]
        earlier = [min(step, kept) for number, step in segment.last_of_epoch.items() if number < epoch]
        if earlier and max(earlier) > segment.after:
            return _Segment(segment.run, index, max(earlier), max(earlier), max(earlier))
    return _Segment(segments[-1].run, None, 0, 0, 0)


def _chain(segments: list[_Segment], last: int) -> Iterator[tuple[int, int]]:
    """The segments that lead to one, newest first, each with the last of its steps that counts."""
    index, kept = last, segments[last].steps
    while True:
        yield index, kept
        parent = segments[index].parent
        if parent is None:
            return
        index, kept = parent, min(kept, segments[index].fork)
