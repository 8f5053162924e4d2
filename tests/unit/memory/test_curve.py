"""The curve of two traces is the maximum of straight lines that made them, at every
number of rows.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from adaptive_batch.memory import MemoryCurve, Trace

# Bytes alive after each operation: what is fixed, and what each row adds.
PROGRAMS = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 300)), min_size=1, max_size=40)
MANY = 400


def traced(program, rows):
    return rows, Trace(1, [fixed + each * rows for fixed, each in program])


def curve_of(program, few=2, more=3):
    return MemoryCurve.from_traces(traced(program, few), traced(program, more))


def peak(program, rows):
    return max(fixed + each * rows for fixed, each in program)


@given(program=PROGRAMS, few=st.integers(1, 8), steps=st.integers(1, 8), rows=st.integers(1, MANY))
def test_any_two_sizes_tell_the_peak_at_all_others(program, few, steps, rows):
    curve = curve_of(program, few, few + steps)
    assert curve.peak_bytes(rows) == peak(program, rows)
    assert curve.highest(rows).at(rows) == peak(program, rows)


@given(program=PROGRAMS, budget=st.integers(0, 100_000))
def test_max_rows_are_the_most_that_fit_by_brute_force(program, budget):
    found = curve_of(program).max_rows(budget)
    fit = [rows for rows in range(1, MANY) if peak(program, rows) <= budget]
    if found is None:
        assert all(each == 0 for fixed, each in program if fixed + each * MANY > budget)
        assert len(fit) == MANY - 1
    else:
        assume(found < MANY - 1)
        assert found == max(fit, default=0)


@given(program=PROGRAMS, rows=st.integers(1, MANY))
def test_a_peaks_own_bytes_are_enough_for_its_rows_and_a_byte_less_is_not(program, rows):
    curve = curve_of(program)
    enough, less = curve.max_rows(peak(program, rows)), curve.max_rows(peak(program, rows) - 1)
    assert enough is None or enough >= rows
    assert less is not None
    assert less < rows


@given(program=PROGRAMS)
def test_every_line_that_is_kept_is_the_highest_somewhere_and_they_grow_steeper(program):
    lines = curve_of(program).lines
    slopes = [line.bytes_per_row for line in lines]
    assert slopes == sorted(set(slopes))
    for line in lines:
        fixed, each = program[line.operation]
        assert (fixed, each) == (line.fixed_bytes, line.bytes_per_row)
    # Where it is the highest may lie between two whole numbers of rows, so the places are
    # fractions.
    crossings = [
        (one.fixed_bytes - other.fixed_bytes) / (other.bytes_per_row - one.bytes_per_row)
        for one, other in pairwise(lines)
    ]
    assert crossings == sorted(set(crossings))
    assert all(crossing > 1 for crossing in crossings)


def test_a_peak_between_two_lines_is_on_both_sides_of_where_they_cross():
    curve = curve_of(
        [(1000, 1), (100, 10), (0, 10), (500, 2)]
    )  # 1000 + r and 100 + 10 r meet at 100 rows
    assert [(line.fixed_bytes, line.bytes_per_row) for line in curve.lines] == [
        (1000, 1),
        (100, 10),
    ]
    assert [curve.peak_bytes(rows) for rows in (1, 99, 100, 101)] == [1001, 1099, 1100, 1110]
    assert [curve.max_rows(budget) for budget in (1000, 1001, 1099, 1109, 1110)] == [
        0,
        1,
        99,
        100,
        101,
    ]
    assert [curve.highest(rows).operation for rows in (1, 99, 101)] == [0, 0, 1]


def test_lines_whose_bytes_are_fractions_are_rounded_up():
    curve = MemoryCurve.from_traces((2, Trace(1, [10])), (5, Trace(1, [11])))
    assert [curve.peak_bytes(rows) for rows in (2, 3, 4, 5, 6, 8)] == [10, 11, 11, 11, 12, 12]
    assert [curve.max_rows(budget) for budget in (9, 10, 11, 12)] == [0, 2, 5, 8]


def test_what_no_row_adds_to_fits_any_number_of_rows_or_none():
    curve = curve_of([(700, 0), (300, 0)])
    assert (curve.max_rows(700), curve.max_rows(699)) == (None, 0)


def test_an_operation_that_holds_less_with_more_rows_is_taken_as_flat_at_its_least():
    curve = MemoryCurve.from_traces((2, Trace(1, [50, 20])), (3, Trace(1, [40, 30])))
    assert [curve.peak_bytes(rows) for rows in (3, 4, 5)] == [40, 40, 50]


@pytest.mark.parametrize(
    ("fewer", "more"),
    [
        ((1, Trace(1, [5, 6])), (2, Trace(2, [7, 8]))),
        ((2, Trace(1, [5, 6])), (2, Trace(1, [5, 6]))),
        ((3, Trace(1, [5, 6])), (2, Trace(1, [7, 8]))),
    ],
    ids=["other programs", "the same size", "the larger first"],
)
def test_other_programs_and_sizes_in_the_wrong_order_are_refused(fewer, more):
    with pytest.raises(AssertionError, match=r"they ran other operations|^\(\d, \d\)"):
        MemoryCurve.from_traces(fewer, more)
