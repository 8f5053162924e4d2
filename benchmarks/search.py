"""Trials and OOMs of each search strategy on a simulated device, and the rows that it finds.

    python benchmarks/search.py [--quick] [--output DIR]

The memory of the device follows a known curve. Only `predict` uses the reported peaks, with 1%
noise in half of the cases. benchmarks/search_in_trainers.py compares real programs and other
libraries.
Exits with 1 if a search returns a size that it did not try, or if `predict` without noise misses
the maximum or runs out of memory although the maximum is above 2.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from itertools import product
from typing import Any

import harness

from adaptive_batch.probe import BinarySearch, Halving, Predictive, Search, Trial

BUDGET = 16 * 1024**3
# The default of probe.maximum.
MAXIMUM = 4096
TRUE_MAXIMA = (1, 2, 37, 700, 3000)
# Share of the budget that is used before the first row.
FIXED = 0.2

Peak = Callable[[int], float]
SEARCHES: dict[str, Callable[[], Search]] = {
    "predict": lambda: Predictive(budget_bytes=BUDGET, maximum=MAXIMUM),
    "binary": lambda: BinarySearch(maximum=MAXIMUM),
    "halve": lambda: Halving(start=MAXIMUM),
}


def curves(true_maximum: int) -> dict[str, Peak]:
    """Return peaks in bytes; the budget is half-way between those of the true maximum and of the
    next row.
    """
    end = true_maximum + 0.5

    def power(exponent: float) -> Peak:
        return lambda rows: BUDGET * (FIXED + (1 - FIXED) * (rows / end) ** exponent)

    return {
        "linear": power(1),
        "b^0.9": power(0.9),
        "b^1.1": power(1.1),
        "b^1.3": power(1.3),
        "flat to 3/8, then linear": lambda rows: BUDGET * max(3 / 8, 0.1 + 0.9 / end * rows),
    }


def run(make: Callable[[], Search], peak: Peak, *, noise: float, seed: int) -> tuple[int, Any]:
    """Return the best size of a search, and its trials."""
    draw = random.Random(seed)
    search = make()
    trials = []
    while (rows := search.candidate) is not None:
        fits = peak(rows) <= BUDGET
        reported = peak(rows) * (1 + draw.uniform(-noise, noise))
        trials.append(Trial(rows, fits, round(reported) if fits else None))
        search.record(trials[-1])
    return search.best, trials


def measure(name: str, curve: str, true_maximum: int, noise: float, seeds: int) -> dict[str, Any]:
    """Run one search with each seed, and return medians and worst cases."""
    peak = curves(true_maximum)[curve]
    runs = [
        run(SEARCHES[name], peak, noise=noise, seed=seed) for seed in range(seeds if noise else 1)
    ]
    found = [best for best, _ in runs]
    num_trials = [len(trials) for _, trials in runs]
    ooms = [sum(not trial.fits for trial in trials) for _, trials in runs]
    return {
        "true": true_maximum,
        "curve": curve,
        "noise": noise,
        "search": name,
        "found": round(statistics.median(found)),
        "found_worst": min(found),
        "tried": all(
            any(trial.fits and trial.batch_size == best for trial in trials)
            for best, trials in runs
        ),
        "trials": statistics.median(num_trials),
        "trials_worst": max(num_trials),
        "ooms": statistics.median(ooms),
        "ooms_worst": max(ooms),
    }


def errors(row: dict[str, Any]) -> list[str]:
    """Return the promises that a search broke."""
    is_exact = row["found"] == row["true"] and (row["true"] <= 2 or not row["ooms"])
    broken = [] if row["tried"] else ["a size that was not tried"]
    if row["search"] == "predict" and not row["noise"] and not is_exact:
        broken.append("not exact, or out of memory")
    return broken


def main() -> None:
    parser = harness.parser(__doc__, quick="fewer seeds and sizes")
    arguments = parser.parse_args()
    true_maxima = (2, 37) if arguments.quick else TRUE_MAXIMA
    seeds = 5 if arguments.quick else 30
    harness.run(
        "search",
        arguments.output,
        product(SEARCHES, curves(1), true_maxima, (0.0, 0.01)),
        lambda case: measure(*case, seeds),
        columns="search:<8 curve:<24 true:>5 noise:>5.0% found:>6 found_worst:>11 tried:>5"
        " trials:>6g trials_worst:>12 ooms:>5g ooms_worst:>10",
        errors=errors,
    )


if __name__ == "__main__":
    main()
