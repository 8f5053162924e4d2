"""Search for the layout and size of micro-batches that train the most real tokens per second.

The largest size that fits is rarely the fastest: beyond some size, more tokens at once hardly help,
while uneven rows need more padding. A few sizes of each layout run the same steps in turn, and the
time of their micro-batches decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from operator import mul
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

# Timed sizes of each layout, as shares of its largest one.
_SHARES = (0.25, 0.5, 0.75, 1.0)
# Minimum and maximum number of rounds. The minimum is enough if the two fastest rounds of each size
# differ by at most this share, as on an idle machine.
_ROUNDS = 3
_MOST_ROUNDS = 7
_REPRODUCED = 0.03
# If the times of two sizes of a layout differ by less than this share, the smaller one is chosen.
_TIME_TOLERANCE = 0.01


def needs_times(objective: str) -> bool:
    """Return whether an objective times micro-batches; under `adaptive-batch emulate` none does."""
    return objective == "throughput" and not is_emulated()


@dataclass(frozen=True)
class TimedTrial:
    """Timing of a layout and a limit.

    Attributes:
        kind: kind of the layout.
        limit: limit of a micro-batch.
        tokens_per_second: real tokens per second on one device, the optimizer's step included.
        padding: share of padding in the processed tokens.
        peak_bytes: peak of the largest such micro-batch; None if it was not tried.
    """

    kind: str
    limit: MicroBatchLimit
    tokens_per_second: float
    padding: float
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Throughput:
    """The fastest layout and limit, with all timings.

    Attributes:
        kind: kind of the layout.
        limit: limit of a micro-batch.
        tokens_per_second: rate of its trial.
        time: measured time model of a micro-batch in this layout.
        trials: timings in order.
        seconds: duration of the search.
        compile_seconds: compilation time within `seconds`, excluded from the rates.
    """

    kind: str
    limit: MicroBatchLimit
    tokens_per_second: float
    time: MicroBatchTime
    trials: tuple[TimedTrial, ...]
    seconds: float = 0.0
    compile_seconds: float = 0.0

    def with_peak(self, peak_bytes: int | None) -> Throughput:
        """Return the result with the peak of the fastest choice set."""
        trials = tuple(
            replace(trial, peak_bytes=peak_bytes)
            if (trial.kind, trial.limit) == (self.kind, self.limit)
            else trial
            for trial in self.trials
        )
        return replace(self, trials=trials)

    def table(self) -> str:
        """Return the timings and the fastest choice as aligned text."""
        lines = [f"{'layout':>8} {'at once':>15} {'peak':>10} {'padding':>8} {'tokens/s':>9}"]
        for trial in self.trials:
            at_once = f"{trial.limit.amount:,} {trial.limit.unit}"
            peak = "-" if trial.peak_bytes is None else format_bytes(trial.peak_bytes)
            lines.append(
                f"{trial.kind:>8} {at_once:>15} {peak:>10} {trial.padding:>8.1%}"
                f" {trial.tokens_per_second:>9,.0f}"
            )
        if self.compile_seconds:
            lines.append(f"compilation: {self.compile_seconds:.0f} s, excluded from the rates")
        return "\n".join([*lines, f"fastest: {self.kind}, up to {_at_once(self.limit)}"])


# Micro-batches of all steps, and their layout.
Pieces = tuple[list[MicroBatch], MicroBatchLayout]

# A layout and a limit.
Choice = tuple[MicroBatchLayout, MicroBatchLimit]


class FastestSearch:
    """Finds the layout and limit whose micro-batches take the least time for the same steps.

    Args:
        run: function that runs the steps once in each of the given layouts and returns the seconds
            of their micro-batches, or None for a layout that does not fit. Rows are numbered
            through all steps.
        steps: tokens of each row of each step.
        layouts: layouts to choose from.
        limits: function that returns the smallest and the largest limit of a layout.
        step_seconds: time of a step outside its micro-batches.
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
        # Normalized to the speed of the machine during the first timings.
        self._seconds: dict[Choice, float] = {}

    def __call__(self) -> list[Throughput]:
        """Time a few sizes of each layout, and smaller ones while they are faster.

        Returns:
            The choices that fit, fastest first.
        """
        choices: list[Choice] = []
        for layout in map(self._with_time_model, self._layouts):
            smallest, largest = self._limits(layout)
            for share in _SHARES:
                amount = max(smallest.amount, int(share * largest.amount))
                choices += self._add((layout, replace(largest, amount=amount)))
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

    def _with_time_model(self, layout: MicroBatchLayout) -> MicroBatchLayout:
        """Return a layout with the fixed time of a micro-batch and its time per token.

        They are measured with half of the rows in the smallest micro-batches and half in the
        largest. A layout that needs no time model, or cannot be measured, is returned unchanged.
        """
        if not (layout.sorts and layout.pads):
            return layout
        smallest, largest = self._limits(layout)
        cuts = [
            self._cut(layout, limit, rows=slice(first, None, 2))
            for first, limit in enumerate((smallest, largest))
        ]
        small, large = self._medians(cuts)
        small_tokens, large_tokens = (
            sum(piece.run_tokens for piece in pieces) for pieces, _ in cuts
        )
        # Solve seconds = fixed * micro_batches + token * tokens for both splits.
        small_number, large_number = (len(pieces) for pieces, _ in cuts)
        determinant = small_number * large_tokens - large_number * small_tokens
        # A split may not fit, and both may be alike.
        if not (small and large and determinant > 0):
            return layout
        fixed = max(0.0, (small * large_tokens - large * small_tokens) / determinant)
        token = (small - fixed * small_number) / small_tokens
        return replace(layout, time=MicroBatchTime(fixed, token=max(token, 1e-12)))

    def _cut(
        self, layout: MicroBatchLayout, limit: MicroBatchLimit, rows: slice = slice(None)
    ) -> Pieces:
        """Split the steps, or a slice of the rows of each step, into micro-batches."""
        pieces = []
        for step in self._steps:
            numbers = step[rows]
            for piece in micro_batches([self._lengths[row] for row in numbers], limit, layout):
                pieces.append(replace(piece, rows=[numbers[row] for row in piece.rows]))
        return pieces, layout

    def _add(self, choice: Choice) -> list[Choice]:
        """Add a choice and return [choice]; return [] if an earlier one has the same
        micro-batches.
        """
        pieces = self._cut(*choice)
        if pieces in self._pieces.values():
            return []
        self._pieces[choice] = pieces
        return [choice]

    def _medians(self, cuts: Sequence[Pieces]) -> list[float | None]:
        """Return the median seconds of each split; None if it does not fit.

        The splits run in rounds. Each round is normalized to the speed of the fastest round.
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
        round_seconds = [sum(timings) for timings in zip(*rounds.values(), strict=True)]
        speeds = [min(round_seconds) / seconds for seconds in round_seconds]
        medians = {place: median(map(mul, seconds, speeds)) for place, seconds in rounds.items()}
        return [medians.get(place) for place in range(len(cuts))]

    def _time(self, choices: Sequence[Choice]) -> None:
        """Time choices. Earlier choices among them calibrate the speed of the machine."""
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
        """Return smaller sizes to time and the fastest choice, which calibrates the speed; [] if
        there are none.

        Halve the smallest size of a layout if it is the fastest choice, or if no size of it fits.
        """
        fastest = sorted(self._seconds, key=self._seconds.__getitem__)[:1]
        smaller: list[Choice] = []
        for layout in dict.fromkeys(layout for layout, _ in self._pieces):
            choices = [choice for choice in self._pieces if choice[0] == layout]
            smallest = min(choices, key=_amount)
            half = replace(smallest[1], amount=_amount(smallest) // 2)
            fits = any(choice in self._seconds for choice in choices)
            may_be_faster = [smallest] == fastest or not fits
            if may_be_faster and half.amount >= self._limits(layout)[0].amount:
                smaller += self._add((layout, half))
        return [*smaller, *fastest] if smaller else []

    def _ranked(self) -> list[Choice]:
        """Return the choices that fit, fastest first. The first one is the smallest of those that
        are about as fast as the fastest.
        """
        ranked = sorted(self._seconds, key=self._seconds.__getitem__)
        as_fast = [
            choice
            for choice in ranked
            if choice[0] == ranked[0][0]
            and self._seconds[choice] <= (1 + _TIME_TOLERANCE) * self._seconds[ranked[0]]
        ]
        best = min(as_fast, key=_amount, default=None)
        # False sorts before True.
        return sorted(ranked, key=lambda choice: choice != best)

    def _rate(self, choice: Choice) -> float:
        """Return the real tokens per second of a timed choice."""
        return sum(self._lengths) / (self._seconds[choice] + self._step_seconds)

    def _padding(self, choice: Choice) -> float:
        """Return the share of padding in the tokens of a choice."""
        run_tokens = sum(piece.run_tokens for piece in self._pieces[choice][0])
        return 1 - sum(self._lengths) / run_tokens


def _is_reproduced(rounds: Sequence[float]) -> bool:
    """Return whether the two fastest rounds took about the same time."""
    fastest, second = sorted(rounds)[:2]
    return second <= (1 + _REPRODUCED) * fastest


def _amount(choice: Choice) -> int:
    return choice[1].amount


def _at_once(limit: MicroBatchLimit) -> str:
    return f"{limit.amount:,} {limit.unit} at once"
