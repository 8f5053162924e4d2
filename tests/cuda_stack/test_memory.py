"""What the CUDA without a device accounts for, as PyTorch's caching allocator asks for it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from support.cuda_stack.squeezing import leave
from support.paths import subprocess_environment

from adaptive_batch.memory import device_memory

pytestmark = pytest.mark.cuda_stack

MIB = 2**20
CUDA = torch.device("cuda", 0)


def on_the_stack(program: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import torch\n{program}"],
        env=subprocess_environment(**variables),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_what_is_free_falls_by_what_is_reserved_and_comes_back():
    free, total = torch.cuda.mem_get_info()
    assert total - free == 500 * MIB + torch.cuda.memory_reserved()
    held = torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
    assert free - torch.cuda.mem_get_info()[0] == 300 * MIB
    del held
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free


def test_memory_that_others_took_is_refused_by_name_and_given_once_it_is_back():
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


def test_expandable_segments_are_accounted_for():
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


def test_the_device_is_the_one_that_was_asked_for():
    program = (
        "print(torch.cuda.get_device_name(1), torch.cuda.get_device_capability(1),"
        " torch.cuda.mem_get_info(1))"
    )
    said = on_the_stack(
        program, STUB_CUDA_DEVICE="l4", STUB_CUDA_COUNT="2", STUB_CUDA_RESERVED="1000"
    )
    assert said == "NVIDIA L4 (8, 9) (23679007768, 23679008768)"


def test_small_copies_carry_their_values_where_they_are_kept():
    program = "print(torch.tensor([1, 2]).cuda().tolist(), torch.arange(9).cuda().tolist())"
    assert on_the_stack(program) == "[0, 0] [0, 0, 0, 0, 0, 0, 0, 0, 0]"
    assert on_the_stack(program, STUB_CUDA_KEEP="16") == "[1, 2] [0, 0, 0, 0, 0, 0, 0, 0, 0]"


def test_a_block_makes_the_allocator_hold_so_much_and_serves_what_is_smaller():
    memory = device_memory(CUDA)
    stays = torch.empty(30 * MIB, dtype=torch.uint8, device=CUDA)
    cached = torch.empty(500 * MIB, dtype=torch.uint8, device=CUDA)
    del cached
    held = torch.cuda.memory_reserved() - 500 * MIB
    memory.make_block(held + 200 * MIB)
    assert torch.cuda.memory_reserved() == held + 200 * MIB
    parts = [torch.empty(size * MIB, dtype=torch.uint8, device=CUDA) for size in (120, 70)]
    assert torch.cuda.memory_reserved() == held + 200 * MIB
    del parts, stays
    torch.cuda.empty_cache()


@pytest.mark.parametrize("missing", [-1 * MIB, 5 * MIB, 2**40])
def test_no_block_is_made_of_what_the_device_has_no_room_for(missing):
    memory = device_memory(CUDA)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    held = torch.cuda.memory_reserved()
    retries = memory.num_retries()
    memory.make_block(held + free + missing)
    assert torch.cuda.memory_reserved() == held
    assert memory.num_retries() == retries


def test_what_is_spare_of_a_block_is_half_of_what_the_device_has_beyond_it():
    memory = device_memory(CUDA)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    held = torch.cuda.memory_reserved()
    memory.make_block(held + 300 * MIB, spare_bytes=50 * MIB)
    assert torch.cuda.memory_reserved() == held + 350 * MIB
    memory.make_block(held + free - 100 * MIB, spare_bytes=2**50)
    assert held + free - 62 * MIB <= torch.cuda.memory_reserved() <= held + free - 58 * MIB
    torch.cuda.empty_cache()


def test_a_block_is_no_peak():
    memory = device_memory(CUDA)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.empty(100 * MIB, dtype=torch.uint8, device=CUDA)
    peak = torch.cuda.max_memory_allocated()
    memory.make_block(torch.cuda.memory_reserved() + 500 * MIB)
    assert torch.cuda.max_memory_allocated() == peak
    torch.cuda.empty_cache()


def allocate_for(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        torch.empty(100 * MIB, dtype=torch.uint8, device=CUDA)


def test_a_block_is_made_beside_what_other_streams_ask_for_again():
    memory = device_memory(CUDA)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    other = torch.cuda.Stream()
    allocate_for(other)
    assert memory.cached_for_others() == 100 * MIB
    memory.make_block(held + 300 * MIB)
    assert memory.cached_for_others() == 0
    assert torch.cuda.memory_reserved() == held + 300 * MIB
    torch.cuda.empty_cache()


def test_a_block_leaves_room_for_what_other_streams_ask_for_again():
    memory = device_memory(CUDA)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    held = torch.cuda.memory_reserved()
    retries = memory.num_retries()
    other = torch.cuda.Stream()
    allocate_for(other)
    memory.make_block(held + free - 50 * MIB)
    assert held + free - 120 * MIB <= torch.cuda.memory_reserved() <= held + free - 100 * MIB
    allocate_for(other)
    assert memory.num_retries() == retries
    torch.cuda.empty_cache()


def test_a_block_leaves_pools_of_their_own_alone():
    memory = device_memory(CUDA)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept = torch.empty(100 * MIB, dtype=torch.uint8, device=CUDA)
    memory.make_block(held + 300 * MIB)
    assert torch.cuda.memory_reserved() == held + 300 * MIB
    del kept, pool
    torch.cuda.empty_cache()


@pytest.mark.parametrize("segments", ["expandable_segments:False", "expandable_segments:True"])
def test_a_peak_is_put_back(segments):
    program = """
from adaptive_batch.memory import device_memory
memory = device_memory(torch.device("cuda", 0))
def allocate(mebibytes):
    torch.empty(mebibytes * 2**20, dtype=torch.uint8, device="cuda")
allocate(100)
before = memory.peak_bytes()
allocate(300)
memory.restore_peak(before)
assert torch.cuda.max_memory_allocated() == before, torch.cuda.max_memory_allocated()
"""
    on_the_stack(program, PYTORCH_ALLOC_CONF=segments)


@pytest.mark.parametrize(
    "settings", ["expandable_segments:True", "max_split_size_mb:200", "backend:cudaMallocAsync"]
)
def test_where_large_blocks_are_not_divided_none_is_made(monkeypatch, settings):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
    assert not device_memory(CUDA).divides_large_blocks


ASKS_FOR_SEGMENTS = """
import logging, sys
from adaptive_batch.memory import check_segments, expand_segments, segments_expand
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
device = torch.device("cuda", 0)
expand_segments()
check_segments(device)
torch.empty(30 * 2**20, device=device)
print(segments_expand(), {segment["is_expandable"] for segment in torch.cuda.memory_snapshot()})
"""


def test_segments_expand_where_the_driver_has_virtual_memory():
    assert on_the_stack(ASKS_FOR_SEGMENTS) == "True {True}"


def test_a_driver_without_virtual_memory_is_done_without():
    line, last = on_the_stack(ASKS_FOR_SEGMENTS, STUB_CUDA_EXPANDS="0").splitlines()
    assert line.startswith("cuda:0: no expandable segments (CUDA driver error")
    assert line.endswith("the allocator does without them")
    assert last == "False {False}"


def test_an_allocator_that_is_in_use_changes_over():
    program = "torch.empty(1, device='cuda')" + ASKS_FOR_SEGMENTS
    assert on_the_stack(program) == "True {False, True}"
