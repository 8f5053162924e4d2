"""Search for the layout and size of micro-batches that train the most real tokens per second.

The largest size that fits is rarely the fastest: beyond some size, more tokens at once hardly help,
while uneven rows need more padding. A few sizes of each layout run the same steps in turn, and the
time of their micro-batches decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import mul
from statistics import median
from typing import NamedTuple

from adaptive_batch._util import is_emulated
from adaptive_batch.data import (
    MicroBatch,
    MicroBatchLayout,
    MicroBatchLimit,
    MicroBatchTime,
    micro_batches,
)

OBJECTIVES = ("throughput", "largest")

# Timed sizes of each layout, as shares of its largest one.
_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
# Rounds in which all sizes run in turn.
_ROUNDS = 4


def needs_times(objective: str) -> bool:
    """Return whether an objective times micro-batches; under `adaptive-batch emulate` none does."""
    return objective == "throughput" and not is_emulated()


@dataclass(frozen=True)
class TimedTrial:
    """Timing of a layout and a limit.

    Attributes:
        kind: kind of the layout.
        limit: limit of a micro-batch.
        tokens_per_second: real tokens per second of micro-batches on one device.
        padding: share of padding in the processed tokens.
    """

    kind: str
    limit: MicroBatchLimit
    tokens_per_second: float
    padding: float


@dataclass(frozen=True)
class Throughput:
    """A layout and a limit, with all timings.

    Attributes:
        kind: kind of the layout.
        limit: limit of a micro-batch.
        tokens_per_second: rate of its trial.
        time: measured time model of a micro-batch in this layout.
        trials: timings in order.
        seconds: duration of the search.
    """

    kind: str
    limit: MicroBatchLimit
    tokens_per_second: float
    time: MicroBatchTime
    trials: tuple[TimedTrial, ...]
    seconds: float = 0.0

    def table(self) -> str:
        """Return the timings and the fastest choice as aligned text."""
        lines = [f"{'layout':>8} {'at once':>15} {'padding':>8} {'tokens/s':>9}"]
        for trial in self.trials:
            at_once = f"{trial.limit.amount:,} {trial.limit.unit}"
            lines.append(
                f"{trial.kind:>8} {at_once:>15} {trial.padding:>8.1%}"
                f" {trial.tokens_per_second:>9,.0f}"
            )
        lines.append(f"fastest: {self.kind}, up to {self.limit.amount:,} {self.limit.unit} at once")
        return "\n".join(lines)


class Candidate(NamedTuple):
    """A layout and a limit, and the micro-batches into which they divide the timed steps."""

    layout: MicroBatchLayout
    limit: MicroBatchLimit
    micro_batches: list[MicroBatch]

    @property
    def run_tokens(self) -> int:
        """Tokens of all micro-batches, padding included."""
        return sum(micro_batch.run_tokens for micro_batch in self.micro_batches)


class FastestSearch:
    """Finds the layout and limit whose micro-batches take the least time for the same steps.

    Args:
        run: function that runs micro-batches in a layout, and returns their seconds; None if one
            does not fit.
        lengths: tokens of the rows of the steps, by which micro-batches number them.
        step_rows: rows of a step.
        layouts: layouts to choose from.
        limits: function that returns the smallest and the largest limit of a layout.
    """

    def __init__(
        self,
        run: Callable[[MicroBatchLayout, list[MicroBatch]], float | None],
        *,
        lengths: Sequence[int],
        step_rows: int,
        layouts: Sequence[MicroBatchLayout],
        limits: Callable[[MicroBatchLayout], tuple[MicroBatchLimit, MicroBatchLimit]],
    ) -> None:
        self._run = run
        self._lengths = lengths
        self._step_rows = step_rows
        self._layouts = layouts
        self._limits = limits

    def __call__(self) -> list[Throughput]:
        """Time a few sizes of each layout.

        Returns:
            The choices that fit, fastest first.
        """
        candidates: list[Candidate] = []
        for layout in map(self._with_time_model, self._layouts):
            smallest, largest = self._limits(layout)
            for share in _SHARES:
                amount = max(smallest.amount, int(share * largest.amount))
                candidate = self._candidate(layout, replace(largest, amount=amount))
                # Two sizes may divide the steps alike.
                if all(candidate.micro_batches != each.micro_batches for each in candidates):
                    candidates.append(candidate)
        timed = self._time(candidates)
        trials = tuple(self._trial(candidate, seconds) for candidate, seconds in timed)
        choices = [
            Throughput(
                trial.kind, trial.limit, trial.tokens_per_second, candidate.layout.time, trials
            )
            for trial, (candidate, _) in zip(trials, timed, strict=True)
        ]
        return sorted(choices, key=lambda choice: choice.tokens_per_second, reverse=True)

    def _trial(self, candidate: Candidate, seconds: float) -> TimedTrial:
        num_tokens = sum(self._lengths)
        padding = 1 - num_tokens / candidate.run_tokens
        return TimedTrial(candidate.layout.kind, candidate.limit, num_tokens / seconds, padding)

    def _with_time_model(self, layout: MicroBatchLayout) -> MicroBatchLayout:
        """Return a layout with the fixed time of a micro-batch and its time per token.

        They follow from the times of the smallest and of the largest micro-batches. A layout that
        needs no time model, or cannot be measured, is returned unchanged.
        """
        if layout.kind != "grouped":
            return layout
        timed = self._time([self._candidate(layout, limit) for limit in self._limits(layout)])
        if len(timed) < 2:
            return layout
        (small, small_seconds), (large, large_seconds) = timed
        small_number, large_number = len(small.micro_batches), len(large.micro_batches)
        # Solve seconds = fixed * number + token * tokens for both.
        determinant = small_number * large.run_tokens - large_number * small.run_tokens
        if determinant <= 0:
            return layout
        fixed = (small_seconds * large.run_tokens - large_seconds * small.run_tokens) / determinant
        fixed = max(0.0, fixed)
        token = (small_seconds - fixed * small_number) / small.run_tokens
        return replace(layout, time=MicroBatchTime(fixed, token=max(token, 1e-12)))

    def _candidate(self, layout: MicroBatchLayout, limit: MicroBatchLimit) -> Candidate:
        """Divide the steps into micro-batches."""
        numbered = []
        for begin in range(0, len(self._lengths), self._step_rows):
            step_lengths = self._lengths[begin : begin + self._step_rows]
            for micro_batch in micro_batches(step_lengths, limit, layout):
                # The rows of a micro-batch are positions in its step.
                numbers = [begin + row for row in micro_batch.rows]
                numbered.append(replace(micro_batch, rows=numbers))
        return Candidate(layout, limit, numbered)

    def _time(self, candidates: Sequence[Candidate]) -> list[tuple[Candidate, float]]:
        """Return the candidates that fit, each with its median seconds.

        Each round is normalized to the speed of the fastest round.
        """
        # Seconds of the rounds of each candidate that fits, by its number.
        timings: dict[int, list[float]] = {number: [] for number in range(len(candidates))}
        for _ in range(_ROUNDS):
            for number in list(timings):
                candidate = candidates[number]
                seconds = self._run(candidate.layout, candidate.micro_batches)
                if seconds is None:
                    del timings[number]
                else:
                    timings[number].append(seconds)
        round_seconds = [sum(seconds) for seconds in zip(*timings.values(), strict=True)]
        speeds = [min(round_seconds) / seconds for seconds in round_seconds]
        return [
            (candidates[number], median(map(mul, seconds_of_rounds, speeds)))
            for number, seconds_of_rounds in timings.items()
        ]
