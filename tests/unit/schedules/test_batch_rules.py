"""Checks and calls of the user's rules, and the ready-made increments."""

import functools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.errors import GrowthFunctionError
from adaptive_batch.schedules import (
    ClampedBatch,
    Progress,
    at_epochs,
    check_increment,
    check_increments,
    check_schedule,
    geometric,
    next_batch_size,
    request_batch,
)

ROWS = st.integers(1, 10**6)


def constant(answer):
    return lambda epoch, batch_size: answer


@given(
    before=ROWS,
    added=st.just(0) | st.integers(0, 10**9),
    maximum=st.none() | ROWS,
    epoch=st.integers(0, 10**4),
)
def test_growth_is_cut_only_by_the_maximum_and_never_shrinks(before, added, maximum, epoch):
    growth = next_batch_size(constant(added), epoch=epoch, batch_size=before, maximum=maximum)
    assert growth.requested == before + added
    cut = growth.requested if maximum is None else min(growth.requested, maximum)
    assert growth.after == max(before, cut)


@given(requested=st.integers(1, 10**9), maximum=st.none() | ROWS)
def test_a_schedule_is_cut_only_by_the_maximum(requested, maximum):
    batch = request_batch(lambda progress: requested, Progress(), maximum=maximum)
    assert batch == ClampedBatch(requested, min(requested, maximum or requested), maximum)


@pytest.mark.parametrize(
    ("before", "batch", "line"),
    [
        (16, ClampedBatch(40, 24, 24), "batch_size 16 -> 24 (asked for 40, cut to the bound 24)"),
        (16, ClampedBatch(24, 24, 24), "batch_size 16 -> 24"),
        (16, ClampedBatch(16, 16, None), "batch_size 16 unchanged"),
        (
            24,
            ClampedBatch(40, 24, 8),
            "batch_size 24 unchanged (asked for 40, already above the bound 8)",
        ),
        (24, ClampedBatch(24, 24, 8), "batch_size 24 unchanged"),
    ],
)
def test_a_change_is_described_in_one_line(before, batch, line):
    assert batch.describe(before) == line


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
    (10**5000, "a number of 16610 bits"),
    (torch.empty((), device="meta", dtype=torch.int64), "tensor(..., d"),
]


@pytest.mark.parametrize(("answer", "shown"), NO_ROWS, ids=[shown for _, shown in NO_ROWS])
def test_an_invalid_answer_is_shown_with_the_call(answer, shown):
    call = r"constant.<locals>.<lambda>(epoch=3, batch_size=16) returned "
    with pytest.raises(GrowthFunctionError) as caught:
        next_batch_size(constant(answer), epoch=3, batch_size=16, maximum=64)
    assert call + shown in str(caught.value)
    with pytest.raises(GrowthFunctionError) as caught:
        request_batch(lambda progress: answer, Progress(steps=7), maximum=64)
    assert "steps=7" in str(caught.value)
    assert f" returned {shown}" in str(caught.value)


def test_a_schedule_may_not_return_zero():
    with pytest.raises(GrowthFunctionError):
        request_batch(lambda progress: 0, Progress(), maximum=None)


def test_an_error_of_the_function_becomes_the_cause():
    with pytest.raises(GrowthFunctionError, match="raised ZeroDivisionError") as caught:
        request_batch(lambda progress: 1 // progress.steps, Progress(), maximum=None)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_keyboard_interrupts_pass_through():
    def increment(epoch, batch_size):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next_batch_size(increment, epoch=2, batch_size=16, maximum=64)


class Rule:
    def __call__(self, epoch, batch_size):
        return 1


@pytest.mark.parametrize(
    "function",
    [
        lambda *numbers: 1,
        lambda epoch, batch_size, extra=3, *, key=None: 1,
        Rule(),
        Rule().__call__,
        functools.partial(lambda step, epoch, batch_size: 1, 8),
        max,  # a builtin without a signature
        divmod,
        at_epochs({1: 8}),
        geometric(2),
    ],
)
def test_two_positional_arguments_make_an_increment(function):
    check_increment(function)


@pytest.mark.parametrize("rule", [len, lambda progress, other=1: 8, lambda *args: 8])
def test_one_positional_argument_makes_a_schedule(rule):
    check_schedule(rule)


# Increments.


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


def test_ready_made_increments_have_a_repr_and_can_be_pickled():
    for increment, text in [
        (at_epochs({"4": 16, 2: 8}), "at_epochs({2: 8, 4: 16})"),
        (geometric(2, every=3), "geometric(factor=2.0, every=3)"),
    ]:
        assert repr(increment) == text
        assert pickle.loads(pickle.dumps(increment)) == increment


# Increments are checked before the maximum batch size is known.


@pytest.mark.parametrize("answer", [-1, 4.0, None, True, 10**12], ids=repr)
def test_an_invalid_answer_of_a_later_epoch_is_refused(answer):
    with pytest.raises(GrowthFunctionError, match=r"\(epoch=3, batch_size=16\) returned"):
        check_increments(
            lambda epoch, batch_size: answer if epoch == 3 else 8,
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
