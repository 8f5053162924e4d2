"""Memory accounting of the emulated CUDA, and expandable segments."""

from __future__ import annotations

import pytest
import torch
from support.cuda_stack.squeezing import leave
from support.processes import run_python

pytestmark = pytest.mark.cuda_stack

MIB = 2**20
CUDA = torch.device("cuda", 0)


def on_the_stack(program: str, **variables: str) -> str:
    return run_python("-c", f"import torch\n{program}", **variables).stdout.strip()


def test_reserved_memory_is_taken_from_free_memory():
    free, total = torch.cuda.mem_get_info()
    assert total - free == 500 * MIB + torch.cuda.memory_reserved()
    held = torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
    assert free - torch.cuda.mem_get_info()[0] == 300 * MIB
    del held
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free


def test_memory_of_other_processes_is_not_available():
    torch.cuda.empty_cache()
    leave(torch.cuda.memory_reserved() + 100 * MIB)
    torch.cuda.reset_peak_memory_stats()
    torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"Tried to allocate 102\.00 MiB.* of which 1\d\d\.\d\d MiB is free",
    ):
        torch.empty(102 * MIB, dtype=torch.uint8, device="cuda")
    leave(torch.cuda.memory_reserved() + 200 * MIB)
    torch.empty(102 * MIB, dtype=torch.uint8, device="cuda")


def test_expandable_segments_are_counted():
    program = (
        "import ctypes\n"
        "held = [torch.empty(30 * 2**20, dtype=torch.uint8, device='cuda') for _ in range(3)]\n"
        "print(torch.cuda.memory_reserved() // 2**20, len(torch.cuda.memory_snapshot()))\n"
        "free, total = torch.cuda.mem_get_info()\n"
        "assert total - free == 500 * 2**20 + torch.cuda.memory_reserved()\n"
        "try: torch.empty(total, dtype=torch.uint8, device='cuda')\n"
        "except torch.OutOfMemoryError: print('refused')\n"
        "del held; torch.cuda.empty_cache(); print(torch.cuda.mem_get_info()[0] - total)"
    )
    said = on_the_stack(program, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True").splitlines()
    assert said == ["100 1", "refused", str(-500 * MIB)]


def test_the_configured_device_is_emulated():
    program = (
        "print(torch.cuda.get_device_name(1), torch.cuda.get_device_capability(1),"
        " torch.cuda.mem_get_info(1))"
    )
    said = on_the_stack(
        program,
        EMULATE_DEVICE="NVIDIA L4,89,58,23679008768",
        EMULATE_DEVICE_COUNT="2",
        EMULATE_CONTEXT_BYTES="1000",
    )
    assert said == "NVIDIA L4 (8, 9) (23679007768, 23679008768)"


def test_small_copies_keep_their_values_if_configured():
    program = "print(torch.tensor([1, 2]).cuda().tolist(), torch.arange(9).cuda().tolist())"
    assert on_the_stack(program) == "[0, 0] [0, 0, 0, 0, 0, 0, 0, 0, 0]"
    assert on_the_stack(program, EMULATE_COPIED_BYTES="16") == "[1, 2] [0, 0, 0, 0, 0, 0, 0, 0, 0]"


EXPANDS_SEGMENTS = """
import logging, sys
from adaptive_batch.memory import check_segments, expand_segments, segments_expand
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
device = torch.device("cuda", 0)
expand_segments()
check_segments(device)
torch.empty(30 * 2**20, device=device)
print(segments_expand(), {segment["is_expandable"] for segment in torch.cuda.memory_snapshot()})
"""


def test_a_driver_without_virtual_memory_disables_them():
    line, last = on_the_stack(EXPANDS_SEGMENTS, EMULATE_VIRTUAL_MEMORY="0").splitlines()
    assert "CUDA driver error" in line
    assert "expandable segments disabled" in line
    assert last == "False {False}"


def test_an_initialized_allocator_is_changed():
    program = "held = torch.empty(1, device='cuda')" + EXPANDS_SEGMENTS
    assert on_the_stack(program) == "True {False, True}"


IN_SCRIPT = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
import adaptive_batch
from adaptive_batch.memory import expand_segments_in_script
from torch import nn
if "model first" in sys.argv:
    model = nn.Linear(2048, 8192, device="cuda")
    adaptive_batch.AdaptiveStep(model, lambda part: None)
    rows = torch.empty(2**24, device="cuda")
else:
    expand_segments_in_script()
    model = nn.Linear(2048, 8192, device="cuda")
print({segment["is_expandable"] for segment in torch.cuda.memory_snapshot()})
"""


def test_a_script_has_expandable_segments():
    line, segments = on_the_stack(IN_SCRIPT).splitlines()
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in line
    assert segments == "{True}"


def test_segments_expand_after_the_model_is_loaded():
    program = f"import sys; sys.argv.append('model first'){IN_SCRIPT}"
    line, segments = on_the_stack(program).splitlines()
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in line
    assert segments == "{False, True}"
    assert on_the_stack(program, PYTORCH_ALLOC_CONF="expandable_segments:False") == "{False}"


def test_settings_of_the_program_are_kept():
    given = "torch.cuda.memory._set_allocator_settings('max_split_size_mb:128')"
    program = f"{given}\nimport sys; sys.argv.append('model first'){IN_SCRIPT}"
    program += "print(torch._C._accelerator_getAllocatorSettings())"
    assert on_the_stack(program).splitlines() == ["{False}", "max_split_size_mb:128"]


def test_importing_does_not_initialize_cuda():
    program = (
        "import os, adaptive_batch; print(torch.cuda.is_initialized(),"
        " [name for name in os.environ if 'ALLOC_CONF' in name])"
    )
    assert on_the_stack(program) == "False []"
