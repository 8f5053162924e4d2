"""Rules of the batch size: the user's are checked and called, and some are ready-made.

A *schedule* is ``rule(progress) -> rows of one optimizer step on one device`` (tokens if
``batch_tokens`` is set), called before each step. An *increment* is ``f(epoch, batch_size) -> rows
to add to batch_size``, called at the start of each epoch, 0 included.

The ready-made ones (docs/configuration.md) are pure functions, so a resumed run continues
unchanged.
"""

from __future__ import annotations

import copy
import math
import operator
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import ClassVar, TypeGuard, TypeVar

from adaptive_batch._util import check_bool
from adaptive_batch.errors import GrowthFunctionError, SettingError

from .progress import Duration, Progress, parse_duration

Schedule = Callable[[Progress], int]
Increment = Callable[[int, int], int]
Rule = TypeVar("Rule")
KEY = "batch_size_schedule"
INCREMENT_KEY = "batch_increase_function"
_FORMS = {
    KEY: "rule(progress) -> rows of a step on one device",
    INCREMENT_KEY: "f(epoch, batch_size) -> rows to add",
}
# No device trains a larger batch: the rule probably returned tokens or bytes.
MOST_ROWS = 10**9


@dataclass(frozen=True)
class ClampedBatch:
    """The batch on one device that a rule requested, before and after the cut to `maximum`."""

    requested: int
    after: int
    maximum: int | None

    def describe(self, before: int) -> str:
        """Return one line, such as ``batch_size 16 -> 24 (asked for 32, cut to the bound 24)``."""
        line = f"batch_size {before} unchanged"
        if self.after != before:
            line = f"batch_size {before} -> {self.after}"
        if self.after == self.requested:
            return line
        # A batch that was above the bound before the step does not shrink, see next_batch_size().
        reason = "cut to" if self.after == self.maximum else "already above"
        return f"{line} (asked for {self.requested}, {reason} the bound {self.maximum})"


def request_batch(
    rule: Callable[[Progress], object], progress: Progress, *, maximum: int | None
) -> ClampedBatch:
    """Call a schedule before a step and clamp its result to `maximum` (None: no bound).

    Raises:
        GrowthFunctionError: the rule raised an error (kept as the cause) or did not return a whole
            number from 1 to 10**9.
    """
    call = f"{KEY} {_name_of(rule)}({progress})"
    remedy = "the batch of a step on one device"
    requested = _call(rule, progress, call=call, least=1, remedy=remedy)
    return ClampedBatch(requested, at_most(requested, maximum), maximum)


def next_batch_size(
    increment: Callable[[int, int], object], *, epoch: int, batch_size: int, maximum: int | None
) -> ClampedBatch:
    """Call an increment at the start of an epoch and clamp the batch size to `maximum` (None: no
    bound).

    A batch size already above the bound, for example after resuming on a smaller device, is kept.

    Raises:
        GrowthFunctionError: the function raised an error (kept as the cause) or did not return a
            whole number from 0 to 10**9.
    """
    call = f"{INCREMENT_KEY} {_name_of(increment)}(epoch={epoch}, batch_size={batch_size})"
    rows = _call(
        increment,
        epoch,
        batch_size,
        call=call,
        least=0,
        remedy="the rows to add to batch_size",
    )
    requested = batch_size + rows
    clamped = max(at_most(requested, maximum), batch_size)
    return ClampedBatch(requested, clamped, maximum)


def check_increments(
    increment: Increment, *, first_epoch: int, epochs: int, batch_size: int
) -> list[int]:
    """Call a growth function for all remaining epochs, before the maximum batch size is known.

    A result is refused only if it is invalid for the unclamped batch size and for the initial one:
    the maximum may clamp the batch to any size between them.

    Returns:
        The unclamped batch size of each epoch, up to the first invalid result.

    Raises:
        GrowthFunctionError: a result is invalid; the message names its epoch and batch size.
    """
    increment = copy_rule(increment)
    sizes: list[int] = []
    size = batch_size
    for epoch in range(first_epoch, epochs):
        try:
            size = next_batch_size(increment, epoch=epoch, batch_size=size, maximum=None).after
        except GrowthFunctionError:
            # Raise only if the result is invalid for the initial batch size too.
            next_batch_size(increment, epoch=epoch, batch_size=batch_size, maximum=None)
            break
        sizes.append(size)
    return sizes


def copy_rule(rule: Rule) -> Rule:
    """Return a deep copy if possible, so that trial calls do not change the rule's state."""
    # A rule that holds a file or a lock cannot be copied.
    with suppress(Exception):
        return copy.deepcopy(rule)
    return rule


def at_most(rows: int, maximum: int | None) -> int:
    """Return `rows`, limited to `maximum` unless that is None."""
    return rows if maximum is None else min(rows, maximum)


def _call(
    function: Callable[..., object], /, *arguments: object, call: str, least: int, remedy: str
) -> int:
    """Call a user's function and check its result; `call` and `remedy` go into the message."""
    try:
        answer = function(*arguments)
    except SettingError:
        # Its message has the remedy, as that of a seesaw before couple().
        raise
    except (Exception, SystemExit) as error:
        raise GrowthFunctionError(f"{call} raised {type(error).__name__}: {error}") from error
    number = whole_number(answer)
    if number is None or not least <= number <= MOST_ROWS:
        raise GrowthFunctionError(
            f"{call} returned {reprlib.repr(answer)}: it must return {remedy}: a whole number,"
            f" {least} to {MOST_ROWS}"
        )
    return number


def check_rule(key: str, rule: object) -> None:
    """Raise SettingError if the schedule or increment of a key is not a function."""
    if not callable(rule):
        raise SettingError(key, rule, f"give a function {_FORMS[key]}")


def needs_noise_scale(rule: object) -> bool:
    """Return whether a rule reads the measured noise scale, so that training cannot be planned."""
    return getattr(rule, "needs_noise_scale", False) is True


def reads_tokens(rule: object) -> bool:
    """Return whether a ready-made rule depends on the tokens trained so far."""
    return getattr(rule, "reads_tokens", False) is True


def whole_number(value: object) -> int | None:
    """Return an integer of Python, numpy or torch as an int, and None for bools and all other
    values.
    """
    # numpy and torch convert their bools to an index too.
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return None


def _name_of(function: object) -> str:
    """Return a function's dotted path for messages, or the `repr` of an object without one."""
    qualified = getattr(function, "__qualname__", None)
    if qualified is None:
        return repr(function)
    module = getattr(function, "__module__", "?")
    return f"{module}.{qualified}"


# --- ready-made rules


@dataclass(frozen=True, repr=False)
class _Rule:
    # The call that builds the rule.
    made_by: str

    def __repr__(self) -> str:
        return self.made_by


@dataclass(frozen=True, repr=False)
class Stages(_Rule):
    """A schedule that holds one batch size in each stage."""

    batches: tuple[int, ...]
    # Every stage except the last ends at this fraction of a duration.
    ends: tuple[tuple[Fraction, Duration], ...]

    def __call__(self, progress: Progress) -> int:
        return self.batches[self.stage(progress)]

    def stage(self, progress: Progress) -> int:
        """Return the index of the stage that `progress` lies in: the number of ended stages."""
        return sum(duration.share(progress) >= part for part, duration in self.ends)

    @property
    def reads_tokens(self) -> bool:
        """True if a threshold is in tokens."""
        return any(duration.unit == "tok" for _, duration in self.ends)

    def unused(
        self, steps: Sequence[Progress], *, most_rows: int | None, maximum: int | None
    ) -> list[str]:
        """Check that each stage fits in an epoch and lasts for a step; return a message for each
        stage that training does not reach.

        Args:
            steps: progress at the first step of each remaining stage; earlier stages are not
                checked.
            most_rows: the largest step on one device that an epoch does not drop; None for no
                limit.
            maximum: limit of the batch; None for no limit.

        Raises:
            SettingError: a step of a stage would have more rows than an epoch, or a stage ends
                before one of its steps begins.
        """
        for batch in self.batches:
            rows = at_most(batch, maximum)
            if most_rows is not None and rows > most_rows:
                remedy = (
                    f"{rows} rows on each device are more than an epoch has, and drop_last drops"
                    f" the step; use {most_rows} or fewer, or set drop_last=False"
                )
                raise SettingError(KEY, batch, remedy)
        reached = {self.stage(progress) for progress in steps}
        if not reached:
            return []
        messages = []
        for stage in range(min(reached), len(self.batches)):
            if stage in reached:
                continue
            unused = f"batch {self.batches[stage]} (from {self.begins(stage)} on) is never used"
            if stage < max(reached):
                remedy = (
                    f"{unused}: the stage ends before the next step begins; make the stage"
                    " longer, or remove it"
                )
                raise SettingError(KEY, self, remedy)
            messages.append(f"{unused}: training ends before it")
        return messages

    def begins(self, stage: int) -> str:
        """Describe the beginning of a stage."""
        if stage == 0:
            return "the start"
        part, duration = self.ends[stage - 1]
        if part == 1:
            return str(duration)
        return f"{part} of {duration}"


def steps(batch_sizes: Sequence[int], thresholds: Sequence[object]) -> Schedule:
    """Make a schedule of stages. Each batch size is used until its threshold, and the last batch
    size until the end.

    Args:
        batch_sizes: batch of a step on one device in each stage. It may decrease.
        thresholds: ends of all stages except the last, counted from the start of training, such as
            ``["1ep", "2ep"]``. The thresholds increase and have the same unit.

    Raises:
        SettingError: a size is not a whole number of 1 or more; a threshold is invalid, not above
            the previous one, or in another unit; or the number of thresholds is wrong.
    """
    key = f"{KEY}.thresholds"
    for name, values in (("batch_sizes", batch_sizes), ("thresholds", thresholds)):
        if isinstance(values, str) or not isinstance(values, Sequence):
            remedy = "give a list, such as batch_sizes: [16, 32] and thresholds: [1ep]"
            raise SettingError(f"{KEY}.{name}", values, remedy)
    sizes = [_whole(f"{KEY}.batch_sizes", size) for size in batch_sizes]
    ends = [parse_duration(value, key=key) for value in thresholds]
    shown = [str(end) for end in ends]
    if len(ends) != len(sizes) - 1:
        remedy = f"give one fewer than the {len(sizes)} batch_sizes: each begins the next stage"
        raise SettingError(key, shown, remedy)
    if len({end.unit for end in ends}) > 1:
        remedy = "thresholds in different units cannot be ordered; give all in one unit"
        raise SettingError(key, shown, remedy)
    for end, next_end in pairwise(ends):
        if end.amount >= next_end.amount:
            remedy = f"{next_end} comes after {end}; give increasing thresholds"
            raise SettingError(key, shown, remedy)
    made_by = f"steps(batch_sizes={sizes}, thresholds={shown})"
    return Stages(made_by, tuple(sizes), tuple((Fraction(1), end) for end in ends))


@dataclass(frozen=True, repr=False)
class _LinearRamp(Stages):
    start: int
    multiple_of: int

    def __call__(self, progress: Progress) -> int:
        _, over = self.ends[0]
        end = self.batches[-1]
        share = over.share(progress)
        if share >= 1:
            return end
        rows = math.floor(self.start + share * (end - self.start))
        return _round_down(rows, self.multiple_of)


def linear_ramp(start: int, end: int, over: object, multiple_of: int = 1) -> Schedule:
    """Make a schedule that changes the batch linearly from `start` to `end`.

    Values between `start` and `end` are rounded down to a multiple of `multiple_of`, but not below
    one multiple. If `start` and `end` are multiples too, this is Megatron's ramp: each multiple is
    used for an equal part of `over`.

    Args:
        start: batch of the first step on one device.
        end: batch after `over`; not rounded. It may be below `start`.
        over: duration of the ramp from the start of training, such as ``0.5ep`` or ``1.5e6tok``.
        multiple_of: unit to round to, such as the rows of a micro-batch.

    Raises:
        SettingError: a number is not whole or below 1, `multiple_of` is above `start` and `end`, or
            `over` is invalid.
    """
    first = _whole(f"{KEY}.start", start)
    last = _whole(f"{KEY}.end", end)
    multiple = _whole(f"{KEY}.multiple_of", multiple_of)
    if multiple > max(first, last):
        remedy = f"must not be above start={first} and end={last}"
        raise SettingError(f"{KEY}.multiple_of", multiple_of, remedy)
    duration = parse_duration(over, key=f"{KEY}.over")
    made_by = f"linear_ramp(start={first}, end={last}, over='{duration}', multiple_of={multiple})"
    batches = (_round_down(first, multiple), last)
    return _LinearRamp(made_by, batches, ((Fraction(1), duration),), first, multiple)


def _round_down(rows: int, multiple: int) -> int:
    """Round rows down to a multiple, at least to one multiple."""
    return max(multiple, rows - rows % multiple)


def ramp_by_doubling(end: int, over: object, start: int | None = None) -> Schedule:
    """Make a schedule that doubles the batch up to `end`, like the ramp of bert24 (ModernBERT).

    The stages below `end` have equal lengths. For example, from 1024 to 4096 over ``2ep``, the
    first epoch uses 1024, the second 2048, and all later ones 4096.

    Args:
        end: batch of a step on one device from `over` on.
        over: duration of the ramp from the start of training.
        start: first batch, which is `end` halved once or more. None halves `end` until it is odd.

    Raises:
        SettingError: `end` is odd or not whole, doubling `start` does not give `end`, or `over` is
            invalid.
    """
    last = _whole(f"{KEY}.end", end)
    # `end`, and all batches that doubling takes to it.
    doubled = [last]
    while doubled[0] % 2 == 0:
        doubled.insert(0, doubled[0] // 2)
    if len(doubled) == 1:
        remedy = "it is odd, so doubling a smaller batch cannot reach it; give an even number"
        raise SettingError(f"{KEY}.end", end, remedy)
    first = doubled[0]
    if start is not None:
        first = _whole(f"{KEY}.start", start)
    if first not in doubled[:-1]:
        choices = ", ".join(map(str, doubled[:-1]))
        remedy = f"doubling it never gives end={end}; give one of {choices}"
        raise SettingError(f"{KEY}.start", start, remedy)
    duration = parse_duration(over, key=f"{KEY}.over")
    batches = tuple(doubled[doubled.index(first) :])
    num_ramped = len(batches) - 1
    ends = tuple((Fraction(stage, num_ramped), duration) for stage in range(1, num_ramped + 1))
    return Stages(f"ramp_by_doubling(end={last}, over='{duration}', start={first})", batches, ends)


@dataclass(frozen=True, repr=False)
class _ByNoiseScale(_Rule):
    start: int
    maximum: int | None
    factor: float
    margin: float
    every: int
    monotone: bool
    needs_noise_scale: ClassVar[bool] = True

    def __call__(self, progress: Progress) -> int:
        batch = progress.batch or self.start
        noise = progress.noise_scale
        # Noise can push the estimate to 0 or below; it then has no information.
        if noise is None or not 0 < noise < math.inf:
            return batch
        is_due = progress.steps > 0 and progress.steps % self.every == 0
        if not is_due:
            return batch
        if noise > batch * (1 + self.margin):
            grown = max(batch + 1, math.floor(batch * self.factor + 0.5))
            # A batch that is already above the maximum does not shrink.
            return max(at_most(grown, self.maximum), batch)
        if self.monotone:
            return batch
        shrunk = max(1, min(batch - 1, math.floor(batch / self.factor + 0.5)))
        is_below = noise < batch / ((1 + self.margin) * self.factor)
        # The smaller batch must not grow again at once, as rounding could cause.
        stays_below = noise <= shrunk * (1 + self.margin)
        return shrunk if is_below and stays_below else batch


def by_noise_scale(
    start: int,
    maximum: int | None = None,
    factor: float = 2.0,
    margin: float = 0.5,
    every: int = 10,
    monotone: bool = True,
) -> Schedule:
    """Make a schedule that follows the measured gradient noise scale, with hysteresis.

    Near the simple noise scale, a batch trades time for data about evenly. Well below it, a larger
    batch saves steps at hardly any cost in samples (McCandlish et al. 2018, arXiv 1812.06162,
    sections 2.2 and 2.3).

    Every `every` steps, the batch is multiplied by `factor` if the noise scale is above batch x (1
    + margin). With ``monotone=False`` it is divided by `factor` if the noise scale is below batch /
    ((1 + margin) x factor). Otherwise, and before the first measurement, it is kept. The batch
    cannot oscillate while the noise scale varies by less than (1 + margin) squared.

    Args:
        start: number of rows in the first step on one device.
        maximum: maximum number of rows. None: only the maximum batch size limits the rows.
        factor: ratio of the batch sizes after and before a change, above 1.
        margin: relative distance between noise scale and batch that causes a change, 0 or more.
            With 0.5, the threshold lies about halfway (by ratio) to the doubled batch.
        every: optimizer steps between two decisions, so that the average can follow the batch.
        monotone: whether the batch only grows.

    Returns:
        ``rule(progress) -> rows``. Noise and batch are in rows on one device.

    Raises:
        SettingError: a number is out of range, or `start` is above `maximum`.
    """
    first = _whole(f"{KEY}.start", start)
    interval = _whole(f"{KEY}.every", every)
    max_rows = None if maximum is None else _whole(f"{KEY}.maximum", maximum)
    if max_rows is not None and first > max_rows:
        raise SettingError(f"{KEY}.maximum", maximum, f"must be start={first} or more")
    factor = _factor(f"{KEY}.factor", factor)
    if not _is_finite(margin) or margin < 0:
        raise SettingError(f"{KEY}.margin", margin, "must be a number 0 or more, such as 0.5")
    check_bool(f"{KEY}.monotone", monotone)
    margin = float(margin)
    made_by = (
        f"by_noise_scale({first}, {max_rows}, {factor=}, {margin=}, every={interval}, {monotone=})"
    )
    return _ByNoiseScale(made_by, first, max_rows, factor, margin, interval, monotone)


@dataclass(frozen=True, repr=False)
class Seesaw(_Rule):
    """The schedule of :func:`seesaw`; training couples it to the schedule of the learning rate."""

    factor: float | None
    max_rows: int | None
    start: int = 0
    decay: Callable[[Progress], float] | None = None

    def coupled(self, start: int, decay: Callable[[Progress], float]) -> Seesaw:
        """Return a copy that starts from a batch of `start`.

        Args:
            start: batch of the first step.
            decay: learning rate at a progress, as a fraction of its peak.
        """
        if self.max_rows is not None and start > self.max_rows:
            remedy = f"training starts with {start}; give {start} or more"
            raise SettingError(f"{KEY}.maximum", self.max_rows, remedy)
        return replace(self, start=start, decay=decay)

    def __call__(self, progress: Progress) -> int:
        if self.decay is None:
            remedy = "it follows the schedule of the rate; call batches.couple(lr_scheduler) first"
            raise SettingError(KEY, self, remedy)
        # A learning-rate schedule may end at 0, where the growth would be infinite.
        decay = max(self.decay(progress), 1 / MOST_ROWS)
        growth = 1 / decay
        if self.factor is not None:
            # Round down to a power of the factor. log() may be slightly too small for an exact
            # power, which 1e-9 corrects.
            exponent = math.floor(math.log(growth, self.factor) + 1e-9)
            growth = self.factor**exponent
        return min(self.max_rows or MOST_ROWS, math.floor(self.start * growth + 0.5))


def seesaw(factor: float | None = None, maximum: int | None = None) -> Schedule:
    """Make a schedule that grows the batch as the learning rate decays, so that an epoch takes
    fewer steps.

    After a decay of the learning-rate schedule to 1 / a of its peak, a step has a times the
    configured batch and 1 / sqrt(a) of the peak rate (Meterez et al. 2025, arXiv 2510.14717,
    algorithm 1; for normalized SGD, and for Adam if noise dominates). With

        f(t)  the learning-rate schedule at the trained fraction t of the data
        d(t)  f(t) / the highest f so far; 1 during warm-up
        B0    the configured batch

    a step has the batch B = round(B0 / d) and the rate lr x f x sqrt(B / B0), computed from its
    actual global batch. So rate / sqrt(batch) always equals that of f with B0, even if the maximum
    batch size, `maximum`, rounding or the end of an epoch reduces B. Below `maximum` the rate is
    peak x sqrt(d). From d = B0 / maximum on, B is constant and the rate is peak x d x sqrt(maximum
    / B0).

    If B is never reduced, n steps of B0 become n x mean(d) steps: n / 2 for a half cosine to 0, 2n
    / pi for a quarter cosine.

    Args:
        factor: ratio of the batch sizes after and before a change, above 1. With 2, the batch
            doubles each time d halves, B = B0 x 2 ** floor(log2(1 / d)), and the rate follows f
            between two changes (in the paper, the rate stays constant). None grows the batch at
            each step.
        maximum: limit of a step on one device. None leaves only the maximum batch size, which
            limits rows but not `batch_tokens`.

    Raises:
        SettingError: a number is out of range.
    """
    if factor is not None:
        factor = _factor(f"{KEY}.factor", factor)
    max_rows = None if maximum is None else _whole(f"{KEY}.maximum", maximum)
    return Seesaw(f"seesaw({factor=}, maximum={max_rows})", factor, max_rows)


def rate_rule(schedule: object, lr_scaling: str) -> str:
    """Return the scaling rule of the learning rate: ``sqrt`` with :func:`seesaw`, else
    `lr_scaling`.

    Raises:
        SettingError: `lr_scaling` is ``linear`` and the schedule is a seesaw.
    """
    if not isinstance(schedule, Seesaw):
        return lr_scaling
    if lr_scaling == "linear":
        remedy = f"{schedule} scales the rate by the square root; remove lr_scaling"
        raise SettingError("lr_scaling", lr_scaling, remedy)
    return "sqrt"


@dataclass(frozen=True, repr=False)
class _AtEpochs(_Rule):
    additions: Mapping[int, int]

    def __call__(self, epoch: int, batch_size: int) -> int:
        return self.additions.get(epoch, 0)


def at_epochs(additions: Mapping[int | str, int]) -> Increment:
    """Make an increment that adds rows at the start of the given epochs.

    Args:
        additions: rows to add by epoch, counted from 0, such as ``{1: 8, 2: 16}``.

    Raises:
        SettingError: `additions` is empty, repeats an epoch, or has a number that is negative or
            not whole.
    """
    key = f"{INCREMENT_KEY}.additions"
    if not isinstance(additions, Mapping) or not additions:
        raise SettingError(key, additions, "give rows to add by epoch, such as {1: 8, 2: 16}")
    by_epoch: dict[int, int] = {}
    for given_epoch, given_rows in additions.items():
        epoch = whole_number(given_epoch)
        # JSON and the command line turn the keys into text.
        if isinstance(given_epoch, str) and given_epoch.isascii() and given_epoch.isdigit():
            epoch = int(given_epoch)
        rows = whole_number(given_rows)
        if epoch is None or epoch < 0 or rows is None or not 0 <= rows <= MOST_ROWS:
            remedy = (
                f"epoch {given_epoch!r} and rows {given_rows!r} must be whole numbers of 0 or"
                f" more, and rows at most {MOST_ROWS}"
            )
            raise SettingError(key, additions, remedy)
        if epoch in by_epoch:
            raise SettingError(key, additions, f"epoch {epoch} is given twice")
        by_epoch[epoch] = rows
    by_epoch = dict(sorted(by_epoch.items()))
    return _AtEpochs(f"at_epochs({by_epoch})", by_epoch)


@dataclass(frozen=True, repr=False)
class _Geometric(_Rule):
    factor: float
    every: int

    def __call__(self, epoch: int, batch_size: int) -> int:
        if epoch == 0 or epoch % self.every != 0:
            return 0
        return max(1, math.floor(batch_size * self.factor + 0.5) - batch_size)


def geometric(factor: float, *, every: int = 1) -> Increment:
    """Make an increment that multiplies the batch size.

    At the start of every `every`-th epoch except epoch 0, the batch size is multiplied by `factor`
    and rounded half up. It grows by at least one row.

    Args:
        factor: above 1.
        every: epochs between two multiplications, 1 or more.

    Raises:
        SettingError: `factor` is not a finite number above 1, or `every` is not a whole number of 1
            or more.
    """
    factor = _factor(f"{INCREMENT_KEY}.factor", factor)
    every = _whole(f"{INCREMENT_KEY}.every", every)
    return _Geometric(f"geometric({factor=}, {every=})", factor, every)


def _whole(key: str, value: object) -> int:
    number = whole_number(value)
    if number is None or not 1 <= number <= MOST_ROWS:
        raise SettingError(key, value, f"must be a whole number, 1 to {MOST_ROWS}")
    return number


def _factor(key: str, value: object) -> float:
    """Check a growth factor."""
    if not _is_finite(value) or value <= 1:
        raise SettingError(key, value, "must be a number above 1, such as 2.0")
    return float(value)


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
