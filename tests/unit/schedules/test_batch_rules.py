"""Checks and calls of the user's rules, and the ready-made increments."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import StepLR

from adaptive_batch.errors import GrowthFunctionError, SettingError
from adaptive_batch.schedules import (
    Progress,
    at_epochs,
    by_noise_scale,
    check_increments,
    check_rule,
    geometric,
    linear_ramp,
    next_batch_size,
    parse_reference,
    ramp_by_doubling,
    rate_rule,
    request_batch,
    schedule_factor,
    seesaw,
    steps,
)
from adaptive_batch.schedules.progress import parse_duration

ROWS = st.integers(1, 10**6)


def constant(answer):
    return lambda epoch, batch_size: answer


@given(
    before=ROWS,
    added=st.just(0) | st.integers(0, 10**9),
    maximum=st.none() | ROWS,
    epoch=st.integers(0, 10**4),
)
def test_growth_is_limited_only_by_the_maximum_and_never_shrinks_a_batch(
    before, added, maximum, epoch
):
    growth = next_batch_size(constant(added), epoch=epoch, batch_size=before, maximum=maximum)
    assert growth.requested == before + added
    cut = growth.requested if maximum is None else min(growth.requested, maximum)
    assert growth.after == max(before, cut)


@pytest.mark.parametrize(
    "answer",
    [np.int64(8), np.uint8(8), np.array(8), torch.tensor(8), torch.tensor(8, dtype=torch.int8)],
)
def test_integers_of_numpy_and_torch_are_rows(answer):
    growth = next_batch_size(constant(answer), epoch=0, batch_size=4, maximum=None)
    assert (growth.requested, growth.after) == (12, 12)
    assert type(growth.requested) is type(growth.after) is int


NO_ROWS = [
    *((value, repr(value)) for value in (None, 2.0, True, "8", [8], -1, 10**9 + 1)),
    *((value, repr(value)) for value in (np.float64(8), np.bool_(True), np.array([1, 2]))),
    *((value, repr(value)) for value in (torch.tensor(8.0), torch.tensor(True))),
    (torch.empty((), device="meta", dtype=torch.int64), "tensor(..., d"),
]


@pytest.mark.parametrize(("answer", "shown"), NO_ROWS, ids=[shown for _, shown in NO_ROWS])
def test_the_error_of_an_invalid_result_has_the_call(answer, shown):
    call = r"constant.<locals>.<lambda>(epoch=3, batch_size=16) returned "
    with pytest.raises(GrowthFunctionError) as caught:
        next_batch_size(constant(answer), epoch=3, batch_size=16, maximum=64)
    assert call + shown in str(caught.value)
    with pytest.raises(GrowthFunctionError) as caught:
        request_batch(lambda progress: answer, Progress(steps=7), maximum=64)
    assert "steps=7" in str(caught.value)
    assert f" returned {shown}" in str(caught.value)


def test_an_exception_of_the_function_becomes_the_cause():
    with pytest.raises(GrowthFunctionError, match="raised ZeroDivisionError") as caught:
        request_batch(lambda progress: 1 // progress.steps, Progress(), maximum=None)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@given(
    additions=st.dictionaries(st.integers(0, 50), st.integers(0, 1000), min_size=1),
    as_text=st.booleans(),
)
def test_at_epochs_adds_its_rows_at_its_epochs(additions, as_text):
    increment = at_epochs({str(key) if as_text else key: value for key, value in additions.items()})
    assert [increment(epoch, 16) for epoch in range(51)] == [
        additions.get(epoch, 0) for epoch in range(51)
    ]


@given(
    factor=st.floats(1.001, 16), every=st.integers(1, 5), epoch=st.integers(0, 10**4), before=ROWS
)
def test_geometric_multiplies_to_the_nearest_row_and_always_grows(factor, every, epoch, before):
    added = geometric(factor, every=every)(epoch, before)
    if epoch == 0 or epoch % every:
        assert added == 0
    else:
        assert added >= 1
        assert added == 1 or abs(before + added - before * factor) <= 0.5


def test_an_invalid_result_of_a_later_epoch_is_refused():
    with pytest.raises(GrowthFunctionError, match=r"\(epoch=3, batch_size=16\) returned"):
        check_increments(
            lambda epoch, batch_size: -1 if epoch == 3 else 8,
            first_epoch=0,
            epochs=5,
            batch_size=16,
        )


def test_an_answer_that_a_cut_may_make_valid_is_not_refused():
    check_increments(geometric(2), first_epoch=0, epochs=100, batch_size=16)
    check_increments(
        lambda epoch, batch_size: 32 - 2 * batch_size, first_epoch=0, epochs=5, batch_size=4
    )


def test_only_remaining_epochs_are_checked():
    asked = []
    check_increments(
        lambda epoch, batch_size: asked.append(epoch) or 1, first_epoch=2, epochs=4, batch_size=16
    )
    assert asked == [2, 3]


SCHEDULE = "batch_size_schedule"
INCREMENT = "batch_increase_function"
SGD = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def refused(key, function, *calls):
    """One case for each call, written as its arguments: a tuple, or a dict of keywords."""
    for number, call in enumerate(calls):
        yield pytest.param(key, function, call, id=f"{function.__name__}-{key}-{number}")


REFUSED = [
    # Functions that cannot be called as a rule.
    *refused(INCREMENT, check_rule, *((INCREMENT, value) for value in (3, None, "grow"))),
    *refused(SCHEDULE, check_rule, (SCHEDULE, 8)),
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
    *refused("lr_scheduler", schedule_factor, (None,), (StepLR(SGD, 2),)),
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


def test_a_factor_beyond_all_rows_is_refused_at_the_call():
    with pytest.raises(GrowthFunctionError, match=r"geometric\(factor=1e\+300, every=1\)"):
        next_batch_size(geometric(1e300), epoch=1, batch_size=4, maximum=None)
