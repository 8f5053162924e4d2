"""Scaling of the learning rate, its schedule, and the clock of the schedule."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import (
    EpochPlan,
    Pace,
    Progress,
    elapsed_steps,
    schedule_factor,
)


def cosine(step):
    return 0.5 * (1 + math.cos(math.pi * step / 10))


def test_a_schedule_is_the_factor_of_the_first_base_rate():
    one = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    factor = schedule_factor(LambdaLR(one, cosine))
    assert [factor(clock) for clock in (2.5, 3.0)] == [cosine(2.5), cosine(3)]
    # A scheduler in the wrapper of accelerate or Lightning.
    wrapped = SimpleNamespace(scheduler=LambdaLR(one, cosine))
    assert schedule_factor(wrapped)(4) == cosine(4)


def rows_of_step(plan, step):
    """Return the rows of step `step` of a plan with a constant batch."""
    return min(plan.global_rows, plan.rows - step * plan.global_rows)


def schedule_clock(progress, *, plan, reference, unit="samples"):
    pace = Pace(reference, plan)
    return elapsed_steps(unit, replace(progress, pace=pace))


@given(
    rows=st.integers(1, 100_000),
    global_rows=st.integers(1, 300),
    drop_last=st.booleans(),
    epochs=st.integers(1, 5),
)
def test_with_a_constant_batch_the_clock_is_the_step_count_exactly(
    rows, global_rows, drop_last, epochs
):
    plan = EpochPlan.from_rows(rows, global_rows=global_rows, drop_last=drop_last, max_steps=40)
    progress = Progress()
    for _ in range(epochs):
        for step in range(plan.steps):
            assert schedule_clock(progress, plan=plan, reference=plan) == progress.steps
            progress = progress.after_step(rows=rows_of_step(plan, step), tokens=7)
        progress = progress.after_epoch()


@given(st.lists(st.integers(1, 64), min_size=1, max_size=6), st.integers(64, 2000))
def test_growth_neither_stretches_nor_cuts_an_epoch_of_the_clock(batches, rows):
    reference = EpochPlan.from_rows(rows, global_rows=batches[0], drop_last=False)
    progress, before = Progress(), -1.0
    for epoch, batch in enumerate(batches):
        plan = EpochPlan.from_rows(rows, global_rows=batch, drop_last=False)
        assert schedule_clock(progress, plan=plan, reference=reference) == epoch * reference.steps
        for step in range(plan.steps):
            clock = schedule_clock(progress, plan=plan, reference=reference)
            assert before < clock < (epoch + 1) * reference.steps
            before = clock
            progress = progress.after_step(rows=rows_of_step(plan, step), tokens=1)
        progress = progress.after_epoch()
    assert progress.samples == rows * len(batches)


@given(
    steps=st.integers(1, 400),
    step_tokens=st.integers(1, 10**6),
    epochs=st.integers(1, 4),
    unit=st.sampled_from(["samples", "tokens", "steps"]),
)
def test_steps_of_equal_tokens_are_equal_steps_of_each_clock(steps, step_tokens, epochs, unit):
    plan = EpochPlan(steps * 4, 4, steps, tokens=steps * step_tokens)
    progress = Progress()
    for _ in range(epochs):
        for _ in range(steps):
            assert schedule_clock(progress, plan=plan, reference=plan, unit=unit) == progress.steps
            progress = progress.after_step(rows=4, tokens=step_tokens)
        progress = progress.after_epoch()


def test_a_clock_of_tokens_needs_counted_tokens():
    plan = EpochPlan.from_rows(8, global_rows=4, drop_last=False)
    with pytest.raises(SettingError, match=r"^lr_clock='tokens': .* give it row_length"):
        schedule_clock(Progress(), plan=plan, reference=plan, unit="tokens")


def test_an_estimated_plan_counts_steps_or_rows_whichever_ends_first():
    reference = EpochPlan.from_rows(100, global_rows=4, drop_last=False)
    plan = EpochPlan(100, 4, 25, most_steps=10, is_estimate=True)
    by_steps = Progress(epoch_rows=20, epoch_steps=5)
    assert schedule_clock(by_steps, plan=plan, reference=reference) == 12.5
    by_rows = Progress(epoch_rows=80, epoch_steps=5)
    assert schedule_clock(by_rows, plan=plan, reference=reference) == 20
