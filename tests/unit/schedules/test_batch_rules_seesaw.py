"""Seesaw: when the schedule of the rate decays by a, the rate decays by sqrt(a) and the batch grows
by a.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR

from adaptive_batch import AdaptiveLoop, Sampling, StepOptions
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import relative_decay, seesaw

ROWS, BATCH = 8192, 8
TOTAL = ROWS // BATCH  # steps of the constant batch


def half_cosine(warmup=0):
    """Linear warm-up, then half a cosine to 0."""

    def factor(step):
        if step < warmup:
            return step / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (TOTAL - warmup)))

    return factor


def quarter_cosine(step):
    return math.cos(math.pi / 2 * step / TOTAL)


class Rows:
    """Rows of `tokens(row)` tokens."""

    def __init__(self, rows=ROWS, tokens=lambda row: 1):
        self._rows, self._tokens = rows, tokens

    def __len__(self):
        return self._rows

    def __getitem__(self, row):
        return {"tokens": [1] * self._tokens(row)}


def loop_of(schedule, *, factor=None, maximum=None, rows=None, model=None, **settings):
    """A loop and its optimizer around a model of one weight."""
    model = model or torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if (scheduler := settings.get("lr_scheduler")) is not None:
        optimizer = scheduler.optimizer
    settings.setdefault("lr_scheduler", LambdaLR(optimizer, schedule))
    settings.setdefault("batch_size_schedule", seesaw(factor, maximum))
    return (
        AdaptiveLoop(
            model,
            optimizer,
            rows or Rows(),
            collate=lambda some: torch.ones(len(some), 1),
            mean_loss=lambda batch: model(batch).mean(),
            num_labels=len,
            batch_size=BATCH,
            **settings,
        ),
        optimizer,
    )


def steps_of(loop, optimizer, epochs=1):
    """(clock in constant steps, rows, rate) of each step."""
    found = []
    for _ in range(epochs):
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
    ("schedule", "share"),
    [
        (half_cosine(), 1 / 2),
        (quarter_cosine, 2 / math.pi),
        (lambda step: 1 - step / TOTAL, 1 / 2),
        (half_cosine(warmup=TOTAL // 8), 1 / 8 + 7 / 8 / 2),
        (lambda step: 1.0, 1.0),
    ],
    ids=["half a cosine", "a quarter", "a line", "half a cosine after a warm-up", "constant"],
)
def test_the_number_of_steps_is_multiplied_by_the_mean_of_the_schedule(schedule, share):
    steps = trained(schedule)
    assert sum(rows for _, rows, _ in steps) == ROWS
    by_hand, done, peak = [], 0, 0.0
    while done < ROWS:
        now = schedule(done / BATCH)
        peak = max(peak, now)
        by_hand.append(min(ROWS - done, math.floor(BATCH * peak / now + 0.5) if peak else BATCH))
        done += by_hand[-1]
    assert [rows for _, rows, _ in steps] == by_hand
    # Whole rows, and a batch chosen before its step, change the number of steps a little.
    assert len(steps) == pytest.approx(TOTAL * share, abs=0.01 * TOTAL)


@pytest.mark.parametrize(
    "settings", [{}, {"factor": 2}, {"factor": 1.1}, {"maximum": 32}, {"factor": 2, "maximum": 48}]
)
@pytest.mark.parametrize("warmup", [0, 100])
def test_the_rate_over_the_root_of_the_batch_is_that_of_the_schedule_alone(settings, warmup):
    schedule = half_cosine(warmup)
    for clock, rows, rate in trained(schedule, **settings):
        assert rate / math.sqrt(rows) == pytest.approx(
            0.1 * schedule(clock) / math.sqrt(BATCH), rel=1e-12, abs=1e-300
        )


def test_with_factor_2_the_batch_doubles_each_time_the_schedule_halves():
    schedule = half_cosine()
    steps = trained(schedule, factor=2)
    grown = {}  # the first step of each batch but the last, which the end cuts
    for clock, rows, rate in steps[:-1]:
        grown.setdefault(rows, (clock, rate))
    assert list(grown) == [BATCH * 2**k for k in range(len(grown))]
    assert len(grown) >= 5
    for k, (clock, rate) in enumerate(grown.values()):
        before = max((step for step, _, _ in steps if step < clock), default=0)
        assert schedule(clock) <= 0.5**k
        assert schedule(before) > 0.5**k or not k
        # at the first step after the halving; one of the last may be a hundredth of training later
        assert rate == pytest.approx(0.1 * math.sqrt(0.5) ** k, rel=0.01 * 2**k)


def test_without_a_factor_the_batch_is_the_inverse_of_the_decay_and_the_rate_its_root():
    schedule = half_cosine()
    for clock, rows, rate in trained(schedule)[:-1]:
        decay = schedule(clock)
        assert rows == math.floor(BATCH / decay + 0.5)
        assert rate == pytest.approx(
            0.1 * math.sqrt(decay), rel=0.5 / rows
        )  # the batch is rounded by half a row at most


def test_at_the_maximum_the_rate_decays_like_the_schedule():
    schedule, most = half_cosine(), 4 * BATCH
    steps = trained(schedule, maximum=most)
    capped = [(clock, rate) for clock, rows, rate in steps if schedule(clock) < BATCH / most][:-1]
    assert len(capped) > 50
    assert {rows for clock, rows, _ in steps[:-1] if schedule(clock) < BATCH / most} == {most}
    at_cap = BATCH / most
    for clock, rate in capped:
        assert rate == pytest.approx(0.1 * math.sqrt(at_cap) * schedule(clock) / at_cap, rel=1e-12)
    # half a cosine is below a quarter in its last third: 2/3 of the rows by their mean batch, 1/3
    # by the largest one
    before = math.pi * 2 / 3
    expected = TOTAL * ((before + math.sin(before)) / (2 * math.pi) + 1 / 3 * BATCH / most)
    assert len(steps) == pytest.approx(expected, rel=0.01)


def test_a_bound_caps_like_a_maximum_unless_growth_beyond_it_is_enabled():
    capped, optimizer = loop_of(half_cosine(), micro_batch_size=8)
    capped._step.sizer.max_batch_size = 32
    beyond = Sampling(grow_beyond_maximum=True)
    free, free_optimizer = loop_of(half_cosine(), micro_batch_size=8, sampling=beyond)
    free._step.sizer.max_batch_size = 32
    assert steps_of(capped, optimizer) == trained(half_cosine(), maximum=32)
    assert steps_of(free, free_optimizer) == trained(half_cosine())


def test_two_epochs_share_one_decay():
    """Only the step at the end of the first epoch is short."""
    loop, optimizer = loop_of(half_cosine(), rows=Rows(ROWS // 2))
    steps = steps_of(loop, optimizer, epochs=2)
    assert sum(rows for _, rows, _ in steps) == ROWS
    assert len(steps) == pytest.approx(TOTAL / 2, abs=0.01 * TOTAL)
    for clock, rows, rate in steps:
        assert rate == pytest.approx(
            0.1 * half_cosine()(clock) * math.sqrt(rows / BATCH), rel=1e-12
        )


def test_the_batch_shrinks_when_the_rate_rises():
    def two_cycles(step):
        return 0.5 * (1 + math.cos(math.pi * 4 * step / TOTAL)) * 0.9 + 0.1

    for clock, rows, _ in trained(two_cycles)[:-1]:
        assert rows == math.floor(BATCH / two_cycles(clock) + 0.5)


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


def test_a_batch_in_tokens_grows_like_one_in_rows():
    schedule = lambda step: 1 - step / 128  # noqa: E731
    loop, optimizer = loop_of(
        schedule,
        rows=Rows(512, tokens=lambda row: 4),
        sampling=Sampling(batch_tokens=16),
        micro_batch_tokens=64,
    )
    for some in loop:
        clock = loop.progress.samples / 4
        loop.run(some)
        assert len(some) == math.floor(16 / schedule(clock) + 0.5) // 4 or loop.progress.epoch
        assert loop.learning_rate == pytest.approx(
            0.1 * schedule(clock) * math.sqrt(len(some) / 4), rel=1e-12
        )
        optimizer.step()
        optimizer.zero_grad()


def test_a_resumed_loop_takes_the_remaining_steps():
    whole = trained(half_cosine(100), factor=1.5)
    loop, optimizer = loop_of(half_cosine(100), factor=1.5)
    first = []
    for rows in loop:
        done = loop.progress.samples
        loop.run(rows)
        first.append((done / BATCH, len(rows), loop.learning_rate))
        optimizer.step()
        optimizer.zero_grad()
        if len(first) == 400:
            break
    resumed, optimizer = loop_of(half_cosine(100), factor=1.5)
    resumed.load_state_dict(loop.state_dict())
    assert first + steps_of(resumed, optimizer) == whole


@given(st.lists(st.floats(0, 10), min_size=1, max_size=30), st.data())
def test_the_decay_is_relative_to_the_running_maximum(values, data):
    decay = relative_decay(lambda time: values[min(int(time), len(values) - 1)])
    for time in data.draw(st.lists(st.floats(0, len(values) - 0.01), min_size=1)):
        peak = max(values[: int(time) + 1])
        assert decay(time) == (values[int(time)] / peak if peak else 1.0)


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
