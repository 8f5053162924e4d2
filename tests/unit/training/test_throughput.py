"""The fastest micro-batches on a simulated machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from torch import nn

from adaptive_batch._util import from_json
from adaptive_batch.data import MicroBatchLayout, micro_batches
from adaptive_batch.probe import Throughput, Trial
from adaptive_batch.training import LongestRows, MicroBatchSizer, SearchScope
from adaptive_batch.training.throughput import ThroughputSearch

# Rows are their lengths.
random.seed(0)
ROWS = [min(256, 1 + int(random.lognormvariate(4.2, 1.0))) for _ in range(256)]


class Machine:
    """Runs rows in a second per micro-batch, with room for `fits` tokens."""

    def __init__(self, fits: int) -> None:
        self.sizer = MicroBatchSizer(micro_batch_tokens="auto")
        self.engine = SimpleNamespace(sizer=self.sizer, model=nn.Linear(1, 1))
        self.row_length = int
        self.fits = fits
        self.seconds = 0.0

    def try_rows(self, rows: Sequence[int], *, is_last: bool) -> None:
        tokens = self.sizer.layout.run_tokens(rows)
        self.seconds += 1.0 + 1e-4 * tokens if tokens <= self.fits else float("inf")

    def time_runs(self, runs: Sequence[Callable[[], object]]) -> float | None:
        # The first rows are timed once each, and the last micro-batch reduces gradients.
        timed = [row for run in runs for row in run.args[0]]
        assert sorted(timed) == sorted(ROWS[: len(timed)])
        assert [run.keywords["is_last"] for run in runs] == [False] * (len(runs) - 1) + [True]
        self.seconds = 0.0
        for run in runs:
            run()
        return self.seconds if self.seconds < float("inf") else None

    def __call__(self, rows: int) -> Trial:
        return Trial(rows, fits=self.sizer.layout.run_tokens([256] * rows) <= self.fits)


def search(*, fits: int = 10**9, step_rows: int = 128) -> Throughput | None:
    machine: Any = Machine(fits)
    rows = LongestRows(lambda size: [256] * size, 256, "a row", lambda begin, size: ROWS[:size])
    scope = SearchScope(rows, layouts=("grouped", "packed"), timed_rows=step_rows)
    return ThroughputSearch(machine, machine, scope, 32).run()


def test_the_fastest_choice_fits() -> None:
    # Several steps of 4 rows are timed.
    for step_rows in (128, 4):
        found = search(fits=1500, step_rows=step_rows)
        assert found is not None
        assert found.limit.amount <= 1500
        layout = MicroBatchLayout(kind=found.kind, time=found.time)
        pieces = micro_batches(ROWS[:step_rows], found.limit, layout)
        assert all(piece.run_tokens <= 1500 for piece in pieces)
    assert search(fits=1) is None


def test_large_micro_batches_are_chosen_if_each_takes_long() -> None:
    found = search()
    assert found is not None
    assert found.limit.amount > 8 * 256
    assert from_json(Throughput, asdict(found)) == found
    assert f"fastest: {found.kind}" in found.table()
