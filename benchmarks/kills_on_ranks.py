"""Whether a run on several ranks, some or all of which are killed, goes on by itself and is the one
that nothing happened to.

    python benchmarks/kills_on_ranks.py [--seed N] [--ways WAY ...] [--no-torchrun] [--output DIR]

Two ranks on this machine are killed by SIGKILL, one of them or both, at each moment of a run: as it
starts, in the probe, where the batch grows, among steps, in saves and just after them; all are then
started again as torchrun does, and a few by torchrun itself. Weights of every epoch and every
figure of every step are compared bit by bit with those of a run on two ranks that was left alone;
the audit must hold, a survivor must end soon and say why, once. Exits 1 otherwise.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import records

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.cli import make_setup
from support.killed_runs_on_ranks import (
    WAYS,
    experiment,
    killed_after_it_was_resumed,
    killed_before_its_first_save,
    killed_under_torchrun,
    undisturbed,
)


def show(found: dict[str, Any]) -> dict[str, Any]:
    """Print what one run has met with."""
    print(f"\n{found['way']}: {len(found['kills'])} kills, {found['seconds']:.0f} s", flush=True)
    for kill in found["kills"]:
        victims = "all" if len(kill["victims"]) > 1 else f"rank {kill['victims'][0]}"
        print(
            f"  {victims:<7} {kill['hit']:<24} all ended {kill['ended_after']:.1f} s later",
            flush=True,
        )
    for difference in found["differing"]:
        print(f"  DIFFERING {difference}", flush=True)
    return found


def main() -> None:
    parser = records.parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument(
        "--no-torchrun", action="store_true", help="leave the real command line out"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        setup = make_setup(Path(folder))
        rows = [show(experiment(setup, way, seed=arguments.seed)) for way in arguments.ways]
        whole = undisturbed(setup, WAYS["plain"])
        rows.append(show(killed_after_it_was_resumed(setup, whole, seed=arguments.seed)))
        rows.append(show(killed_before_its_first_save(setup, whole)))
        if not arguments.no_torchrun:
            rows.append(show(killed_under_torchrun(setup, whole, kills=3, seed=arguments.seed)))
    kills, differing = (
        sum(len(row["kills"]) for row in rows),
        sum(len(row["differing"]) for row in rows),
    )
    slowest = max(kill["ended_after"] for row in rows for kill in row["kills"])
    print(
        f"\n{kills} kills, {differing} differences; all had ended {slowest:.1f} s after a kill at"
        " the latest"
    )
    records.write(
        "kills_on_ranks",
        arguments.output,
        kills=kills,
        differing=differing,
        slowest=slowest,
        runs=rows,
    )
    sys.exit(bool(differing or not kills))


if __name__ == "__main__":
    main()
