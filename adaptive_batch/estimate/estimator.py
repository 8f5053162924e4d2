"""Estimates from a step on fake tensors: the curve of its peak, and how many rows fit on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from adaptive_batch.errors import SettingError
from adaptive_batch.memory import MemoryCurve

from .fake_step import FEW, MORE, FakeStep
from .result import CurveCheck, LengthEstimate, MemoryBreakdown, Target
from .tracker import StepTrace

_PAIRS = ((FEW, MORE), (MORE, 4), (8, 9))
_LEAST_CHECKED = 5  # rows of the step that a curve is checked by, at least
_COLLATED_BYTES = 2**29  # of its batch, roughly: tokens are collated for real, which takes time and memory


def estimate_length(
    step: FakeStep,
    tokens: int,
    targets: Sequence[Target],
    *,
    maximum: int,
    forward_backward: Callable[[int], object] | None = None,
    checks: bool = True,
) -> LengthEstimate:
    """Estimate what the step holds with rows of one length.

    Args:
        tokens: of a row.
        targets: rows that fit on these are of interest.
        maximum: more rows are of none.
        forward_backward: of that many rows; None for the step's own.
        checks: by one more size, whose tensors are attributed to modules.

    Raises:
        SettingError: no two sizes ran the same operations.
    """
    (fewer, few), (larger, more) = _alike(step, forward_backward, tokens)
    curve = MemoryCurve.from_traces((fewer, few.trace), (larger, more.trace))
    fitting = [curve.max_rows(target.budget_bytes) or 0 for target in targets]
    check, sites = None, {}
    if checks:
        most = _COLLATED_BYTES // (128 * tokens)
        size = max(_LEAST_CHECKED, min(max(fitting), maximum, most))
        third = step.trace(size, forward_backward=forward_backward, explain={line.operation for line in curve.lines})
        check = CurveCheck(size, max(third.trace.live_bytes), curve.peak_bytes(size))
        sites = {operation: live.describe() for operation, live in third.explained.items()}
    one_row = curve.peak_bytes(1)
    if min(fitting) < FEW:
        one_row = max(step.trace(1, forward_backward=forward_backward).trace.live_bytes)
    breakdowns = []
    for line in curve.lines:
        below, above = few.forward_bytes[line.operation], more.forward_bytes[line.operation]
        each = (above - below) / (larger - fewer)
        activations = below - fewer * each, each
        gradients = more.gradient_bytes(line.operation)
        site = sites.get(line.operation, "")
        breakdowns.append(MemoryBreakdown(line.fixed_bytes, line.bytes_per_row, activations, gradients, site))
    return LengthEstimate(
        sequence_length=tokens,
        resident=step.resident,
        breakdowns=tuple(breakdowns),
        one_row_bytes=one_row,
        optimizer_peak_bytes=step.optimizer_peak_bytes,
        check=check,
    )


def _alike(
    step: FakeStep, run: Callable[[int], object] | None, tokens: int
) -> tuple[tuple[int, StepTrace], tuple[int, StepTrace]]:
    """Trace two sizes that run the same operations."""
    for few, many in _PAIRS:
        low, high = (step.trace(size, forward_backward=run) for size in (few, many))
        if low.trace.program == high.trace.program:
            return (few, low), (many, high)
    remedy = f"each number of rows of {tokens} tokens runs other operations, so no peak follows from another; probe it on a device"
    raise SettingError("model", type(step.model).__name__, remedy)
