"""The fastest micro-batches: which layout and size train the most real tokens a second, found by a few timed trials.

The largest that fits is a bound and no aim: from some size on more tokens at once are hardly faster, while rows of uneven
lengths are padded more. A step has the same rows in any layout, so the time of its micro-batches decides. It is modelled as
linear in what they hold (:class:`.MicroBatchTime`), fitted to micro-batches that were timed, and corrected by what trials of
a near size took beside it. The best by that is tried, until it is one that was.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from adaptive_batch._util import format_bytes
from adaptive_batch.data import MicroBatch, MicroBatchLayout, MicroBatchLimit, MicroBatchTime, micro_batches

log = logging.getLogger("adaptive_batch")

MAX_TRIALS = 6
_ALIKE = 0.01  # of two sizes that are expected to differ by less, the smaller is taken: it leaves memory
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
        trials = (TimedTrial(**{**one, "limit": MicroBatchLimit(**one["limit"])}) for one in saved["trials"])
        limit, time = MicroBatchLimit(**saved["limit"]), MicroBatchTime(**saved["time"])
        return cls(saved["kind"], limit, saved["tokens_per_second"], time, tuple(trials), saved["seconds"])

    def with_peak(self, peak_bytes: int | None) -> Throughput:
        """Return the same, with the peak of what is fastest."""
        mine = (self.kind, self.limit)
        peaks = (replace(one, peak_bytes=peak_bytes) if (one.kind, one.limit) == mine else one for one in self.trials)
        return replace(self, trials=tuple(peaks))

    def table(self) -> str:
        """Aligned text: a line for each trial, then what is fastest."""
        lines = [f"{'layout':>8} {'at once':>15} {'peak':>10} {'padding':>8} {'tokens/s':>9}"]
        for one in self.trials:
            at_once = f"{one.limit.amount:,} {one.limit.unit}"
            peak = "-" if one.peak_bytes is None else format_bytes(one.peak_bytes)
            lines.append(f"{one.kind:>8} {at_once:>15} {peak:>10} {one.padding:>8.1%} {one.tokens_per_second:>9,.0f}")
        return "\n".join([*lines, f"fastest: {self.kind}, up to {self.limit.amount:,} {self.limit.unit} at once"])


Pieces = tuple[list[MicroBatch], MicroBatchLayout]


def find_fastest(
    run: Callable[[list[Pieces]], list[list[float] | None]],
    *,
    steps: Sequence[Sequence[int]],
    sample: Sequence[int],
    layouts: Sequence[MicroBatchLayout],
    limits: Callable[[MicroBatchLayout], Sequence[MicroBatchLimit]],
    step_seconds: float = 0.0,
) -> Throughput | None:
    """Find the layout and the limit whose micro-batches take least time for the same rows.

    Args:
        run: runs the sample as the micro-batches of each of some layouts, in turns, so that what slows the machine slows all;
            returns the seconds of each micro-batch, None for a layout where one does not fit.
        steps: tokens of each row of some steps of training, whose time is modelled.
        sample: tokens of each row that is run in a trial, those of a step or a part of one.
        layouts: to choose from.
        limits: of each, ascending.
        step_seconds: that a step takes beside its micro-batches.

    Returns:
        What is fastest; None where nothing that was tried fits.
    """
    measured: dict[tuple[str, MicroBatchLimit], tuple[list[MicroBatch], float]] = {}  # in so many seconds
    timings: dict[str, list[tuple[MicroBatch, float]]] = {layout.kind: [] for layout in layouts}
    times = {layout.kind: layout.time for layout in layouts}
    too_large = dict.fromkeys(times, math.inf)  # what did not fit
    share = sum(sample) / sum(map(sum, steps)) * len(steps)  # of the step that a sample is

    def left(layout: MicroBatchLayout) -> list[MicroBatchLimit]:
        return [limit for limit in limits(layout) if limit.amount < too_large[layout.kind]]

    def time(pieces: list[Pieces]) -> list[float | None]:
        """Return the seconds of the sample in each layout."""
        taken = run(pieces) if pieces else []
        for (of_layout, layout), seconds in zip(pieces, taken, strict=True):
            if seconds is None:
                by_rows = limits(layout)[0].unit == "rows"
                too_large[layout.kind] = max(len(one.rows) if by_rows else one.padded_tokens for one in of_layout)
            else:
                timings[layout.kind] += zip(of_layout, seconds, strict=True)
                times[layout.kind] = fitted(timings[layout.kind])
        return [None if seconds is None else sum(seconds) for seconds in taken]

    def small_and_large(layout: MicroBatchLayout) -> Pieces:
        """Return half of the sample's rows in the smallest micro-batches, and half in the largest."""
        pieces, sizes = [], left(layout)
        for begin, limit in enumerate((sizes[0], sizes[-1])):
            numbers = range(begin, len(sample), 2)
            for piece in micro_batches([sample[number] for number in numbers], limit, layout):
                pieces.append(replace(piece, rows=[numbers[row] for row in piece.rows]))
        return pieces, layout

    def seconds_of(layout: MicroBatchLayout, limit: MicroBatchLimit) -> float:
        layout = replace(layout, time=times[layout.kind])
        modelled = sum(layout.time.of(micro_batches(lengths, limit, layout)) for lengths in steps)
        near = [other for kind, other in measured if kind == layout.kind]
        if not near:
            return modelled
        pieces, seconds = measured[layout.kind, min(near, key=lambda one: abs(math.log(one.amount / limit.amount)))]
        return modelled * seconds / layout.time.of(pieces)

    def best_of(
        expected: dict[tuple[MicroBatchLayout, MicroBatchLimit], float],
    ) -> tuple[MicroBatchLayout, MicroBatchLimit]:
        """Return what is expected to take least: of sizes that are alike the smallest, or a smaller one that may prove faster."""
        first = min(expected, key=expected.__getitem__)
        of_layout = [one for one in expected if one[0] is first[0]]
        best = min(
            (one for one in of_layout if expected[one] <= (1 + _ALIKE) * expected[first]), key=lambda one: one[1].amount
        )
        if (best[0].kind, best[1]) not in measured:
            return best
        near = [
            one
            for one in of_layout
            if expected[one] <= (1 + _NEAR) * expected[first] and one[1].amount < best[1].amount
        ]
        return max(
            (one for one in near if (one[0].kind, one[1]) not in measured), key=lambda one: one[1].amount, default=best
        )

    while unknown := [layout for layout in layouts if not timings[layout.kind] and left(layout)]:
        time([small_and_large(layout) for layout in unknown])
    while len(measured) < MAX_TRIALS - len(layouts):  # what does not fit leaves fewer
        expected = {(layout, limit): seconds_of(layout, limit) for layout in layouts for limit in left(layout)}
        untried = {layout for layout, _ in expected if layout.kind not in (kind for kind, _ in measured)}
        chosen = [
            best_of({one: expected[one] for one in expected if one[0] is layout})
            for layout in layouts
            if layout in untried
        ]
        if expected and not untried:
            known = min((one for one in expected if (one[0].kind, one[1]) in measured), key=expected.__getitem__)
            chosen = [best_of(expected), known]  # once more, beside the other
        if not chosen or (chosen[0][0].kind, chosen[0][1]) in measured:
            break
        cut = [replace(layout, time=times[layout.kind]) for layout, _ in chosen]
        pieces = [
            (micro_batches(sample, limit, layout), layout) for (_, limit), layout in zip(chosen, cut, strict=True)
        ]
        for (layout, limit), (of_layout, _), seconds in zip(chosen, pieces, time(pieces), strict=True):
            if seconds is not None:
                before = measured.get((layout.kind, limit), (of_layout, seconds))
                measured[layout.kind, limit] = min((of_layout, seconds), before, key=lambda one: one[1])
                amount, unit, rate = limit.amount, limit.unit, sum(sample) / (seconds + share * step_seconds)
                log.info("timed %s, up to %d %s at once: %.0f tokens/s", layout.kind, amount, unit, rate)
    if not measured:
        return None
    trials = {
        (kind, limit): TimedTrial(
            kind,
            limit,
            sum(sample) / (seconds + share * step_seconds),
            1 - sum(sample) / sum(piece.padded_tokens for piece in pieces),
        )
        for (kind, limit), (pieces, seconds) in measured.items()
    }
    kinds = {layout.kind: layout for layout in layouts}
    kind, limit = min(trials, key=lambda one: seconds_of(kinds[one[0]], one[1]))
    return Throughput(kind, limit, trials[kind, limit].tokens_per_second, times[kind], tuple(trials.values()))


def fitted(timings: Sequence[tuple[MicroBatch, float]]) -> MicroBatchTime:
    """Fit the time of micro-batches to those that were timed: non-negative least squares of relative errors.

    Few or similar micro-batches do not tell the parts from each other, so some that behave as :class:`.MicroBatchTime` does
    by default, at the mean speed of the others, are added with a tenth of the weight.
    """
    seconds = [each for _, each in timings]
    usual = MicroBatchTime()
    made_up = [MicroBatch([0] * rows, length) for rows, length in ((1, 64), (8, 128), (1, 1024), (16, 512))]
    speed = sum(seconds) / sum(usual.of([piece]) for piece, _ in timings)
    pieces = [piece for piece, _ in timings] + made_up
    target = torch.tensor([*seconds, *(speed * usual.of([piece]) for piece in made_up)], dtype=torch.float64)
    features = torch.tensor(
        [(1, len(piece.rows), piece.padded_tokens, sum(n * n for n in piece.lengths)) for piece in pieces],
        dtype=torch.float64,
    )
    weight = torch.tensor([1.0] * len(timings) + [0.1] * len(made_up)) / target.clamp(min=1e-9)
    features, target = features * weight[:, None], target * weight
    scale = features.norm(dim=0)
    features /= scale
    gram, found = features.T @ features, torch.zeros(len(scale), dtype=torch.float64)
    of_target = features.T @ target
    for _ in range(500):  # coordinate descent, which for so few unknowns comes to the least
        for unknown in range(len(scale)):
            found[unknown] = (of_target[unknown] - gram[unknown] @ found + found[unknown]).clamp(min=0)
    return MicroBatchTime(*(found / scale).tolist())
