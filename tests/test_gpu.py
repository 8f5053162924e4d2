"""Tests on a CUDA device: `pytest -m gpu`.

`make cuda-stack` runs the tests marked cuda_stack without a device. Memory, errors and generator
states are real there; values of tensors are compared on a GPU only.
"""

from __future__ import annotations

import gc
from contextlib import closing

import pytest
import torch
from support.sharded_model import Decoder, make_rows, runner_of, whole_gradients
from support.training_cases import Case, Training, deterministic, traces
from torch import nn

from adaptive_batch.checkpoint import CheckpointManager, checkpoints_in, newest_complete
from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.memory import GIB, RandomState, device_memory, is_out_of_memory
from adaptive_batch.memory.device import AcceleratorMemory
from adaptive_batch.probe import BinarySearch, Predictive, run_search
from adaptive_batch.training import LimitChange

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 2**20
CUDA = torch.device("cuda", 0)


@pytest.fixture
def memory():
    gc.collect()
    torch.cuda.empty_cache()
    return device_memory(CUDA)


def fraction() -> float:
    return torch.cuda.get_per_process_memory_fraction(CUDA)


@pytest.mark.cuda_stack
def test_total_and_available_bytes_are_those_of_the_device(memory):
    assert isinstance(memory, AcceleratorMemory)
    total = torch.cuda.get_device_properties(CUDA).total_memory
    assert memory.total_bytes() == total
    held = torch.empty(256 * MIB, dtype=torch.uint8, device=CUDA)
    with_held = memory.available_bytes([held])
    del held
    assert 0 < with_held <= total
    assert memory.available_bytes([]) == pytest.approx(with_held, abs=64 * MIB)
    assert torch.cuda.get_device_name(CUDA) in memory.describe()


@pytest.mark.cuda_stack
def test_what_runs_inside_is_measured_above_what_was_there(memory):
    held = torch.empty(100 * MIB, dtype=torch.uint8, device=CUDA)
    torch.empty(900 * MIB, dtype=torch.uint8, device=CUDA)  # before: no part of the peak
    with memory.measure([held], budget_bytes=2 * GIB) as usage:
        torch.empty(300 * MIB, dtype=torch.uint8, device=CUDA)
    assert 100 * MIB <= usage.resident_bytes < 200 * MIB
    assert usage.resident_bytes + 300 * MIB <= usage.peak_bytes < usage.resident_bytes + 400 * MIB
    assert not usage.retried


@pytest.mark.cuda_stack
def test_the_allocator_refuses_what_passes_the_budget_and_is_free_again_after(memory):
    before = fraction()
    inside = []

    def run():
        inside.append(fraction())
        torch.empty(2 * GIB, dtype=torch.uint8, device=CUDA)

    with pytest.raises(torch.OutOfMemoryError) as caught, memory.measure([], budget_bytes=GIB):
        run()
    assert inside == [pytest.approx(GIB / memory.total_bytes())]
    assert is_out_of_memory(caught.value)
    assert fraction() == before
    torch.empty(2 * GIB, dtype=torch.uint8, device=CUDA)


@pytest.mark.cuda_stack
def test_an_allocator_that_had_to_give_back_its_cache_is_told(memory):
    with memory.measure([], budget_bytes=GIB) as usage:
        torch.empty(600 * MIB, dtype=torch.uint8, device=CUDA)
        torch.empty(
            700 * MIB, dtype=torch.uint8, device=CUDA
        )  # fits only once the 600 MiB have been given back
    assert usage.retried


@pytest.mark.cuda_stack
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_the_bound_was_tried_and_the_next_rows_do_not_fit(memory, checkpointing):
    training = Training(Case("AdamW fused", checkpointing=checkpointing), device=CUDA)
    budget = torch.cuda.memory_reserved(CUDA) + 512 * MIB
    before = fraction()
    with training.rehearsal(budget_bytes=budget) as trial:
        assert trial.optimizer_peak_bytes
        search = Predictive(
            budget_bytes=budget,
            maximum=100_000,
            resident_bytes=trial.resident_bytes,
            granularity_bytes=20 * 2**20,
        )
        result = run_search(trial, search=search)
        best = [t for t in result.trials if t.batch_size == result.max_batch_size]
        assert [t.fits for t in best] == [True]
        assert trial.resident_bytes < best[0].peak_bytes <= budget
        exact = run_search(trial, search=BinarySearch(maximum=4 * result.max_batch_size))
    assert result.max_batch_size >= 0.97 * exact.max_batch_size
    assert fraction() == before


CASES = [
    Case("AdamW"),
    Case("AdamW fused", dtype=torch.bfloat16, checkpointing=True, resumed=True),
    Case("SGD momentum", in_backward=True, checkpointing=True),
    Case("AdamW8bit", dtype=torch.bfloat16, resumed=True),
    Case("AdamW4bit", in_backward=True),
]


@pytest.mark.cuda_stack
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_probe_leaves_no_trace_however_it_ends(case):
    """The generator of the device is part of what is compared."""
    assert {
        outcome: differing for outcome, differing in traces(case, device=CUDA) if differing
    } == {}


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("resumed", [False, True], ids=["fresh", "resumed"])
def test_a_probe_leaves_no_trace_with_bitsandbytes(in_backward, resumed):
    pytest.importorskip("bitsandbytes")
    case = Case("PagedAdamW8bit", in_backward=in_backward, dtype=torch.bfloat16, resumed=resumed)
    assert {
        outcome: differing for outcome, differing in traces(case, device=CUDA) if differing
    } == {}


def run_out_of_memory_in_mid_run(memory):
    """For real: what this process may take is lowered between two steps. Returns the result and the
    gradients of each.
    """
    model = Decoder(width=256, vocabulary=1000, dtype=torch.float32).to(CUDA)
    rows = make_rows([256] * 64)
    changes: list[LimitChange] = []
    runner = runner_of(
        model,
        MicroBatchLimit(64),
        to_device=lambda batch: batch.update({key: part.to(CUDA) for key, part in batch.items()}),
        on_change=changes.append,
    )

    def step():
        model.zero_grad()
        result = runner.run(rows)
        return result, list(whole_gradients(model).values())

    torch.cuda.reset_peak_memory_stats(CUDA)
    whole, expected = step()
    peak = torch.cuda.max_memory_allocated(CUDA)
    gc.collect()
    torch.cuda.empty_cache()
    resident = torch.cuda.memory_allocated(CUDA)
    before = fraction()
    torch.cuda.set_per_process_memory_fraction(
        (resident + (peak - resident) / 3) / memory.total_bytes(), CUDA
    )
    try:
        split, found = step()
    finally:
        torch.cuda.set_per_process_memory_fraction(before, CUDA)
    assert whole.micro_batches == 1
    assert split.micro_batches > 1
    assert [change.grows for change in changes[:1]] == [False]
    assert runner.sizer.limit().amount < 64
    return whole, expected, split, found


@pytest.mark.cuda_stack
def test_an_out_of_memory_error_in_mid_run_is_survived(memory):
    run_out_of_memory_in_mid_run(memory)


def test_a_step_that_ran_out_of_memory_has_the_gradients_of_one_that_did_not(memory):
    whole, expected, split, found = run_out_of_memory_in_mid_run(memory)
    assert split.loss == pytest.approx(whole.loss, rel=1e-4)
    for one, other in zip(expected, found, strict=True):
        assert torch.linalg.norm(one - other) <= 1e-2 * torch.linalg.norm(
            one
        )  # matrix products may be in TF32


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_resume_point_of_a_device_goes_on_to_the_bit(tmp_path, asynchronous):
    """Dropout draws from the device's generator, and training goes on changing what is being
    written.
    """

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.3), nn.Linear(256, 64)).to(
            CUDA, torch.bfloat16
        )
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model, optimizer):
        loss = model(torch.ones(16, 64, device=CUDA, dtype=torch.bfloat16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    model, optimizer = build()
    with deterministic(CUDA):
        for _ in range(3):
            step(model, optimizer)
        with closing(CheckpointManager(tmp_path, asynchronous=asynchronous)) as points:
            tensors = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            points.save(3, tensors, {"random_state": RandomState(CUDA).state_dict()})
            expected = [step(model, optimizer) for _ in range(5)]
        point, passed_over = newest_complete(checkpoints_in(tmp_path))
        assert passed_over == []
        tensors, small = point.load()
        again, its_optimizer = build()
        again.load_state_dict(tensors["model"])
        its_optimizer.load_state_dict(tensors["optimizer"])
        RandomState(CUDA).load_state_dict(small["random_state"])
        assert [step(again, its_optimizer) for _ in range(5)] == expected
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
