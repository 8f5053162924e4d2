"""With everything adaptive off, our recipe on ranks has the bits of torchtune's distributed one.

    python benchmarks/parity_on_ranks.py [--quick] [--only WORD] [--output DIR]

Each run is a real one on gloo, of two epochs on a small model. Losses, rates and gradient norms are
compared as they are logged, weights as they are saved, all to the bit. Each recipe resumes from its
own checkpoint. Exits 1 if a comparison differs, or a case cannot run: torchtune's recipe cannot run
two of them.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from support.cli import (
    FEATURES,
    OURS,
    STOCK_ON_RANKS,
    Finished,
    SmallSetup,
    interrupted,
    make_setup,
    resumes,
    same_weights,
)

Overrides = tuple[str, ...]

# Every N-th case.
QUICK = 6

IN_BACKWARD = ("optimizer_in_bwd=True",)
TENSOR_PARALLEL = (
    "tensor_parallel_dim=2",
    "tensor_parallel_plan._component_=torchtune.models.llama3.base_llama_tp_plan",
    "optimizer.fused=False",
)


def of(*names: str) -> Overrides:
    """The overrides of some features of the small setup."""
    return tuple(override for name in names for override in FEATURES[name])


SGD = (*of("SGD with momentum"), "optimizer.fused=False")  # DTensor has no fused SGD
CHECKPOINTING, CLIPPING, ACCUMULATION = (
    of("activation checkpointing"),
    of("clipping"),
    of("accumulation"),
)


@dataclass(frozen=True)
class Case:
    """A configuration for both recipes.

    Attributes:
        name: in the table.
        overrides: key=value, for both.
        ranks: how many there are.
    """

    name: str
    overrides: Overrides = ()
    ranks: int = 2


WHOLE = (
    Case("defaults"),
    Case("accumulation of 2", ACCUMULATION),
    Case(
        "accumulation of 3",
        ("batch_size=2", "gradient_accumulation_steps=3", "max_steps_per_epoch=2"),
    ),
    Case("activation checkpointing", CHECKPOINTING),
    Case("selective checkpointing, every 2nd layer", ("ac_mode=selective", "ac_option=2")),
    Case("full checkpointing by ac_mode", ("ac_mode=full",)),
    Case("clipping", CLIPPING),
    Case("optimizer in backward", IN_BACKWARD),
    Case("custom_sharded_layers=[tok_embeddings]", ("custom_sharded_layers=[tok_embeddings]",)),
    # With the chunked loss a sharded output layer is gathered in every chunk, and stock ends in an
    # abort of gloo.
    Case(
        "custom_sharded_layers with output, plain loss",
        ("custom_sharded_layers=[tok_embeddings,output]", *of("plain cross-entropy")),
    ),
    Case("fsdp_reshard_after_forward=False", ("fsdp_reshard_after_forward=False",)),
    Case("bf16", of("bf16")),
    Case("plain cross-entropy", of("plain cross-entropy")),
    Case("dropout", of("dropout")),
    Case("packed", ("batch_size=2", *of("packed"))),
    Case("concatenated", of("concatenated")),
    Case("shuffle=False", ("shuffle=False",)),
    Case("cosine", of("cosine")),
    Case("max_steps_per_epoch", of("max_steps_per_epoch")),
    Case("SGD with momentum", SGD),
    Case("accumulation, checkpointing, dropout", (*ACCUMULATION, *CHECKPOINTING, *of("dropout"))),
    Case(
        "accumulation, clipping, no resharding",
        (*ACCUMULATION, *CLIPPING, "fsdp_reshard_after_forward=False"),
    ),
    Case("bf16, accumulation, clipping, cosine", of("bf16", "accumulation", "clipping", "cosine")),
    Case("optimizer in backward, dropout", (*IN_BACKWARD, *of("dropout"))),
    Case("optimizer in backward, bf16, checkpointing", (*IN_BACKWARD, *of("bf16"), *CHECKPOINTING)),
    Case(
        "packed, plain cross-entropy, clipping",
        ("batch_size=2", *of("packed", "plain cross-entropy", "clipping")),
    ),
    Case("2 ranks of one model", TENSOR_PARALLEL),
    Case("2 ranks of one model, accumulation", (*TENSOR_PARALLEL, *ACCUMULATION)),
    Case("defaults", ("batch_size=2",), 4),
    Case(
        "accumulation, clipping, checkpointing",
        ("batch_size=2", *ACCUMULATION, *CLIPPING, *CHECKPOINTING),
        4,
    ),
    Case("2 x 2 ranks, tensor parallel", TENSOR_PARALLEL, 4),
    Case("2 x 2 ranks, tensor parallel, accumulation", (*TENSOR_PARALLEL, *ACCUMULATION), 4),
)

RESUMED = (
    Case("defaults"),
    Case("cosine, clipping", of("cosine", "clipping")),
    Case("accumulation, cosine, checkpointing", (*ACCUMULATION, *of("cosine"), *CHECKPOINTING)),
    Case("bf16, plain cross-entropy", of("bf16", "plain cross-entropy")),
    Case("SGD with momentum, max_steps_per_epoch", (*SGD, *of("max_steps_per_epoch"))),
    Case("dropout", of("dropout")),
    Case(
        "packed, custom_sharded_layers",
        ("batch_size=2", *of("packed"), "custom_sharded_layers=[tok_embeddings]"),
    ),
    Case("2 ranks of one model", TENSOR_PARALLEL),
    Case("defaults", ("batch_size=2",), 4),
)


# --- runs


def compare_whole(setup: SmallSetup, case: Case) -> dict[str, Any]:
    """Two epochs with each recipe."""
    return outcome("whole", case, *run_both(setup, case))


def compare_resumed(setup: SmallSetup, case: Case) -> dict[str, Any]:
    """Compare the second epoch after a stop; each recipe resumes from its own checkpoint."""
    recipes = (STOCK_ON_RANKS, OURS)
    finished = [
        setup.run(
            recipe,
            *(*case.overrides, *resumes(recipe, interrupted(begun, setup))),
            ranks=case.ranks,
        )
        for recipe, begun in zip(recipes, run_both(setup, case), strict=True)
    ]
    return outcome("resumed", case, *finished)


def run_both(setup: SmallSetup, case: Case) -> list[Finished]:
    """Run a case with each recipe."""
    return [
        setup.run(recipe, *case.overrides, ranks=case.ranks) for recipe in (STOCK_ON_RANKS, OURS)
    ]


def outcome(kind: str, case: Case, stock: Finished, ours: Finished) -> dict[str, Any]:
    """Compare two runs."""
    pairs = list(zip(stock.losses, ours.losses, strict=False))
    epochs = sorted(path.name for path in stock.output_dir.glob("epoch_*"))
    return {
        "kind": kind,
        "case": case.name,
        "ranks": case.ranks,
        "overrides": list(case.overrides),
        "steps": len(stock.losses),
        "steps_ours": len(ours.losses),
        "identical_losses": sum(one == other for one, other in pairs),
        "largest_difference": max(
            (abs(float(one) - float(other)) for one, other in pairs), default=0.0
        ),
        "identical_rates": same_rates(
            stock, ours, logs_ahead="lr_scheduler" in " ".join(case.overrides)
        ),
        "identical_grad_norms": ours.figures("grad_norm") == stock.figures("grad_norm"),
        "identical_weights": sum(
            same_weights(ours.weights(int(name[6:])), stock.weights(int(name[6:])))
            for name in epochs
        ),
        "epochs": len(epochs),
        "last_loss": stock.losses[-1] if stock.losses else None,
    }


def same_rates(stock: Finished, ours: Finished, *, logs_ahead: bool) -> bool:
    """Return whether both logs have the same rates; with a schedule, the stock recipe logs the rate
    of the next step.
    """
    logged, used = (list(map(float, run.figures("lr"))) for run in (stock, ours))
    return logged[:-1] == used[1:] and len(logged) == len(used) if logs_ahead else logged == used


def is_identical(row: dict[str, Any]) -> bool:
    same_losses = row["steps"] == row["steps_ours"] == row["identical_losses"] > 0
    same_weights = row["epochs"] == row["identical_weights"] > 0
    same_others = row["identical_rates"] and row["identical_grad_norms"]
    return bool(same_losses and same_others and same_weights)


def errors(row: dict[str, Any]) -> list[Any]:
    if "failed" in row:
        return [row["failed"][-2000:]]
    return [] if is_identical(row) else [row]


def figures(rows: list[dict[str, Any]]) -> dict[str, int]:
    done = [row for row in rows if "failed" not in row]
    identical = sum(map(is_identical, done))
    return {
        "identical": identical,
        "comparisons": len(done),
        "failed": len(rows) - len(done),
    }


def main() -> None:
    parser = harness.parser(__doc__, quick=f"every {QUICK}th case")
    parser.add_argument("--only", default="", metavar="WORD", help="cases with this word")
    arguments = parser.parse_args()
    whole, resumed = (
        [case for case in cases if arguments.only in case.name][:: QUICK if arguments.quick else 1]
        for cases in (WHOLE, RESUMED)
    )
    with tempfile.TemporaryDirectory() as folder:
        setup = make_setup(Path(folder))

        def rows(compare: Any, case: Case) -> list[dict[str, Any]]:
            try:
                return [compare(setup, case)]
            except AssertionError as error:
                return [{"kind": "failed", "case": case.name, "failed": str(error)}]

        harness.run(
            "parity_on_ranks",
            arguments.output,
            harness.quietly(
                partial(rows, compare, case)
                for compare, chosen in ((compare_whole, whole), (compare_resumed, resumed))
                for case in chosen
            ),
            dict,
            columns="kind:<38 case:<46 ranks:>5 steps:>5 identical_losses:>16"
            " largest_difference:>18g identical_rates:>15 identical_grad_norms:>20"
            " identical_weights:>17 epochs:>6",
            errors=errors,
            figures=figures,
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
