"""The rate of a step: scaled by its batch, and with a scheduler of the script."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from support.loops import (
    RATE,
    train,
    training,
)
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    MultiplicativeLR,
    StepLR,
)

from adaptive_batch.errors import (
    SettingError,
)
from adaptive_batch.schedules import Reference, at_epochs, steps
from adaptive_batch.training import AdaptiveRate

# --- the rate


@pytest.mark.parametrize(("rule", "power"), [("none", 0.0), ("sqrt", 0.5), ("linear", 1.0)])
def test_the_rate_follows_the_rows_of_each_step(rule, power):
    one = training(batch_size_schedule=steps([4, 8, 16], ["8sp", "24sp"]), lr_scaling=rule)
    for step in train(one):
        assert step.rate == pytest.approx(RATE * (step.result.rows / 4) ** power, rel=1e-12)


@pytest.mark.parametrize(("reference", "unit"), [(8, "rows"), ("100tok", "tokens")])
def test_the_rate_belongs_to_a_reference_of_rows_or_tokens(reference, unit):
    one = training(lr_scaling="linear", reference_batch_size=reference)
    for step in train(one):
        batch = step.result.rows / 8 if unit == "rows" else step.result.tokens / 100
        assert step.rate == pytest.approx(RATE * batch, rel=1e-12)


def test_the_time_of_a_scheduler_is_the_part_of_training_that_is_done():
    """Of 40 rows by 4, an epoch is 10 of its steps however large the batch has become."""
    one = training(batch_increase_function=at_epochs({1: 4}), schedule=lambda step: 1 / (1 + step))
    rates = [step.rate for step in train(one, epochs=2)]
    clock = [*range(10), *range(10, 20, 2)]
    assert rates == pytest.approx([RATE / (1 + step) for step in clock], rel=1e-12)


def stepped_rates(one: SimpleNamespace, after: Any = lambda step: None) -> list[float]:
    """The rate that the optimizer has at each of its steps, in a loop that calls `after` when a
    step is done.
    """
    found: list[float] = []
    one.optimizer.register_step_pre_hook(
        lambda optimizer, *_: found.append(float(optimizer.param_groups[0]["lr"]))
    )
    for number, rows in enumerate(one.loop):
        one.loop.run(rows)
        one.optimizer.step()
        one.optimizer.zero_grad()
        after(number)
    return found


def test_a_rate_that_the_script_writes_is_scaled_and_is_there_again_after_the_step():
    one = training(batch_size=8, lr_scaling="linear", reference_batch_size=4)
    (group,) = one.optimizer.param_groups

    def warm_up(number: int) -> None:
        assert group["lr"] == (RATE if number == 0 else 0.1 * number)
        group["lr"] = 0.1 * (number + 1)

    assert stepped_rates(one, warm_up) == [2 * RATE, *(2 * 0.1 * number for number in range(1, 5))]


def accelerated(scheduler: Any, optimizer: Any) -> AcceleratedScheduler:
    Accelerator(cpu=True)
    return AcceleratedScheduler(scheduler, AcceleratedOptimizer(optimizer))


@pytest.mark.parametrize(
    ("build", "factor"),
    [
        (lambda one: StepLR(one, 2, gamma=0.5), lambda step: 0.5 ** (step // 2)),
        (lambda one: MultiplicativeLR(one, lambda step: 0.5), lambda step: 0.5**step),
        (
            lambda one: CosineAnnealingLR(one, 5),
            lambda step: 0.5 * (1 + math.cos(math.pi * step / 5)),
        ),
        (lambda one: LambdaLR(one, lambda step: 1 / (1 + step)), lambda step: 1 / (1 + step)),
    ],
    ids=["StepLR", "MultiplicativeLR", "CosineAnnealingLR", "LambdaLR"],
)
@pytest.mark.parametrize(
    "wrap", [lambda scheduler, optimizer: scheduler, accelerated], ids=["plain", "accelerated"]
)
def test_a_scheduler_of_the_scripts_own_reads_and_multiplies_rates_that_are_not_scaled(
    build, factor, wrap
):
    one = training(batch_size=8, lr_scaling="linear", reference_batch_size=4)
    scheduler = wrap(build(one.optimizer), one.optimizer)
    rates = stepped_rates(one, lambda number: scheduler.step())
    assert rates == pytest.approx([2 * RATE * factor(step) for step in range(5)], rel=1e-12)


def with_scheduler(
    build: Any, wrap: Any = lambda scheduler, optimizer: scheduler, **options: Any
) -> SimpleNamespace:
    """Training whose scheduler is given to the loop, and kept for the script to step."""
    one = training()
    one.scheduler = wrap(build(one.optimizer), one.optimizer)
    wrapped = AcceleratedOptimizer(one.optimizer) if wrap is accelerated else one.optimizer
    given = {"optimizer": lambda *_, **__: wrapped, "lr_scheduler": one.scheduler, "batch_size": 8}
    one.loop = training(model=one.model, **given, **options).loop
    return one


def test_what_accelerate_wraps_is_seen_through():
    """As its scripts have it, which step both; the rate is that of the clock, however often they
    do.
    """
    factor = lambda step: 1 / (1 + step)  # noqa: E731
    one = with_scheduler(
        lambda optimizer: LambdaLR(optimizer, factor), accelerated, lr_scaling="linear"
    )
    rates = stepped_rates(one, lambda number: one.scheduler.step())
    assert rates == pytest.approx([RATE * factor(step) for step in range(5)], rel=1e-12)


def test_a_step_that_the_script_leaves_out_leaves_the_rate_as_it_is():
    one = training(batch_size=8, lr_scaling="linear", reference_batch_size=4)
    for rows in one.loop:
        one.loop.run(rows)
        assert one.loop.learning_rate == 2 * RATE
        assert one.optimizer.param_groups[0]["lr"] == RATE
        one.optimizer.zero_grad()
    one.loop.find_bound(device_memory="1GiB", maximum=2)
    assert one.optimizer.param_groups[0]["lr"] == RATE


# --- what it says of itself ---


def rate_of(**arguments):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-5)
    return AdaptiveRate(optimizer, **arguments)


@pytest.mark.parametrize("reference", [None, Reference(32, "rows"), Reference(100, "tokens")])
def test_a_rate_that_stays_says_what_scaling_would_give_where_the_batch_is_not_the_configured_one(
    reference,
):
    rate = rate_of(reference_batch_size=reference)
    assert rate.describe_unscaled(4, configured=4) is None
    line = (
        "lr 2e-05 stays, chosen for a global batch of 4, now 64: linear scaling would give 0.00032,"
        " sqrt 8e-05"
    )
    assert rate.describe_unscaled(64, configured=4) == line


def test_one_that_follows_does_not():
    rate = rate_of(lr_scaling="sqrt", reference_batch_size=4)
    assert rate.describe_unscaled(64, configured=4) is None
    assert rate.describe() == "lr 2e-05 belongs to 4 rows a step, and is scaled by the rule sqrt"


@pytest.mark.parametrize("rows", [-1, 2.5, math.nan, "8", None])
def test_rows_that_are_no_number_of_rows_are_refused(rows):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    rate = AdaptiveRate(optimizer, lr_scaling="linear", reference_batch_size=8)
    with pytest.raises(SettingError, match=r"^rows=.*set\(rows=\.\.\.\) of this step, a whole"):
        rate.set(rows=rows)


@pytest.mark.parametrize("optimizer", [None, [], "AdamW", [3]])
def test_what_is_no_optimizer_is_refused(optimizer):
    with pytest.raises(SettingError, match=r"^optimizer=.*give an optimizer, or a list of them"):
        AdaptiveRate(optimizer)


@pytest.mark.parametrize("state", [None, {}, {"clock": {}}])
def test_a_state_that_is_none_of_a_rate_is_refused(state):
    with pytest.raises(SettingError, match=r"give what state_dict\(\) of a rate returned"):
        rate_of().load_state_dict(state)
