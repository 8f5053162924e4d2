"""A search on two ranks: the rank with the least memory decides, and no trial leaves a trace."""

from __future__ import annotations

import gc
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

MOST = 6
# Two gloo threads may keep the buffers of a collective, 14 kB, for a moment. A row adds more than
# 100 kB to a peak.
HELD_BYTES = 30_000


class Trained(Training):
    """A model with random numbers, after a step; its trials have longer rows."""

    def rows_of_trial(self, number: int) -> list[Row]:
        return make_rows((96,) * number)


def fitting(run: Callable[[], Trial]) -> int:
    trial = run()
    assert trial.fits
    assert trial.peak_bytes is not None
    return trial.peak_bytes


def searched(sync: bool) -> dict[str, Any]:
    """Return the peaks of trials, and the result of a search in which one rank has less memory."""
    trained = Trained(Way(syncs_every_micro_batch=sync))
    before = trained.everything()
    with trained.dry_run() as trial:
        peaks = {size: fitting(partial(trial, size)) for size in range(1, MOST + 1)}
    found: dict[str, Any] = {"peaks": peaks, "searches": {}}
    for smaller in (0, 1):
        room = [2**40, 2**40]
        room[smaller] = (
            distributed.all_gather(peaks)[smaller][3] + distributed.all_gather(peaks)[smaller][4]
        ) // 2
        with trained.dry_run(room[distributed.rank()]) as trial:
            result = run_search(trial, search=BinarySearch(maximum=MOST))
        found["searches"][smaller] = (
            result.max_batch_size,
            [(one.batch_size, one.fits, one.peak_bytes) for one in result.trials],
        )
    found["traces"] = differences(before, trained.everything())
    return found


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
        alone = fitting(lambda: trial.evaluation(evaluate, 3))
        trained.model.burden = {"forward": exceed} if distributed.rank() in failing else {}
        fits = trial.evaluation(evaluate, 3).fits
        trained.model.burden = {}
        later = fitting(lambda: trial.evaluation(evaluate, 3))
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


def everything() -> dict[bool, dict[str, Any]]:
    # Each recovery collects garbage; frozen imported objects are not traversed.
    gc.collect()
    gc.freeze()
    return {sync: searched(sync) for sync in (True, False)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[bool, dict[str, Any]]]:
    return run_on_ranks(everything, 2, timeout=300)


@pytest.mark.parametrize("sync", [True, False])
def test_the_rank_with_the_least_memory_decides(ranks, sync):
    of_ranks = [facts[sync] for facts in ranks]
    peaks = [found["peaks"] for found in of_ranks]
    assert [found["traces"] for found in of_ranks] == [[], []]
    for mine in peaks:
        assert sorted(mine.values()) == list(mine.values())
        assert mine[3] < mine[4]
    for smaller in (0, 1):
        assert [found["searches"][smaller][0] for found in of_ranks] == [3, 3]
        tried = [found["searches"][smaller][1] for found in of_ranks]
        assert tried[0] == tried[1]
        assert {size for size, fits, _ in tried[0] if fits} | {4} <= {size for size, *_ in tried[0]}
        for size, fits, largest in tried[0]:
            assert fits == (size <= 3)
            alone = max(mine[size] for mine in peaks)
            assert not fits or largest == pytest.approx(alone, abs=HELD_BYTES)


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
