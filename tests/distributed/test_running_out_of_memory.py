"""OOMs on one rank or both at operations of a step. benchmarks/faults_on_ranks.py runs all."""

from __future__ import annotations

import pytest
from support.fault_injection import (
    PATIENCE_SECONDS,
    Place,
    Way,
    chosen,
    once_more,
    survey,
    sweep_on_ranks,
)

pytestmark = pytest.mark.slow

NOISE = Way(syncs_every_micro_batch=False, measures_noise=True)


@pytest.fixture(scope="module")
def seen():
    return survey(NOISE)


def test_a_step_has_places_of_every_kind(seen):
    told = {phase for phase, can_be_told in seen if can_be_told}
    assert told == {"forward", "backward", "between"}
    assert {phase for phase, _ in seen} == {"before", *told, "collective", "counting", "clipping"}


def test_a_step_is_retried_to_the_bit_or_all_ranks_end(seen):
    replayed, lost = chosen(seen, every=max(1, len(seen) // 10), lost_of_each_phase=1)
    outcomes = list(
        sweep_on_ranks(NOISE, [*replayed, *lost["collective"], *once_more(replayed, after=[8])])
    )
    assert [
        outcome
        for outcome in outcomes
        if outcome.differing or outcome.ended not in ("replayed", "lost")
    ] == []
    assert [outcome.ended for outcome in outcomes] == ["replayed"] * len(replayed) + [
        "lost",
        "lost",
    ]
    # A rank that nothing ends would hang more than twice as long.
    seconds = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    assert max(seconds) < PATIENCE_SECONDS / 2


def test_a_trial_in_which_one_rank_fails_does_not_fit_and_leaves_nothing():
    places = [
        Place((800, 0)),
        Place((0, 900)),
        Place((700, 700)),
        Place((120, 0)),
    ]  # the last before the trial itself
    outcomes = list(sweep_on_ranks(Way(syncs_every_micro_batch=False, trials=True), places))
    assert [(outcome.ended, outcome.differing) for outcome in outcomes] == [
        ("replayed", [])
    ] * 3 + [("lost", [])]
