"""The rate of a step: scaled by its batch, and with a scheduler of the script."""

from __future__ import annotations

import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from support.loops import RATE, train, training
from torch.optim.lr_scheduler import LambdaLR

from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import ReferenceBatch, at_epochs, steps
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


def test_what_accelerate_wraps_is_seen_through():
    """As its scripts have it, which step both; the rate is that of the clock, however often they
    do.
    """

    def factor(step):
        return 1 / (1 + step)

    Accelerator(cpu=True)
    built = training()
    optimizer = AcceleratedOptimizer(built.optimizer)
    scheduler = AcceleratedScheduler(LambdaLR(built.optimizer, factor), optimizer)
    loop = training(
        model=built.model,
        optimizer=lambda *_, **__: optimizer,
        lr_scheduler=scheduler,
        batch_size=8,
        lr_scaling="linear",
    ).loop
    rates = []
    built.optimizer.register_step_pre_hook(
        lambda one, *_: rates.append(float(one.param_groups[0]["lr"]))
    )
    for rows in loop:
        loop.run(rows)
        built.optimizer.step()
        built.optimizer.zero_grad()
        scheduler.step()
    assert rates == pytest.approx([RATE * factor(step) for step in range(5)], rel=1e-12)


# --- what it says of itself ---


def rate_of(**arguments):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-5)
    return AdaptiveRate(optimizer, **arguments)


@pytest.mark.parametrize(
    "reference", [None, ReferenceBatch(32, "rows"), ReferenceBatch(100, "tokens")]
)
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
    assert rate.describe() == "lr 2e-05: chosen for 4 rows per step, scaled by sqrt"


def test_what_is_no_optimizer_no_number_of_rows_or_no_state_is_refused():
    for optimizer in (None, [], "AdamW", [3]):
        with pytest.raises(SettingError, match=r"^optimizer=.*give an optimizer, or a list of"):
            AdaptiveRate(optimizer)
    rate = rate_of(lr_scaling="linear", reference_batch_size=8)
    for rows in (-1, 2.5, math.nan, "8", None):
        with pytest.raises(SettingError, match=r"^rows=.*set\(rows=\.\.\.\) of this step, a whole"):
            rate.set(rows=rows)
    for state in (None, {}, {"clock": {}}):
        with pytest.raises(SettingError, match=r"give the result of state_dict\(\) of a rate"):
            rate.load_state_dict(state)
