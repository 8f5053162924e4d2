"""A dispatch mode that counts the bytes of live tensors after each operation."""

from __future__ import annotations

import sys
import weakref
from array import array
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import format_bytes

from .curve import Trace
from .device import plain_tensors

private = PrivateNames("searches on a CPU and memory estimates")


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live storages through weak references to them.

    The trace begins with the first operation on a resident tensor, after the batch is collated.
    """

    def __init__(self, budget_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.budget_bytes = budget_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self._references_of_autograd = _references_of_autograd()
        # Hash of the operations of the trace, and the bytes alive after each of them.
        self._program = 0
        self._live_bytes_after_each = array("q")
        # Storages are identified by their address (`_cdata`).
        self._resident: set[int] = set()
        self._sizes: dict[int, int] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        # Storages that FSDP has gathered, as an ordered set.
        self._gathered: dict[int, None] = {}

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count resident tensors."""
        for tensor in tensors:
            for plain in plain_tensors(tensor):
                self.count_storage(plain.untyped_storage())
        self._resident = set(self._sizes)

    def trace(self) -> Trace:
        """Return the bytes alive after each operation so far."""
        return Trace(self._program, self._live_bytes_after_each)

    def _record(self, func: object, args: tuple[Any, ...]) -> None:
        """Add an operation to the trace, unless the trace has not begun."""
        if not self._live_bytes_after_each:
            reads_resident = any(
                isinstance(arg, torch.Tensor) and arg.untyped_storage()._cdata in self._resident
                for arg in args
            )
            if not reads_resident:
                return
        self._program = hash((self._program, func))
        self._live_bytes_after_each.append(self.live_bytes)

    def check(self) -> None:
        """Update the peak; raise ``torch.OutOfMemoryError`` if it is above the budget."""
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            if self.peak_bytes > self.budget_bytes:
                raise torch.OutOfMemoryError(
                    f"CPU out of memory: {format_bytes(self.peak_bytes)} of tensors are alive, "
                    f"over the budget of {format_bytes(self.budget_bytes)}"
                )

    def count_storage(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that is new or was resized in place."""
        key = storage._cdata
        size = storage.nbytes()
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._forget(key))
        if size != self._sizes.get(key):
            self._resize(key, size)

    def _resize(self, key: int, size: int) -> None:
        """Set the size of a storage; 0 if it is freed."""
        self.live_bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size

    def _forget(self, key: int) -> None:
        self._resize(key, 0)
        del self._sizes[key], self._storages[key]
        self._gathered.pop(key, None)

    def _count_gathered(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages that FSDP has resized in place to gather parameters."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.count_storage(storage)
            self._gathered[storage._cdata] = None

    def _count_freed(self) -> None:
        """Count the storages that FSDP has resized to 0 since the last operation."""
        for key in tuple(self._gathered):
            storage = self._storages[key]()
            if storage is not None and not storage.nbytes():
                self.count_storage(storage)
                del self._gathered[key]

    def _has_memory(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has memory; DTensor infers shapes with tensors that have none."""
        return not (tensor.is_meta or isinstance(tensor, private.FakeTensor))

    def _count_result(self, result: Any) -> None:
        """Count the tensors in the result of an operation."""
        if isinstance(result, torch.Tensor):
            if self._has_memory(result):
                self.count_storage(result.untyped_storage())
        elif isinstance(result, tuple | list):
            for item in result:
                self._count_result(item)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and accumulate gradients in place as autograd does without a mode.

        Autograd adds to the first gradient in place if it holds the only reference
        (torch/csrc/autograd/input_buffer.cpp).
        """
        if (
            _adds_in_backward(func)
            and not torch.is_grad_enabled()
            and _references(args[0]) == self._references_of_autograd
        ):
            return args[0].add_(args[1])
        return func(*args, **kwargs)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # The subclass unwraps itself, and the operation returns here with its inner tensors.
            return NotImplemented
        kwargs = kwargs or {}
        if self._gathered:
            self._count_freed()
        result = self._run(func, args, kwargs)
        self._count_result(result)
        # The operator exists only if FSDP has been imported, so look at the namespace first.
        is_of_fsdp = getattr(func, "namespace", "") == "fsdp"
        if is_of_fsdp and func is torch.ops.fsdp.split_with_sizes_copy.default:
            self._count_gathered(kwargs["out"])
        self._record(func, args)
        self.check()
        return result


class _FirstSum(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the reference counts of a gradient to which autograd adds another one."""

    references: tuple[int, ...] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _adds_in_backward(func):
            self.references = _references(args[0])
        return func(*args, **(kwargs or {}))


def _adds_in_backward(func: Any) -> bool:
    return func is torch.ops.aten.add.Tensor and private.current_graph_task_id() != -1


def _references(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the reference counts of storage, tensor and Python object; None for a partial view."""
    storage = tensor.untyped_storage()
    if tensor.numel() * tensor.element_size() != storage.nbytes():
        return None
    # torch does not declare the method.
    holder: Any = tensor
    return private.storage_use_count(storage._cdata), holder._use_count(), sys.getrefcount(tensor)


def _references_of_autograd() -> tuple[int, ...] | None:
    """Return the reference counts of a gradient that only autograd holds, as seen by an operation.

    They are measured, since a graph break of the compiler adds one.
    """
    first_sum = _FirstSum()  # type: ignore[no-untyped-call]
    # Backward adds the gradient of one branch of `leaf` to that of the other one.
    with private.disable_current_modes(), torch.enable_grad(), first_sum:
        leaf = torch.ones(2, device="cpu", requires_grad=True)
        (leaf.exp() + leaf.sin()).sum().backward()  # type: ignore[no-untyped-call]
    references: tuple[int, ...] | None = first_sum.references
    return references
