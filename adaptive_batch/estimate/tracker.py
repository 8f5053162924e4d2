"""A memory tracker that knows which operation of which module made the live bytes."""

from __future__ import annotations

import re
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import nn

from adaptive_batch._torch import PrivateNames
from adaptive_batch.memory import MemoryTracker, Trace, plain_tensors

from .cuda_operators import Workspaces
from .step_log import STREAM, Phase

private = PrivateNames("memory estimates")

# The key of a module's name in the metadata of an autograd node.
_LABEL = "adaptive_batch.module"


@dataclass(frozen=True)
class OpSite:
    """An operation of a step, and the innermost module that it belongs to; empty for the loss.

    Recomputing is part of the backward pass.
    """

    module: str
    operation: str
    backward: bool

    def __str__(self) -> str:
        direction = "backward" if self.backward else "forward"
        return f"{direction} of {self.module or 'the loss'} ({self.operation})"


@dataclass(frozen=True)
class LiveMemory:
    """Live bytes at one operation by the operation that made them, largest first.

    What is resident is not among them.
    """

    site: OpSite
    by_site: tuple[tuple[OpSite, int], ...]

    def describe(self) -> str:
        """Return the operation and the three largest allocations, with their shares of all."""
        sizes: Counter[str] = Counter()
        for site, size in self.by_site:
            # Like layers count together.
            name = re.sub(r"(?<![^.])\d+(?![^.])", "*", site.module) or "the loss"
            direction = ", backward" if site.backward else ""
            sizes[f"{name} ({site.operation}{direction})"] += size
        shares = ", ".join(
            f"{name} {100 * size / sizes.total():.0f}%" for name, size in sizes.most_common(3)
        )
        if not shares:
            return str(self.site)
        return f"{self.site}; largest transient allocations: {shares}"


@dataclass(frozen=True)
class StepTrace:
    """What forward and backward held after each operation.

    Attributes:
        forward_bytes: of all live bytes those that forward made: activations that wait for
            backward.
        gradients: of parameters, without those of earlier micro-batches: the operation that made
            each, and its bytes.
        explained: what was alive, for the operations that were asked for.
    """

    trace: Trace
    forward_bytes: Sequence[int]
    gradients: tuple[tuple[int, int], ...]
    explained: dict[int, LiveMemory] = field(default_factory=dict)

    def gradient_bytes(self, operation: int) -> int:
        """Bytes of gradients that exist after an operation."""
        return sum(num_bytes for made, num_bytes in self.gradients if made <= operation)


class AttributedTracker(MemoryTracker):  # type: ignore[no-untyped-call]
    """Counts live bytes without a limit, and records what made them.

    Args:
        instead: what runs in the place of operators.
        workspaces: of cuBLAS, where the device has it.
        on_host: storages that are not on the device, those that are made here included.
        not_moved: storages on the host that are not counted at all.
        streams: their numbers in the log, those that are met here included; a CPU's do nothing, but
            FSDP changes between them.
        explain: numbers of operations at which all live bytes are attributed to modules, for which
            `names` is needed.
    """

    def __init__(
        self,
        *,
        instead: Mapping[Any, Callable[..., Any]] | None = None,
        workspaces: Workspaces | None = None,
        on_host: WeakSet[torch.UntypedStorage] | None = None,
        not_moved: WeakSet[torch.UntypedStorage] | None = None,
        streams: dict[object, int] | None = None,
        explain: Collection[int] = (),
        names: ModuleNames | None = None,
    ) -> None:
        self.log = array("q")
        self._numbers: dict[int, int] = {}
        self._num_allocations = 0
        self._before: list[tuple[Hashable, int]] = []
        super().__init__(sys.maxsize)
        self._workspaces = workspaces
        self._instead: dict[Any, Callable[..., Any]] = {
            **(instead or {}),
            **(workspaces.instead if workspaces else {}),
        }
        self._on_host = on_host if on_host is not None else WeakSet()
        self._not_moved = not_moved if not_moved is not None else WeakSet()
        self._streams = streams if streams is not None else {torch.cpu.current_stream(): 0}
        self._explain = frozenset(explain)
        self._names = names
        self._is_lifted = False
        self._is_inside = False
        self._in_forward: set[int] = set()
        self._forward_bytes = 0
        self._forward_bytes_after_each = array("q")
        self._made_after: dict[int, int] = {}
        self._made_by: dict[int, OpSite] = {}
        self._explained: dict[int, LiveMemory] = {}
        self._last = OpSite("", "", False)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        super().add(tensors)
        self._in_forward.clear()
        self._forward_bytes = 0

    def add_named(self, tensors: Iterable[tuple[Hashable, torch.Tensor]]) -> None:
        """Count what is alive before anything runs, of which :meth:`phase` tells by name."""
        # Modes would be asked for the storage of each of many tensors.
        with private.disable_current_modes():
            for name, tensor in tensors:
                count = self._num_allocations
                for plain in plain_tensors(tensor):
                    self._see(plain.untyped_storage())
                self._before += [(name, number) for number in range(self._num_allocations - count)]
        self.add(())

    def see(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were made while this mode was disabled."""
        with private.disable_current_modes():
            for tensor in tensors:
                for plain in plain_tensors(tensor):
                    self._see(plain.untyped_storage())
        self.check()

    def step_trace(self, model: nn.Module) -> StepTrace:
        """Return what was counted, for a model that has its gradients now."""
        # Of storages, as gradients that FSDP has reduced share one.
        keys = {
            plain.untyped_storage()._cdata: None
            for parameter in model.parameters()
            if parameter.grad is not None
            for plain in plain_tensors(parameter.grad)
        }
        made = (key for key in keys if key in self._made_after and key not in self._resident)
        gradients = tuple((self._made_after[key], self._sizes[key]) for key in made)
        return StepTrace(self.trace(), self._forward_bytes_after_each, gradients, self._explained)

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        previous_size = self._sizes.get(key, 0)
        is_new = key not in self._sizes
        super()._see(storage)
        size = self._sizes.get(key, 0)
        if is_new and self._is_lifted:
            self._on_host.add(storage)
        if size != previous_size and storage not in self._on_host:
            self._replace(key, size)
        if is_new:
            self._made_after[key] = len(self._forward_bytes_after_each)
            if self._explain:
                self._made_by[key] = self._last
            if private.current_graph_task_id() == -1:
                self._in_forward.add(key)
        if key in self._in_forward:
            self._forward_bytes += size - previous_size

    def _replace(self, key: int, size: int) -> None:
        """Log that a storage has another block of memory now, or none."""
        freed = self._numbers.pop(key, None)
        if size:
            self._numbers[key] = self._num_allocations
            self._num_allocations += 1
            stream = self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))
            self.log.append(stream * STREAM + size)
        if freed is not None:
            self.log.append(~freed)

    def phase(self, after: Iterable[tuple[Hashable, torch.Tensor]]) -> Phase:
        """Return what was logged since :meth:`add_named`, and by name what is left for later."""
        num_earlier = len(self._before)
        kept = self._workspaces.tensors.values() if self._workspaces else ()
        once = {number for tensor in kept for number in self._numbers_of(tensor)}
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
        with private.disable_current_modes():
            named: dict[Hashable, int] = {
                (name, place): numbers[number]
                for name, tensor in after
                for place, number in enumerate(self._numbers_of(tensor))
            }
        return Phase(log, tuple(self._before), named, tuple(positions))

    def _numbers_of(self, tensor: torch.Tensor) -> list[int]:
        keys = (plain.untyped_storage()._cdata for plain in plain_tensors(tensor))
        return [self._numbers[key] for key in keys if key in self._numbers]

    def _forget(self, key: int) -> None:
        self._replace(key, 0)
        if key in self._in_forward:
            self._in_forward.discard(key)
            self._forward_bytes -= self._sizes[key]
        self._made_after.pop(key, None)
        self._made_by.pop(key, None)
        super()._forget(key)

    def _record(self, func: Any, args: tuple[Any, ...]) -> None:
        number = len(self._live_bytes_after_each)
        super()._record(func, args)
        if len(self._live_bytes_after_each) == number:
            return
        self._forward_bytes_after_each.append(self._forward_bytes)
        if number in self._explain:
            self._explained[number] = LiveMemory(self._last, self._by_site())

    def _by_site(self) -> tuple[tuple[OpSite, int], ...]:
        live_bytes: Counter[OpSite] = Counter()
        for key, size in self._sizes.items():
            if key not in self._resident:
                live_bytes[self._made_by[key]] += size
        return tuple((site, size) for site, size in live_bytes.most_common() if size)

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
        if self._names is not None:
            backward = private.current_graph_task_id() != -1
            name = str(getattr(func, "_overloadpacket", func)).removeprefix("aten.")
            self._last = OpSite(self._names.current(), name, backward)
        if func in self._instead and not self._is_inside:
            self._is_inside = True
            with self:
                result = self._instead[func](*args, **(kwargs or {}))
            self._is_inside = False
        else:
            # A number of Python's.
            self._is_lifted = func is torch.ops.aten.lift_fresh.default
            result = super().__torch_dispatch__(func, types, args, kwargs)
        return result


class ModuleNames:
    """The name of the module whose operation runs, in forward and in backward, inside
    :meth:`following`.

    The autograd nodes of what modules take and return have the name in their metadata, from which
    backward reads it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._stack: list[str] = []
        self._last = ""

    @contextmanager
    def following(self) -> Iterator[None]:
        """Context manager: hooks of the modules keep the name up to date.

        Modules within a compiled one have none, which would divide its graph.
        """
        self._stack = []
        self._last = ""
        with ExitStack() as hooks:
            compiled = [
                module for module in self._model.modules() if hasattr(module.forward, "is_compiled")
            ]
            inside = {part for module in compiled for part in module.modules()} - {*compiled}
            for name, module in self._model.named_modules():
                if module in inside:
                    continue
                plain = name.replace("_checkpoint_wrapped_module.", "")
                plain = plain.removesuffix("._checkpoint_wrapped_module")
                hooks.enter_context(
                    module.register_forward_pre_hook(partial(self._enter, plain), prepend=True)
                )
                hooks.enter_context(module.register_forward_hook(self._leave, always_call=True))
            yield

    def _enter(self, name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        self._label(args)
        self._stack.append(self._name_inside(name))

    def _leave(self, _: nn.Module, __: object, result: Any) -> None:
        self._label(result)
        self._stack.pop()

    def _label(self, values: Any) -> None:
        """Write the current name into the nodes that no module has written its name into."""
        name = self.current()
        tensors = (leaf for leaf in private.tree_leaves(values) if isinstance(leaf, torch.Tensor))
        nodes = [tensor.grad_fn for tensor in tensors]
        while nodes:
            node: Any = nodes.pop()
            if node is not None and _LABEL not in node.metadata:
                node.metadata[_LABEL] = name
                nodes += [earlier for earlier, _ in node.next_functions]

    def _name_inside(self, name: str) -> str:
        """Return the name of a module that is called in the current one."""
        inside = self._stack[-1] if self._stack else ""
        # A shared module is listed under its first name, a wrapped one (to be recomputed) under its
        # wrapper's.
        if inside and name != inside and not name.startswith(f"{inside}."):
            return f"{inside}.{name.rpartition('.')[2]}"
        return name

    def current(self) -> str:
        """Return the name of the innermost module; empty outside of all."""
        # Forward, or recomputing.
        if self._stack:
            return self._stack[-1]
        if private.current_graph_task_id() == -1:
            return ""
        node = private.current_autograd_node()
        if node is not None:
            self._last = cast(dict[str, Any], node.metadata).get(_LABEL, "")
        return self._last
