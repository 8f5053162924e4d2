"""Ready-made schedules: pure functions of progress, by hand values and for all progress."""

import math
import pickle
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.errors import GrowthFunctionError, SettingError
from adaptive_batch.schedules import (
    EXAMPLES,
    ClampedBatch,
    Progress,
    batch_schedules,
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


@pytest.mark.parametrize(
    ("sizes", "thresholds", "says"),
    [
        ([16, 32, 64], ["2ba", "1ba"], "they must rise, and 1ba comes after 2ba"),
        ([16, 32, 64], ["1ep", "1.0ep"], "they must rise, and 1ep comes after 1ep"),
        ([16, 32], ["1ep", "2ep"], "2 batch_sizes: give one threshold fewer"),
        ([16, 32], [], "2 batch_sizes: give one threshold fewer"),
        ([16, 32, 64], ["1ep", "200ba"], "give all in one unit"),
        ([16, 32], ["0ba"], "with a finite number above 0"),
        ([16, 32], [3], "give a number with a unit"),
        ([16, 32], "1ep", "give a list"),
        (16, ["1ep"], "give a list"),
        ([], [], "0 batch_sizes: give one threshold fewer"),
        ([16, 0], ["1ep"], "must be a whole number, 1 to"),
        ([16, 2.5], ["1ep"], "must be a whole number, 1 to"),
        ([16, True], ["1ep"], "must be a whole number, 1 to"),
    ],
)
def test_stages_that_make_no_sense_are_refused(sizes, thresholds, says):
    with pytest.raises(
        SettingError, match=r"^batch_size_schedule\.(batch_sizes|thresholds)="
    ) as caught:
        steps(sizes, thresholds)
    assert says in str(caught.value)


# linear_ramp


def test_a_ramp_goes_straight_and_is_rounded_down():
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
def test_between_multiples_each_holds_for_an_equal_part_as_in_megatron(start, more, size, each):
    """One increment each `each` samples: start + (samples // each) x increment."""
    rule = linear_ramp(start * size, (start + more) * size, f"{more * each}sp", multiple_of=size)
    for samples in range(0, (more + 1) * each, max(1, each // 3)):
        assert rule(at(samples=samples)) == min(start + more, start + samples // each) * size


@given(start=batches, end=batches, over=st.integers(1, 10**7), data=st.data())
def test_a_ramp_stays_between_its_ends_and_never_turns(start, end, over, data):
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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"start": 0}, "start=0: must be a whole number"),
        ({"end": 1.5}, "end=1.5: must be a whole number"),
        ({"multiple_of": 0}, "multiple_of=0: must be a whole number"),
        ({"multiple_of": 65}, "multiple_of=65: must not be above start=16 and end=64"),
        ({"over": "0ep"}, "over='0ep': write it such as 2ep, with a finite number above 0"),
        ({"over": 10}, "over=10: give a number with a unit"),
    ],
)
def test_a_ramp_that_makes_no_sense_is_refused(arguments, says):
    with pytest.raises(SettingError) as caught:
        linear_ramp(**{"start": 16, "end": 64, "over": "1ep", **arguments})
    assert f"batch_size_schedule.{says}" in str(caught.value)


# ramp_by_doubling


def test_the_ramp_of_bert24_doubles_at_even_parts():
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


def test_it_starts_from_the_smallest_batch_that_doubles_up_to_the_last():
    assert ramp_by_doubling(48, "1ep").batches == (3, 6, 12, 24, 48)
    assert trace(ramp_by_doubling(8, "3ba"), 5) == [1, 2, 4, 8, 8]


@given(
    odd=st.integers(0, 50), doublings=st.integers(1, 10), less=st.data(), over=st.integers(1, 5000)
)
def test_each_stage_divides_the_last_batch_and_has_an_equal_part(odd, doublings, less, over):
    end = (2 * odd + 1) << doublings
    stages = less.draw(st.integers(1, doublings))
    rule = ramp_by_doubling(end, f"{over * stages}ba", start=end >> stages)
    answers = [rule(at(step)) for step in range(0, over * (stages + 1), over)]
    assert answers == [end >> (stages - stage) for stage in range(stages + 1)] == list(rule.batches)
    assert [rule(at(step - 1)) for step in range(over, over * (stages + 1), over)] == answers[:-1]
    assert all(end % answer == 0 for answer in answers)


@pytest.mark.parametrize(
    ("end", "start", "says"),
    [
        (64, 24, "start=24: doubling it never gives end=64; give one of 1, 2, 4, 8, 16, 32"),
        (48, 2, "start=2: doubling it never gives end=48; give one of 3, 6, 12, 24"),
        (48, 96, "start=96: doubling it never gives end=48; give one of 3, 6, 12, 24"),
        (48, 48, "start=48: doubling it never gives end=48; give one of 3, 6, 12, 24"),
        (7, None, "end=7: it is odd"),
        (7, 7, "end=7: it is odd"),
        (0, None, "end=0: must be a whole number"),
    ],
)
def test_a_start_that_does_not_double_up_is_refused_with_those_that_do(end, start, says):
    with pytest.raises(SettingError) as caught:
        ramp_by_doubling(end, "1ep", start=start)
    assert f"batch_size_schedule.{says}" in str(caught.value)


# by_noise_scale


def test_it_keeps_what_it_has_while_nothing_is_known_and_decides_at_its_steps_only():
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


def test_it_grows_above_the_margin_and_shrinks_only_if_it_may():
    monotone, both = by_noise_scale(16, every=1), by_noise_scale(16, every=1, monotone=False)
    cases = {24.0: 16, 24.1: 32, 5.34: 16, 5.3: 8}
    for noise, expected in cases.items():
        progress = at(5, batch=16, noise_scale=noise)
        assert both(progress) == expected
        assert monotone(progress) == max(16, expected)


def test_its_own_maximum_is_kept_and_a_batch_above_it_stays():
    rule = by_noise_scale(16, maximum=24, every=1)
    assert [rule(at(1, batch=batch, noise_scale=1e9)) for batch in (16, 24, 30)] == [24, 24, 30]


@given(batch=batches, factor=st.floats(1.01, 8), margin=st.floats(0, 3), noise=st.floats(1e-3, 1e7))
def test_a_change_is_not_taken_back_at_the_same_noise_scale(batch, factor, margin, noise):
    rule = by_noise_scale(batch, factor=factor, margin=margin, every=1, monotone=False)
    sizes = [batch]
    for step in range(1, 200):
        sizes.append(rule(at(step, batch=sizes[-1], noise_scale=noise)))
        if sizes[-1] == sizes[-2]:
            break
    assert sizes == sorted(sizes) or sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == rule(at(999, batch=sizes[-1], noise_scale=noise)) >= 1 or len(sizes) == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("start", 0),
        ("maximum", 8),
        ("maximum", 0),
        ("factor", 1),
        ("factor", math.inf),
        ("factor", "2"),
        ("margin", -0.1),
        ("margin", math.nan),
        ("margin", True),
        ("every", 0),
        ("every", 1.5),
        ("monotone", 1),
    ],
)
def test_numbers_that_make_no_sense_are_refused(name, value):
    with pytest.raises(SettingError) as caught:
        by_noise_scale(**{"start": 16, name: value})
    assert caught.value.key == f"batch_size_schedule.{name}"


# all rules

RULES = [
    steps([16, 32], ["2ba"]),
    linear_ramp(16, 64, "1.5e6tok", 8),
    ramp_by_doubling(64, "0.5ep"),
    by_noise_scale(16, maximum=64, monotone=False),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_rule_says_how_it_was_made_and_crosses_processes(rule):
    assert eval(repr(rule), vars(batch_schedules)) == rule == pickle.loads(pickle.dumps(rule))
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


def test_only_a_rule_that_follows_measurements_says_so():
    assert [needs_noise_scale(rule) for rule in RULES] == [False, False, False, True]
    assert not needs_noise_scale(lambda progress: 8)


# ask


@given(requested=st.integers(1, 10**9), maximum=st.none() | st.integers(1, 10**6))
def test_what_is_asked_for_is_cut_by_the_bound_alone(requested, maximum):
    asked = request_batch(lambda progress: requested, at(), maximum=maximum)
    assert asked == ClampedBatch(requested, min(requested, maximum or requested), maximum)


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (0, "0"),
        (-1, "-1"),
        (10**9 + 1, "1000000001"),
        (2.0, "2.0"),
        (True, "True"),
        (None, "None"),
        ("8", "'8'"),
    ],
)
def test_an_answer_that_is_no_batch_is_named_with_rule_and_progress(answer, shown):
    with pytest.raises(GrowthFunctionError) as caught:
        request_batch(lambda progress: answer, at(7), maximum=64)
    message = str(caught.value)
    assert message.startswith("batch_size_schedule ")
    assert "<lambda>(Progress(epoch=0, epoch_rows=0, steps=7" in message
    assert (
        f" returned {shown}: it must return what a step on one device holds: a whole number, 1 to"
        " 1000000000" in message
    )


def test_an_error_of_the_rule_becomes_the_cause():
    with pytest.raises(GrowthFunctionError, match="raised ZeroDivisionError") as caught:
        request_batch(lambda progress: 1 // progress.steps, at(), maximum=None)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    "rule", [len, lambda progress: 8, lambda progress, other=1: 8, lambda *args: 8]
)
def test_what_takes_one_argument_is_a_schedule(rule):
    check_schedule(rule)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (8, "it is a int"),
        (lambda: 8, "it takes ()"),
        (lambda epoch, batch_size: 8, "it takes (epoch, batch_size)"),
    ],
)
def test_what_cannot_be_called_with_progress_is_refused(rule, says):
    with pytest.raises(SettingError, match=r"^my_key=") as caught:
        check_schedule(rule, key="my_key")
    assert says in str(caught.value)


@pytest.mark.parametrize("build", EXAMPLES, ids=lambda build: build.__name__)
def test_what_is_given_as_an_example_builds(build):
    assert callable(build(**yaml.safe_load(f"{{{EXAMPLES[build]}}}")))


# stages that no step has


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


def test_a_stage_that_training_ends_before_is_named():
    assert BERT24.unused(begins(BERT24, rows=640, epochs=2), **UNLIMITED) == []
    early = steps([16, 32, 64], ["1ep", "5ep"])
    (late,) = early.unused(begins(early, rows=640, epochs=2), **UNLIMITED)
    assert late == "no step has batch 64, asked for from 5ep on: training ends before it"


def test_a_stage_that_is_too_short_for_a_step_is_refused():
    short = steps([128, 16, 64], ["100sp", "120sp"])
    with pytest.raises(
        SettingError, match="no step has batch 16, asked for from 100sp on: that is over before"
    ):
        short.unused(begins(short, rows=640, epochs=1), **UNLIMITED)


def test_equal_batches_are_stages_of_their_own_and_a_cut_is_no_absence():
    back = steps([16, 32, 16], ["1ep", "5ep"])
    assert len(back.unused(begins(back, rows=640, epochs=2), **UNLIMITED)) == 1
    cut = begins(BERT24, rows=640, epochs=2, maximum=24)
    assert BERT24.unused(cut, most_rows=None, maximum=24) == []


def test_what_lies_behind_is_not_looked_for():
    assert BERT24.unused(begins(BERT24, rows=640, epochs=2)[25:], **UNLIMITED) == []
    assert BERT24.unused([], **UNLIMITED) == []


def test_a_stage_that_drop_last_drops_whole_is_refused():
    ahead = begins(BERT24, rows=100, epochs=2)
    with pytest.raises(
        SettingError, match=r"^batch_size_schedule=64: 64 rows on each device .*ask for 50 or fewer"
    ):
        BERT24.unused(ahead, most_rows=50, maximum=None)
    BERT24.unused(ahead, most_rows=50, maximum=50)
