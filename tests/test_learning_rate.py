"""The rate is recomputed from base, schedule and clock; nothing is multiplied into the optimizer."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, StepLR

from adaptive_batch.learning_rate import LearningRate, describe_unscaled, scale


def optimizer(*rates):
    return SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates])


def cosine(step):
    return 0.5 * (1 + math.cos(math.pi * step / 10))


def test_a_constant_rate_stays():
    one = optimizer(0.1)
    rate = LearningRate([one], None, batch_can_change=True)
    assert [rate.set(clock) for clock in (0.0, 1.5, 9.0)] == [0.1, 0.1, 0.1]


def test_a_lambda_schedule_gives_torchs_own_trace_at_whole_steps():
    ours, theirs = optimizer(0.1), optimizer(0.1)
    rate = LearningRate([ours], LambdaLR(ours, cosine), batch_can_change=False)
    scheduler = LambdaLR(theirs, cosine)
    for step in range(10):
        assert rate.set(float(step)) == scheduler.get_last_lr()[0]
        theirs.step()
        scheduler.step()


@given(st.lists(st.floats(0, 10), min_size=1, max_size=5))
def test_the_rate_depends_on_the_clock_alone(clocks):
    one = optimizer(0.1, 0.3)
    rate = LearningRate([one], LambdaLR(one, cosine), batch_can_change=True)
    for clock in clocks:
        rate.set(clock)
    assert [group["lr"] for group in one.param_groups] == pytest.approx(
        [0.1 * cosine(clocks[-1]), 0.3 * cosine(clocks[-1])]
    )


def test_every_optimizer_in_backward_follows_the_first_ones_schedule():
    several = [optimizer(0.1), optimizer(0.1), optimizer(0.1)]
    LearningRate(several, LambdaLR(several[0], cosine), batch_can_change=False).set(4.0)
    assert {one.param_groups[0]["lr"] for one in several} == {0.1 * cosine(4)}


def test_a_rate_that_is_a_tensor_is_filled():
    one = optimizer(0.1)
    one.param_groups[0]["lr"] = kept = torch.tensor(0.1)
    scheduler = LambdaLR(one, cosine)
    LearningRate([one], scheduler, batch_can_change=False).set(5.0)
    assert one.param_groups[0]["lr"] is kept
    assert kept.item() == pytest.approx(0.05)


def test_another_scheduler_is_stepped_once_a_step_and_warned_about(caplog):
    one = optimizer(1.0)
    rate = LearningRate([one], StepLR(one, step_size=2, gamma=0.5), batch_can_change=True)
    assert "StepLR counts optimizer steps: it cannot follow a batch that changes" in caplog.text
    one.step()
    assert [rate.set(float(clock)) for clock in range(5)] == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_scaling_follows_the_batch():
    assert scale(1e-3, 10, 2, "linear") == pytest.approx(5e-3)  # the worked example of DeepSpeed's pull request 7104
    assert scale(1e-3, 4, 2, "linear") == pytest.approx(2e-3)
    assert scale(1e-3, 8, 2, "sqrt") == pytest.approx(2e-3)
    assert scale(1e-3, 8, 2, "none") == 1e-3


@pytest.mark.parametrize("arguments", [(1e-3, 8, 2, "cubic"), (1e-3, 0, 2, "linear"), (1e-3, 8, 0, "sqrt")])
def test_scaling_by_nonsense_is_refused(arguments):
    with pytest.raises(ValueError, match=r"give one of|must be above 0"):
        scale(*arguments)


def test_a_rate_that_stays_says_what_scaling_would_give():
    line = describe_unscaled(2e-5, batch=64, reference=4)
    assert (
        line == "lr 2e-05 stays, chosen for a global batch of 4, now 64: linear scaling would give 0.00032, sqrt 8e-05"
    )
