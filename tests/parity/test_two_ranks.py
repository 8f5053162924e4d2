"""On two ranks, with everything adaptive off, the recipe is torchtune's distributed one to the bit,
but for its defects.

The full sweep is benchmarks/parity_on_ranks.py; here all runs share one start of the processes.
"""

import math

import pytest
from support.cli import FEATURES, OURS, same_weights
from support.stock import STOCK_ON_RANKS, Task, run_tasks

pytestmark = pytest.mark.slow

IN_BACKWARD = ("optimizer_in_bwd=True",)
CASES = {
    "defaults": (),
    "accumulation": FEATURES["accumulation"],
    "clipping and checkpointing": (*FEATURES["clipping"], *FEATURES["activation checkpointing"]),
    "optimizer in backward": IN_BACKWARD,
}
# Rank one's second batch has no label.
UNLABELLED = (
    "epochs=1",
    "shuffle=False",
    "dataset=support.stock.partly_labelled",
    "dataset.without_labels=[9,11,13,15]",
)


@pytest.fixture(scope="module")
def both(small):
    """The stock recipe's run of each case and ours."""
    cases = {**CASES, "unlabelled": UNLABELLED}
    recipes = (STOCK_ON_RANKS, OURS)
    tasks = [
        Task(recipe, small.fresh_folder(), overrides)
        for overrides in cases.values()
        for recipe in recipes
    ]
    finished = iter(run_tasks(small, tasks, ranks=2))
    return {name: (next(finished), next(finished)) for name in cases}


@pytest.mark.parametrize("name", CASES)
def test_losses_rates_norms_and_weights_are_those_of_the_stock_recipe(both, name):
    stock, ours = both[name]
    assert len(stock.losses) == (4 if name == "accumulation" else 8)
    assert ours.losses == stock.losses
    assert ours.figures("lr") == stock.figures("lr")
    assert len(ours.figures("grad_norm")) == (8 if "clipping" in name else 0)
    assert ours.figures("grad_norm") == stock.figures("grad_norm")
    for epoch in (0, 1):
        assert same_weights(ours.weights(epoch), stock.weights(epoch))


def test_the_cases_train_different_weights(both):
    last = {
        name: ours.losses[-1] for name, (_, ours) in both.items() if name != "optimizer in backward"
    }
    assert len(set(last.values())) == len(last)  # in backward, it is the same to rounding


def test_a_rank_whose_rows_have_no_label_does_not_make_the_loss_nan(both):
    stock, ours = ([float(loss) for loss in run.losses] for run in both["unlabelled"])
    assert len(stock) == len(ours) == 4
    assert ours[0] == stock[0]
    assert math.isnan(stock[1])
    assert all(map(math.isfinite, ours))
