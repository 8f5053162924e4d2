import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from adaptive_batch.data.planned_epoch import fill_steps
from adaptive_batch.errors import GrowthFunctionError, SettingError
from adaptive_batch.schedules import Progress, steps


def fill(lengths, max_tokens, *, order=None, **arguments):
    """Fill steps of one budget."""
    order = torch.arange(len(lengths)) if order is None else order
    return fill_steps(
        torch.tensor(lengths, dtype=torch.int64), max_tokens, order=order, **arguments
    )


def batches_of(plan):
    return [rows.tolist() for rows in torch.split(plan.rows, plan.sizes)]


@st.composite
def limits(draw, **fixed):
    min_rows = draw(st.sampled_from([1, 1, 2, 4, 6]))
    return {
        "min_rows": min_rows,
        "max_rows": draw(st.none() | st.integers(min_rows, min_rows + 40)),
        "long_rows": draw(st.sampled_from(["drop", "alone"])),
        "divisible": draw(st.booleans()),
        **fixed,
    }


@st.composite
def epochs(draw, **fixed):
    """Draw lengths, their order, arguments of a plan, and a bound of the lengths."""
    most = draw(st.sampled_from([5, 20, 100]))
    lengths = draw(st.lists(st.integers(1, most), max_size=draw(st.sampled_from([30, 300]))))
    numbers = draw(st.permutations(range(len(lengths))))
    order = torch.tensor(numbers[: draw(st.integers(0, len(lengths)))], dtype=torch.int64)
    return torch.tensor(lengths, dtype=torch.int64), order, draw(limits(**fixed)), most


@st.composite
def plans(draw, **fixed):
    """Draw lengths, their order, arguments and a budget; add the plan."""
    lengths, order, arguments, most = draw(epochs(**fixed))
    budget = draw(st.integers(max(1, most // 2), 12 * most))
    return lengths, order, arguments, budget, fill_steps(lengths, budget, order=order, **arguments)


@given(plans(divisible=True))
def test_divisible_batches_except_the_last_are_multiples_of_a_power_of_two(case):
    _, _, arguments, _, plan = case
    for size in plan.sizes[:-1]:
        part = max(1, 2 ** (math.floor(math.log2(size)) - 3))
        assert size % part == 0 or size - size % part < arguments["min_rows"]


@given(plans(divisible=False))
def test_a_batch_ends_only_if_the_next_row_would_exceed_a_limit(case):
    lengths, order, arguments, budget, plan = case
    drops = arguments["long_rows"] == "drop"
    assert plan.dropped.tolist() == [
        row for row in order.tolist() if drops and lengths[row] > budget
    ]
    for batch, following in itertools.pairwise(batches_of(plan)):
        tokens = lengths[[*batch, following[0]]]
        assert tokens.sum() > budget or len(tokens) > (arguments["max_rows"] or math.inf)


FACTS = [
    ([100, 100, 100, 10, 10, 10, 10, 100], 120, {"min_rows": 2}, [[0, 1], [2, 3, 4], [5, 6, 7]]),
    ([4, 5, 6, 7], 11, {"order": torch.tensor([3, 1])}, [[3], [1]]),
    ([], 10, {"min_rows": 2}, []),
]


@pytest.mark.parametrize(("lengths", "max_tokens", "arguments", "batches"), FACTS)
def test_a_few_rows_are_planned_as_expected(lengths, max_tokens, arguments, batches):
    assert batches_of(fill(lengths, max_tokens, **arguments)) == batches


def started(order, **values):
    return Progress(rows_per_epoch=len(order), **values)


@examples(300)
@given(plans(long_rows="alone"))
def test_a_constant_rule_has_the_plan_of_a_constant_budget(case):
    lengths, order, arguments, budget, one = case
    batches, budgets = by_rule(lengths, lambda _: budget, order, **arguments)
    assert batches == batches_of(one)
    assert budgets == [budget] * len(batches)


def hashed(low, high):
    """Return a rule with irregular changes."""

    def rule(progress):
        return low + (progress.steps // 3 * 7919 + progress.tokens // 500 * 31) % (high - low + 1)

    return rule


@examples(300)
@given(epochs(long_rows="alone"), st.data())
def test_each_row_is_used_once_within_the_budget_of_its_step(case, data):
    lengths, order, arguments, most = case
    low = data.draw(st.integers(max(1, most // 2), 4 * most))
    rule = hashed(low, low + data.draw(st.integers(0, 8 * most)))
    begin = started(order, epoch=2, steps=17, samples=1000, tokens=12345)
    batches, budgets = by_rule(lengths, rule, order, begin=begin, **arguments)
    assert [row for batch in batches for row in batch] == order.tolist()
    progress = begin
    for batch, budget in zip(batches, budgets, strict=True):
        tokens = int(lengths[batch].sum())
        assert rule(progress) == budget
        assert tokens <= budget or len(batch) <= arguments["min_rows"]
        assert len(batch) <= (arguments["max_rows"] or len(lengths))
        assert len(batch) >= arguments["min_rows"] or batch == batches[-1]
        progress = replace(progress.after_step(rows=len(batch), tokens=tokens), batch=budget)


RISING = steps([10, 20, 40], ["1ba", "2ba"])
FALLING = steps([40, 20, 10], ["1ba", "2ba"])


def by_rule(lengths, rule, order, **arguments):
    """Return the batches and budgets of an epoch planned by a rule."""
    arguments = {"begin": started(order), **arguments}
    plan = fill_steps(lengths, rule, order=order, **arguments)
    return batches_of(plan), plan.budgets


def planned(lengths, rule, *, long_rows, **others):
    arguments = {"min_rows": 1, "max_rows": None, "divisible": False, "long_rows": long_rows}
    return by_rule(torch.tensor(lengths), rule, torch.arange(len(lengths)), **arguments | others)


def test_a_row_above_the_budget_of_its_step_is_alone():
    expected = [[0], [1, 2], [3, 4]], [10, 20, 40]
    assert planned([30, 5, 15, 30, 10], RISING, long_rows="alone") == expected


@pytest.mark.parametrize(
    ("rule", "key", "others"),
    [(10, "batch_tokens", "drop or alone"), (RISING, "batch_size_schedule", "alone")],
)
def test_a_row_above_the_budget_is_refused_with_the_key_and_its_remedies(rule, key, others):
    says = f"^{key}=10: row 1 alone has 11 tokens; .* long_rows to {others}$"
    with pytest.raises(SettingError, match=says):
        planned([5, 11], rule, long_rows="error")


@pytest.mark.parametrize("lengths", [[5, 5, 11], [11, 5, 5], [5, 30, 5, 5, 5, 5, 5, 11, 5]])
@pytest.mark.parametrize("rule", [RISING, FALLING])
def test_a_budget_below_a_row_is_refused_at_all_positions(lengths, rule):
    with pytest.raises(SettingError, match=r"batch_size_schedule=\d+: .*alone has (11|30) tokens"):
        planned(lengths * 3, rule, long_rows="error")


def test_a_rule_that_returns_0_is_refused():
    with pytest.raises(GrowthFunctionError, match=r"^batch_size_schedule .*returned 0"):
        planned([5, 5], lambda progress: 0, long_rows="error")


def test_a_rule_returns_the_budget_of_one_rank():
    plan, budgets = planned(
        [5] * 12, lambda progress: 10 + 5 * (progress.batch == 10), long_rows="error", ranks=2
    )
    assert budgets == [10, 15, 10]
    assert [len(batch) for batch in plan] == [4, 6, 2]


def test_a_rule_that_returns_other_values_each_time_is_refused():
    answers = itertools.count(10)
    with pytest.raises(
        GrowthFunctionError, match="returned other batches when it was called again"
    ):
        planned([5] * 6, lambda progress: next(answers), long_rows="alone")
