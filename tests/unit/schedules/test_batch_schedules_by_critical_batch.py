"""A batch that follows critical batches measured along a run."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import Progress, by_critical_batch


def at_tokens(rule, tokens):
    return rule(Progress(tokens=tokens))


def test_it_has_what_was_measured_where_it_was_measured_and_stays_after_the_last():
    rule = by_critical_batch(start=4, points={"1e4tok": 16, "4e4tok": 32})
    assert [at_tokens(rule, tokens) for tokens in (0, 10_000, 40_000, 10**9)] == [4, 16, 32, 32]
    assert at_tokens(rule, 2500) == 4 + 12 / 2  # half way, by the square root
    assert at_tokens(rule, 22_500) == 16 + 16 / 2
    assert at_tokens(rule, 9_999) == 15


@given(st.integers(1, 10**8))
def test_a_critical_batch_proportional_to_the_square_root_of_tokens_is_followed_exactly(tokens):
    points = {f"{amount}tok": math.isqrt(amount) for amount in (100, 10_000, 1_000_000, 10**8)}
    rule = by_critical_batch(start=1, points=points)
    exact = math.sqrt(tokens) if tokens > 100 else 1 + 9 * math.sqrt(tokens) / 10
    assert exact - 1 - 1e-6 <= at_tokens(rule, tokens) <= exact + 1e-6


@given(
    st.dictionaries(st.integers(1, 10**6), st.integers(1, 500), min_size=1, max_size=5),
    st.integers(1, 500),
    st.lists(st.integers(0, 2 * 10**6), min_size=2, max_size=20),
)
def test_it_never_shrinks_nor_leaves_what_was_measured(measured, start, when):
    rule = by_critical_batch(
        start=start, points={f"{at}sp": batch for at, batch in measured.items()}
    )
    batches = [rule(Progress(samples=samples)) for samples in sorted(when)]
    assert batches == sorted(batches)
    assert all(start <= batch <= max(start, *measured.values()) for batch in batches)


def test_points_may_come_in_any_order_and_in_epochs():
    rule = by_critical_batch(start=4, points={"1ep": 32, "0.25ep": 18})
    assert repr(rule) == "by_critical_batch({'0.25ep': 18, '1ep': 32}, start=4)"
    halfway = Progress(epoch_rows=16, rows_per_epoch=64)
    assert (rule(Progress(rows_per_epoch=64)), rule(halfway), rule(Progress(epoch=1))) == (
        4,
        18,
        32,
    )


@pytest.mark.parametrize(
    ("points", "start", "message"),
    [
        ({}, 4, r"batch_size_schedule\.points=\{\}: give where in training"),
        ([16], 4, r"batch_size_schedule\.points=\[16\]: give where in training"),
        ({"1000": 8}, 4, r"batch_size_schedule\.points='1000': give a number with a unit"),
        ({"1ep": 8, "10ba": 8}, 4, r"batch_size_schedule\.points=.*give all in one unit"),
        ({"1ep": 0}, 4, r"batch_size_schedule\.points=0: must be a whole number"),
        ({"1ep": 8}, 0, r"batch_size_schedule\.start=0: must be a whole number"),
    ],
)
def test_what_it_cannot_follow_is_refused(points, start, message):
    with pytest.raises(SettingError, match=message):
        by_critical_batch(points, start)


def test_points_that_fall_are_said_to_count_as_the_largest_before_them(caplog):
    rule = by_critical_batch(start=4, points={"1e5tok": 64, "4e5tok": 24})
    assert rule(Progress(tokens=400_000)) == 64
    assert "24 rows at 400000tok are below the 64 at 100000tok, and the batch never" in caplog.text
    caplog.clear()
    by_critical_batch(start=4, points={"1e5tok": 24, "4e5tok": 64})
    assert not caplog.text
