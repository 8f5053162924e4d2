"""A run that is killed and resumed equals a run that was never killed.

    python benchmarks/kills.py [--kills N] [--seed N] [--jobs N] [--ways WAY ...] [--output DIR]

Each way is trained once without a kill. Then N runs in total are killed at random moments, and
resumed with the real command line each time (tests/support/killed_runs.py). Weights of
every epoch and all figures of every step and validation, except times, are compared bit by bit.
Repeated steps are compared with their first run, and the audit must succeed. Exits with 1 if
anything differs, or if no kill was aimed at one of the moments.
"""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import harness
from support import killed_runs
from support.cli import make_setup
from support.killed_runs import MOMENTS, WAYS


def measure(way: str, *, kills: int, seed: int) -> dict[str, Any]:
    """Kill and resume runs of a way."""
    found: dict[str, Any] = {"way": way, "by_moment": {}, "kills": 0, "runs": 0, "steps": 0}
    with tempfile.TemporaryDirectory() as folder:
        try:
            setup = make_setup(Path(folder))
            return found | killed_runs.experiment(setup, way, kills=kills, seed=seed)
        except AssertionError as error:
            return found | {"differing": [f"it failed: {error}"]}


def never_hit(row: dict[str, Any]) -> list[str]:
    return [moment for moment, hits in row["by_moment"].items() if not hits]


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--kills", type=int, default=40, help="of each way")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="ways at a time")
    parser.add_argument("--ways", nargs="+", choices=WAYS, metavar="WAY")
    arguments = parser.parse_args()
    # No workers that outlive a kill.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

    def result(future: Any) -> dict[str, Any]:
        row: dict[str, Any] = future.result()
        hits = {name.replace(" ", "_"): row["by_moment"].get(name) for name in MOMENTS}
        return {**row, **hits}

    moments = " ".join(f"{name.replace(' ', '_')}:>{len(name)}" for name in MOMENTS)
    # Processes: a thread that starts a run would read the exit status of another thread's run.
    with ProcessPoolExecutor(arguments.jobs) as pool:
        begun = [
            pool.submit(measure, way, kills=arguments.kills, seed=arguments.seed)
            # The longest first.
            for way in reversed(arguments.ways or WAYS)
        ]
        harness.run(
            "_".join(["kills", *(arguments.ways or ())]).replace(" ", "_"),
            arguments.output,
            as_completed(begun),
            result,
            columns=f"way:<13 {moments} kills:>5 runs:>4 steps:>5 differing:>9 seconds:>7.1f",
            errors=lambda row: [
                *row["differing"],
                *(f"never killed {moment}" for moment in never_hit(row)),
            ],
            figures=lambda rows: {
                "kills": sum(row["kills"] for row in rows),
                "differing": sum(len(row["differing"]) for row in rows),
                "never_hit": sum(len(never_hit(row)) for row in rows),
            },
        )


if __name__ == "__main__":
    main()
