"""An epoch divides into steps that hold each row once."""

from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.schedules import EpochPlan, Progress, rows_of_next_step


@given(
    rows=st.integers(1, 5000),
    step_rows=st.integers(1, 300),
    drop_last=st.booleans(),
    max_steps=st.none() | st.integers(1, 50),
)
def test_the_steps_of_an_epoch_hold_each_row_once(rows, step_rows, drop_last, max_steps):
    plan = EpochPlan.of(rows, step_rows=step_rows, drop_last=drop_last, max_steps=max_steps)
    sizes = [plan.rows_of_step(step) for step in range(plan.steps)]
    assert all(0 < size <= step_rows for size in sizes)
    assert all(size == step_rows for size in sizes[:-1])
    whole = rows - rows % step_rows if drop_last else rows
    assert sum(sizes) == (whole if max_steps is None else min(whole, max_steps * step_rows))


def test_an_epoch_is_over_after_its_last_row_or_its_last_step():
    at = Progress(epoch_rows=8, epoch_steps=2)
    assert rows_of_next_step(at, step_rows=4, rows=10, drop_last=False) == 2
    assert rows_of_next_step(at, step_rows=4, rows=10, drop_last=True) == 0
    assert rows_of_next_step(at, step_rows=4, rows=8, drop_last=False) == 0
    assert rows_of_next_step(at, step_rows=4, rows=100, drop_last=False, max_steps=2) == 0
