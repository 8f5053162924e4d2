"""When an allocator gives its cache back, so that steps of varying lengths do not fragment it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from adaptive_batch._util import format_bytes

from .device import DeviceMemory, segments_expand

log = logging.getLogger("adaptive_batch")

# What the allocator holds is looked at every so many steps.
_STEPS_UNTIL_LOOK = 20
# More than this times what it held when it was first looked at is pointed out: by then the
# optimizer's states are there.
_MUCH = 1.1


class AllocatorCache:
    """Gives the cache back before each step that is larger than all before it.

    A cached block serves whatever is smaller, and nothing that is larger: for that the device is
    asked anew, and both stay. So blocks are made for the largest micro-batch first. Of N steps in a
    random order about log(N) are larger than all before them.

    Args:
        memory: memory of the device; one whose allocator caches nothing is left alone.

    Attributes:
        is_kept: whether the blocks are those that a search has left.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._has_cache = memory.granularity_bytes > 1
        # Size of the largest micro-batch that the cached blocks were made for.
        self._largest = 0
        self.is_kept = False
        self._steps_since_release = 0
        self._held_after_largest = 0
        self._has_warned = False

    def begin_step(self, sizes: Iterable[int]) -> None:
        """Make room for a step.

        Args:
            sizes: tokens of each micro-batch; rows where their lengths are not known.
        """
        if not self._has_cache:
            return
        size = max(sizes, default=0)
        if size > self._largest:
            self._memory.empty_cache()
            self._steps_since_release = 0
            self._largest = size
            self.is_kept = False
            return
        self._steps_since_release += 1
        if self._steps_since_release == _STEPS_UNTIL_LOOK:
            self._held_after_largest = self._memory.reserved_bytes()
        elif self._steps_since_release % _STEPS_UNTIL_LOOK == 0 and not self._has_warned:
            self._point_out_fragments()

    def keep(self, size: int) -> None:
        """Take it that a search has left blocks for micro-batches of this size."""
        self._largest = size
        self.is_kept = True
        self._steps_since_release = 0

    def forget(self) -> None:
        """Take it that something else has used the cache, or has given it back."""
        self._largest = 0
        self.is_kept = False

    def forget_after_evaluation(self) -> None:
        """Take it that micro-batches were evaluated, which leaves the blocks of a search: those of
        a whole training step have room for it.
        """
        if not self.is_kept:
            self.forget()

    def _point_out_fragments(self) -> None:
        """Say what is lost to fragmentation, and what helps."""
        held = self._memory.reserved_bytes()
        if held <= _MUCH * self._held_after_largest or segments_expand():
            return
        self._has_warned = True
        log.info(
            "the allocator holds %s, and held %s soon after its largest step: steps of different"
            " lengths fragment its cache; PYTORCH_ALLOC_CONF=expandable_segments:True, set before"
            " the start, leaves most of the difference free",
            format_bytes(held),
            format_bytes(self._held_after_largest),
        )
