"""The fastest micro-batches: which layout and size train the most real tokens a second, found by a
few timed trials.

The largest that fits is a bound and no aim: from some size on more tokens at once are hardly
faster, while rows of uneven lengths are padded more. A step has the same rows in any layout, so the
time of its micro-batches decides. It is modelled as linear in what they hold
(:class:`.MicroBatchTime`), in all layouts much alike but for a factor, fitted to micro-batches that
were timed, and corrected by what trials of a near size took beside it. The best by that is tried,
until it is one that was.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from adaptive_batch._util import format_bytes
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
    """What ``auto`` seeks within the bound: the choice of a layout and a limit whose cost is least.

    Attributes:
        cost: ``cost(kind, limit, seconds)`` of a layout's kind and a limit, which take so many
            seconds for some steps of training; None takes as much at once as fits, and times
            nothing.
    """

    cost: Callable[[str, MicroBatchLimit, float], float] | None = None


OBJECTIVES = {
    "throughput": Objective(cost=lambda kind, limit, seconds: seconds),
    "largest": Objective(),
}

MAX_TRIALS = 6
_ALIKE = (
    0.01  # of two sizes that are expected to differ by less, the smaller is taken: it leaves memory
)
_OTHERS, _MADE_UP = (
    0.3,
    0.1,
)  # weights in a fit, of what was timed in another layout and of what was not timed
_REFITS = 3  # of the time that layouts have in common, each with the factors of the last
_NEAR = 0.08  # what is expected to take so much longer may prove faster, and is tried


@dataclass(frozen=True)
class TimedTrial:
    """A layout and a limit that were timed.

    Attributes:
        kind: of the layout.
        limit: of a micro-batch.
        tokens_per_second: real tokens of a device, the optimizer's step included.
        padding: share of the tokens that were run.
        peak_bytes: of the largest such micro-batch; None where it was not tried.
    """

    kind: str
    limit: MicroBatchLimit
    tokens_per_second: float
    padding: float
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Throughput:
    """What is fastest.

    Attributes:
        kind: of the layout.
        limit: of a micro-batch.
        tokens_per_second: of its trial.
        time: of a micro-batch in this layout, as the trials have shown it.
        trials: in their order.
        seconds: that the search took.
    """

    kind: str
    limit: MicroBatchLimit
    tokens_per_second: float
    time: MicroBatchTime
    trials: tuple[TimedTrial, ...]
    seconds: float = 0.0

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Throughput:
        """Build it from what ``asdict`` returned."""
        trials = (
            TimedTrial(**{**one, "limit": MicroBatchLimit(**one["limit"])})
            for one in saved["trials"]
        )
        limit = MicroBatchLimit(**saved["limit"])
        time = MicroBatchTime(**saved["time"])
        return cls(
            saved["kind"], limit, saved["tokens_per_second"], time, tuple(trials), saved["seconds"]
        )

    def with_peak(self, peak_bytes: int | None) -> Throughput:
        """Return the same, with the peak of what is fastest."""
        mine = (self.kind, self.limit)
        peaks = (
            replace(one, peak_bytes=peak_bytes) if (one.kind, one.limit) == mine else one
            for one in self.trials
        )
        return replace(self, trials=tuple(peaks))

    def table(self) -> str:
        """Aligned text: a line for each trial, then what is fastest."""
        lines = [f"{'layout':>8} {'at once':>15} {'peak':>10} {'padding':>8} {'tokens/s':>9}"]
        for one in self.trials:
            at_once = f"{one.limit.amount:,} {one.limit.unit}"
            peak = "-" if one.peak_bytes is None else format_bytes(one.peak_bytes)
            lines.append(
                f"{one.kind:>8} {at_once:>15} {peak:>10} {one.padding:>8.1%}"
                f" {one.tokens_per_second:>9,.0f}"
            )
        return "\n".join([*lines, f"fastest: {self.kind}, up to {_at_once(self.limit)}"])


Pieces = tuple[list[MicroBatch], MicroBatchLayout]


Choice = tuple[str, MicroBatchLimit]  # kind of a layout, and limit


class FastestSearch:
    """Finds the layout and the limit whose micro-batches take least time for the same rows.

    Args:
        run: runs the sample as the micro-batches of each of some layouts, in turns, so that what
            slows the machine slows all; returns the seconds of each micro-batch, None for a layout
            where one does not fit.
        steps: tokens of each row of some steps of training, whose time is modelled.
        sample: tokens of each row that is run in a trial, those of a step or a part of one.
        layouts: to choose from.
        limits: of each, ascending.
        step_seconds: that a step takes beside its micro-batches.
        objective: name of what is sought, one of :data:`OBJECTIVES` that times something.
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
        self._step_seconds = (
            step_seconds * sum(sample) / sum(map(sum, steps)) * len(steps)
        )  # the sample's share of it
        self._timings: dict[str, list[tuple[MicroBatch, float]]] = {
            kind: [] for kind in self._layouts
        }
        self._measured: dict[
            Choice, tuple[list[MicroBatch], float]
        ] = {}  # the sample's micro-batches, and their seconds
        self._too_large = dict.fromkeys(self._layouts, math.inf)  # what did not fit

    def __call__(self) -> Throughput | None:
        """Time as little as needed; return what is fastest, None where nothing that was tried fits."""
        while unknown := [
            kind for kind in self._layouts if not self._timings[kind] and self._left(kind)
        ]:
            self._time([self._small_and_large(kind) for kind in unknown])
        while len(self._measured) < MAX_TRIALS - len(
            self._layouts
        ):  # what does not fit leaves fewer
            expected = {
                (kind, limit): self._expected_cost(kind, limit)
                for kind in self._layouts
                for limit in self._left(kind)
            }
            chosen = self._next(expected)
            if not chosen or chosen[0] in self._measured:
                break
            pieces = [self._cut(kind, limit) for kind, limit in chosen]
            for choice, (of_layout, _), seconds in zip(
                chosen, pieces, self._time(pieces), strict=True
            ):
                if seconds is not None:
                    before = self._measured.get(choice, (of_layout, seconds))
                    self._measured[choice] = min(
                        (of_layout, seconds), before, key=lambda one: one[1]
                    )
                    log.info(
                        "timed %s, up to %s: %.0f tokens/s",
                        choice[0],
                        _at_once(choice[1]),
                        self._rate(choice),
                    )
        if not self._measured:
            return None
        kind, limit = min(self._measured, key=lambda choice: self._expected_cost(*choice))
        trials = tuple(
            TimedTrial(*choice, self._rate(choice), self._padding(choice))
            for choice in self._measured
        )
        return Throughput(kind, limit, self._rate((kind, limit)), self._layouts[kind].time, trials)

    def _left(self, kind: str) -> list[MicroBatchLimit]:
        return [
            limit
            for limit in self._limits(self._layouts[kind])
            if limit.amount < self._too_large[kind]
        ]

    def _cut(self, kind: str, limit: MicroBatchLimit) -> Pieces:
        return micro_batches(self._sample, limit, self._layouts[kind]), self._layouts[kind]

    def _small_and_large(self, kind: str) -> Pieces:
        """Return half of the sample's rows in the smallest micro-batches, and half in the largest:
        they show what is fixed.
        """
        pieces = []
        sizes = self._left(kind)
        layout = self._layouts[kind]
        for begin, limit in enumerate((sizes[0], sizes[-1])):
            numbers = range(begin, len(self._sample), 2)
            for piece in micro_batches([self._sample[number] for number in numbers], limit, layout):
                pieces.append(replace(piece, rows=[numbers[row] for row in piece.rows]))
        return pieces, layout

    def _time(self, pieces: list[Pieces]) -> list[float | None]:
        """Return the seconds of the sample in each layout; learn from them."""
        taken = self._run(pieces)
        for (of_layout, layout), seconds in zip(pieces, taken, strict=True):
            kind = layout.kind
            if seconds is None:
                by_rows = self._limits(layout)[0].unit == "rows"
                self._too_large[kind] = max(
                    len(one.rows) if by_rows else one.padded_tokens for one in of_layout
                )
            else:
                self._timings[kind] += zip(of_layout, seconds, strict=True)
        self._learn()
        return [None if seconds is None else sum(seconds) for seconds in taken]

    def _learn(self) -> None:
        """Fit the time of each layout to what was timed in it and, with less weight, to the
        others', made as slow by a factor.
        """
        timed = {kind: timings for kind, timings in self._timings.items() if timings}
        factors = dict.fromkeys(timed, 1.0)
        for _ in range(_REFITS if timed else 0):
            time = fitted(
                [(piece, s / factors[kind]) for kind, some in timed.items() for piece, s in some]
            )
            for kind, some in timed.items():
                factors[kind] = sum(seconds for _, seconds in some) / time.of(
                    [piece for piece, _ in some]
                )
        for kind, own in timed.items():
            others = [
                (piece, s * factors[kind] / factors[other])
                for other, some in timed.items()
                if other != kind
                for piece, s in some
            ]
            self._layouts[kind] = replace(self._layouts[kind], time=fitted(own, others))

    def _expected_cost(self, kind: str, limit: MicroBatchLimit) -> float:
        return self._cost(kind, limit, self._expected_seconds(kind, limit))

    def _expected_seconds(self, kind: str, limit: MicroBatchLimit) -> float:
        """Return the seconds of the steps by the model, corrected by what the nearest size that was
        measured took beside it.
        """
        layout = self._layouts[kind]
        modelled = sum(
            layout.time.of(micro_batches(lengths, limit, layout)) for lengths in self._steps
        )
        near = [other for measured, other in self._measured if measured == kind]
        if not near:
            return modelled
        nearest = min(near, key=lambda other: abs(math.log(other.amount / limit.amount)))
        pieces, seconds = self._measured[kind, nearest]
        return modelled * seconds / layout.time.of(pieces)

    def _next(self, expected: dict[Choice, float]) -> list[Choice]:
        """Return what to time: each layout's best, once; then the best of all, beside the best that
        was measured.
        """
        untried = [
            kind
            for kind in self._layouts
            if kind not in (measured for measured, _ in self._measured)
        ]
        by_kind = [{one: expected[one] for one in expected if one[0] == kind} for kind in untried]
        if any(by_kind):
            return [self._best(of_kind) for of_kind in by_kind if of_kind]
        known = [choice for choice in expected if choice in self._measured]
        return [self._best(expected), min(known, key=expected.__getitem__)] if known else []

    def _best(self, expected: dict[Choice, float]) -> Choice:
        """Return what is expected to cost least: of sizes that are alike the smallest, or a smaller
        one that may prove faster.
        """
        first = min(expected, key=expected.__getitem__)
        alike, near = (
            [
                one
                for one in expected
                if one[0] == first[0] and expected[one] <= (1 + most) * expected[first]
            ]
            for most in (_ALIKE, _NEAR)
        )
        best = min(alike, key=lambda one: one[1].amount)
        smaller = [
            one for one in near if one[1].amount < best[1].amount and one not in self._measured
        ]
        return (
            max(smaller, key=lambda one: one[1].amount, default=best)
            if best in self._measured
            else best
        )

    def _rate(self, choice: Choice) -> float:
        return sum(self._sample) / (self._measured[choice][1] + self._step_seconds)

    def _padding(self, choice: Choice) -> float:
        return 1 - sum(self._sample) / sum(
            piece.padded_tokens for piece in self._measured[choice][0]
        )


def _at_once(limit: MicroBatchLimit) -> str:
    return f"{limit.amount:,} {limit.unit} at once"


def fitted(
    timings: Sequence[tuple[MicroBatch, float]], alike: Sequence[tuple[MicroBatch, float]] = ()
) -> MicroBatchTime:
    """Fit the time of micro-batches to those that were timed: non-negative least squares of
    relative errors.

    Few or similar micro-batches do not tell the parts from each other, so others are added: with a
    third of the weight those that should take about as long as is said, and with a tenth some that
    behave as :class:`.MicroBatchTime` does by default, at the mean speed of those that were timed.
    """
    usual = MicroBatchTime()
    speed = sum(seconds for _, seconds in timings) / usual.of([piece for piece, _ in timings])
    made_up = [
        MicroBatch([0] * rows, length) for rows, length in ((1, 64), (8, 128), (1, 1024), (16, 512))
    ]
    pieces = [*(piece for piece, _ in (*timings, *alike)), *made_up]
    seconds = [
        *(each for _, each in (*timings, *alike)),
        *(speed * usual.of([piece]) for piece in made_up),
    ]
    target = torch.tensor(seconds, dtype=torch.float64)
    features = torch.tensor(
        [
            (1, len(piece.rows), piece.padded_tokens, sum(n * n for n in piece.lengths))
            for piece in pieces
        ],
        dtype=torch.float64,
    )
    weight = torch.tensor([1.0] * len(timings) + [_OTHERS] * len(alike) + [_MADE_UP] * len(made_up))
    weight /= target.clamp(min=1e-9)
    features = features * weight[:, None]
    target = target * weight
    scale = features.norm(dim=0)
    features /= scale
    gram = features.T @ features
    found = torch.zeros(len(scale), dtype=torch.float64)
    of_target = features.T @ target
    for _ in range(500):  # coordinate descent, which for so few unknowns comes to the least
        for unknown in range(len(scale)):
            found[unknown] = (of_target[unknown] - gram[unknown] @ found + found[unknown]).clamp(
                min=0
            )
    return MicroBatchTime(*(found / scale).tolist())
