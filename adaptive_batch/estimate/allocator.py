"""PyTorch's caching allocator of CUDA memory, simulated: what it reserves, where it retries, where
it is out of memory.

The rules are those of c10/cuda/CUDACachingAllocator.cpp for eager programs: pools of small and
large blocks, the best fit, splitting and merging, blocks of each stream, and, when the device has
no more, the release of what is cached. The driver gives memory at falling addresses. Not simulated:
private pools (CUDA graphs), blocks that another stream still uses, and any setting but
``expandable_segments``.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from adaptive_batch._util import format_bytes, round_up
from adaptive_batch.errors import SettingError

from .step_log import STREAM

MIB = 2**20
_LEAST_BLOCK = 512
_SMALL = MIB  # the largest request of the small pool
_PAGE = 2 * MIB  # of the driver; also a segment of the small pool
_LEAST_LARGE = 10 * MIB  # from here on a request has a segment of its own size
_TOP = 2**47  # where addresses start to fall
# Of free blocks of one size the oldest segment's is taken, and there the lowest; in 2.12 the oldest
# block; before, the lowest.
_OLDEST_SEGMENT = torch.__version__ >= "2.13"
_OLDEST_BLOCK = "2.12" <= torch.__version__ < "2.13"
_VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)  # PyTorch reads the first that is set
_HARMLESS = re.compile(
    "expandable_segments:(True|False)$|backend:native$|pinned_|release_lock_on_|graph_capture_"
)
_new_order = count(_TOP, _TOP).__next__  # more than addresses differ by


@dataclass(frozen=True)
class AllocatorSettings:
    """What is simulated of ``PYTORCH_ALLOC_CONF``."""

    expandable_segments: bool = False

    @classmethod
    def from_environment(cls) -> AllocatorSettings:
        """Read what PyTorch would read.

        Raises:
            SettingError: a setting that is not simulated.
        """
        if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") not in ("", "0"):
            raise SettingError(
                "PYTORCH_NO_CUDA_MEMORY_CACHING",
                1,
                "only what is cached can be simulated; unset it",
            )
        name, text = next(
            ((name, os.environ[name]) for name in _VARIABLES if name in os.environ), ("", "")
        )
        settings = re.findall(r"\w+:(?:\[[^\]]*\]|[^,]*)", re.sub(r"\s", "", text))
        for setting in settings:
            if not _HARMLESS.match(setting):
                raise SettingError(
                    name, text, f"{setting}: reserved memory is simulated without it; unset it"
                )
        return cls(
            dict(setting.split(":") for setting in settings).get("expandable_segments") == "True"
        )


class _Pool:
    """Free blocks of one kind and stream, by size, order and address; unmapped ones of expandable
    segments, by address.
    """

    def __init__(self, *, is_small: bool, stream: int, is_expandable: bool) -> None:
        self.is_small = is_small
        self.stream = stream
        self.granule = _PAGE if is_small else 20 * MIB  # of what is asked of the driver
        self.least_remainder = _LEAST_BLOCK if is_small or is_expandable else _SMALL + 1
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def add(self, block: Block) -> None:
        if block.is_mapped:
            insort(self.free, (block.size, block.order + block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        if block.is_mapped:
            del self.free[bisect_left(self.free, (block.size, block.order + block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment: given out, free, or (of an expandable segment) not mapped."""

    pool: _Pool
    segment: int  # address of its segment
    order: int
    address: int
    size: int
    is_mapped: bool = True
    is_allocated: bool = False
    requested: int = 0
    previous: Block | None = None
    next: Block | None = None

    @property
    def is_whole_segment(self) -> bool:
        return self.previous is None and self.next is None

    @property
    def room(self) -> int:
        """Size to which a free block can grow where what follows is not mapped."""
        after = self.next
        return self.size if after is None or after.is_mapped else self.size + after.size

    def split(self, size: int) -> Block:
        """Keep the first `size` bytes, and return the rest, which is a new block to PyTorch."""
        order = _new_order() if _OLDEST_BLOCK else self.order
        rest = Block(
            self.pool, self.segment, order, self.address + size, self.size - size, self.is_mapped
        )
        rest.previous = self
        rest.next = self.next
        self.next = rest
        self.size = size
        if rest.next is not None:
            rest.next.previous = rest
        return rest

    def put_back(self) -> Block:
        """Add this block to its pool, as one with its neighbours of the same kind; return that."""
        block = self
        for before, after in ((self, self.next), (self.previous, self)):
            if before and after:
                other = after if before is self else before
                if not other.is_allocated and other.is_mapped == self.is_mapped:
                    self.pool.remove(other)
                    before.size = before.size + after.size
                    before.next = after.next
                    block = before
                    before.order = self.order
                    if after.next is not None:
                        after.next.previous = before
        self.pool.add(block)
        return block


class CachingAllocator:
    """The allocator of one device.

    Args:
        capacity_bytes: what the driver gives out in all, the context taken off.
        settings: as PyTorch has them.
        total_bytes: of the device, as CUDA reports it; the capacity if not given.

    Attributes:
        allocated_bytes, requested_bytes, reserved_bytes: now; with ``peak_`` before them the most
            so far.
        num_retries: how often all that was cached had to go back to the device before an
            allocation.
        num_ooms: how often even that was not enough.
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
        self._heads: dict[int, Block] = {}  # the first block of each segment
        self._lowest = _TOP
        self._replayed: list[Block | None] = []
        self.allocated_bytes = self.requested_bytes = self.reserved_bytes = self.num_retries = (
            self.num_ooms
        ) = 0
        self.peak_allocated_bytes = self.peak_requested_bytes = self.peak_reserved_bytes = 0

    def malloc(self, nbytes: int, stream: int = 0) -> Block:
        """Allocate, for a stream, which has blocks of its own.

        Raises:
            torch.OutOfMemoryError: not even after all that is cached went back; the message has the
                numbers.
        """
        size = round_up(nbytes, _LEAST_BLOCK)
        pool = self._pools.get((stream, size <= _SMALL)) or self._new_pool(
            stream, is_small=size <= _SMALL
        )
        block = self._best_fit(pool, size) or self._new_block(pool, size)
        if block.size - size >= pool.least_remainder:
            rest = block.split(size)
            block.order, rest.order = (
                rest.order,
                block.order,
            )  # to PyTorch the first part is the new one
            pool.add(rest)
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
        """Give back every segment without a block in use; of expandable ones every such granule."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if self._is_expandable:
                    self._unmap(block)
                elif block.is_whole_segment:
                    pool.remove(block)
                    del self._heads[block.segment]
                    self.reserved_bytes -= block.size

    def replay(self, log: Iterable[int]) -> None:
        """Do what a log says (:mod:`.step_log`); the numbers of allocations go on from log to log."""
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

    def segments(self) -> list[dict[str, Any]]:
        """Return what is reserved as ``torch.cuda.memory_snapshot()`` does: by address, each mapped
        range a segment.
        """
        segments: list[dict[str, Any]] = []
        for _, head in sorted(self._heads.items()):
            block: Block | None = head
            while block is not None:
                if block.is_mapped:
                    if block.previous is None or not block.previous.is_mapped:
                        kind = "small" if block.pool.is_small else "large"
                        sizes = dict.fromkeys(
                            ("total_size", "allocated_size", "active_size", "requested_size"), 0
                        )
                        segment = {
                            "address": block.address,
                            "stream": block.pool.stream,
                            "segment_type": kind,
                            **sizes,
                        }
                        segments.append(
                            {**segment, "is_expandable": self._is_expandable, "blocks": []}
                        )
                    given, requested = (
                        (block.size, block.requested) if block.is_allocated else (0, 0)
                    )
                    segments[-1]["total_size"] += block.size
                    segments[-1]["allocated_size"] += given
                    segments[-1]["active_size"] += given
                    segments[-1]["requested_size"] += requested
                    state = "active_allocated" if given else "inactive"
                    entry = {
                        "address": block.address,
                        "size": block.size,
                        "requested_size": requested,
                        "state": state,
                    }
                    segments[-1]["blocks"].append(entry)
                block = block.next
        return segments

    def _new_pool(self, stream: int, *, is_small: bool) -> _Pool:
        pool = _Pool(is_small=is_small, stream=stream, is_expandable=self._is_expandable)
        self._pools[stream, is_small] = pool
        return pool

    def _best_fit(self, pool: _Pool, size: int) -> Block | None:
        """Take the smallest free block that is large enough; None if there is none."""
        free = pool.free
        at = bisect_left(pool.free, (size,))
        if at == len(free):
            return None
        if self._is_expandable:
            while at + 1 < len(free) and free[at + 1][2].room < free[at][2].room:
                at += 1
        return free.pop(at)[2]

    def _new_block(self, pool: _Pool, size: int) -> Block:
        asked = pool.granule if size < _LEAST_LARGE else round_up(size, _PAGE)
        block = self._from_device(pool, size, asked)
        if block is None:
            self.empty_cache()
            self.num_retries += 1
            block = self._from_device(pool, size, asked)
        if block is None:
            self.num_ooms += 1
            cached = self.reserved_bytes - self.allocated_bytes
            free = self.capacity_bytes - self.reserved_bytes
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {format_bytes(asked)}."
                f" {format_bytes(self.capacity_bytes)} can be had, of which {format_bytes(free)} is"
                f" free. {format_bytes(self.allocated_bytes)} is allocated by PyTorch, and"
                f" {format_bytes(cached)} is reserved by PyTorch but unallocated."
            )
        return block

    def _from_device(self, pool: _Pool, size: int, asked: int) -> Block | None:
        if self._is_expandable:
            return self._expand(pool, size)
        return self._new_segment(pool, asked) if self._take(asked) else None

    def _take(self, nbytes: int) -> bool:
        """Reserve memory of the device, if it has so much."""
        if self.reserved_bytes + nbytes > self.capacity_bytes:
            return False
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _new_segment(self, pool: _Pool, size: int, *, is_mapped: bool = True) -> Block:
        self._lowest -= size
        order = _new_order() if _OLDEST_SEGMENT or _OLDEST_BLOCK else 0
        self._heads[self._lowest] = block = Block(
            pool, self._lowest, order, self._lowest, size, is_mapped
        )
        return block

    def _expand(self, pool: _Pool, size: int) -> Block | None:
        """Map what is missing at the lowest address where the request fits; None if the device has
        no more.
        """
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
            before = unmapped.previous
            start = unmapped if before is None or before.is_allocated else before
            room = start.size
            block = start.next
            while room < size and block is not None and not block.is_allocated:
                room = room + block.size
                block = block.next
            if room >= size:
                return start
        addresses = round_up(
            self.total_bytes + self.total_bytes // 8, pool.granule
        )  # enough to move some of it
        block = self._new_segment(pool, addresses, is_mapped=False)
        pool.add(block)
        return block

    def _map(self, block: Block, nbytes: int) -> Block | None:
        """Map the first granules of an unmapped block; return the free block that they are part of
        then.
        """
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
            before = block
            block = block.split(begin - start)
            before.order, block.order = block.order, before.order
            pool.add(before)
        if end - begin < block.size:
            pool.add(block.split(end - begin))
        self.reserved_bytes -= end - begin
        block.is_mapped = False
        block = block.put_back()
        if block.is_whole_segment:
            pool.remove(block)
            del self._heads[block.segment]
