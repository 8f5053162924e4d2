"""Settings that are refused, with the key that the error names."""

import math

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler, StepLR

from adaptive_batch.errors import GrowthFunctionError, SettingError
from adaptive_batch.schedules import (
    Clock,
    Progress,
    at_epochs,
    by_noise_scale,
    check_increment,
    check_schedule,
    geometric,
    linear_ramp,
    next_batch_size,
    parse_reference,
    ramp_by_doubling,
    rate_rule,
    scale_learning_rate,
    schedule_factor,
    seesaw,
    steps,
)
from adaptive_batch.schedules.progress import parse_duration

SCHEDULE = "batch_size_schedule"
INCREMENT = "batch_increase_function"
SGD = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


class Wrapper:
    """A scheduler in the wrapper of accelerate or Lightning."""

    def __init__(self, scheduler: LRScheduler):
        self.scheduler = scheduler


def refused(key, function, *calls):
    """One case for each call, written as its arguments: a tuple, or a dict of keywords."""
    for number, call in enumerate(calls):
        yield pytest.param(key, function, call, id=f"{function.__name__}-{key}-{number}")


REFUSED = [
    # Functions that cannot be called as a rule.
    *refused(
        INCREMENT,
        check_increment,
        *((value,) for value in (3, None, "grow", lambda: 1, lambda epoch: 1)),
        (lambda a, b, c: 1,),
        (lambda *, epoch, batch_size: 1,),
        (lambda epoch, batch_size, *, factor: 1,),
    ),
    *refused(SCHEDULE, check_schedule, (8,), (lambda: 8,), (lambda epoch, batch_size: 8,)),
    # Increments.
    *refused(
        f"{INCREMENT}.additions",
        at_epochs,
        *((value,) for value in ({}, None, [1, 8], {-1: 8}, {1.5: 8}, {True: 8}, {"one": 8})),
        *(({1: rows},) for rows in (-8, 8.0, None, True, "8", 10**9 + 1)),
        ({"²": 8},),
        ({1: 8, "1": 4},),
    ),
    *refused(
        f"{INCREMENT}.factor",
        geometric,
        *((factor,) for factor in (1, 0.5, -2, math.nan, math.inf, True, "2", None)),
    ),
    *refused(
        f"{INCREMENT}.every",
        geometric,
        *({"factor": 2, "every": every} for every in (0, -1, 1.5, True, "2", None)),
    ),
    # Schedules.
    *refused(
        f"{SCHEDULE}.thresholds",
        steps,
        ([16, 32, 64], ["2ba", "1ba"]),
        ([16, 32, 64], ["1ep", "1.0ep"]),
        ([16, 32, 64], ["1ep", "200ba"]),
        ([16, 32], ["1ep", "2ep"]),
        *(([16, 32], thresholds) for thresholds in ([], ["0ba"], [3], "1ep")),
        ([], []),
    ),
    *refused(
        f"{SCHEDULE}.batch_sizes",
        steps,
        *((sizes, ["1ep"]) for sizes in (16, [16, 0], [16, 2.5], [16, True])),
    ),
    *(
        case
        for name, value in (
            *(("start", 0), ("end", 1.5), ("multiple_of", 0), ("multiple_of", 65)),
            *(("over", "0ep"), ("over", 10)),
        )
        for case in refused(
            f"{SCHEDULE}.{name}", linear_ramp, {"start": 16, "end": 64, "over": "1ep", name: value}
        )
    ),
    *refused(
        f"{SCHEDULE}.start",
        ramp_by_doubling,
        *((end, "1ep", start) for end, start in ((64, 24), (48, 2), (48, 96), (48, 48))),
    ),
    *refused(f"{SCHEDULE}.end", ramp_by_doubling, (7, "1ep"), (7, "1ep", 7), (0, "1ep")),
    *(
        case
        for name, value in (
            *(("start", 0), ("maximum", 8), ("maximum", 0), ("factor", 1), ("factor", math.inf)),
            *(("factor", "2"), ("margin", -0.1), ("margin", math.nan), ("margin", True)),
            *(("every", 0), ("every", 1.5), ("monotone", 1)),
        )
        for case in refused(f"{SCHEDULE}.{name}", by_noise_scale, {"start": 16, name: value})
    ),
    *refused(f"{SCHEDULE}.factor", seesaw, (1,), ("2",), (math.inf,)),
    *refused(f"{SCHEDULE}.maximum", seesaw, {"maximum": 0}, {"maximum": 2.5}),
    *refused("lr_scaling", rate_rule, (seesaw(), "linear")),
    # The learning rate.
    *refused(
        "reference_batch_size",
        lambda value: parse_reference("reference_batch_size", value),
        *((value,) for value in (0, -4, True, 64.0, "64", None)),
        *((f"{amount}tok",) for amount in ("", "0", "-1", "nan", "inf", "1e999", "many", "8k")),
    ),
    *refused(
        "lr_clock",
        Clock.from_config,
        *((value,) for value in ("epochs", 3, ["steps"], {"warmup": "rows"}, {"warm": "steps"})),
    ),
    *refused(
        "lr_scheduler", schedule_factor, (None,), (StepLR(SGD, 2),), (Wrapper(StepLR(SGD, 2)),)
    ),
    # Durations.
    *refused(
        "over",
        lambda value: parse_duration(value, key="over"),
        *((value,) for value in (100, "1.5", "", "nan", "10dur", "10 batches", "2EP", None, True)),
        *((value,) for value in (["1ep"], "ep", "1,000ba", "xep", "0ba", "-1ep", "infep", "nanba")),
        *((value,) for value in ("1e400tok", "1.5ba", "0.5sp")),
    ),
]


@pytest.mark.parametrize(("key", "function", "call"), REFUSED)
def test_the_error_names_the_key(key, function, call):
    with pytest.raises(SettingError) as caught:
        function(**call) if isinstance(call, dict) else function(*call)
    assert caught.value.key == key


def test_a_check_names_the_key_that_the_caller_gives():
    with pytest.raises(SettingError) as caught:
        check_schedule(8, key="my_key")
    assert caught.value.key == "my_key"


def test_a_start_that_does_not_double_up_is_refused_with_those_that_do():
    with pytest.raises(SettingError, match=r"give one of 3, 6, 12, 24$"):
        ramp_by_doubling(48, "1ep", start=2)


def test_a_factor_beyond_all_rows_is_refused_at_the_call():
    with pytest.raises(GrowthFunctionError, match=r"geometric\(factor=1e\+300, every=1\)"):
        next_batch_size(geometric(1e300), epoch=1, batch_size=4, maximum=None)


@pytest.mark.parametrize(
    "arguments", [(1e-3, 8, 2, "cubic"), (1e-3, 0, 2, "linear"), (1e-3, 8, 0, "sqrt")]
)
def test_a_rate_is_scaled_by_a_known_rule_between_positive_batches(arguments):
    with pytest.raises(ValueError, match=r"give one of|must be above 0"):
        scale_learning_rate(*arguments)


def test_a_seesaw_needs_a_schedule_of_the_rate():
    with pytest.raises(AssertionError):
        seesaw()(Progress())
