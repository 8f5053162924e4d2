"""Each row once an epoch, in torchtune's order, in batches of any sizes, from any position."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

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


def test_epochs_have_orders_of_their_own():
    queue = queue_of(50, [50])
    orders = [numbers for _ in range(2) for numbers in taken(queue)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(50))
    assert queue.progress.epoch == 2


@pytest.mark.parametrize("begins", [False, True])
def test_rows_are_handed_on_as_they_are(begins):
    rows = [{"tokens": [1, 2], "labels": [1, 2]}, {"tokens": [3], "labels": [3]}]
    reader = RowReader(rows)
    if begins:
        reader.begin()
    for number in (0, 1, 0):
        assert reader.read([number])[0] is rows[number]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_of_fifty_million_rows_begins_at_once_and_without_memory_for_its_order(shuffle):
    program = textwrap.dedent(f"""
        import json
        from pathlib import Path
        from adaptive_batch.data import Batching, DatasetAdapter, RowReader, StepPlanner
        from adaptive_batch.schedules import Progress
        from adaptive_batch.training import MicroBatchSizer

        def peak_kibibytes():  # not ru_maxrss, which starts at what the parent had
            return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

        def begun(num_rows, progress):
            peak = peak_kibibytes()
            rows = DatasetAdapter(range(num_rows), 1)
            batching = Batching(batch_size=8192, shuffle={shuffle})
            planner = StepPlanner(rows, batching, MicroBatchSizer())
            progress = planner.begin(progress)
            planner.start_epoch(progress)
            step = planner.next_step(progress)
            taken = RowReader(rows).read(step.own, following=step.following)
            steps = planner.num_steps(progress, 3)
            return [(peak_kibibytes() - peak) / 1024, steps, taken]

        begun(100, Progress())
        resumed = Progress(epoch=1, epoch_rows=8192 * 6103, epoch_steps=6103)
        print(json.dumps([begun(5 * 10**7, Progress()), begun(5 * 10**7, resumed)]))
        """)
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=300
    )
    (mebibytes, steps, first), (of_resumed, left, last) = json.loads(ran.stdout)
    # A list of all numbers takes 2,300 MiB, and 3 s.
    assert max(mebibytes, of_resumed) < 100
    assert (steps, left) == (3 * 6104, 6105)
    in_order = list(range(8192)), list(range(8192 * 6103, 5 * 10**7))
    assert (len(first), len(last)) == tuple(map(len, in_order))
    assert ((first, last) == in_order) == (not shuffle)
