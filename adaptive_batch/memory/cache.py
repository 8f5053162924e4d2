"""How an allocator's cache is kept from fragmenting in steps of varying lengths."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from adaptive_batch._util import format_bytes

from .device import LEAST_BLOCK_BYTES, CachedMemory

Result = TypeVar("Result")

log = logging.getLogger("adaptive_batch")

# The cache is made anew where the allocator holds this part more than steps need.
_TOLERATED = 0.05
# A block is so much larger than the need, where the device has it: what fragments within a block.
_SPARE = 0.045
# Of that, what is to be left before a step that is larger, whose need is known in proportion.
_LEAST_SPARE = 0.02
# A step that is larger by more than this part has a block, however many were made before.
_MUCH_LARGER = 0.1
# A step that is no more than so many times as large as all before needs more about in proportion.
_MOST_GROWTH = 2.0
# What is held is pointed out where it is this part more than steps need, in spite of the block.
_POINTED_OUT = 0.1
# By then the optimizer's states are there, and lengths have varied.
_STEPS_UNTIL_POINTED_OUT = 20
# After so many blocks that did not help none is made.
_MOST_USELESS = 4
# The n-th block is made so many steps after the one before: n squared over this, and one.
_WAIT_DIVISOR = 64
# So much is left of a trial's budget beside one block: small tensors have blocks of their own.
_LEFT_FOR_OTHERS = 2 * LEAST_BLOCK_BYTES


class AllocatorCache:
    """Makes one block of all that a step needs beside what is alive between steps, where the cache
    has fragmented.

    A cached block serves whatever is smaller, and nothing that is larger: for that the device is
    asked anew, and both stay. A large block is divided, and is whole again once the step is over.

    Args:
        memory: memory of the device; one whose allocator caches nothing is left alone.
    """

    def __init__(self, memory: CachedMemory) -> None:
        self._memory = memory
        self._has_warned = False
        self.forget()

    def forget(self) -> None:
        """Take it that steps will be of other sizes, as if there had been none."""
        self._steps = 0
        self._num_blocks = 0
        # What is held beyond the need from which on the last block has been of no use.
        self._useless_excess = 0.0
        # Blocks in a row after which no less was held.
        self._num_useless = 0
        # Size of the largest micro-batch so far.
        self._largest = 0
        # Most bytes that were allocated by the end of a step; 0 before one has run.
        self._needed_bytes = 0
        # What was allocated before the first step, and what it needed beside that.
        self._first_bytes = 0
        self._first_own_bytes = 0
        self.look_again()

    def look_again(self) -> None:
        """Take it that something else has used the cache, so that the next step looks at it."""
        self._next_step = 0
        # What was held when it was last asked how much of it other streams have free, and that.
        self._seen_bytes = 0
        self._seen_for_others = 0

    def begin_step(self, sizes: Iterable[int]) -> None:
        """Make room for a step.

        Args:
            sizes: tokens of each micro-batch; rows where their lengths are not known.
        """
        if not self._memory.divides_large_blocks:
            return
        self._steps += 1
        size = max(sizes, default=0)
        growth = max(1.0, size / max(1, self._largest))
        self._largest = max(size, self._largest)
        if not self._needed_bytes:
            self._first_bytes = self._memory.allocated_bytes()
            return
        if growth > _MOST_GROWTH:
            # What it needs is not known, and its blocks are made first.
            self._memory.empty_cache()
            return
        is_due = self._num_useless < _MOST_USELESS and self._steps >= self._next_step
        makes_block = is_due or growth > 1 + _MUCH_LARGER
        points_out = not self._has_warned and self._steps > _STEPS_UNTIL_POINTED_OUT
        if not makes_block and not points_out:
            return
        wanted_bytes = self._wanted_bytes(growth)
        held_bytes = self._memory.reserved_bytes()
        if held_bytes > (1 + _TOLERATED) * wanted_bytes:
            # No block serves two streams, so that those of others are no fragments of this one.
            held_bytes = max(wanted_bytes, held_bytes - self._cached_for_others(held_bytes))
        excess = held_bytes / wanted_bytes - 1
        least_excess = _LEAST_SPARE if growth > 1 else 0.0
        if least_excess <= excess <= _TOLERATED:
            return
        if makes_block:
            self._make_block(wanted_bytes, excess)
        elif excess > _POINTED_OUT:
            self._point_out(held_bytes)

    def _wanted_bytes(self, growth: float) -> int:
        """Return what a step needs that is so many times as large as the largest before."""
        if growth == 1 and not self._first_own_bytes:
            return self._needed_bytes
        stays_bytes = self._memory.allocated_bytes()
        # The optimizer's states have come since the first step.
        own_bytes = max(self._first_own_bytes, self._needed_bytes - stays_bytes)
        return stays_bytes + int(growth * own_bytes)

    def _cached_for_others(self, held_bytes: int) -> int:
        # The allocator lists all its blocks for it, which takes milliseconds where there are many.
        if held_bytes != self._seen_bytes:
            self._seen_bytes = held_bytes
            self._seen_for_others = self._memory.cached_for_others()
        return self._seen_for_others

    def _make_block(self, wanted_bytes: int, excess: float) -> None:
        comes_again = self._steps == self._next_step
        is_useless = comes_again and excess >= self._useless_excess
        self._num_useless = self._num_useless + 1 if is_useless else 0
        if self._num_useless == _MOST_USELESS:
            return
        self._num_blocks += 1
        self._next_step = self._steps + 1 + self._num_blocks**2 // _WAIT_DIVISOR
        spare_bytes = int(_SPARE * wanted_bytes)
        is_made = self._memory.make_block(wanted_bytes, spare_bytes=spare_bytes)
        self._useless_excess = excess
        if excess <= 0:
            # Steps that grow need a block each, which is of no use where the device has no room.
            self._useless_excess = math.inf if is_made else -1.0

    def _point_out(self, held_bytes: int) -> None:
        self._has_warned = True
        log.info(
            "the allocator holds %s where no more than %s was allocated: steps of different lengths"
            " fragment its cache; PYTORCH_ALLOC_CONF=expandable_segments:True, set before the"
            " start, leaves most of the difference free",
            format_bytes(held_bytes),
            format_bytes(self._needed_bytes),
        )

    def end_step(self, *, leaves_gradients: Callable[[], bool] = lambda: True) -> None:
        """Learn what steps need.

        Args:
            leaves_gradients: function that returns whether its gradients are there; not with the
                optimizer in backward, whose states are in the peak by now.
        """
        if not self._memory.divides_large_blocks:
            return
        peak_bytes = self._memory.peak_bytes()
        self._first_own_bytes = 0
        if not self._needed_bytes:
            if leaves_gradients():
                self._first_own_bytes = peak_bytes - self._first_bytes
            if self._memory.reserved_bytes() > (1 + _TOLERATED) * peak_bytes:
                # Otherwise the optimizer's states, which stay, are cut from what is free.
                self._memory.empty_cache()
        self._needed_bytes = max(self._needed_bytes, peak_bytes)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, something else runs than training; what it allocates is no peak of training, nor
        of the statistics that a script reads.
        """
        peak_bytes = self._memory.peak_bytes()
        try:
            yield
        finally:
            self._memory.restore_peak(peak_bytes)
            self.look_again()

    def try_first_step(
        self, attempt: Callable[[Callable[[], object]], Result | None], *, budget_bytes: int
    ) -> Result | None:
        """Try the first step of a trial, from which it is known what the later ones need; return
        the result of the attempt, None where the step does not fit.

        Args:
            attempt: function that runs the step once it has called what it is given, which makes
                room; None where that does not fit.
            budget_bytes: bytes that the trial may use.
        """
        block_bytes = budget_bytes - _LEFT_FOR_OTHERS
        # In one block nothing that is freed is too small for what comes next. But it serves one
        # stream, and the step may use others.
        for make_room in (partial(self._memory.make_block, block_bytes), lambda: None):
            self.forget()
            result = attempt(make_room)
            if result is not None:
                return result
        return None
