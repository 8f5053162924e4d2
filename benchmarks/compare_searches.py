"""Table 1 of docs/comparison.md: searches for the largest batch, by other libraries and by this
project.

    python benchmarks/compare_searches.py [--output DIR]

The searches, model, memory count and true maximum are those of search_in_trainers.py, with one of
its budgets. The model has dropout, so that searches which draw random numbers are detected.
"""

from __future__ import annotations

import time

import harness
import search_in_trainers

BUDGET_MIB = 96
DROPOUT = 0.1


def main() -> None:
    parser = harness.parser(__doc__)
    arguments = parser.parse_args()
    start = time.perf_counter()
    search_in_trainers.be_quiet()
    results = []
    for lengths in ("equal", "varying"):
        for program, method in search_in_trainers.SEARCHES:
            row = search_in_trainers.measured(program, method, lengths, BUDGET_MIB, dropout=DROPOUT)
            results.append(row)
            print(
                f"{lengths:<8} {program:<10} {method:<16} found {row['found']:>3} of"
                f" {row['true']:>3}, {len(row['trials'])} trials, {row['out_of_memory']} out of"
                f" memory; differs: {', '.join(row['differs']) or 'nothing'}",
                flush=True,
            )
    harness.write(
        "compare_searches",
        arguments.output,
        budget_mib=BUDGET_MIB,
        dropout=DROPOUT,
        results=results,
        seconds=round(time.perf_counter() - start, 1),
    )


if __name__ == "__main__":
    main()
