"""The simulated allocator, asked as the memory of a device is."""

from __future__ import annotations

from adaptive_batch.memory import block_within

from .allocator import CachingAllocator


class SimulatedMemory:
    """What :class:`~adaptive_batch.memory.AllocatorCache` asks of a device, of a simulated one.

    Args:
        allocator: of the device.
        divides_large_blocks: whether cached blocks serve whatever is smaller, as without expandable
            segments.
    """

    def __init__(self, allocator: CachingAllocator, *, divides_large_blocks: bool = True) -> None:
        self.allocator = allocator
        self.divides_large_blocks = divides_large_blocks

    def reserved_bytes(self) -> int:
        """What the allocator holds now, its cache included."""
        return self.allocator.reserved_bytes

    def allocated_bytes(self) -> int:
        """What is allocated now."""
        return self.allocator.allocated_bytes

    def peak_bytes(self) -> int:
        """What was allocated at most since peaks are counted."""
        return self.allocator.peak_allocated_bytes

    def empty_cache(self) -> None:
        """Give the cache back."""
        self.allocator.empty_cache()

    def cached_for_others(self) -> int:
        """What is free in the cache of other streams than the default one."""
        return self.allocator.cached_for_others()

    def make_block(self, num_bytes: int, *, spare_bytes: int = 0) -> bool:
        """Give the cache back, and hold so many bytes with all that is alive, in one free block,
        beside what other streams ask for again, and what is spare; less or none where the device
        has less. Return whether there is a block.
        """
        allocator = self.allocator
        peak_bytes = allocator.peak_allocated_bytes
        cached_for_others = self.cached_for_others()
        self.empty_cache()
        block_bytes = num_bytes - allocator.reserved_bytes
        of_others = cached_for_others - self.cached_for_others()
        free_bytes = allocator.capacity_bytes - allocator.reserved_bytes
        block_bytes = block_within(
            free_bytes, block_bytes, of_others=of_others, spare_bytes=spare_bytes
        )
        self._allocate_once(block_bytes)
        allocator.peak_allocated_bytes = peak_bytes
        return block_bytes > 0

    def restore_peak(self, peak_bytes: int) -> None:
        """Give the cache back, and count so many bytes as the peak, where more was counted."""
        allocator = self.allocator
        if allocator.peak_allocated_bytes <= peak_bytes:
            return
        self.empty_cache()
        # Statistics of a device show such a peak once it was allocated.
        missing_bytes = peak_bytes - allocator.allocated_bytes
        free_bytes = allocator.capacity_bytes - allocator.reserved_bytes
        self._allocate_once(block_within(free_bytes, missing_bytes))
        allocator.peak_allocated_bytes = peak_bytes

    def _allocate_once(self, num_bytes: int) -> None:
        if num_bytes:
            self.allocator.free(self.allocator.malloc(num_bytes))
