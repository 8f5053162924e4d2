"""The bound of an estimate is that of the recipe's own search, where trials have the block that
training makes.

Proved here: rows, and what PyTorch's own allocator reserves in the trial of the bound, on default
segments.
"""

from __future__ import annotations

import pytest
from support.model_families import Combination
from support.stack_runs import StackRun, StackRuns

from adaptive_batch.estimate import CONTEXT_BYTES
from adaptive_batch.torchtune import estimate_devices

pytestmark = [
    pytest.mark.cuda_stack,
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]

CAPACITY = CONTEXT_BYTES + 160 * 2**20


@pytest.fixture(scope="module")
def runs():
    stack_runs = StackRuns()
    yield stack_runs
    stack_runs.close()


@pytest.mark.parametrize(("varies", "accumulation"), [(False, 1), (True, 2)])
def test_as_many_rows_are_estimated_as_a_search_finds(monkeypatch, runs, varies, accumulation):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    combination = Combination(
        "qwen2, tied", 250, "AdamW", "chunked", accumulation=accumulation, device="cuda"
    )
    run = StackRun(combination, (), probes=2, search="binary", varies=varies)
    cfg = combination.to_estimate(
        devices=[CAPACITY], context=CONTEXT_BYTES, changes=False, sequence_lengths=["longest"]
    )
    cfg.update(run.data)
    estimate = estimate_devices(cfg, show=lambda text: None)
    (fit,) = estimate.devices[0].lengths
    searched = runs(run, "a100", capacity=CAPACITY)
    assert fit.max_batch_size == searched.bound > 4
    assert fit.reserved_bytes == searched.reserved_in_trial
