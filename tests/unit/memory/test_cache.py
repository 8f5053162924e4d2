"""How an allocator's cache is kept from fragmenting, on PyTorch's allocator as it is simulated."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable

import pytest
from support.fakes import CachingMemory
from support.simulated_memory import SimulatedMemory

from adaptive_batch.estimate.allocator import CachingAllocator
from adaptive_batch.memory import AllocatorCache

LAYERS, MIB = 24, 2**20
# The optimizer's states and the parameters.
STAYS = 2400 * MIB


class Trained:
    """Steps of one micro-batch of a chain of layers: what each makes is freed in backward, in which
    a gradient comes; the last step's are freed before the next.
    """

    def __init__(self, memory: CachingMemory, *, workspace: int = 16384) -> None:
        self.memory = memory
        self.workspace = workspace
        self.stays = memory.allocator.malloc(STAYS)

    def run(self, size: int) -> None:
        allocator = self.memory.allocator
        kept = []
        for layer in range(LAYERS):
            # A workspace that is gone at once, of another size in each layer.
            workspace = allocator.malloc((layer % 5 + 1) * size * self.workspace)
            kept.append(allocator.malloc(size * 8192))
            allocator.free(workspace)
        gradients = []
        for block in reversed(kept):
            gradients.append(allocator.malloc(24 * MIB))
            allocator.free(block)
        for gradient in gradients:
            allocator.free(gradient)


def run_steps(cache: AllocatorCache | None, memory: CachingMemory, sizes: Iterable[int]) -> float:
    """Run steps; return what is reserved over the peak of what was allocated."""
    trained = Trained(memory)
    for size in sizes:
        if cache is None:
            trained.run(size)
            continue
        cache.begin_step([size])
        trained.run(size)
        cache.end_step()
    return memory.allocator.reserved_bytes / memory.allocator.peak_allocated_bytes


def drawn(number: int) -> list[int]:
    draw = random.Random(0)
    return [round(draw.lognormvariate(8, 0.5)) for _ in range(number)]


def test_steps_of_varying_lengths_hold_what_they_allocate():
    assert run_steps(None, CachingMemory(), drawn(100)) > 1.4
    memory = CachingMemory()
    assert run_steps(AllocatorCache(memory), memory, drawn(100)) < 1.05
    # A larger step, or fragments: about as often as a step is larger than all before.
    assert memory.releases < 12


@pytest.mark.parametrize("is_told", [True, False])
def test_a_cache_that_has_forgotten_makes_blocks_as_a_new_one(is_told):
    memory = CachingMemory()
    trained = Trained(memory)
    cache = AllocatorCache(memory)

    def releases_in(sizes: Iterable[int]) -> int:
        earlier = memory.releases
        for size in sizes:
            cache.begin_step([size])
            trained.run(size)
            cache.end_step()
        return memory.releases - earlier

    first = releases_in(drawn(40))
    memory.allocator.empty_cache()
    memory.reset_peaks()
    if is_told:
        cache.forget()
    else:
        cache = AllocatorCache(memory)
    assert releases_in(drawn(40)) == first > 2


def test_before_a_much_larger_step_the_cache_is_given_back_and_what_it_needs_is_learned():
    memory = CachingMemory()
    cache = AllocatorCache(memory)
    trained = Trained(memory, workspace=1)
    for size in (10, 4000):
        cache.begin_step([size])
        trained.run(size)
        cache.end_step()
    # Not 400 times what the short one took.
    assert memory.allocator.reserved_bytes < 1.5 * memory.allocator.peak_allocated_bytes
    cache.begin_step([4000])
    trained.run(4000)
    assert memory.allocator.reserved_bytes < 1.1 * memory.allocator.peak_allocated_bytes


def test_the_blocks_of_other_streams_are_no_fragments(caplog):
    caplog.set_level(logging.INFO)
    memory = CachingMemory()
    allocator = memory.allocator
    cache = AllocatorCache(memory)
    trained = Trained(memory)
    for size in drawn(100):
        cache.begin_step([size])
        # As FSDP2 gathers parameters: what is free by the peak serves no other stream.
        allocator.free(allocator.malloc(800 * MIB, stream=1))
        trained.run(size)
        cache.end_step()
    assert allocator.reserved_bytes - 800 * MIB < 1.05 * allocator.peak_allocated_bytes
    assert memory.releases < 12
    assert not caplog.messages


class Listed(CachingMemory):
    """Counts how often all blocks are listed."""

    num_lists = 0

    def cached_for_others(self) -> int:
        self.num_lists += 1
        return super().cached_for_others()


@pytest.mark.parametrize("others_bytes", [0, 800 * MIB])
def test_blocks_are_listed_only_where_what_is_held_has_changed(others_bytes: int) -> None:
    memory = Listed()
    cache = AllocatorCache(memory)
    trained = Trained(memory)
    for size in drawn(300):
        cache.begin_step([size])
        memory.allocator.free(memory.allocator.malloc(others_bytes, stream=1))
        trained.run(size)
        cache.end_step()
    # Not with each step.
    assert 0 < memory.num_lists < 30


@pytest.mark.parametrize("size", [4300, 6000])
def test_a_step_that_is_larger_has_a_block_in_proportion(size: int) -> None:
    memory = CachingMemory()
    cache = AllocatorCache(memory)
    trained = Trained(memory, workspace=1)
    for size_of_step in (4000, 4000, size):
        cache.begin_step([size_of_step])
        trained.run(size_of_step)
        cache.end_step()
    assert memory.allocator.reserved_bytes < 1.08 * memory.allocator.peak_allocated_bytes


def test_states_of_the_optimizer_that_come_after_the_first_step_are_beside_the_block():
    memory = CachingMemory()
    allocator = memory.allocator
    cache = AllocatorCache(memory)
    trained = Trained(memory, workspace=1)
    cache.begin_step([8000])
    trained.run(8000)
    cache.end_step()
    for _ in range(20):
        allocator.malloc(60 * MIB)
    cache.begin_step([8000])
    trained.run(8000)
    cache.end_step()
    assert allocator.reserved_bytes < 1.06 * allocator.peak_allocated_bytes


def test_states_of_an_optimizer_in_backward_are_in_the_first_peak_and_counted_once():
    memory = CachingMemory()
    allocator = memory.allocator
    cache = AllocatorCache(memory)
    allocator.malloc(STAYS)
    for states in (200 * MIB, 0):
        cache.begin_step([2000])
        kept = [allocator.malloc(40 * MIB) for _ in range(LAYERS)]
        for block in kept:
            gradient = allocator.malloc(100 * MIB)
            allocator.malloc(states)
            allocator.free(gradient)
            allocator.free(block)
        cache.end_step(leaves_gradients=lambda: False)
    assert allocator.peak_reserved_bytes < 1.06 * allocator.peak_allocated_bytes


def test_gradients_that_are_there_between_two_batches_are_no_fragments():
    memory = CachingMemory()
    cache = AllocatorCache(memory)
    trained = Trained(memory, workspace=1)
    for _ in range(10):
        cache.begin_step([4000])
        trained.run(4000)
        cache.end_step()
        gradients = memory.allocator.malloc(400 * MIB)
        cache.begin_step([4000])
        trained.run(4000)
        cache.end_step()
        memory.allocator.free(gradients)
    assert memory.releases <= 2


def test_what_a_search_has_left_is_kept_where_it_is_about_what_steps_need():
    memory = CachingMemory()
    cache = AllocatorCache(memory)
    trained = Trained(memory, workspace=1)
    trained.run(4000)
    memory.make_block(memory.allocator.peak_allocated_bytes)
    memory.allocator.peak_allocated_bytes = STAYS
    memory.releases = 0
    for size in (4000, 2000, 4000, 3000):
        cache.begin_step([size])
        trained.run(size)
        cache.end_step()
    assert memory.releases == 0


def test_peaks_of_something_else_are_neither_trainings_nor_the_scripts():
    memory = CachingMemory()
    cache = AllocatorCache(memory)
    trained = Trained(memory)
    cache.begin_step([1000])
    trained.run(1000)
    cache.end_step()
    before = memory.allocator.peak_allocated_bytes
    with cache.apart():
        trained.run(9000)
    assert memory.allocator.peak_allocated_bytes == before
    cache.begin_step([1000])
    assert memory.allocator.reserved_bytes < 1.05 * before


def test_after_memory_ran_out_what_steps_need_is_learned_anew():
    memory = CachingMemory()
    cache = AllocatorCache(memory)
    trained = Trained(memory, workspace=1)
    for size in (4000, 4000):
        cache.begin_step([size])
        trained.run(size)
        cache.end_step()
    cache.forget()
    memory.allocator.peak_allocated_bytes = STAYS
    for size in (3000, 2900):
        cache.begin_step([size])
        trained.run(size)
        cache.end_step()
    assert memory.allocator.reserved_bytes < 1.1 * memory.allocator.peak_allocated_bytes


def test_peaks_that_the_script_resets_after_each_step_are_seen():
    memory = CachingMemory()
    cache = AllocatorCache(memory)
    trained = Trained(memory)
    highest = 0
    for size in drawn(40):
        cache.begin_step([size])
        trained.run(size)
        cache.end_step()
        highest = max(highest, memory.allocator.peak_allocated_bytes)
        memory.allocator.peak_allocated_bytes = memory.allocator.allocated_bytes
    assert memory.allocator.reserved_bytes < 1.06 * highest


class Stubborn(CachingMemory):
    """Holds a fifth too much, whatever is done."""

    def reserved_bytes(self) -> int:
        return int(1.2 * self.allocator.peak_allocated_bytes)


def test_fragments_that_stay_are_said_once_and_no_more_blocks_are_made(caplog):
    caplog.set_level(logging.INFO)
    memory = Stubborn()
    run_steps(AllocatorCache(memory), memory, [4000] * 400)
    (message,) = caplog.messages
    assert "the allocator holds" in message
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in message
    assert memory.releases <= 6


def test_where_the_device_has_no_room_for_a_block_the_cache_is_soon_left_alone():
    memory = CachingMemory()
    trained = Trained(memory, workspace=1)
    cache = AllocatorCache(memory)
    for step in range(200):
        if step == 3:
            # Another program takes what a larger step needs.
            memory.empty_cache()
            memory.releases = 0
            memory.allocator.capacity_bytes = memory.allocator.peak_allocated_bytes - 200 * MIB
        size = 1000 + step % 7 * 100 if step > 2 else 8000
        cache.begin_step([size])
        trained.run(size)
        cache.end_step()
    assert memory.releases <= 4


class Plain(CachingMemory):
    """Its allocator has no blocks that are divided."""

    def __init__(self) -> None:
        super().__init__()
        self.divides_large_blocks = False


def test_a_device_without_such_an_allocator_is_left_alone():
    memory = Plain()
    cache = AllocatorCache(memory)
    run_steps(cache, memory, drawn(10))
    assert memory.releases == 0


# As on PyTorch's CUDA build, where as much of a device is left.
@pytest.mark.parametrize(
    ("alive", "wanted", "spare", "made"),
    [
        (100, 50, 0, 50),
        (100, 10, 0, 0),
        (924, 70, 0, 70),
        (924, 90, 0, 0),
        (924, 50, 10, 60),
        # In units of 2 MiB.
        (924, 70, 30, 76),
        (924, 90, 30, 0),
    ],
    ids=[
        "a block",
        "too small for one of its own",
        "fits",
        "too near the end of the device",
        "what is spare fits",
        "half of what is free stays",
        "even without it too near the end",
    ],
)
def test_a_block_is_simulated_where_a_device_makes_one(
    alive: int, wanted: int, spare: int, made: int
) -> None:
    memory = SimulatedMemory(CachingAllocator(1024 * MIB))
    memory.allocator.malloc(alive * MIB)
    memory.make_block((alive + wanted) * MIB, spare_bytes=spare * MIB)
    assert memory.allocator.reserved_bytes == (alive + made) * MIB
