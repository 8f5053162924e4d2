"""A run that resumes on 1, 2, 4, 2 and 1 ranks equals a run on one device.

    python benchmarks/resume_across_ranks.py [--ways WAY ...] [--output DIR]

Each way is trained once on one device without interruption, and once in parts. Each part stops
within an epoch, and the next part resumes on a different number of ranks. Rows, global batch and
learning rate of every step must be equal, and the audit must succeed. The table has the largest
relative difference of a loss, and the norm of the difference of all weights relative to their norm.
Exits with 1 if anything is not equal, or a loss differs by more than 1e-5.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import harness
from support.cli import make_setup
from support.resumes_on_ranks import WAYS, compare

MOST_APART = 1e-5


def errors(row: dict[str, Any]) -> list[str]:
    apart = [f"a loss differs by {row['loss']:.1e}"] if row["loss"] > MOST_APART else []
    return [*row["differing"], *apart]


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        setup = make_setup(Path(folder))

        def measure(name: str) -> dict[str, Any]:
            way = WAYS[name]
            ranks = ", ".join(str(number) for number, *_ in way.parts)
            return {"way": name, "ranks": ranks, **compare(setup, way)}

        harness.run(
            "resume_across_ranks",
            arguments.output,
            arguments.ways,
            measure,
            columns="way:<24 ranks:<13 steps:>5 differing:>9 loss:>8.1e weights:>8.1e",
            errors=errors,
            figures=lambda rows: {
                "differing": sum(len(row["differing"]) for row in rows),
                "loss_apart": max(row["loss"] for row in rows),
            },
        )


if __name__ == "__main__":
    main()
