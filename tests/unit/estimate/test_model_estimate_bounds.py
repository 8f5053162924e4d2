"""Rows that fit without a retry of the allocator."""

from __future__ import annotations

from array import array
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.estimate import (
    AllocatorSettings,
    LengthEstimate,
    counted_fit,
)
from adaptive_batch.estimate.fake_step import Resident
from adaptive_batch.estimate.model_estimate import ReplayedBounds
from adaptive_batch.memory import Line, MemoryCurve

MIB = 2**20
RESIDENT = Resident(parameters=64 * MIB, buffers=0, optimizer=0, gradients=0)


def length_of(per_row, fixed=64 * MIB):
    curve = MemoryCurve((Line(Fraction(fixed), Fraction(per_row), 0),))
    return LengthEstimate(512, RESIDENT, curve, fixed + per_row, None)


def step_log(rows, each, *, steps=3):
    """Weights, then two growing buffers per step, of which the second needs a new segment."""
    log, number = array("q", [64 * MIB]), 1
    for _ in range(steps):
        log.extend([rows * each, ~number, rows * each + 3 * MIB, ~(number + 1)])
        number += 2
    return log


def bounds(each=32 * MIB, **settings):
    length = length_of(each, fixed=67 * MIB)
    made = ReplayedBounds(
        length, lambda rows: step_log(rows, each), AllocatorSettings(**settings), maximum=4096
    )
    return length, made


def test_reserved_memory_limits_the_rows():
    length, made = bounds()
    fit = made.fit(1000 * MIB)
    assert 0 < fit.max_batch_size < length.max_rows(1000 * MIB)
    assert fit.allocated_bytes < fit.reserved_bytes <= 1000 * MIB
    assert made.peaks(fit.max_batch_size + 1)[1] > 1000 * MIB


def test_more_rows_fit_with_expandable_segments():
    _, plain = bounds()
    _, expandable = bounds(expandable_segments=True)
    assert plain.fit(1000 * MIB).max_batch_size < expandable.fit(1000 * MIB).max_batch_size


@given(mib=st.integers(0, 2000), each=st.integers(1, 300))
def test_the_result_is_the_largest_that_fits(mib, each):
    length, made = bounds(each * MIB)
    fit = made.fit(mib * MIB)
    most = counted_fit(length, mib * MIB, maximum=4096).max_batch_size
    assert fit.max_batch_size <= most
    if fit.max_batch_size:
        assert made.peaks(fit.max_batch_size)[1] <= mib * MIB
    else:
        assert fit.first_too_large is not None
    if fit.max_batch_size < most:
        assert made.peaks(fit.max_batch_size + 1)[1] > mib * MIB


def test_reserved_memory_of_one_row_above_the_budget_is_the_reason():
    length, made = bounds(300 * MIB)
    assert length.max_rows(380 * MIB) == 1
    fit = made.fit(380 * MIB)
    assert fit.max_batch_size == 0
    assert fit.first_too_large.startswith("the allocator's memory for one row (")


def test_no_more_than_the_maximum_is_traced():
    length, _ = bounds()
    tried = []

    def log(rows):
        tried.append(rows)
        return step_log(rows, 32 * MIB)

    fit = ReplayedBounds(length, log, AllocatorSettings(), maximum=8).fit(100_000 * MIB)
    assert (fit.max_batch_size, tried) == (8, [8])
