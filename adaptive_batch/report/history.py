"""The last run of a run log: each restart rolls back what came after the step that it resumes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Record = Mapping[str, Any]

# Kinds that are logged before the record of the step in which they happened.
_IN_NEXT_STEP = {"limit", "reference_limit", "nonfinite_loss"}


@dataclass(slots=True)
class Entry:
    """A record of a run.

    Attributes:
        steps: optimizer steps that were done up to it, itself included.
        counts: whether no restart has rolled it back.
    """

    record: Record
    kind: object
    steps: int
    counts: bool = True


@dataclass(eq=False)
class Run:
    """Records of a run, across all its restarts.

    Attributes:
        name: as its first start recorded it.
        has_beginning: whether the log begins with the run.
        entries: its records in order.
    """

    name: object = None
    has_beginning: bool = False
    entries: list[Entry] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Add the next record; one that resumes an earlier step rolls back what came after it."""
        kind = record.get("kind")
        steps = self.entries[-1].steps if self.entries else 0
        if kind == "step":
            steps = whole(record, "step") or 0
        elif kind == "start":
            steps = steps_at(record)
            self._roll_back(steps)
        elif kind == "epoch_restarted":
            steps = self._steps_before(whole(record, "epoch") or 0)
            self._roll_back(steps)
        self.entries.append(Entry(record, kind, steps))

    def _roll_back(self, steps: int) -> None:
        for entry in reversed(self.entries):
            if entry.counts and entry.steps + (entry.kind in _IN_NEXT_STEP) <= steps:
                return
            entry.counts = False

    def _steps_before(self, epoch: int) -> int:
        """Return the steps that were done when an epoch began."""
        for entry in reversed(self.entries):
            if (
                entry.counts
                and entry.kind == "step"
                and (whole(entry.record, "epoch") or 0) < epoch
            ):
                return entry.steps
        return 0


def last_run(records: Iterable[Record]) -> tuple[Run, int]:
    """Return the last run of a file, and the number of other runs in it."""
    # The first one holds what comes before any start.
    runs = [Run()]
    run = runs[0]
    for record in records:
        if record.get("kind") == "start":
            name = record.get("run")
            begun = Run(name, has_beginning=not record.get("resumed"))
            same = [earlier for earlier in runs if earlier.name == name]
            # A script's own loop records no name: its starts resume the newest run.
            if begun.has_beginning or (name is not None and not same):
                run = begun
                runs.append(run)
            elif name is not None:
                run = same[-1]
        run.add(record)
    others = [each for each in runs[1:] if each is not run]
    return run, len(others)


def steps_at(start: Record) -> int:
    """Return the steps that were done where a start resumes."""
    progress = start.get("progress")
    return whole(progress, "steps") or 0 if isinstance(progress, Mapping) else 0


def whole(record: Record, name: str) -> int | None:
    """Return a whole number of a record; None where it has none of that name."""
    value = record.get(name)
    # A bool is an int to Python.
    return value if type(value) is int else None
