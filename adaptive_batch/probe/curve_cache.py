"""Memory curves on disk, so that a search starts from what was estimated or tried before."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from fractions import Fraction

from adaptive_batch import distributed
from adaptive_batch._util import atomic_write, cache_directory
from adaptive_batch.memory import Line, MemoryCurve

from .search import Trial, measured_curve

_FORMAT = 1


class CachedCurve:
    """A curve that is kept on disk, under the name of all that it depends on.

    With several ranks, rank zero keeps it for all. Where `on` is False nothing is read or written.
    """

    def __init__(self, name: str, *, on: bool = True) -> None:
        self._path = None
        if on:
            self._path = cache_directory() / "curves" / f"{name}.json"

    def read(self) -> MemoryCurve | None:
        """Return the curve; None where there is none, or it cannot be read."""
        return distributed.from_rank_zero(self._read)

    def learn(self, trials: Iterable[Trial]) -> None:
        """Keep the curve that trials have measured, if they have."""
        curve = measured_curve(trials)
        if curve:
            self.write(curve)

    def write(self, curve: MemoryCurve) -> None:
        """Keep a curve, if the disk lets it."""
        if self._path and distributed.is_rank_zero():
            lines = [
                [str(line.fixed_bytes), str(line.bytes_per_row), line.operation]
                for line in curve.lines
            ]
            # A full disk costs a later search some trials, and must not end this run.
            with contextlib.suppress(OSError):
                atomic_write(self._path, json.dumps({"format": _FORMAT, "lines": lines}))

    def _read(self) -> MemoryCurve | None:
        # A file that is absent, torn or of another make is no curve, and no reason to stop.
        with contextlib.suppress(
            OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError
        ):
            if self._path is None:
                return None
            record = json.loads(self._path.read_text())
            if record["format"] == _FORMAT and record["lines"]:
                lines = [
                    Line(Fraction(fixed), Fraction(per_row), int(number))
                    for fixed, per_row, number in record["lines"]
                ]
                return MemoryCurve(tuple(lines))
        return None
