"""Batches use each row once per epoch, from any position, with equal steps in dry runs."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.examples import examples
from torch.utils.data import DistributedSampler

from adaptive_batch import distributed
from adaptive_batch.data import Batches, Batching, DatasetAdapter
from adaptive_batch.data.adaptive_batches import NoSizer
from adaptive_batch.schedules import EpochPlan, Progress, at_epochs, linear_ramp

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def batches_of(lengths, *, maximum=None, ranks=1, counts_tokens=True, **batching):
    """Return batches of rows of the given lengths."""
    rows = DatasetAdapter([{"tokens": torch.zeros(length)} for length in lengths])
    sizer = NoSizer(maximum, batching.get("batch_tokens"))
    batches = Batches(
        rows, Batching(**{"shuffle": False, **batching}), sizer, counts_tokens=counts_tokens
    )
    batches.ranks = ranks
    return batches


def of_sizes(rows, counts, **batching):
    """Return batches with steps of `counts` rows, in a cycle."""
    batching = Batching(
        batch_size=1,
        batch_size_schedule=lambda progress: counts[progress.steps % len(counts)],
        **batching,
    )
    return Batches(DatasetAdapter(range(rows), 1), batching, NoSizer(None, None))


def ahead_of(batches, epochs):
    """Return the remaining steps of a dry run."""
    return list(batches.dry_run(counts_tokens=True).remaining(epochs))


def taken(batches):
    """Run the remaining steps of the epoch; return their row numbers."""
    steps = []
    for step in batches.steps():
        assert step.own == step.numbers
        steps.append(step.numbers)
        batches.done(tokens=len(step.numbers))
    if batches.is_over:
        batches.end_epoch()
    return steps


@given(st.integers(1, 100), sizes, st.integers(0, 2**40), st.integers(0, 50), st.booleans())
@example(6000, [700, 40, 1500], 0, 1, True)
@examples(50)
def test_batches_of_all_sizes_keep_the_order_of_torchs_sampler(rows, counts, seed, epoch, shuffle):
    sampler = DistributedSampler(range(rows), 1, 0, shuffle=shuffle, seed=seed)
    sampler.set_epoch(epoch)
    batches = of_sizes(rows, counts, shuffle=shuffle, seed=seed)
    batches.resume(Progress(epoch=epoch))
    in_order = list(sampler)
    position = 0
    for step in batches.steps():
        size = counts[batches.progress.steps % len(counts)]
        assert step.numbers == in_order[position : position + size]
        assert batches.rows_after(step) == in_order[position + size : position + 2 * size]
        assert batches.progress.epoch_rows == position
        position += len(step.numbers)
        batches.done(tokens=0)
    assert position == rows
    assert batches.is_over


@pytest.mark.parametrize(("maximum", "sizes"), [(None, [3, 5, 8]), (6, [3, 5, 6])])
def test_a_dry_run_calls_a_copy_of_the_growth_function_once_per_epoch(maximum, sizes):
    class Counting:
        calls = 0

        def __call__(self, epoch, batch_size):
            self.calls += 1
            return self.calls

    function = Counting()
    growth = {"batch_size": 2, "batch_increase_function": function}
    batches = batches_of([1] * 30, maximum=maximum, **growth)
    ahead = {step.progress.epoch: step.batch for step in ahead_of(batches, 3)}
    assert function.calls == 0
    grown = [len(taken(batches)[0]) for _ in range(3)]
    assert [*ahead.values()] == grown == sizes


def test_the_configured_batch_replaces_a_saved_batch_that_is_not_kept():
    growth = {"batch_increase_function": at_epochs({1: 3, 2: 5})}
    grown = batches_of([1] * 30, batch_size=2, **growth)
    taken(grown)
    grown.begin_epoch()
    resumed = batches_of([1] * 30, maximum=20, batch_size=3, **growth)
    resumed.resume(Progress(), grown.state_dict()["steps"], keeps_batch=False)
    resumed.begin_epoch()
    assert resumed.batch_size == resumed.first_batch_size == 3


def test_the_plan_of_a_schedule_of_tokens_has_the_steps_that_are_trained():
    rule = linear_ramp(start=2, end=32, over="60tok")
    batches = batches_of([1] * 60, batch_size=2, batch_size_schedule=rule)
    batches.begin_epoch()
    planned = list(batches.plan.sizes)
    assert planned == [len(rows) for rows in taken(batches)]
    assert planned[0] < planned[1] < planned[2]


def test_ranks_balance_the_tokens_of_a_step(monkeypatch):
    monkeypatch.setattr(distributed, "data_parallel_size", lambda: 2)
    tokens = []
    for rank in (0, 1):
        monkeypatch.setattr(distributed, "data_parallel_rank", lambda rank=rank: rank)
        batches = batches_of([40, 1] * 4, ranks=2, batch_size=1, batch_tokens=82)
        (step,) = batches.steps()
        tokens.append(sum(len(batches._rows[row]["tokens"]) for row in step.own))
    # In turn, the ranks would have 160 and 4 tokens.
    assert tokens == [82, 82]


def test_a_schedule_is_bounded_by_the_saved_maximum_until_it_is_reset():
    rule = linear_ramp(start=2, end=32, over="10ba")
    saved = batches_of([1] * 60, maximum=20, batch_size=2, batch_size_schedule=rule)
    batches = batches_of([1] * 60, maximum=8, batch_size=2, batch_size_schedule=rule)
    batches.resume(Progress(steps=10), saved.state_dict()["steps"])
    assert len(next(batches.steps()).numbers) == 20
    batches.saved_maximum = 0
    assert len(next(batches.steps()).numbers) == 8


@given(
    st.integers(1, 500),
    st.integers(1, 60),
    st.integers(1, 3),
    st.booleans(),
    st.none() | st.integers(1, 50),
)
def test_a_dry_run_of_a_constant_batch_equals_its_plan(rows, batch_size, ranks, drop_last, most):
    ends = {"drop_last": drop_last, "max_steps_per_epoch": most}
    batches = batches_of([1] * rows, ranks=ranks, batch_size=batch_size, **ends)
    planned = {"global_rows": batch_size * ranks, "drop_last": drop_last, "max_steps": most}
    plan = EpochPlan.from_rows(rows, **planned)
    batches.resume(Progress())
    walked = ahead_of(batches, 1)
    sizes = [step.rows for step in walked]
    global_rows = plan.global_rows
    assert sizes == [min(global_rows, rows - step * global_rows) for step in range(plan.steps)]
    assert [step.progress.steps for step in walked] == list(range(plan.steps))
    again = EpochPlan.from_sizes(sizes, max_steps=most)
    assert plan.steps <= 1 or again.slots == plan.slots


@pytest.mark.parametrize(
    "batching",
    [{"batch_size": 1, "batch_tokens": 60}, {"batch_size": 3, "sample_order": "seqlen"}],
    ids=["by tokens", "short to long"],
)
def test_a_resumed_epoch_is_planned_with_the_saved_lengths(batching):
    before = batches_of(range(1, 41), **batching)
    before.begin_epoch()
    begun, constant, order = before.plan, before.constant_epoch, before.order.tolist()
    resumed = batches_of(range(40, 0, -1), **batching)
    at = Progress(epoch_rows=9, epoch_steps=3, rows_per_epoch=40)
    resumed.resume(at, before.state_dict()["steps"])
    resumed.begin_epoch()
    assert resumed.order.tolist() == order
    assert (resumed.plan, resumed.constant_epoch) == (begun, constant)
    resumed.end_epoch()
    resumed.begin_epoch()
    assert (resumed.order.tolist(), resumed.plan.sizes) != (order, begun.sizes)
    assert resumed.constant_epoch == constant
