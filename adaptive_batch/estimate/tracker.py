"""A memory tracker that logs what a step on fake tensors allocates and frees."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakSet

import torch

from adaptive_batch._torch import PrivateNames
from adaptive_batch.memory import MemoryTracker, plain_tensors

from .cuda_operators import Workspaces
from .step_log import STREAM, Name, Phase

private = PrivateNames("memory estimates")

# Tensors by name, such as ``("gradient", 3)``.
Named = Iterable[tuple[tuple[str, int], torch.Tensor]]


class LoggingTracker(MemoryTracker):  # type: ignore[no-untyped-call]
    """Counts live bytes without a limit, and logs each allocation.

    Args:
        instead: functions that run in the place of operators.
        workspaces: of cuBLAS, where the device has it.
        not_moved: storages on the host, which are not counted.
        streams: their numbers in the log, those that are met here included; a CPU's do nothing, but
            FSDP changes between them.
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
        # Of living storages.
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
        # Modes would be asked for the storage of each of many tensors.
        with private.disable_current_modes():
            super().add(tensors)
        self.check()

    def add_named(self, named: Named) -> None:
        """Count what is alive before anything runs, which :meth:`phase` names."""
        tensors = list(named)
        self.add(tensor for _, tensor in tensors)
        names: dict[int, Name] = {}
        for name, number in self._numbers_by_name(tensors).items():
            names.setdefault(number, name)
        self._before = tuple(names.values())

    def phase(self, named: Named) -> Phase:
        """Return what was logged since :meth:`add_named`.

        Args:
            named: what is left for later phases.
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
        # Fake tensors stand for real ones.
        return not self._not_moved or tensor.untyped_storage() not in self._not_moved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The most frequent call on fake tensors, and no operation.
        if func is torch.ops.prim.device.default:
            if isinstance(args[0], private.FakeTensor):
                return args[0].fake_device
            return func(*args)
        # No stream of a CPU delays what is freed.
        if func is torch.ops.aten.record_stream.default:
            return None
        if func not in self._instead or self._is_inside:
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._is_inside = True
        with self:
            result = self._instead[func](*args, **(kwargs or {}))
        self._is_inside = False
        return result
