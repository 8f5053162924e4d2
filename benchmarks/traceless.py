"""Whether a probe leaves a trace: every combination of optimizer, optimizer in backward, dtype,
checkpointing, resumed optimizer.

    python benchmarks/traceless.py [--quick] [--adapters | --tasks] [--device cuda] [--threads N]
        [--output DIR]

In each, one training is probed again and again, however a probe can end (see
tests/support/training_cases.py), and everything is compared bit by bit after each; then it goes on
and is compared with one that was never probed. With `--adapters`, LoRA, DoRA and QLoRA on a frozen
base take turns in the combinations; with `--tasks`, preference pairs and distillation, whose frozen
model is compared too.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path

import records
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.training_cases import (
    CUDA_OPTIMIZERS,
    OPTIMIZERS,
    all_cases,
    cases_with_adapters,
    cases_with_tasks,
    traces,
)


def main() -> None:
    parser = records.parser(__doc__, quick="every seventh combination")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--adapters", action="store_true", help="on a frozen base")
    kinds.add_argument("--tasks", action="store_true", help="preference pairs and distillation")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of PyTorch; the model is tiny"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = (
        torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    )
    combinations = cases_with_adapters if arguments.adapters else all_cases
    if arguments.tasks:
        combinations = cases_with_tasks
    cases = combinations(CUDA_OPTIMIZERS if device.type == "cuda" else OPTIMIZERS)[
        :: 7 if arguments.quick else 1
    ]
    rows = []
    for case in cases:
        start = time.perf_counter()
        differing = dict(traces(case, device=device))
        seconds = time.perf_counter() - start
        traced = {outcome: names for outcome, names in differing.items() if names}
        rows.append(
            {
                **asdict(case),
                "dtype": str(case.dtype),
                "seconds": round(seconds, 2),
                "outcomes": differing,
            }
        )
        verdict = f"TRACES {traced}" if traced else f"identical after {len(differing)} outcomes"
        print(f"{case!s:<60} {verdict:<34} {seconds:>6.1f} s", flush=True)
    checks = [names for row in rows for names in row["outcomes"].values()]
    identical = sum(not names for names in checks)
    print(f"\n{len(rows)} combinations, {len(checks)} comparisons, bit-identical in {identical}")
    name = "traceless" + "_adapters" * arguments.adapters + "_tasks" * arguments.tasks
    name += "-cuda" * (device.type == "cuda")
    records.write(
        name,
        arguments.output,
        combinations=len(rows),
        comparisons=len(checks),
        identical=identical,
        traceless=rows,
    )
    sys.exit(identical != len(checks))


if __name__ == "__main__":
    main()
