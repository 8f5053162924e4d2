"""An epoch divides into steps that hold each row once."""

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
