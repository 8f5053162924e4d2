"""The run log ``run.jsonl`` with one JSON object per step or event, and the runs in it.

A restart rolls back the records after the step that it resumes.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from adaptive_batch.errors import SettingError

log = logging.getLogger("adaptive_batch")

RECORD = Path("adaptive_batch") / "run.jsonl"
Record = Mapping[str, Any]
# Kinds that are logged before the record of their step.
_IN_NEXT_STEP = {"limit", "reference_limit", "nonfinite_loss"}


class RunLog:
    """Appends one JSON object per line, with ``kind`` ``step`` or the name of an event.

    The log is thread-safe and unbuffered. NaN and infinities are written as text, which ``float``
    can read. Restarts of a run append to the file.

    Pass the log to a loop as ``StepOptions(event=RunLog("output"))``. ``adaptive-batch audit
    output`` and ``adaptive-batch report output`` read the file.

    Args:
        folder: folder of the run. The log writes ``adaptive_batch/run.jsonl`` in this folder.
        enabled: whether to write; None writes on rank zero only.

    Raises:
        SettingError: another log of the folder is open, in this process or in another one.
    """

    def __init__(self, folder: str | Path, *, enabled: bool | None = None) -> None:
        self._file = None
        self._writing = threading.Lock()
        if enabled is None:
            # Imports torch, which readers of logs do not need.
            from adaptive_batch import distributed

            enabled = distributed.is_rank_zero()
        if enabled:
            path = Path(folder) / RECORD
            path.parent.mkdir(parents=True, exist_ok=True)
            has_torn_line = _ends_torn(path)
            self._file = path.open("a", encoding="utf-8")
            if not _try_lock(self._file):
                self._file.close()
                remedy = (
                    "another run is writing to it; give another folder. Close your own RunLog with"
                    " close(); on several ranks, create it after the process group"
                )
                raise SettingError("output_dir", str(folder), remedy)
            # The first record begins on a new line.
            if has_torn_line:
                self._file.write("\n")

    def __call__(self, kind: str, message: str, *, prints: bool = True, **values: Any) -> None:
        """Record a step or an event."""
        if kind == "step":
            self.step(**values)
        else:
            self.event(kind, message, prints=prints, **values)

    def step(self, **metrics: Any) -> None:
        """Record one optimizer step."""
        self._write("step", metrics)

    def event(self, kind: str, message: str, *, prints: bool = True, **values: Any) -> None:
        """Record one event with its numbers, and log its message unless `prints` is False."""
        if self._file and prints:
            log.info("%s", message)
        self._write(kind, {"message": message, **values})

    def copy(self, folder: Path) -> None:
        """Append the records of the log of another folder, if it has one."""
        path = folder / RECORD
        if self._file and path.exists():
            self._file.write(path.read_text(encoding="utf-8").rstrip("\n") + "\n")

    def sync(self) -> None:
        """Flush the log to disk, so that no checkpoint is newer than the log."""
        if self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; later writes raise a :class:`SettingError`."""
        if self._file:
            self._file.close()

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        if self._file:
            if self._file.closed:
                # `event` is the option of AdaptiveLoop and AdaptiveStep that takes a RunLog.
                remedy = "it is closed and cannot record more events; close it after training"
                raise SettingError("event", type(self).__name__, remedy)
            record = {"kind": kind, "time": round(time.time(), 3), **values}
            for name, value in values.items():
                # JSON has no numbers for NaN and infinities.
                if isinstance(value, float) and not math.isfinite(value):
                    record[name] = str(value)
            with self._writing:
                self._file.write(json.dumps(record) + "\n")
                self._file.flush()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def records_of(output_dir: str | Path) -> list[dict[str, Any] | None]:
    """Return the records of an output_dir in order; None for a torn line.

    Raises:
        SettingError: the folder has no run log, or its log cannot be read.
    """
    path = Path(output_dir) / RECORD
    try:
        return list(iterate_records(path))
    except OSError as error:
        remedy = f"{path} cannot be read ({error.strerror}); give the output_dir of a run"
        raise SettingError("OUTPUT_DIR", str(output_dir), remedy) from None


def iterate_records(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the records of a file; None for a torn line."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            yield record if isinstance(record, dict) else None


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file without torn lines."""
    return [record for record in iterate_records(path) if record is not None]


def started_runs(folder: Path) -> list[Any]:
    """Return the names of the runs that started in a folder, in the order of their starts."""
    path = folder / RECORD
    records = read_records(path) if path.exists() else []
    return [record.get("run") for record in records if record.get("kind") == "start"]


def _try_lock(file: TextIO) -> bool:
    """Lock the file until it is closed; return False if another log holds the lock."""
    # Windows has no fcntl.
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Other errors come from a file system without locks.
        return not isinstance(error, BlockingIOError)
    return True


def _ends_torn(path: Path) -> bool:
    """Return whether the last line of a file is incomplete."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


@dataclass(slots=True)
class Entry:
    """A record of a run.

    Attributes:
        steps: optimizer steps up to and including this record.
        counts: False if a restart has rolled it back.
    """

    record: Record
    kind: str
    steps: int
    counts: bool = True


@dataclass(eq=False)
class Run:
    """Records of a run, across all its restarts.

    Attributes:
        name: name in the record of its start.
        has_beginning: whether the log has the first start of the run.
        entries: records in order.
    """

    name: object = None
    has_beginning: bool = False
    entries: list[Entry] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Add the next record; a start at an earlier step rolls back later records."""
        kind = str(record.get("kind"))
        steps = self.entries[-1].steps if self.entries else 0
        if kind == "step":
            steps = whole(record, "step") or 0
        elif kind == "start":
            steps = whole(progress_at(record), "steps") or 0
            self._roll_back(steps)
        elif kind == "epoch_restarted":
            steps = self._steps_before(whole(record, "epoch") or 0)
            self._roll_back(steps)
        self.entries.append(Entry(record, kind, steps))

    def _roll_back(self, steps: int) -> None:
        """Mark the records after a step as rolled back."""
        for entry in reversed(self.entries):
            step = entry.steps + 1 if entry.kind in _IN_NEXT_STEP else entry.steps
            if entry.counts and step <= steps:
                return
            entry.counts = False

    def _steps_before(self, epoch: int) -> int:
        """Return the optimizer steps before an epoch."""
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
    # The first run collects records before any start.
    runs = [Run()]
    run = runs[0]
    for record in records:
        if record.get("kind") == "start":
            name = record.get("run")
            is_resumed = bool(record.get("resumed"))
            same_name = [earlier for earlier in runs if earlier.name == name]
            # Loops in scripts record no name, so their resumed starts belong to the newest run.
            if not is_resumed or (name is not None and not same_name):
                run = Run(name, has_beginning=not is_resumed)
                runs.append(run)
            elif name is not None:
                run = same_name[-1]
        run.add(record)
    others = [other for other in runs[1:] if other is not run]
    return run, len(others)


def progress_at(start: Record) -> Record:
    """Return the progress at a start; empty if it is not recorded."""
    progress = start.get("progress")
    return progress if isinstance(progress, Mapping) else {}


def whole(record: Record, name: str) -> int | None:
    """Return an integer of a record; None if it is missing or another type."""
    value = record.get(name)
    # isinstance() would accept a bool.
    return value if type(value) is int else None
