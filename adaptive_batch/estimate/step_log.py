"""Logs of the requests that training makes of a device's caching allocator, and their tracker.

A log is an array of integers. A positive entry is an allocation: its lower 48 bits are the bytes,
the upper ones the number of the stream (0 for the default one). Allocations are numbered from 0. A
negative entry n frees allocation ``~n``.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any
from weakref import WeakSet

import torch

from adaptive_batch._torch import PrivateNames
from adaptive_batch.memory import MemoryTracker, plain_tensors

from .cuda_operators import Workspaces

private = PrivateNames("memory estimates")

# An allocation is the entry stream * STREAM + bytes.
STREAM = 2**48
# Name of a storage: kind and number of its tensor, and its index in the tensor.
Name = tuple[str, int, int]
# Tensors by name, such as ``("gradient", 3)``.
Named = Iterable[tuple[tuple[str, int], torch.Tensor]]


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
        sizes = [0] * len(self.before)
        live = peak = end = 0
        for position, entry in enumerate(self.log, 1):
            if entry > 0:
                sizes.append(entry % STREAM)
                live += sizes[-1]
            else:
                live -= sizes[~entry]
            if live > peak:
                peak = live
                end = position
        gradients = {number for name, number in self.after.items() if name[0] == "gradient"}
        freed = {~entry for entry in self.log[:end] if entry <= 0}
        num_allocations = len(self.before) + end - len(freed)
        # Allocations of the first run, such as workspaces, remain for all later steps.
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
        self._before: tuple[Name, ...] = ()
        self._workspaces = workspaces
        self._instead = {**(instead or {}), **(workspaces.instead if workspaces else {})}
        self._not_moved = not_moved if not_moved is not None else WeakSet()
        self._streams = streams if streams is not None else {torch.cpu.current_stream(): 0}
        self._is_inside = False

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
        self._before = tuple(names.values())

    def phase(self, named: Named) -> Phase:
        """Return the log since :meth:`add_named`.

        Args:
            named: tensors that remain for later phases.
        """
        num_earlier = len(self._before)
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
        return Phase(log, self._before, after, tuple(positions), activations)

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
        if func not in self._instead or self._is_inside:
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._is_inside = True
        with self:
            result = self._instead[func](*args, **(kwargs or {}))
        self._is_inside = False
        return result
