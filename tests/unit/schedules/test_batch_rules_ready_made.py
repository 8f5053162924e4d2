"""Ready-made schedules, as pure functions of progress."""

import math
import pickle
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import (
    EXAMPLES,
    Progress,
    batch_rules,
    by_noise_scale,
    check_schedule,
    linear_ramp,
    needs_noise_scale,
    ramp_by_doubling,
    request_batch,
    steps,
)

batches = st.integers(1, 4096)


def at(steps=0, **values):
    return Progress(steps=steps, **values)


def trace(rule, steps):
    return [rule(at(step)) for step in range(steps)]


# steps


@given(st.lists(batches, min_size=1, max_size=8), st.data())
def test_each_stage_begins_at_its_threshold(sizes, data):
    ends = sorted(
        data.draw(st.sets(st.integers(1, 500), min_size=len(sizes) - 1, max_size=len(sizes) - 1))
    )
    rule = steps(sizes, [f"{end}ba" for end in ends])
    step = data.draw(st.integers(0, 600))
    stage = sum(end <= step for end in ends)
    assert rule(at(step)) == sizes[stage] == rule.batches[rule.stage(at(step))]


# linear_ramp


def test_a_linear_ramp_is_rounded_down():
    assert trace(linear_ramp(16, 64, "6ba"), 8) == [16, 24, 32, 40, 48, 56, 64, 64]
    assert trace(linear_ramp(16, 64, "6ba", multiple_of=16), 8) == [16, 16, 32, 32, 48, 48, 64, 64]
    assert trace(linear_ramp(64, 16, "6ba", multiple_of=16), 8) == [64, 48, 48, 32, 32, 16, 16, 16]
    assert trace(linear_ramp(2, 10, "4ba", multiple_of=4), 6) == [4, 4, 4, 8, 10, 10]


@given(
    start=st.integers(1, 60),
    more=st.integers(1, 60),
    size=st.integers(1, 16),
    each=st.integers(1, 50),
)
def test_a_ramp_between_multiples_is_that_of_megatron(start, more, size, each):
    """One increment each `each` samples: start + (samples // each) x increment."""
    rule = linear_ramp(start * size, (start + more) * size, f"{more * each}sp", multiple_of=size)
    for samples in range(0, (more + 1) * each, max(1, each // 3)):
        assert rule(at(samples=samples)) == min(start + more, start + samples // each) * size


@given(start=batches, end=batches, over=st.integers(1, 10**7), data=st.data())
def test_a_ramp_is_monotonic_between_its_ends(start, end, over, data):
    multiple = data.draw(st.integers(1, min(start, end)))
    rule = linear_ramp(start, end, f"{over}tok", multiple)
    tokens = sorted(data.draw(st.lists(st.integers(0, 2 * over), min_size=2, max_size=20)))
    sizes = [rule(at(tokens=n)) for n in tokens]
    assert all(size % multiple == 0 for size, n in zip(sizes, tokens, strict=True) if n < over)
    assert all(min(start, end) - multiple < size <= max(start, end) for size in sizes)
    if end >= start:
        assert sizes == sorted(sizes)
    elif end % multiple == 0:
        assert sizes == sorted(sizes, reverse=True)
    assert rule(at(tokens=over)) == end


# ramp_by_doubling


def test_the_ramp_of_bert24_has_stages_of_equal_length():
    rule = ramp_by_doubling(64, "1ep", start=16)
    assert rule.batches == (16, 32, 64)
    assert [rule(at(epoch_rows=rows, rows_per_epoch=100)) for rows in (0, 49, 50, 99)] == [
        16,
        16,
        32,
        32,
    ]
    assert rule(at(epoch=1, rows_per_epoch=100)) == rule(at(epoch=5)) == 64
    assert [rule.begins(stage) for stage in range(3)] == ["the start", "1/2 of 1ep", "1ep"]


def test_without_a_start_the_end_is_halved_until_it_is_odd():
    assert ramp_by_doubling(48, "1ep").batches == (3, 6, 12, 24, 48)
    assert trace(ramp_by_doubling(8, "3ba"), 5) == [1, 2, 4, 8, 8]


@given(
    odd=st.integers(0, 50), doublings=st.integers(1, 10), less=st.data(), over=st.integers(1, 5000)
)
def test_each_stage_of_a_doubling_ramp_divides_the_end(odd, doublings, less, over):
    end = (2 * odd + 1) << doublings
    stages = less.draw(st.integers(1, doublings))
    rule = ramp_by_doubling(end, f"{over * stages}ba", start=end >> stages)
    answers = [rule(at(step)) for step in range(0, over * (stages + 1), over)]
    assert answers == [end >> (stages - stage) for stage in range(stages + 1)] == list(rule.batches)
    assert [rule(at(step - 1)) for step in range(over, over * (stages + 1), over)] == answers[:-1]
    assert all(end % answer == 0 for answer in answers)


# by_noise_scale


def test_by_noise_scale_changes_only_at_its_steps_and_only_with_a_finite_scale():
    rule = by_noise_scale(16)
    assert rule(at(0, noise_scale=1e6)) == rule(at(10)) == 16
    assert [rule(at(step, batch=16, noise_scale=1e6)) for step in (9, 10, 11, 20)] == [
        16,
        32,
        16,
        32,
    ]
    assert {
        rule(at(10, batch=16, noise_scale=noise))
        for noise in (math.nan, math.inf, -math.inf, -5.0, 0.0)
    } == {16}


def test_by_noise_scale_grows_above_the_margin_and_shrinks_unless_monotone():
    monotone, both = by_noise_scale(16, every=1), by_noise_scale(16, every=1, monotone=False)
    cases = {24.0: 16, 24.1: 32, 5.34: 16, 5.3: 8}
    for noise, expected in cases.items():
        progress = at(5, batch=16, noise_scale=noise)
        assert both(progress) == expected
        assert monotone(progress) == max(16, expected)


def test_by_noise_scale_keeps_its_maximum_and_a_batch_above_it():
    rule = by_noise_scale(16, maximum=24, every=1)
    assert [rule(at(1, batch=batch, noise_scale=1e9)) for batch in (16, 24, 30)] == [24, 24, 30]


@given(batch=batches, factor=st.floats(1.01, 8), margin=st.floats(0, 3), noise=st.floats(1e-3, 1e7))
def test_by_noise_scale_does_not_oscillate(batch, factor, margin, noise):
    rule = by_noise_scale(batch, factor=factor, margin=margin, every=1, monotone=False)
    sizes = [batch]
    for step in range(1, 200):
        sizes.append(rule(at(step, batch=sizes[-1], noise_scale=noise)))
        if sizes[-1] == sizes[-2]:
            break
    assert sizes == sorted(sizes) or sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == rule(at(999, batch=sizes[-1], noise_scale=noise)) >= 1 or len(sizes) == 200


# All rules.

RULES = [
    steps([16, 32], ["2ba"]),
    linear_ramp(16, 64, "1.5e6tok", 8),
    ramp_by_doubling(64, "0.5ep"),
    by_noise_scale(16, maximum=64, monotone=False),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_repr_of_a_rule_builds_it_and_it_can_be_pickled(rule):
    assert eval(repr(rule), vars(batch_rules)) == rule == pickle.loads(pickle.dumps(rule))
    assert hash(rule) == hash(pickle.loads(pickle.dumps(rule)))
    progress = at(
        10, samples=300, tokens=10**6, epoch_rows=30, rows_per_epoch=100, noise_scale=200.0
    )
    assert (
        rule(progress)
        == rule(replace(progress))
        == request_batch(rule, progress, maximum=None).after
    )
    check_schedule(rule)


def test_only_by_noise_scale_needs_the_noise_scale():
    assert [needs_noise_scale(rule) for rule in RULES] == [False, False, False, True]
    assert not needs_noise_scale(lambda progress: 8)


@pytest.mark.parametrize("build", EXAMPLES, ids=lambda build: build.__name__)
def test_the_example_of_each_rule_builds_it(build):
    assert callable(build(**yaml.safe_load(f"{{{EXAMPLES[build]}}}")))


# Stages without a step.


BERT24 = ramp_by_doubling(64, "1ep", start=16)
UNLIMITED = {"most_rows": None, "maximum": None}


def begins(rule, *, rows, epochs, maximum=None):
    """Progress before each step of training by a rule."""
    progress, steps_ahead = Progress(rows_per_epoch=rows), []
    for _ in range(epochs):
        while progress.epoch_rows < rows:
            batch = request_batch(rule, progress, maximum=maximum).after
            steps_ahead.append(progress)
            size = min(batch, rows - progress.epoch_rows)
            progress = progress.after_step(rows=size, tokens=0)
        progress = progress.after_epoch()
    return steps_ahead


def test_a_stage_after_the_end_of_training_is_reported():
    assert BERT24.unused(begins(BERT24, rows=640, epochs=2), **UNLIMITED) == []
    early = steps([16, 32, 64], ["1ep", "5ep"])
    (late,) = early.unused(begins(early, rows=640, epochs=2), **UNLIMITED)
    assert late == "batch 64 (from 5ep on) is never used: training ends before it"


def test_a_stage_shorter_than_a_step_is_refused():
    short = steps([128, 16, 64], ["100sp", "120sp"])
    with pytest.raises(
        SettingError, match=r"batch 16 \(from 100sp on\) is never used: the stage ends"
    ):
        short.unused(begins(short, rows=640, epochs=1), **UNLIMITED)


def test_stages_of_equal_batches_are_distinct_and_a_cut_stage_is_used():
    back = steps([16, 32, 16], ["1ep", "5ep"])
    assert len(back.unused(begins(back, rows=640, epochs=2), **UNLIMITED)) == 1
    cut = begins(BERT24, rows=640, epochs=2, maximum=24)
    assert BERT24.unused(cut, most_rows=None, maximum=24) == []


def test_stages_before_the_current_one_are_not_reported():
    assert BERT24.unused(begins(BERT24, rows=640, epochs=2)[25:], **UNLIMITED) == []
    assert BERT24.unused([], **UNLIMITED) == []


def test_a_stage_that_drop_last_removes_is_refused():
    ahead = begins(BERT24, rows=100, epochs=2)
    with pytest.raises(SettingError, match=r"^batch_size_schedule=64: .* use 50 or fewer"):
        BERT24.unused(ahead, most_rows=50, maximum=None)
    BERT24.unused(ahead, most_rows=50, maximum=50)
