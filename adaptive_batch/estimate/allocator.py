"""A simulation of PyTorch's caching allocator for CUDA memory, and the logs that it replays.

The simulation implements the rules of c10/cuda/CUDACachingAllocator.cpp for eager programs on a
device with enough memory: pools of small and large blocks per stream, best fit, splitting and
merging. The driver allocates at falling addresses. Private pools (CUDA graphs), blocks in use by
another stream and settings other than ``expandable_segments`` are not simulated.

A log of the requests that training makes is an array of integers. A positive entry is an
allocation: its lower 48 bits are the bytes, the upper ones the number of the stream (0 for the
default one). Allocations are numbered from 0. A negative entry n frees allocation ``~n``.
"""

from __future__ import annotations

import os
import re
import sys
from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any
from weakref import WeakSet

import torch

from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import round_up
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import MemoryTracker, allocator_settings, plain_tensors, segments_expand

from .cuda_operators import Workspaces

private = PrivateNames("memory estimates")

# An allocation is the entry stream * STREAM + bytes.
STREAM = 2**48
# Name of a storage: kind and number of its tensor, and its index in the tensor.
Name = tuple[str, int, int]
# Tensors by name, such as ``("gradient", 3)``.
Named = Iterable[tuple[tuple[str, int], torch.Tensor]]

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
        """Replay a log; the numbers of allocations continue across logs."""
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


# --- logs


@dataclass(frozen=True)
class Phase:
    """Log of a part of training.

    Attributes:
        log: entries of this phase; the storages in `before` have the first numbers.
        before: names of the storages that exist before it.
        after: numbers of the storages that remain after it, by name.
        once: (position in the log, bytes) of allocations that only the first run makes and keeps.
        activations: numbers of the allocations of the forward.
    """

    log: array[int]
    before: tuple[Name, ...]
    after: Mapping[Name, int]
    once: tuple[tuple[int, int], ...] = ()
    activations: frozenset[int] = frozenset()

    def is_like(self, other: Phase) -> bool:
        """Return whether the logs differ in sizes alone."""
        pairs = zip(self.log, other.log, strict=True)
        return len(self.log) == len(other.log) and all(
            a == b or (a > 0 and b > 0) for a, b in pairs
        )

    def between(self, more: Phase, share: Fraction) -> Phase:
        """Return the phase with sizes interpolated to `share` of the way to `more`, or
        extrapolated.
        """
        if self.log == more.log:
            return self
        entries = torch.frombuffer(self.log, dtype=torch.int64)
        differences = torch.frombuffer(more.log, dtype=torch.int64) - entries
        # Rounded up, in integers: bytes of any device times tokens stay below 2 ** 63.
        steps = -torch.div(differences * -share.numerator, share.denominator, rounding_mode="floor")
        sizes = (entries + steps).clamp_(min=1)
        log = array("q")
        log.frombytes(torch.where(differences == 0, entries, sizes).numpy().tobytes())
        return replace(self, log=log)

    def held_at_peak(self) -> Counter[str]:
        """Return the bytes of the phase's own allocations at its peak, by kind."""
        # Storages of earlier phases have numbers, too, and count 0 bytes.
        sizes = [0] * len(self.before)
        live = peak = entries_until_peak = 0
        for position, entry in enumerate(self.log, 1):
            if entry > 0:
                sizes.append(entry % STREAM)
                live += sizes[-1]
            else:
                live -= sizes[~entry]
            if live > peak:
                peak = live
                entries_until_peak = position
        gradients = {number for name, number in self.after.items() if name[0] == "gradient"}
        entries = self.log[:entries_until_peak]
        freed = {~entry for entry in entries if entry <= 0}
        num_allocations = len(self.before) + len(entries) - len(freed)
        # Allocations of the first run, such as workspaces, remain. They count as temporaries.
        held = Counter({"backward temporaries": sum(size % STREAM for _, size in self.once)})
        for number in set(range(num_allocations)) - freed:
            kind = "backward temporaries"
            if number in self.activations:
                kind = "activations"
            elif number in gradients:
                kind = "gradients"
            held[kind] += sizes[number]
        return held


def join_phases(phases: Iterable[tuple[Phase, bool]]) -> array[int]:
    """Join the logs of successive phases.

    Args:
        phases: phases, each with whether training runs it for the first time.
    """
    log = array("q")
    num_allocations = 0
    alive: dict[Name, int] = {}
    for phase, is_first in phases:
        # -1: the gradient of an unused parameter does not exist and is not freed.
        numbers = [alive.pop(name, -1) for name in phase.before]
        once = list(phase.once) if is_first else []
        for position, entry in enumerate(phase.log):
            while once and once[0][0] == position:
                log.append(once.pop(0)[1])
                num_allocations += 1
            if entry > 0:
                numbers.append(num_allocations)
                log.append(entry)
                num_allocations += 1
            elif numbers[~entry] >= 0:
                log.append(~numbers[~entry])
        alive.update({name: numbers[number] for name, number in phase.after.items()})
    return log


class LoggingTracker(MemoryTracker):  # type: ignore[no-untyped-call]
    """Counts live bytes without a limit and logs each allocation.

    Args:
        instead: functions that replace operators.
        workspaces: workspaces of cuBLAS; None for a device without it.
        not_moved: storages on the host, which are not counted.
        streams: numbers of streams in the log, extended here. Streams of a CPU do nothing, but FSDP
            switches them.
    """

    def __init__(
        self,
        *,
        instead: Mapping[Any, Callable[..., Any]] | None = None,
        workspaces: Workspaces | None = None,
        not_moved: WeakSet[torch.UntypedStorage] | None = None,
        streams: dict[object, int] | None = None,
    ) -> None:
        super().__init__(sys.maxsize)
        self.log = array("q")
        # Numbers of live storages.
        self._numbers: dict[int, int] = {}
        self._num_allocations = 0
        self._made_by_forward: list[int] = []
        self._names_before: tuple[Name, ...] = ()
        self._workspaces = workspaces
        self._instead = {**(instead or {}), **(workspaces.instead if workspaces else {})}
        self._not_moved = not_moved if not_moved is not None else WeakSet()
        self._streams = streams if streams is not None else {torch.cpu.current_stream(): 0}
        self._is_replacing = False

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        # Active modes would intercept the storage access of each tensor.
        with private.disable_current_modes():
            super().add(tensors)
        self.check()

    def add_named(self, named: Named) -> None:
        """Count the tensors before a phase, with their names for :meth:`phase`."""
        tensors = list(named)
        self.add(tensor for _, tensor in tensors)
        names: dict[int, Name] = {}
        for name, number in self._numbers_by_name(tensors).items():
            names.setdefault(number, name)
        self._names_before = tuple(names.values())

    def phase(self, named: Named) -> Phase:
        """Return the log since :meth:`add_named`.

        Args:
            named: tensors that remain for later phases.
        """
        num_earlier = len(self._names_before)
        kept = self._workspaces.tensors.values() if self._workspaces else ()
        workspaces = ((("workspace", number), tensor) for number, tensor in enumerate(kept))
        once = set(self._numbers_by_name(workspaces).values())
        numbers = list(range(num_earlier))
        log = array("q")
        positions = []
        for entry in self.log[num_earlier:]:
            if entry <= 0:
                log.append(~numbers[~entry])
                continue
            if len(numbers) in once:
                positions.append((len(log), entry))
            else:
                log.append(entry)
            numbers.append(len(numbers) - len(positions))
        after = {name: numbers[number] for name, number in self._numbers_by_name(named).items()}
        activations = frozenset(
            numbers[number] for number in self._made_by_forward if number not in once
        )
        return Phase(log, self._names_before, after, tuple(positions), activations)

    def _numbers_by_name(self, named: Named) -> dict[Name, int]:
        with private.disable_current_modes():
            storages = {
                (*name, place): plain.untyped_storage()._cdata
                for name, tensor in named
                for place, plain in enumerate(plain_tensors(tensor))
            }
        return {name: self._numbers[key] for name, key in storages.items() if key in self._numbers}

    def _resize(self, key: int, size: int) -> None:
        super()._resize(key, size)
        freed = self._numbers.pop(key, None)
        if size:
            if private.current_graph_task_id() == -1:
                self._made_by_forward.append(self._num_allocations)
            self._numbers[key] = self._num_allocations
            self._num_allocations += 1
            stream = self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))
            self.log.append(stream * STREAM + size)
        if freed is not None:
            self.log.append(~freed)

    def _counts(self, tensor: torch.Tensor) -> bool:
        # Fake tensors represent real ones here.
        return not self._not_moved or tensor.untyped_storage() not in self._not_moved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The most frequent call on fake tensors; it allocates nothing.
        if func is torch.ops.prim.device.default:
            if isinstance(args[0], private.FakeTensor):
                return args[0].fake_device
            return func(*args)
        # Streams of a CPU do not delay frees.
        if func is torch.ops.aten.record_stream.default:
            return None
        if func not in self._instead or self._is_replacing:
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._is_replacing = True
        with self:
            result = self._instead[func](*args, **(kwargs or {}))
        self._is_replacing = False
        return result
