import time

import pytest
from support.allocator_on_stack import segments_of

from adaptive_batch.errors import SettingError
from adaptive_batch.estimate import allocator as module
from adaptive_batch.estimate.allocator import STREAM, AllocatorSettings, CachingAllocator

MIB = 2**20


def allocator(**settings):
    return CachingAllocator(AllocatorSettings(**settings))


def sizes(allocator):
    """Return segments in order as tuples of their blocks in MiB, allocated ones negative."""
    return [
        tuple(
            block["size"] / MIB * (1 if block["state"] == "inactive" else -1)
            for block in segment["blocks"]
        )
        for segment in reversed(segments_of(allocator))
    ]


# Streams.


@pytest.mark.parametrize("expandable_segments", [False, True])
def test_streams_share_no_blocks(expandable_segments):
    device = allocator(expandable_segments=expandable_segments)
    device.replay([STREAM + 40 * MIB, ~0, STREAM + 40 * MIB, ~1])
    assert device.reserved_bytes == 40 * MIB
    device.replay([40 * MIB])
    assert device.reserved_bytes == 80 * MIB
    assert [segment["stream"] for segment in segments_of(device)] == [0, 1]


# Sizes.


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
def test_requests_and_segments_are_rounded_up(request_bytes, block, segment):
    device = allocator()
    assert device.malloc(request_bytes).size == block
    assert (device.allocated_bytes, device.requested_bytes, device.reserved_bytes) == (
        block,
        request_bytes,
        segment,
    )


# Choice of blocks.


def test_the_best_fit_is_split():
    device = allocator()
    large, _, small, _ = (device.malloc(nbytes * MIB) for nbytes in (60, 1, 40, 1))
    device.free(large)
    device.free(small)
    assert device.malloc(30 * MIB).address == small.address
    assert sizes(device) == [(60,), (-1, -1), (-30, 10)]


def test_small_remainders_of_large_blocks_are_not_split_off():
    device = allocator()
    device.free(device.malloc(40 * MIB))
    device.malloc(39 * MIB)
    device.malloc(MIB - 512)
    device.malloc(MIB)
    assert sizes(device) == [(-40,), (512 / MIB - 1, -1, 512 / MIB)]


@pytest.mark.parametrize(("oldest_first", "taken"), [(True, 0), (False, 2)])
def test_ties_are_broken_by_age_or_address(monkeypatch, oldest_first, taken):
    """Newer segments have lower addresses."""
    monkeypatch.setattr(module, "_OLDEST_SEGMENT_FIRST", oldest_first)
    device = allocator()
    blocks = [device.malloc(40 * MIB) for _ in range(3)]
    addresses = [block.address for block in blocks]
    assert addresses == sorted(addresses, reverse=True)
    for block in blocks:
        device.free(block)
    assert device.malloc(40 * MIB).address == addresses[taken]


def test_the_lowest_block_of_a_segment_is_used():
    device = allocator()
    blocks = [device.malloc(5 * MIB) for _ in range(4)]
    for block in (blocks[2], blocks[0]):
        device.free(block)
    assert device.malloc(5 * MIB).address == blocks[0].address


def test_free_neighbours_merge():
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
    device = allocator()
    for block in [device.malloc(50 * MIB), device.malloc(50 * MIB)]:
        device.free(block)
    device.malloc(100 * MIB)
    assert sizes(device) == [(50,), (50,), (-100,)]


# Expandable segments.


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


def test_free_space_at_the_end_of_a_segment_grows():
    device = allocator(expandable_segments=True)
    device.free(device.malloc(100 * MIB))
    device.malloc(130 * MIB)
    assert sizes(device) == [(-130, 10)]


def test_a_sufficient_hole_is_used_before_the_end():
    device = allocator(expandable_segments=True)
    first, _, last = (device.malloc(nbytes * MIB) for nbytes in (60, 20, 40))
    device.free(last)
    device.free(first)
    device.malloc(40 * MIB)
    assert sizes(device) == [(-40, 20, -20, 40)]


# Replay.


def test_numbers_of_allocations_continue_across_logs():
    device = allocator()
    device.replay([5 * MIB, 30 * MIB, ~0])
    device.replay([7 * MIB, ~1, ~2])
    assert (device.allocated_bytes, device.requested_bytes, device.reserved_bytes) == (
        0,
        0,
        50 * MIB,
    )
    assert device.peak_allocated_bytes == 37 * MIB


@pytest.mark.nightly
@pytest.mark.parametrize("expandable", [False, True])
def test_a_hundred_thousand_events_take_seconds_at_most(expandable):
    layer = [n * 512 for n in (8192, 8192, 3, 65536, 24576, 24576, 8192, 1, 40000)]
    log, step = [], 0
    for step in range(5):
        first = step * len(layer) * 1100
        forward = [nbytes + 512 * step for _ in range(1100) for nbytes in layer]
        log += forward + [~(first + at) for at in reversed(range(len(forward)))]
    device = allocator(expandable_segments=expandable)
    start = time.process_time()
    device.replay(log)
    assert len(log) == 99000
    assert device.allocated_bytes == 0
    assert time.process_time() - start < 10  # 0.3 s on a quiet machine


# Settings.


def test_the_environment_is_read(monkeypatch):
    text = "pinned_use_background_threads:True, expandable_segments:True,backend:native"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", text)
    assert AllocatorSettings.from_environment() == AllocatorSettings(expandable_segments=True)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    assert AllocatorSettings.from_environment() == AllocatorSettings()


def test_the_older_variable_takes_precedence(monkeypatch):
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
def test_other_settings_are_refused(monkeypatch, setting):
    text = f"expandable_segments:True,{setting}"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", text)
    with pytest.raises(SettingError) as caught:
        AllocatorSettings.from_environment()
    assert str(caught.value) == f"PYTORCH_ALLOC_CONF={text!r}: {setting} is not simulated; unset it"


def test_a_disabled_cache_is_refused(monkeypatch):
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    with pytest.raises(SettingError, match="unset it"):
        AllocatorSettings.from_environment()
