"""Each row once an epoch, in torchtune's order, in batches of any sizes, from any position."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.examples import examples
from torch.utils.data import DistributedSampler

from adaptive_batch.data import Batching, DatasetAdapter, RowReader, StepPlanner, StepQueue
from adaptive_batch.schedules import Progress
from adaptive_batch.training import MicroBatchSizer

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def queue_of(rows, counts, *, shuffle=True, drop_last=False):
    """Steps of so many rows each, which begin anew after the last of them."""
    batching = Batching(
        batch_size=1,
        batch_size_schedule=lambda progress: counts[progress.steps % len(counts)],
        shuffle=shuffle,
        drop_last=drop_last,
    )
    return StepQueue(StepPlanner(DatasetAdapter(range(rows), 1), batching, MicroBatchSizer()))


def taken(queue):
    """The row numbers of each step that is left of the epoch."""
    steps = []
    for step in queue.steps():
        assert step.own == step.numbers
        steps.append(step.numbers)
        queue.done(tokens=len(step.numbers))
    return steps


@given(rows=st.integers(1, 100), counts=sizes, epoch=st.integers(0, 3), shuffle=st.booleans())
# Read in several blocks, and one step larger than a block.
@example(rows=6000, counts=[700, 40, 1500], epoch=1, shuffle=True)
@examples(50)
def test_batches_of_any_sizes_hand_out_the_samplers_order(rows, counts, epoch, shuffle):
    sampler = DistributedSampler(range(rows), 1, 0, shuffle=shuffle, seed=0)
    sampler.set_epoch(epoch)
    queue = queue_of(rows, counts, shuffle=shuffle)
    queue.resume(Progress(epoch=epoch))
    in_order = list(sampler)
    position = 0
    for step in queue.steps():
        size = counts[queue.progress.steps % len(counts)]
        assert step.numbers == in_order[position : position + size]
        assert queue.progress.epoch_rows == position
        position += len(step.numbers)
        queue.done(tokens=0)
    assert position == rows
    assert (queue.progress.epoch, queue.progress.epoch_rows) == (epoch + 1, 0)


@given(rows=st.integers(1, 100), position=st.integers(0, 100), counts=sizes)
@examples(50)
def test_going_on_from_any_position_hands_out_the_rest(rows, position, counts):
    position = min(position, rows - 1)
    whole = queue_of(rows, [max(1, position), *counts])
    rest = queue_of(rows, [max(1, position), *counts])
    whole.resume(Progress(epoch=2))
    if position:
        next(whole.steps())
        whole.done(tokens=position)
        rest.resume(
            Progress(epoch=2, steps=1, samples=position, epoch_steps=1, epoch_rows=position)
        )
    else:
        rest.resume(Progress(epoch=2))
    assert taken(rest) == taken(whole)


def test_what_is_handed_out_and_not_done_comes_again():
    queue = queue_of(20, [3, 4])
    steps = queue.steps()
    ahead = [next(steps).numbers for _ in range(4)]
    assert queue.oldest.numbers == ahead[0]
    queue.done(tokens=3)
    assert queue.progress.samples == 3
    assert [next(queue.steps()).numbers] == ahead[1:2]
    with pytest.raises(ValueError, match="no batch is waiting"):
        queue_of(20, [3]).done()


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_last_rows_of_an_epoch_are_a_short_step_or_none(drop_last):
    queue = queue_of(10, [4], shuffle=False, drop_last=drop_last)
    steps = []
    for step in queue.steps():
        steps.append(step.numbers)
        queue.done(tokens=0, ends_epoch=False)
    assert steps == [[0, 1, 2, 3], [4, 5, 6, 7], *([] if drop_last else [[8, 9]])]


@pytest.mark.parametrize("begins", [False, True])
def test_rows_are_handed_on_as_they_are(begins):
    rows = [{"tokens": [1, 2], "labels": [1, 2]}, {"tokens": [3], "labels": [3]}]
    reader = RowReader(rows)
    if begins:
        reader.begin()
    for number in (0, 1, 0):
        assert reader.read([number])[0] is rows[number]
