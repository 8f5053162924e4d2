"""The critical batch of branches: from losses that are planted, so that the batch and its range are
known by hand.
"""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.probe import Branch, batches_of_branches, best_branch, critical_batch

LABELS = [10, 20, 30, 40] * 16


def branch(batch, above, *, spread=0.0, labels=LABELS):
    """Token losses of 2 x (1 + above), with `spread` up and down from row to row."""
    per_token = [2 * (1 + above + spread * (-1) ** row) for row in range(len(labels))]
    return Branch(
        batch, [loss * count for loss, count in zip(per_token, labels, strict=True)], labels
    )


def quadratic(critical):
    """Branches whose loss is above that of the smallest by 1% x (batch / critical) squared."""
    return [
        branch(1, 0),
        *(branch(batch, 0.01 * (batch / critical) ** 2) for batch in (2, 4, 8, 16, 32)),
    ]


def in_range(branches, tolerance=0.01):
    """The critical batch with two standard errors more, none, and two less."""
    return [critical_batch(branches, tolerance, errors=errors) for errors in (2, 0, -2)]


def test_the_largest_batch_within_the_tolerance_is_the_one_planted():
    for critical in (2.5, 5, 11, 20):
        assert in_range(quadratic(critical)) == [2 ** math.floor(math.log2(critical))] * 3
    assert critical_batch(quadratic(5), 0.05) == 8  # sqrt(5) times as much: 11
    assert critical_batch(quadratic(1), 0.01) == 1
    assert critical_batch(quadratic(100), 0.01) == 32


def test_the_standard_error_is_that_of_a_ratio_by_hand():
    # differences of a label: 0.1, 0.3 over 1 and 3 labels: mean (0.1 + 0.9) / 4 = 0.25, residuals
    # 0.1 - 0.25 and 0.9 - 0.75
    smallest, other = Branch(1, [1.0, 3.0], [1, 3]), Branch(2, [1.1, 3.9], [1, 3])
    above, error = other.excess(smallest)
    assert above == pytest.approx(0.25)
    assert error == pytest.approx(math.sqrt(2 / 1 * (0.15**2 + 0.15**2)) / 4)
    assert smallest.excess(smallest) == (0, 0)
    # what all rows share is no error, however different the rows are
    assert branch(2, 0.05).excess(branch(1, 0)) == pytest.approx((0.05, 0), abs=1e-12)


def test_the_range_is_of_the_batches_that_two_standard_errors_leave_open():
    def found(*above, spread):
        alike = {"labels": [10] * 64}
        return [
            branch(1, 0, **alike),
            *(branch(2 << i, one, spread=spread, **alike) for i, one in enumerate(above)),
        ]

    # 64 rows of equal length, each +- spread: a standard error of spread / sqrt(63)
    error = 0.02 / math.sqrt(63)
    near = found(0.001, 0.01 - error, 0.01 + error, 0.01 + 3 * error, spread=0.02)
    assert near[2].excess(near[0])[1] == pytest.approx(error)
    assert in_range(near) == [2, 4, 8]
    assert in_range(found(0.001, 0.01 + error, spread=0.02)) == [2, 2, 4]


def test_a_batch_counts_where_all_below_it_are_within_the_tolerance_too():
    assert in_range([branch(1, 0), branch(2, 0.005), branch(4, 0.02), branch(8, 0.001)]) == [
        2,
        2,
        2,
    ]


def test_it_is_the_best_batch_that_others_are_compared_with_and_not_the_smallest():
    found = [
        branch(batch, above)
        for batch, above in ((1, 0.03), (2, 0.02), (4, 0), (8, 0.005), (16, 0.012), (32, 0.03))
    ]
    assert best_branch(found).batch == 4
    assert in_range(found) == [8, 8, 8]
    assert critical_batch(found, 0.02) == 16
    assert critical_batch(found[:3], 0.01) == 4


def test_a_branch_that_ends_with_no_number_is_beyond_the_critical_batch():
    for bad in (math.nan, math.inf):
        lost = Branch(4, [bad] * len(LABELS), LABELS)
        assert in_range([branch(1, 0), branch(2, 0), lost, branch(8, 0)]) == [2, 2, 2]
    assert math.isnan(Branch(1, [0.0], [0]).loss)


@given(
    st.lists(st.floats(-0.1, 0.1), min_size=1, max_size=6),
    st.floats(0, 0.1),
    st.floats(0.001, 0.1),
)
def test_the_range_holds_the_batch_and_a_larger_tolerance_none_smaller(above, spread, tolerance):
    branches = [branch(1, 0), *(branch(2 << i, one, spread=spread) for i, one in enumerate(above))]
    found = in_range(branches, tolerance)
    assert found == sorted(found)
    assert critical_batch(branches, 2 * tolerance) >= found[1]


def test_batches_double_from_a_quarter_while_rows_make_four_steps():
    assert batches_of_branches(8, 512) == [2, 4, 8, 16, 32, 64, 128]
    assert batches_of_branches(8, 511) == [2, 4, 8, 16, 32, 64]
    assert batches_of_branches(6, 24) == [3, 6]
    assert batches_of_branches(5, 40) == [5, 10]
    assert batches_of_branches(1, 0) == [1]


@given(st.integers(1, 200), st.integers(0, 5000))
def test_every_batch_divides_the_rows_that_the_largest_divides(global_rows, rows):
    batches = batches_of_branches(global_rows, rows)
    assert global_rows % batches[0] == 0
    assert 4 * batches[0] >= global_rows
    assert all(2 * one == other for one, other in pairwise(batches))
    assert all((rows - rows % batches[-1]) % batch == 0 for batch in batches)
