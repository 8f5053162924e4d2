"""A step that runs out of memory at any operation ends with the bits of an undisturbed step.

    python benchmarks/faults.py [--quick] [--adapters | --tasks] [--output DIR]

An OOM is injected at every operation of a step, each time in a new training run
(tests/support/fault_injection.py): with limits in rows and in tokens, with and without activation
checkpointing, once and again in the retry, in the first and in the second step of the optimizer.
Weights, optimizer, running statistics, random number generators and all figures of the steps are
compared bit by bit with a run that had the same limits and no OOM. `--adapters` trains LoRA, DoRA
and QLoRA on a frozen base. `--tasks` trains preference pairs and distillation, whose second model
may run out of memory too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import asdict
from typing import Any

import harness
import torch
from support.fault_injection import Way, sweep

PHASES = ("forward", "backward", "between", "counting", "clipping")
# Every N-th operation.
QUICK = 29
FLAGS = (False, True)
WAYS = {
    None: [Way(*each) for each in itertools.product(("rows", "tokens"), FLAGS, FLAGS)],
    "adapters": [
        Way("rows", checkpointing=False, adapters="LoRA"),
        Way("tokens", checkpointing=True, adapters="DoRA"),
        Way("rows", checkpointing=False, nested=True, adapters="QLoRA"),
    ],
    "tasks": [
        Way("rows", checkpointing=False, adapters="LoRA", task="DPO"),
        Way("rows", checkpointing=True, nested=True, task="DPO"),
        Way("tokens", checkpointing=True, adapters="LoRA", task="distillation"),
        Way("rows", checkpointing=False, nested=True, task="distillation"),
    ],
}


def measure(way: Way, *, every: int) -> dict[str, Any]:
    """Run out of memory at every N-th operation of a way to train."""
    swept = list(sweep(way, every=every))
    phases = Counter(phase for phase, _ in swept)
    return {
        **asdict(way),
        "way": str(way),
        "places": len(swept),
        **{phase: phases[phase] for phase in PHASES},
        "identical": sum(not names for _, names in swept),
        "differing": Counter(name for _, names in swept for name in names),
    }


def main() -> None:
    parser = harness.parser(__doc__, quick=f"every {QUICK}th operation")
    kinds = parser.add_mutually_exclusive_group()
    for kind, text in (("adapters", "on a frozen base"), ("tasks", "DPO and distillation")):
        kinds.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, help=text)
    arguments = parser.parse_args()
    # The model is tiny.
    torch.set_num_threads(1)
    phases = " ".join(f"{phase}:>{len(phase)}" for phase in PHASES)
    harness.run(
        f"faults_{arguments.kind}" if arguments.kind else "faults",
        arguments.output,
        WAYS[arguments.kind],
        lambda way: measure(way, every=QUICK if arguments.quick else 1),
        columns=f"way:<46 places:>6 {phases} identical:>9 seconds:>8.1f",
        errors=lambda row: [row["differing"]] if row["differing"] or not row["places"] else [],
        figures=lambda rows: {
            key: sum(row[key] for row in rows) for key in ("places", "identical")
        },
    )


if __name__ == "__main__":
    main()
