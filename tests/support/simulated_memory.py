"""The simulated allocator, asked as the memory of a device is."""

from __future__ import annotations

from adaptive_batch.estimate import CachingAllocator
from adaptive_batch.memory import CachedMemory


class SimulatedMemory(CachedMemory):
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
        return self.allocator.reserved_bytes

    def allocated_bytes(self) -> int:
        return self.allocator.allocated_bytes

    def peak_bytes(self) -> int:
        return self.allocator.peak_allocated_bytes

    def empty_cache(self) -> None:
        self.allocator.empty_cache()

    def cached_for_others(self) -> int:
        others = [pool for pool in self.allocator._pools.values() if pool.stream]
        return sum(size for pool in others for size, _, _ in pool.free)

    def reset_peaks(self) -> None:
        self.allocator.peak_allocated_bytes = self.allocator.allocated_bytes
        self.allocator.peak_reserved_bytes = self.allocator.reserved_bytes

    def _reservable_bytes(self) -> int:
        return self.allocator.capacity_bytes - self.allocator.reserved_bytes

    def _allocate_once(self, num_bytes: int) -> None:
        if num_bytes:
            self.allocator.free(self.allocator.malloc(num_bytes))

    def _lower_peak(self, peak_bytes: int, block_bytes: int) -> None:
        # Statistics of a device show such a peak once it was allocated.
        self._allocate_once(block_bytes)
        self.allocator.peak_allocated_bytes = peak_bytes
