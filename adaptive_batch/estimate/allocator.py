"""PyTorch's caching allocator of CUDA memory, simulated: what it reserves, where it retries, where it is out of memory.

The rules are those of c10/cuda/CUDACachingAllocator.cpp for eager programs: pools of small and large blocks for each stream, the
best fit, splitting and merging, and, when the device has no more, the release of what is cached. The driver gives whole pages of
2 MiB at falling addresses. Not simulated: private pools (CUDA graphs) and blocks that wait for another stream's event.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from adaptive_batch._util import format_bytes
from adaptive_batch.errors import SettingError

MIB = 2**20
_LEAST_BLOCK = 512
_SMALL = MIB  # the largest request of the small pool
_PAGE = 2 * MIB  # of the driver; also a segment of the small pool
_LEAST_LARGE = 10 * MIB  # from here on a request has a segment of its own size
_UNLIMITED = 2**62
_INTERVALS = 16  # of roundup_power2_divisions: the powers of two from 1 MiB to 32 GiB
_TOP = 2**47  # where addresses start to fall
# Of free blocks of one size the oldest segment's is taken, and there the lowest; in 2.12 the oldest block; before, the lowest.
_OLDEST_SEGMENT, _OLDEST_BLOCK = torch.__version__ >= "2.13", "2.12" <= torch.__version__ < "2.13"
_HAS_COMMON_SETTINGS = torch.__version__ >= "2.10"  # PYTORCH_ALLOC_CONF, of all accelerators


_new_order = count(_TOP, _TOP).__next__  # more than addresses differ by


def _up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


def _mib(text: str) -> int:
    return int(text) * MIB


def _divisions(text: str) -> tuple[int, ...]:
    """Parse ``4`` or ``[256:1,512:2,>:4]``, in which an interval is named by its MiB."""
    if not text.startswith("["):
        return (int(text),) * _INTERVALS
    divisions: list[int] = []
    for boundary, number in (entry.split(":") for entry in text[1:-1].split(",")):
        if boundary == ">" and not _HAS_COMMON_SETTINGS:
            divisions = divisions[:-1]  # these took the last one too
        index = _INTERVALS - 1 if boundary == ">" else min(int(boundary).bit_length() - 1, _INTERVALS - 1)
        between = int(number) if boundary == ">" or not divisions else 0
        divisions += [between] * (index - len(divisions)) + [int(number)]
    return tuple(divisions + [0] * _INTERVALS)[:_INTERVALS]


_READ_BY = {
    "expandable_segments": ("expandable_segments", {"True": True, "False": False}.__getitem__),
    "max_split_size_mb": ("max_split_bytes", _mib),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _mib),
    "large_segment_size_mb": ("large_segment_bytes", _mib),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", float),
    "per_process_memory_fraction": ("memory_fraction", float),
    "backend": ("backend", {"native": "native"}.__getitem__),
}
_WITHOUT_EFFECT = re.compile("pinned_|release_lock_on_|graph_capture_")


@dataclass(frozen=True)
class AllocatorSettings:
    """Settings of the caching allocator; names as in ``PYTORCH_ALLOC_CONF``, sizes in bytes, divisions for each power of two."""

    expandable_segments: bool = False
    max_split_bytes: int = _UNLIMITED
    max_non_split_rounding_bytes: int = 20 * MIB
    large_segment_bytes: int = 20 * MIB
    roundup_power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float = 0.0
    memory_fraction: float = 1.0
    backend: str = "native"

    @classmethod
    def from_environment(cls) -> AllocatorSettings:
        """Read what the installed PyTorch would read.

        Raises:
            SettingError: a setting that cannot be simulated.
        """
        if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") not in ("", "0"):
            raise SettingError("PYTORCH_NO_CUDA_MEMORY_CACHING", 1, "only what is cached can be simulated; unset it")
        names = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"]
        name = next((name for name in names[: None if _HAS_COMMON_SETTINGS else 2] if name in os.environ), None)
        text = os.environ[name] if name else ""
        settings: dict[str, Any] = {}
        for key, value in re.findall(r"(\w+):(\[[^\]]*\]|[^,]*)", re.sub(r"\s", "", text)):
            if not _WITHOUT_EFFECT.match(key):
                try:
                    field, read = _READ_BY[key]
                    settings[field] = read(value)
                except (KeyError, ValueError):
                    remedy = f"{key}:{value} cannot be simulated, so reserved memory cannot be known; leave it out"
                    raise SettingError(str(name), text, remedy) from None
        return replace(cls(), **settings)

    def round(self, nbytes: int) -> int:
        """Return the size of the block that a request needs."""
        if self.roundup_power2_divisions:
            power = nbytes.bit_length() - 1
            divisions = self.roundup_power2_divisions[min(max(power - 20, 0), _INTERVALS - 1)]
            if divisions > 1 and nbytes > _LEAST_BLOCK * divisions:
                return _up(nbytes, (1 << power) // divisions)
        return _up(nbytes, _LEAST_BLOCK)


class _Pool:
    """Free blocks of one stream and kind, by size, order and address; unmapped ones of expandable segments, by address."""

    def __init__(self, stream: int, is_small: bool, settings: AllocatorSettings) -> None:
        splits_finely = is_small or settings.expandable_segments
        self.stream, self.is_small, self.num_requests = stream, is_small, 0
        self.granule = _PAGE if is_small else settings.large_segment_bytes
        self.least_remainder = _LEAST_BLOCK if splits_finely else _SMALL + 1
        self.max_split = _UNLIMITED if splits_finely else settings.max_split_bytes
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def add(self, block: Block) -> None:
        if block.is_mapped:
            block.since = self.num_requests
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
    since: int = 0  # requests to its pool before it was free
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
        rest = Block(self.pool, self.segment, order, self.address + size, self.size - size, self.is_mapped)
        rest.previous, rest.next, self.next, self.size = self, self.next, rest, size
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
                    before.size, before.next, block = before.size + after.size, after.next, before
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
        allocated_bytes, requested_bytes, reserved_bytes: now; with ``peak_`` before them the most since :meth:`reset_peaks`.
        num_retries: how often all that was cached had to go back to the device before an allocation.
        num_ooms: how often even that was not enough.
    """

    def __init__(
        self, capacity_bytes: int, settings: AllocatorSettings | None = None, *, total_bytes: int | None = None
    ) -> None:
        self.settings = settings = settings or AllocatorSettings()
        self.capacity_bytes, self.total_bytes = capacity_bytes, total_bytes or capacity_bytes
        is_limited = settings.memory_fraction < 1
        self._allowed = int(settings.memory_fraction * self.total_bytes) if is_limited else _UNLIMITED
        self._collects = is_limited and settings.garbage_collection_threshold > 0
        self._pools: dict[tuple[bool, int], _Pool] = {}
        self._heads: dict[int, Block] = {}  # the first block of each segment
        self._lowest, self._taken = _TOP, 0
        self._replayed: list[Block | None] = []
        self.allocated_bytes = self.requested_bytes = self.reserved_bytes = self.num_retries = self.num_ooms = 0
        self.reset_peaks()

    def reset_peaks(self) -> None:
        self.peak_allocated_bytes, self.peak_requested_bytes = self.allocated_bytes, self.requested_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def malloc(self, nbytes: int, stream: int = 0) -> Block:
        """Allocate.

        Raises:
            torch.OutOfMemoryError: not even after all that is cached went back; the message has the numbers.
        """
        size = self.settings.round(nbytes)
        key = size > _SMALL, stream
        pool = self._pools.get(key) or self._pools.setdefault(key, _Pool(stream, not key[0], self.settings))
        block = self._best_fit(pool, size) or self._new_block(pool, size)
        if block.size - size >= pool.least_remainder and size < pool.max_split:
            rest = block.split(size)
            block.order, rest.order = rest.order, block.order  # to PyTorch the first part is the new one
            pool.add(rest)
        block.is_allocated, block.requested = True, nbytes
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
        for _, pool in sorted(self._pools.items(), reverse=True):
            for _, _, block in list(pool.free):
                if self.settings.expandable_segments:
                    self._unmap(block)
                elif block.is_whole_segment:
                    self._release(block)

    def replay(self, log: Iterable[int]) -> None:
        """Allocate n bytes for each n > 0, and free allocation number ~n for each n < 0; numbers go on from log to log."""
        blocks = self._replayed
        for entry in log:
            if entry > 0:
                blocks.append(self.malloc(entry))
            else:
                block, blocks[~entry] = blocks[~entry], None
                assert block is not None, f"allocation {~entry} is freed twice"
                self.free(block)

    def segments(self) -> list[dict[str, Any]]:
        """Return what is reserved as ``torch.cuda.memory_snapshot()`` does: by address, each mapped range a segment."""
        segments: list[dict[str, Any]] = []
        for _, head in sorted(self._heads.items()):
            block: Block | None = head
            while block is not None:
                if block.is_mapped:
                    if block.previous is None or not block.previous.is_mapped:
                        kind = "small" if block.pool.is_small else "large"
                        sizes = dict.fromkeys(("total_size", "allocated_size", "active_size", "requested_size"), 0)
                        segment = {"address": block.address, "stream": block.pool.stream, "segment_type": kind, **sizes}
                        is_expandable = self.settings.expandable_segments
                        segments.append({**segment, "is_expandable": is_expandable, "blocks": []})
                    given = block.size if block.is_allocated else 0
                    counted = {"total_size": block.size, "allocated_size": given, "active_size": given}
                    counted["requested_size"] = requested = block.requested if given else 0
                    for name, nbytes in counted.items():
                        segments[-1][name] += nbytes
                    state = "active_allocated" if given else "inactive"
                    entry = {"address": block.address, "size": block.size, "requested_size": requested, "state": state}
                    segments[-1]["blocks"].append(entry)
                block = block.next
        return segments

    def _best_fit(self, pool: _Pool, size: int) -> Block | None:
        """Take the smallest free block that is large enough; None if there is none that may be taken."""
        pool.num_requests += 1
        free, at, limit = pool.free, bisect_left(pool.free, (size,)), self.settings.max_split_bytes
        if at == len(free):
            return None
        if self.settings.expandable_segments:
            while at + 1 < len(free) and free[at + 1][2].room < free[at][2].room:
                at += 1
        found = free[at][0]
        if found >= limit and (size < limit or found >= size + self.settings.max_non_split_rounding_bytes):
            return None
        return free.pop(at)[2]

    def _new_block(self, pool: _Pool, size: int) -> Block:
        if self._collects:
            self._collect_garbage()
        asked = pool.granule if size < _LEAST_LARGE else _up(size, _PAGE)
        block = self._from_device(pool, size, asked)
        if block is None and self._release_oversize(pool, size):
            block = self._from_device(pool, size, asked)
        if block is None:
            self.empty_cache()
            self.num_retries += 1
            block = self._from_device(pool, size, asked)
        if block is None:
            self.num_ooms += 1
            cached, free = self.reserved_bytes - self.allocated_bytes, self.capacity_bytes - self._taken
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {format_bytes(asked)}. {format_bytes(self.capacity_bytes)} can be had, "
                f"of which {format_bytes(free)} is free. {format_bytes(self.allocated_bytes)} is allocated by PyTorch, and "
                f"{format_bytes(cached)} is reserved by PyTorch but unallocated."
            )
        return block

    def _from_device(self, pool: _Pool, size: int, asked: int) -> Block | None:
        if self.reserved_bytes + asked > self._allowed:
            return None
        if self.settings.expandable_segments:
            return self._expand(pool, size)
        return self._new_segment(pool, asked) if self._take(asked) else None

    def _take(self, nbytes: int) -> bool:
        """Reserve memory of the device, in whole pages, if it has so much."""
        if self._taken + _up(nbytes, _PAGE) > self.capacity_bytes:
            return False
        self._taken += _up(nbytes, _PAGE)
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _give_back(self, nbytes: int) -> None:
        self._taken -= _up(nbytes, _PAGE)
        self.reserved_bytes -= nbytes

    def _new_segment(self, pool: _Pool, size: int, *, is_mapped: bool = True) -> Block:
        self._lowest -= _up(size, _PAGE)
        order = _new_order() if _OLDEST_SEGMENT or _OLDEST_BLOCK else 0
        block = Block(pool, self._lowest, order, self._lowest, size, is_mapped)
        self._heads[self._lowest] = block
        return block

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        del self._heads[block.segment]
        self._give_back(block.size)

    def _expand(self, pool: _Pool, size: int) -> Block | None:
        """Map what is missing at the lowest address where the request fits; None if the device has no more."""
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
            room, block = start.size, start.next
            while room < size and block is not None and not block.is_allocated:
                room, block = room + block.size, block.next
            if room >= size:
                return start
        addresses = _up(self.total_bytes + self.total_bytes // 8, pool.granule)  # enough to move some of it
        block = self._new_segment(pool, addresses, is_mapped=False)
        pool.add(block)
        return block

    def _map(self, block: Block, nbytes: int) -> Block | None:
        """Map the first granules of an unmapped block; return the free block that they are part of then."""
        nbytes = _up(min(nbytes, block.size), block.pool.granule)
        if not self._take(nbytes):
            return None
        block.pool.remove(block)
        if nbytes < block.size:
            block.pool.add(block.split(nbytes))
        block.is_mapped = True
        return block.put_back()

    def _unmap(self, block: Block) -> None:
        """Unmap the whole granules of a free block."""
        pool, start = block.pool, block.address - block.segment
        begin, end = _up(start, pool.granule), (start + block.size) // pool.granule * pool.granule
        if begin >= end:
            return
        pool.remove(block)
        if begin > start:
            before, block = block, block.split(begin - start)
            before.order, block.order = block.order, before.order
            pool.add(before)
        if end - begin < block.size:
            pool.add(block.split(end - begin))
        self._give_back(end - begin)
        block.is_mapped = False
        block = block.put_back()
        if block.is_whole_segment:
            pool.remove(block)
            del self._heads[block.segment]

    def _release_oversize(self, pool: _Pool, size: int) -> bool:
        """Release a block above ``max_split_size_mb`` that is large enough, else the largest ones until they are."""
        limit, released = self.settings.max_split_bytes, 0
        if limit == _UNLIMITED or self.settings.expandable_segments:
            return False
        wanted = max(size, limit)
        at = bisect_left(pool.free, (wanted,))
        while released < wanted and pool.free and pool.free[-1][0] >= limit:
            block = pool.free[min(at, len(pool.free) - 1)][2]
            released += block.size
            self._release(block)
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Above the threshold, release the large segments that were free for longest until it is met."""
        excess = self.reserved_bytes - int(self.settings.garbage_collection_threshold * self._allowed)
        pools = [] if self.settings.expandable_segments else [p for p in self._pools.values() if not p.is_small]
        idle = [block for pool in pools for _, _, block in pool.free if block.is_whole_segment]
        while excess > 0 and idle:
            ages = [block.pool.num_requests - block.since for block in idle]
            old = [block for block, age in zip(idle, ages, strict=True) if age >= sum(ages) / len(ages)]
            for block in old:
                excess -= block.size
                self._release(block)
            idle = [block for block in idle if block not in old]
