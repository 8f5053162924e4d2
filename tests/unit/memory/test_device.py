"""OOM errors, sizes, and measurements of memory that agree with the allocator."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from support.fakes import FakeBackend
from support.training_cases import CPU, PLENTY, Case, Training
from torch._utils import ExceptionWrapper
from torch.profiler import ProfilerActivity, profile

from adaptive_batch.errors import DoesNotFitError
from adaptive_batch.memory import (
    ALLOCATOR_VARIABLES,
    GIB,
    Room,
    allocator_settings,
    budget_bytes,
    check_segments,
    device_memory,
    expand_segments,
    is_out_of_memory,
    parse_size,
    segments_expand,
    storage_bytes,
    wanted_bytes,
)
from adaptive_batch.memory.device import AcceleratorMemory, CountedMemory

MIB = 2**20


HELP = "\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA`"
# Messages of RuntimeError by the allocator, the driver or the library.
OUT_OF_MEMORY = [
    "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.80 GiB total capacity; 6.90 GiB",
    f"CUDA error: out of memory{HELP}",
    "CUDA driver error: out of memory",
    "HIP out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total",
    "HIP error: out of memory",
    "XPU out of memory. Tried to allocate 1.56 GiB. GPU 0 has a total",
    "MPS backend out of memory (MPS allocated: 17.30 GB, other allocations: 576.00 KB, max",
    "NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 29.50 GiB total",
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory:",
    "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may",
    "GET was unable to find an engine to execute this computation",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "FIND was unable to find an engine to execute this computation",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
    "std::bad_alloc",
]
NCCL = (
    "NCCL error in: ../c10d/ProcessGroupNCCL.cpp:1970, unhandled cuda error, NCCL version 2.21.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
    "Cuda failure 2 'out of memory'"
)
TYPED = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.distributed.DistBackendError(NCCL),
    MemoryError(),
]
SOMETHING_ELSE = [
    "out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing block",
    f"CUDA error: an illegal memory access was encountered{HELP}",
    f"CUDA error: device-side assert triggered{HELP}",
    f"CUDA error: invalid configuration argument{HELP}",
    "integer out of range",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb)`",
    "DataLoader worker (pid 4242) is killed by signal: Bus error. It is possible that dataloader's"
    " workers are out of shared memory.",
    "mat1 and mat2 shapes cannot be multiplied (4x8 and 9x4)",
]
TYPED_ELSE = [
    ValueError("CUDA out of memory is what you get with batch_size=4096"),
    KeyError("out of memory"),
    DoesNotFitError("one row needs 25.10 GiB, cuda:0 allows 23.60 GiB"),
]


def raised(function):
    try:
        function()
    except BaseException as error:
        return error


def raised_from(error, cause):
    def run():
        raise error from cause

    return raised(run)


def wrapped_by_data_parallel(error):
    try:
        raise error
    except BaseException:
        wrapper = ExceptionWrapper(where="in replica 0 on device 0")
    return raised(wrapper.reraise)


@pytest.mark.parametrize("error", [*map(RuntimeError, OUT_OF_MEMORY), *TYPED], ids=str)
def test_an_out_of_memory_error_is_recognised_alone_as_a_cause_and_in_a_wrapper(error):
    assert is_out_of_memory(error)
    cause = raised_from(KeyError("layer 7"), error)
    assert is_out_of_memory(raised_from(ValueError("step 3"), cause))
    # DataParallel cannot rebuild an NCCL error.
    if "NCCL" not in str(error):
        assert is_out_of_memory(wrapped_by_data_parallel(error))


@pytest.mark.parametrize("error", [*map(RuntimeError, SOMETHING_ELSE), *TYPED_ELSE], ids=str)
def test_another_error_is_not_recognised(error):
    assert not is_out_of_memory(error)
    assert not is_out_of_memory(raised_from(RuntimeError("a trial failed"), error))
    assert not is_out_of_memory(wrapped_by_data_parallel(error))


def test_none_and_a_cycle_of_causes_are_not_recognised():
    error = RuntimeError("cycle")
    error.__cause__ = error
    assert not is_out_of_memory(error)
    assert not is_out_of_memory(None)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("1.5 gib", 3 * GIB // 2),
        (" 900MiB ", 900 * MIB),
        ("8GB", 8 * 10**9),
        ("77 B", 77),
        (4096, 4096),
        (0.9, 900),
        (1.0, 1000),
    ],
)
def test_a_size_is_read(value, size):
    assert parse_size(value, total_bytes=1000) == size


@pytest.mark.parametrize(
    "value",
    ["12", "GiB", "-1GiB", "0GiB", "12 parsecs", "", 0, 1, -5, 0.0, 1.5, True, None, float("nan")],
)
def test_an_invalid_size_is_refused(value):
    with pytest.raises(ValueError, match='give a size such as "12GiB"'):
        parse_size(value, total_bytes=1000)


def peak_by_profiler(training, run):
    """Resident bytes plus the peak of the allocator's own reports."""
    before = storage_bytes(training.resident())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return before + peak


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", ["AdamW fused", "AdamW foreach"])
def test_counting_agrees_with_the_allocator(optimizer, dtype, checkpointing):
    training = Training(Case(optimizer, dtype=dtype, checkpointing=checkpointing, resumed=True))
    for run in (lambda: training.forward_backward(160), training.step):
        expected = peak_by_profiler(training, run)
        assert counted(run, *training.resident()).peak_bytes == pytest.approx(expected, rel=1e-3)


def counted(run, *held, budget_bytes=PLENTY):
    with CountedMemory(CPU).measure(held, budget_bytes=budget_bytes) as usage:
        run()
    return usage


def test_a_resized_storage_is_counted_with_its_new_size():
    def run():
        grown = torch.zeros(MIB, dtype=torch.uint8)
        grown.resize_(3 * MIB)
        torch.zeros(MIB, dtype=torch.uint8)

    assert counted(run).peak_bytes == 4 * MIB


def test_an_allocation_above_the_budget_raises():
    training = Training(Case("AdamW"))
    for phase in ("forward", "backward"):
        training.model.burden = {phase: GIB}
        error = raised(lambda: counted(lambda: training.forward_backward(2), budget_bytes=GIB // 2))
        assert isinstance(error, torch.OutOfMemoryError)
        assert is_out_of_memory(error)
        assert training.phase == phase
        assert "over the budget of 0.500 GiB" in str(error)


DEVICE = torch.device("cuda", 0)


def accelerator(**options):
    backend = FakeBackend(total=16 * GIB, **options)
    return backend, AcceleratorMemory(DEVICE, backend=backend)


def test_free_and_reserved_memory_is_available_to_a_trial():
    backend, memory = accelerator(used_by_others=3 * GIB)
    backend.hold(4 * GIB)
    assert memory.available_bytes([]) == 13 * GIB
    assert (memory.total_bytes(), memory.describe()) == (16 * GIB, "Fake 1000 (16.0 GiB)")


def test_the_budget_is_the_limit_of_the_allocator_during_a_trial():
    backend, memory = accelerator()
    backend.fraction = 0.75
    with pytest.raises(torch.OutOfMemoryError), memory.measure([], budget_bytes=8 * GIB):
        backend.hold(9 * GIB)
    assert backend.fractions == [1.0, 0.5, 0.75]
    with memory.measure([], budget_bytes=14 * GIB):
        assert backend.fraction == 0.75  # a lower limit of the user is kept


def test_the_peak_is_reserved_memory_since_the_start_of_the_measurement():
    backend, memory = accelerator()
    backend.hold(10 * GIB)
    backend.hold(2 * GIB)
    with memory.measure([], budget_bytes=15 * GIB) as usage:
        backend.hold(6 * GIB)
        backend.hold(3 * GIB)
    assert (usage.resident_bytes, usage.peak_bytes, usage.retried) == (2 * GIB, 6 * GIB, False)
    memory.release()
    assert backend.peak_reserved == backend.reserved == 3 * GIB
    with memory.measure([], budget_bytes=15 * GIB) as usage:
        backend.retries += 1
    assert usage.retried


def test_the_room_of_an_accelerator_follows_free_memory_and_limit():
    backend, memory = accelerator(used_by_others=3 * GIB)
    assert memory.room() is None  # nothing is reserved
    backend.hold(6 * GIB)
    backend.hold(4 * GIB)
    assert memory.room() == Room(held_bytes=4 * GIB, total_bytes=13 * GIB)
    backend.fraction = 0.5
    assert memory.room() == Room(held_bytes=4 * GIB, total_bytes=8 * GIB)
    assert device_memory(CPU).room() is None


def test_allocated_and_requested_bytes_are_read_from_the_message():
    said = (
        "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 39.39 GiB of"
        " which 2.55 GiB is free. Including non-PyTorch memory, this process has 36.84 GiB memory"
        " in use. 20.00 GiB allowed; Of the allocated memory 512.00 MiB is allocated by PyTorch,"
        " and 1.29 GiB is reserved by PyTorch but unallocated. If reserved but"
    )
    assert wanted_bytes(said) == 2 * GIB
    assert wanted_bytes("CUDA out of memory. Tried to allocate 2.00 GiB.") is None
    assert wanted_bytes("std::bad_alloc") is None


def test_a_backend_without_a_limit_is_checked_after_the_trial():
    backend, memory = accelerator()
    backend.set_per_process_memory_fraction = None
    with (
        pytest.raises(torch.OutOfMemoryError, match="over the budget"),
        memory.measure([], budget_bytes=4 * GIB),
    ):
        backend.hold(5 * GIB)


@pytest.mark.parametrize(
    ("device_memory", "available", "headroom", "budget"),
    [
        (None, 8 * GIB, 0.25, 6 * GIB),
        ("4GiB", 8 * GIB, 0.5, 2 * GIB),
        # At most the available memory.
        ("9GiB", 8 * GIB, 0.0, 8 * GIB),
        # A share of the device.
        (0.5, 9 * GIB, 0.0, 8 * GIB),
        (1024, 8 * GIB, 0.0, 1024),
    ],
)
def test_the_budget_is_bounded_by_available_memory_and_excludes_the_headroom(
    device_memory, available, headroom, budget
):
    given = {"headroom": headroom, "total_bytes": 16 * GIB, "available_bytes": available}
    assert budget_bytes(device_memory, **given) == budget


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch):
    for variable in ALLOCATOR_VARIABLES:
        # Set first, so that monkeypatch removes the values that a test sets.
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(torch.version, "hip", None)


def test_segments_expand_without_other_settings():
    assert not segments_expand()
    expand_segments()
    assert segments_expand()


@pytest.mark.parametrize("variable", ALLOCATOR_VARIABLES)
@pytest.mark.parametrize("settings", ["", "expandable_segments:False", "max_split_size_mb:64"])
def test_settings_of_the_environment_are_kept(monkeypatch, variable, settings):
    monkeypatch.setenv(variable, settings)
    before = dict(os.environ)
    expand_segments()
    assert dict(os.environ) == before
    assert not segments_expand()


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [(sys, "platform", "win32"), (sys, "platform", "darwin"), (torch.version, "hip", "6.4")],
)
def test_nothing_is_set_if_pytorch_does_not_support_them(monkeypatch, module, name, value):
    monkeypatch.setattr(module, name, value)
    expand_segments()
    assert allocator_settings() == ("", {})


def test_the_driver_is_checked_only_for_cuda(monkeypatch):
    told = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    expand_segments()
    check_segments(torch.device("cpu"))
    assert told == []
    assert segments_expand()
