"""The probe's trials on two ranks: the rank with least room decides, none hangs, none leaves a
trace, and peaks are right.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.ranks import run_on_ranks
from support.sharded_model import (
    Decoder,
    Row,
    divided,
    make_rows,
    runner_of,
    training_state,
)
from torch.profiler import ProfilerActivity, profile

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.memory import device_memory, optimizer_state_tensors, storage_bytes
from adaptive_batch.probe import BinarySearch, DryRun, Trial, run_search
from adaptive_batch.training import RecipeStep

pytestmark = pytest.mark.slow

CPU, PLENTY, MOST = torch.device("cpu"), 2**40, 6
# Two threads of gloo may each hold the buffers of a collective, 14 kB, longer than it takes. A row
# adds 280 kB to a peak.
HELD_BYTES = 30_000
PHASES = ("forward", "backward")


def rows(number: int, length: int = 96) -> list[Row]:
    return make_rows((length,) * number)


def fitting(run: Callable[[], Trial]) -> int:
    trial = run()
    assert trial.fits
    assert trial.peak_bytes is not None
    return trial.peak_bytes


class Trained:
    """A model that draws random numbers, after a step, gradients of a micro-batch there."""

    def __init__(self, *, sync: bool, reshards: bool = True, checkpointing: bool = False) -> None:
        self.sync = sync
        model = Decoder(draws=True, checkpointing=checkpointing, dtype=torch.float32)
        torch.manual_seed(distributed.rank())
        self.model = divided(model, reshard_after_forward=reshards)
        self.engine: RecipeStep = runner_of(
            self.model, MicroBatchLimit(2), syncs_every_micro_batch=sync, max_grad_norm=1.0
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.engine.run(rows(3))
        self.optimizer.step()

    def rehearsal(self, budget_bytes: int = PLENTY) -> DryRun:
        return DryRun(
            model=self.model,
            optimizer=self.optimizer,
            forward_backward=lambda size: self.engine.try_rows(rows(size)),
            step=lambda: (self.engine.clip(), self.optimizer.step()),
            accumulates=True,
            memory=device_memory(CPU),
            budget_bytes=budget_bytes,
            sharding=self.engine.sharding,
            keep_gradients=(
                None if self.sync else lambda: self.engine.try_rows(rows(1), is_last=False)
            ),
        )

    def state(self) -> dict[str, Any]:
        return training_state(self.model, self.optimizer)


def searched(sync: bool) -> dict[str, Any]:
    """What fits alone, and what all find where one rank may use less."""
    trained = Trained(sync=sync)
    before = trained.state()
    with trained.rehearsal() as trial:
        peaks = {size: fitting(partial(trial, size)) for size in range(1, MOST + 1)}
    found: dict[str, Any] = {"peaks": peaks, "searches": {}}
    for smaller in (0, 1):
        room = [PLENTY, PLENTY]
        room[smaller] = (
            distributed.all_gather(peaks)[smaller][3] + distributed.all_gather(peaks)[smaller][4]
        ) // 2
        with trained.rehearsal(room[distributed.rank()]) as trial:
            result = run_search(trial, search=BinarySearch(maximum=MOST))
            again = fitting(partial(trial, 3))
        found["searches"][smaller] = (
            result.max_batch_size,
            [(one.batch_size, one.fits, one.peak_bytes) for one in result.trials],
            again,
        )
    after = trained.state()
    found["traces"] = [name for name, value in before.items() if value != after[name]]
    return found


def burdened(sync: bool, phase: str, whom: tuple[int, ...]) -> dict[str, Any]:
    """Some ranks pass their budget half-way through the layers, between trials that fit."""
    trained = Trained(sync=sync, checkpointing=phase == "forward")
    before = trained.state()
    happened = []

    def allocate() -> None:
        happened.append(phase)
        torch.empty(2**30, dtype=torch.uint8)

    with trained.rehearsal(2**29) as trial:
        evaluation = partial(trial.evaluation, partial(evaluate, trained), 3)
        runs = [partial(trial, 2), partial(trial, 3), evaluation]
        alone = list(map(fitting, runs))
        fits = []
        for _ in range(2):
            trained.model.burden = {phase: allocate} if distributed.rank() in whom else {}
            fits.append(trial(3).fits)
            trained.model.burden = {}
        then = list(map(fitting, runs))
        trained.model.burden = {"forward": allocate} if distributed.rank() in whom else {}
        fits.append(evaluation().fits)
        trained.model.burden = {}
        last = list(map(fitting, runs))
    after = trained.state()
    return {
        "fits": fits,
        "happened": len(happened),
        "peaks": [alone, then, last],
        "traces": [name for name, value in before.items() if value != after[name]],
    }


def evaluate(trained: Trained, size: int) -> None:
    trained.engine.try_evaluation(rows(size))


def measured(reshards: bool, checkpointing: bool, sync: bool) -> tuple[int, int]:
    """The peak of a micro-batch by counting, and by the allocator's own reports."""
    torch.manual_seed(0)
    model = divided(
        Decoder(width=64, dtype=torch.float32, checkpointing=checkpointing),
        reshard_after_forward=reshards,
    )
    run = runner_of(model, MicroBatchLimit(2), syncs_every_micro_batch=sync)
    optimizer = torch.optim.AdamW(model.parameters())
    run.run(rows(3))
    optimizer.step()

    def resident() -> list[torch.Tensor]:
        gradients = [
            parameter.grad for parameter in model.parameters() if parameter.grad is not None
        ]
        kept = list(run.sharding.kept_gradients())
        return [
            *model.parameters(),
            *model.buffers(),
            *gradients,
            *kept,
            *optimizer_state_tensors([optimizer]),
        ]

    def prepare() -> None:
        model.zero_grad(set_to_none=True)
        run.sharding.reset()
        if sync:
            run.try_rows(rows(1))
        else:
            run.try_rows(rows(1), is_last=False)
        gc.collect()

    def counted() -> int:
        prepare()
        with device_memory(CPU).measure(resident(), budget_bytes=PLENTY) as usage:
            run.try_rows(rows(32, 48))
        assert usage.peak_bytes is not None
        return usage.peak_bytes

    def allocated() -> int:
        prepare()
        live = peak = storage_bytes(resident())
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run.try_rows(rows(32, 48))
        events = [
            event
            for event in profiler.profiler.kineto_results.events()
            if event.name() == "[memory]"
        ]
        for event in sorted(events, key=lambda event: event.start_ns()):
            live += event.nbytes()
            peak = max(peak, live)
        return peak

    return counted(), allocated()


def everything() -> dict[str, Any]:
    gc.collect()
    # a release collects garbage, and what is imported need not be looked through every time
    gc.freeze()
    flags = (True, False)
    return {
        "searched": {sync: searched(sync) for sync in flags},
        "burdened": {
            (sync, phase, whom): burdened(sync, phase, whom)
            for sync in flags
            for phase, whom in (("forward", (1,)), ("backward", (0,)), ("backward", (0, 1)))
        },
        "measured": {
            (reshards, checkpointing, sync): measured(reshards, checkpointing, sync)
            for reshards in flags
            for checkpointing, sync in ((False, True), (True, False), (False, False))
        },
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(everything, 2, timeout=300)


@pytest.mark.parametrize("sync", [True, False])
def test_the_rank_that_may_use_least_decides(ranks, sync):
    of_ranks = [facts["searched"][sync] for facts in ranks]
    peaks = [found["peaks"] for found in of_ranks]
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


def test_trials_after_one_that_did_not_fit_peak_as_they_did_alone(ranks):
    for facts in ranks:
        for found in facts["searched"].values():
            for _, _, again in found["searches"].values():
                assert again == pytest.approx(found["peaks"][3], abs=HELD_BYTES)
        for case, found in facts["burdened"].items():
            alone, then, last = found["peaks"]
            for later in (then, last):
                assert later == pytest.approx(alone, abs=HELD_BYTES), case


def test_what_passes_the_budget_of_one_rank_fits_on_none(ranks):
    for rank, facts in enumerate(ranks):
        for case, found in facts["burdened"].items():
            assert found["fits"] == [False, False, False], case
            assert bool(found["happened"]) == (rank in case[2]), case


def test_trials_leave_no_trace_on_any_rank(ranks):
    for facts in ranks:
        assert [found["traces"] for found in facts["searched"].values()] == [[], []]
        assert {
            case: found["traces"] for case, found in facts["burdened"].items() if found["traces"]
        } == {}


def test_counted_peaks_are_those_of_the_allocator(ranks):
    for facts in ranks:
        for case, (counted, allocated) in facts["measured"].items():
            assert counted == pytest.approx(allocated, rel=0.06), case
