"""Estimates from a step on fake tensors: the curve of its peak, and how many rows fit on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from adaptive_batch.errors import SettingError
from adaptive_batch.memory import MemoryCurve

from .allocator import AllocatorSettings
from .bounds import ReplayedBounds
from .fake_step import FEW, MORE, Between, FakeStep, Run
from .result import CurveCheck, Fit, LengthEstimate, MemoryBreakdown, Target
from .roofline import Roofline
from .tracker import StepTrace

_PAIRS = ((FEW, MORE), (MORE, 4), (8, 9))
_LEAST_CHECKED = 5  # rows of the step that a curve is checked by, at least
_ROUNDS = 3  # of a trace of a bound and of one row more, which may move it
# that are replayed: the first makes gradients and states, and from the third on they are alike
_STEPS = 4
_COLLATED_BYTES = (
    2**29
)  # of its batch, roughly: tokens are collated for real, which takes time and memory


def estimate_length(
    step: FakeStep,
    tokens: int,
    targets: Sequence[Target],
    *,
    maximum: int,
    forward_backward: Run | None = None,
    of_steps: Callable[[int], Sequence[Run | Between]] | None = None,
    is_exact: bool = True,
    explains: bool = True,
    allocator: AllocatorSettings | None = None,
) -> tuple[LengthEstimate, tuple[Fit, ...]]:
    """Estimate what the step holds with rows of one length, and how many of them fit on each
    device.

    Args:
        tokens: of a row.
        targets: the devices.
        maximum: more rows are of no interest.
        forward_backward: of that many rows; None for the step's own.
        of_steps: returns forward and backward of some steps that training takes with that many
            rows, whose lengths vary; None for rows of one length. It counts where there is an
            allocator, whose memory they fragment.
        is_exact: what fits is traced itself, up to a batch that is large on the host; else it
            follows from two sizes.
        explains: the curve is checked by one more size, whose tensors are attributed to modules.
        allocator: settings of the devices' caching allocator; None for a device without one, where
            each byte that is allocated is one that is taken.

    Raises:
        SettingError: no two sizes ran the same operations.
    """
    run = forward_backward or step.forward_backward
    (fewer, few), (larger, more) = traces_alike(step, run)
    roofline = Roofline((fewer, few.costs), (larger, more.costs))
    curve = MemoryCurve.from_traces((fewer, few.trace), (larger, more.trace))
    fitting = [curve.max_rows(target.budget_bytes) or 0 for target in targets]
    one_row = curve.peak_bytes(1)
    if min(fitting) < FEW:
        one_row = max(step.trace(1, forward_backward=run).trace.live_bytes)
    breakdowns = []
    for line in curve.lines:
        below = few.forward_bytes[line.operation]
        above = more.forward_bytes[line.operation]
        each = (above - below) / (larger - fewer)
        activations = below - fewer * each, each
        gradients = more.gradient_bytes(line.operation)
        breakdowns.append(
            MemoryBreakdown(line.fixed_bytes, line.bytes_per_row, activations, gradients)
        )
    length = LengthEstimate(
        tokens, step.resident, tuple(breakdowns), one_row, step.optimizer_peak_bytes
    )

    def steps_of(rows: int) -> Sequence[Run | Between]:
        return of_steps(rows) if of_steps else [run] * _STEPS

    def fits() -> tuple[Fit, ...]:
        if allocator is None:
            return tuple(
                length.counted_fit(target.budget_bytes, maximum=maximum) for target in targets
            )
        bounds = ReplayedBounds(
            length, lambda rows: step.log(rows, steps_of(rows)), allocator, maximum=maximum
        )
        return tuple(bounds.fit(target.budget_bytes) for target in targets)

    found = fits()
    most = min(maximum, _COLLATED_BYTES // (128 * tokens))
    if explains:  # at the bound, which is traced by that
        size = max(_LEAST_CHECKED, min(max(fit.max_batch_size for fit in found), most))
        third = step.trace(
            size, forward_backward=run, explain={line.operation for line in curve.lines}
        )
        check = CurveCheck(size, max(third.trace.live_bytes), curve.peak_bytes(size))
        sites = {operation: live.describe() for operation, live in third.explained.items()}
        pairs = zip(breakdowns, curve.lines, strict=True)
        named = tuple(replace(one, site=sites.get(line.operation, "")) for one, line in pairs)
        length = replace(length, breakdowns=named, check=check)
    for _ in range(_ROUNDS if is_exact and allocator else 0):
        beside = {
            rows
            for fit in found
            for rows in (fit.max_batch_size, fit.max_batch_size + 1)
            if 0 < rows <= most
        }
        is_new = [step.learn(rows, steps_of(rows)) for rows in beside]
        found = fits()
        if not any(is_new):
            break
    return length, tuple(
        replace(
            fit,
            modelled_tokens_per_second=roofline.tokens_per_second(
                fit.max_batch_size, tokens, target.speed
            ),
        )
        for fit, target in zip(found, targets, strict=True)
    )


def traces_alike(
    step: FakeStep, run: Run | None = None
) -> tuple[tuple[int, StepTrace], tuple[int, StepTrace]]:
    """Trace two sizes that run the same operations, the smaller first.

    Raises:
        SettingError: no two did.
    """
    for few, many in _PAIRS:
        low, high = (step.trace(size, forward_backward=run) for size in (few, many))
        if low.trace.program == high.trace.program:
            return (few, low), (many, high)
    remedy = (
        "each number of rows runs other operations, so no peak follows from another; probe it on a"
        " device"
    )
    raise SettingError("model", type(step.model).__name__, remedy)
