"""Ready-made schedules and increments.

A *schedule* is ``rule(progress) -> rows of one optimizer step on one device``; tokens of it where ``batch_tokens`` is set.
It is called before each step::

    batch_size_schedule:
      _component_: adaptive_batch.schedules.steps
      batch_sizes: [16, 32, 64]
      thresholds: [1ep, 2ep]

    batch_size_schedule:
      _component_: adaptive_batch.schedules.linear_ramp
      start: 16
      end: 64
      over: 1.5e6tok

    batch_size_schedule:
      _component_: adaptive_batch.schedules.ramp_by_doubling
      end: 64
      over: 0.5ep

An *increment* is ``f(epoch, batch_size) -> rows to add to batch_size``, called at the start of each epoch, 0 included::

    batch_increase_function:
      _component_: adaptive_batch.schedules.at_epochs
      additions: {1: 8, 2: 16}

    batch_increase_function:
      _component_: adaptive_batch.schedules.geometric
      factor: 2
      every: 1

All are pure: the same arguments, the same answer. Nothing is kept between steps, so a resumed run continues unchanged.
Durations are read by :func:`~adaptive_batch.schedules.progress.parse_duration`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from adaptive_batch.errors import SettingError

from .batch_rules import INCREMENT_KEY, KEY, MOST_ROWS, Increment, Schedule, whole_number
from .progress import Duration, Progress, parse_duration


@dataclass(frozen=True, repr=False)
class _Steps:
    batches: tuple[int, ...]
    thresholds: tuple[Duration, ...]

    def __call__(self, progress: Progress) -> int:
        return self.batches[self.stage(progress)]

    def stage(self, progress: Progress) -> int:
        """Return the number of the stage of a step at this progress, from 0."""
        return sum(threshold.reached(progress) for threshold in self.thresholds)

    def begins(self, stage: int) -> str:
        """Return where a stage begins, as text."""
        return str(self.thresholds[stage - 1]) if stage else "the start"

    def __repr__(self) -> str:
        return (
            f"steps(batch_sizes={list(self.batches)}, thresholds={[str(threshold) for threshold in self.thresholds]})"
        )


def steps(batch_sizes: Sequence[int], thresholds: Sequence[object]) -> Schedule:
    """Make a schedule of stages: each batch size holds until its threshold is reached, the last one to the end.

    Args:
        batch_sizes: what a step on one device holds in each stage; they may go down.
        thresholds: where each stage but the last ends, counted from the start of training, as in ``["1ep", "2ep"]``:
            rising, and all of one unit, as it is not known before training which of ``1ep`` and ``200ba`` comes first.

    Returns:
        ``rule(progress) -> batch``.

    Raises:
        SettingError: a size is not whole or below 1; a threshold cannot be read, is 0, not above the one before, or of
            another unit; there is not one threshold fewer than sizes.
    """
    key = f"{KEY}.thresholds"
    sizes = [_batch("batch_sizes", size) for size in _listed("batch_sizes", batch_sizes, "[16, 32, 64]")]
    if not sizes:
        raise SettingError(f"{KEY}.batch_sizes", batch_sizes, "give one batch size or more, such as [16, 32, 64]")
    ends = [parse_duration(value, key=key) for value in _listed("thresholds", thresholds, "[1ep, 2ep]")]
    shown = [str(end) for end in ends]
    if len(ends) != len(sizes) - 1:
        raise SettingError(
            key, shown, f"{len(sizes)} batch_sizes need {len(sizes) - 1} thresholds, where each but the last ends"
        )
    if len({type(end) for end in ends}) > 1:
        raise SettingError(key, shown, "give all in one unit: which of two units comes first is not known beforehand")
    if ends and ends[0].amount == 0:
        raise SettingError(key, shown, "the first must be above 0, or its stage has no step")
    for before, after in pairwise(ends):
        if before.amount == after.amount:
            raise SettingError(key, shown, f"{after} is given twice")
        if before.amount > after.amount:
            raise SettingError(key, shown, f"they must rise, and {after} comes after {before}")
    return _Steps(tuple(sizes), tuple(ends))


@dataclass(frozen=True, repr=False)
class _LinearRamp:
    start: int
    end: int
    over: Duration
    multiple_of: int

    def __call__(self, progress: Progress) -> int:
        share = self.over.share(progress)
        if share >= 1:
            return self.end
        exact = math.floor(self.start + share * (self.end - self.start))
        return max(self.multiple_of, exact - exact % self.multiple_of)

    @property
    def batches(self) -> tuple[int, ...]:
        """The first and the last."""
        return self(Progress()), self.end

    def stage(self, progress: Progress) -> int:
        """Return 0 on the way, 1 from the end of the ramp on."""
        return int(self.over.reached(progress))

    def begins(self, stage: int) -> str:
        """Return where a stage begins, as text."""
        return str(self.over) if stage else "the start"

    def __repr__(self) -> str:
        return f"linear_ramp(start={self.start}, end={self.end}, over='{self.over}', multiple_of={self.multiple_of})"


def linear_ramp(start: int, end: int, over: object, multiple_of: int = 1) -> Schedule:
    """Make a schedule that goes from `start` to `end` in a straight line.

    On the way it is rounded down to a multiple of `multiple_of`, and is that at least. With `start` and `end` multiples
    of it, this is Megatron's ramp: each of the multiples between them holds for an equal part of `over`.

    Args:
        start: what a step on one device holds at first.
        end: what it holds from `over` on, not rounded; may be below `start`.
        over: how long the way is, from the start of training, such as ``0.5ep`` or ``1.5e6tok``.
        multiple_of: such as the rows of a micro-batch, so that each step divides into whole ones.

    Returns:
        ``rule(progress) -> batch``.

    Raises:
        SettingError: a number is not whole or below 1; `multiple_of` is above both ends; `over` cannot be read or is 0.
    """
    first, last, multiple = _batch("start", start), _batch("end", end), _batch("multiple_of", multiple_of)
    if multiple > max(first, last):
        raise SettingError(f"{KEY}.multiple_of", multiple_of, f"must not be above start={first} and end={last}")
    return _LinearRamp(first, last, _length(over), multiple)


@dataclass(frozen=True, repr=False)
class _RampByDoubling:
    start: int
    end: int
    over: Duration

    def __call__(self, progress: Progress) -> int:
        return self.start << self.stage(progress)

    @property
    def batches(self) -> tuple[int, ...]:
        """What a step holds in each stage."""
        return tuple(self.start << stage for stage in range(self._doublings + 1))

    def stage(self, progress: Progress) -> int:
        """Return the number of the stage of a step at this progress, from 0."""
        return min(self._doublings, math.floor(self.over.share(progress) * self._doublings))

    def begins(self, stage: int) -> str:
        """Return where a stage begins, as text."""
        if stage in (0, self._doublings):
            return str(self.over) if stage else "the start"
        return f"{stage}/{self._doublings} of {self.over}"

    @property
    def _doublings(self) -> int:
        return (self.end // self.start).bit_length() - 1

    def __repr__(self) -> str:
        return f"ramp_by_doubling(end={self.end}, over='{self.over}', start={self.start})"


def ramp_by_doubling(end: int, over: object, start: int | None = None) -> Schedule:
    """Make a schedule of stages that divide the final batch, each half of the next, as bert24's (ModernBERT's) ramp.

    `over` is divided evenly over the stages below `end`: from 1024 to 4096 over ``2ep`` the first epoch has 1024, the
    second 2048, and all later ones 4096.

    Args:
        end: what a step on one device holds from `over` on.
        over: how long the ramp is, from the start of training.
        start: what it holds at first: `end` halved once or more. None starts from the smallest batch there is: `end`
            halved for as long as it is even.

    Returns:
        ``rule(progress) -> batch``.

    Raises:
        SettingError: `end` is odd or not whole; `start` is none of its halves; `over` cannot be read or is 0.
    """
    last = _batch("end", end)
    halves = [last]
    while halves[0] % 2 == 0:
        halves.insert(0, halves[0] // 2)
    choices = ", ".join(map(str, halves[:-1]))
    if not choices:
        raise SettingError(f"{KEY}.end", end, "it is odd, so no smaller batch doubles up to it; give an even number")
    first = halves[0] if start is None else _batch("start", start)
    if first == last:
        raise SettingError(f"{KEY}.start", start, f"it is end already, which makes no ramp; give one of {choices}")
    if first not in halves:
        raise SettingError(f"{KEY}.start", start, f"doubling it never gives end={end}; give one of {choices}")
    return _RampByDoubling(first, last, _length(over))


@dataclass(frozen=True, repr=False)
class _ByNoiseScale:
    start: int
    maximum: int | None
    factor: float
    margin: float
    every: int
    monotone: bool
    needs_noise_scale: ClassVar[bool] = True

    def __call__(self, progress: Progress) -> int:
        now, noise = progress.batch or self.start, progress.noise_scale
        # an estimate that is not above 0 shows that the gradient is lost in the noise, and no more
        if noise is None or not 0 < noise < math.inf or not progress.steps or progress.steps % self.every:
            return now
        if noise > now * (1 + self.margin):
            grown = max(now + 1, math.floor(now * self.factor + 0.5))
            return grown if self.maximum is None else min(grown, max(now, self.maximum))
        shrunk = max(1, min(now - 1, math.floor(now / self.factor + 0.5)))
        # the second is implied but for rounding: what is given up must not be requested again at once
        is_below = noise < now / ((1 + self.margin) * self.factor) and noise <= shrunk * (1 + self.margin)
        if not self.monotone and is_below:
            return shrunk
        return now

    def __repr__(self) -> str:
        return (
            f"by_noise_scale(start={self.start}, maximum={self.maximum}, factor={self.factor}, margin={self.margin}, "
            f"every={self.every}, monotone={self.monotone})"
        )


def by_noise_scale(
    start: int,
    maximum: int | None = None,
    factor: float = 2.0,
    margin: float = 0.5,
    every: int = 10,
    monotone: bool = True,
) -> Schedule:
    """Make a schedule that follows the measured gradient noise scale, with hysteresis.

    Near the simple noise scale a batch trades time for data about evenly; well below it, a larger batch saves steps at
    hardly any cost in samples (McCandlish et al. 2018, arXiv 1812.06162, sections 2.2 and 2.3).

    At each `every`-th step the batch is multiplied by `factor` where the noise scale is above batch x (1 + margin); with
    ``monotone=False`` it is divided by it where the noise scale is below batch / ((1 + margin) x factor). Between the
    two it is kept, and also while nothing has been measured. A scale whose highest value is less than (1 + margin) squared
    times its lowest never makes the batch go up and down again.

    Args:
        start: rows that a step on one device holds at first.
        maximum: rows that it never passes; None leaves that to the bound.
        factor: of one change, above 1.
        margin: how far the noise scale must be beyond the batch, 0 or more; 0.5 lies near the middle, by ratio, between
            two batches of which one is twice the other.
        every: optimizer steps from one decision to the next, which let the average follow the batch before.
        monotone: whether the batch only grows.

    Returns:
        ``rule(progress) -> rows``. Noise and batch are in rows on one device.

    Raises:
        SettingError: a number is out of range, or `start` above `maximum`.
    """
    first = _batch("start", start)
    most = None if maximum is None else _batch("maximum", maximum)
    if most is not None and first > most:
        raise SettingError(f"{KEY}.maximum", maximum, f"must be start={first} or more")
    for name, value, least in (("factor", factor, 1), ("margin", margin, 0)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value < math.inf or (name == "factor" and value == 1):
            what = "above 1, such as 2.0" if name == "factor" else "0 or more, such as 0.5"
            raise SettingError(f"{KEY}.{name}", value, f"must be a number {what}")
    steps_between = _every(f"{KEY}.every", every, "optimizer steps")
    if not isinstance(monotone, bool):
        raise SettingError(f"{KEY}.monotone", monotone, "give True or False")
    return _ByNoiseScale(first, most, float(factor), float(margin), steps_between, monotone)


# --- increments ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class _AtEpochs:
    additions: Mapping[int, int]

    def __call__(self, epoch: int, batch_size: int) -> int:
        return self.additions.get(epoch, 0)

    def __repr__(self) -> str:
        return f"at_epochs({self.additions})"


def at_epochs(additions: Mapping[int | str, int]) -> Increment:
    """Make an increment that adds rows at the start of given epochs.

    Args:
        additions: epoch, counted from 0, to the rows to add at its start, as in ``{1: 8, 2: 16}``.

    Returns:
        ``f(epoch, batch_size) -> rows to add``.

    Raises:
        SettingError: no epoch is given, one is given twice, or a number is not whole or below 0.
    """
    key = f"{INCREMENT_KEY}.additions"
    if not isinstance(additions, Mapping) or not additions:
        raise SettingError(key, additions, "give rows to add by epoch, such as {1: 8, 2: 16}")
    by_epoch: dict[int, int] = {}
    for given_epoch, given_rows in additions.items():
        # Digits as text: keys of a mapping that came through JSON or the command line.
        is_text = isinstance(given_epoch, str) and given_epoch.isascii() and given_epoch.isdigit()
        epoch = int(given_epoch) if is_text else whole_number(given_epoch)
        rows = whole_number(given_rows)
        if epoch is None or epoch < 0:
            raise SettingError(key, additions, f"the epoch {given_epoch!r} must be a whole number, 0 or more")
        if rows is None or not 0 <= rows <= MOST_ROWS:
            raise SettingError(
                key, additions, f"the {given_rows!r} rows of epoch {epoch} must be a whole number, 0 to {MOST_ROWS}"
            )
        if epoch in by_epoch:
            raise SettingError(key, additions, f"epoch {epoch} is given twice")
        by_epoch[epoch] = rows
    return _AtEpochs(dict(sorted(by_epoch.items())))


@dataclass(frozen=True, repr=False)
class _Geometric:
    factor: float
    every: int

    def __call__(self, epoch: int, batch_size: int) -> int:
        if epoch == 0 or epoch % self.every != 0:
            return 0
        return max(1, math.floor(batch_size * self.factor + 0.5) - batch_size)

    def __repr__(self) -> str:
        return f"geometric(factor={self.factor}, every={self.every})"


def geometric(factor: float, *, every: int = 1) -> Increment:
    """Make an increment that multiplies the batch size.

    At the start of each `every`-th epoch but epoch 0 the batch size becomes `factor` times itself, rounded to the
    nearest row, a half up; it grows by one row at least, so that a small batch times a small factor grows too.

    Args:
        factor: above 1.
        every: epochs from one multiplication to the next, 1 or more.

    Returns:
        ``f(epoch, batch_size) -> rows to add``.

    Raises:
        SettingError: `factor` is not a finite number above 1, or `every` not a whole number of 1 or more.
    """
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 < factor < math.inf:
        raise SettingError(f"{INCREMENT_KEY}.factor", factor, "must be a number above 1, such as 2.0")
    return _Geometric(factor=float(factor), every=_every(f"{INCREMENT_KEY}.every", every, "epochs"))


# --- checks of arguments --------------------------------------------------------------------------------------------


def _listed(name: str, values: object, example: str) -> list[object]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise SettingError(f"{KEY}.{name}", values, f"give a list, such as {example}")
    return list(values)


def _batch(name: str, value: object) -> int:
    number = whole_number(value)
    if number is None or not 1 <= number <= MOST_ROWS:
        raise SettingError(f"{KEY}.{name}", value, f"must be a whole number, 1 to {MOST_ROWS}")
    return number


def _length(over: object) -> Duration:
    duration = parse_duration(over, key=f"{KEY}.over")
    if duration.amount == 0:
        raise SettingError(f"{KEY}.over", over, "it must be above 0")
    return duration


def _every(key: str, value: object, unit: str) -> int:
    number = whole_number(value)
    if number is None or number < 1:
        raise SettingError(key, value, f"must be a whole number of {unit}, 1 or more")
    return number
