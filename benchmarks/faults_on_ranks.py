"""What becomes of ranks when memory runs out on one of them, or on both: at places all over a step,
and over a probe's trial.

    python benchmarks/faults_on_ranks.py [--every N] [--lost N] [--output DIR]

Two ranks on gloo with FSDP2. Where the others can be told, the step is replayed, and what it and
the next one leave, weights, optimizer, buffers, random numbers, rows and figures, is compared bit
by bit with ranks that had the smaller capacity from the start; a trial must be said not to fit, and
later trials must peak where they did before, to the byte. Where they cannot be told, in a
collective, while counting or clipping, while recovering, or in the first micro-batch ever, the rank
must say so and all processes must end. No rank may wait for another (see
tests/support/fault_injection_on_ranks.py).
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import records
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.fault_injection_on_ranks import (
    Outcome,
    Way,
    at_first,
    chosen,
    once_more,
    record,
    survey,
    sweep,
)

WAYS = [
    Way(False, measures_noise=True),
    Way(True),
    Way(False, trials=True),
    Way(True, trials=True),
    Way(False),
    Way(True, measures_noise=True),
]
AGAIN = (1, 4, 8, 12, 20, 40, 200)  # operations after the first failure


def run_way(way: Way, *, every: int, lost_of_each_phase: int) -> list[Outcome]:
    """All chosen places of one way, and a line for each outcome that there should not be."""
    replayed, lost = chosen(survey(way), every=every, lost_of_each_phase=lost_of_each_phase)
    nested = once_more(replayed, after=AGAIN)[:: max(1, 4 - lost_of_each_phase)]
    first = [] if way.trials else at_first(replayed, lost_of_each_phase)
    outcomes = []
    for outcome in sweep(way, [*replayed, *lost, *nested, *first]):
        outcomes.append(outcome)
        if is_wrong(outcome):
            print(f"  WRONG {outcome}", flush=True)
    return outcomes


def is_wrong(outcome: Outcome) -> bool:
    """It hung, something else than a lost rank ended it, or what it left differs."""
    return outcome.ended not in ("replayed", "lost", "one row too large") or bool(outcome.differing)


def main() -> None:
    parser = records.parser(__doc__)
    parser.add_argument(
        "--every", type=int, default=1, help="so many-th operation of those that can be replayed"
    )
    parser.add_argument(
        "--lost",
        type=int,
        default=5,
        help="places of each phase that cost a pair of processes each",
    )
    parser.add_argument(
        "--ways",
        type=int,
        nargs="*",
        default=range(len(WAYS)),
        help="of six, by number from 0; default: all",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    wrong = 0
    table = records.Table(
        "way:<52 places:>6 replayed:>8 lost:>5 wrong:>5 longest_end:>11.1f seconds:>8.1f"
    )
    for way in (WAYS[number] for number in arguments.ways):
        start = time.perf_counter()
        outcomes = run_way(way, every=arguments.every, lost_of_each_phase=arguments.lost)
        ends = [
            outcome.seconds
            for outcome in outcomes
            if outcome.ended == "lost" and outcome.seconds is not None
        ]
        counts = Counter(outcome.ended for outcome in outcomes)
        failed = [outcome for outcome in outcomes if is_wrong(outcome)]
        wrong += len(failed)
        by_phase = Counter(
            f"{phase}: {outcome.ended}" for outcome in outcomes for phase in set(outcome.phases)
        )
        rows.append(
            {
                "way": str(way),
                "places": len(outcomes),
                "by_outcome": dict(counts),
                "by_phase": dict(sorted(by_phase.items())),
                "on_both_ranks": sum(all(outcome.place.operations) for outcome in outcomes),
                "in_the_first_step": sum(outcome.place.first_step for outcome in outcomes),
                "again": sum(bool(outcome.place.again) for outcome in outcomes),
                "wrong": [record(outcome) for outcome in failed],
                "seconds_to_end": {
                    "longest": max(ends, default=None),
                    "mean": sum(ends) / max(1, len(ends)),
                },
                "seconds": round(time.perf_counter() - start, 1),
            }
        )
        table.print(
            rows[-1],
            replayed=counts["replayed"],
            lost=counts["lost"],
            wrong=len(failed),
            longest_end=max(ends, default=0),
        )
        places = sum(row["places"] for row in rows)
        records.write("faults_on_ranks", arguments.output, places=places, wrong=wrong, ways=rows)
    print(f"\n{places} places, {wrong} wrong")
    sys.exit(bool(wrong) or not places)


if __name__ == "__main__":
    main()
