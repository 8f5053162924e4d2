"""When the allocator's cache is given back before a step."""

from __future__ import annotations

import logging

from support.fakes import CachingMemory

from adaptive_batch.memory import AllocatorCache


def releases_of(cache: AllocatorCache, memory: CachingMemory, *sizes: int) -> list[int]:
    """Begin a step of each size; return after which of them the cache had been given back."""
    released = []
    for size in sizes:
        before = memory.releases
        cache.begin_step([size])
        if memory.releases > before:
            released.append(size)
    return released


def test_it_is_given_back_before_a_step_that_is_larger_than_all_before():
    memory = CachingMemory()
    cache = AllocatorCache(memory)
    assert releases_of(cache, memory, 30, 20, 40, 30, 40, 41, 10) == [30, 40, 41]


def test_blocks_that_a_search_has_left_are_kept():
    memory = CachingMemory()
    cache = AllocatorCache(memory)
    cache.keep(100)
    assert releases_of(cache, memory, 90, 100, 101) == [101]


def test_it_is_said_whether_the_blocks_are_those_of_a_search():
    memory = CachingMemory()
    cache = AllocatorCache(memory)
    assert not cache.is_kept
    cache.keep(100)
    releases_of(cache, memory, 100)
    assert cache.is_kept
    releases_of(cache, memory, 101)
    assert not cache.is_kept


def test_blocks_are_made_anew_after_something_else_has_used_the_cache():
    memory = CachingMemory()
    cache = AllocatorCache(memory)
    cache.keep(100)
    cache.forget()
    assert releases_of(cache, memory, 90, 80) == [90]


def test_much_that_is_lost_to_fragmentation_is_said_once(caplog):
    caplog.set_level(logging.INFO)
    memory = CachingMemory()
    cache = AllocatorCache(memory)
    cache.keep(100)
    # Until the first look the optimizer makes its states.
    memory.held = 5 * 2**30
    releases_of(cache, memory, *[90] * 19)
    memory.held = 10 * 2**30
    releases_of(cache, memory, 90)
    memory.held = 11 * 2**30
    releases_of(cache, memory, *[90] * 50)
    assert caplog.messages == []
    memory.held = 12 * 2**30
    releases_of(cache, memory, *[90] * 50)
    (message,) = caplog.messages
    assert "holds 12.00 GiB, and held 10.00 GiB soon after its largest step" in message
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in message


def test_with_expandable_segments_nothing_is_advised(caplog, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    caplog.set_level(logging.INFO)
    memory = CachingMemory()
    cache = AllocatorCache(memory)
    memory.held = 2**30
    releases_of(cache, memory, *[90] * 30)
    memory.held = 2**31
    releases_of(cache, memory, *[90] * 30)
    assert caplog.messages == []


def test_an_evaluation_leaves_the_blocks_of_a_search_alone():
    memory = CachingMemory()
    cache = AllocatorCache(memory)
    cache.keep(100)
    cache.forget_after_evaluation()
    assert releases_of(cache, memory, 90, 101) == [101]
    cache.forget_after_evaluation()
    assert releases_of(cache, memory, 90) == [90]


def test_a_device_that_caches_nothing_is_left_alone():
    memory = CachingMemory()
    memory.granularity_bytes = 1
    assert releases_of(AllocatorCache(memory), memory, 1, 2, 3) == []
