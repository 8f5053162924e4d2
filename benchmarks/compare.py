"""Measure the tables of docs/comparison.md, two at a time, and write them into the page.

    python benchmarks/compare.py [--only TABLE ...] [--draw] [--output DIR]

Each table has its own command, compare_TABLE.py, which writes a dated record. The page shows the
newest record of each table and links it. ``--draw`` writes the page without measuring.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parent
RESULTS = BENCHMARKS / "results"
PAGE = BENCHMARKS.parent / "docs" / "comparison.md"
# Ends a table in the page.
END = "<!-- end -->"

Record = dict[str, Any]


def newest_record(table: str, folder: Path = RESULTS) -> Path:
    """Return the path of the newest record of a table."""
    return max(folder.glob(f"compare_{table}-20*.json"))


# --- the tables, as rows of cells


def cells_of_searches(record: Record) -> list[list[str]]:
    """Return a line for each search: rows of equal length, then rows of varying length."""
    both: dict[tuple[str, str], list[Record]] = {}
    for result in record["results"]:
        both.setdefault((result["program"], result["search"]), []).append(result)
    lines = [
        [
            *("search", "equal lengths: rows found of true maximum", "trials", "OOMs"),
            *("varying lengths: rows found of true maximum", "trials", "OOMs", "changed state"),
        ]
    ]
    for (program, search), results in both.items():
        line = [f"{program}: {search}"]
        for result in results:
            is_too_large = result["found"] > result["true"]
            found = f"{result['found']} of {result['true']}"
            line.append(found + (", too large" if is_too_large else ""))
            line += [str(len(result["trials"])), str(result["out_of_memory"])]
        names = {name: None for result in results for name in result["differs"]}
        lines.append([*line, ", ".join(names) or "nothing"])
    return lines


def cells_of_estimators(record: Record) -> list[list[str]]:
    """Return a line for each estimator."""
    lines = [["estimator", "peaks", "median error", "worst error", "OOM runs predicted to fit"]]
    for result in record["results"]:
        said_fits = f"{result['said_fits']} of {result['ran_out']}"
        lines.append(
            [
                result["estimator"],
                str(result["rows"]),
                f"{result['median']:.3%}",
                f"{result['worst']:+.3%}",
                said_fits if result["ran_out"] else "not run",
            ]
        )
    return lines


def cells_of_resume(record: Record) -> list[list[str]]:
    """Return a line for each way to resume."""
    lines = [
        [
            *("method", "steps repeated", "rows lost", "rows repeated", "order of rows"),
            *("final weights with dropout", "final weights without dropout"),
        ]
    ]
    for result in record["results"]:
        lines.append(
            [
                result["way"],
                str(result["steps_done_again"]),
                str(result["rows_lost"]),
                str(result["rows_repeated"]),
                "same" if result["same_order"] else "different",
                "identical" if result["same_bits"] else "different",
                "identical" if result["same_bits_without_dropout"] else "different",
            ]
        )
    return lines


def cells_of_batching(record: Record) -> list[list[str]]:
    """Return a line for each way to make batches."""
    lines = [
        [
            *("method", "padding", "batches", "tokens of the largest batch / mean"),
            *("batches above the budget", "rows used", "time (s)"),
        ]
    ]
    for result in record["results"]:
        lines.append(
            [
                result["way"],
                f"{result['padding']:.1%}",
                f"{result['batches']:,}",
                f"{result['largest_over_mean']:.2f}",
                f"{result['batches_over_budget']:,}",
                f"{record['rows'] - result['rows_lost']:,} of {record['rows']:,}",
                f"{result['seconds']:.1g}" if result["seconds"] < 1 else f"{result['seconds']:.0f}",
            ]
        )
    return lines


CELLS: dict[str, Callable[[Record], list[list[str]]]] = {
    "searches": cells_of_searches,
    "estimators": cells_of_estimators,
    "resume": cells_of_resume,
    "batching": cells_of_batching,
}

PACKAGES = {
    "searches": ("torch", "accelerate", "transformers", "lightning"),
    "estimators": ("torch", "accelerate", "transformers"),
    "resume": ("torch", "accelerate", "transformers", "lightning", "torchtune"),
    "batching": ("torch", "transformers"),
}


# --- the page


def drawn(table: str, path: Path) -> str:
    """Return a table in Markdown, with its command and a link to its record."""
    record = json.loads(path.read_text(encoding="utf-8"))
    heading, *lines = CELLS[table](record)
    rows = [f"| {' | '.join(cells)} |" for cells in (heading, *lines)]
    rows.insert(1, f"|{'---|' * len(heading)}")
    versions = ", ".join(f"{name} {version}" for name, version in versions_of(table, record))
    measured = f"Measured on {record['date']} by `{record['command']}` in {record['seconds']:.0f} s"
    source = f"[{path.name}](../benchmarks/results/{path.name})"
    return "\n".join([*rows, "", f"{measured}: {source}, with {versions}."])


def versions_of(table: str, record: Record) -> Iterable[tuple[str, str]]:
    """Yield the packages that a table compares, and their versions."""
    for name in PACKAGES[table]:
        yield name, record["versions"][name]
    if "deepspeed" in record:
        yield "deepspeed", record["deepspeed"]


def page_with_tables(page: str, folder: Path = RESULTS) -> str:
    """Return the page with each table written again between its two marks."""
    for table in CELLS:
        begin = page.index("-->", page.index(f"<!-- {table}: ")) + len("-->")
        end = page.index(END, begin)
        page = f"{page[:begin]}\n\n{drawn(table, newest_record(table, folder))}\n\n{page[end:]}"
    return page


def measure(table: str, output: Path) -> tuple[str, float, int]:
    """Run the command of a table; return the table, the seconds and the exit status."""
    script = f"benchmarks/compare_{table}.py"
    others = [] if output == RESULTS else ["--output", str(output)]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, script, *others],
        cwd=BENCHMARKS.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    return table, time.perf_counter() - start, done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=CELLS, default=list(CELLS), metavar="TABLE")
    parser.add_argument("--draw", action="store_true", help="write the page without measuring")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR")
    arguments = parser.parse_args()
    failed = 0
    if not arguments.draw:
        start = time.perf_counter()
        with ThreadPoolExecutor(2) as pool:
            outcomes = list(
                pool.map(lambda table: measure(table, arguments.output), arguments.only)
            )
        for table, seconds, status in outcomes:
            print(f"{table:<12} {seconds:>6.0f} s{'' if status == 0 else '  FAILED'}")
            failed |= status
        print(f"{'in all':<12} {time.perf_counter() - start:>6.0f} s")
    # The page links records of this folder, and another folder may not have all of them.
    if not failed and arguments.output == RESULTS:
        page = page_with_tables(PAGE.read_text(encoding="utf-8"), arguments.output)
        PAGE.write_text(page, encoding="utf-8")
    return failed


if __name__ == "__main__":
    sys.exit(main())
