"""A training step on fake tensors, which have shapes but no memory."""

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
from adaptive_batch.distributed import Sharding, hide_shape_propagation
from adaptive_batch.memory import (
    OptimizerInBackward,
    Trace,
    optimizer_list,
    optimizer_state_tensors,
    storage_bytes,
)

from .allocator import LoggingTracker, Phase, join_phases
from .cuda_operators import CudaKernels, Workspaces

private = PrivateNames("memory estimates")


def needs_values(error: Exception) -> str | None:
    """Return a message for an error of code that reads values of fake tensors; None for other
    errors.
    """
    # This module defines all exceptions of fake tensors.
    if type(error).__module__ != private.FakeTensor.__module__:
        names_fake_tensors = re.search("FakeTensor|not supported for tensor subclasses", str(error))
        if not names_fake_tensors or not isinstance(error, AssertionError | RuntimeError):
            return None
    operation = getattr(error, "func", None) or str(error).partition("\n")[0]
    reason = f"{operation} ({type(error).__name__}) needs values"
    return f"it cannot run on fake tensors: {reason}; probe it on a device"


def runs_in_optimizer(error: BaseException) -> bool:
    """Return whether an error was raised in the code of an optimizer."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(isinstance(frame.f_locals.get("self"), Optimizer) for frame, _ in frames)


# Forward and backward of a number of rows.
Run = Callable[[int], object]
# Rows of the steps that determine a curve; a single row often runs other operations.
FEW = 2
MORE = 3


@dataclass(frozen=True)
class Resident:
    """Resident bytes before a forward.

    Attributes:
        parameters, buffers: bytes of the model.
        optimizer: bytes of the optimizer's state.
        gradients: bytes of gradients of earlier micro-batches.
    """

    parameters: int
    buffers: int
    optimizer: int
    gradients: int

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return self.parameters + self.buffers + self.optimizer + self.gradients


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own parameters and buffers."""
    return {
        **dict(module.named_parameters(recurse=False, remove_duplicate=False)),
        **dict(module.named_buffers(recurse=False, remove_duplicate=False)),
    }


class FakeDevice:
    """A device whose tensors have no memory, so that any model fits.

    Args:
        kernels: kernels of the estimated device; None for a CPU.
    """

    def __init__(self, kernels: CudaKernels | None = None) -> None:
        self.mode = private.FakeTensorMode()
        self.kernels = kernels
        self._counter: LoggingTracker | None = None
        # Storages of a batch that the step itself copies to the device.
        self.not_moved: WeakSet[torch.UntypedStorage] = WeakSet()
        self._streams: dict[object, int] = {torch.cpu.current_stream(): 0}
        # Tensors of the model in order of creation; empty if a script moves them.
        self.made: list[torch.Tensor] = []
        # Logs of earlier allocations that fill buffers.
        self.filling: list[Phase] = []
        self._filled_models: list[nn.Module] = []
        # Share by which the real peak may exceed the counted one.
        self.margin = 0.0

    def move(self, model: nn.Module, *, fill: Callable[[], object] | None = None) -> None:
        """Make the parameters and buffers of a model fake, in place; real ones are freed.

        Args:
            model: model, on the meta device or real.
            fill: function that creates real buffers of the model, as loading does.
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
        """Yield the names and buffers that :attr:`filling` has allocated."""
        models = self._filled_models
        for number, buffer in enumerate(chain.from_iterable(model.buffers() for model in models)):
            yield ("filled", number), buffer

    def batch(self, batch: dict[str, Any], *, is_on_device: bool = True) -> None:
        """Make the tensors of a batch fake, in place, and count them.

        Args:
            batch: tensors by name.
            is_on_device: whether the whole batch is on the device. If False, tensors on the CPU
                count once the step copies them, inside :class:`DevicesAsHost`.
        """

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            result = tensor
            if not isinstance(tensor, private.FakeTensor):
                # The counter must not count this creation.
                with private.disable_current_modes():
                    result = self._on_host_device(tensor)
            storage = result.untyped_storage()
            if not is_on_device and tensor.device.type == "cpu":
                self.not_moved.add(storage)
            elif self._counter:
                self._counter._see(storage)
            return result

        batch.update(private.tree_map_only(torch.Tensor, fake, dict(batch)))

    def prepare_optimizer(self, optimizer: Optimizer) -> tuple[str, ...]:
        """Prepare an optimizer to step on fake tensors as on the device.

        Returns:
            Uncounted memory, one sentence each.
        """
        modules = [kind.__module__ for kind in type(optimizer).__mro__]
        is_torchaos = any(module.startswith("torchao.") for module in modules)
        if is_torchaos:
            # Create the cached tables, whose creation reads values.
            for states in ("subclass_4bit", "subclass_8bit"):
                tables = import_module(f"torchao.optim.{states}")
                tables.get_qmap_signed()
                tables.get_qmap_unsigned()
        if self.kernels is None:
            return ()
        # PyTorch's optimizers choose foreach on CUDA, except Adafactor (in `_adafactor`).
        if any(re.match(r"torch\.optim\.(?!optimizer)[a-z]", module) for module in modules):
            for group in optimizer.param_groups:
                is_free = group.get("foreach", False) is None and group.get("fused") is None
                if is_free and not group.get("differentiable"):
                    group["foreach"] = True
        if not is_torchaos:
            return ()
        step = optimizer.step

        def uncounted(*args: Any, **kwargs: Any) -> Any:
            # Not counted: the step keeps no memory and has many slow operations per weight.
            compiled_parts = replaced(torch, compile=lambda *_, **__: lambda *_, **__: None)
            with private.disable_current_modes(), self.mode, compiled_parts:
                result = step(*args, **kwargs)
            if self._counter:
                self._counter.add(optimizer_state_tensors([optimizer]))
            return result

        optimizer.step = uncounted  # type: ignore[method-assign]
        return ("torchao: its step is compiled on a device; only its states are counted",)

    def copying(self) -> TorchFunctionMode:
        """Return a context manager in which deep copies of real tensors are fake."""
        return _FakeCopies(self._on_host_device)

    def _on_host_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake copy of a tensor on the CPU, where all fake tensors are."""
        # A wrapper, such as a DTensor or a 4-bit weight, then wraps fake tensors.
        if hasattr(tensor, "__tensor_flatten__"):
            names, context = tensor.__tensor_flatten__()
            inner = {name: getattr(tensor, name) for name in names}
            for name, part in inner.items():
                # A DTensor also has its mesh as an inner attribute.
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
        """Make new tensors fake and count them in this context."""
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
                # A step creates many objects, which would trigger garbage collection repeatedly.
                if gc.isenabled():
                    gc.disable()
                    contexts.callback(gc.enable)
                # Compiled regions fail under a dispatch mode and hide their tensors from it.
                contexts.enter_context(torch.compiler.set_stance("force_eager"))
                contexts.enter_context(hide_shape_propagation())
                contexts.enter_context(self.mode)
                contexts.enter_context(counter)
                if kernels:
                    contexts.enter_context(kernels.in_place())
                yield counter
        finally:
            self._counter = None

    def counted(self) -> AbstractContextManager[object]:
        """Return a context manager that counts even while Dynamo disables modes."""
        return self._counter or nullcontext()


class FakeStep:
    """Runs a training step on fake tensors and traces its memory.

    Args:
        model: model on the fake device.
        optimizer, forward_backward, step, accumulates, sharding, keep_gradients: arguments of
            :class:`adaptive_batch.probe.DryRun`.
        device: the fake device.
        more_states: function that returns tensors of the optimizer besides its state.

    Attributes:
        accumulates: whether gradients of earlier micro-batches exist before a forward.
        optimizer_peak_bytes: peak of clipping and the optimizer's step; None with the optimizer in
            backward.
        resident: resident bytes before a forward.
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
        self._optimizers = optimizer_list(optimizer)
        self._more_states = more_states
        self.forward_backward = forward_backward
        self.accumulates = accumulates
        self._device = device
        self._sharding = sharding or Sharding(model)
        self._keep_gradients = keep_gradients if accumulates else None
        model.train()
        self.optimizer_peak_bytes: int | None = None
        self._phases: dict[tuple[Run, bool], dict[int, Phase]] = {}
        # Steps of the optimizer: the first one, which creates its state, and any later one.
        self._steps: list[Phase] = []
        self._run_first_steps(step)
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

    def _run_first_steps(self, step: Callable[[], object]) -> None:
        """Run two steps: the first creates the optimizer's state, the second stands for all later
        ones.
        """
        if self._in_backward and not self._sharding.is_sharded:
            # Backward runs the optimizer, so the first micro-batch creates its state.
            self._at(FEW, self.forward_backward, is_first=True)
            return
        for _ in range(2):
            if self._sharding.is_sharded:
                # FSDP initializes itself in the first run; gradients are its reduced ones.
                with torch.compiler.set_stance("force_eager"), self._device.mode:
                    self.forward_backward(FEW)
            else:
                self._give_gradients()
            if not self._in_backward:
                self._trace_step(step)

    def _trace_step(self, step: Callable[[], object]) -> None:
        """Run the optimizer's step and record its log."""
        with self._device.counting() as counter:
            counter.add_named(self._named())
            step()
            if self.optimizer_peak_bytes is None:
                self.optimizer_peak_bytes = counter.peak_bytes
            for optimizer in self._optimizers:
                optimizer.zero_grad(set_to_none=True)
            self._steps.append(counter.phase(self._named()))

    def trace(self, rows: int, *, forward_backward: Run | None = None) -> Trace:
        """Trace forward and backward of one micro-batch.

        Args:
            rows: rows of the micro-batch.
            forward_backward: replacement of the constructor's function, for rows of another length.
        """
        run = forward_backward or self.forward_backward
        phase, trace = self._traced(rows, run)
        self._phases.setdefault((run, False), {})[rows] = phase
        return trace

    def is_traced(self, rows: int, *, forward_backward: Run | None = None) -> bool:
        """Return whether a micro-batch of this size has been traced."""
        return rows in self._phases.get((forward_backward or self.forward_backward, False), {})

    def log(
        self,
        rows: int,
        *,
        forward_backward: Run | None = None,
        num_steps: int = 4,
        micro_batches: int = 2,
    ) -> array[int]:
        """Return the log of loading and the first steps (:mod:`.allocator`).

        The log is exact for one row and for traced sizes. Other sizes are interpolated between two
        traces.

        Args:
            rows: rows of each micro-batch.
            forward_backward: replacement of the constructor's function, for rows of another length.
            num_steps: steps of the log. The first one creates the optimizer's state; from the third
                on, all steps are equal.
            micro_batches: micro-batches of a step that accumulates. All but the first are equal.
        """
        run = forward_backward or self.forward_backward
        phase = self._at(rows, run)
        # (phase, whether training runs it for the first time)
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
            # Empty if the optimizer runs in backward.
            if self._steps:
                phases.append((self._steps[min(number, len(self._steps) - 1)], False))
        return join_phases(phases)

    def composition(self, rows: int, forward_backward: Run) -> dict[str, int]:
        """Return the bytes by kind at the peak of a micro-batch."""
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
        """Share by which the peak of a step can exceed the counted one."""
        return self._device.margin

    @property
    def loading(self) -> Phase:
        """Log of loading the model."""
        with self._device.counting() as counter:
            counter.add_named(self._device.filled())
            counter.add(self._device.made)
            counter.add(tensor for _, tensor in _named(self.model))
            return counter.phase(_named(self.model))

    def _at(self, rows: int, run: Run, *, is_first: bool = False) -> Phase:
        """Return the log of a micro-batch, or of the first one of training."""
        phases = self._phases.setdefault((run, is_first), {})
        if rows in phases:
            return phases[rows]
        # A single row often runs other operations, so it is always traced.
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
        """Run one micro-batch and return its log and trace.

        Args:
            rows: rows of the micro-batch.
            run: forward and backward of a number of rows.
            is_first: whether it creates the gradients, or the state of an optimizer in backward.
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
    """Redirects moves to devices to the CPU, where fake tensors are.

    Args:
        device: fake device; tensors that were not on it are copied.
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
            # A tensor as an argument specifies its device too.
            names_device |= any(isinstance(arg, torch.device | torch.Tensor) for arg in args[1:])
        result = func(*args, **kwargs)
        names_device |= func is torch.Tensor.type_as
        if names_device and isinstance(result, torch.Tensor):
            return self._moved(result)
        return result

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor that was not on the device, or the tensor itself."""
        if tensor.untyped_storage() in self._device.not_moved:
            return tensor.clone()
        return tensor


def _host_in_place_of(value: Any) -> Any:
    """Return the CPU for a device, and any other value unchanged."""
    if isinstance(value, str | torch.device) or type(value) is int:
        return torch.device("cpu")
    return value


class _FakeCopies(TorchFunctionMode):
    """Makes deep copies of real tensors fake.

    Args:
        fake: function that returns a fake copy of a tensor.
    """

    def __init__(self, fake: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._fake = fake

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Parameters clone their data.
        if func in (torch.Tensor.__deepcopy__, torch.Tensor.clone):
            return self._fake(args[0])
        return func(*args, **(kwargs or {}))
