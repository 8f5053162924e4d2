"""The rows that fit, from a step on fake tensors.

Without a caching allocator they follow from the curve of the peak, otherwise from a replay of the
allocations of training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from adaptive_batch._util import format_bytes
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import MemoryCurve, Trace

from .allocator import AllocatorSettings, CachingAllocator
from .fake_step import FEW, MORE, FakeStep, Run
from .result import CurveCheck, Fit, LengthEstimate, Target

# Pairs of rows, traced in turn until both sizes run the same operations. Operations of compiled
# graphs depend less on the sizes with more rows.
_PAIRS = ((FEW, MORE), (MORE, 4), (8, 9), (16, 17), (32, 33))
# Approximate limit of a batch on the host, since tokens are collated for real.
_COLLATED_BYTES = 2**29


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
        is_checked: whether to check the curve with a trace of the most rows that fit, and to trace
            each result, within a limit of host memory. Otherwise everything follows from two sizes.
        allocator: settings of the devices' caching allocator; None for a device without one, whose
            reserved memory equals its allocated memory.

    Raises:
        SettingError: no two sizes run the same operations.
    """
    run = forward_backward or step.forward_backward
    few, more = trace_pair(step, run)
    curve = MemoryCurve.from_traces(few, more)
    length = LengthEstimate(
        tokens,
        step.resident,
        curve,
        math.ceil(_one_row_bytes(step, run, curve, targets) * (1 + step.margin)),
        step.optimizer_peak_bytes,
        margin=step.margin,
    )

    def fit(target: Target, expected: Fit | None = None) -> Fit:
        if allocator is None:
            return counted_fit(length, target.budget_bytes, maximum=maximum)
        log = partial(step.log, forward_backward=run)
        bounds = ReplayedBounds(length, log, allocator, maximum=maximum)
        return bounds.fit(target.budget_bytes, expected)

    fits = tuple(map(fit, targets))
    if is_checked:
        collated_rows = min(maximum, _COLLATED_BYTES // (128 * tokens))
        largest_bound = max(fit.max_batch_size for fit in fits)
        checked_rows = max(more[0] + 1, min(largest_bound, collated_rows))
        counted_bytes = max(step.trace(checked_rows, forward_backward=run).live_bytes)
        check = CurveCheck(checked_rows, counted_bytes, curve.peak_bytes(checked_rows))
        length = replace(length, check=check)
        checked_fits = []
        for target, expected in zip(targets, fits, strict=True):
            checked_fit = fit(target, expected)
            # Kernels can change with the rows, so trace the resulting number of rows.
            while (
                allocator is not None
                and MORE < checked_fit.max_batch_size <= collated_rows
                and not step.is_traced(checked_fit.max_batch_size, forward_backward=run)
            ):
                step.trace(checked_fit.max_batch_size, forward_backward=run)
                checked_fit = fit(target, checked_fit)
            checked_fits.append(checked_fit)
        fits = tuple(checked_fits)
    return length, tuple(
        with_composition(length, fit, step.composition(max(1, fit.max_batch_size), run))
        for fit in fits
    )


def _one_row_bytes(step: FakeStep, run: Run, curve: MemoryCurve, targets: Sequence[Target]) -> int:
    """Return the peak of one row, traced if it decides: it often runs other operations."""
    fewest_fitting = min(curve.max_rows(target.budget_bytes) or 0 for target in targets)
    if fewest_fitting >= FEW:
        return curve.peak_bytes(1)
    return max(step.trace(1, forward_backward=run).live_bytes)


def trace_pair(
    step: FakeStep, run: Run | None = None
) -> tuple[tuple[int, Trace], tuple[int, Trace]]:
    """Trace two sizes that run the same operations, the smaller first.

    Raises:
        SettingError: no two sizes do.
    """
    traces: dict[int, Trace] = {}
    for few, many in _PAIRS:
        for size in (few, many):
            if size not in traces:
                traces[size] = step.trace(size, forward_backward=run)
        low = traces[few]
        high = traces[many]
        if low.program == high.program:
            return (few, low), (many, high)
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


def with_composition(length: LengthEstimate, fit: Fit, composition: dict[str, int]) -> Fit:
    """Return a fit with the composition of its peak."""
    return replace(
        fit,
        bytes_per_row=float(length.curve.highest(max(2, fit.max_batch_size)).bytes_per_row),
        composition=composition,
        optimizer_bytes=length.optimizer_peak_bytes or 0,
    )


class ReplayedBounds:
    """Finds the rows of one length that fit on devices of one kind, by replays of an allocator.

    Args:
        length: memory of the tensors, which limits the rows.
        log: function that returns the log of training with a number of rows (:mod:`.step_log`).
        settings: settings of the allocator.
        maximum: limit of the rows.
    """

    def __init__(
        self,
        length: LengthEstimate,
        log: Callable[[int], Sequence[int]],
        settings: AllocatorSettings,
        *,
        maximum: int,
    ) -> None:
        self._length = length
        self._log = log
        self._settings = settings
        self._maximum = maximum
        self._peaks: dict[int, tuple[int, int]] = {}

    def fit(self, budget_bytes: int, expected: Fit | None = None) -> Fit:
        """Return the rows that fit in the memory of the driver.

        Args:
            budget_bytes: memory of the driver.
            expected: earlier fit, where the search begins.
        """
        counted = counted_fit(self._length, budget_bytes, maximum=self._maximum)
        guess = counted.max_batch_size
        if expected is not None:
            guess = expected.max_batch_size
        elif guess and self.peaks(guess)[1] > budget_bytes:
            guess = int(guess * budget_bytes / self.peaks(guess)[1])
        rows = _largest(
            lambda rows: self.peaks(rows)[1] <= budget_bytes,
            most=counted.max_batch_size,
            guess=guess,
        )
        allocated, reserved = self.peaks(max(1, rows))
        reason = counted.first_too_large
        if rows == 0 and reason is None:
            reason = f"the allocator's memory for one row ({format_bytes(reserved)} at the peak)"
        return Fit(self._length.sequence_length, rows, allocated, reserved, reason)

    def peaks(self, rows: int) -> tuple[int, int]:
        """Return the peaks of allocated and reserved bytes."""
        if rows not in self._peaks:
            allocator = CachingAllocator(self._settings)
            allocator.replay(self._log(rows))
            peaks = allocator.peak_allocated_bytes, allocator.reserved_bytes
            allocated, reserved = (int(peak * (1 + self._length.margin)) for peak in peaks)
            self._peaks[rows] = allocated, reserved
        return self._peaks[rows]


def _largest(fits: Callable[[int], bool], *, most: int, guess: int) -> int:
    """Return the most rows that fit: growing steps around a guess, then bisection."""
    low = 0
    high = most + 1
    step = 1
    rows = guess
    while high - low > 1:
        rows = min(max(rows, low + 1), high - 1)
        if fits(rows):
            low = rows
            rows = rows + step
        else:
            high = rows
            rows = rows - step
        step *= 2
        # Bisect between a size that fits and one that does not.
        if low and high <= most:
            rows = (low + high) // 2
    return low
