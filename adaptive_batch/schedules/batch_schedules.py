"""Ready-made schedules and increments, as YAML names them (docs/configuration.md): pure, so a
resumed run continues unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import ClassVar, TypeGuard

from adaptive_batch._util import check_bool
from adaptive_batch.errors import SettingError

from .batch_rules import INCREMENT_KEY, KEY, MOST_ROWS, Increment, Schedule, at_most, whole_number
from .progress import Duration, Progress, parse_duration


@dataclass(frozen=True, repr=False)
class _Rule:
    # The call that makes it.
    made_by: str

    def __repr__(self) -> str:
        return self.made_by


@dataclass(frozen=True, repr=False)
class Stages(_Rule):
    """A schedule of stages of one batch each."""

    batches: tuple[int, ...]
    # Each stage but the last ends at this part of a duration.
    ends: tuple[tuple[Fraction, Duration], ...]

    def __call__(self, progress: Progress) -> int:
        return self.batches[self.stage(progress)]

    def stage(self, progress: Progress) -> int:
        """Return the number of the stage of a step at this progress, from 0."""
        return sum(duration.share(progress) >= part for part, duration in self.ends)

    @property
    def reads_tokens(self) -> bool:
        """Whether it asks for the tokens that are trained."""
        return any(duration.unit == "tok" for _, duration in self.ends)

    def unused(
        self, steps: Sequence[Progress], *, most_rows: int | None, maximum: int | None
    ) -> list[str]:
        """Return a line for each stage that training ends before.

        Args:
            steps: progress before the first step of each stage that is ahead; stages that lie
                before the first of them are not checked.
            most_rows: the most rows of a step on one device that an epoch has and does not drop;
                None for no limit.
            maximum: what the batch is cut to; None for no limit.

        Raises:
            SettingError: a step of a stage would have more rows than an epoch; or a stage is over
                before the step that is running at its beginning.
        """
        for batch in self.batches:
            rows = at_most(batch, maximum)
            if most_rows is not None and rows > most_rows:
                remedy = (
                    f"{rows} rows on each device are more than an epoch has for it, and drop_last"
                    f" drops such a step; ask for {most_rows} or fewer, or set drop_last=False"
                )
                raise SettingError(KEY, batch, remedy)
        used = {self.stage(progress) for progress in steps}
        number = len(self.batches)
        lines = []
        for stage in sorted(set(range(min(used, default=number), number)) - used):
            missing = (
                f"no step has batch {self.batches[stage]}, asked for from {self.begins(stage)} on"
            )
            if stage < max(used):
                remedy = (
                    f"{missing}: that is over before the next step begins; make this stage longer,"
                    " or leave it out"
                )
                raise SettingError(KEY, self, remedy)
            lines.append(f"{missing}: training ends before it")
        return lines

    def begins(self, stage: int) -> str:
        """Return where a stage begins, as text."""
        if stage == 0:
            return "the start"
        part, duration = self.ends[stage - 1]
        if part == 1:
            return str(duration)
        return f"{part} of {duration}"


def steps(batch_sizes: Sequence[int], thresholds: Sequence[object]) -> Schedule:
    """Make a schedule of stages: each batch size holds until its threshold is reached, the last one
    to the end.

    Args:
        batch_sizes: what a step on one device holds in each stage; they may go down.
        thresholds: where each stage but the last ends, counted from the start of training, as in
            ``["1ep", "2ep"]``: rising, and all of one unit, as it is not known before training
            which of ``1ep`` and ``200ba`` comes first.

    Raises:
        SettingError: a size is not whole or below 1; a threshold cannot be read, is 0, not above
            the one before, or of another unit; there is not one threshold fewer than sizes.
    """
    key = f"{KEY}.thresholds"
    for name, values in (("batch_sizes", batch_sizes), ("thresholds", thresholds)):
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise SettingError(
                f"{KEY}.{name}",
                values,
                "give a list, such as [16, 32] of batch_sizes and [1ep] of thresholds",
            )
    sizes = [_whole(f"{KEY}.batch_sizes", size) for size in batch_sizes]
    ends = [parse_duration(value, key=key) for value in thresholds]
    shown = [str(end) for end in ends]
    if len(ends) != len(sizes) - 1:
        raise SettingError(
            key,
            shown,
            f"{len(sizes)} batch_sizes: give one threshold fewer, where each but the last ends",
        )
    if len({end.unit for end in ends}) > 1:
        raise SettingError(
            key,
            shown,
            "give all in one unit: which of two units comes first is not known beforehand",
        )
    for end, next_end in pairwise(ends):
        if end.amount >= next_end.amount:
            raise SettingError(key, shown, f"they must rise, and {next_end} comes after {end}")
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
        exact = math.floor(self.start + share * (end - self.start))
        return max(self.multiple_of, exact - exact % self.multiple_of)


def linear_ramp(start: int, end: int, over: object, multiple_of: int = 1) -> Schedule:
    """Make a schedule that goes from `start` to `end` in a straight line.

    On the way it is rounded down to a multiple of `multiple_of`, and is that at least. With `start`
    and `end` multiples of it, this is Megatron's ramp: each of the multiples between them holds for
    an equal part of `over`.

    Args:
        start: what a step on one device holds at first.
        end: what it holds from `over` on, not rounded; may be below `start`.
        over: how long the way is, from the start of training, such as ``0.5ep`` or ``1.5e6tok``.
        multiple_of: such as the rows of a micro-batch, so that each step divides into whole ones.

    Raises:
        SettingError: a number is not whole or below 1; `multiple_of` is above both ends; `over`
            cannot be read or is 0.
    """
    first, last, multiple = (
        _whole(f"{KEY}.{name}", value)
        for name, value in (("start", start), ("end", end), ("multiple_of", multiple_of))
    )
    if multiple > max(first, last):
        raise SettingError(
            f"{KEY}.multiple_of", multiple_of, f"must not be above start={first} and end={last}"
        )
    duration = parse_duration(over, key=f"{KEY}.over")
    made_by = f"linear_ramp(start={first}, end={last}, over='{duration}', multiple_of={multiple})"
    batches = (max(multiple, first - first % multiple), last)
    return _LinearRamp(made_by, batches, ((Fraction(1), duration),), first, multiple)


def ramp_by_doubling(end: int, over: object, start: int | None = None) -> Schedule:
    """Make a schedule of stages that divide the final batch, each half of the next, as bert24's
    (ModernBERT's) ramp.

    `over` is divided evenly over the stages below `end`: from 1024 to 4096 over ``2ep`` the first
    epoch has 1024, the second 2048, and all later ones 4096.

    Args:
        end: what a step on one device holds from `over` on.
        over: how long the ramp is, from the start of training.
        start: what it holds at first: `end` halved once or more. None starts from the smallest
            batch there is: `end` halved for as long as it is even.

    Raises:
        SettingError: `end` is odd or not whole; `start` is none of its halves; `over` cannot be
            read or is 0.
    """
    last = _whole(f"{KEY}.end", end)
    halves = [last]
    while halves[0] % 2 == 0:
        halves.insert(0, halves[0] // 2)
    if len(halves) == 1:
        raise SettingError(
            f"{KEY}.end",
            end,
            "it is odd, so no smaller batch doubles up to it; give an even number",
        )
    first = halves[0]
    if start is not None:
        first = _whole(f"{KEY}.start", start)
    if first not in halves[:-1]:
        choices = ", ".join(map(str, halves[:-1]))
        raise SettingError(
            f"{KEY}.start", start, f"doubling it never gives end={end}; give one of {choices}"
        )
    duration = parse_duration(over, key=f"{KEY}.over")
    batches = tuple(halves[halves.index(first) :])
    ends = tuple((Fraction(stage, len(batches) - 1), duration) for stage in range(1, len(batches)))
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
        now = progress.batch or self.start
        noise = progress.noise_scale
        # an estimate that is not above 0 shows that the gradient is lost in the noise, and no more
        if (
            noise is None
            or not 0 < noise < math.inf
            or not progress.steps
            or progress.steps % self.every
        ):
            return now
        if noise > now * (1 + self.margin):
            grown = max(now + 1, math.floor(now * self.factor + 0.5))
            return max(at_most(grown, self.maximum), now)
        if self.monotone:
            return now
        shrunk = max(1, min(now - 1, math.floor(now / self.factor + 0.5)))
        is_below = noise < now / ((1 + self.margin) * self.factor)
        # Implied but for rounding: what is given up must not be requested again at once.
        stays_below = noise <= shrunk * (1 + self.margin)
        return shrunk if is_below and stays_below else now


def by_noise_scale(
    start: int,
    maximum: int | None = None,
    factor: float = 2.0,
    margin: float = 0.5,
    every: int = 10,
    monotone: bool = True,
) -> Schedule:
    """Make a schedule that follows the measured gradient noise scale, with hysteresis.

    Near the simple noise scale a batch trades time for data about evenly; well below it, a larger
    batch saves steps at hardly any cost in samples (McCandlish et al. 2018, arXiv 1812.06162,
    sections 2.2 and 2.3).

    At each `every`-th step the batch is multiplied by `factor` where the noise scale is above batch
    x (1 + margin); with ``monotone=False`` it is divided by it where the noise scale is below batch
    / ((1 + margin) x factor). Between the two it is kept, and also while nothing has been measured.
    A scale whose highest value is less than (1 + margin) squared times its lowest never makes the
    batch go up and down again.

    Args:
        start: rows that a step on one device holds at first.
        maximum: rows that it never passes; None leaves that to the bound.
        factor: of one change, above 1.
        margin: how far the noise scale must be beyond the batch, 0 or more; 0.5 lies near the
            middle, by ratio, between two batches of which one is twice the other.
        every: optimizer steps from one decision to the next, which let the average follow the batch
            before.
        monotone: whether the batch only grows.

    Returns:
        ``rule(progress) -> rows``. Noise and batch are in rows on one device.

    Raises:
        SettingError: a number is out of range, or `start` above `maximum`.
    """
    first = _whole(f"{KEY}.start", start)
    gap = _whole(f"{KEY}.every", every)
    max_rows = None if maximum is None else _whole(f"{KEY}.maximum", maximum)
    if max_rows is not None and first > max_rows:
        raise SettingError(f"{KEY}.maximum", maximum, f"must be start={first} or more")
    factor = _factor(f"{KEY}.factor", factor)
    if not _is_finite(margin) or margin < 0:
        raise SettingError(f"{KEY}.margin", margin, "must be a number 0 or more, such as 0.5")
    check_bool(f"{KEY}.monotone", monotone)
    margin = float(margin)
    made_by = f"by_noise_scale({first}, {max_rows}, {factor=}, {margin=}, every={gap}, {monotone=})"
    return _ByNoiseScale(made_by, first, max_rows, factor, margin, gap, monotone)


@dataclass(frozen=True, repr=False)
class Seesaw(_Rule):
    """What :func:`seesaw` makes; training couples it to the schedule of the rate."""

    factor: float | None
    max_rows: int | None
    start: int = 0
    decay: Callable[[Progress], float] | None = None

    def coupled(self, start: int, decay: Callable[[Progress], float]) -> Seesaw:
        """Return it with the batch that it starts from, and the part of its peak that the rate's
        schedule has at a progress.
        """
        if self.max_rows is not None and start > self.max_rows:
            raise SettingError(
                f"{KEY}.maximum", self.max_rows, f"training starts with {start}; give that or more"
            )
        return replace(self, start=start, decay=decay)

    def __call__(self, progress: Progress) -> int:
        assert self.decay is not None, f"{self} is not coupled to a schedule of the rate"
        # A schedule may end at 0.
        growth = 1 / max(self.decay(progress), 1 / MOST_ROWS)
        # A power of the factor may be missed by its rounding.
        if self.factor is not None:
            growth = self.factor ** math.floor(math.log(growth, self.factor) + 1e-9)
        return min(self.max_rows or MOST_ROWS, math.floor(self.start * growth + 0.5))


def seesaw(factor: float | None = None, maximum: int | None = None) -> Schedule:
    """Make a schedule that grows the batch where the learning rate decays, so that the same data
    take fewer steps.

    Where the rate's schedule has decayed to 1 / a of its peak, a step holds a times the configured
    batch and has 1 / sqrt(a) of the peak rate (Meterez et al. 2025, arXiv 2510.14717, algorithm 1;
    for normalized SGD, and Adam where noise dominates). With

        f(t)  the schedule, at the part t of the data that is trained; a decay takes the data that
              it takes alone
        d(t)  f(t) / the highest f so far, which is 1 in a warm-up: it is not touched
        B0    the configured batch

    a step holds B = round(B0 / d) and has the rate lr x f x sqrt(B / B0), by the global batch that
    it really has. So at each t rate / sqrt(batch) is what f alone gives with B0, whatever cuts B: a
    bound, `maximum`, rounding, the end of an epoch. Before that the rate is peak x sqrt(d); from d
    = B0 / maximum on, as B stays, it decays as f does, and is peak x d x sqrt(maximum / B0).

    Uncut, n steps of B0 become n x the mean of d: half of them for a half cosine to 0, 2 / pi for a
    quarter cosine.

    Args:
        factor: of one growth, above 1: with 2 the batch doubles whenever d has halved, B = B0 x 2
            ** floor(log2(1 / d)), and between two growths the rate follows f, where the paper's
            staircase keeps it. None grows it with each step.
        maximum: what a step on one device never passes; None leaves that to the bound, which cuts
            rows and not `batch_tokens`.

    Raises:
        SettingError: a number is out of range.
    """
    if factor is not None:
        factor = _factor(f"{KEY}.factor", factor, or_null=", or null")
    max_rows = None if maximum is None else _whole(f"{KEY}.maximum", maximum)
    return Seesaw(f"seesaw({factor=}, maximum={max_rows})", factor, max_rows)


def rate_rule(schedule: object, lr_scaling: str) -> str:
    """Return how the rate follows the batch: as configured, but ``sqrt`` with :func:`seesaw`;
    refuse another one beside that.
    """
    if not isinstance(schedule, Seesaw):
        return lr_scaling
    if lr_scaling == "linear":
        remedy = f"{schedule} scales the rate by the square root; leave lr_scaling out"
        raise SettingError("lr_scaling", lr_scaling, remedy)
    return "sqrt"


@dataclass(frozen=True, repr=False)
class _AtEpochs(_Rule):
    additions: Mapping[int, int]

    def __call__(self, epoch: int, batch_size: int) -> int:
        return self.additions.get(epoch, 0)


def at_epochs(additions: Mapping[int | str, int]) -> Increment:
    """Make an increment that adds rows at the start of given epochs.

    Args:
        additions: epoch, counted from 0, to the rows to add at its start, as in ``{1: 8, 2: 16}``.

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
        if is_text:
            epoch: int | None = int(given_epoch)
        else:
            epoch = whole_number(given_epoch)
        rows = whole_number(given_rows)
        if epoch is None or epoch < 0 or rows is None or not 0 <= rows <= MOST_ROWS:
            remedy = (
                f"epoch {given_epoch!r} and rows {given_rows!r} must be whole numbers, 0 or more,"
                f" rows at most {MOST_ROWS}"
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

    At the start of each `every`-th epoch but epoch 0 the batch size becomes `factor` times itself,
    rounded to the nearest row, a half up; it grows by one row at least, so that a small batch times
    a small factor grows too.

    Args:
        factor: above 1.
        every: epochs from one multiplication to the next, 1 or more.

    Raises:
        SettingError: `factor` is not a finite number above 1, or `every` not a whole number of 1 or
            more.
    """
    factor = _factor(f"{INCREMENT_KEY}.factor", factor)
    every = _whole(f"{INCREMENT_KEY}.every", every)
    return _Geometric(f"geometric({factor=}, {every=})", factor, every)


def _whole(key: str, value: object) -> int:
    number = whole_number(value)
    if number is None or not 1 <= number <= MOST_ROWS:
        raise SettingError(key, value, f"must be a whole number, 1 to {MOST_ROWS}")
    return number


def _factor(key: str, value: object, *, or_null: str = "") -> float:
    """Return a number by which a batch is multiplied to grow."""
    if not _is_finite(value) or value <= 1:
        raise SettingError(key, value, f"must be a number above 1, such as 2.0{or_null}")
    return float(value)


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# What each of them may be given in a block of the configuration.
EXAMPLES: Mapping[Callable[..., Schedule | Increment], str] = {
    steps: "batch_sizes: [16, 32], thresholds: [1ep]",
    linear_ramp: "start: 16, end: 64, over: 1ep",
    ramp_by_doubling: "end: 64, over: 1ep",
    by_noise_scale: "start: 16",
    seesaw: "factor: 2",
    at_epochs: "additions: {1: 8}",
    geometric: "factor: 2",
}
