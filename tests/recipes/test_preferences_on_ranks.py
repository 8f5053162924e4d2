"""Preference pairs on two ranks: one that runs out of memory in the reference costs all of them a
retry.
"""

from __future__ import annotations

import pytest
from support.cli import SmallSetup, losses, make_setup, records
from support.launch import Attempt, launch
from support.preferences import LORA, OURS, PAIRS, reference_of, write_pairs

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


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> SmallSetup:
    return make_setup(tmp_path_factory.mktemp("pairs"))


def run(setup: SmallSetup, *overrides: str, **options) -> Attempt:
    own = (*overrides, *write_pairs(setup), *SGD)
    (attempt,) = launch(setup, 2, *own, recipe=OURS, **options)
    assert attempt.exit_statuses == [0, 0], attempt.output[-6000:]
    return attempt


@pytest.mark.parametrize(
    ("kind", "apart"), [("LoRA", ("reference_micro_batch_size=4",)), ("full", ())]
)
def test_a_rank_that_runs_out_of_memory_in_the_reference_costs_a_retry(setup, kind, apart):
    own = LORA if kind == "LoRA" else (*PAIRS, *reference_of(setup))
    within = run(setup, *own)
    retried = run(setup, *own, *apart, before=IN_THE_REFERENCE)
    (change,) = records(retried.output_dir, "limit", "reference_limit")
    assert change["kind"] == ("reference_limit" if apart else "limit")
    assert (change["before"], change["after"], change["rows"]) == (4, 2, 4)
    assert audit(retried.output_dir).holds
    assert_same_metrics(retried, within)


def test_ranks_agree_on_what_fits_in_the_reference(setup):
    own = ("micro_batch_size=1", "probe.device_memory=24MiB")
    within = run(setup, *LORA, *own)
    fault = "support.rank_faults.trials_of_more_than_two_pairs_in_the_reference_on_rank_one"
    apart = run(setup, *LORA, *own, "reference_micro_batch_size=auto", before=fault)
    (bound,) = records(apart.output_dir, "reference_bound")
    # Rank zero has room for all four; it has learned that rank one has not.
    assert bound["max_batch_size"] == 2
    assert not records(apart.output_dir, "reference_limit")
    assert_same_metrics(apart, within)


def assert_same_metrics(one: Attempt, other: Attempt) -> None:
    """Two runs have the same losses and metrics, but for rounding."""
    for name in ("loss", "rewards/margins", "log_probs/chosen"):
        logged = map(float, losses(other.output_dir, name=name))
        expected = [pytest.approx(figure, rel=1e-3, abs=1e-5) for figure in logged]
        assert list(map(float, losses(one.output_dir, name=name))) == expected != []


def test_a_second_model_trains_with_the_optimizer_in_backward(setup):
    own = (*PAIRS, *reference_of(setup))
    whole, stepped = (run(setup, *own, f"optimizer_in_bwd={value}") for value in (False, True))
    assert whole.losses == stepped.losses != []
