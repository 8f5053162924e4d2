"""The rules that scale a rate, and a schedule as a function of the clock."""

import math

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, StepLR

from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import Reference, parse_reference, scale_learning_rate, schedule_of


def cosine(step):
    return 0.5 * (1 + math.cos(math.pi * step / 10))


class Wrapped:
    """As accelerate's and Lightning's schedulers hold the one that they step."""

    def __init__(self, scheduler):
        self.scheduler = scheduler


def test_scaling_follows_the_batch():
    assert scale_learning_rate(1e-3, 10, 2, "linear") == pytest.approx(
        5e-3
    )  # the worked example of DeepSpeed's pull request 7104
    assert scale_learning_rate(1e-3, 4, 2, "linear") == pytest.approx(2e-3)
    assert scale_learning_rate(1e-3, 8, 2, "sqrt") == pytest.approx(2e-3)
    assert scale_learning_rate(1e-3, 8, 2, "none") == 1e-3


@pytest.mark.parametrize(
    "arguments", [(1e-3, 8, 2, "cubic"), (1e-3, 0, 2, "linear"), (1e-3, 8, 0, "sqrt")]
)
def test_scaling_by_nonsense_is_refused(arguments):
    with pytest.raises(ValueError, match=r"give one of|must be above 0"):
        scale_learning_rate(*arguments)


@pytest.mark.parametrize(
    ("value", "reference", "text"),
    [
        (64, Reference(64, "rows"), "64 rows"),
        (1, Reference(1, "rows"), "1 row"),
        ("8192tok", Reference(8192, "tokens"), "8192 tokens"),
        ("1.5e6tok", Reference(1.5e6, "tokens"), "1500000 tokens"),
        ("0.5tok", Reference(0.5, "tokens"), "0.5 tokens"),
    ],
)
def test_a_reference_is_rows_or_tokens(value, reference, text):
    assert parse_reference("reference_batch_size", value) == reference
    assert str(reference) == text


TOKENS = ("", "0", "-1", "nan", "inf", "1e999", "many", "8k")


@pytest.mark.parametrize(
    "value", [0, -4, True, 64.0, "64", None, *(f"{amount}tok" for amount in TOKENS)]
)
def test_another_reference_is_refused(value):
    with pytest.raises(
        ValueError, match="give a whole number of rows, 1 or more, or tokens as in 8192tok"
    ):
        parse_reference("reference_batch_size", value)


def test_a_schedule_without_an_optimizer_is_what_multiplies_the_first_base_rate():
    one = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    factor = schedule_of(LambdaLR(one, cosine))
    assert [factor(clock) for clock in (2.5, 3.0)] == [cosine(2.5), cosine(3)]
    assert schedule_of(Wrapped(LambdaLR(one, cosine)))(4) == cosine(4)
    for scheduler, name in (
        (None, "None"),
        (StepLR(one, 2), "'StepLR'"),
        (Wrapped(StepLR(one, 2)), "'StepLR'"),
    ):
        with pytest.raises(SettingError, match=rf"^lr_scheduler={name}: .*needs a LambdaLR"):
            schedule_of(scheduler)
