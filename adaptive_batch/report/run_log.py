"""The run log: each step and each event of a run, one JSON object a line in ``run.jsonl``."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from adaptive_batch._util import without_nan
from adaptive_batch.errors import SettingError

log = logging.getLogger("adaptive_batch")

RECORD = Path("adaptive_batch") / "run.jsonl"


class RunLog:
    """Appends one JSON object a line: ``kind`` is ``step``, or the name of the event. Any thread
    may write; nothing is buffered.

    JSON has no nan and no infinities: they are written as text, which ``float`` reads. Restarts of
    a run append; a line torn by a kill is ended.

    A loop is given it as ``StepOptions(event=RunLog("output"))``; ``adaptive-batch audit
    output`` and ``report output`` read it.

    Args:
        folder: folder of the run; the file is ``adaptive_batch/run.jsonl`` in it.
        enabled: whether anything is written; None on rank zero alone.

    Raises:
        SettingError: another log of the folder is open, in this process or in another.
    """

    def __init__(self, folder: str | Path, *, enabled: bool | None = None) -> None:
        self._file = None
        self._writing = threading.Lock()
        if enabled is None:
            # It imports torch, which reading a log does not need.
            from adaptive_batch import distributed

            enabled = distributed.is_rank_zero()
        if enabled:
            path = Path(folder) / RECORD
            path.parent.mkdir(parents=True, exist_ok=True)
            torn = _ends_torn(path)
            self._file = path.open("a", encoding="utf-8")
            if not _locked(self._file):
                self._file.close()
                remedy = (
                    "another run is writing there; give this one another folder. A RunLog of your"
                    " own is closed by close(), and on several ranks it is made once they have met"
                )
                raise SettingError("output_dir", str(folder), remedy)
            if torn:
                self._file.write("\n")

    def __call__(self, kind: str, message: str, *, prints: bool = True, **values: Any) -> None:
        """Record a step, or an event."""
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

    def sync(self) -> None:
        """Flush the log to disk, so that nothing saved afterwards is ahead of it."""
        if self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; writing afterwards raises a :class:`SettingError`."""
        if self._file:
            self._file.close()

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        if self._file:
            if self._file.closed:
                remedy = (
                    "it was closed, and steps come after that; close it when training has ended"
                )
                raise SettingError("event", type(self).__name__, remedy)
            finite = without_nan(values)
            with self._writing:
                self._file.write(
                    json.dumps({"kind": kind, "time": round(time.time(), 3), **finite}) + "\n"
                )
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


def iterate_records(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the records of a file line by line; None for a line that a kill has torn."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            yield record if isinstance(record, dict) else None


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file; lines that a kill has torn are left out, with a warning."""
    records = list(iterate_records(path))
    torn = records.count(None)
    if torn:
        log.warning("%s: torn lines that are left out: %d", path, torn)
    return [record for record in records if record is not None]


def _locked(file: TextIO) -> bool:
    """Lock the file until it is closed or this process ends by any means; return whether nobody
    else had.
    """
    # It has no locks of this kind.
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without locks.
        return True
    return True


def _ends_torn(path: Path) -> bool:
    """Return whether the last line of a file has no end. Only its last byte is read: logs grow
    large.
    """
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
