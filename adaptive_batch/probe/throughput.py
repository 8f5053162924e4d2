"""Finds the layout and size of micro-batches that train the most real tokens a second.

The largest size that fits is a bound and no aim: from some size on, more tokens at once are hardly
faster, while rows of uneven lengths are padded more. A step has the same rows in any layout, so the
time of its micro-batches decides. The time is modelled as linear in what the micro-batches hold
(:class:`.MicroBatchTime`), much alike in all layouts but for a factor. The model is fitted to
micro-batches that were timed, and corrected by what trials of a near size took. The best choice by
that model is tried, until the best is one that was tried before.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from adaptive_batch._util import format_bytes, is_emulated
from adaptive_batch.data import (
    MicroBatch,
    MicroBatchLayout,
    MicroBatchLimit,
    MicroBatchTime,
    micro_batches,
)

log = logging.getLogger("adaptive_batch")


@dataclass(frozen=True)
class Objective:
    """The goal of ``auto`` within the bound: the layout and the limit whose cost is least.

    Attributes:
        cost: a function ``cost(kind, limit, seconds)`` of a layout's kind, a limit, and the seconds
            that they take for some steps of training; None takes as much at once as fits, and times
            nothing.
    """

    cost: Callable[[str, MicroBatchLimit, float], float] | None = None

    @property
    def needs_times(self) -> bool:
        """Whether micro-batches are timed for it, which `adaptive-batch emulate` prevents: there
        the largest that fits is taken.
        """
        return self.cost is not None and not is_emulated()


OBJECTIVES = {
    "throughput": Objective(cost=lambda kind, limit, seconds: seconds),
    "largest": Objective(),
}

MAX_TRIALS = 6
# Of two sizes whose expected costs differ by less, the smaller is taken: it leaves memory free.
_ALIKE = 0.01
# The weight in a fit of what was timed in another layout, and of what was not timed at all.
_OTHERS = 0.3
_MADE_UP = 0.1
# Fits of the time that layouts have in common, each with the factors of the last.
_REFITS = 3
# A size whose expected cost is higher by no more may prove faster, so it is tried.
_NEAR = 0.08
# Turns in which layouts are timed: the fewest are enough where the two fastest of each layout
# differ by no more than this share, as on a machine without other work.
_ROUNDS = 2
_MOST_ROUNDS = 6
_REPRODUCED = 0.03


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
        trials = list(self.trials)
        for index, trial in enumerate(trials):
            if (trial.kind, trial.limit) == (self.kind, self.limit):
                trials[index] = replace(trial, peak_bytes=peak_bytes)
        return replace(self, trials=tuple(trials))

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

# The kind of a layout, and a limit.
Choice = tuple[str, MicroBatchLimit]


class FastestSearch:
    """Finds the layout and the limit whose micro-batches take least time for the same rows.

    Args:
        run: a function that runs the sample once as the micro-batches of each of some layouts; it
            returns the seconds of each micro-batch, None for a layout where one does not fit.
        steps: tokens of each row of some steps of training, whose time is modelled.
        sample: tokens of each row that is run in a trial, those of a step or a part of one.
        layouts: the layouts to choose from.
        limits: the limits of a layout, ascending.
        step_seconds: the seconds that a step takes beside its micro-batches.
        objective: the name of the goal, one of :data:`OBJECTIVES` that times something.
    """

    def __init__(
        self,
        run: Callable[[list[Pieces]], list[list[float] | None]],
        *,
        steps: Sequence[Sequence[int]],
        sample: Sequence[int],
        layouts: Sequence[MicroBatchLayout],
        limits: Callable[[MicroBatchLayout], Sequence[MicroBatchLimit]],
        step_seconds: float = 0.0,
        objective: str = "throughput",
    ) -> None:
        cost = OBJECTIVES[objective].cost
        assert cost is not None, f"{objective} times nothing"
        self._cost = cost
        self._run = run
        self._steps = steps
        self._sample = sample
        self._limits = limits
        self._layouts = {layout.kind: layout for layout in layouts}
        # A trial runs the sample alone, so it bears that share of what a step takes beside.
        self._step_seconds = step_seconds * sum(sample) / sum(map(sum, steps)) * len(steps)
        self._timings: dict[str, list[tuple[MicroBatch, float]]] = {
            kind: [] for kind in self._layouts
        }
        # The sample's micro-batches in a choice, and the seconds that they take at the speed that
        # the machine had as the first choices were timed.
        self._measured: dict[Choice, tuple[list[MicroBatch], float]] = {}
        # The amount of a layout that did not fit.
        self._too_large = dict.fromkeys(self._layouts, math.inf)

    def __call__(self) -> Throughput | None:
        """Time as little as needed; return the fastest, None where nothing that was tried fits."""
        while unknown := [
            kind for kind in self._layouts if not self._timings[kind] and self._left(kind)
        ]:
            cuts = [self._small_and_large(kind) for kind in unknown]
            self._learn(cuts, self._time(cuts))
        # The first timings of a layout count as a trial of it.
        while len(self._measured) < MAX_TRIALS - len(self._layouts):
            # What did not fit in the last round leaves fewer limits in this one.
            expected: dict[Choice, float] = {}
            for kind in self._layouts:
                for limit in self._left(kind):
                    expected[kind, limit] = self._expected_cost(kind, limit)
            chosen = self._next(expected)
            if not chosen or chosen[0] in self._measured:
                break
            self._try(chosen)
        if not self._measured:
            return None
        kind, limit = min(self._measured, key=lambda choice: self._expected_cost(*choice))
        trials = tuple(
            TimedTrial(*choice, self._rate(choice), self._padding(choice))
            for choice in self._measured
        )
        return Throughput(kind, limit, self._rate((kind, limit)), self._layouts[kind].time, trials)

    def _try(self, chosen: Sequence[Choice]) -> None:
        """Time the sample in each choice; keep the seconds of a choice that is new and fits.

        Where the last one was measured before, it shows how much slower the machine is now.
        """
        cuts = [self._cut(kind, limit) for kind, limit in chosen]
        timings = self._time(cuts)
        rival_timing = timings[-1]
        if chosen[-1] in self._measured and rival_timing is not None:
            slowness = sum(rival_timing) / self._measured[chosen[-1]][1]
            timings = [timing and [seconds / slowness for seconds in timing] for timing in timings]
        self._learn(cuts, timings)
        for choice, (pieces, _), timing in zip(chosen, cuts, timings, strict=True):
            if timing is None or choice in self._measured:
                continue
            self._measured[choice] = (pieces, sum(timing))
            log.info(
                "timed %s, up to %s: %.0f tokens/s",
                choice[0],
                _at_once(choice[1]),
                self._rate(choice),
            )

    def _left(self, kind: str) -> list[MicroBatchLimit]:
        """Return the limits of a layout that may still fit."""
        return [
            limit
            for limit in self._limits(self._layouts[kind])
            if limit.amount < self._too_large[kind]
        ]

    def _cut(self, kind: str, limit: MicroBatchLimit) -> Pieces:
        return micro_batches(self._sample, limit, self._layouts[kind]), self._layouts[kind]

    def _small_and_large(self, kind: str) -> Pieces:
        """Return half of the sample's rows in the smallest micro-batches, and half in the largest.

        The two sizes together show what part of the time is fixed.
        """
        pieces = []
        sizes = self._left(kind)
        layout = self._layouts[kind]
        for begin, limit in enumerate((sizes[0], sizes[-1])):
            numbers = range(begin, len(self._sample), 2)
            for piece in micro_batches([self._sample[number] for number in numbers], limit, layout):
                pieces.append(replace(piece, rows=[numbers[row] for row in piece.rows]))
        return pieces, layout

    def _time(self, pieces: list[Pieces]) -> list[list[float] | None]:
        """Return the seconds of the sample's micro-batches in each layout, None where they do not
        fit.

        Layouts run in turns, so that what slows the machine slows all, and more often where a turn
        differs from the others.
        """
        rounds: list[list[list[float]]] = [[] for _ in pieces]
        fitting = list(range(len(pieces)))
        for number in range(_MOST_ROUNDS):
            if number >= _ROUNDS and all(_is_reproduced(rounds[place]) for place in fitting):
                break
            timings = self._run([pieces[place] for place in fitting])
            for place, seconds in zip(fitting, timings, strict=True):
                if seconds is None:
                    rounds[place].clear()
                else:
                    rounds[place].append(seconds)
            fitting = [place for place in fitting if rounds[place]]
        medians = iter(_without_noise([rounds[place] for place in fitting]))
        return [next(medians) if of_layout else None for of_layout in rounds]

    def _learn(self, pieces: list[Pieces], timings: Sequence[list[float] | None]) -> None:
        """Fit the time of each layout to its timings, with these among them, and, with less weight,
        to all the rest; remember what did not fit.

        The timings of another layout are multiplied by a factor that makes them as slow as its own.
        """
        for (micros, layout), seconds in zip(pieces, timings, strict=True):
            if seconds is not None:
                self._timings[layout.kind] += zip(micros, seconds, strict=True)
            elif self._limits(layout)[0].unit == "rows":
                self._too_large[layout.kind] = max(len(micro.rows) for micro in micros)
            else:
                self._too_large[layout.kind] = max(micro.run_tokens for micro in micros)
        timed = {kind: own for kind, own in self._timings.items() if own}
        if not timed:
            return
        # The common time and the factors depend on each other, so they are fitted in turns.
        factors = dict.fromkeys(timed, 1.0)
        for _ in range(_REFITS):
            common: list[tuple[MicroBatch, float]] = []
            for kind, own in timed.items():
                common += [(piece, seconds / factors[kind]) for piece, seconds in own]
            time = fitted(common)
            for kind, own in timed.items():
                modelled = time.of([piece for piece, _ in own])
                factors[kind] = sum(seconds for _, seconds in own) / modelled
        for kind, own in timed.items():
            scaled: list[tuple[MicroBatch, float]] = []
            for rival, others in timed.items():
                if rival != kind:
                    scaled += [(piece, s * factors[kind] / factors[rival]) for piece, s in others]
            self._layouts[kind] = replace(self._layouts[kind], time=fitted(own, scaled))

    def _expected_cost(self, kind: str, limit: MicroBatchLimit) -> float:
        return self._cost(kind, limit, self._expected_seconds(kind, limit))

    def _expected_seconds(self, kind: str, limit: MicroBatchLimit) -> float:
        """Return the seconds of the steps by the model, corrected by the nearest measured size."""
        layout = self._layouts[kind]
        modelled = sum(
            layout.time.of(micro_batches(lengths, limit, layout)) for lengths in self._steps
        )
        measured_limits = [measured for rival, measured in self._measured if rival == kind]
        if not measured_limits:
            return modelled

        # A ratio tells how alike two sizes are, so their distance is one of logarithms.
        def distance(measured: MicroBatchLimit) -> float:
            return abs(math.log(measured.amount / limit.amount))

        pieces, seconds = self._measured[kind, min(measured_limits, key=distance)]
        return modelled * seconds / layout.time.of(pieces)

    def _next(self, expected: dict[Choice, float]) -> list[Choice]:
        """Return the choices to time next, the most promising first.

        At first they are the best of each layout, then the best of all beside the best that was
        measured.
        """
        tried_kinds = {kind for kind, _ in self._measured}
        untried: list[Choice] = []
        for kind in self._layouts:
            choices = {choice: cost for choice, cost in expected.items() if choice[0] == kind}
            if choices and kind not in tried_kinds:
                untried.append(self._best(choices))
        if untried:
            return untried
        measured = [choice for choice in expected if choice in self._measured]
        if not measured:
            return []
        # The machine may have slowed meanwhile, so the rival is timed again in the same turns.
        return [self._best(expected), min(measured, key=expected.__getitem__)]

    def _best(self, expected: dict[Choice, float]) -> Choice:
        """Return the smallest choice of those with about the least expected cost.

        Where it was measured already, a smaller one that may prove faster comes before it.
        """
        cheapest = min(expected, key=expected.__getitem__)
        costs = {choice: cost for choice, cost in expected.items() if choice[0] == cheapest[0]}
        least_cost = expected[cheapest]
        alike = [choice for choice, cost in costs.items() if cost <= (1 + _ALIKE) * least_cost]
        near = [choice for choice, cost in costs.items() if cost <= (1 + _NEAR) * least_cost]
        best = min(alike, key=_amount)
        if best not in self._measured:
            return best
        smaller = [choice for choice in near if _amount(choice) < _amount(best)]
        unmeasured = [choice for choice in smaller if choice not in self._measured]
        return max(unmeasured, key=_amount, default=best)

    def _rate(self, choice: Choice) -> float:
        """Return the real tokens a second of a measured choice."""
        return sum(self._sample) / (self._measured[choice][1] + self._step_seconds)

    def _padding(self, choice: Choice) -> float:
        """Return the share of padding in the tokens of a measured choice."""
        run_tokens = sum(piece.run_tokens for piece in self._measured[choice][0])
        return 1 - sum(self._sample) / run_tokens


def _amount(choice: Choice) -> int:
    return choice[1].amount


def _is_reproduced(rounds: Sequence[Sequence[float]]) -> bool:
    """Return whether the two fastest rounds took about as long."""
    fastest, second = sorted(map(sum, rounds))[:2]
    return second <= (1 + _REPRODUCED) * fastest


def _without_noise(layouts: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Return the seconds of each micro-batch of some layouts that were timed in the same rounds.

    The least seconds of each micro-batch would make short ones seem faster: many of these run
    between the turns of other programs, and a long one never does. So layouts are compared by the
    median of whole rounds, each divided by how much slower it was than the fastest.
    """
    if not layouts:
        return []
    timings = [torch.tensor(rounds, dtype=torch.float64) for rounds in layouts]
    of_rounds = torch.stack([timing.sum(1) for timing in timings])
    slowness = of_rounds.sum(0) / of_rounds.sum(0).min()
    seconds = []
    for timing in timings:
        even = timing / slowness[:, None]
        pieces = even.quantile(0.5, 0)
        seconds.append((pieces * even.sum(1).quantile(0.5) / pieces.sum()).tolist())
    return seconds


def _at_once(limit: MicroBatchLimit) -> str:
    return f"{limit.amount:,} {limit.unit} at once"


def fitted(
    timings: Sequence[tuple[MicroBatch, float]], alike: Sequence[tuple[MicroBatch, float]] = ()
) -> MicroBatchTime:
    """Fit the time of micro-batches to timings, by non-negative least squares of relative errors.

    Few or similar micro-batches do not tell the parts from each other, so more are added: with a
    third of the weight those that should take about as long as is said, and with a tenth some that
    behave as :class:`.MicroBatchTime` does by default, at the mean speed of those that were timed.
    """
    usual = MicroBatchTime()
    speed = sum(seconds for _, seconds in timings) / usual.of([piece for piece, _ in timings])
    made_up = [
        MicroBatch([0] * rows, length) for rows, length in ((1, 64), (8, 128), (1, 1024), (16, 512))
    ]
    pieces = [*(piece for piece, _ in (*timings, *alike)), *made_up]
    targets = [
        *(seconds for _, seconds in (*timings, *alike)),
        *(speed * usual.of([piece]) for piece in made_up),
    ]
    target = torch.tensor(targets, dtype=torch.float64)
    # The terms of the model: a micro-batch, its rows, its tokens, and attention's pairs of tokens.
    features = torch.tensor(
        [
            (1, len(piece.rows), piece.run_tokens, sum(n * n for n in piece.lengths))
            for piece in pieces
        ],
        dtype=torch.float64,
    )
    weight = torch.tensor([1.0] * len(timings) + [_OTHERS] * len(alike) + [_MADE_UP] * len(made_up))
    # The relative error counts, so that long micro-batches do not outweigh short ones.
    weight /= target.clamp(min=1e-9)
    features = features * weight[:, None]
    target = target * weight
    scale = features.norm(dim=0)
    features /= scale
    gram = features.T @ features
    solution = torch.zeros(len(scale), dtype=torch.float64)
    of_target = features.T @ target
    # For so few unknowns coordinate descent comes to the minimum.
    for _ in range(500):
        for unknown in range(len(scale)):
            residual = of_target[unknown] - gram[unknown] @ solution
            solution[unknown] = (residual + solution[unknown]).clamp(min=0)
    return MicroBatchTime(*(solution / scale).tolist())
