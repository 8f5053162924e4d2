"""Whether a run that goes on with other numbers of ranks, 1, 2, 4, 2 and 1, is the one that one
device trains alone.

    python benchmarks/resume_across_ranks.py [--ways WAY ...] [--output DIR]

Each way is trained once on one device from beginning to end, and once in parts, each of which is
asked to end in mid-epoch and gone on with by another number of ranks. Rows, global batch and
learning rate of every step must be equal and the audit must hold; the table shows how far losses
are apart (relative, the worst step) and weights (the norm of the difference over their norm, and
the largest difference of one). Exits 1 where anything is not equal, or a loss is more than 1e-5
apart.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import records

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.cli import SmallSetup, make_setup
from support.resumes_on_ranks import WAYS, compare, train_alone, train_in_parts

MOST_APART = 1e-5


def experiment(setup: SmallSetup, name: str) -> dict[str, Any]:
    begin, way = time.perf_counter(), WAYS[name]
    done = train_in_parts(setup, way)
    found = compare(done[-1].output_dir, train_alone(setup, way))
    ranks = [part.ranks for part in way.parts]
    return {"way": name, "ranks": ranks, **found, "seconds": round(time.perf_counter() - begin, 1)}


def main() -> None:
    parser = records.parser(__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    arguments = parser.parse_args()
    rows = []
    table = records.Table(
        "way:<24 ranks:<13 steps:>5 not_equal:>9 loss:>8.1e validation:>10.1e weights:>8.1e"
        " largest:>8.1e"
    )
    with tempfile.TemporaryDirectory() as folder:
        setup = make_setup(Path(folder))
        for name in arguments.ways:
            row = experiment(setup, name)
            rows.append(row)
            ranks = ", ".join(map(str, row["ranks"]))
            table.print(row, ranks=ranks, not_equal=len(row["differing"]))
            for difference in row["differing"]:
                print(f"  NOT EQUAL {difference}")
    differing, apart = sum(len(row["differing"]) for row in rows), max(row["loss"] for row in rows)
    print(f"\n{differing} not equal; losses {apart:.1e} apart at most")
    records.write(
        "resume_across_ranks", arguments.output, differing=differing, loss_apart=apart, ways=rows
    )
    sys.exit(bool(differing or apart > MOST_APART))


if __name__ == "__main__":
    main()
