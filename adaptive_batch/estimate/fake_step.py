"""A training step on fake tensors, which have shapes and no memory: the memory it would need on a
device that is not here.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, pairwise
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from adaptive_batch._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    disable_current_modes,
    num_torch_function_modes,
    private,
    tree_map_only,
)
from adaptive_batch.distributed import Sharding, shapes_worked_out_apart
from adaptive_batch.memory import OptimizerInBackward, optimizer_state_tensors, storage_bytes

from .cuda_operators import CudaOperators
from .cuda_workspace import CudaKernels
from .step_log import Phase, joined
from .tracker import AttributedTracker, ModuleNames, StepTrace

clip_grad: Any = private("torch.nn.utils.clip_grad", "_has_foreach_support")

_NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


def needs_values(error: Exception) -> str | None:
    """Return what to tell a user whose code has read values of fake tensors, with the operation;
    None of another error.
    """
    names_it = re.search("FakeTensor|not supported for tensor subclasses", str(error))
    if not isinstance(error, _NEEDS_VALUES) and not (
        names_it and isinstance(error, AssertionError | RuntimeError)
    ):
        return None
    operation = getattr(error, "func", None) or str(error).partition("\n")[0]
    why = f"{operation} ({type(error).__name__}) needs values, and there are none"
    return f"it cannot run on fake tensors: {why}; probe it on a device"


Run = Callable[[int], object]  # forward and backward of that many rows
FEW, MORE = 2, 3  # rows of the steps that give a curve; one row alone often runs other operations


@dataclass(frozen=True)
class Resident:
    """Bytes that are resident before a forward begins: of the model, the optimizer's state, earlier
    micro-batches' gradients.
    """

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
    """

    def __init__(self, kernels: CudaKernels | None = None) -> None:
        self.mode = FakeTensorMode()
        self._kernels = kernels
        self._counter: AttributedTracker | None = None
        self._on_host: WeakSet[torch.UntypedStorage] = WeakSet()
        self._streams: dict[object, int] = {torch.cpu.current_stream(): 0}
        self.loaded: Phase | None = None

    def build(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Return a model with fake parameters and buffers, made in the order of `build`, which
        makes it on the meta device.
        """
        with self.counting() as counter, _OffMeta(), _FromTensors(), _swapping(self.mode):  # type: ignore[no-untyped-call]
            model = build()
            self.loaded = counter.phase(_named(model=model))
        return model

    def move(self, model: nn.Module) -> None:
        """Make the parameters and buffers of a model fake, in place; they are on the meta device,
        or real and then freed.
        """

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_meta:
                return torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                )
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
        fake = (
            tensor
            if isinstance(tensor, FakeTensor)
            else self.mode.from_tensor(tensor, static_shapes=True)
        )
        if self._counter:
            self._counter._see(fake.untyped_storage())
        return fake

    @contextmanager
    def counting(
        self, *, explain: Collection[int] = (), names: ModuleNames | None = None
    ) -> Iterator[AttributedTracker]:
        """Context manager: new tensors are fake, and counted."""
        kernels = self._kernels
        self._counter = counter = AttributedTracker(
            operators=(
                CudaOperators(kernels.capability, kernels.multiprocessors) if kernels else None
            ),
            on_host=self._on_host,
            streams=self._streams,
            explain=explain,
            names=names,
        )
        if kernels:
            kernels.costs = counter.costs
        try:
            # A compiled region fails under a dispatch mode, and would hide its tensors from it.
            with (
                torch.compiler.set_stance("force_eager"),
                shapes_worked_out_apart(),
                self.mode,
                counter,
                _in_recomputing(kernels) if kernels else nullcontext(),
                _clipping_together() if kernels else nullcontext(),
                names.following() if names else nullcontext(),
            ):
                yield counter
        finally:
            self._counter = None

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Context manager: count only what is still alive at the end, for code that is compiled on
        a real device.
        """
        with self._counter.pause() if self._counter else nullcontext():
            yield


@dataclass(frozen=True)
class Between:
    """Forward and backward of rows whose length lies at a share of the way from that of `short`,
    which are traced, to that of `long`.
    """

    short: Run
    long: Run
    share: Fraction


class FakeStep:
    """Runs the code of a training step on fake tensors, at any number of rows, and traces the
    memory it would need.

    Args:
        model: on the device.
        optimizer, forward_backward, step, accumulates, sharding, keep_gradients: as in
            :class:`adaptive_batch.probe.DryRun`.

    Attributes:
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
    ) -> None:
        self.model = model
        self._in_backward = isinstance(optimizer, OptimizerInBackward)
        self._optimizers = (
            [*optimizer.optimizers.values()]
            if isinstance(optimizer, OptimizerInBackward)
            else [optimizer]
        )
        self.forward_backward = forward_backward
        self._accumulates = accumulates
        self._device = device
        self._sharding = sharding or Sharding(model)
        self._keep_gradients = keep_gradients if accumulates else None
        model.train()
        self.optimizer_peak_bytes: int | None = None
        self._phases: dict[tuple[Run, bool], dict[int, Phase]] = {}
        self._steps: list[Phase] = []  # the optimizer's: the first, and any later one
        if self._in_backward and not self._sharding.is_sharded:  # it makes the states
            self._at(FEW, forward_backward, is_first=True)
        for _ in range(2):
            if (
                self._sharding.is_sharded
            ):  # FSDP sets itself up in the first; gradients share what it has reduced
                with torch.compiler.set_stance("force_eager"), device.mode:
                    forward_backward(FEW)
            elif not self._in_backward:
                self._give_gradients()
            if not self._in_backward:
                with device.counting() as counter:
                    counter.add_named(self._named())
                    step()
                    self.optimizer_peak_bytes = self.optimizer_peak_bytes or counter.peak_bytes
                    for one in self._optimizers:
                        one.zero_grad(set_to_none=True)
                    self._steps.append(counter.phase(self._named()))
        self._prepare()
        self.resident = Resident(
            storage_bytes(model.parameters()),
            storage_bytes(model.buffers()),
            storage_bytes(optimizer_state_tensors(self._optimizers)),
            storage_bytes(
                one for (kind, _), one in self._named() if kind in ("gradient", "kept gradient")
            ),
        )

    def trace(
        self, rows: int, *, forward_backward: Run | None = None, explain: Collection[int] = ()
    ) -> StepTrace:
        """Return what forward and backward of one micro-batch of that many rows hold.

        Args:
            forward_backward: instead of the constructor's, for rows of another length.
            explain: operations at which all live bytes are attributed to modules.
        """
        self._prepare()
        run = forward_backward or self.forward_backward
        with self._device.counting(
            explain=explain, names=ModuleNames(self.model) if explain else None
        ) as counter:
            counter.add_named(self._named())
            run(rows)
            self._phases.setdefault((run, False), {})[rows] = counter.phase(self._named())
            return counter.step_trace(self.model)

    def log(
        self, rows: int, of_steps: Sequence[Run | Between], *, micro_batches: int = 2
    ) -> array[int]:
        """Return what the device is asked for in loading and in steps of so many rows at once (see
        :mod:`.step_log`).

        It is exact at numbers of rows that were traced, and lies on a straight line between two of
        them elsewhere.

        Args:
            of_steps: forward and backward of each step.
            micro_batches: of a step where steps accumulate; the second is as any later one.
        """
        phases = [(self._device.loaded or self._resident_phase(), True)]
        for number, run in enumerate(of_steps):
            phase = self._at(rows, run)
            if self._accumulates or (self._in_backward and not number):
                few = self._at(FEW, run, is_first=True).sized(self._at(FEW, run), phase)
                first = few or self._at(rows, run, is_first=True)
                phases.append((first, not number))
            further = (
                micro_batches - 1
                if self._accumulates
                else int(bool(number) or not self._in_backward)
            )
            phases += [(phase, not number and not self._accumulates)] * further
            phases += [(one, False) for one in self._steps[min(number, 1) : min(number, 1) + 1]]
        return joined(phases)

    def _at(self, rows: int, run: Run | Between, *, is_first: bool = False) -> Phase:
        """A micro-batch: any, or training's first, which makes the gradients, or the states where
        the optimizer is in backward.
        """
        if isinstance(run, Between):
            short, long = (self._at(rows, one, is_first=is_first) for one in (run.short, run.long))
            return short.between(long, run.share) if short.is_like(long) else long
        known = self._phases.setdefault((run, is_first), {})
        if rows in known:
            return known[rows]
        if is_first:
            for parameter in self.model.parameters():
                parameter.grad = None
            for optimizer in self._optimizers if self._in_backward else ():
                optimizer.state.clear()
            with self._device.counting() as counter:
                counter.add_named(self._named())
                run(rows)
                known[rows] = counter.phase(self._named())
            return known[rows]
        near = sorted(known, key=lambda other: abs(other - rows))
        for one, two in pairwise(near):
            if known[one].is_like(known[two]):
                return known[one].between(known[two], Fraction(rows - one, two - one))
        self.trace(rows, forward_backward=run)
        return known[rows]

    def learn(self, rows: int, of_steps: Sequence[Run | Between]) -> bool:
        """Trace what steps of so many rows run, so that their log is exact; return whether anything
        was not traced before.
        """
        both = ((one.short, one.long) if isinstance(one, Between) else (one,) for one in of_steps)
        new = [
            run
            for run in dict.fromkeys(chain(*both))
            if rows not in self._phases.get((run, False), {})
        ]
        for run in new:
            self.trace(rows, forward_backward=run)
        return bool(new)

    def _resident_phase(self) -> Phase:
        with self._device.counting() as counter:
            counter.add(tensor for _, tensor in _named(model=self.model))
            return counter.phase(_named(model=self.model))

    def _named(self) -> Iterator[tuple[tuple[str, int], torch.Tensor]]:
        yield from _named(model=self.model)
        for number, parameter in enumerate(self.model.parameters()):
            if parameter.grad is not None:
                yield ("gradient", number), parameter.grad
        for number, tensor in enumerate(self._sharding.kept_gradients()):
            yield ("kept gradient", number), tensor
        for number, tensor in enumerate(optimizer_state_tensors(self._optimizers)):
            yield ("state", number), tensor

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


def _named(*, model: nn.Module) -> Iterator[tuple[tuple[str, int], torch.Tensor]]:
    for number, tensor in enumerate((*model.parameters(), *model.buffers())):
        yield ("model", number), tensor


class _OffMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is made on the meta device is made on a fake one, where a value is 1 to who reads it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        kwargs = kwargs or {}
        if getattr(kwargs.get("device"), "type", "") == "meta":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)


class _FromTensors(TorchFunctionMode):
    """Tensors are also made of lists of fake ones, on the host, and then copied."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.tensor:
            return func(*args, **(kwargs or {}))
        return func(*tree_map_only(torch.Tensor, torch.Tensor.item, args), **(kwargs or {})).clone()


@contextmanager
def _swapping(mode: FakeTensorMode) -> Iterator[None]:
    """Inside, fake tensors can be swapped, as a linear layer does that quantizes its weight; the
    mode's memory of them forbids it.
    """
    swap = torch.utils.swap_tensors
    made = private(mode.fake_tensor_converter.meta_converter, "tensor_memo")

    def swap_unremembered(one: torch.Tensor, other: torch.Tensor) -> None:
        made.tensor_memo.clear()
        swap(one, other)  # type: ignore[no-untyped-call]

    torch.utils.swap_tensors = swap_unremembered
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap


@contextmanager
def _clipping_together() -> Iterator[None]:
    """Inside, gradients are clipped by operators for many tensors, as they are on CUDA."""
    supported = clip_grad._has_foreach_support
    clip_grad._has_foreach_support = lambda tensors, device: True
    try:
        yield
    finally:
        clip_grad._has_foreach_support = supported


@contextmanager
def _in_recomputing(mode: TorchFunctionMode) -> Iterator[None]:
    """Inside, a mode is on; also where backward runs a module again, for which PyTorch has switched
    it off.
    """
    entered: list[nn.Module] = []

    def enter(module: nn.Module, _: object) -> None:
        if not num_torch_function_modes():
            mode.__enter__()  # type: ignore[no-untyped-call]
            entered.append(module)

    def leave(module: nn.Module, *_: object) -> None:
        if entered and entered[-1] is module:
            entered.pop()
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    handles = (
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    )
    try:
        with mode:
            yield
    finally:
        for handle in handles:
            handle.remove()


def _through_shards(
    tensor: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Convert a tensor, or this rank's shard of a DTensor."""
    if not hasattr(tensor, "to_local"):
        return convert(tensor)
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    with torch.no_grad(), disable_current_modes():
        local = tensor.to_local()
    whole: Any = {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(
        convert(local), tensor.device_mesh, tensor.placements, run_check=False, **whole
    )
