"""The same facts where a device has the say: `pytest -m gpu` on a machine with CUDA."""

from __future__ import annotations

import gc

import pytest
import torch
from small_training import CUDA_OPTIMIZERS, Case, Training, deterministic, differences, traces

from adaptive_batch.memory import GIB, AcceleratorMemory, device_memory, is_out_of_memory
from adaptive_batch.probe import find_max_batch_size
from adaptive_batch.search import BinarySearch, Predictive

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


def test_the_device_says_what_it_has(memory):
    assert isinstance(memory, AcceleratorMemory)
    total = torch.cuda.get_device_properties(CUDA).total_memory
    assert memory.total_bytes() == total
    held = torch.empty(256 * MIB, dtype=torch.uint8, device=CUDA)
    with_held = memory.available_bytes([held])
    del held
    assert 0 < with_held <= total
    assert memory.available_bytes([]) == pytest.approx(with_held, abs=64 * MIB)
    assert torch.cuda.get_device_name(CUDA) in memory.describe()


def test_what_runs_inside_is_measured_above_what_was_there(memory):
    held = torch.empty(100 * MIB, dtype=torch.uint8, device=CUDA)
    torch.empty(900 * MIB, dtype=torch.uint8, device=CUDA)  # before: no part of the peak
    with memory.measure([held], budget_bytes=2 * GIB) as usage:
        torch.empty(300 * MIB, dtype=torch.uint8, device=CUDA)
    assert 100 * MIB <= usage.resident_bytes < 200 * MIB
    assert usage.resident_bytes + 300 * MIB <= usage.peak_bytes < usage.resident_bytes + 400 * MIB
    assert not usage.retried


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


def test_an_allocator_that_had_to_give_back_its_cache_is_told(memory):
    with memory.measure([], budget_bytes=GIB) as usage:
        torch.empty(600 * MIB, dtype=torch.uint8, device=CUDA)
        torch.empty(700 * MIB, dtype=torch.uint8, device=CUDA)  # fits only once the 600 MiB have been given back
    assert usage.retried


def test_the_real_words_are_recognised():
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**46, dtype=torch.uint8, device=CUDA)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(RuntimeError(str(caught.value)))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_the_bound_was_tried_and_the_next_rows_do_not_fit(memory, checkpointing):
    training = Training(Case("AdamW fused", checkpointing=checkpointing), device=CUDA, optimizers=CUDA_OPTIMIZERS)
    budget = torch.cuda.memory_reserved(CUDA) + 512 * MIB
    before = fraction()
    with training.rehearsal(budget_bytes=budget) as trial:
        assert trial.optimizer_peak_bytes
        search = Predictive(
            budget_bytes=budget, maximum=100_000, resident_bytes=trial.resident_bytes, granularity_bytes=20 * 2**20
        )
        result = find_max_batch_size(trial, search=search)
        best = [t for t in result.trials if t.batch_size == result.max_batch_size]
        assert [t.fits for t in best] == [True]
        assert trial.resident_bytes < best[0].peak_bytes <= budget
        exact = find_max_batch_size(trial, search=BinarySearch(maximum=4 * result.max_batch_size))
    assert result.max_batch_size >= 0.97 * exact.max_batch_size
    assert fraction() == before


CASES = [
    Case("AdamW"),
    Case("AdamW fused", dtype=torch.bfloat16, checkpointing=True, resumed=True),
    Case("SGD momentum", in_backward=True, checkpointing=True),
    Case("AdamW8bit", dtype=torch.bfloat16, resumed=True),
    Case("AdamW4bit", in_backward=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_probe_leaves_no_trace_however_it_ends(case):
    """The generator of the device is part of what is compared."""
    assert {outcome: differing for outcome, differing in traces(case, device=CUDA) if differing} == {}


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("resumed", [False, True], ids=["fresh", "resumed"])
def test_a_probe_leaves_no_trace_with_bitsandbytes(in_backward, resumed):
    pytest.importorskip("bitsandbytes")
    case = Case("PagedAdamW8bit", in_backward=in_backward, dtype=torch.bfloat16, resumed=resumed)
    assert {outcome: differing for outcome, differing in traces(case, device=CUDA) if differing} == {}


def test_the_generator_of_the_device_is_put_back():
    training = Training(Case("AdamW"), device=CUDA)
    before = training.everything()
    with deterministic(CUDA):
        training.forward_backward(2)
        assert "device" in differences(before, training.everything())
        before = training.everything()
        with training.rehearsal() as trial:
            trial(3)
        assert "device" not in differences(before, training.everything())


def test_statistics_of_peaks_start_afresh_after_a_probe():
    training = Training(Case("AdamW"), device=CUDA)
    with training.rehearsal() as trial:
        assert trial(64).fits
    assert torch.cuda.max_memory_reserved(CUDA) == torch.cuda.memory_reserved(CUDA)
