"""An epoch divides into steps that hold each row once."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.schedules import EpochPlan


@given(
    rows=st.integers(1, 5000),
    global_rows=st.integers(1, 300),
    drop_last=st.booleans(),
    max_steps=st.none() | st.integers(1, 50),
)
def test_the_steps_of_an_epoch_hold_each_row_once(rows, global_rows, drop_last, max_steps):
    plan = EpochPlan.of(rows, global_rows=global_rows, drop_last=drop_last, max_steps=max_steps)
    sizes = [plan.rows_of_step(step) for step in range(plan.steps)]
    assert all(0 < size <= global_rows for size in sizes)
    assert all(size == global_rows for size in sizes[:-1])
    whole = rows - rows % global_rows if drop_last else rows
    assert sum(sizes) == (whole if max_steps is None else min(whole, max_steps * global_rows))


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (EpochPlan.of(10, global_rows=4, drop_last=False), "3 steps of 4 rows"),
        (EpochPlan.of_sizes([1]), "1 step of 1 row"),
        (EpochPlan.of_sizes([2, 6, 2]), "3 steps of 2 to 6 rows"),
        (replace(EpochPlan.of_sizes([2, 6]), is_estimate=True), "about 2 steps of 2 to 6 rows"),
        (EpochPlan.of_sizes([]), "0 steps of 0 rows"),
    ],
)
def test_a_plan_is_described_by_its_steps_and_their_rows(plan, text):
    assert plan.describe() == text
