"""Memory curves on disk, by what they depend on, so that a search starts from what was planned or tried before."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

from adaptive_batch import distributed
from adaptive_batch._util import atomic_write, cache_directory
from adaptive_batch.memory import Line, MemoryCurve

from .search import Trial

_FORMAT = 1


class CachedCurve:
    """A curve that is kept on disk; with several ranks rank zero keeps it for all.

    Args:
        name: of everything that it depends on.
        on: False reads and writes nothing.
    """

    def __init__(self, name: str, *, on: bool = True) -> None:
        self._path: Path | None = cache_directory() / "curves" / f"{name}.json" if on else None

    def read(self) -> MemoryCurve | None:
        """The curve; None where there is none, or it cannot be read."""
        return distributed.from_rank_zero(self._read)

    def learn(self, trials: Iterable[Trial]) -> None:
        """Keep what trials tell, where two of them have counted the same operations."""
        known = {t.batch_size: t.trace for t in trials if t.fits and t.trace is not None}
        traced = sorted(known.items(), key=lambda item: item[0])
        if len(traced) > 1 and traced[-2][1].program == traced[-1][1].program:
            self.write(MemoryCurve.from_traces(traced[-2], traced[-1]))

    def write(self, curve: MemoryCurve) -> None:
        """Keep a curve; where the disk does not let it, it is not kept."""
        if self._path is None or not distributed.is_rank_zero():
            return
        lines = [[str(line.fixed_bytes), str(line.bytes_per_row), line.operation] for line in curve.lines]
        with contextlib.suppress(OSError):
            atomic_write(self._path, json.dumps({"format": _FORMAT, "lines": lines}))

    def _read(self) -> MemoryCurve | None:
        if self._path is None:
            return None
        try:
            record = json.loads(self._path.read_text())
            if record["format"] != _FORMAT:
                return None
            lines = [Line(Fraction(fixed), Fraction(each), int(number)) for fixed, each, number in record["lines"]]
        except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
            return None
        return MemoryCurve(tuple(lines)) if lines else None
