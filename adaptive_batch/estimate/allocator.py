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

import math
import os
import re
import sys
from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import replaced, round_up
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import MemoryTracker, allocator_settings, plain_tensors, segments_expand

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
# Operators that cuBLAS runs, with a workspace.
_MATMULS = {
    *(torch.ops.aten.mm.default, torch.ops.aten.addmm.default),
    *(torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default),
    *(torch.ops.aten.mm.out, torch.ops.aten.addmm.out),
    *(torch.ops.aten.bmm.out, torch.ops.aten.baddbmm.out),
}
# Settings that are simulated, and settings that do not change the memory of a step.
_ALLOWED = re.compile(
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
            if not _ALLOWED.match(setting):
                remedy = f"{setting} is not simulated; unset it"
                raise SettingError(variable, os.environ[variable], remedy)
        return cls(segments_expand())


class _Pool:
    """Free blocks of one kind and stream.

    Attributes:
        granule: size of which the driver's allocations are multiples.
        least_remainder: smallest rest of a block that is split off.
        free: free blocks in the order of :class:`_Free`; the first sufficient one is used.
        last: last block of the newest segment; an expandable pool has one segment.
    """

    def __init__(self, *, is_small: bool, stream: int, is_expandable: bool) -> None:
        self.is_small = is_small
        self.stream = stream
        self.granule = _PAGE if is_small else 20 * MIB
        self.least_remainder = _LEAST_BLOCK if is_small or is_expandable else _SMALL + 1
        self.free: list[_Free] = []
        self.last: Block | None = None

    def add(self, block: Block) -> None:
        insort(self.free, block.as_free())

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, block.as_free())]


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

    def as_free(self) -> _Free:
        """Return the entry of the block in the free blocks of its pool."""
        # Newer segments have lower addresses, so the oldest segment sorts first.
        age = -self.segment if _OLDEST_SEGMENT_FIRST else 0
        return _Free(self.size, age, self.address, self)

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


class _Free(NamedTuple):
    """A free block, sorted by size, age of the segment (0 if it does not count) and address."""

    size: int
    age: int
    address: int
    block: Block


class CachingAllocator:
    """The allocator of one device, whose memory suffices.

    Args:
        settings: settings of the allocator.

    Attributes:
        segments: first block of each segment.
        allocated_bytes, requested_bytes, reserved_bytes: current bytes. Reserved bytes never fall,
            so they are their own peak; the other peaks have the prefix ``peak_``.
    """

    def __init__(self, settings: AllocatorSettings) -> None:
        self._is_expandable = settings.expandable_segments
        # Pools by stream and whether blocks are small.
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self.segments: list[Block] = []
        self._lowest_address = _TOP
        # Blocks by the number of their allocation in replayed logs; None once freed.
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
        block = self._take_free(pool, size) or self._reserve(pool, size)
        if block.size - size >= pool.least_remainder:
            pool.add(block.split(size))
        block.is_allocated = True
        block.requested = nbytes
        self.allocated_bytes += block.size
        self.requested_bytes += nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_requested_bytes = max(self.peak_requested_bytes, self.requested_bytes)
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
            # A positive entry allocates; the entry ~n frees allocation n.
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
        for time, entry in enumerate(log):
            # A positive entry allocates; the entry ~n frees allocation n.
            if entry > 0:
                self.replay([entry])
                block = self._replayed[-1]
                actions = ["alloc"]
            else:
                block = self._replayed[~entry]
                self.replay([entry])
                actions = ["free_requested", "free_completed"]
            assert block is not None
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

    def _take_free(self, pool: _Pool, size: int) -> Block | None:
        """Remove and return the smallest sufficient free block, or None."""
        free = pool.free
        # (size,) sorts before all blocks of this size.
        place = bisect_left(free, (size,))
        if place == len(free):
            return None
        # The last block of an expandable segment counts with all addresses after it, so the next
        # larger block is smaller.
        is_last = self._is_expandable and free[place].block is pool.last
        if is_last and place + 1 < len(free):
            place += 1
        return free.pop(place).block

    def _reserve(self, pool: _Pool, size: int) -> Block:
        """Reserve memory of the driver, and return it as a free block of at least `size` bytes."""
        if self._is_expandable:
            block = self._take_end_of_segment(pool)
            new_bytes = round_up(size - block.size, pool.granule)
            block.size += new_bytes
        else:
            new_bytes = round_up(size, _PAGE) if size >= _LEAST_LARGE else pool.granule
            block = self._new_segment(pool, new_bytes, new_bytes)
        self.reserved_bytes += new_bytes
        return block

    def _take_end_of_segment(self, pool: _Pool) -> Block:
        """Return the free block, possibly empty, at the end of the pool's expandable segment."""
        end = pool.last
        if end is None:
            return self._new_segment(pool, _EXPANDABLE, 0)
        if end.is_allocated:
            # An empty block after it.
            return end.split(end.size)
        pool.remove(end)
        return end

    def _new_segment(self, pool: _Pool, num_addresses: int, size: int) -> Block:
        """Return the only block of a new segment below all others."""
        self._lowest_address -= num_addresses
        block = Block(pool, self._lowest_address, self._lowest_address, size)
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
        activations: numbers of the allocations of the forward.
        workspace_positions: indices of the entries of `log` that follow the first matrix product of
            forward and that of backward.
    """

    log: array[int]
    before: tuple[Name, ...]
    after: Mapping[Name, int]
    activations: frozenset[int] = frozenset()
    workspace_positions: tuple[int, ...] = ()

    def differs_only_in_sizes(self, other: Phase) -> bool:
        """Return whether both logs allocate and free the same storages."""
        if len(self.log) != len(other.log):
            return False
        # Positive entries are sizes.
        pairs = zip(self.log, other.log, strict=True)
        return all(a == b or (a > 0 and b > 0) for a, b in pairs)

    def interpolate(self, other: Phase, share: Fraction) -> Phase:
        """Return the phase with sizes moved by `share` of the way to those of `other`, rounded up.

        A share below 0 or above 1 extrapolates.
        """
        log = array("q")
        for entry, other_entry in zip(self.log, other.log, strict=True):
            if entry == other_entry:
                log.append(entry)
            else:
                # Entries that free are equal, so these two are sizes.
                size = entry + math.ceil((other_entry - entry) * share)
                log.append(max(1, size))
        return replace(self, log=log)

    def bytes_at_peak(self) -> Counter[str]:
        """Return the bytes of the phase's own allocations at its first peak, by kind."""
        # Storages from before the phase have the first numbers. They are not its own: 0 bytes.
        sizes = [0] * len(self.before) + [entry % STREAM for entry in self.log if entry > 0]
        # A positive entry allocates; the entry ~n frees allocation n.
        changes = [entry % STREAM if entry > 0 else -sizes[~entry] for entry in self.log]
        live_bytes = list(accumulate(changes, initial=0))
        entries_until_peak = self.log[: live_bytes.index(max(live_bytes))]
        freed = {~entry for entry in entries_until_peak if entry <= 0}
        num_allocations = len(self.before) + len(entries_until_peak) - len(freed)
        gradients = {number for name, number in self.after.items() if name[0] == "gradient"}
        num_bytes = Counter[str]()
        for number in set(range(num_allocations)) - freed:
            kind = "backward temporaries"
            if number in self.activations:
                kind = "activations"
            elif number in gradients:
                kind = "gradients"
            num_bytes[kind] += sizes[number]
        return num_bytes


def join_phases(
    phases: Sequence[Phase], first_micro_batch: int, workspace_bytes: int
) -> array[int]:
    """Join the logs of successive phases.

    Args:
        phases: loading and steps.
        first_micro_batch: index of the phase that allocates the workspaces.
        workspace_bytes: bytes of a workspace; 0 for none.
    """
    log = array("q")
    num_allocations = 0
    # Each log numbers its allocations from 0. `alive` has the number in the joined log of each
    # storage that remains after a phase, by name.
    alive: dict[Name, int | None] = {}
    for index, phase in enumerate(phases):
        # `numbers[n]` is the number in the joined log of allocation n of the phase, beginning with
        # the storages that exist before it; None for the gradient of an unused parameter, which
        # does not exist.
        numbers = [alive.pop(name, None) for name in phase.before]
        for position, entry in enumerate(phase.log):
            # The phase's log does not have the workspaces that its first run allocates.
            is_workspace = index == first_micro_batch and position in phase.workspace_positions
            if is_workspace and workspace_bytes:
                log.append(workspace_bytes)
                num_allocations += 1
            # A positive entry allocates; the entry ~n frees allocation n of the phase.
            if entry > 0:
                numbers.append(num_allocations)
                log.append(entry)
                num_allocations += 1
            else:
                freed = numbers[~entry]
                if freed is not None:
                    log.append(~freed)
        alive.update({name: numbers[number] for name, number in phase.after.items()})
    return log


def _is_in_backward() -> bool:
    return bool(private.current_graph_task_id() != -1)


class LoggingTracker(MemoryTracker):  # type: ignore[no-untyped-call]
    """Counts live bytes without a limit and logs each allocation.

    Args:
        replacements: functions that replace operators.
        workspace_bytes: bytes of a workspace. Two of them count, but are not in the log.
        streams: numbers of streams in the log, extended here. Streams of a CPU do nothing, but FSDP
            switches them.
    """

    def __init__(
        self,
        *,
        replacements: Mapping[Any, Callable[..., Any]] | None = None,
        workspace_bytes: int = 0,
        streams: dict[object, int] | None = None,
    ) -> None:
        super().__init__(sys.maxsize)
        self.live_bytes = self.peak_bytes = 2 * workspace_bytes
        self.log = array("q")
        # Number of the allocation of each live storage, by its key.
        self._numbers: dict[int, int] = {}
        self._num_allocations = 0
        self._made_by_forward: list[int] = []
        # Index of the entry of the log that follows the first matrix product, by whether the
        # product is one of backward.
        self._workspace_positions: dict[bool, int] = {}
        self._names_before: tuple[Name, ...] = ()
        self._replacements = replacements or {}
        self._streams = {torch.cpu.current_stream(): 0} if streams is None else streams
        self._is_replacing = False
        # Storages of numbers that count up: torch.arange(), plus a number.
        self.ranges: WeakSet[torch.UntypedStorage] = WeakSet()

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        # Active modes would intercept the storage access of each tensor.
        with private.disable_current_modes():
            super().add(tensors)
        # Log what was added.
        self.check()

    def add_named(self, named: Named) -> None:
        """Count the tensors before a phase, with their names for :meth:`phase`."""
        tensors = list(named)
        self.add(tensor for _, tensor in tensors)
        # Tied weights share a storage, which keeps the first of their names.
        names: dict[int, Name] = {}
        for name, number in self._numbers_by_name(tensors).items():
            names.setdefault(number, name)
        self._names_before = tuple(names.values())

    def phase(self, named: Named) -> Phase:
        """Return the log since :meth:`add_named`.

        Args:
            named: tensors that remain for later phases.
        """
        # The log begins with the storages before the phase, which have the first numbers.
        num_before = len(self._names_before)
        return Phase(
            self.log[num_before:],
            self._names_before,
            self._numbers_by_name(named),
            frozenset(self._made_by_forward),
            tuple(position - num_before for position in self._workspace_positions.values()),
        )

    def _numbers_by_name(self, named: Named) -> dict[Name, int]:
        """Return the number of the allocation of each counted storage."""
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
        # A resize in place allocates the new memory before it frees the old one.
        if size:
            if not _is_in_backward():
                self._made_by_forward.append(self._num_allocations)
            self._numbers[key] = self._num_allocations
            self._num_allocations += 1
            stream = self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))
            self.log.append(stream * STREAM + size)
        if freed is not None:
            self.log.append(~freed)

    def _has_memory(self, tensor: torch.Tensor) -> bool:
        """Fake tensors stand for tensors of the device."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The most frequent call on fake tensors; it allocates nothing.
        if func is torch.ops.prim.device.default:
            if isinstance(args[0], private.FakeTensor):
                return args[0].fake_device
            return func(*args)
        # On a device it delays a free until another stream is done, which is not simulated.
        if func is torch.ops.aten.record_stream.default:
            return None
        # A replacement may call the operator that it replaces.
        if func not in self._replacements or self._is_replacing:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            self._note_range(func, args, result)
            if func in _MATMULS:
                self._workspace_positions.setdefault(_is_in_backward(), len(self.log))
            return result
        with replaced(self, _is_replacing=True), self:
            return self._replacements[func](*args, **(kwargs or {}))

    def _note_range(self, func: Any, args: Any, result: Any) -> None:
        aten = torch.ops.aten
        if func in (aten.arange.default, aten.arange.start):
            self.ranges.add(result.untyped_storage())
            return
        first = args[0] if args else None
        # The type of most tensors decides without the slow access to the storage.
        if not isinstance(first, torch.Tensor) or first.dtype.is_floating_point:
            return
        if first.untyped_storage() not in self.ranges:
            return
        adds_number = func is aten.add.Tensor and isinstance(args[1], int)
        if adds_number or func in (aten.clone.default, aten._to_copy.default, aten.repeat.default):
            self.ranges.add(result.untyped_storage())
        elif func._schema.is_mutable:
            self.ranges.discard(first.untyped_storage())
