"""A simulation of PyTorch's caching allocator for CUDA memory.

It implements the rules of c10/cuda/CUDACachingAllocator.cpp for eager programs: pools of small and
large blocks per stream, best fit, splitting and merging, and the release of cached blocks on a full
device. The driver allocates at falling addresses. Private pools (CUDA graphs), blocks in use by
another stream and settings other than ``expandable_segments`` are not simulated.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from adaptive_batch._util import format_bytes, round_up
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
# Address of the first segment.
_TOP = 2**47
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
    """Unused blocks of one kind and stream.

    Attributes:
        free: free blocks in order of use.
        unmapped: unmapped blocks of expandable segments, by address.
    """

    def __init__(self, *, is_small: bool, stream: int, is_expandable: bool) -> None:
        self.is_small = is_small
        self.stream = stream
        # Requests to the driver are multiples of it.
        self.granule = _PAGE if is_small else 20 * MIB
        self.least_remainder = _LEAST_BLOCK if is_small or is_expandable else _SMALL + 1
        self.free: list[tuple[int, int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def add(self, block: Block) -> None:
        if block.is_mapped:
            insort(self.free, (*block.rank, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        if block.is_mapped:
            del self.free[bisect_left(self.free, block.rank)]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment: allocated, free, or (in an expandable segment) unmapped."""

    pool: _Pool
    # Address of the segment.
    segment: int
    address: int
    size: int
    is_mapped: bool = True
    is_allocated: bool = False
    requested: int = 0
    previous: Block | None = None
    next: Block | None = None

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sort key among free blocks; newer segments have lower addresses."""
        return self.size, -self.segment if _OLDEST_SEGMENT_FIRST else 0, self.address

    @property
    def is_whole_segment(self) -> bool:
        return self.previous is None and self.next is None

    @property
    def room(self) -> int:
        """Size of a free block with the unmapped block after it."""
        if self.next is None or self.next.is_mapped:
            return self.size
        return self.size + self.next.size

    def split(self, size: int) -> Block:
        """Keep the first `size` bytes and return the rest as a new block."""
        rest = Block(self.pool, self.segment, self.address + size, self.size - size, self.is_mapped)
        rest.previous = self
        rest.next = self.next
        self.next = rest
        self.size = size
        if rest.next is not None:
            rest.next.previous = rest
        return rest

    def put_back(self) -> Block:
        """Merge the block with equal neighbours, add the result to its pool, and return it."""
        block = self
        following = self.next
        if following is not None and self._merges_with(following):
            self.pool.remove(following)
            self._absorb(following)
        previous = self.previous
        if previous is not None and self._merges_with(previous):
            self.pool.remove(previous)
            previous._absorb(self)
            block = previous
        self.pool.add(block)
        return block

    def _merges_with(self, neighbour: Block) -> bool:
        return not neighbour.is_allocated and neighbour.is_mapped == self.is_mapped

    def _absorb(self, following: Block) -> None:
        """Merge the next block into this one."""
        self.size += following.size
        self.next = following.next
        if following.next is not None:
            following.next.previous = self


class CachingAllocator:
    """The allocator of one device.

    Args:
        capacity_bytes: memory that the driver can allocate, without the context.
        settings: settings of the allocator.
        total_bytes: memory of the device; None for `capacity_bytes`.

    Attributes:
        allocated_bytes, requested_bytes, reserved_bytes: current bytes; their peaks have the prefix
            ``peak_``.
        num_retries: number of allocations that needed the release of all cached blocks.
        num_ooms: number of allocations that failed even then.
    """

    def __init__(
        self,
        capacity_bytes: int,
        settings: AllocatorSettings | None = None,
        *,
        total_bytes: int | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.total_bytes = total_bytes or capacity_bytes
        self._is_expandable = settings is not None and settings.expandable_segments
        self._pools: dict[tuple[int, bool], _Pool] = {}
        # The first block of each segment.
        self._heads: dict[int, Block] = {}
        self._lowest = _TOP
        self._replayed: list[Block | None] = []
        self.num_retries = 0
        self.num_ooms = 0
        self.allocated_bytes = 0
        self.requested_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_requested_bytes = 0
        self.peak_reserved_bytes = 0

    def malloc(self, nbytes: int, stream: int = 0) -> Block:
        """Allocate memory for a stream.

        Raises:
            torch.OutOfMemoryError: memory is insufficient even after the release of cached blocks.
        """
        size = round_up(nbytes, _LEAST_BLOCK)
        is_small = size <= _SMALL
        pool = self._pools.get((stream, is_small)) or self._new_pool(stream, is_small=is_small)
        block = self._best_fit(pool, size) or self._new_block(pool, size)
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

    def empty_cache(self) -> None:
        """Release segments, or granules of expandable segments, without allocated blocks."""
        for pool in self._pools.values():
            for *_, block in list(pool.free):
                if self._is_expandable:
                    self._unmap(block)
                elif block.is_whole_segment:
                    pool.remove(block)
                    del self._heads[block.segment]
                    self.reserved_bytes -= block.size

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

    def _new_pool(self, stream: int, *, is_small: bool) -> _Pool:
        pool = _Pool(is_small=is_small, stream=stream, is_expandable=self._is_expandable)
        self._pools[stream, is_small] = pool
        return pool

    def _best_fit(self, pool: _Pool, size: int) -> Block | None:
        """Remove and return the smallest sufficient free block, or None."""
        free = pool.free
        at = bisect_left(pool.free, (size,))
        if at == len(free):
            return None
        if self._is_expandable:
            while at + 1 < len(free) and free[at + 1][-1].room < free[at][-1].room:
                at += 1
        return free.pop(at)[-1]

    def _new_block(self, pool: _Pool, size: int) -> Block:
        segment_bytes = pool.granule
        if size >= _LEAST_LARGE:
            segment_bytes = round_up(size, _PAGE)
        block = self._from_device(pool, size, segment_bytes)
        if block is None:
            self.empty_cache()
            self.num_retries += 1
            block = self._from_device(pool, size, segment_bytes)
        if block is None:
            self.num_ooms += 1
            cached = self.reserved_bytes - self.allocated_bytes
            free = self.capacity_bytes - self.reserved_bytes
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {format_bytes(segment_bytes)}."
                f" {format_bytes(free)} of {format_bytes(self.capacity_bytes)} is free."
                f" {format_bytes(self.allocated_bytes)} is allocated by PyTorch, and"
                f" {format_bytes(cached)} is reserved by PyTorch but unallocated."
            )
        return block

    def _from_device(self, pool: _Pool, size: int, segment_bytes: int) -> Block | None:
        if self._is_expandable:
            return self._expand(pool, size)
        if not self._take(segment_bytes):
            return None
        return self._new_segment(pool, segment_bytes)

    def _take(self, nbytes: int) -> bool:
        """Reserve memory of the device; return False if it is full."""
        if self.reserved_bytes + nbytes > self.capacity_bytes:
            return False
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _new_segment(self, pool: _Pool, size: int, *, is_mapped: bool = True) -> Block:
        self._lowest -= size
        block = Block(pool, self._lowest, self._lowest, size, is_mapped)
        self._heads[self._lowest] = block
        return block

    def _expand(self, pool: _Pool, size: int) -> Block | None:
        """Map pages at the lowest address with room; return None if the device is full."""
        block: Block | None = self._lowest_room(pool, size)
        if block is not None and not block.is_mapped:
            block = self._map(block, size)
        while block is not None and block.size < size:
            assert block.next is not None
            block = self._map(block.next, size - block.size)
        if block is not None:
            pool.remove(block)
        return block

    def _lowest_room(self, pool: _Pool, size: int) -> Block:
        for _, unmapped in pool.unmapped:
            start = unmapped
            if unmapped.previous is not None and not unmapped.previous.is_allocated:
                start = unmapped.previous
            room = start.size
            block = start.next
            while room < size and block is not None and not block.is_allocated:
                room = room + block.size
                block = block.next
            if room >= size:
                return start
        # Reserve more addresses than memory, since pages may be mapped elsewhere.
        addresses = round_up(self.total_bytes + self.total_bytes // 8, pool.granule)
        block = self._new_segment(pool, addresses, is_mapped=False)
        pool.add(block)
        return block

    def _map(self, block: Block, nbytes: int) -> Block | None:
        """Map the first granules of an unmapped block and return the resulting free block."""
        nbytes = round_up(min(nbytes, block.size), block.pool.granule)
        if not self._take(nbytes):
            return None
        block.pool.remove(block)
        if nbytes < block.size:
            block.pool.add(block.split(nbytes))
        block.is_mapped = True
        return block.put_back()

    def _unmap(self, block: Block) -> None:
        """Unmap the whole granules of a free block."""
        pool = block.pool
        start = block.address - block.segment
        begin = round_up(start, pool.granule)
        end = (start + block.size) // pool.granule * pool.granule
        if begin >= end:
            return
        pool.remove(block)
        if begin > start:
            remainder = block
            block = block.split(begin - start)
            pool.add(remainder)
        if end - begin < block.size:
            pool.add(block.split(end - begin))
        self.reserved_bytes -= end - begin
        block.is_mapped = False
        block = block.put_back()
        if block.is_whole_segment:
            pool.remove(block)
            del self._heads[block.segment]
