"""How an allocator's cache is kept from fragmenting in steps of varying lengths."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from adaptive_batch._util import format_bytes

from .device import DeviceMemory, Held

log = logging.getLogger("adaptive_batch")

# The cache is made anew where the allocator holds this part more or less than a step needs.
_TOLERATED = 0.05
# What it holds is pointed out where that is this part more, in spite of all.
_MUCH = 0.1
# By then the optimizer's states are there, and lengths have varied.
_STEPS_UNTIL_POINTED_OUT = 20
# Each time that the cache was made anew, the next time is further off, so that of N steps where it
# does not help the cube root of 200 N make it.
_CUBE = 200


class AllocatorCache:
    """Makes one block of all that a step needs beside what stays, where fragments pile up.

    A cached block serves whatever is smaller, and nothing that is larger: for that the device is
    asked anew, and both stay. A large block is divided, and is whole again once the step is over.

    Args:
        memory: memory of the device; one whose allocator caches nothing is left alone.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._steps = 0
        self._num_made = 0
        self._next_step = 0
        self._has_warned = False
        # Of the largest micro-batch so far.
        self._largest = 0
        # Bytes that its step allocates beside what stays; 0 before it has run.
        self._needs = 0
        self._at_begin: Held | None = None

    def begin_step(self, sizes: Iterable[int]) -> None:
        """Make room for a step.

        Args:
            sizes: tokens of each micro-batch; rows where their lengths are not known.
        """
        held = self._memory.held()
        self._at_begin = held
        if held is None:
            return
        self._steps += 1
        needs = self._needs
        size = max(sizes, default=0)
        if size > self._largest:
            if self._largest:
                needs = int(needs * size / self._largest)
            self._largest = size
        if not self._needs:
            return
        excess = held.reserved_bytes / (held.allocated_bytes + needs) - 1
        if abs(excess) <= _TOLERATED:
            return
        if self._steps >= self._next_step:
            self._num_made += 1
            self._next_step = self._steps + 1 + self._num_made**2 * 3 // _CUBE
            self._memory.make_block(held.allocated_bytes + needs)
        elif excess > _MUCH and self._steps > _STEPS_UNTIL_POINTED_OUT and not self._has_warned:
            self._has_warned = True
            log.info(
                "the allocator holds %s where steps need %s: their lengths fragment its cache;"
                " PYTORCH_ALLOC_CONF=expandable_segments:True, set before the start, leaves most"
                " of the difference free",
                format_bytes(held.reserved_bytes),
                format_bytes(held.allocated_bytes + needs),
            )

    def end_step(self) -> None:
        """Learn what the step has needed, where its peak was the highest so far."""
        before = self._at_begin
        held = self._memory.held()
        if before is not None and held is not None and held.peak_bytes > before.peak_bytes:
            self._needs = max(self._needs, held.peak_bytes - before.allocated_bytes)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, something else runs than training; what it allocates is no peak of training, nor
        of the statistics that a script reads.
        """
        before = self._memory.held()
        try:
            yield
        finally:
            if before is not None:
                self._memory.restore_peak(before.peak_bytes)

    def look_again(self) -> None:
        """Take it that something else has used the cache, so that the next step looks at it."""
        self._next_step = 0

    def forget(self) -> None:
        """Take it that steps will be of other sizes."""
        self._largest = self._needs = 0
        self.look_again()
