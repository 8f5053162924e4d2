"""What was decided and what was done, seen on the terminal and kept in ``run.jsonl``."""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path
from types import TracebackType
from typing import Any

log = logging.getLogger("adaptive_batch")


class RunRecord:
    """One JSON object a line: ``kind`` is ``step``, or the decision's name. Each line is written out at once.

    JSON has no word for nan and infinities: they are written as text, which ``float`` reads.

    Args:
        path: the file; appended to, so that a record outlives restarts. A line torn by a kill is closed, not joined.
        enabled: False writes nothing (ranks other than zero).
    """

    def __init__(self, path: Path, *, enabled: bool = True) -> None:
        self._file = None
        if enabled:
            path.parent.mkdir(parents=True, exist_ok=True)
            torn = path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n")
            self._file = path.open("a", encoding="utf-8")
            if torn:
                self._file.write("\n")

    def step(self, **metrics: Any) -> None:
        """Record one optimizer step."""
        self._write("step", metrics)

    def decision(self, kind: str, message: str, **values: Any) -> None:
        """Print one decision, and record it with its numbers."""
        if self._file:
            log.info("%s", message)
        self._write(kind, {"message": message, **values})

    def close(self) -> None:
        """Close the file; later records are an error."""
        if self._file:
            self._file.close()

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        if self._file:
            finite = {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}
            self._file.write(json.dumps({"kind": kind, "time": round(time.time(), 3), **finite}) + "\n")
            self._file.flush()

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a run; a line that a kill has torn is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            log.warning("%s: a torn line is left out: %.60r", path, line)
    return records
