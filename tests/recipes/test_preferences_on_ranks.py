"""Preference pairs on two ranks: all retry after an OOM in the reference of one rank."""

from __future__ import annotations

import pytest
from support.cli import Finished, records
from support.tasks import FULL_PAIRS, PAIRS, Recipe

from adaptive_batch.report import audit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SGD = (
    "optimizer=torch.optim.SGD",
    "optimizer.lr=0.05",
    "optimizer.fused=False",
    "epochs=1",
    "max_steps_per_epoch=3",
)


IN_THE_REFERENCE = "support.rank_faults.more_than_two_pairs_in_the_reference_on_rank_one"


def run(small, recipe: Recipe, *overrides: str, **options) -> Finished:
    return small.run(recipe.ours, *recipe.overrides(small), *overrides, *SGD, ranks=2, **options)


@pytest.mark.parametrize(
    ("recipe", "apart"), [(PAIRS, ("reference_micro_batch_size=4",)), (FULL_PAIRS, ())]
)
def test_all_ranks_retry_after_an_oom_in_the_reference_of_one_rank(small, recipe, apart):
    within = run(small, recipe)
    retried = run(small, recipe, *apart, before=IN_THE_REFERENCE)
    (change,) = records(retried.output_dir, "limit", "reference_limit")
    assert change["kind"] == ("reference_limit" if apart else "limit")
    assert (change["before"], change["after"], change["rows"]) == (4, 2, 4)
    assert audit(retried.output_dir).holds
    assert_same_metrics(retried, within)


def test_ranks_agree_on_the_limit_of_the_reference(small):
    own = ("micro_batch_size=1", "probe.device_memory=24MiB")
    within = run(small, PAIRS, *own)
    fault = "support.rank_faults.trials_of_more_than_two_pairs_in_the_reference_on_rank_one"
    apart = run(small, PAIRS, *own, "reference_micro_batch_size=auto", before=fault)
    (bound,) = records(apart.output_dir, "reference_bound")
    # All four pairs fit on rank 0; two fit on rank 1.
    assert bound["max_batch_size"] == 2
    assert not records(apart.output_dir, "reference_limit")
    assert_same_metrics(apart, within)


def assert_same_metrics(one: Finished, other: Finished) -> None:
    """Assert that the losses and metrics of two runs are equal up to rounding."""
    for name in ("loss", "rewards/margins", "log_probs/chosen"):
        logged = map(float, other.figures(name))
        expected = [pytest.approx(figure, rel=1e-3, abs=1e-5) for figure in logged]
        assert list(map(float, one.figures(name))) == expected != []
