"""Search for the layout and size of micro-batches that train the most real tokens per second.

The largest size that fits is rarely the fastest: beyond some size, more tokens at once hardly help,
while uneven rows need more padding. A few sizes of each layout run the same steps in turn, and the
time of their micro-batches decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from statistics import median
from typing import NamedTuple

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


class Choice(NamedTuple):
    """A layout and a limit."""

    layout: MicroBatchLayout
    limit: MicroBatchLimit


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
        # Rows are numbered through all steps: tokens of each row, and rows of each step.
        self._lengths = [length for lengths in steps for length in lengths]
        ends = accumulate(len(lengths) for lengths in steps)
        self._steps = [
            range(end - len(lengths), end) for end, lengths in zip(ends, steps, strict=True)
        ]
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
                choice = Choice(layout, replace(largest, amount=amount))
                if self._keep_if_new(choice):
                    choices.append(choice)
        while choices:
            self._time(choices)
            choices = self._smaller()
        trials = tuple(
            TimedTrial(choice.layout.kind, choice.limit, self._rate(choice), self._padding(choice))
            for choice in self._seconds
        )
        return [
            Throughput(
                choice.layout.kind, choice.limit, self._rate(choice), choice.layout.time, trials
            )
            for choice in self._ranked()
        ]

    def _with_time_model(self, layout: MicroBatchLayout) -> MicroBatchLayout:
        """Return a layout with the fixed time of a micro-batch and its time per token.

        They are measured with half of the rows in the smallest micro-batches and half in the
        largest. A layout that needs no time model, or cannot be measured, is returned unchanged.
        """
        if not (layout.sorts and layout.pads):
            return layout
        smallest, largest = self._limits(layout)
        # Even and odd rows.
        small = self._cut(Choice(layout, smallest), rows=slice(0, None, 2))
        large = self._cut(Choice(layout, largest), rows=slice(1, None, 2))
        small_seconds, large_seconds = self._medians([small, large])
        small_tokens, large_tokens = _run_tokens(small), _run_tokens(large)
        # Pieces begin with the list of micro-batches.
        small_number, large_number = len(small[0]), len(large[0])
        # Solve seconds = fixed * number + token * tokens for both splits.
        determinant = small_number * large_tokens - large_number * small_tokens
        # A split may not fit, and both may be alike.
        if not (small_seconds and large_seconds and determinant > 0):
            return layout
        fixed = max(
            0.0, (small_seconds * large_tokens - large_seconds * small_tokens) / determinant
        )
        token = (small_seconds - fixed * small_number) / small_tokens
        return replace(layout, time=MicroBatchTime(fixed, token=max(token, 1e-12)))

    def _cut(self, choice: Choice, rows: slice = slice(None)) -> Pieces:
        """Split the steps, or a slice of the rows of each step, into micro-batches."""
        layout, limit = choice
        pieces = []
        for step in self._steps:
            numbers = step[rows]
            for piece in micro_batches([self._lengths[row] for row in numbers], limit, layout):
                # The rows of a piece are positions in its step.
                pieces.append(replace(piece, rows=[numbers[row] for row in piece.rows]))
        return pieces, layout

    def _keep_if_new(self, choice: Choice) -> bool:
        """Keep the micro-batches of a choice; return False if an earlier one has the same."""
        pieces = self._cut(choice)
        if pieces in self._pieces.values():
            return False
        self._pieces[choice] = pieces
        return True

    def _medians(self, cuts: Sequence[Pieces]) -> list[float | None]:
        """Return the median seconds of each split; None if it does not fit.

        The splits run in rounds. Each round is normalized to the speed of the fastest round.
        """
        # Seconds of the rounds of each split that fits, by its index.
        timings: dict[int, list[float]] = {index: [] for index in range(len(cuts))}
        for number in range(_MOST_ROUNDS):
            if number >= _ROUNDS and all(map(_is_reproduced, timings.values())):
                break
            round_timings = self._run([cuts[index] for index in timings])
            timings = {
                index: [*timings[index], sum(seconds)]
                for index, seconds in zip(timings, round_timings, strict=True)
                if seconds is not None
            }
        round_seconds = [sum(seconds) for seconds in zip(*timings.values(), strict=True)]
        speeds = [min(round_seconds) / seconds for seconds in round_seconds]
        medians = {
            index: median(map(mul, seconds_of_rounds, speeds))
            for index, seconds_of_rounds in timings.items()
        }
        return [medians.get(index) for index in range(len(cuts))]

    def _time(self, choices: Sequence[Choice]) -> None:
        """Time choices. Earlier choices among them calibrate the speed of the machine."""
        medians = self._medians([self._pieces[choice] for choice in choices])
        seconds = {
            choice: median
            for choice, median in zip(choices, medians, strict=True)
            if median is not None
        }
        speeds = [
            self._seconds[choice] / seconds[choice] for choice in seconds if choice in self._seconds
        ]
        # A slower machine needs more seconds now than in the first timings.
        speed = min(speeds, default=1.0)
        for choice in seconds:
            if choice not in self._seconds:
                self._seconds[choice] = seconds[choice] * speed
                log.info(
                    "timed %s, up to %s: %.0f tokens/s",
                    choice.layout.kind,
                    _at_once(choice.limit),
                    self._rate(choice),
                )

    def _smaller(self) -> list[Choice]:
        """Return smaller sizes to time and the fastest choice, which calibrates the speed; [] if
        there are none.

        Halve the smallest size of a layout if it is the fastest choice, or if no size of it fits.
        """
        fastest = min(self._seconds, key=self._seconds.__getitem__, default=None)
        smaller: list[Choice] = []
        for layout in dict.fromkeys(choice.layout for choice in self._pieces):
            choices = [choice for choice in self._pieces if choice.layout == layout]
            smallest = min(choices, key=_amount)
            none_fits = not any(choice in self._seconds for choice in choices)
            if smallest == fastest or none_fits:
                half = Choice(layout, replace(smallest.limit, amount=_amount(smallest) // 2))
                least, _ = self._limits(layout)
                if half.limit.amount >= least.amount and self._keep_if_new(half):
                    smaller.append(half)
        if smaller and fastest is not None:
            smaller.append(fastest)
        return smaller

    def _ranked(self) -> list[Choice]:
        """Return the choices that fit, fastest first. The first one is the smallest of those that
        are about as fast as the fastest.
        """
        if not self._seconds:
            return []
        ranked = sorted(self._seconds, key=self._seconds.__getitem__)
        fastest = ranked[0]
        tolerated_seconds = (1 + _TIME_TOLERANCE) * self._seconds[fastest]
        about_as_fast = [
            choice
            for choice in ranked
            if choice.layout == fastest.layout and self._seconds[choice] <= tolerated_seconds
        ]
        best = min(about_as_fast, key=_amount)
        ranked.remove(best)
        return [best, *ranked]

    def _rate(self, choice: Choice) -> float:
        """Return the real tokens per second of a timed choice."""
        return sum(self._lengths) / (self._seconds[choice] + self._step_seconds)

    def _padding(self, choice: Choice) -> float:
        """Return the share of padding in the tokens of a choice."""
        return 1 - sum(self._lengths) / _run_tokens(self._pieces[choice])


def _is_reproduced(rounds: Sequence[float]) -> bool:
    """Return whether the two fastest rounds took about the same time."""
    fastest, second = sorted(rounds)[:2]
    return second <= (1 + _REPRODUCED) * fastest


def _run_tokens(pieces: Pieces) -> int:
    """Return the tokens of all micro-batches, padding included."""
    batches, _ = pieces
    return sum(batch.run_tokens for batch in batches)


def _amount(choice: Choice) -> int:
    return choice.limit.amount


def _at_once(limit: MicroBatchLimit) -> str:
    return f"{limit.amount:,} {limit.unit} at once"
