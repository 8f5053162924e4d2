"""The part of a step that its noise is sampled with: rows drawn at random, whatever order and
length rows have.
"""

import random
from statistics import mean

from adaptive_batch.data import Batching, DatasetAdapter, StepPlanner
from adaptive_batch.schedules import Progress, small_batch
from adaptive_batch.training import MicroBatchSizer


def steps_of(lengths, **batching):
    """Yield the lengths of the rows of each step of an epoch, and which of them are in its small
    batch.
    """
    rows = DatasetAdapter(
        [{"tokens": [1] * length, "labels": [1] * length} for length in lengths], None
    )
    planner = StepPlanner(rows, Batching(**batching), MicroBatchSizer())
    progress = planner.begin(Progress())
    planner.start_epoch(progress)
    step = planner.next_step(progress)
    while step is not None:
        taken = [lengths[number] for number in step.own]
        yield taken, step.small_rows()
        progress = step.progress.after_step(rows=len(taken), tokens=sum(taken))
        step = planner.next_step(progress)


LENGTHS = random.Random(0).choices(range(2, 60), k=4000)


def test_it_is_a_quarter_of_the_rows_and_the_same_each_time():
    first, again = (list(steps_of(LENGTHS[:200], batch_size=9, seed=1)) for _ in range(2))
    assert first == again
    for lengths, small in first:
        assert list(small) == sorted(set(small))
        assert len(small) == small_batch(len(lengths))
    assert len({small for _, small in first}) > 10


def test_its_rows_are_as_long_as_the_others_also_in_steps_by_tokens_which_begin_with_a_long_row():
    steps = [
        step
        for step in steps_of(LENGTHS, batch_size=1, batch_tokens=400, seed=0)
        if len(step[0]) >= 8
    ]
    average = mean(mean(lengths) for lengths, _ in steps)
    begins = mean(lengths[0] for lengths, _ in steps)
    small = mean(mean(lengths[row] for row in rows) for lengths, rows in steps)
    assert begins > 1.2 * average
    assert abs(small / average - 1) < 0.05


def test_steps_that_min_rows_take_beyond_the_budget_are_logged_once_an_epoch():
    rows = DatasetAdapter([{"tokens": [1] * length} for length in (9, 9, 1, 1, 1, 1)], None)
    batching = Batching(batch_size=1, shuffle=False, batch_tokens=10, min_rows_per_batch=2)
    said = []
    planner = StepPlanner(
        rows, batching, MicroBatchSizer(), event=lambda kind, message, **facts: said.append(message)
    )
    planner.start_epoch(planner.begin(Progress()))
    assert said == [
        "epoch 0: 1 of 2 steps have more than batch_tokens, up to 18 over all ranks, for"
        " min_rows_per_batch=2"
    ]
