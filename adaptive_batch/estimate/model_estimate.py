"""The rows that fit, from a training step with fake tensors in place of its own.

Without a caching allocator they follow from the curve of the peak, otherwise from a replay of the
allocations of training.
"""

from __future__ import annotations

import copy
import math
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batch import distributed
from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import around_autocast, check_whole, format_bytes
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import MemoryCurve, Trace, auto_headroom, optimizer_state_tensors

from .allocator import AllocatorSettings, CachingAllocator
from .compiled_parts import CompiledParts
from .cuda_operators import left_out
from .devices import group_by_kernels, parse_devices
from .fake_step import (
    FEW,
    MORE,
    FakeDevice,
    FakeStep,
    Run,
    explained_missing_values,
    own_tensors,
)
from .result import CurveCheck, Fit, LengthEstimate, MemoryEstimate, Target

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
        devices: one device or several: a name such as ``"H100"``, or a size such as ``"80GiB"``.
        mean_loss: function that returns the loss of such a batch; None for the ``loss`` in the
            output of ``model(**batch)``.
        max_grad_norm: norm to which gradients are clipped before the optimizer's step.
        accumulates: whether gradients of earlier micro-batches exist before a forward.
        maximum: maximum number of rows.
        context: bytes of the CUDA context on each device. None: 770 MiB on an H100 or H200, and 500
            MiB on other devices.
        headroom: memory that stays free in addition to the context: a number of bytes, a size or a
            fraction. ``auto``: 1% if the environment enables expandable segments, otherwise 5%.
        trace: file to which the allocations of two steps are written for pytorch.org/memory_viz.
            The steps have the number of rows that fits on the first device.

    Returns:
        The number of rows that fit on each device, and their memory.

    Raises:
        SettingError: an argument is invalid, or the model reads values, which fake tensors do not
            have.
    """
    tensors = [
        leaf for leaf in private.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()
    ]
    if not tensors:
        remedy = "give a sample with tensors whose first dimension is the batch"
        raise SettingError("batch", type(batch).__name__, remedy)
    sample_rows = len(tensors[0])

    def forward_backward(device: FakeDevice, rows: int) -> None:
        def resize(tensor: torch.Tensor) -> torch.Tensor:
            shape = tensor.shape
            if tensor.dim() and len(tensor) == sample_rows:
                shape = torch.Size([rows, *shape[1:]])
            return torch.empty(shape, dtype=tensor.dtype)

        resized = {"batch": private.tree_map_only(torch.Tensor, resize, batch)}
        device.move_batch(resized)
        loss = mean_loss(resized["batch"]) if mean_loss else _loss_of(model, resized["batch"])
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
    # Sentences about memory that is not counted, in order and each once.
    not_counted: dict[str, None] = {}

    def note_autocast(autocast: torch.autocast) -> AbstractContextManager[None]:
        if autocast.device != "cpu":
            not_counted['torch.autocast("cuda"): operators are counted in their own dtype'] = None
        return nullcontext()

    owners = {"model": model, "optimizer": optimizer}
    with explained_missing_values(lambda key: type(owners[key]).__name__):
        # Reversed, so that `length` belongs to the first device in the end, whose number is 0.
        for members in reversed(group_by_kernels(parsed)):
            fake = FakeDevice(parsed[members[0]].kernels)
            compiled = CompiledParts(fake)
            with (
                _fake_in_place(fake, model, optimizer) as twins,
                compiled.in_place(model),
                around_autocast(note_autocast),
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
                length, fits_of_members = estimate_length(
                    step,
                    sequence_length,
                    [targets[number] for number in members],
                    maximum=maximum,
                    allocator=settings,
                )
                if trace is not None and members[0] == 0:
                    rows = max(1, fits_of_members[0].max_batch_size)
                    log = step.log(rows, step.forward_backward, num_steps=2)
                    snapshot = CachingAllocator(settings).snapshot(log)
                    Path(trace).write_bytes(pickle.dumps(snapshot))
            for number, fit in zip(members, fits_of_members, strict=True):
                targets[number] = replace(targets[number], lengths=(fit,))
            not_counted.update(dict.fromkeys(compiled.left_out))
    return MemoryEstimate(
        devices=tuple(targets),
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
            # The copy may lack an attribute of the real optimizer.
            copy_error = twins.not_copied.get(str(error.name))
            if copy_error is None or not isinstance(error.obj, Optimizer):
                raise
            problem = f"its step reads {error.name!r}, which cannot be copied ({copy_error})"
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
    # The optimizer and, since the loop extends the list, all optimizers that it wraps.
    originals = [optimizer]
    for original in originals:
        for value in private.tree_leaves(vars(original)):
            if isinstance(value, Optimizer) and value not in originals:
                originals.append(value)
        # The copy gets an empty state of the same type.
        empty_state = copy.copy(original.state)
        empty_state.clear()
        memo[id(original.state)] = empty_state
    not_copied: dict[str, Exception] = {}
    for original in originals:
        twin = copy.deepcopy(original, memo)
        # Optimizer.__deepcopy__ omits attributes of subclasses, so copy those. Not the methods that
        # were replaced, as schedulers replace `step`: they belong to the real optimizer.
        for name, value in vars(original).items():
            if name not in vars(twin) and not hasattr(type(original), name):
                try:
                    setattr(twin, name, copy.deepcopy(value, memo))
                except Exception as error:
                    not_copied[name] = error
    # deepcopy has added each copy to the memo.
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


# Pairs of rows, traced in turn until both sizes run the same operations. Operations of compiled
# graphs depend less on the sizes with more rows.
_PAIRS = ((FEW, MORE), (MORE, 4), (8, 9), (16, 17), (32, 33))
# Most curves of a device that are checked; the last one stays even if it is off.
_MOST_CHECKS = 4
# Approximate limit of a batch on the host, since tokens are collated for real.
_COLLATED_BYTES = 2**29
_COLLATED_BYTES_PER_TOKEN = 128


def estimate_length(
    step: FakeStep,
    tokens: int,
    targets: Sequence[Target],
    *,
    maximum: int,
    forward_backward: Run | None = None,
    is_checked: bool = True,
    allocator: AllocatorSettings | None = None,
) -> tuple[LengthEstimate, tuple[Fit, ...]]:
    """Estimate the memory of a step with rows of one length, and the rows that fit on each device.

    Args:
        step: traced training step.
        tokens: length of a row.
        targets: devices.
        maximum: limit of the rows.
        forward_backward: forward and backward of a number of rows; None for those of the step.
        is_checked: whether to check the curve of each device with a trace of its rows that fit,
            and to trace each result, within a limit of host memory. Otherwise everything follows
            from two sizes.
        allocator: settings of the devices' caching allocator; None for a device without one, whose
            reserved memory equals its allocated memory.

    Raises:
        SettingError: no two sizes run the same operations.
    """
    run = forward_backward or step.forward_backward
    few, more = trace_pair(step, run)
    curve = MemoryCurve.from_traces(few, more)
    one_row_bytes = _one_row_bytes(step, run, curve, targets)
    length = LengthEstimate(
        tokens,
        step.resident,
        curve,
        math.ceil(one_row_bytes * (1 + step.margin)),
        step.optimizer_peak_bytes,
        margin=step.margin,
    )

    collated_rows = min(maximum, _COLLATED_BYTES // (_COLLATED_BYTES_PER_TOKEN * tokens))

    def find_fit(length: LengthEstimate, target: Target) -> Fit:
        if allocator is None:
            return counted_fit(length, target.budget_bytes, maximum=maximum)
        log = partial(step.log, run=run)
        return replayed_fit(length, log, allocator, target.budget_bytes, maximum=maximum)

    def find_traced_fit(length: LengthEstimate, target: Target) -> Fit:
        # Kernels can change with the rows, so trace the rows that fit until they stay the same.
        while True:
            fit = find_fit(length, target)
            rows = fit.max_batch_size
            can_trace = allocator is not None and MORE < rows <= collated_rows
            if not can_trace or step.is_traced(rows, run):
                return fit
            step.trace(rows, run)

    def find_checked_fit(target: Target) -> tuple[LengthEstimate, Fit]:
        checked = length
        fit = find_fit(checked, target)
        if not is_checked:
            return checked, fit
        # Some buffers do not grow linearly. Then a curve of two sizes near the result replaces it.
        for number in range(_MOST_CHECKS):
            # More rows than those of the curve, even if they do not fit.
            rows = max(more[0] + 1, min(fit.max_batch_size, collated_rows))
            trace = step.trace(rows, run)
            expected_bytes = checked.traced_curve.peak_bytes(rows)
            check = CurveCheck(rows, max(trace.live_bytes), expected_bytes)
            checked = replace(checked, check=check)
            is_last_check = number == _MOST_CHECKS - 1
            if is_last_check or not check.is_off:
                break
            fewer = step.trace(rows - 1, run)
            if fewer.program != trace.program:
                break
            curve = MemoryCurve.from_traces((rows - 1, fewer), (rows, trace))
            checked = replace(checked, traced_curve=curve, check=None)
            fit = find_fit(checked, target)
        return checked, find_traced_fit(checked, target)

    checked_fits = [find_checked_fit(target) for target in targets]
    fits = tuple(
        replace(
            fit,
            bytes_per_row=float(checked.curve.highest(max(2, fit.max_batch_size)).bytes_per_row),
            composition=step.composition(max(1, fit.max_batch_size), run),
            optimizer_bytes=checked.optimizer_peak_bytes or 0,
        )
        for checked, fit in checked_fits
    )
    # The curve of most rows is returned.
    length, _ = max(checked_fits, key=lambda checked_fit: checked_fit[1].max_batch_size)
    return length, fits


def _one_row_bytes(step: FakeStep, run: Run, curve: MemoryCurve, targets: Sequence[Target]) -> int:
    """Return the peak of one row: that of the curve, or a trace if a device fits fewer than two.

    A single row often runs other operations, so only a trace tells whether it fits.
    """
    fewest_fitting = min(curve.max_rows(target.budget_bytes) or 0 for target in targets)
    if fewest_fitting >= FEW:
        return curve.peak_bytes(1)
    return max(step.trace(1, run).live_bytes)


def trace_pair(step: FakeStep, run: Run) -> tuple[tuple[int, Trace], tuple[int, Trace]]:
    """Trace two sizes that run the same operations, the smaller first.

    Raises:
        SettingError: no two sizes do.
    """
    traces: dict[int, Trace] = {}
    for few, many in _PAIRS:
        for size in (few, many):
            if size not in traces:
                traces[size] = step.trace(size, run)
        if traces[few].program == traces[many].program:
            return (few, traces[few]), (many, traces[many])
    remedy = (
        "its operations change with the number of rows, so its peak cannot be predicted; probe it"
        " on a device"
    )
    raise SettingError("model", type(step.model).__name__, remedy)


def counted_fit(length: LengthEstimate, budget_bytes: int, *, maximum: int) -> Fit:
    """Return the rows that fit if reserved memory equals allocated memory."""
    rows = length.max_rows(budget_bytes)
    if rows is None or rows > maximum:
        rows = maximum
    peak = length.peak_bytes(max(1, rows))
    too_large = length.first_too_large(budget_bytes)
    return Fit(length.sequence_length, rows, peak, peak, too_large)


def replayed_fit(
    length: LengthEstimate,
    log: Callable[[int], Sequence[int]],
    allocator: AllocatorSettings,
    budget_bytes: int,
    *,
    maximum: int,
) -> Fit:
    """Return the rows that fit in the memory of the driver, by replays of an allocator.

    Args:
        length: memory of the tensors, which limits the rows.
        log: function that returns the log of training with a number of rows (:mod:`.allocator`).
        allocator: settings of the allocator.
        budget_bytes: memory of the driver.
        maximum: limit of the rows.
    """

    @cache
    def peaks(rows: int) -> tuple[int, int]:
        """Return the peaks of allocated and reserved bytes, raised by the estimate's margin."""
        replay = CachingAllocator(allocator)
        replay.replay(log(rows))
        factor = 1 + length.margin
        return int(replay.peak_allocated_bytes * factor), int(replay.reserved_bytes * factor)

    def fits(rows: int) -> bool:
        _, reserved = peaks(rows)
        return reserved <= budget_bytes

    # Reserved memory is at least the allocated one, so no more rows than these fit.
    counted = counted_fit(length, budget_bytes, maximum=maximum)
    most_rows = guess = counted.max_batch_size
    if most_rows > 0 and not fits(most_rows):
        _, reserved = peaks(most_rows)
        guess = int(most_rows * budget_bytes / reserved)
    rows = _largest(fits, most=most_rows, guess=guess)
    allocated, reserved = peaks(max(1, rows))
    reason = counted.first_too_large
    if rows == 0 and reason is None:
        reason = f"the allocator's memory for one row ({format_bytes(reserved)} at the peak)"
    return Fit(length.sequence_length, rows, allocated, reserved, reason)


def _largest(fits: Callable[[int], bool], *, most: int, guess: int) -> int:
    """Return the most rows that fit: growing steps from a guess, then bisection."""
    # `low` rows fit, `high` rows do not.
    low = 0
    high = most + 1
    rows = guess
    step = 1
    while high - low > 1:
        rows = min(max(rows, low + 1), high - 1)
        if fits(rows):
            low = rows
            rows += step
        else:
            high = rows
            rows -= step
        step *= 2
        # Bisect once sizes on both sides were tried.
        if low > 0 and high <= most:
            rows = (low + high) // 2
    return low
