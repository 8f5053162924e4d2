"""Estimates from a step on fake tensors: the curve of its peak, and the rows that fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from adaptive_batch.errors import SettingError
from adaptive_batch.memory import MemoryCurve

from .allocator import AllocatorSettings
from .bounds import ReplayedBounds
from .fake_step import FEW, MORE, Between, FakeStep, Run
from .result import CurveCheck, Fit, LengthEstimate, MemoryBreakdown, Target
from .roofline import Roofline
from .tracker import StepTrace
from .trial_replay import TrialLog, TrialSteps

# Rows of two steps, tried in turn until both run the same operations.
# What compiled graphs run can depend on the sizes, the less the more rows there are.
_PAIRS = ((FEW, MORE), (MORE, 4), (8, 9), (16, 17), (32, 33))
# Fewest rows of the step that a curve is checked by.
_LEAST_CHECKED = 5
# The first step makes gradients and states; from the third on, steps are alike.
_STEPS = 4
# Tokens are collated for real, which takes time and memory: roughly the most bytes of a batch.
_COLLATED_BYTES = 2**29


def estimate_length(
    step: FakeStep,
    tokens: int,
    targets: Sequence[Target],
    *,
    maximum: int,
    forward_backward: Run | None = None,
    of_steps: Callable[[int], Sequence[Run | Between]] | None = None,
    of_trial: TrialSteps | None = None,
    is_exact: bool = True,
    explains: bool = True,
    allocator: AllocatorSettings | None = None,
) -> tuple[LengthEstimate, tuple[Fit, ...]]:
    """Estimate what the step holds with rows of one length, and the rows that fit on each device.

    Args:
        tokens: length of a row.
        targets: devices to fit the step on.
        maximum: number of rows above which a batch is of no interest.
        forward_backward: forward and backward of a number of rows; None for the step's own.
        of_steps: function that returns forward and backward of some steps that training takes with
            that many rows, whose lengths vary; None for rows of one length. It counts where there
            is an allocator, whose memory they fragment.
        of_trial: function that returns the micro-batches of a search's trial of that many rows,
            where trials have the block that training makes; None where they have none.
        is_exact: trace what fits, up to a batch that is large on the host; otherwise it follows
            from two sizes.
        explains: check the curve by one more size, whose tensors are attributed to modules.
        allocator: settings of the devices' caching allocator; None for a device without one, where
            each byte that is allocated is one that is taken.

    Raises:
        SettingError: no two sizes ran the same operations.
    """
    run = forward_backward or step.forward_backward
    (few_rows, few), (more_rows, more) = traces_alike(step, run)
    roofline = Roofline((few_rows, few.costs), (more_rows, more.costs))
    curve = MemoryCurve.from_traces((few_rows, few.trace), (more_rows, more.trace))
    length = LengthEstimate(
        tokens,
        step.resident,
        _breakdowns(curve, (few_rows, few), (more_rows, more)),
        _one_row_bytes(step, run, curve, targets),
        step.optimizer_peak_bytes,
    )
    bounds = partial(
        _replayed_bounds,
        step,
        length,
        of_steps or (lambda rows: [run] * _STEPS),
        of_trial,
        maximum=maximum,
    )
    if allocator is None:
        fits = tuple(length.counted_fit(target.budget_bytes, maximum=maximum) for target in targets)
    else:
        expected = bounds(settings=allocator, traced_rows=0)
        fits = tuple(expected.fit(target.budget_bytes) for target in targets)
    collated_rows = min(maximum, _COLLATED_BYTES // (128 * tokens))
    if explains:
        # Checked at the bound, which is traced by that.
        largest_bound = max(fit.max_batch_size for fit in fits)
        checked_rows = max(_LEAST_CHECKED, min(largest_bound, collated_rows))
        length = _checked(step, run, length, curve, checked_rows)
    if is_exact and allocator:
        exact = bounds(settings=allocator, traced_rows=collated_rows)
        fits = tuple(
            exact.fit(target.budget_bytes, expected=fit)
            for fit, target in zip(fits, targets, strict=True)
        )
    speeds = [
        roofline.tokens_per_second(fit.max_batch_size, tokens, target.speed)
        for fit, target in zip(fits, targets, strict=True)
    ]
    return length, tuple(
        replace(fit, modelled_tokens_per_second=speed)
        for fit, speed in zip(fits, speeds, strict=True)
    )


def _replayed_bounds(
    step: FakeStep,
    length: LengthEstimate,
    of_steps: Callable[[int], Sequence[Run | Between]],
    of_trial: TrialSteps | None,
    *,
    settings: AllocatorSettings,
    maximum: int,
    traced_rows: int,
) -> ReplayedBounds:
    """Return the bounds by what a number of rows allocates and frees.

    Args:
        traced_rows: rows up to which a micro-batch is traced itself; the log of one that has more
            follows from other traces.
    """

    def learn(rows: int, runs: Sequence[Run | Between]) -> None:
        if rows <= traced_rows:
            step.learn(rows, runs)

    def log(rows: int) -> Sequence[int]:
        steps = of_steps(rows)
        learn(rows, steps)
        return step.log(rows, steps)

    def trial_log(rows: int) -> TrialLog:
        assert of_trial is not None
        pieces = of_trial(rows)
        for piece in chain.from_iterable(pieces):
            learn(piece.rows, [piece.run])
        return TrialLog.of(step, pieces)

    return ReplayedBounds(
        length, log, settings, maximum=maximum, trial_log=trial_log if of_trial else None
    )


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
    step: FakeStep, run: Run, length: LengthEstimate, curve: MemoryCurve, rows: int
) -> LengthEstimate:
    """Check the curve by a trace of `rows`, and name what made the peaks."""
    operations = {line.operation for line in curve.lines}
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
