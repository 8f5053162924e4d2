"""Whether a run that is killed and resumed is the one that was never killed: genuine kills at many
moments, in several ways.

    python benchmarks/kills.py [--kills N] [--seed N] [--jobs N] [--ways WAY ...] [--output DIR]

Each way is trained once from beginning to end; then runs of it are killed by SIGKILL, N in all, and
resumed each time by the real command line (see tests/support/killed_runs.py). Weights of every
epoch, every figure of every step and of every validation, times excepted, are compared bit by bit,
steps that were done again with what they were the first time, and the audit must hold. Exits 1
where anything differs, or where a moment was never hit.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import records

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import killed_runs
from support.cli import make_setup
from support.killed_runs import MOMENTS, WAYS


def experiment(way: str, *, kills: int, seed: int) -> dict[str, Any]:
    """Run the experiment of a way in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return killed_runs.experiment(make_setup(Path(folder)), way, kills=kills, seed=seed)
        except AssertionError as error:
            differing = [f"it failed: {error}"]
            return {"way": way, "differing": differing, "by_moment": {}, "kills": 0}


def show(all_found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print each as it comes."""
    columns = "  ".join(MOMENTS)
    print(f"{'way':<13}  {columns}  kills  runs  steps  differing  seconds", flush=True)
    rows = []
    for found in all_found:
        rows.append(found)
        hits = "  ".join(
            f"{found['by_moment'].get(moment, '-'):>{len(moment)}}" for moment in MOMENTS
        )
        counts = f"{found['kills']:>5}  {found.get('runs', 0):>4}  {found.get('steps', 0):>5}"
        print(
            f"{found['way']:<13}  {hits}  {counts}  {len(found['differing']):>9} "
            f" {found.get('seconds', 0):>7.1f}",
            flush=True,
        )
        for difference in found["differing"]:
            print(f"  DIFFERING {difference}")
    return rows


def main() -> None:
    parser = records.parser(__doc__)
    parser.add_argument("--kills", type=int, default=40, help="of each way")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="ways at a time")
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        metavar="WAY",
        help="these alone; the record is named after them",
    )
    arguments = parser.parse_args()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no workers that outlive a kill
    with ThreadPoolExecutor(arguments.jobs) as pool:
        ways = reversed(arguments.ways or WAYS)  # the longest first
        begun = [
            pool.submit(experiment, way, kills=arguments.kills, seed=arguments.seed) for way in ways
        ]
        rows = show(future.result() for future in as_completed(begun))
    rows.sort(key=lambda row: list(WAYS).index(row["way"]))
    kills, differing = sum(row["kills"] for row in rows), sum(len(row["differing"]) for row in rows)
    never_hit = [
        f"{row['way']}: {moment}"
        for row in rows
        for moment, hits in row["by_moment"].items()
        if not hits
    ]
    print(
        f"\n{kills} kills, {differing} differences"
        + "".join(f"; never killed {moment}" for moment in never_hit)
    )
    name = "_".join(["kills", *(arguments.ways or ())]).replace(" ", "_")
    records.write(
        name, arguments.output, kills=kills, differing=differing, never_hit=never_hit, ways=rows
    )
    sys.exit(bool(differing or never_hit or not kills))


if __name__ == "__main__":
    main()
