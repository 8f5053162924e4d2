"""A training step on fake tensors, which have shapes and no memory: the memory it would need on a device that is not here."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batch._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    disable_current_modes,
    tree_map_only,
)
from adaptive_batch.distributed import Sharding, shapes_worked_out_apart
from adaptive_batch.memory import OptimizerInBackward, optimizer_state_tensors, storage_bytes

from .cuda_workspace import CudaKernels, workspace_bytes
from .tracker import AttributedTracker, ModuleNames, StepTrace

_NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


def needs_values(error: Exception) -> str | None:
    """Return what to tell a user whose code has read values of fake tensors, with the operation; None of another error."""
    names_it = re.search("FakeTensor|not supported for tensor subclasses", str(error))
    if not isinstance(error, _NEEDS_VALUES) and not (names_it and isinstance(error, AssertionError | RuntimeError)):
        return None
    operation = getattr(error, "func", None) or str(error).partition("\n")[0]
    why = f"{operation} ({type(error).__name__}) needs values, and there are none"
    return f"it cannot run on fake tensors: {why}; probe it on a device"


@dataclass(frozen=True)
class Resident:
    """Bytes that are resident before a forward begins: of the model, the optimizer's state, earlier micro-batches' gradients."""

    parameters: int
    buffers: int
    optimizer: int
    gradients: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.buffers + self.optimizer + self.gradients


class FakeDevice:
    """A device whose tensors have no memory, so that any model fits on it.

    Args:
        kernels: of the device that is counted; None for a CPU.
        workspace: as in :class:`AttributedTracker`.
    """

    def __init__(
        self,
        kernels: CudaKernels | None = None,
        *,
        workspace: Callable[[Any, Sequence[Any], Mapping[str, Any]], int] = lambda *_: 0,
    ) -> None:
        self.mode = FakeTensorMode()
        self._kernels = kernels
        self._workspace = workspace_bytes if kernels else workspace
        self._counter: AttributedTracker | None = None

    def move(self, model: nn.Module) -> None:
        """Make the parameters and buffers of a model fake, in place; they are on the meta device, or real and then freed."""

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_meta:
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            return self.mode.from_tensor(tensor, static_shapes=True)

        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(parameter, []).append((module, name))
        with self.mode:
            model._apply(lambda tensor: _through_shards(tensor, fake))  # type: ignore[no-untyped-call]
        for (owner, own_name), *others in places.values():  # tied weights stay tied
            for module, name in others:
                module._parameters[name] = owner._parameters[own_name]

    def batch(self, batch: dict[str, Any]) -> None:
        """Make the tensors of a batch fake, in place, and count them."""
        batch.update(tree_map_only(torch.Tensor, self._fake, dict(batch)))

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        fake = tensor if isinstance(tensor, FakeTensor) else self.mode.from_tensor(tensor, static_shapes=True)
        if self._counter:
            self._counter._see(fake.untyped_storage())
        return fake

    @contextmanager
    def counting(
        self, *, explain: Collection[int] = (), names: ModuleNames | None = None
    ) -> Iterator[AttributedTracker]:
        """Context manager: new tensors are fake, and counted."""
        self._counter = counter = AttributedTracker(workspace=self._workspace, explain=explain, names=names)
        try:
            # A compiled region fails under a dispatch mode, and would hide its tensors from it.
            with (
                torch.compiler.set_stance("force_eager"),
                shapes_worked_out_apart(),
                self.mode,
                counter,
                self._kernels or nullcontext(),
                names.following() if names else nullcontext(),
            ):
                yield counter
        finally:
            self._counter = None

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Context manager: count only what is still alive at the end, for code that is compiled on a real device."""
        with self._counter.pause() if self._counter else nullcontext():
            yield


class FakeStep:
    """Runs the code of a training step on fake tensors, at any number of rows, and traces the memory it would need.

    Args:
        model: on the device.
        optimizer, forward_backward, step, accumulates, sharding, keep_gradients: as in :class:`adaptive_batch.probe.DryRun`.

    Attributes:
        optimizer_peak_bytes: of clipping and the optimizer's step; None with the optimizer in backward.
        resident: before a forward.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer | OptimizerInBackward,
        forward_backward: Callable[[int], object],
        step: Callable[[], object],
        accumulates: bool,
        device: FakeDevice,
        sharding: Sharding | None = None,
        keep_gradients: Callable[[], object] | None = None,
    ) -> None:
        self.model = model
        self._optimizers = (
            list(optimizer.optimizers.values()) if isinstance(optimizer, OptimizerInBackward) else [optimizer]
        )
        self._forward_backward = forward_backward
        self._accumulates = accumulates
        self._device = device
        self._sharding = sharding or Sharding(model)
        self._keep_gradients = keep_gradients if accumulates else None
        model.train()
        self.optimizer_peak_bytes: int | None = None
        in_backward = isinstance(optimizer, OptimizerInBackward)
        if in_backward or self._sharding.is_sharded:  # states are made by the first step, FSDP sets itself up in it
            with torch.compiler.set_stance("force_eager"), device.mode:
                forward_backward(2)
        if not in_backward:
            self._give_gradients()
            with device.counting() as counter:
                counter.add(self._tensors())
                step()
            self.optimizer_peak_bytes = counter.peak_bytes
        self._prepare()
        self.resident = Resident(
            storage_bytes(model.parameters()),
            storage_bytes(model.buffers()),
            storage_bytes(optimizer_state_tensors(self._optimizers)),
            storage_bytes(self._gradients()),
        )

    def trace(
        self, rows: int, *, forward_backward: Callable[[int], object] | None = None, explain: Collection[int] = ()
    ) -> StepTrace:
        """Return what forward and backward of one micro-batch of that many rows hold.

        Args:
            forward_backward: instead of the constructor's, for rows of another length.
            explain: operations at which all live bytes are attributed to modules.
        """
        self._prepare()
        with self._device.counting(explain=explain, names=ModuleNames(self.model) if explain else None) as counter:
            counter.add(self._tensors())
            (forward_backward or self._forward_backward)(rows)
            return counter.step_trace(self.model)

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from self._gradients()
        yield from optimizer_state_tensors(self._optimizers)

    def _gradients(self) -> Iterator[torch.Tensor]:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                yield parameter.grad
        yield from self._sharding.kept_gradients()

    def _prepare(self) -> None:
        self._sharding.reset()
        for parameter in self.model.parameters():
            parameter.grad = None
        if self._keep_gradients:
            with self._device.mode:
                self._keep_gradients()
        elif self._accumulates:
            self._give_gradients()

    def _give_gradients(self) -> None:
        with self._device.mode:
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)


def _through_shards(tensor: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Convert a tensor, or this rank's shard of a DTensor."""
    if not hasattr(tensor, "to_local"):
        return convert(tensor)
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    with torch.no_grad(), disable_current_modes():
        local = tensor.to_local()
    return DTensor.from_local(
        convert(local),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
