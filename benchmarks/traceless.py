"""A search does not change the training state.

    python benchmarks/traceless.py [--quick] [--adapters | --tasks] [--device cuda] [--threads N]
        [--output DIR]

For every combination of optimizer, optimizer in backward, dtype, checkpointing and resumed
optimizer, a search is repeated in one training run, once for each way that it can end
(tests/support/training_cases.py). The whole state is compared bit by bit each time. Then training
continues and is compared with a run without a search. With `--adapters`, LoRA, DoRA and QLoRA on a
frozen base alternate in the combinations. With `--tasks`, preference pairs and distillation do, and
their frozen model is compared too.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import harness
import torch
from support.training_cases import CUDA_OPTIMIZERS, OPTIMIZERS, cases, traces


def main() -> None:
    parser = harness.parser(__doc__, quick="every seventh combination")
    kinds = parser.add_mutually_exclusive_group()
    for kind, text in (("adapters", "on a frozen base"), ("tasks", "DPO and distillation")):
        kinds.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, help=text)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch; the model is tiny")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    name = f"traceless_{arguments.kind}" if arguments.kind else "traceless"
    device, optimizers = torch.device("cpu"), OPTIMIZERS
    if arguments.device == "cuda":
        name, device, optimizers = f"{name}-cuda", torch.device("cuda", 0), CUDA_OPTIMIZERS

    def measure(case: Any) -> dict[str, Any]:
        outcomes = dict(traces(case, device=device))
        return {
            **asdict(case),
            "case": str(case),
            "dtype": str(case.dtype),
            "comparisons": len(outcomes),
            "identical": sum(not names for names in outcomes.values()),
            "outcomes": outcomes,
        }

    harness.run(
        name,
        arguments.output,
        cases(arguments.kind or "", optimizers)[:: 7 if arguments.quick else 1],
        measure,
        columns="case:<60 comparisons:>11 identical:>9 seconds:>7.1f",
        errors=lambda row: [
            f"{outcome}: {names}" for outcome, names in row["outcomes"].items() if names
        ],
        figures=lambda rows: {
            "combinations": len(rows),
            **{key: sum(row[key] for row in rows) for key in ("comparisons", "identical")},
        },
    )


if __name__ == "__main__":
    main()
