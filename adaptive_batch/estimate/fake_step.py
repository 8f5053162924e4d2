"""A training step on fake tensors, which have shapes but no memory."""

from __future__ import annotations

import gc
import re
import sys
import traceback
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import replaced
from adaptive_batch.distributed import Sharding, hide_shape_propagation
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import (
    OptimizerInBackward,
    Trace,
    optimizer_list,
    optimizer_state_tensors,
    storage_bytes,
)

from .allocator import LoggingTracker, Phase, join_phases
from .cuda_operators import CudaKernels, workspace_bytes

private = PrivateNames("memory estimates")


@contextmanager
def explained_missing_values(name_of: Callable[[str], str]) -> Iterator[None]:
    """Context manager: raise a SettingError for code that reads values of fake tensors.

    Args:
        name_of: function that returns the name of the "model" or the "optimizer" for the error.
    """
    try:
        yield
    except Exception as error:
        remedy = _remedy_for_missing_values(error)
        if remedy is None:
            raise
        frames = traceback.walk_tb(error.__traceback__)
        is_in_optimizer = any(
            isinstance(frame.f_locals.get("self"), Optimizer) for frame, _ in frames
        )
        key = "optimizer" if is_in_optimizer else "model"
        raise SettingError(key, name_of(key), remedy) from error


def _remedy_for_missing_values(error: Exception) -> str | None:
    """Return a remedy if an error means that code reads values of fake tensors; else None."""
    # The module of FakeTensor defines all exceptions of fake tensors.
    is_of_fake_tensors = type(error).__module__ == private.FakeTensor.__module__
    names_fake_tensors = isinstance(error, AssertionError | RuntimeError) and re.search(
        "FakeTensor|not supported for tensor subclasses", str(error)
    )
    if not (is_of_fake_tensors or names_fake_tensors):
        return None
    operation = getattr(error, "func", None) or str(error).partition("\n")[0]
    reason = f"{operation} ({type(error).__name__}) needs values"
    return f"it cannot run on fake tensors: {reason}; probe it on a device"


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
        self._streams: dict[object, int] = {torch.cpu.current_stream(): 0}
        # Models whose buffers are filled before loading, and the logs of that.
        self._filled_models: list[nn.Module] = []
        self.filling_phases: list[Phase] = []
        # cuBLAS keeps a workspace for the thread of forward, and one for that of backward.
        self.workspace_bytes = 0 if kernels is None else workspace_bytes(kernels.capability)
        # Share by which the real peak may exceed the counted one.
        self.margin = 0.0

    def move(self, model: nn.Module, *, fill: Callable[[], object] | None = None) -> None:
        """Make the parameters and buffers of a model fake, in place; real ones are freed.

        Args:
            model: model, on the meta device or real.
            fill: function that creates real buffers of the model, as loading does.
        """
        # Loading fills buffers before it creates the other tensors, so log that first.
        if fill is not None:
            self._filled_models.append(model)
            counter = LoggingTracker()
            with counter:
                fill()
            self.filling_phases.append(counter.phase(self.filled_buffers()))
        # Modules that share a tensor share its fake one, so tied weights stay tied.
        fakes: dict[torch.Tensor, torch.Tensor] = {}
        for module in model.modules():
            for name, tensor in own_tensors(module).items():
                if tensor not in fakes:
                    fakes[tensor] = self._make_fake(tensor)
                    if isinstance(tensor, nn.Parameter):
                        fakes[tensor] = nn.Parameter(fakes[tensor], tensor.requires_grad)
                setattr(module, name, fakes[tensor])

    def filled_buffers(self) -> Iterator[tuple[tuple[str, int], torch.Tensor]]:
        """Yield the names and buffers that :attr:`filling_phases` have allocated."""
        buffers = chain.from_iterable(model.buffers() for model in self._filled_models)
        for number, buffer in enumerate(buffers):
            yield ("filled", number), buffer

    def move_batch(self, batch: dict[str, Any]) -> None:
        """Make the tensors of a batch fake, in place, and count them as on the device."""

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            result = tensor
            if not isinstance(tensor, private.FakeTensor):
                # The counter must not log temporary tensors of this conversion.
                with private.disable_current_modes():
                    result = self._make_fake(tensor)
            if self._counter:
                self._counter.count_storage(result.untyped_storage())
            return result

        batch.update(private.tree_map_only(torch.Tensor, fake, dict(batch)))

    def prepare_optimizer(self, optimizer: Optimizer) -> tuple[str, ...]:
        """Prepare an optimizer to step on fake tensors as on the device.

        Returns:
            Uncounted memory, one sentence each.
        """
        modules = [kind.__module__ for kind in type(optimizer).__mro__]
        is_of_torchao = any(module.startswith("torchao.") for module in modules)
        if is_of_torchao:
            _create_tables_of_torchao()
        # The rest differs only on CUDA.
        if self.kernels is None:
            return ()
        # On CUDA, PyTorch's optimizers choose foreach, except Adafactor, whose module is private.
        # The module `optimizer` has the base class of all optimizers.
        prefix = "torch.optim."
        names = [name.removeprefix(prefix) for name in modules if name.startswith(prefix)]
        if any(name != "optimizer" and not name.startswith("_") for name in names):
            for group in optimizer.param_groups:
                is_default = group.get("foreach", False) is None and group.get("fused") is None
                if is_default and not group.get("differentiable"):
                    group["foreach"] = True
        if not is_of_torchao:
            return ()
        self._count_only_states(optimizer)
        return ("torchao: its step is compiled on a device; only its states are counted",)

    def _count_only_states(self, optimizer: Optimizer) -> None:
        """Replace an optimizer's step, which has many slow operations and keeps no other memory."""
        step = optimizer.step

        def step_uncounted(*args: Any, **kwargs: Any) -> Any:
            # The functions that the step compiles, which update the weights, do nothing.
            no_compiled_parts = replaced(torch, compile=lambda *_, **__: lambda *_, **__: None)
            with private.disable_current_modes(), self.mode, no_compiled_parts:
                result = step(*args, **kwargs)
            if self._counter:
                self._counter.add(optimizer_state_tensors([optimizer]))
            return result

        optimizer.step = step_uncounted  # type: ignore[method-assign]

    def copying(self) -> TorchFunctionMode:
        """Return a context manager in which deep copies of real tensors are fake."""
        return _FakeCopies(self._make_fake)

    def _make_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake copy of a tensor on the CPU, where all fake tensors are."""
        if hasattr(tensor, "__tensor_flatten__"):
            return self._make_fake_wrapper(tensor)
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
        # from_tensor() would keep the device of these tensors.
        if tensor.is_meta or (is_plain and tensor.device.type != "cpu"):
            with self.mode:
                return torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                )
        converted: torch.Tensor = self.mode.from_tensor(tensor, static_shapes=True)
        return converted

    def _make_fake_wrapper(self, tensor: Any) -> torch.Tensor:
        """Return a wrapper, such as a DTensor or a 4-bit weight, of fake tensors."""
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        for name, part in inner.items():
            # A DTensor also has its mesh as an inner attribute.
            if isinstance(part, torch.Tensor):
                inner[name] = self._make_fake(part)
        wrapper: torch.Tensor = type(tensor).__tensor_unflatten__(
            inner, context, tensor.shape, tensor.stride()
        )
        return wrapper

    @contextmanager
    def counting(self) -> Iterator[LoggingTracker]:
        """Make new tensors fake and count them in this context."""
        kernels = self.kernels
        counter = LoggingTracker(
            replacements=kernels.operators() if kernels else {},
            workspace_bytes=self.workspace_bytes,
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
                    contexts.enter_context(_masks_of_transformers(kernels, counter))
                yield counter
        finally:
            self._counter = None

    def active_counter(self) -> AbstractContextManager[object]:
        """Return the counter of :meth:`counting`, to be entered again where modes are disabled."""
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
        # Traced phases by rows, for each function; True: as the first micro-batch.
        self._phases: dict[tuple[Run, bool], dict[int, Phase]] = {}
        # The optimizer's first step, which creates its state, and its second one, which is like all
        # later ones; empty if the optimizer runs in backward.
        self._optimizer_phases: list[Phase] = []
        self._run_first_steps(step)
        self._prepare_gradients()
        gradients = [
            tensor
            for (kind, _), tensor in self._named_tensors()
            if kind in ("gradient", "kept gradient")
        ]
        self.resident = Resident(
            storage_bytes(model.parameters()),
            storage_bytes(model.buffers()),
            storage_bytes(self._states()),
            storage_bytes(gradients),
        )

    def _run_first_steps(self, step: Callable[[], object]) -> None:
        """Create the optimizer's state. Log its first two steps, unless it runs in backward."""
        if self._in_backward and not self._sharding.is_sharded:
            # Backward runs the optimizer, so tracing the first micro-batch creates its state.
            self.trace(FEW, self.forward_backward, is_first=True)
            return
        for _ in range(2):
            if self._sharding.is_sharded:
                # FSDP initializes itself in the first run, and reduces the gradients.
                with torch.compiler.set_stance("force_eager"), self._device.mode:
                    self.forward_backward(FEW)
            else:
                self._give_gradients()
            if not self._in_backward:
                self._trace_optimizer_step(step)

    def _trace_optimizer_step(self, step: Callable[[], object]) -> None:
        """Run the optimizer's step and record its log."""
        with self._device.counting() as counter:
            counter.add_named(self._named_tensors())
            step()
            if self.optimizer_peak_bytes is None:
                self.optimizer_peak_bytes = counter.peak_bytes
            for optimizer in self._optimizers:
                optimizer.zero_grad(set_to_none=True)
            self._optimizer_phases.append(counter.phase(self._named_tensors()))

    def trace(self, rows: int, run: Run, *, is_first: bool = False) -> Trace:
        """Trace forward and backward of one micro-batch, and keep its log.

        Args:
            rows: rows of the micro-batch.
            run: the constructor's function, or one for rows of another length.
            is_first: whether it creates the gradients, or the state of an optimizer in backward.
        """
        if is_first:
            self.model.zero_grad()
            if self._in_backward:
                for optimizer in self._optimizers:
                    optimizer.state.clear()
        else:
            self._prepare_gradients()
        with self._device.counting() as counter:
            counter.add_named(self._named_tensors())
            run(rows)
            phases = self._phases.setdefault((run, is_first), {})
            phases[rows] = counter.phase(self._named_tensors())
            return counter.trace()

    def is_traced(self, rows: int, run: Run) -> bool:
        """Return whether a micro-batch of this size has been traced."""
        return rows in self._phases.get((run, False), {})

    def log(self, rows: int, run: Run, *, num_steps: int = 4, micro_batches: int = 2) -> array[int]:
        """Return the log of loading and the first steps (:mod:`.allocator`).

        The log is exact for one row and for traced sizes. Other sizes are interpolated between two
        traces.

        Args:
            rows: rows of each micro-batch.
            run: the constructor's function, or one for rows of another length.
            num_steps: steps of the log. The first one creates the optimizer's state; from the third
                on, all steps are equal.
            micro_batches: micro-batches of a step that accumulates. All but the first are equal.
        """
        micro_batch = self._micro_batch_phase(rows, run)
        phases = [*self._device.filling_phases, self._loading_phase()]
        first_micro_batch = len(phases)
        for number in range(num_steps):
            is_first_step = number == 0
            # The first micro-batch of each step creates the gradients, or that of training creates
            # the state of an optimizer in backward.
            if self.accumulates or (self._in_backward and is_first_step):
                phases.append(self._micro_batch_phase(rows, run, is_first=True))
            else:
                phases.append(micro_batch)
            if self.accumulates:
                phases += [micro_batch] * (micro_batches - 1)
            if self._optimizer_phases:
                first_step, later_step = self._optimizer_phases
                phases.append(first_step if is_first_step else later_step)
        return join_phases(phases, first_micro_batch, self._device.workspace_bytes)

    def composition(self, rows: int, run: Run) -> dict[str, int]:
        """Return the bytes by kind at the peak of a micro-batch."""
        num_bytes = self._micro_batch_phase(rows, run).bytes_at_peak()
        resident = self.resident
        return {
            "parameters": resident.parameters,
            "buffers": resident.buffers,
            "optimizer state": resident.optimizer,
            "gradients": resident.gradients + num_bytes["gradients"],
            "activations": num_bytes["activations"],
            "backward temporaries": num_bytes["backward temporaries"]
            + 2 * self._device.workspace_bytes,
        }

    @property
    def margin(self) -> float:
        """Share by which the peak of a step can exceed the counted one."""
        return self._device.margin

    def _loading_phase(self) -> Phase:
        """Return the log of loading the model."""
        with self._device.counting() as counter:
            counter.add_named(self._device.filled_buffers())
            counter.add(tensor for _, tensor in _named_model_tensors(self.model))
            return counter.phase(_named_model_tensors(self.model))

    def _micro_batch_phase(self, rows: int, run: Run, *, is_first: bool = False) -> Phase:
        """Return the log of a micro-batch: a trace, or an interpolation between two traces.

        Args:
            rows: rows of the micro-batch.
            run: forward and backward of a number of rows.
            is_first: whether it creates the gradients, or the state of an optimizer in backward.
        """
        phases = self._phases.setdefault((run, is_first), {})
        if rows in phases:
            return phases[rows]
        # A single row often runs other operations, so it is always traced.
        if rows >= FEW:
            for size in (FEW, MORE):
                if len(phases) < 2 and size not in phases:
                    self.trace(size, run, is_first=is_first)
            nearest_sizes = sorted(phases, key=lambda size: abs(size - rows))
            for near, far in pairwise(nearest_sizes):
                if phases[near].differs_only_in_sizes(phases[far]):
                    share = Fraction(rows - near, far - near)
                    return phases[near].interpolate(phases[far], share)
        # A single row, or sizes that run different operations.
        self.trace(rows, run, is_first=is_first)
        return phases[rows]

    def _named_tensors(self) -> Iterator[tuple[tuple[str, int], torch.Tensor]]:
        """Yield the names and tensors that training holds between two micro-batches."""
        yield from _named_model_tensors(self.model)
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

    def _prepare_gradients(self) -> None:
        """Set the gradients to those before a micro-batch that is not the first one."""
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


@contextmanager
def _masks_of_transformers(kernels: CudaKernels, counter: LoggingTracker) -> Iterator[None]:
    """Context manager: decide about attention masks of transformers without their values.

    On a device, transformers drops a mask that hides nothing. For fake tensors, it keeps all
    masks. In this context it drops the mask of positions that count up.
    Where flash attention is missing (float32, or before Ampere), attention with fewer key heads
    is chosen as if no mask were given, since that needs more memory.
    """
    try:
        masks = sys.modules["transformers.masking_utils"]
        attention: Any = sys.modules["transformers.integrations.sdpa_attention"]
        find_packed, use_gqa = masks.find_packed_sequence_indices, attention.use_gqa_in_sdpa
    except (KeyError, AttributeError):
        # Without transformers, or with a version before these functions.
        yield
        return

    def find(position_ids: torch.Tensor) -> Any:
        counts_up = position_ids.untyped_storage() in counter.ranges
        with private.disable_current_modes():
            drops_mask = find_packed(torch.arange(2, device="cpu")[None]) is None
        return None if drops_mask and counts_up else find_packed(position_ids)

    def use(mask: Any, key: torch.Tensor, *value: Any) -> Any:
        # Flash attention supports fewer key heads.
        has_flash = key.element_size() == 2 and kernels.capability >= (8, 0)
        return use_gqa(mask if has_flash else None, key, *value)

    # In compiled parts, transformers keeps the masks on a device too.
    with (
        replaced(masks, find_packed_sequence_indices=_eagerly(find, find_packed)),
        replaced(attention, use_gqa_in_sdpa=_eagerly(use, use_gqa)),
    ):
        yield


def _eagerly(fake: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `real` in compiled parts and `fake` elsewhere."""
    return lambda *args: (real if torch.compiler.is_compiling() else fake)(*args)


def _create_tables_of_torchao() -> None:
    """Create the cached tables of low-bit states; creating them on fake tensors would fail."""
    for states in ("subclass_4bit", "subclass_8bit"):
        tables = import_module(f"torchao.optim.{states}")
        tables.get_qmap_signed()
        tables.get_qmap_unsigned()


def _named_model_tensors(model: nn.Module) -> Iterator[tuple[tuple[str, int], torch.Tensor]]:
    for number, tensor in enumerate((*model.parameters(), *model.buffers())):
        yield ("model", number), tensor


class DevicesAsHost(TorchFunctionMode):
    """Redirects moves to devices to the CPU, where fake tensors are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _host_in_place_of(kwargs["device"])
        if func is torch.Tensor.to:
            args = tuple(map(_host_in_place_of, args))
        return func(*args, **kwargs)


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
        # deepcopy() of a parameter clones its data.
        if func in (torch.Tensor.__deepcopy__, torch.Tensor.clone):
            return self._fake(args[0])
        return func(*args, **(kwargs or {}))
