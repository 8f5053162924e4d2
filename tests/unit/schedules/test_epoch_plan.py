"""An epoch divides into steps that hold each row once, planned ahead or decided step by step."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.schedules import EpochPlan, Progress, rows_of_next_step, walk


def by(batch, *, ranks=1, **ends):
    """What the next step holds by a rule for one device."""

    def next_step(progress):
        progress = replace(progress, batch=batch(progress))
        return progress, rows_of_next_step(progress, step_rows=progress.batch * ranks, **ends)

    return next_step


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


@given(
    rows=st.integers(1, 500),
    step_rows=st.integers(1, 60),
    ranks=st.integers(1, 3),
    drop_last=st.booleans(),
    max_steps=st.none() | st.integers(1, 50),
)
def test_walking_with_a_constant_batch_is_the_plan(rows, step_rows, ranks, drop_last, max_steps):
    ends = {"drop_last": drop_last, "max_steps": max_steps}
    plan = EpochPlan.of(rows, step_rows=step_rows * ranks, **ends)
    walked = list(walk(Progress(), by(lambda _: step_rows, ranks=ranks, rows=rows, **ends)))
    assert [size for _, size in walked] == [plan.rows_of_step(step) for step in range(plan.steps)]
    assert [progress.steps for progress, _ in walked] == list(range(plan.steps))
    again = EpochPlan.of_sizes([size for _, size in walked], max_steps=max_steps)
    if plan.steps > 1:
        assert again.slots == plan.slots


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 200), st.data())
def test_going_on_in_mid_epoch_takes_the_same_steps(batches, rows, data):
    """The rule reads progress alone, so where it is asked from does not matter."""

    def batch(progress):
        return batches[progress.steps % len(batches)]

    lengths = data.draw(st.lists(st.integers(1, 50), min_size=rows, max_size=rows))
    before = [sum(lengths[:row]) for row in range(rows + 1)]
    next_step = by(batch, rows=rows, drop_last=False)
    whole = list(walk(Progress(), next_step, tokens_before=before))
    assert sum(size for _, size in whole) == rows
    assert all(progress.tokens == before[progress.samples] for progress, _ in whole)
    begin = data.draw(st.sampled_from(whole))[0]
    rest = list(walk(begin, next_step, tokens_before=before))
    assert rest == whole[begin.steps :]


def test_an_epoch_is_over_after_its_last_row_or_its_last_step():
    at = Progress(epoch_rows=8, epoch_steps=2)
    assert rows_of_next_step(at, step_rows=4, rows=10, drop_last=False) == 2
    assert rows_of_next_step(at, step_rows=4, rows=10, drop_last=True) == 0
    assert rows_of_next_step(at, step_rows=4, rows=8, drop_last=False) == 0
    assert rows_of_next_step(at, step_rows=4, rows=100, drop_last=False, max_steps=2) == 0
