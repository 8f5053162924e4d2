"""How long ranks wait for each other: the rows of a step dealt in turn, and dealt by tokens.

    python benchmarks/dealing.py [--quick] [--output DIR]

Part (a) deals the steps of an epoch of 20,000 lognormal lengths to 8 ranks, lets each rank cut its
rows into micro-batches, and takes the time of a micro-batch to be its padded tokens. Ranks wait for
each other in every micro-batch, so a step takes the largest first one of any rank, the largest
second one, and so on. Part (b) measures what dealing itself takes a rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import records
import torch
from scale import lognormal

from adaptive_batch.data import (
    MicroBatchLayout,
    MicroBatchLimit,
    balance_by_rows,
    balance_by_tokens,
    micro_batches,
    plan_batches,
    row_order,
)

RANKS = 8
STEP_ROWS = 64
WINDOW = 4096
SIZES = (
    (8, 50, 16_384),
    (64, 50, 16_384),
    (512, 16, 4_096),
    (4_096, 16, 16_384),
    (4_096, 16, 4_096),
    (4_096, 16, 2_048),
)

Deal = Callable[[list[int], int, MicroBatchLimit, MicroBatchLayout], list[list[int]]]


@dataclass(frozen=True)
class Case:
    """Steps of an epoch, and what a micro-batch of them may hold."""

    name: str
    steps: list[list[int]]
    capacity: MicroBatchLimit
    shapes: MicroBatchLayout = field(default_factory=MicroBatchLayout)


def in_turn(
    lengths: list[int], ranks: int, capacity: MicroBatchLimit, shapes: MicroBatchLayout
) -> list[list[int]]:
    return [list(rows) for rows in balance_by_rows(len(lengths), ranks)]


WAYS: dict[str, Deal] = {"in turn": in_turn, "by tokens": balance_by_tokens}


def cases(lengths: torch.Tensor) -> list[Case]:
    def steps_by_tokens(each: int, *, divisible: bool = False, **order: Any) -> list[list[int]]:
        rows = row_order(len(lengths), lengths=lengths, **order)[:]
        return plan_batches(lengths, RANKS * each, order=rows, divisible=divisible).tolist()

    def tokens(amount: int) -> MicroBatchLimit:
        return MicroBatchLimit(amount, "tokens")

    large, small = steps_by_tokens(16_384), steps_by_tokens(4_096)
    by_length = steps_by_tokens(16_384, order="seqlen", window=WINDOW)
    by_rows = [
        list(range(start, min(start + STEP_ROWS, len(lengths))))
        for start in range(0, len(lengths), STEP_ROWS)
    ]
    divisible = steps_by_tokens(16_384, divisible=True)
    return [
        Case("16,384 real tokens a rank", large, tokens(16_384)),
        Case("16,384 real tokens a rank", large, tokens(8_192)),
        Case("16,384 real tokens a rank", large, tokens(32_768)),
        Case(f"the same, seqlen, window {WINDOW:,}", by_length, tokens(16_384)),
        Case("4,096 real tokens a rank", small, tokens(4_096)),
        Case("4,096 real tokens a rank", small, tokens(2_048)),
        Case(f"{STEP_ROWS} rows", by_rows, tokens(16_384)),
        Case(f"{STEP_ROWS} rows", by_rows, MicroBatchLimit(STEP_ROWS)),
        Case(f"{STEP_ROWS} rows", by_rows, MicroBatchLimit(4)),
        Case(
            "16,384, divisible, uniform rows", divisible, tokens(16_384), MicroBatchLayout("rows")
        ),
        Case("16,384 a rank, uniform lengths", large, tokens(16_384), MicroBatchLayout("lengths")),
    ]


# --- part (a)


def measure(case: Case, way: str, lengths: list[int]) -> dict[str, Any]:
    imbalances, counts, beyond_fewest = [], [], 0
    real = padded = waited_for = 0
    for step in case.steps:
        of_step = [lengths[row] for row in step]
        dealt = WAYS[way](of_step, RANKS, case.capacity, case.shapes)
        assert sorted(row for rows in dealt for row in rows) == list(range(len(step)))
        pieces = [
            micro_batches([of_step[row] for row in rows], case.capacity, case.shapes)
            for rows in dealt
        ]
        tokens = [[piece.run_tokens for piece in of_rank] for of_rank in pieces]
        totals = list(map(sum, tokens))
        imbalances.append(max(totals) * RANKS / sum(totals) - 1)
        counts.append(max(map(len, tokens)))
        beyond_fewest += counts[-1] > -(
            -len(micro_batches(of_step, case.capacity, case.shapes)) // RANKS
        )
        real += sum(of_step)
        padded += sum(totals)
        waited_for += RANKS * sum(map(max, zip_longest(*tokens, fillvalue=0)))
    return {
        "case": case.name,
        "capacity": str(case.capacity),
        "uniform": case.shapes.uniform,
        "way": way,
        "steps": len(case.steps),
        "micro_batches": statistics.mean(counts),
        "steps_beyond_fewest_micro_batches": beyond_fewest,
        "mean_imbalance": statistics.mean(imbalances),
        "largest_imbalance": max(imbalances),
        "waiting": 1 - padded / waited_for,
        "padding": 1 - real / padded,
        "time_per_real_token": waited_for / real,
    }


def print_measured(rows: list[dict[str, Any]]) -> None:
    print(
        f"\n(a) {RANKS} ranks; time is padded tokens, and 1.00 is a step without padding and"
        " without waiting"
    )
    print(
        f"{'steps':<32} {'at once':<21} {'dealt':<10} {'micro-batches':>14} {'imbalance':>10}"
        f" {'largest':>8} {'waiting':>8} {'padding':>8} {'time':>6}"
    )
    for row in rows:
        print(
            f"{row['case']:<32} {row['capacity']:<21} {row['way']:<10}"
            f" {row['micro_batches']:>14.2f} {row['mean_imbalance']:>10.1%}"
            f" {row['largest_imbalance']:>8.1%} {row['waiting']:>8.1%} {row['padding']:>8.1%}"
            f" {row['time_per_real_token']:>6.2f}"
        )


# --- part (b)


def measure_seconds(ranks: int, rows: int, max_tokens: int, repeats: int) -> dict[str, Any]:
    capacity = MicroBatchLimit(max_tokens, "tokens")
    lengths = lognormal(ranks * rows).tolist()
    taken: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        dealt = balance_by_tokens(lengths, ranks, capacity)
        taken.append(time.perf_counter() - start)
    counts = [
        len(micro_batches([lengths[row] for row in positions], capacity)) for positions in dealt
    ]
    return {
        "ranks": ranks,
        "rows": ranks * rows,
        "capacity": str(capacity),
        "micro_batches": max(counts),
        "seconds": min(taken),
    }


def print_seconds(rows: list[dict[str, Any]]) -> None:
    print("\n(b) dealing by tokens, the least of several times")
    print(f"{'ranks':>6} {'rows':>8} {'at once':<21} {'micro-batches':>14} {'milliseconds':>13}")
    for row in rows:
        print(
            f"{row['ranks']:>6,} {row['rows']:>8,} {row['capacity']:<21} {row['micro_batches']:>14}"
            f" {1e3 * row['seconds']:>13.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="4,000 rows, and dealing timed fewer times"
    )
    parser.add_argument("--output", type=Path, default=records.RESULTS, metavar="DIR")
    arguments = parser.parse_args()

    drawn = lognormal(4_000 if arguments.quick else 20_000)
    lengths = drawn.tolist()
    measured = [measure(case, way, lengths) for case in cases(drawn) for way in WAYS]
    print_measured(measured)
    repeats = 3 if arguments.quick else 20
    seconds = [measure_seconds(*size, repeats) for size in SIZES]
    print_seconds(seconds)
    records.write(
        "dealing",
        arguments.output,
        ranks=RANKS,
        rows=len(lengths),
        dealing=measured,
        planning=seconds,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)  # as in batching.py: waiting for a second thread takes longer
    main()
