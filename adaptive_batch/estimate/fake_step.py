"""A training step on fake tensors: the memory it would need on a device that is not here.

Fake tensors have shapes and no memory.
"""

from __future__ import annotations

import gc
import re
import traceback
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from itertools import chain, pairwise
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import replaced
from adaptive_batch.distributed import Sharding, shapes_worked_out_apart
from adaptive_batch.memory import (
    OptimizerInBackward,
    Trace,
    optimizer_state_tensors,
    optimizers_of,
    storage_bytes,
)

from .cuda_operators import CudaKernels, Workspaces
from .step_log import Phase, joined
from .tracker import LoggingTracker

private = PrivateNames("memory estimates")


def needs_values(error: Exception) -> str | None:
    """Return a message where code has read values of fake tensors; None of another error.

    It names the operation.
    """
    # The module defines an exception for each of them.
    if type(error).__module__ != private.FakeTensor.__module__:
        names_fake_tensors = re.search("FakeTensor|not supported for tensor subclasses", str(error))
        if not names_fake_tensors or not isinstance(error, AssertionError | RuntimeError):
            return None
    operation = getattr(error, "func", None) or str(error).partition("\n")[0]
    reason = f"{operation} ({type(error).__name__}) needs values, and there are none"
    return f"it cannot run on fake tensors: {reason}; probe it on a device"


def runs_in_optimizer(error: BaseException) -> bool:
    """Return whether the code of an optimizer has raised an error."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(isinstance(frame.f_locals.get("self"), Optimizer) for frame, _ in frames)


# Forward and backward of that many rows.
Run = Callable[[int], object]
# Rows of the steps that give a curve; one row alone often runs other operations.
FEW = 2
MORE = 3


@dataclass(frozen=True)
class Resident:
    """Bytes that are resident before a forward begins.

    Attributes:
        parameters, buffers: of the model.
        optimizer: of the optimizer's state.
        gradients: of earlier micro-batches.
    """

    parameters: int
    buffers: int
    optimizer: int
    gradients: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.buffers + self.optimizer + self.gradients


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own parameters and buffers."""
    return {
        **dict(module.named_parameters(recurse=False, remove_duplicate=False)),
        **dict(module.named_buffers(recurse=False, remove_duplicate=False)),
    }


class FakeDevice:
    """A device whose tensors have no memory, so that any model fits on it.

    Args:
        kernels: of the device that is counted; None for a CPU.
    """

    def __init__(self, kernels: CudaKernels | None = None) -> None:
        self.mode = private.FakeTensorMode()
        self.kernels = kernels
        self._counter: LoggingTracker | None = None
        # Of a batch that the step itself copies to the device, by what it calls for it.
        self.not_moved: WeakSet[torch.UntypedStorage] = WeakSet()
        self._streams: dict[object, int] = {torch.cpu.current_stream(): 0}
        # Of the model, in the order in which they are made; empty if a script moves them.
        self.made: list[torch.Tensor] = []
        # What is allocated before, to fill buffers.
        self.filling: list[Phase] = []
        self._filled_models: list[nn.Module] = []
        # What is counted may be this share below the peak.
        self.margin = 0.0

    def move(self, model: nn.Module, *, fill: Callable[[], object] | None = None) -> None:
        """Make the parameters and buffers of a model fake, in place.

        They are on the meta device, or real and then freed.

        Args:
            fill: makes real buffers of the model, as a device does when it loads it.
        """
        if fill is not None:
            self._filled_models.append(model)
            counter = LoggingTracker()
            with counter:
                fill()
            self.filling.append(counter.phase(self.filled()))
        # Tied weights stay tied.
        fakes: dict[torch.Tensor, torch.Tensor] = {}
        for module in model.modules():
            for name, tensor in own_tensors(module).items():
                if tensor not in fakes:
                    fakes[tensor] = self._on_host_device(tensor)
                    if isinstance(tensor, nn.Parameter):
                        fakes[tensor] = nn.Parameter(fakes[tensor], tensor.requires_grad)
                setattr(module, name, fakes[tensor])

    def filled(self) -> Iterator[tuple[tuple[str, int], torch.Tensor]]:
        """Yield the buffers that :attr:`filling` has allocated, by name."""
        models = self._filled_models
        for number, buffer in enumerate(chain.from_iterable(model.buffers() for model in models)):
            yield ("filled", number), buffer

    def batch(self, batch: dict[str, Any], *, is_moved: bool = True) -> None:
        """Make the tensors of a batch fake, in place, and count them.

        Args:
            batch: by name.
            is_moved: whether all of it is on the device; False where what the CPU has is counted
                once the step copies it, inside :class:`DevicesAsHost`.
        """

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            result = tensor
            if not isinstance(tensor, private.FakeTensor):
                # The counter would see it made.
                with private.disable_current_modes():
                    result = self._on_host_device(tensor)
            storage = result.untyped_storage()
            if not is_moved and tensor.device.type == "cpu":
                self.not_moved.add(storage)
            elif self._counter:
                self._counter._see(storage)
            return result

        batch.update(private.tree_map_only(torch.Tensor, fake, dict(batch)))

    def prepare_optimizer(self, optimizer: Optimizer) -> tuple[str, ...]:
        """Have an optimizer step on fake tensors, as it does on the device.

        Returns:
            What is not counted as it would be there, a sentence each.
        """
        modules = [kind.__module__ for kind in type(optimizer).__mro__]
        is_torchaos = any(module.startswith("torchao.") for module in modules)
        if is_torchaos:
            # Tables whose values are read when they are made, and kept.
            for states in ("subclass_4bit", "subclass_8bit"):
                tables = import_module(f"torchao.optim.{states}")
                tables.get_qmap_signed()
                tables.get_qmap_unsigned()
        if self.kernels is None:
            return ()
        # What optimizers of PyTorch choose on CUDA. Adafactor, in `_adafactor`, does not.
        if any(re.match(r"torch\.optim\.(?!optimizer)[a-z]", module) for module in modules):
            for group in optimizer.param_groups:
                is_free = group.get("foreach", False) is None and group.get("fused") is None
                if is_free and not group.get("differentiable"):
                    group["foreach"] = True
        if not is_torchaos:
            return ()
        step = optimizer.step

        def uncounted(*args: Any, **kwargs: Any) -> Any:
            # Left out, as it keeps nothing, and takes long: many operations for each weight.
            compiled_parts = replaced(torch, compile=lambda *_, **__: lambda *_, **__: None)
            with private.disable_current_modes(), self.mode, compiled_parts:
                result = step(*args, **kwargs)
            if self._counter:
                self._counter.add(optimizer_state_tensors([optimizer]))
            return result

        optimizer.step = uncounted  # type: ignore[method-assign]
        return (
            "torchao: its step is compiled on a device, so only the states that it keeps are"
            " counted",
        )

    def copying(self) -> TorchFunctionMode:
        """Context manager: deep copies of real tensors are fake."""
        return _FakeCopies(self._on_host_device)

    def _on_host_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor like another, on the CPU, where all fake ones are."""
        # A wrapper, such as a DTensor or a weight of 4 bits, wraps fake tensors then.
        if hasattr(tensor, "__tensor_flatten__"):
            names, context = tensor.__tensor_flatten__()
            inner = {name: getattr(tensor, name) for name in names}
            for name, part in inner.items():
                # A DTensor also names its mesh.
                if isinstance(part, torch.Tensor):
                    inner[name] = self._on_host_device(part)
            kind: Any = type(tensor)
            wrapper: torch.Tensor = kind.__tensor_unflatten__(
                inner, context, tensor.shape, tensor.stride()
            )
            return wrapper
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
        if tensor.is_meta or (is_plain and tensor.device.type != "cpu"):
            with self.mode:
                return torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                )
        converted: torch.Tensor = self.mode.from_tensor(tensor, static_shapes=True)
        return converted

    @contextmanager
    def counting(self) -> Iterator[LoggingTracker]:
        """Context manager: new tensors are fake, and counted."""
        kernels = self.kernels
        counter = LoggingTracker(
            instead=kernels.operators() if kernels else {},
            workspaces=Workspaces(kernels) if kernels else None,
            not_moved=self.not_moved,
            streams=self._streams,
        )
        self._counter = counter
        try:
            with ExitStack() as contexts:
                # The collector would look through all objects again and again: a step makes many.
                if gc.isenabled():
                    gc.disable()
                    contexts.callback(gc.enable)
                # A compiled region fails under a dispatch mode, and would hide its tensors from it.
                contexts.enter_context(torch.compiler.set_stance("force_eager"))
                contexts.enter_context(shapes_worked_out_apart())
                contexts.enter_context(self.mode)
                contexts.enter_context(counter)
                if kernels:
                    contexts.enter_context(kernels.in_place())
                yield counter
        finally:
            self._counter = None

    def counted(self) -> AbstractContextManager[object]:
        """Context manager: count also where modes are disabled, as they are for Dynamo."""
        return self._counter or nullcontext()


class FakeStep:
    """Runs the code of a training step on fake tensors, and traces the memory it would need.

    Args:
        model: on the device.
        optimizer, forward_backward, step, accumulates, sharding, keep_gradients: as in
            :class:`adaptive_batch.probe.DryRun`.
        more_states: returns what the optimizer keeps beside its state.

    Attributes:
        accumulates: whether gradients of earlier micro-batches are there.
        optimizer_peak_bytes: of clipping and the optimizer's step; None with the optimizer in
            backward.
        resident: before a forward.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer | OptimizerInBackward,
        forward_backward: Run,
        step: Callable[[], object],
        accumulates: bool,
        device: FakeDevice,
        sharding: Sharding | None = None,
        keep_gradients: Callable[[], object] | None = None,
        more_states: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        self.model = model
        self._in_backward = isinstance(optimizer, OptimizerInBackward)
        self._optimizers = optimizers_of(optimizer)
        self._more_states = more_states
        self.forward_backward = forward_backward
        self.accumulates = accumulates
        self._device = device
        self._sharding = sharding or Sharding(model)
        self._keep_gradients = keep_gradients if accumulates else None
        model.train()
        self.optimizer_peak_bytes: int | None = None
        self._phases: dict[tuple[Run, bool], dict[int, Phase]] = {}
        # Steps of the optimizer: the first, which makes its states, and any later one.
        self._steps: list[Phase] = []
        if self._in_backward and not self._sharding.is_sharded:
            self._at(FEW, forward_backward, is_first=True)
        for _ in range(2):
            if self._sharding.is_sharded:
                # FSDP sets itself up in the first; gradients share what it has reduced.
                with torch.compiler.set_stance("force_eager"), device.mode:
                    forward_backward(FEW)
            elif not self._in_backward:
                self._give_gradients()
            if not self._in_backward:
                self._trace_step(step)
        self._prepare()
        gradients = [
            tensor for (kind, _), tensor in self._named() if kind in ("gradient", "kept gradient")
        ]
        self.resident = Resident(
            storage_bytes(model.parameters()),
            storage_bytes(model.buffers()),
            storage_bytes(self._states()),
            storage_bytes(gradients),
        )

    def _trace_step(self, step: Callable[[], object]) -> None:
        """Run the optimizer's step, and keep its log."""
        with self._device.counting() as counter:
            counter.add_named(self._named())
            step()
            if self.optimizer_peak_bytes is None:
                self.optimizer_peak_bytes = counter.peak_bytes
            for optimizer in self._optimizers:
                optimizer.zero_grad(set_to_none=True)
            self._steps.append(counter.phase(self._named()))

    def trace(self, rows: int, *, forward_backward: Run | None = None) -> Trace:
        """Return what forward and backward of one micro-batch of that many rows hold.

        Args:
            forward_backward: instead of the constructor's, for rows of another length.
        """
        run = forward_backward or self.forward_backward
        phase, trace = self._traced(rows, run)
        self._phases.setdefault((run, False), {})[rows] = phase
        return trace

    def is_traced(self, rows: int, *, forward_backward: Run | None = None) -> bool:
        """Return whether a micro-batch of that many rows was traced."""
        return rows in self._phases.get((forward_backward or self.forward_backward, False), {})

    def log(
        self,
        rows: int,
        *,
        forward_backward: Run | None = None,
        num_steps: int = 4,
        micro_batches: int = 2,
    ) -> array[int]:
        """Return what loading and the first steps allocate and free (:mod:`.step_log`).

        The log is exact for one row and for a number of rows that was traced. The sizes for any
        other lie on the line through two traces.

        Args:
            rows: rows of each micro-batch.
            forward_backward: replaces the constructor's, for rows of another length.
            num_steps: steps of the log. The first one makes the optimizer's states, and from the
                third on steps are alike.
            micro_batches: micro-batches of a step where steps accumulate. All but the first are
                alike.
        """
        run = forward_backward or self.forward_backward
        phase = self._at(rows, run)
        # Each phase, and whether training runs it for the first time.
        phases = [(phase, True) for phase in (*self._device.filling, self.loading)]
        for number in range(num_steps):
            is_first_step = number == 0
            if self.accumulates:
                phases.append((self._at(rows, run, is_first=True), is_first_step))
                phases += [(phase, False)] * (micro_batches - 1)
            elif self._in_backward and is_first_step:
                phases.append((self._at(rows, run, is_first=True), True))
            else:
                phases.append((phase, is_first_step))
            # There are none where the optimizer runs in backward.
            if self._steps:
                phases.append((self._steps[min(number, len(self._steps) - 1)], False))
        return joined(phases)

    def composition(self, rows: int, forward_backward: Run) -> dict[str, int]:
        """Return the bytes by kind at the peak of a micro-batch of that many rows."""
        held = self._at(rows, forward_backward).held_at_peak()
        resident = self.resident
        return {
            "parameters": resident.parameters,
            "buffers": resident.buffers,
            "optimizer state": resident.optimizer,
            "gradients": resident.gradients + held["gradients"],
            "activations": held["activations"],
            "backward temporaries": held["backward temporaries"],
        }

    @property
    def margin(self) -> float:
        """Share by which the peak of a step can exceed what is counted."""
        return self._device.margin

    @property
    def loading(self) -> Phase:
        """What loading the model allocates."""
        with self._device.counting() as counter:
            counter.add_named(self._device.filled())
            counter.add(self._device.made)
            counter.add(tensor for _, tensor in _named(self.model))
            return counter.phase(_named(self.model))

    def _at(self, rows: int, run: Run, *, is_first: bool = False) -> Phase:
        """Return a micro-batch: any, or the first one of training."""
        phases = self._phases.setdefault((run, is_first), {})
        if rows in phases:
            return phases[rows]
        # One row often runs other operations, so its log follows from no others.
        if rows >= FEW:
            for size in (FEW, MORE):
                if len(phases) < 2 and size not in phases:
                    phases[size], _ = self._traced(size, run, is_first=is_first)
            nearest_sizes = sorted(phases, key=lambda size: abs(size - rows))
            for near, far in pairwise(nearest_sizes):
                if phases[near].is_like(phases[far]):
                    return phases[near].between(phases[far], Fraction(rows - near, far - near))
        phases[rows], _ = self._traced(rows, run, is_first=is_first)
        return phases[rows]

    def _traced(self, rows: int, run: Run, *, is_first: bool = False) -> tuple[Phase, Trace]:
        """Run one micro-batch, and return its log and what was alive after each operation.

        Args:
            is_first: whether it makes the gradients, or the states where the optimizer is in
                backward.
        """
        if is_first:
            self.model.zero_grad()
            if self._in_backward:
                for optimizer in self._optimizers:
                    optimizer.state.clear()
        else:
            self._prepare()
        with self._device.counting() as counter:
            counter.add_named(self._named())
            run(rows)
            return counter.phase(self._named()), counter.trace()

    def _named(self) -> Iterator[tuple[tuple[str, int], torch.Tensor]]:
        yield from _named(self.model)
        for number, parameter in enumerate(self.model.parameters()):
            if parameter.grad is not None:
                yield ("gradient", number), parameter.grad
        for number, tensor in enumerate(self._sharding.kept_gradients()):
            yield ("kept gradient", number), tensor
        for number, tensor in enumerate(self._states()):
            yield ("state", number), tensor

    def _states(self) -> Iterator[torch.Tensor]:
        yield from optimizer_state_tensors(self._optimizers)
        yield from self._more_states()

    def _prepare(self) -> None:
        self._sharding.reset()
        self.model.zero_grad()
        if self._keep_gradients:
            with self._device.mode:
                self._keep_gradients()
        elif self.accumulates:
            self._give_gradients()

    def _give_gradients(self) -> None:
        with self._device.mode:
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)


def _named(model: nn.Module) -> Iterator[tuple[tuple[str, int], torch.Tensor]]:
    for number, tensor in enumerate((*model.parameters(), *model.buffers())):
        yield ("model", number), tensor


class DevicesAsHost(TorchFunctionMode):
    """Inside, what a script puts on a device stays on the CPU, where fake tensors are.

    Args:
        device: whose tensors are copied where they were not on it yet.
    """

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return self._moved(args[0])
        names_device = "device" in kwargs
        if names_device:
            kwargs["device"] = _host_in_place_of(kwargs["device"])
        if func is torch.Tensor.to:
            args = tuple(map(_host_in_place_of, args))
            # A tensor names its device, too.
            names_device |= any(isinstance(arg, torch.device | torch.Tensor) for arg in args[1:])
        result = func(*args, **kwargs)
        names_device |= func is torch.Tensor.type_as
        if names_device and isinstance(result, torch.Tensor):
            return self._moved(result)
        return result

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of what was not on the device yet; anything else as it is."""
        if tensor.untyped_storage() in self._device.not_moved:
            return tensor.clone()
        return tensor


def _host_in_place_of(value: Any) -> Any:
    """Return the CPU in the place of a device; anything else as it is."""
    if isinstance(value, str | torch.device) or type(value) is int:
        return torch.device("cpu")
    return value


class _FakeCopies(TorchFunctionMode):
    """Deep copies of real tensors are fake.

    Args:
        fake: makes a fake tensor like a real one.
    """

    def __init__(self, fake: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._fake = fake

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Parameters clone their data.
        if func in (torch.Tensor.__deepcopy__, torch.Tensor.clone):
            return self._fake(args[0])
        return func(*args, **(kwargs or {}))
