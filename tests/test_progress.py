"""Progress counts; the clock of a constant batch is torchtune's step count to the last bit."""

from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.progress import EpochPlan, Progress, schedule_clock


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


@given(rows=st.integers(1, 100_000), step_rows=st.integers(1, 300), drop_last=st.booleans(), epochs=st.integers(1, 5))
def test_with_a_constant_batch_the_clock_is_the_step_count_exactly(rows, step_rows, drop_last, epochs):
    plan = EpochPlan.of(rows, step_rows=step_rows, drop_last=drop_last, max_steps=40)
    progress = Progress()
    for _ in range(epochs):
        for step in range(plan.steps):
            assert schedule_clock(progress, plan=plan, reference=plan) == progress.steps
            progress = progress.after_step(rows=plan.rows_of_step(step), tokens=7)
        progress = progress.after_epoch()


@given(st.lists(st.integers(1, 64), min_size=1, max_size=6), st.integers(64, 2000))
def test_growth_neither_stretches_nor_cuts_the_clock(batches, rows):
    """It rises within each epoch, and an epoch is as long on it as it was with the first batch."""
    reference = EpochPlan.of(rows, step_rows=batches[0], drop_last=False)
    progress, before = Progress(), -1.0
    for epoch, batch in enumerate(batches):
        plan = EpochPlan.of(rows, step_rows=batch, drop_last=False)
        assert schedule_clock(progress, plan=plan, reference=reference) == epoch * reference.steps
        for step in range(plan.steps):
            clock = schedule_clock(progress, plan=plan, reference=reference)
            assert before < clock < (epoch + 1) * reference.steps
            before = clock
            progress = progress.after_step(rows=plan.rows_of_step(step), tokens=1)
        progress = progress.after_epoch()
    assert progress.samples == rows * len(batches)


def test_progress_goes_through_its_state():
    progress = Progress().after_step(rows=8, tokens=100).after_epoch().after_step(rows=4, tokens=50)
    assert Progress(**progress.state_dict()) == progress
    assert progress == Progress(epoch=1, epoch_rows=4, steps=2, samples=12, tokens=150)
