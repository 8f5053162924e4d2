import functools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.errors import GrowthFunctionError, SettingError
from adaptive_batch.schedules import (
    at_epochs,
    check_increment,
    check_increments,
    geometric,
    next_batch_size,
)
from adaptive_batch.schedules.batch_rules import ClampedBatch

rows = st.integers(1, 10**6)
bounds = st.none() | st.integers(1, 10**6)
epochs = st.integers(0, 10**4)


def by(answer):
    """An increment that always gives this answer."""
    return lambda epoch, batch_size: answer


# next_batch_size


@given(before=rows, added=st.integers(0, 10**9), maximum=bounds, epoch=epochs)
def test_growth_never_shrinks_and_passes_neither_request_nor_bound(before, added, maximum, epoch):
    growth = next_batch_size(by(added), epoch=epoch, batch_size=before, maximum=maximum)
    assert growth.requested == before + added
    assert before <= growth.after <= growth.requested
    assert maximum is None or growth.after <= max(maximum, before)


@given(before=rows, added=st.integers(0, 10**9), maximum=bounds)
def test_growth_is_cut_only_by_the_bound(before, added, maximum):
    growth = next_batch_size(by(added), epoch=1, batch_size=before, maximum=maximum)
    was_cut = growth.after != growth.requested
    assert was_cut == (added > 0 and maximum is not None and before + added > maximum)
    assert not was_cut or growth.after == max(before, maximum)


@given(before=rows, maximum=st.integers(1, 10**6), added=st.integers(0, 10**6))
def test_a_batch_above_the_bound_is_kept(before, maximum, added):
    growth = next_batch_size(by(added), epoch=3, batch_size=maximum + before, maximum=maximum)
    assert growth.after == maximum + before


@pytest.mark.parametrize(
    ("before", "batch", "line"),
    [
        (16, ClampedBatch(40, 24, 24), "batch_size 16 -> 24 (asked for 40, cut to the bound 24)"),
        (16, ClampedBatch(24, 24, 24), "batch_size 16 -> 24"),
        (16, ClampedBatch(16, 16, None), "batch_size 16 unchanged"),
        (
            24,
            ClampedBatch(40, 24, 24),
            "batch_size 24 unchanged (asked for 40, cut to the bound 24)",
        ),
        (
            24,
            ClampedBatch(40, 24, 8),
            "batch_size 24 unchanged (asked for 40, already above the bound 8)",
        ),
        (24, ClampedBatch(24, 24, 8), "batch_size 24 unchanged"),
    ],
)
def test_what_was_decided_is_one_line(before, batch, line):
    assert batch.describe(before) == line


@pytest.mark.parametrize(
    "answer",
    [np.int64(8), np.uint8(8), np.array(8), torch.tensor(8), torch.tensor(8, dtype=torch.int8)],
)
def test_whole_numbers_of_numpy_and_torch_are_rows(answer):
    growth = next_batch_size(by(answer), epoch=0, batch_size=4, maximum=None)
    assert (growth.requested, growth.after) == (12, 12)
    assert type(growth.requested) is type(growth.after) is int


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (None, "None"),
        (2.0, "2.0"),
        (float("nan"), "nan"),
        (True, "True"),
        (False, "False"),
        ("8", "'8'"),
        ([8], "[8]"),
        (-1, "-1"),
        (10**9 + 1, "1000000001"),
        pytest.param(10**5000, "a number of 16610 bits", id="10**5000"),
        (np.float64(8), "np.float64(8.0)"),
        (np.bool_(True), "np.True_"),
        (np.array([1, 2]), "array([1, 2])"),
        (torch.tensor(8.0), "tensor(8.)"),
        (torch.tensor(True), "tensor(True)"),
        (torch.empty((), device="meta", dtype=torch.int64), "tensor(..., d"),
    ],
)
def test_an_answer_that_is_no_row_count_is_named_with_epoch_and_batch_size(answer, shown):
    with pytest.raises(GrowthFunctionError) as caught:
        next_batch_size(by(answer), epoch=3, batch_size=16, maximum=64)
    message = str(caught.value)
    assert "by.<locals>.<lambda>(epoch=3, batch_size=16) returned " + shown in message
    assert message.endswith(
        "it must return how many rows to add to batch_size: a whole number, 0 to 1000000000"
    )


def test_an_error_of_the_function_becomes_the_cause():
    def increment(epoch, batch_size):
        return [1, 2][epoch]

    with pytest.raises(
        GrowthFunctionError, match=r"increment\(epoch=2, batch_size=16\) raised IndexError: "
    ) as caught:
        next_batch_size(increment, epoch=2, batch_size=16, maximum=64)
    assert isinstance(caught.value.__cause__, IndexError)


def test_stopping_the_program_is_no_error_of_the_function():
    def increment(epoch, batch_size):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next_batch_size(increment, epoch=2, batch_size=16, maximum=64)


# check_increment


class Rule:
    def __call__(self, epoch, batch_size):
        return 1


@pytest.mark.parametrize(
    "function",
    [
        lambda epoch, batch_size: 1,
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
def test_what_takes_two_positional_arguments_is_an_increment(function):
    check_increment(function)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (3, "give a function f(epoch, batch_size) -> rows to add"),
        (None, "give a function f(epoch, batch_size) -> rows to add"),
        ("grow", "give a function f(epoch, batch_size) -> rows to add"),
        (lambda: 1, "give a function f(epoch, batch_size) -> rows to add, of positional arguments"),
        (
            lambda epoch: 1,
            "give a function f(epoch, batch_size) -> rows to add, of positional arguments",
        ),
        (
            lambda a, b, c: 1,
            "give a function f(epoch, batch_size) -> rows to add, of positional arguments",
        ),
        (
            lambda *, epoch, batch_size: 1,
            "give a function f(epoch, batch_size) -> rows to add, of positional arguments",
        ),
        (
            lambda epoch, batch_size, *, factor: 1,
            "give a function f(epoch, batch_size) -> rows to add, of positional arguments",
        ),
    ],
)
def test_what_does_not_is_refused_with_key_and_remedy(function, said):
    with pytest.raises(SettingError) as caught:
        check_increment(function)
    assert caught.value.key == "batch_increase_function"
    assert said in str(caught.value)


# at_epochs


@given(
    additions=st.dictionaries(st.integers(0, 50), st.integers(0, 1000), min_size=1),
    as_text=st.booleans(),
)
def test_at_epochs_adds_up_to_the_sum_of_its_additions(additions, as_text):
    increment = at_epochs({str(key) if as_text else key: value for key, value in additions.items()})
    batch_size = 4
    for epoch in range(51):
        batch_size = next_batch_size(
            increment, epoch=epoch, batch_size=batch_size, maximum=None
        ).after
    assert batch_size == 4 + sum(additions.values())


def test_at_epochs_adds_at_the_given_epochs_alone():
    increment = at_epochs({0: 2, "3": 8})
    assert [increment(epoch, 16) for epoch in range(5)] == [2, 0, 0, 8, 0]


@pytest.mark.parametrize(
    ("additions", "said"),
    [
        ({}, "give rows to add by epoch"),
        (None, "give rows to add by epoch"),
        ([1, 8], "give rows to add by epoch"),
        ({-1: 8}, "epoch -1 and rows 8 must be whole numbers"),
        ({1.5: 8}, "epoch 1.5 and rows 8 must be whole numbers"),
        ({True: 8}, "epoch True and rows 8 must be whole numbers"),
        ({"one": 8}, "epoch 'one' and rows 8 must be whole numbers"),
        ({"²": 8}, "epoch '²' and rows 8 must be whole numbers"),
        ({1: -8}, "epoch 1 and rows -8 must be whole numbers"),
        ({1: 8.0}, "epoch 1 and rows 8.0 must be whole numbers"),
        ({1: None}, "epoch 1 and rows None must be whole numbers"),
        ({1: True}, "epoch 1 and rows True must be whole numbers"),
        ({1: "8"}, "epoch 1 and rows '8' must be whole numbers"),
        ({1: 10**9 + 1}, "epoch 1 and rows 1000000001 must be whole numbers"),
        ({1: 8, "1": 4}, "epoch 1 is given twice"),
    ],
)
def test_at_epochs_refuses_what_cannot_be_meant(additions, said):
    with pytest.raises(SettingError) as caught:
        at_epochs(additions)
    assert caught.value.key == "batch_increase_function.additions"
    assert said in str(caught.value)


# geometric


@given(factor=st.floats(1.001, 16), every=st.integers(1, 5), epoch=epochs, before=rows)
def test_geometric_multiplies_to_the_nearest_row_and_always_grows(factor, every, epoch, before):
    added = geometric(factor, every=every)(epoch, before)
    if epoch == 0 or epoch % every:
        assert added == 0
    else:
        assert added >= 1
        assert added == 1 or abs(before + added - before * factor) <= 0.5


@pytest.mark.parametrize("factor", [1, 1.0, 0.5, -2, float("nan"), float("inf"), True, "2", None])
def test_geometric_refuses_a_factor_that_does_not_grow(factor):
    with pytest.raises(
        SettingError, match=r"batch_increase_function\.factor=.*: must be a number above 1"
    ):
        geometric(factor)


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2", None])
def test_geometric_refuses_a_period_that_is_no_number_of_epochs(every):
    with pytest.raises(
        SettingError, match=r"batch_increase_function\.every=.*: must be a whole number, 1 to"
    ):
        geometric(2, every=every)


def test_a_factor_beyond_all_rows_is_refused_when_it_is_asked():
    with pytest.raises(
        GrowthFunctionError,
        match=r"geometric\(factor=1e\+300, every=1\)\(epoch=1, batch_size=4\) returned",
    ):
        next_batch_size(geometric(1e300), epoch=1, batch_size=4, maximum=None)


def test_ready_made_increments_say_what_they_are_and_can_be_pickled():
    for increment, text in [
        (at_epochs({"4": 16, 2: 8}), "at_epochs({2: 8, 4: 16})"),
        (geometric(2, every=3), "geometric(factor=2.0, every=3)"),
    ]:
        assert repr(increment) == text
        assert pickle.loads(pickle.dumps(increment)) == increment


# answers that are asked for before it is known what fits


@pytest.mark.parametrize("answer", [-1, 4.0, None, True, 10**12], ids=repr)
def test_a_later_answer_is_refused_too(answer):
    with pytest.raises(GrowthFunctionError, match=r"\(epoch=3, batch_size=16\) returned"):
        check_increments(
            lambda epoch, batch_size: answer if epoch == 3 else 8,
            first_epoch=0,
            epochs=5,
            batch_size=16,
        )


def test_an_answer_that_a_cut_may_make_good_is_not_refused():
    check_increments(geometric(2), first_epoch=0, epochs=100, batch_size=16)
    check_increments(
        lambda epoch, batch_size: 32 - 2 * batch_size, first_epoch=0, epochs=5, batch_size=4
    )


def test_answers_are_asked_of_a_copy_for_the_epochs_that_are_ahead_alone():
    asked = []
    check_increments(
        lambda epoch, batch_size: asked.append(epoch) or 1, first_epoch=2, epochs=4, batch_size=16
    )
    assert asked == [2, 3]
