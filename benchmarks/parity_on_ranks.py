"""Losses and weights of our recipe on several ranks beside torchtune's distributed one, with
everything adaptive off.

    python benchmarks/parity_on_ranks.py [--quick] [--only WORD] [--output DIR]

Every run is a real one on gloo, of two epochs on a small model; runs of both recipes take turns in
the same processes. Losses, rates and gradient norms are compared as they stand in the logs, weights
as they were saved, all to the bit. A resumed run is also begun from the checkpoint that the other
recipe wrote. Where the stock recipe is wrong ours differs from it by design: each such place is
shown beside a run that is right.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import records
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.cli import FEATURES, OURS, STOCK, Finished, SmallSetup, make_setup, same_weights
from support.stock import STOCK_ON_RANKS, RunsFailedError, Task, resuming, run_tasks

Overrides = tuple[str, ...]

IN_ONE_START = 6  # cases of one kind that share processes
QUICK = 6  # every so many-th case
BY_STOCK = "resumed by the stock recipe from ours"
ROUNDING = (
    1e-6  # relative, of a loss after a few steps: another order of summation gives about 1e-7
)

IN_BACKWARD = ("optimizer_in_bwd=True",)
TENSOR_PARALLEL = (
    "tensor_parallel_dim=2",
    "tensor_parallel_plan._component_=torchtune.models.llama3.base_llama_tp_plan",
    "optimizer.fused=False",
)
SMALL_STEPS = ("epochs=1", "optimizer=torch.optim.SGD", "optimizer.lr=0.1", "optimizer.fused=False")


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
    """What both recipes run.

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


@dataclass(frozen=True)
class Defect:
    """A place where the stock recipe is wrong, and ours is not.

    Attributes:
        name: in the table.
        reason: what the stock recipe does there.
        overrides: key=value, for both.
        right: what a run that is right has besides them or in their place.
        right_recipe: which is that; on one device, the stock one weights by a count that cancels.
    """

    name: str
    reason: str
    overrides: Overrides
    right: Overrides
    right_recipe: str = STOCK


DEFECTS = (
    Defect(
        "31 rows on 2 ranks",
        "its sampler gives a row to two ranks, so that they come out even, and trains it twice",
        (*SMALL_STEPS, "dataset.split=train[:31]"),
        ("batch_size=8",),
    ),
    Defect(
        "the first label counts",
        "it weights the ranks by labels that it has counted before the shift, one too many for"
        " each row",
        (*SMALL_STEPS, "dataset.train_on_input=True"),
        ("batch_size=8",),
    ),
    Defect(
        "a rank without labels",
        "the mean over no label is 0/0, and so the loss of the step is NaN in its log",
        (
            *SMALL_STEPS,
            "shuffle=False",
            "dataset=support.stock.partly_labelled",
            "dataset.without_labels=[9,11,13,15]",
        ),
        ("batch_size=8",),
    ),
    Defect(
        "optimizer in backward, with a schedule",
        "all parameters but the first take their first step at the full rate, as only their next is"
        " scheduled",
        (*SMALL_STEPS, *IN_BACKWARD, *of("cosine")),
        ("optimizer_in_bwd=False",),
        STOCK_ON_RANKS,
    ),
    Defect(
        "4 micro-batches of an epoch, in threes",
        "the gradients of the last one leak into the first step of the next epoch",
        ("gradient_accumulation_steps=3",),
        ("max_steps_per_epoch=1",),
        STOCK_ON_RANKS,
    ),
)


# --- runs


def compare_whole(setup: SmallSetup, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Two epochs with each recipe."""
    stock, ours = run_both(setup, cases)
    return [outcome("whole", *both) for both in zip(cases, stock, ours, strict=True)]


def compare_resumed(setup: SmallSetup, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """The second epoch after a stop: each recipe from its own checkpoint, and from the other's."""
    stock, ours = run_both(setup, cases)
    ways = {
        "stock from stock": (STOCK_ON_RANKS, stock),
        "resumed from our checkpoint": (OURS, ours),
        "resumed from the stock checkpoint": (OURS, stock),
        BY_STOCK: (STOCK_ON_RANKS, ours),
    }
    tasks = [
        resuming(setup, recipe, begun, case.overrides)
        for recipe, runs in ways.values()
        for case, begun in zip(cases, runs, strict=True)
    ]
    finished = run_tasks(setup, tasks, ranks=cases[0].ranks)
    expected, *others = (
        finished[begin : begin + len(cases)] for begin in range(0, len(finished), len(cases))
    )
    return [
        outcome(kind, case, stock_run, other)
        for kind, runs in zip(list(ways)[1:], others, strict=True)
        for case, stock_run, other in zip(cases, expected, runs, strict=True)
    ]


def run_both(setup: SmallSetup, cases: Sequence[Case]) -> tuple[list[Finished], list[Finished]]:
    recipes = (STOCK_ON_RANKS, OURS)
    tasks = [
        Task(recipe, setup.fresh_folder(), case.overrides) for recipe in recipes for case in cases
    ]
    finished = run_tasks(setup, tasks, ranks=cases[0].ranks)
    return finished[: len(cases)], finished[len(cases) :]


def outcome(kind: str, case: Case, stock: Finished, ours: Finished) -> dict[str, Any]:
    """What two runs have in common."""
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
            stock, ours, logs_ahead=kind != BY_STOCK and "lr_scheduler" in " ".join(case.overrides)
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
    """Whether both logs have the same rates; with a schedule the stock recipe logs that of the step
    to come.
    """
    logged, used = (list(map(float, run.figures("lr"))) for run in (stock, ours))
    return logged[:-1] == used[1:] and len(logged) == len(used) if logs_ahead else logged == used


def identical(row: dict[str, Any]) -> bool:
    same_losses = row["steps"] == row["steps_ours"] == row["identical_losses"] > 0
    same_weights = row["epochs"] == row["identical_weights"] > 0
    return bool(
        same_losses and row["identical_rates"] and row["identical_grad_norms"] and same_weights
    )


def show_defects(setup: SmallSetup) -> list[dict[str, Any]]:
    """Both recipes where the stock one is wrong, and what is right."""
    cases = [Case(defect.name, defect.overrides) for defect in DEFECTS]
    stock, ours = run_both(setup, cases)
    right = []
    for defect in DEFECTS:
        task = Task(defect.right_recipe, setup.fresh_folder(), (*defect.overrides, *defect.right))
        if defect.right_recipe == STOCK:
            right.append(
                setup.run_in_process(STOCK, *task.overrides, f"output_dir={task.output_dir}")
            )
        else:
            right += run_tasks(setup, [task], ranks=2)
    return [
        {
            "defect": defect.name,
            "reason": defect.reason,
            "right": f"{defect.right_recipe} {' '.join(defect.right)}",
            "steps": len(right_run.losses),
            "ours": distance(our_run, right_run),
            "stock": distance(stock_run, right_run),
        }
        for defect, stock_run, our_run, right_run in zip(DEFECTS, stock, ours, right, strict=True)
    ]


def distance(run: Finished, right: Finished) -> dict[str, Any]:
    """How far a run's losses are from those that are right: the steps it has, and the largest
    relative difference.
    """
    losses = [tuple(map(float, pair)) for pair in zip(run.losses, right.losses, strict=False)]
    differences = [abs(one - other) / other for one, other in losses]
    finite = [difference for difference in differences if difference == difference]
    return {
        "steps": len(run.losses),
        "nan": len(differences) - len(finite),
        "largest_difference": max(finite),
    }


def is_right(row: dict[str, Any], side: str) -> bool:
    found = row[side]
    return (
        found["steps"] == row["steps"]
        and not found["nan"]
        and found["largest_difference"] <= ROUNDING
    )


# --- the table


def print_row(table: records.Table, row: dict[str, Any]) -> None:
    yes_or_no = {
        name: "yes" if row[name] else "NO" for name in ("identical_rates", "identical_grad_norms")
    }
    losses = f"{row['identical_losses']}/{max(row['steps'], row['steps_ours'])}"
    weights = f"{row['identical_weights']}/{row['epochs']}"
    table.print(row, losses=losses, weights=weights, **yes_or_no)


def print_defects(rows: list[dict[str, Any]]) -> None:
    print(
        "\nwhere the stock recipe is wrong: steps, and the largest relative difference of a loss"
        " from what is right"
    )
    for row in rows:
        said = {
            side: (
                f"{row[side]['steps']:>2}"
                f" {'NaN' if row[side]['nan'] else format(row[side]['largest_difference'], '.1e')}"
            )
            for side in ("ours", "stock")
        }
        print(
            f"{row['defect']:<38} right {row['steps']:>2}   ours {said['ours']:<10}   stock"
            f" {said['stock']:<10}"
        )
        print(f"{'':<38} stock: {row['reason']}")


def starts(cases: Sequence[Case]) -> Iterator[Sequence[Case]]:
    """Cases that share processes."""
    for ranks in dict.fromkeys(case.ranks for case in cases):
        chosen = [case for case in cases if case.ranks == ranks]
        yield from (
            chosen[begin : begin + IN_ONE_START] for begin in range(0, len(chosen), IN_ONE_START)
        )


def main() -> None:
    parser = records.parser(__doc__, quick=f"every {QUICK}th case")
    parser.add_argument(
        "--only", default="", metavar="WORD", help="cases that have it in their name"
    )
    arguments = parser.parse_args()

    begin = time.perf_counter()
    whole, resumed = (
        [case for case in cases if arguments.only in case.name][:: QUICK if arguments.quick else 1]
        for cases in (WHOLE, RESUMED)
    )
    tasks = [
        (compare, cases)
        for compare, all_cases in ((compare_whole, whole), (compare_resumed, resumed))
        for cases in starts(all_cases)
    ]
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    table = records.Table(
        "kind:<38 case:<46 ranks:>5 losses:>9 identical_rates:>15 identical_grad_norms:>20"
        " weights:>7 largest_difference:>18g"
    )
    with tempfile.TemporaryDirectory() as folder, os.fdopen(os.dup(2), "w") as terminal:
        setup = make_setup(Path(folder))
        for compare, cases in tqdm(tasks, file=terminal, desc="starts", disable=None):
            try:
                with records.printing_into():
                    found = compare(setup, cases)
            except RunsFailedError as error:
                if len(cases) > 1:  # which of them it was
                    tasks += [(compare, [case]) for case in cases]
                else:
                    failed.append(cases[0].name)
                    tqdm.write(f"FAILED: {cases[0]}:\n{error}")
                continue
            for row in found:
                print_row(table, row)
            rows += found
        with records.printing_into():
            defects = [] if arguments.only else show_defects(setup)
    print_defects(defects)
    done = sum(map(identical, rows))
    right = sum(is_right(row, "ours") and not is_right(row, "stock") for row in defects)
    print(
        f"\n{done} of {len(rows)} comparisons identical in every loss, rate, gradient norm and"
        f" weight; {right} of {len(defects)} defects of the stock recipe are not ours"
    )
    records.write(
        "parity_on_ranks",
        arguments.output,
        seconds=round(time.perf_counter() - begin, 1),
        identical=done,
        comparisons=rows,
        failed=failed,
        defects=defects,
        rounding=ROUNDING,
    )
    sys.exit(0 if done == len(rows) > 0 and right == len(defects) and not failed else 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
