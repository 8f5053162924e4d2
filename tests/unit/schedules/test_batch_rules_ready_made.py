"""Ready-made schedules, as pure functions of progress."""

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR

from adaptive_batch import AdaptiveLoop, Sampling, StepOptions
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import (
    Progress,
    at_epochs,
    batch_rules,
    by_noise_scale,
    geometric,
    linear_ramp,
    ramp_by_doubling,
    request_batch,
    seesaw,
    steps,
)

batches = st.integers(1, 4096)


def at(steps=0, **values):
    return Progress(steps=steps, **values)


@given(st.lists(batches, min_size=1, max_size=8), st.data())
def test_each_stage_begins_at_its_threshold(sizes, data):
    ends = sorted(
        data.draw(st.sets(st.integers(1, 500), min_size=len(sizes) - 1, max_size=len(sizes) - 1))
    )
    rule = steps(sizes, [f"{end}ba" for end in ends])
    step = data.draw(st.integers(0, 600))
    stage = sum(end <= step for end in ends)
    assert rule(at(step)) == sizes[stage] == rule.batches[rule.stage(at(step))]


@given(
    start=st.integers(1, 60),
    more=st.integers(1, 60),
    size=st.integers(1, 16),
    each=st.integers(1, 50),
)
def test_a_ramp_between_multiples_is_that_of_megatron(start, more, size, each):
    """The batch grows each `each` samples: start + (samples // each) x increment."""
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


def test_by_noise_scale_keeps_its_maximum_and_a_batch_above_it():
    rule = by_noise_scale(16, maximum=24, every=1)
    assert [rule(at(1, batch=batch, noise_scale=1e9)) for batch in (16, 24, 30)] == [24, 24, 30]


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


RULES = [
    steps([16, 32], ["2ba"]),
    linear_ramp(16, 64, "1.5e6tok", 8),
    ramp_by_doubling(64, "0.5ep"),
    by_noise_scale(16, maximum=64, monotone=False),
]


@pytest.mark.parametrize(
    "rule", [*RULES, at_epochs({"4": 16, 2: 8}), geometric(2, every=3)], ids=repr
)
def test_the_repr_of_a_rule_builds_it_and_it_can_be_pickled(rule):
    assert eval(repr(rule), vars(batch_rules)) == rule == pickle.loads(pickle.dumps(rule))


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


def test_a_stage_after_the_end_is_reported_and_one_without_a_step_is_refused():
    assert BERT24.unused(begins(BERT24, rows=640, epochs=2), **UNLIMITED) == []
    early = steps([16, 32, 64], ["1ep", "5ep"])
    (late,) = early.unused(begins(early, rows=640, epochs=2), **UNLIMITED)
    assert late == "batch 64 (from 5ep on) is never used: training ends before it"
    short = steps([128, 16, 64], ["100sp", "120sp"])
    says = r"batch 16 \(from 100sp on\) is never used: the stage ends"
    with pytest.raises(SettingError, match=says):
        short.unused(begins(short, rows=640, epochs=1), **UNLIMITED)
    ahead = begins(BERT24, rows=100, epochs=2)
    with pytest.raises(SettingError, match=r"^batch_size_schedule=64: .* use 50 or fewer"):
        # drop_last removes every step of the stage.
        BERT24.unused(ahead, most_rows=50, maximum=None)
    BERT24.unused(ahead, most_rows=50, maximum=50)


ROWS, BATCH = 8192, 8
TOTAL = ROWS // BATCH  # steps of the constant batch


def half_cosine(warmup=0):
    """Linear warm-up, then half a cosine to 0."""

    def factor(step):
        if step < warmup:
            return step / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (TOTAL - warmup)))

    return factor


def two_cycles(step):
    return 0.5 * (1 + math.cos(math.pi * 4 * step / TOTAL)) * 0.9 + 0.1


class Rows:
    """Rows of `tokens(row)` tokens."""

    def __init__(self, rows=ROWS, tokens=lambda row: 1):
        self._rows, self._tokens = rows, tokens

    def __len__(self):
        return self._rows

    def __getitem__(self, row):
        return {"tokens": [1] * self._tokens(row)}


def loop_of(schedule, *, factor=None, maximum=None, rows=None, **settings):
    """Return a loop and its optimizer for a model of one weight."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"lr_scheduler": LambdaLR(optimizer, schedule), **settings}
    loop = AdaptiveLoop(
        model,
        optimizer,
        rows or Rows(),
        collate=lambda some: torch.ones(len(some), 1),
        mean_loss=lambda batch: model(batch).mean(),
        num_labels=len,
        batch_size=BATCH,
        batch_size_schedule=seesaw(factor, maximum),
        **settings,
    )
    return loop, optimizer


def steps_of(loop, optimizer):
    """Return (clock in constant steps, rows, rate) of each step."""
    found = []
    for rows in loop:
        done = loop.progress.samples
        loop.run(rows)
        found.append((done / BATCH, len(rows), loop.learning_rate))
        optimizer.step()
        optimizer.zero_grad()
    return found


def trained(schedule, **settings):
    return steps_of(*loop_of(schedule, **settings))


@pytest.mark.parametrize(
    "settings", [{}, {"factor": 2}, {"factor": 1.1}, {"maximum": 32}, {"factor": 2, "maximum": 48}]
)
@pytest.mark.parametrize("schedule", [half_cosine(), half_cosine(100), two_cycles])
def test_the_batch_follows_the_decay_and_the_rate_over_its_root_is_the_schedules(
    settings, schedule
):
    peak = 0.0
    factor, maximum = settings.get("factor"), settings.get("maximum", math.inf)
    *steps, last = trained(schedule, **settings)
    for clock, rows, rate in [*steps, last]:
        peak = max(peak, schedule(clock))
        growth = peak / schedule(clock) if peak else 1.0
        if factor is not None:
            growth = factor ** math.floor(math.log(growth, factor) + 1e-9)
        assert rows == min(maximum, math.floor(BATCH * growth + 0.5)) or clock == last[0]
        assert rate / math.sqrt(rows) == pytest.approx(
            0.1 * schedule(clock) / math.sqrt(BATCH), rel=1e-12, abs=1e-300
        )


def test_a_bound_caps_like_a_maximum_unless_growth_beyond_it_is_enabled():
    capped, optimizer = loop_of(half_cosine(), micro_batch_size=8)
    capped._step.sizer.max_batch_size = 32
    beyond = Sampling(grow_beyond_maximum=True)
    free, free_optimizer = loop_of(half_cosine(), micro_batch_size=8, sampling=beyond)
    free._step.sizer.max_batch_size = 32
    assert steps_of(capped, optimizer) == trained(half_cosine(), maximum=32)
    assert steps_of(free, free_optimizer) == trained(half_cosine())


def test_a_clock_in_tokens_measures_the_fraction_of_tokens():
    rows = Rows(512, tokens=lambda row: 1 + row % 7)
    total, steps, done = sum(1 + row % 7 for row in range(512)), 512 // BATCH, 0
    schedule = lambda step: 1 - step / steps  # noqa: E731
    loop, optimizer = loop_of(schedule, rows=rows, options=StepOptions(lr_clock="tokens"))
    for some in loop:
        result = loop.run(some)
        clock = done / total * steps
        assert loop.learning_rate == pytest.approx(
            0.1 * schedule(clock) * math.sqrt(len(some) / BATCH), rel=1e-9
        )
        assert len(some) == math.floor(BATCH / schedule(clock) + 0.5) or loop.progress.epoch
        done += result.tokens
        optimizer.step()
        optimizer.zero_grad()
    assert done == total


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("batch_size_schedule.maximum", {"maximum": 2}),
        ("lr_scaling", {"lr_scaling": "linear"}),
        ("lr_clock", {"options": StepOptions(lr_clock="steps")}),
        ("lr_scheduler", {"lr_scheduler": None}),
    ],
)
def test_a_loop_refuses_settings_that_contradict_a_seesaw(key, settings):
    with pytest.raises(SettingError) as caught:
        loop_of(half_cosine(), **settings)
    assert caught.value.key == key


def test_an_explicit_sqrt_rule_is_not_applied_twice():
    assert trained(half_cosine(), lr_scaling="sqrt") == trained(half_cosine())
