"""Whether a replay leaves a trace: memory runs out at every single operation of a step, each time
in a training of its own.

    python benchmarks/faults.py [--quick] [--adapters | --tasks] [--output DIR]

By rows and by tokens, with and without activation checkpointing, once and again in the replay; in
the first step of the optimizer and in the second (see tests/support/fault_injection.py). What each
training ends with, weights, optimizer, running statistics, random numbers and every figure of its
steps, is compared bit by bit with one that never ran out and was given the same capacity in each
step. With `--adapters`, a way of each of LoRA, DoRA and QLoRA on a frozen base. With `--tasks`,
preference pairs and distillation, whose second model may run out of memory too.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import records
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.fault_injection import PHASES, Way, sweep

QUICK = 29  # every so many-th operation
FLAGS = (False, True)
WAYS = [Way(*combination) for combination in itertools.product(("rows", "tokens"), FLAGS, FLAGS)]
WITH_ADAPTERS = [
    Way("rows", checkpointing=False, adapters="LoRA"),
    Way("tokens", checkpointing=True, adapters="DoRA"),
    Way("rows", checkpointing=False, nested=True, adapters="QLoRA"),
]
WITH_TASKS = [
    Way("rows", checkpointing=False, adapters="LoRA", task="DPO"),
    Way("rows", checkpointing=True, nested=True, task="DPO"),
    Way("tokens", checkpointing=True, adapters="LoRA", task="distillation"),
    Way("rows", checkpointing=False, nested=True, task="distillation"),
]


def main() -> None:
    parser = records.parser(__doc__, quick=f"every {QUICK}th operation")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--adapters", action="store_true", help="on a frozen base")
    kinds.add_argument("--tasks", action="store_true", help="preference pairs and distillation")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the model is tiny
    columns = " ".join(f"{phase.replace(' ', '_')}:>{max(6, len(phase))}" for phase in PHASES)
    table = records.Table(f"way:<38 places:>6 {columns} identical:>9 seconds:>8.1f")
    rows = []
    ways = WITH_ADAPTERS if arguments.adapters else WAYS
    if arguments.tasks:
        ways = WITH_TASKS
    for way in ways:
        start = time.perf_counter()
        swept = list(sweep(way, every=QUICK if arguments.quick else 1))
        seconds = time.perf_counter() - start
        phases = Counter(phase for phase, _ in swept)
        differing = Counter(name for _, names in swept for name in names)
        identical = sum(not names for _, names in swept)
        rows.append(
            {
                **asdict(way),
                "places": len(swept),
                "by_phase": dict(phases),
                "identical": identical,
                "differing": dict(differing),
                "seconds": round(seconds, 1),
            }
        )
        counts = {phase.replace(" ", "_"): phases[phase] for phase in PHASES}
        table.print({**rows[-1], "way": str(way)}, **counts)
        if differing:
            print(f"  DIFFERING {dict(differing)}")
    places, identical = (sum(row[name] for row in rows) for name in ("places", "identical"))
    name = "faults" + "_adapters" * arguments.adapters + "_tasks" * arguments.tasks
    print(f"\n{places} places, bit-identical after {identical}")
    records.write(name, arguments.output, places=places, identical=identical, faults=rows)
    sys.exit(identical != places or not places)


if __name__ == "__main__":
    main()
