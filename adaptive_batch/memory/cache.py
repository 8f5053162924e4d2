"""When an allocator gives its cache back, so that steps of varying lengths do not fragment it."""

from __future__ import annotations

from .device import DeviceMemory


class AllocatorCache:
    """Gives the cache back before each step that is larger than all before it.

    A cached block serves whatever is smaller, and nothing that is larger: for that the device is
    asked anew, and both stay. So blocks are made for the largest micro-batch first. Of N steps in a
    random order about log(N) are larger than all before them.

    Args:
        memory: memory of the device; one whose allocator caches nothing is left alone.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._has_cache = memory.granularity_bytes > 1
        # Size of the largest micro-batch that the cached blocks were made for.
        self._largest = 0
        self._has_optimizer_state = False

    def begin_step(self, size: int) -> None:
        """Make room for a step.

        Args:
            size: tokens of its largest micro-batch; rows where their lengths are not known.
        """
        if not self._has_cache or size <= self._largest:
            return
        self._memory.release()
        # The first step of the optimizer cuts its state out of these blocks.
        if self._has_optimizer_state:
            self._largest = size
        self._has_optimizer_state = True

    def keep(self, size: int) -> None:
        """Take it that a search has left blocks for micro-batches of this size, and a place for the
        optimizer's state.
        """
        self._largest = size
        self._has_optimizer_state = True

    def forget(self) -> None:
        """Take it that something else has used the cache, or has given it back."""
        self._largest = 0
