"""Epochs that are divided ahead of training are divided alike in training, wherever it begins."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.data import Batching, DatasetAdapter, RequestedBatch
from adaptive_batch.data.epoch_planner import EpochPlanner
from adaptive_batch.errors import CheckpointError
from adaptive_batch.schedules import EpochPlan, Progress


def planner(lengths, *, ranks=1, **batching):
    """Of rows of these lengths in the dataset's own order."""
    rows = DatasetAdapter([{"tokens": torch.zeros(length)} for length in lengths])
    batch = RequestedBatch(Batching(shuffle=False, **batching))
    return EpochPlanner(rows, batch, ranks=ranks, divisible=False, counts_tokens=True)


@given(
    rows=st.integers(1, 500),
    batch_size=st.integers(1, 60),
    ranks=st.integers(1, 3),
    drop_last=st.booleans(),
    max_steps=st.none() | st.integers(1, 50),
)
def test_a_constant_batch_is_walked_as_it_is_planned(rows, batch_size, ranks, drop_last, max_steps):
    epochs = planner(
        [1] * rows,
        ranks=ranks,
        batch_size=batch_size,
        drop_last=drop_last,
        max_steps_per_epoch=max_steps,
    )
    plan = EpochPlan.of(
        rows, global_rows=batch_size * ranks, drop_last=drop_last, max_steps=max_steps
    )
    walked = list(epochs.ahead(Progress(), {0: batch_size}))
    assert [len(numbers) for _, numbers, _ in walked] == [
        plan.rows_of_step(step) for step in range(plan.steps)
    ]
    assert [progress.steps for progress, _, _ in walked] == list(range(plan.steps))
    again = EpochPlan.of_sizes([len(numbers) for _, numbers, _ in walked], max_steps=max_steps)
    if plan.steps > 1:
        assert again.slots == plan.slots


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=40),
    st.lists(st.integers(1, 50), min_size=1),
    st.data(),
)
def test_going_on_in_mid_epoch_takes_the_same_steps(batches, lengths, data):
    """The rule reads progress alone, so where it is called from does not matter."""
    epochs = planner(
        lengths,
        batch_size=1,
        batch_size_schedule=lambda progress: batches[progress.steps % len(batches)],
    )
    whole = list(epochs.ahead(Progress(), {0: 1}))
    assert [number for _, numbers, _ in whole for number in numbers] == list(range(len(lengths)))
    assert all(progress.tokens == sum(lengths[: progress.samples]) for progress, _, _ in whole)
    begin = data.draw(st.sampled_from(whole))[0]
    assert list(epochs.ahead(begin, {0: 1})) == whole[begin.steps :]


def test_an_epoch_is_over_after_its_last_row_or_its_last_step():
    def rows_of_next_step(rows, **ends):
        epochs = planner([1] * rows, batch_size=4, **ends)
        _, size = epochs.next_step(Progress(epoch_rows=8, epoch_steps=2), requested=4)
        assert size or epochs.is_over(Progress(epoch_rows=8, epoch_steps=2)) or ends["drop_last"]
        return size

    assert rows_of_next_step(10, drop_last=False) == 2
    assert rows_of_next_step(10, drop_last=True) == 0
    assert rows_of_next_step(8, drop_last=False) == 0
    assert rows_of_next_step(100, drop_last=False, max_steps_per_epoch=2) == 0


@pytest.mark.parametrize(
    "batching",
    [{"batch_size": 1, "batch_tokens": 60}, {"batch_size": 3, "sample_order": "seqlen"}],
    ids=["by tokens", "short to long"],
)
def test_a_resumed_epoch_and_the_constant_one_are_planned_by_the_saved_lengths(batching):
    before = planner(range(1, 41), **batching)
    before.begin(0)
    begun, constant = before.divide(Progress(), lambda progress: 3), before.constant(3)
    resumed = planner(range(40, 0, -1), **batching)
    resumed.load_state_dict(before.state_dict())
    at = Progress(epoch_rows=9, epoch_steps=3)
    assert resumed.order(at).tolist() == before.order(at).tolist()
    assert resumed.divide(at, lambda progress: 3) == begun
    assert resumed.constant(3) == constant
    resumed.begin(1)
    assert resumed.lengths.all.tolist() == [*range(40, 0, -1)]
    assert resumed.constant(3) == constant


def test_a_state_without_the_lengths_of_its_epoch_is_refused():
    epochs = planner([5, 6], batch_size=1, batch_tokens=20)
    with pytest.raises(CheckpointError, match="does not hold the row lengths of its epoch"):
        epochs.load_state_dict({"ranks": 1, "epoch": 0, "planned_by": []})
