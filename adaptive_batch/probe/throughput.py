"""Finds the layout and size of micro-batches that train the most real tokens a second.

The largest size that fits is a bound and no aim: from some size on, more tokens at once are hardly
faster, while rows of uneven lengths are padded more. A step has the same rows in any layout, so the
time of its micro-batches decides. A few sizes of each layout run the same steps in turns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from statistics import median

from adaptive_batch._util import format_bytes, is_emulated
from adaptive_batch.data import (
    MicroBatch,
    MicroBatchLayout,
    MicroBatchLimit,
    MicroBatchTime,
    micro_batches,
)

log = logging.getLogger("adaptive_batch")

OBJECTIVES = ("throughput", "largest")

# Sizes of each layout that are timed, as shares of the largest that may fit.
_SHARES = (0.25, 0.5, 0.75, 1.0)
# Turns in which they run: the fewest are enough where the two fastest of each size differ by no
# more than this share, as on a machine without other work.
_ROUNDS = 3
_MOST_ROUNDS = 7
_REPRODUCED = 0.03
# Of two sizes of one layout whose times differ by less, the smaller leaves memory free.
_ALIKE = 0.01


def needs_times(objective: str) -> bool:
    """Return whether micro-batches are timed for an objective. `adaptive-batch emulate` has no
    times: there the largest that fits is taken.
    """
    return objective == "throughput" and not is_emulated()


@dataclass(frozen=True)
class TimedTrial:
    """A layout and a limit that were timed.

    Attributes:
        kind: the layout's kind.
        limit: the limit of a micro-batch.
        tokens_per_second: real tokens of a device, the optimizer's step included.
        padding: share of padding in the tokens that were run.
        peak_bytes: the peak of the largest such micro-batch; None where it was not tried.
    """

    kind: str
    limit: MicroBatchLimit
    tokens_per_second: float
    padding: float
    peak_bytes: int | None = None


# Fields that results of 0.1.0 lack.
NEWER_FIELDS = ("compile_seconds", "counts_eager")


@dataclass(frozen=True)
class Throughput:
    """The fastest layout and limit, and the trials that showed it.

    Attributes:
        kind: the layout's kind.
        limit: the limit of a micro-batch.
        tokens_per_second: the rate of its trial.
        time: the time of a micro-batch in this layout, as the trials have shown it.
        trials: the trials in their order.
        seconds: the seconds that the search took.
        compile_seconds: the seconds of it in which a compiled model was compiled for trials, which
            no rate has in it.
    """

    kind: str
    limit: MicroBatchLimit
    tokens_per_second: float
    time: MicroBatchTime
    trials: tuple[TimedTrial, ...]
    seconds: float = 0.0
    compile_seconds: float = 0.0

    def with_peak(self, peak_bytes: int | None) -> Throughput:
        """Return the same result, with this peak in the trial of the fastest choice."""
        trials = tuple(
            replace(trial, peak_bytes=peak_bytes)
            if (trial.kind, trial.limit) == (self.kind, self.limit)
            else trial
            for trial in self.trials
        )
        return replace(self, trials=trials)

    def table(self) -> str:
        """Return aligned text: a line for each trial, then the fastest choice."""
        lines = [f"{'layout':>8} {'at once':>15} {'peak':>10} {'padding':>8} {'tokens/s':>9}"]
        for trial in self.trials:
            at_once = f"{trial.limit.amount:,} {trial.limit.unit}"
            peak = "-" if trial.peak_bytes is None else format_bytes(trial.peak_bytes)
            lines.append(
                f"{trial.kind:>8} {at_once:>15} {peak:>10} {trial.padding:>8.1%}"
                f" {trial.tokens_per_second:>9,.0f}"
            )
        if self.compile_seconds:
            lines.append(f"compiled before: {self.compile_seconds:.0f} s, in no trial's time")
        return "\n".join([*lines, f"fastest: {self.kind}, up to {_at_once(self.limit)}"])


Pieces = tuple[list[MicroBatch], MicroBatchLayout]

# A layout and a limit.
Choice = tuple[MicroBatchLayout, MicroBatchLimit]


class FastestSearch:
    """Finds the layout and the limit whose micro-batches take least time for the same steps.

    Args:
        run: function that runs the steps once in each of some layouts, and returns the seconds of
            each micro-batch, None where one does not fit. Rows are numbered through all steps.
        steps: tokens of each row of each step.
        layouts: the layouts to choose from.
        limits: the smallest and the largest limit of a layout.
        step_seconds: the seconds that a step takes beside its micro-batches.
    """

    def __init__(
        self,
        run: Callable[[list[Pieces]], list[list[float] | None]],
        *,
        steps: Sequence[Sequence[int]],
        layouts: Sequence[MicroBatchLayout],
        limits: Callable[[MicroBatchLayout], tuple[MicroBatchLimit, MicroBatchLimit]],
        step_seconds: float = 0.0,
    ) -> None:
        self._run = run
        self._lengths = [length for lengths in steps for length in lengths]
        numbers = count()
        self._steps = [[next(numbers) for _ in lengths] for lengths in steps]
        self._layouts = layouts
        self._limits = limits
        self._step_seconds = step_seconds * len(steps)
        self._pieces: dict[Choice, Pieces] = {}
        # At the speed that the machine had as the first choices were timed.
        self._seconds: dict[Choice, float] = {}

    def __call__(self) -> list[Throughput]:
        """Time a few sizes of each layout, and smaller ones while they are faster; return what
        fits, fastest first.
        """
        choices: list[Choice] = []
        for layout in map(self._timed, self._layouts):
            smallest, largest = self._limits(layout)
            for share in _SHARES:
                amount = max(smallest.amount, int(share * largest.amount))
                choices += self._new((layout, replace(largest, amount=amount)))
        while choices:
            self._time(choices)
            choices = self._smaller()
        trials = tuple(
            TimedTrial(choice[0].kind, choice[1], self._rate(choice), self._padding(choice))
            for choice in self._seconds
        )
        return [
            Throughput(layout.kind, limit, self._rate((layout, limit)), layout.time, trials)
            for layout, limit in self._ranked()
        ]

    def _timed(self, layout: MicroBatchLayout) -> MicroBatchLayout:
        """Return a layout with the time by which it groups rows: half of the rows run in the
        smallest micro-batches and half in the largest, which shows what part of the time is fixed.
        """
        if not (layout.sorts and layout.pads):
            return layout
        smallest, largest = self._limits(layout)
        cuts = [
            self._cut(layout, limit, every=slice(first, None, 2))
            for first, limit in enumerate((smallest, largest))
        ]
        small, large = self._medians(cuts)
        small_tokens, large_tokens = (
            sum(piece.run_tokens for piece in pieces) for pieces, _ in cuts
        )
        fewer = len(cuts[0][0]) * large_tokens - len(cuts[1][0]) * small_tokens
        if not (small and large and fewer > 0):
            return layout
        difference = fewer / small_tokens / large_tokens
        fixed = max(0.0, (small / small_tokens - large / large_tokens) / difference)
        token = small / small_tokens - fixed * len(cuts[0][0]) / small_tokens
        return replace(layout, time=MicroBatchTime(fixed, token=max(token, 1e-12)))

    def _cut(
        self, layout: MicroBatchLayout, limit: MicroBatchLimit, every: slice = slice(None)
    ) -> Pieces:
        """Return the micro-batches of the steps, or of some rows of each."""
        pieces = []
        for numbers in self._steps:
            numbers = numbers[every]
            for piece in micro_batches([self._lengths[row] for row in numbers], limit, layout):
                pieces.append(replace(piece, rows=[numbers[row] for row in piece.rows]))
        return pieces, layout

    def _new(self, choice: Choice) -> list[Choice]:
        """Return a choice, unless it cuts the steps as an earlier one does."""
        pieces = self._cut(*choice)
        if pieces in self._pieces.values():
            return []
        self._pieces[choice] = pieces
        return [choice]

    def _medians(self, cuts: Sequence[Pieces]) -> list[float | None]:
        """Return the seconds of each cut, None where it does not fit.

        Cuts run in turns. A turn that was slower than the fastest one counts as much faster.
        """
        rounds: dict[int, list[float]] = {place: [] for place in range(len(cuts))}
        for number in range(_MOST_ROUNDS):
            if number >= _ROUNDS and all(map(_is_reproduced, rounds.values())):
                break
            timings = self._run([cuts[place] for place in rounds])
            rounds = {
                place: [*rounds[place], sum(seconds)]
                for place, seconds in zip(rounds, timings, strict=True)
                if seconds is not None
            }
        of_turns = [sum(turn) for turn in zip(*rounds.values(), strict=True)]
        seconds = {
            place: median(s * min(of_turns) / turn for s, turn in zip(own, of_turns, strict=True))
            for place, own in rounds.items()
        }
        return [seconds.get(place) for place in range(len(cuts))]

    def _time(self, choices: Sequence[Choice]) -> None:
        """Time choices; one that was timed before shows how much slower the machine is now."""
        medians = self._medians([self._pieces[choice] for choice in choices])
        seconds = {
            choice: median
            for choice, median in zip(choices, medians, strict=True)
            if median is not None
        }
        known = [choice for choice in seconds if choice in self._seconds]
        speed = [self._seconds[choice] / seconds[choice] for choice in known]
        for choice in [choice for choice in seconds if choice not in known]:
            self._seconds[choice] = seconds[choice] * min(speed, default=1.0)
            log.info(
                "timed %s, up to %s: %.0f tokens/s",
                choice[0].kind,
                _at_once(choice[1]),
                self._rate(choice),
            )

    def _smaller(self) -> list[Choice]:
        """Return half of the smallest size of each layout of which nothing fits, or of the fastest
        layout, if that is its fastest; beside the fastest choice.
        """
        fastest = sorted(self._seconds, key=self._seconds.__getitem__)[:1]
        smaller: list[Choice] = []
        for layout in dict.fromkeys(layout for layout, _ in self._pieces):
            choices = [choice for choice in self._pieces if choice[0] == layout]
            smallest = min(choices, key=_amount)
            half = replace(smallest[1], amount=_amount(smallest) // 2)
            fits = any(choice in self._seconds for choice in choices)
            is_worth = [smallest] == fastest or not fits
            if is_worth and half.amount >= self._limits(layout)[0].amount:
                smaller += self._new((layout, half))
        return [*smaller, *fastest] if smaller else []

    def _ranked(self) -> list[Choice]:
        """Return the choices that fit, fastest first; the smaller of those that are alike."""
        ranked = sorted(self._seconds, key=self._seconds.__getitem__)
        alike = [
            choice
            for choice in ranked
            if choice[0] == ranked[0][0]
            and self._seconds[choice] <= (1 + _ALIKE) * self._seconds[ranked[0]]
        ]
        first = min(alike, key=_amount, default=None)
        return sorted(ranked, key=lambda choice: choice != first)

    def _rate(self, choice: Choice) -> float:
        """Return the real tokens a second of a choice that was timed."""
        return sum(self._lengths) / (self._seconds[choice] + self._step_seconds)

    def _padding(self, choice: Choice) -> float:
        """Return the share of padding in the tokens of a choice."""
        run_tokens = sum(piece.run_tokens for piece in self._pieces[choice][0])
        return 1 - sum(self._lengths) / run_tokens


def _is_reproduced(rounds: Sequence[float]) -> bool:
    """Return whether the two fastest rounds took about as long."""
    fastest, second = sorted(rounds)[:2]
    return second <= (1 + _REPRODUCED) * fastest


def _amount(choice: Choice) -> int:
    return choice[1].amount


def _at_once(limit: MicroBatchLimit) -> str:
    return f"{limit.amount:,} {limit.unit} at once"
