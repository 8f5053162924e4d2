"""The fastest micro-batches on a simulated machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
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
    """Runs rows in a second per micro-batch, with room for `fits` tokens; trials of the longest
    rows have room for `longest_fit`.
    """

    def __init__(self, fits: int, longest_fit: int) -> None:
        self.sizer = MicroBatchSizer(micro_batch_tokens="auto")
        self.engine = SimpleNamespace(sizer=self.sizer, model=nn.Linear(1, 1))
        self.row_length = int
        self.fits = fits
        self.longest_fit = longest_fit
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
        tokens = self.sizer.layout.run_tokens([256] * rows)
        return Trial(rows, fits=tokens <= min(self.fits, self.longest_fit))


def search(
    *,
    fits: int = 10**9,
    longest_fit: int = 10**9,
    step_rows: int = 128,
    layouts: Sequence[str] = ("grouped", "packed"),
) -> Throughput | None:
    machine: Any = Machine(fits, longest_fit)
    rows = LongestRows(lambda size: [256] * size, 256, "a row", lambda begin, size: ROWS[:size])
    scope = SearchScope(rows, layouts=layouts, timed_rows=step_rows)
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


def test_the_fastest_choice_fits_with_the_longest_rows() -> None:
    found = search(longest_fit=1500)
    assert found is not None
    assert 256 < found.limit.amount < 6 * 256
    assert max(trial.limit.amount for trial in found.trials) > 1500
    assert search(longest_fit=1) is None


def test_the_time_of_grouped_micro_batches_is_measured() -> None:
    found = search(layouts=["grouped"])
    assert found is not None
    assert (found.time.fixed, found.time.token) == pytest.approx((1.0, 1e-4))


def test_large_micro_batches_are_chosen_if_each_takes_long() -> None:
    found = search()
    assert found is not None
    assert found.limit.amount > 8 * 256
    assert from_json(Throughput, asdict(found)) == found
    assert f"fastest: {found.kind}" in found.table()
