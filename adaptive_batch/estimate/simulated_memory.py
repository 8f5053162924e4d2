"""The simulated allocator, asked as the memory of a device is."""

from __future__ import annotations

from .allocator import MIB, CachingAllocator

# As in training, see :class:`~adaptive_batch.memory.AcceleratorMemory`.
_LEAST_BLOCK = 20 * MIB
_LEFT_FREE = 0.01


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

    def reservable_bytes(self) -> int:
        """What the allocator can hold beside what it holds now, but for a hundredth."""
        left_free = int(_LEFT_FREE * self.allocator.total_bytes)
        return max(0, self._free_bytes - max(left_free, _LEAST_BLOCK))

    @property
    def _free_bytes(self) -> int:
        return self.allocator.capacity_bytes - self.allocator.reserved_bytes

    def peak_bytes(self) -> int:
        """What was allocated at most since peaks are counted."""
        return self.allocator.peak_allocated_bytes

    def empty_cache(self) -> None:
        """Give the cache back."""
        self.allocator.empty_cache()

    def make_block(self, num_bytes: int) -> None:
        """Give the cache back, and hold so many bytes with all that is alive, in one free block;
        only the former where the device has less.
        """
        allocator = self.allocator
        of_others = self.bytes_of_others()
        peak_bytes = allocator.peak_allocated_bytes
        self.empty_cache()
        others_return = of_others - self.bytes_of_others()
        others_return += allocator.peak_small_bytes - allocator.small_bytes
        block_bytes = num_bytes - allocator.reserved_bytes - others_return
        if block_bytes >= _LEAST_BLOCK and block_bytes + _LEAST_BLOCK <= self._free_bytes:
            allocator.free(allocator.malloc(block_bytes))
        allocator.peak_allocated_bytes = peak_bytes

    def bytes_of_others(self) -> int:
        """What is held in large blocks for other streams than the first."""
        total_bytes = 0
        for segment in self.allocator.segments():
            if segment["segment_type"] == "large" and segment["stream"]:
                total_bytes += segment["total_size"]
        return total_bytes

    def restore_peak(self, peak_bytes: int) -> None:
        """Give the cache back, and count so many bytes as the peak."""
        self.empty_cache()
        self.allocator.peak_allocated_bytes = peak_bytes
