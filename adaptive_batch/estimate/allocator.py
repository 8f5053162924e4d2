"""A simulation of PyTorch's caching allocator for CUDA memory.

It implements the rules of c10/cuda/CUDACachingAllocator.cpp for eager programs on a device with
enough memory: pools of small and large blocks per stream, best fit, splitting and merging. The
driver allocates at falling addresses. Private pools (CUDA graphs), blocks in use by another stream
and settings other than ``expandable_segments`` are not simulated.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from adaptive_batch._util import round_up
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import allocator_settings, segments_expand

from .step_log import STREAM

MIB = 2**20
_LEAST_BLOCK = 512
# The largest request of the small pool.
_SMALL = MIB
# A page of the driver, and a segment of the small pool.
_PAGE = 2 * MIB
# Requests from this size on get their own segment.
_LEAST_LARGE = 10 * MIB
# Address of the first segment, and addresses of an expandable segment.
_TOP = 2**47
_EXPANDABLE = 2**42
# Among free blocks of one size, the oldest segment's lowest block is used; before 2.13 the lowest
# one (2.12 uses the oldest block, which is not simulated).
_OLDEST_SEGMENT_FIRST = torch.__version__ >= "2.13"
_HARMLESS = re.compile(
    "expandable_segments:(True|False)$|backend:native$|pinned_|release_lock_on_|graph_capture_"
)


@dataclass(frozen=True)
class AllocatorSettings:
    """The simulated settings of ``PYTORCH_ALLOC_CONF``."""

    expandable_segments: bool = False

    @classmethod
    def from_environment(cls) -> AllocatorSettings:
        """Read the variables that PyTorch reads.

        Raises:
            SettingError: a setting is not simulated.
        """
        if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") not in ("", "0"):
            raise SettingError(
                "PYTORCH_NO_CUDA_MEMORY_CACHING",
                1,
                "an allocator without a cache is not simulated; unset it",
            )
        variable, settings = allocator_settings()
        for name, value in settings.items():
            setting = f"{name}:{value}"
            if not _HARMLESS.match(setting):
                text = os.environ[variable]
                remedy = f"{setting} is not simulated; unset it"
                raise SettingError(variable, text, remedy)
        return cls(segments_expand())


class _Pool:
    """Free blocks of one kind and stream.

    Attributes:
        free: free blocks in order of use.
        last: last block of the newest segment; an expandable pool has one segment.
    """

    def __init__(self, *, is_small: bool, stream: int, is_expandable: bool) -> None:
        self.is_small = is_small
        self.stream = stream
        # Requests to the driver are multiples of it.
        self.granule = _PAGE if is_small else 20 * MIB
        self.least_remainder = _LEAST_BLOCK if is_small or is_expandable else _SMALL + 1
        self.free: list[tuple[int, int, int, Block]] = []
        self.last: Block | None = None

    def add(self, block: Block) -> None:
        insort(self.free, (*block.rank, block))

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, block.rank)]


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment, allocated or free."""

    pool: _Pool
    # Address of the segment.
    segment: int
    address: int
    size: int
    is_allocated: bool = False
    requested: int = 0
    previous: Block | None = None
    next: Block | None = None

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sort key among free blocks; newer segments have lower addresses."""
        return self.size, -self.segment if _OLDEST_SEGMENT_FIRST else 0, self.address

    def split(self, size: int) -> Block:
        """Keep the first `size` bytes and return the rest as a new block."""
        rest = Block(self.pool, self.segment, self.address + size, self.size - size)
        rest.previous = self
        rest.next = self.next
        self.next = rest
        self.size = size
        if rest.next is None:
            self.pool.last = rest
        else:
            rest.next.previous = rest
        return rest

    def put_back(self) -> None:
        """Merge the block with free neighbours and add the result to its pool."""
        block = self
        if self.next is not None and not self.next.is_allocated:
            self.pool.remove(self.next)
            self._absorb(self.next)
        if self.previous is not None and not self.previous.is_allocated:
            block = self.previous
            self.pool.remove(block)
            block._absorb(self)
        self.pool.add(block)

    def _absorb(self, following: Block) -> None:
        """Merge the next block into this one."""
        self.size += following.size
        self.next = following.next
        if self.next is None:
            self.pool.last = self
        else:
            self.next.previous = self


class CachingAllocator:
    """The allocator of one device, whose memory suffices.

    Args:
        settings: settings of the allocator.

    Attributes:
        segments: first block of each segment.
        allocated_bytes, requested_bytes, reserved_bytes: current bytes. Reserved bytes never fall,
            so they are their own peak; the other peaks have the prefix ``peak_``.
    """

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        self._is_expandable = settings is not None and settings.expandable_segments
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self.segments: list[Block] = []
        self._lowest = _TOP
        self._replayed: list[Block | None] = []
        self.allocated_bytes = 0
        self.requested_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_requested_bytes = 0

    def malloc(self, nbytes: int, stream: int = 0) -> Block:
        """Allocate memory for a stream."""
        size = round_up(nbytes, _LEAST_BLOCK)
        is_small = size <= _SMALL
        pool = self._pools.get((stream, is_small))
        if pool is None:
            pool = _Pool(is_small=is_small, stream=stream, is_expandable=self._is_expandable)
            self._pools[stream, is_small] = pool
        block = self._best_fit(pool, size) or self._from_device(pool, size)
        if block.size - size >= pool.least_remainder:
            pool.add(block.split(size))
        block.is_allocated = True
        block.requested = nbytes
        self.allocated_bytes += block.size
        self.requested_bytes += nbytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        if self.requested_bytes > self.peak_requested_bytes:
            self.peak_requested_bytes = self.requested_bytes
        return block

    def free(self, block: Block) -> None:
        block.is_allocated = False
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested
        block.put_back()

    def replay(self, log: Iterable[int]) -> None:
        """Replay a log (:mod:`.step_log`); the numbers of allocations continue across logs."""
        blocks = self._replayed
        for entry in log:
            if entry > 0:
                stream, nbytes = divmod(entry, STREAM)
                blocks.append(self.malloc(nbytes, stream))
            else:
                block = blocks[~entry]
                blocks[~entry] = None
                assert block is not None, f"allocation {~entry} is freed twice"
                self.free(block)

    def snapshot(self, log: Iterable[int]) -> dict[str, Any]:
        """Replay a log and return it as a memory snapshot for pytorch.org/memory_viz."""
        events: list[dict[str, Any]] = []
        blocks = self._replayed
        for time, entry in enumerate(log):
            block = blocks[~entry] if entry <= 0 else None
            self.replay([entry])
            block = block or blocks[-1]
            assert block is not None
            actions = ["alloc"] if entry > 0 else ["free_requested", "free_completed"]
            events += [
                {
                    "action": action,
                    "addr": block.address,
                    "size": block.requested,
                    "stream": block.pool.stream,
                    "time_us": time,
                    "frames": [],
                }
                for action in actions
            ]
        return {"segments": [], "device_traces": [events], "allocator_settings": {}}

    def _best_fit(self, pool: _Pool, size: int) -> Block | None:
        """Remove and return the smallest sufficient free block, or None."""
        free = pool.free
        at = bisect_left(free, (size,))
        if at == len(free):
            return None
        # The end of an expandable segment counts with the addresses after it.
        if self._is_expandable and free[at][-1] is pool.last and at + 1 < len(free):
            at += 1
        return free.pop(at)[-1]

    def _from_device(self, pool: _Pool, size: int) -> Block:
        """Reserve memory and return the free block, of at least `size` bytes, that it is part of.

        An expandable segment grows by whole granules.
        """
        block = pool.last
        segment_bytes = pool.granule
        if self._is_expandable:
            if block is None:
                block = self._new_segment(pool, _EXPANDABLE, 0)
            elif block.is_allocated:
                block = block.split(block.size)
            else:
                pool.remove(block)
            segment_bytes = round_up(size - block.size, pool.granule)
            block.size += segment_bytes
        else:
            if size >= _LEAST_LARGE:
                segment_bytes = round_up(size, _PAGE)
            block = self._new_segment(pool, segment_bytes, segment_bytes)
        self.reserved_bytes += segment_bytes
        return block

    def _new_segment(self, pool: _Pool, num_addresses: int, size: int) -> Block:
        self._lowest -= num_addresses
        block = Block(pool, self._lowest, self._lowest, size)
        pool.last = block
        self.segments.append(block)
        return block
