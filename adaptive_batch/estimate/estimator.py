"""Estimates from a step on fake tensors: the curve of its peak, and the rows that fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from adaptive_batch.errors import SettingError
from adaptive_batch.memory import MemoryCurve

from .allocator import AllocatorSettings
from .bounds import ReplayedBounds
from .fake_step import FEW, MORE, FakeStep, Run
from .result import CurveCheck, Fit, LengthEstimate, MemoryBreakdown, Target
from .tracker import StepTrace

# Rows of two steps, tried in turn until both run the same operations.
# What compiled graphs run can depend on the sizes, the less the more rows there are.
_PAIRS = ((FEW, MORE), (MORE, 4), (8, 9), (16, 17), (32, 33))
# Tokens are collated for real, which takes time and memory: roughly the most bytes of a batch.
_COLLATED_BYTES = 2**29


def estimate_length(
    step: FakeStep,
    tokens: int,
    targets: Sequence[Target],
    *,
    maximum: int,
    forward_backward: Run | None = None,
    is_checked: bool = True,
    explains: bool = True,
    allocator: AllocatorSettings | None = None,
) -> tuple[LengthEstimate, tuple[Fit, ...]]:
    """Estimate what the step holds with rows of one length, and the rows that fit on each device.

    Args:
        tokens: length of a row.
        targets: devices to fit the step on.
        maximum: number of rows above which a batch is of no interest.
        forward_backward: forward and backward of a number of rows; None for the step's own.
        is_checked: compare the curve with a trace of the most rows that fit, and trace each bound,
            up to a batch that is large on the host. Otherwise all follows from two sizes.
        explains: attribute the tensors of the checked step to modules.
        allocator: settings of the devices' caching allocator; None for a device without one, where
            reserved memory equals allocated memory.

    Raises:
        SettingError: no two sizes ran the same operations.
    """
    run = forward_backward or step.forward_backward
    (few_rows, few), (more_rows, more) = traces_alike(step, run)
    curve = MemoryCurve.from_traces((few_rows, few.trace), (more_rows, more.trace))
    length = LengthEstimate(
        tokens,
        step.resident,
        _breakdowns(curve, (few_rows, few), (more_rows, more)),
        math.ceil(_one_row_bytes(step, run, curve, targets) * (1 + step.margin)),
        step.optimizer_peak_bytes,
        margin=step.margin,
    )

    def fit(target: Target, expected: Fit | None = None) -> Fit:
        if allocator is None:
            return length.counted_fit(target.budget_bytes, maximum=maximum)
        log = partial(step.log, forward_backward=run)
        bounds = ReplayedBounds(length, log, allocator, maximum=maximum)
        return bounds.fit(target.budget_bytes, expected)

    fits = tuple(map(fit, targets))
    if is_checked:
        collated_rows = min(maximum, _COLLATED_BYTES // (128 * tokens))
        largest_bound = max(fit.max_batch_size for fit in fits)
        checked_rows = max(more_rows + 1, min(largest_bound, collated_rows))
        length = _checked(step, run, length, curve, checked_rows, explains=explains)
        checked_fits = []
        for target, expected in zip(targets, fits, strict=True):
            checked_fit = fit(target, expected)
            # Kernels can change with the rows, so the answer is a number of rows that was traced.
            while (
                allocator is not None
                and MORE < checked_fit.max_batch_size <= collated_rows
                and not step.is_traced(checked_fit.max_batch_size, forward_backward=run)
            ):
                step.trace(checked_fit.max_batch_size, forward_backward=run)
                checked_fit = fit(target, checked_fit)
            checked_fits.append(checked_fit)
        fits = tuple(checked_fits)
    return length, tuple(map(length.explained, fits))


def _breakdowns(
    curve: MemoryCurve, few: tuple[int, StepTrace], more: tuple[int, StepTrace]
) -> tuple[MemoryBreakdown, ...]:
    """Divide each line of the curve into activations, gradients and the rest."""
    few_rows, few_trace = few
    more_rows, more_trace = more
    breakdowns = []
    for line in curve.lines:
        few_bytes = few_trace.forward_bytes[line.operation]
        more_bytes = more_trace.forward_bytes[line.operation]
        bytes_per_row = (more_bytes - few_bytes) / (more_rows - few_rows)
        activations = (few_bytes - few_rows * bytes_per_row, bytes_per_row)
        gradients = more_trace.gradient_bytes(line.operation)
        breakdowns.append(
            MemoryBreakdown(line.fixed_bytes, line.bytes_per_row, activations, gradients)
        )
    return tuple(breakdowns)


def _one_row_bytes(step: FakeStep, run: Run, curve: MemoryCurve, targets: Sequence[Target]) -> int:
    """Return the peak of one row: traced where it decides, as it often runs other operations."""
    fewest_fitting = min(curve.max_rows(target.budget_bytes) or 0 for target in targets)
    if fewest_fitting >= FEW:
        return curve.peak_bytes(1)
    return max(step.trace(1, forward_backward=run).trace.live_bytes)


def _checked(
    step: FakeStep,
    run: Run,
    length: LengthEstimate,
    curve: MemoryCurve,
    rows: int,
    *,
    explains: bool,
) -> LengthEstimate:
    """Compare the curve with a trace of `rows`, and name what made the peaks."""
    operations = {line.operation for line in curve.lines} if explains else ()
    trace = step.trace(rows, forward_backward=run, explain=operations)
    check = CurveCheck(rows, max(trace.trace.live_bytes), curve.peak_bytes(rows))
    sites = {operation: live.describe() for operation, live in trace.explained.items()}
    named = tuple(
        replace(breakdown, site=sites.get(line.operation, ""))
        for breakdown, line in zip(length.breakdowns, curve.lines, strict=True)
    )
    return replace(length, breakdowns=named, check=check)


def traces_alike(
    step: FakeStep, run: Run | None = None
) -> tuple[tuple[int, StepTrace], tuple[int, StepTrace]]:
    """Trace two sizes that run the same operations, the smaller first.

    Raises:
        SettingError: no two did.
    """
    traces: dict[int, StepTrace] = {}
    for few, many in _PAIRS:
        for size in (few, many):
            if size not in traces:
                traces[size] = step.trace(size, forward_backward=run)
        low = traces[few]
        high = traces[many]
        if low.trace.program == high.trace.program:
            return (few, low), (many, high)
    remedy = (
        "each number of rows runs other operations, so no peak follows from another; probe it on a"
        " device"
    )
    raise SettingError("model", type(step.model).__name__, remedy)
