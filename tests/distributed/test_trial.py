"""Trials on two ranks: a size fits only if it fits on both, and no trial leaves a trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.fakes import FakeBackend
from support.fault_injection import Training, Way
from support.processes import run_on_ranks
from support.same_state import differences
from support.sharded_model import Row, make_rows

from adaptive_batch import distributed
from adaptive_batch.memory.device import AcceleratorMemory
from adaptive_batch.probe import BinarySearch, DryRun, Trial, run_search

pytestmark = pytest.mark.slow

# Two gloo threads may keep the buffers of a collective, 14 kB, for a moment. A row adds more than
# 100 kB to a peak.
HELD_BYTES = 30_000


class Trained(Training):
    """A model with random numbers, after a step; its trials have longer rows."""

    def rows_of_trial(self, number: int) -> list[Row]:
        return make_rows((96,) * number)


def lowest_peak(run: Callable[[], Trial]) -> int:
    """Return the lowest peak of several trials. Under load, gloo threads may keep more buffers."""
    trials = [run() for _ in range(4)]
    assert all(trial.fits for trial in trials)
    return min(trial.peak_bytes or 0 for trial in trials)


def searched(sync: bool, smaller: int) -> tuple[int, list[int], list[str]]:
    """Search where 3 rows fit on rank `smaller` and any number fits on the other one. Return the
    result, the sizes that were tried, and the names of values that differ after it.
    """
    trained = Trained(Way(syncs_every_micro_batch=sync))
    before = trained.everything()
    with trained.dry_run() as trial:
        between_3_and_4 = sum(lowest_peak(partial(trial, size)) for size in (3, 4)) // 2
    room = between_3_and_4 if distributed.rank() == smaller else 2**40
    with trained.dry_run(room) as trial:
        result = run_search(trial, search=BinarySearch(maximum=6))
    tried = [each.batch_size for each in result.trials]
    return result.max_batch_size, tried, differences(before, trained.everything())


def evaluated(failing: tuple[int, ...]) -> dict[str, Any]:
    """Return evaluation trials, one of which exceeds the budget on some ranks."""
    trained = Trained(Way())
    before = trained.everything()
    exceeded = []

    def exceed() -> None:
        exceeded.append(True)
        torch.empty(2**30, dtype=torch.uint8)

    def evaluate(size: int) -> None:
        trained.engine.try_evaluation(trained.rows_of_trial(size))

    with trained.dry_run(2**29) as trial:
        alone = lowest_peak(lambda: trial.evaluation(evaluate, 3))
        trained.model.burden = {"forward": exceed} if distributed.rank() in failing else {}
        fits = trial.evaluation(evaluate, 3).fits
        trained.model.burden = {}
        later = lowest_peak(lambda: trial.evaluation(evaluate, 3))
    return {
        "fits": fits,
        "exceeded": bool(exceeded),
        "peaks": (alone, later),
        "traces": differences(before, trained.everything()),
    }


def with_retries_on_rank_one() -> Trial:
    model = torch.nn.Linear(2, 2)
    backend = FakeBackend(total=2**40)

    def forward_backward(size: int) -> None:
        model(torch.ones(size, 2)).sum().backward()
        backend.retries += size == 4 and distributed.rank() == 1

    optimizer = torch.optim.SGD(model.parameters())
    with DryRun(
        model=model,
        optimizer=optimizer,
        forward_backward=forward_backward,
        step=optimizer.step,
        accumulates=False,
        memory=AcceleratorMemory(torch.device("cpu"), backend=backend),
        budget_bytes=2**39,
    ) as trial:
        return trial(4)


@pytest.mark.parametrize(("sync", "smaller"), [(True, 0), (False, 1)])
def test_the_rank_with_the_least_memory_decides(sync, smaller):
    (found, other) = run_on_ranks(searched, 2, sync, smaller)
    assert found == other
    max_batch_size, tried, differing = found
    assert max_batch_size == 3
    assert 4 in tried
    assert differing == []


@pytest.mark.parametrize("failing", [(1,), (0, 1)], ids=str)
def test_an_evaluation_that_exceeds_the_budget_of_one_rank_fits_on_none(failing):
    for rank, found in enumerate(run_on_ranks(evaluated, 2, failing)):
        assert found["exceeded"] == (rank in failing)
        assert not found["fits"]
        alone, later = found["peaks"]
        assert later == pytest.approx(alone, abs=HELD_BYTES)
        assert found["traces"] == []


def test_a_size_that_needs_retries_on_one_rank_needs_retries_on_all():
    for trial in run_on_ranks(with_retries_on_rank_one, 2):
        assert not trial.fits
        assert trial.retried
