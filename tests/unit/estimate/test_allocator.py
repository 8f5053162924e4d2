import time

import pytest
import torch
from support.allocator_on_stack import segments_of

from adaptive_batch.errors import SettingError
from adaptive_batch.estimate import allocator as module
from adaptive_batch.estimate.allocator import AllocatorSettings, CachingAllocator
from adaptive_batch.estimate.step_log import STREAM

MIB = 2**20
GIB = 2**30


def allocator(capacity=GIB, **settings):
    return CachingAllocator(capacity, AllocatorSettings(**settings))


def sizes(allocator):
    """Segments as tuples of their blocks, in MiB, those given out negative; the first segment
    first.
    """
    return [
        tuple(
            block["size"] / MIB * (1 if block["state"] == "inactive" else -1)
            for block in segment["blocks"]
        )
        for segment in reversed(segments_of(allocator))
    ]


# --- streams


@pytest.mark.parametrize("expandable_segments", [False, True])
def test_a_block_of_one_stream_is_given_to_no_other_and_goes_back_with_the_rest(
    expandable_segments,
):
    device = allocator(64 * MIB, expandable_segments=expandable_segments)
    device.replay([STREAM + 40 * MIB, ~0])
    device.replay([STREAM + 40 * MIB, ~1])
    assert (device.reserved_bytes, device.num_retries) == (40 * MIB, 0)
    device.replay([40 * MIB])
    assert (device.reserved_bytes, device.num_retries) == (40 * MIB, 1)
    assert [segment["stream"] for segment in segments_of(device)] == [0]


# --- sizes


@pytest.mark.parametrize(
    ("request_bytes", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),  # less than 1 MiB is left over, so nothing is split off
        (101 * MIB, 102 * MIB, 102 * MIB),
    ],
)
def test_requests_are_rounded_and_segments_more_so(request_bytes, block, segment):
    device = allocator()
    assert device.malloc(request_bytes).size == block
    assert (device.allocated_bytes, device.requested_bytes, device.reserved_bytes) == (
        block,
        request_bytes,
        segment,
    )


# --- which block


def test_the_smallest_that_is_large_enough_is_taken_and_split():
    device = allocator()
    large, _, small, _ = (device.malloc(nbytes * MIB) for nbytes in (60, 1, 40, 1))
    device.free(large)
    device.free(small)
    assert device.malloc(30 * MIB).address == small.address
    assert sizes(device) == [(60,), (-1, -1), (-30, 10)]


def test_no_more_than_1_mib_is_left_over_in_a_large_block_and_any_of_a_small_one():
    device = allocator()
    device.free(device.malloc(40 * MIB))
    device.malloc(39 * MIB)
    device.malloc(MIB - 512)
    device.malloc(MIB)
    assert sizes(device) == [(-40,), (512 / MIB - 1, -1, 512 / MIB)]


@pytest.mark.parametrize(("oldest_first", "taken"), [(True, 0), (False, 2)])
def test_of_blocks_of_one_size_the_oldest_segments_is_taken_or_the_lowest(
    monkeypatch, oldest_first, taken
):
    """Addresses fall, so the two differ."""
    monkeypatch.setattr(module, "_OLDEST_SEGMENT_FIRST", oldest_first)
    device = allocator()
    blocks = [device.malloc(40 * MIB) for _ in range(3)]
    addresses = [block.address for block in blocks]
    assert addresses == sorted(addresses, reverse=True)
    for block in blocks:
        device.free(block)
    assert device.malloc(40 * MIB).address == addresses[taken]


def test_within_a_segment_the_lowest_is_taken():
    device = allocator()
    blocks = [device.malloc(5 * MIB) for _ in range(4)]
    for block in (blocks[2], blocks[0]):
        device.free(block)
    assert device.malloc(5 * MIB).address == blocks[0].address


def test_neighbours_that_are_free_become_one():
    device = allocator()
    blocks = [device.malloc(5 * MIB) for _ in range(4)]
    for at in (0, 2):
        device.free(blocks[at])
    assert sizes(device) == [(5, -5, 5, -5)]
    device.free(blocks[1])
    assert sizes(device) == [(15, -5)]
    device.free(blocks[3])
    assert sizes(device) == [(20,)]


def test_segments_never_merge():
    device = allocator(110 * MIB)
    for block in [device.malloc(50 * MIB), device.malloc(50 * MIB)]:
        device.free(block)
    device.malloc(100 * MIB)
    assert (sizes(device), device.num_retries) == ([(-100,)], 1)


# --- the device has no more


def test_what_is_cached_goes_back_before_an_allocation_fails():
    device = allocator(100 * MIB)
    held = device.malloc(30 * MIB)
    for block in [device.malloc(20 * MIB), device.malloc(20 * MIB)]:
        device.free(block)
    device.malloc(50 * MIB)
    assert (device.num_retries, device.num_ooms, device.reserved_bytes) == (1, 0, 80 * MIB)
    assert device.peak_reserved_bytes == 80 * MIB
    with pytest.raises(
        torch.OutOfMemoryError, match=r"Tried to allocate 0.021 GiB.*of which 0.020 GiB is free"
    ):
        device.malloc(22 * MIB)
    assert (device.num_retries, device.num_ooms) == (2, 1)
    device.free(held)
    device.malloc(22 * MIB)
    assert device.num_ooms == 1


def test_a_segment_in_part_in_use_stays():
    device = allocator(60 * MIB)
    first, second = device.malloc(20 * MIB), device.malloc(20 * MIB)
    device.free(first)
    device.malloc(5 * MIB)
    device.free(second)
    device.empty_cache()
    assert sizes(device) == [(-5, 15)]


# --- expandable segments


def test_an_expandable_segment_grows_by_granules():
    device = allocator(expandable_segments=True)
    device.malloc(25 * MIB)
    device.malloc(1)
    assert device.reserved_bytes == 42 * MIB
    device.malloc(30 * MIB)
    assert (sizes(device), device.reserved_bytes) == (
        [(-25, -30, 5), (-512 / MIB, 2 - 512 / MIB)],
        62 * MIB,
    )


def test_free_space_at_its_end_is_enlarged():
    device = allocator(expandable_segments=True)
    device.free(device.malloc(100 * MIB))
    device.malloc(130 * MIB)
    assert sizes(device) == [(-130, 10)]


def test_a_hole_that_is_large_enough_is_taken_before_the_end_which_counts_as_large_as_it_can_grow():
    device = allocator(expandable_segments=True)
    first, _, last = (device.malloc(nbytes * MIB) for nbytes in (60, 20, 40))
    device.free(last)
    device.free(first)
    device.malloc(40 * MIB)
    assert sizes(device) == [(-40, 20, -20, 40)]


def test_free_granules_are_unmapped_and_their_addresses_filled_again():
    device = allocator(200 * MIB, expandable_segments=True)
    blocks = [device.malloc(50 * MIB) for _ in range(3)]
    device.free(blocks[1])
    device.malloc(80 * MIB)
    assert (device.num_retries, device.reserved_bytes) == (1, 200 * MIB)
    assert sizes(device) == [(-50, -80, 10), (-50, 10)]  # 40 MiB between the two are not mapped
    device.capacity_bytes = 300 * MIB
    device.free(blocks[2])
    device.malloc(80 * MIB)
    assert (sizes(device), device.num_retries) == ([(-50, -80, 20, -80, 10)], 1)


def test_an_expandable_segment_that_is_empty_goes():
    device = allocator(expandable_segments=True)
    device.free(device.malloc(50 * MIB))
    device.empty_cache()
    assert (segments_of(device), device.reserved_bytes) == ([], 0)


# --- replay


def test_a_log_is_replayed_and_its_numbers_go_on():
    device = allocator()
    device.replay([5 * MIB, 30 * MIB, ~0])
    device.replay([7 * MIB, ~1, ~2])
    assert (device.allocated_bytes, device.requested_bytes, device.reserved_bytes) == (
        0,
        0,
        50 * MIB,
    )
    assert (device.peak_allocated_bytes, device.peak_reserved_bytes) == (37 * MIB, 50 * MIB)


@pytest.mark.nightly
@pytest.mark.parametrize("expandable", [False, True])
def test_a_hundred_thousand_events_take_seconds_at_most(expandable):
    layer = [n * 512 for n in (8192, 8192, 3, 65536, 24576, 24576, 8192, 1, 40000)]
    log, step = [], 0
    for step in range(5):
        first = step * len(layer) * 1100
        forward = [nbytes + 512 * step for _ in range(1100) for nbytes in layer]
        log += forward + [~(first + at) for at in reversed(range(len(forward)))]
    device = allocator(2**50, expandable_segments=expandable)
    start = time.process_time()
    device.replay(log)
    assert len(log) == 99000
    assert device.allocated_bytes == 0
    assert time.process_time() - start < 10  # 0.3 s on a quiet machine


# --- settings


def test_the_environment_is_read(monkeypatch):
    text = "pinned_use_background_threads:True, expandable_segments:True,backend:native"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", text)
    assert AllocatorSettings.from_environment() == AllocatorSettings(expandable_segments=True)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    assert AllocatorSettings.from_environment() == AllocatorSettings()


def test_the_newer_variable_counts_where_the_older_is_not_set(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert AllocatorSettings.from_environment().expandable_segments
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    assert not AllocatorSettings.from_environment().expandable_segments


@pytest.mark.parametrize(
    "setting",
    [
        "backend:cudaMallocAsync",
        "throw_on_cudamalloc_oom:True",
        "expandable_segments:yes",
        "anything:1",
        "max_split_size_mb:64",
        "max_non_split_rounding_mb:64",
        "large_segment_size_mb:64",
        "roundup_power2_divisions:[1:2,>:2]",
        "garbage_collection_threshold:0.5",
        "per_process_memory_fraction:0.7",
    ],
)
def test_what_is_not_simulated_is_refused(monkeypatch, setting):
    text = f"expandable_segments:True,{setting}"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", text)
    with pytest.raises(SettingError) as caught:
        AllocatorSettings.from_environment()
    assert (
        str(caught.value)
        == f"PYTORCH_ALLOC_CONF={text!r}: {setting}: reserved memory is simulated without it;"
        " unset it"
    )


def test_without_a_cache_there_is_nothing_to_simulate(monkeypatch):
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    with pytest.raises(SettingError, match="unset it"):
        AllocatorSettings.from_environment()
