"""When memory runs out on one of two ranks or on both, they repeat the step together or all end.

    python benchmarks/faults_on_ranks.py [--every N] [--lost N] [--ways N ...] [--output DIR]

Two ranks on gloo with FSDP2, in steps and in the trials of a search. If the other ranks can be
notified, the step is repeated; weights, optimizer, buffers, random numbers, rows and figures of it
and of the next step are compared bit by bit with ranks that had the smaller limit from the start.
Such a trial must report that its size does not fit, and later trials must have the same peaks, to
the byte. If the others cannot be notified (in a collective, while counting or clipping, while
recovering, or in the first micro-batch ever), the rank must report it, and all processes must end.
No rank may wait for another (tests/support/fault_injection.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import harness
import torch
from support.fault_injection import (
    Outcome,
    Way,
    at_first,
    chosen,
    once_more,
    survey,
    sweep_on_ranks,
)

AT_THE_END = Way(syncs_every_micro_batch=False)
WAYS = [
    replace(AT_THE_END, measures_noise=True),
    Way(),
    replace(AT_THE_END, trials=True),
    Way(trials=True),
    AT_THE_END,
    Way(measures_noise=True),
]
# Operations after the first failure.
AGAIN = (1, 4, 8, 12, 20, 40, 200)


def is_wrong(outcome: Outcome) -> bool:
    """Return whether it hung, ended by another error than a lost rank's, or left other bits."""
    return outcome.ended not in ("replayed", "lost", "one row too large") or bool(outcome.differing)


def measure(way: Way, *, every: int, lost_of_each_phase: int) -> dict[str, Any]:
    """Run out of memory at the chosen places of a way to train."""
    replayed, lost = chosen(survey(way), every=every, lost_of_each_phase=lost_of_each_phase)
    nested = once_more(replayed, after=AGAIN)[:: max(1, 4 - lost_of_each_phase)]
    first = [] if way.trials else at_first(replayed, lost_of_each_phase)
    all_lost = [place for places in lost.values() for place in places]
    outcomes = list(sweep_on_ranks(way, [*replayed, *all_lost, *nested, *first]))
    ends = [each.seconds for each in outcomes if each.ended == "lost" and each.seconds is not None]
    counts = Counter(outcome.ended for outcome in outcomes)
    by_phase = Counter(f"{phase}: {each.ended}" for each in outcomes for phase in set(each.phases))
    return {
        "way": str(way),
        "places": len(outcomes),
        "replayed": counts["replayed"],
        "lost": counts["lost"],
        "by_phase": dict(sorted(by_phase.items())),
        "on_both_ranks": sum(all(outcome.place.operations) for outcome in outcomes),
        "in_the_first_step": sum(outcome.place.first_step for outcome in outcomes),
        "again": sum(bool(outcome.place.again) for outcome in outcomes),
        "wrong": [asdict(outcome) for outcome in outcomes if is_wrong(outcome)],
        "longest_end": max(ends, default=0),
    }


def main() -> None:
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--every", type=int, default=1, help="every N-th operation that can be repeated")
    add("--lost", type=int, default=5, help="places of each phase that end a pair of processes")
    add("--ways", type=int, nargs="*", default=range(len(WAYS)), help="numbers from 0 of six")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    harness.run(
        "faults_on_ranks",
        arguments.output,
        [WAYS[number] for number in arguments.ways],
        lambda way: measure(way, every=arguments.every, lost_of_each_phase=arguments.lost),
        columns="way:<70 places:>6 replayed:>8 lost:>5 wrong:>5 longest_end:>11.1f seconds:>8.1f",
        errors=lambda row: row["wrong"] if row["places"] else ["no place"],
        figures=lambda rows: {
            "places": sum(row["places"] for row in rows),
            "wrong": sum(len(row["wrong"]) for row in rows),
        },
    )


if __name__ == "__main__":
    main()
