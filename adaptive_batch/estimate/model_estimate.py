"""The estimate of a PyTorch model: its training step runs with fake tensors in place of its own."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batch import distributed
from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import around_autocast, check_whole
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import auto_headroom, optimizer_state_tensors

from .allocator import AllocatorSettings, CachingAllocator
from .bounds import estimate_length
from .compiled_parts import CompiledParts
from .cuda_operators import left_out
from .devices import group_by_kernels, parse_devices
from .fake_step import FakeDevice, FakeStep, needs_values, own_tensors, runs_in_optimizer
from .result import Fit, MemoryEstimate

private = PrivateNames("memory estimates")


def estimate_memory(
    model: nn.Module,
    batch: Any,
    optimizer: Optimizer,
    devices: Any,
    *,
    mean_loss: Callable[[Any], torch.Tensor] | None = None,
    max_grad_norm: float | None = None,
    accumulates: bool = False,
    maximum: int = 4096,
    context: int | None = None,
    headroom: int | float | str = "auto",
    trace: str | Path | None = None,
) -> MemoryEstimate:
    """Estimate the largest batch whose training step fits on CUDA devices that are not available.

    Nothing is computed, and the model may be on the meta device: fake tensors replace its
    parameters during the call. Memory that custom kernels allocate outside of PyTorch's operators
    is not counted.

    Args:
        model: model, estimated in training mode.
        batch: sample batch: tensors in nested mappings and sequences. Tensors with the same first
            dimension as the first tensor grow with the rows.
        optimizer: optimizer of the model's parameters; its state is created again.
        devices: one or several devices: a name such as ``"H100"`` or a size such as ``"80GiB"``.
        mean_loss: function that returns the loss of such a batch; None for the ``loss`` in the
            output of ``model(**batch)``.
        max_grad_norm: norm to which gradients are clipped before the optimizer's step.
        accumulates: whether gradients of earlier micro-batches exist before a forward.
        maximum: limit of the rows.
        context: bytes of the driver's context on each device; None for 770 MiB on H100 and H200,
            and 500 MiB on others.
        headroom: memory to leave free besides the context: bytes, a size or a share; ``auto`` for
            1% if the environment enables expandable segments, else 5%.
        trace: file for the allocations of two steps with the rows that fit on the first device, for
            pytorch.org/memory_viz.

    Returns:
        The rows that fit on each device, with their memory.

    Raises:
        SettingError: an argument is invalid, or the model reads values, which fake tensors do not
            have.
    """
    shapes = [
        leaf.shape
        for leaf in private.tree_leaves(batch)
        if isinstance(leaf, torch.Tensor) and leaf.dim()
    ]
    if not shapes:
        remedy = "give a sample with tensors whose first dimension is the batch"
        raise SettingError("batch", type(batch).__name__, remedy)

    def forward_backward(device: FakeDevice, rows: int) -> None:
        def resized(tensor: torch.Tensor) -> torch.Tensor:
            grows = tensor.dim() and tensor.shape[0] == shapes[0][0]
            shape = tuple(tensor.shape)
            if grows:
                shape = (rows, *tensor.shape[1:])
            return torch.empty(shape, dtype=tensor.dtype)

        made = {"batch": private.tree_map_only(torch.Tensor, resized, batch)}
        device.batch(made)
        loss = mean_loss(made["batch"]) if mean_loss else _loss_of(model, made["batch"])
        loss.backward()  # type: ignore[no-untyped-call]

    return estimate_step(
        model,
        optimizer,
        forward_backward,
        lambda: max_grad_norm and nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm),
        devices,
        sequence_length=_tokens_of(batch),
        accumulates=accumulates,
        maximum=check_whole("maximum", maximum),
        context=context,
        headroom=headroom,
        trace=trace,
    )


def estimate_step(
    model: nn.Module,
    optimizer: Optimizer,
    forward_backward: Callable[[FakeDevice, int], object],
    clip: Callable[[], object],
    devices: Any,
    *,
    sequence_length: int,
    accumulates: bool,
    maximum: int,
    context: int | None = None,
    headroom: int | float | str = "auto",
    trace: str | Path | None = None,
) -> MemoryEstimate:
    """Estimate a step that calls `forward_backward(device, rows)`.

    Args:
        clip: function that clips the gradients, if configured.
        sequence_length: tokens of a row.

    The other arguments are those of :func:`estimate_memory`.
    """
    if distributed.world_size() > 1:
        instead = "estimate in one process; use tune run adaptive_estimate to estimate ranks"
        raise SettingError("devices", devices, instead)
    start = time.perf_counter()
    parsed = parse_devices(devices)
    settings = AllocatorSettings.from_environment()
    if headroom == "auto":
        headroom = auto_headroom(expands=settings.expandable_segments)
    targets = [device.target(context_bytes=context, headroom=headroom) for device in parsed]
    fits: dict[int, Fit] = {}
    not_counted: dict[str, None] = {}

    def noted(autocast: torch.autocast) -> AbstractContextManager[None]:
        if autocast.device != "cpu":
            not_counted['torch.autocast("cuda"): operators are counted in their own dtype'] = None
        return nullcontext()

    try:
        # Reversed: the length of the first kind remains.
        for members in reversed(group_by_kernels(parsed)):
            fake = FakeDevice(parsed[members[0]].kernels)
            compiled = CompiledParts(fake)
            with (
                _fake_in_place(fake, model, optimizer) as twins,
                compiled.in_place(model),
                around_autocast(noted),
            ):
                for twin in twins.optimizers:
                    not_counted.update(dict.fromkeys(fake.prepare_optimizer(twin)))
                step = FakeStep(
                    model=model,
                    optimizer=twins.optimizers[0],
                    forward_backward=partial(forward_backward, fake),
                    step=partial(_clip_and_step, clip, twins.optimizers[0]),
                    accumulates=accumulates,
                    device=fake,
                    more_states=twins.more_states,
                )
                length, some = estimate_length(
                    step,
                    sequence_length,
                    [targets[number] for number in members],
                    maximum=maximum,
                    allocator=settings,
                )
                if trace is not None and 0 in members:
                    allocator = CachingAllocator(settings)
                    log = step.log(max(1, some[0].max_batch_size), num_steps=2)
                    Path(trace).write_bytes(pickle.dumps(allocator.snapshot(log)))
            fits.update(zip(members, some, strict=True))
            not_counted.update(dict.fromkeys(compiled.left_out))
    except Exception as error:
        remedy = needs_values(error)
        if remedy is None:
            raise
        if runs_in_optimizer(error):
            raise SettingError("optimizer", type(optimizer).__name__, remedy) from error
        raise SettingError("model", type(model).__name__, remedy) from error
    return MemoryEstimate(
        devices=tuple(
            replace(target, lengths=(fits[number],)) for number, target in enumerate(targets)
        ),
        lengths=(length,),
        maximum=maximum,
        left_out=(*not_counted, *left_out(model, [device.architecture for device in parsed])),
        seconds=round(time.perf_counter() - start, 2),
    )


def _clip_and_step(clip: Callable[[], object], optimizer: Optimizer) -> None:
    clip()
    optimizer.step()


@dataclass(frozen=True)
class _Twins:
    """Copy of an optimizer for fake parameters, without state.

    Attributes:
        optimizers: the optimizer, followed by optimizers that it wraps.
        held: other tensors of the optimizer, such as an average of the weights.
        not_copied: names of attributes that could not be copied, with their errors.
    """

    optimizers: Sequence[Optimizer]
    held: Sequence[torch.Tensor]
    not_copied: dict[str, Exception]

    def more_states(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that the optimizer has besides its own state."""
        yield from self.held
        yield from optimizer_state_tensors(
            inner for inner in self.optimizers[1:] if inner.state is not self.optimizers[0].state
        )


@contextmanager
def _fake_in_place(device: FakeDevice, model: nn.Module, optimizer: Optimizer) -> Iterator[_Twins]:
    """Context manager: replace the parameters and buffers of a model by fake ones.

    Yields:
        Copy of the optimizer, for the fake parameters.

    Raises:
        SettingError: the optimizer's step reads an attribute that cannot be copied.
    """
    modules = [(module, module.training, own_tensors(module)) for module in model.modules()]
    real = dict(model.named_parameters(remove_duplicate=False))
    try:
        device.move(model)
        fakes = dict(model.named_parameters(remove_duplicate=False))
        # deepcopy's memo: the copy keeps the model itself, and gets the fake of each parameter.
        memo: dict[int, Any] = {id(module): module for module in model.modules()}
        memo.update({id(real[name]): fakes[name] for name in real})
        with device.copying():
            twins = _twins_of(optimizer, memo)
        try:
            yield twins
        except AttributeError as error:
            cause = twins.not_copied.get(str(error.name))
            if cause is None or not isinstance(error.obj, Optimizer):
                raise
            problem = f"its step reads {error.name!r}, which cannot be copied ({cause})"
            raise SettingError(
                "optimizer", type(optimizer).__name__, f"{problem}; probe it on a device"
            ) from error
    finally:
        for module, training, tensors in modules:
            module.training = training
            for name, tensor in tensors.items():
                setattr(module, name, tensor)


def _twins_of(optimizer: Optimizer, replacements: Mapping[int, Any]) -> _Twins:
    """Copy an optimizer.

    Args:
        replacements: objects of the copy by ``id`` of the original object.
    """
    memo = dict(replacements)
    originals = [optimizer]
    # The loop extends the list.
    for original in originals:
        for value in private.tree_leaves(vars(original)):
            if isinstance(value, Optimizer) and value not in originals:
                originals.append(value)
        empty = copy.copy(original.state)
        empty.clear()
        memo[id(original.state)] = empty
    not_copied: dict[str, Exception] = {}
    for original in originals:
        twin = copy.deepcopy(original, memo)
        # Optimizer.__deepcopy__ omits attributes of subclasses. Methods that were replaced, as
        # schedulers replace `step`, belong to the real optimizer.
        for name, value in vars(original).items():
            if name in vars(twin) or hasattr(type(original), name):
                continue
            try:
                setattr(twin, name, copy.deepcopy(value, memo))
            except Exception as error:
                not_copied[name] = error
    copies = [
        memo[id(optimizer)],
        *(value for key, value in memo.items() if key not in replacements),
    ]
    return _Twins(
        optimizers=list(dict.fromkeys(value for value in copies if isinstance(value, Optimizer))),
        # Scalars, such as a learning rate, are on the host.
        held=[value for value in copies if isinstance(value, torch.Tensor) and value.dim()],
        not_copied=not_copied,
    )


def _tokens_of(batch: Any) -> int:
    """Return the tokens of a row: the width of the first integer tensor, or 1."""
    for leaf in private.tree_leaves(batch):
        is_tokens = isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.int32, torch.int64)
        if is_tokens and leaf.dim() > 1:
            return int(leaf.shape[1])
    return 1


def _loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    output = model(**batch) if isinstance(batch, dict) else model(batch)
    loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor) or loss.dim():
        remedy = "the output of the model has no loss; give a function that returns it"
        raise SettingError("mean_loss", None, remedy)
    return loss
