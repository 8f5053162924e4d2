"""The curve of two traces gives the peak at every number of rows."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from adaptive_batch.memory import MemoryCurve, Trace

# (fixed bytes, bytes per row) alive after each operation.
PROGRAMS = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 300)), min_size=1, max_size=40)
MANY = 400


def traced(program, rows):
    return rows, Trace(1, [fixed + each * rows for fixed, each in program])


def curve_of(program, few=2, more=3):
    return MemoryCurve.from_traces(traced(program, few), traced(program, more))


def peak(program, rows):
    return max(fixed + each * rows for fixed, each in program)


@given(program=PROGRAMS, few=st.integers(1, 8), steps=st.integers(1, 8), rows=st.integers(1, MANY))
def test_two_sizes_determine_the_peak_at_all_others(program, few, steps, rows):
    curve = curve_of(program, few, few + steps)
    assert curve.peak_bytes(rows) == peak(program, rows)
    assert curve.highest(rows).at(rows) == peak(program, rows)


@given(program=PROGRAMS, budget=st.integers(0, 100_000))
def test_max_rows_agree_with_brute_force(program, budget):
    found = curve_of(program).max_rows(budget)
    fit = [rows for rows in range(1, MANY) if peak(program, rows) <= budget]
    if found is None:
        assert all(each == 0 for fixed, each in program if fixed + each * MANY > budget)
        assert len(fit) == MANY - 1
    else:
        assume(found < MANY - 1)
        assert found == max(fit, default=0)


def test_fractions_of_bytes_are_rounded_up():
    curve = MemoryCurve.from_traces((2, Trace(1, [10])), (5, Trace(1, [11])))
    assert [curve.peak_bytes(rows) for rows in (2, 3, 4, 5, 6, 8)] == [10, 11, 11, 11, 12, 12]
    assert [curve.max_rows(budget) for budget in (9, 10, 11, 12)] == [0, 2, 5, 8]


def test_a_falling_line_is_taken_as_flat():
    curve = MemoryCurve.from_traces((2, Trace(1, [50, 20])), (3, Trace(1, [40, 30])))
    assert [curve.peak_bytes(rows) for rows in (3, 4, 5)] == [40, 40, 50]
