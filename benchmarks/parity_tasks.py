"""With everything adaptive off, our recipes train pairs and distill as torchtune's do, bit for bit.

    python benchmarks/parity_tasks.py [--quick] [--output DIR]

Each run is a real one on a small model, of adapters and of every weight, on one device and on two
ranks of gloo. Losses, metrics and gradient norms are compared as they are logged, adapters and
weights as they are saved. Figures in which torchtune is wrong or rounds are not compared; the
record has them with the reason. Distillation is compared with torchtune's recipe as
tests/support/corrected_distillation.py corrects it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import harness
import torch
from support.cli import FEATURES, Finished, SmallSetup, interrupted, make_setup
from support.tasks import DISTILLATION, FULL_PAIRS, PAIRS, PLAIN_KD, Recipe, same_epoch

EXTRAS = {
    **{name: FEATURES[name] for name in ("bf16", "activation checkpointing", "accumulation")},
    "clipping": FEATURES["clipping"],
    "dropout": ("model.lora_dropout=0.1",),
    "DoRA": ("model.use_dora=True",),
    "RSO": ("loss=torchtune.rlhf.loss.RSOLoss",),
    "label smoothing": ("loss.label_smoothing=0.1",),
    "whole logits": PLAIN_KD,
}
ALONE = ("save_adapter_weights_only=True", "epochs=2", "max_steps_per_epoch=2")
QUICK = 6  # every so many-th
RANKS = 2
LAST_PART = "the stock recipe logs the metrics of the last micro-batch alone"
ROUNDED = "the stock recipe adds up figures in bf16"
UNLOGGED = "the stock recipe does not log it"
MARGINS = "the stock recipe logs the difference of two rounded means"


KINDS: dict[str, Recipe] = {
    "DPO, LoRA": PAIRS,
    "DPO, LoRA, 2 ranks": PAIRS,
    "DPO, full, 2 ranks": FULL_PAIRS,
    "distillation, LoRA": DISTILLATION,
    "distillation, LoRA, 2 ranks": DISTILLATION,
}
Case = tuple[str, tuple[str, ...]]


def cases() -> list[Case]:
    """Each kind with its features."""
    switches = [*product(("", "bf16"), ("", "activation checkpointing"))]
    of_each = {
        "DPO, LoRA": ("", "accumulation", "dropout", "RSO", "label smoothing"),
        "distillation, LoRA": ("", "accumulation", "clipping", "whole logits", "DoRA", "dropout"),
    }
    few = {
        "DPO, LoRA, 2 ranks": [(), ("bf16",), ("accumulation",), ("DoRA",)],
        "DPO, full, 2 ranks": [(), ("bf16",), ("clipping",), ("accumulation",)],
        "distillation, LoRA, 2 ranks": [(), ("bf16",), ("accumulation",), ("whole logits",)],
    }
    alone = [
        (kind, tuple(filter(None, (*each, extra))))
        for kind, extras in of_each.items()
        for each in switches
        for extra in extras
    ]
    return [*alone, *((kind, features) for kind, each in few.items() for features in each)]


def not_compared(kind: str, features: Sequence[str]) -> dict[str, str]:
    """Return the names of figures that a stock recipe gets wrong or rounds, with the reason."""
    names: dict[str, str] = {}
    if not kind.startswith("DPO"):
        return names
    metrics = KINDS[kind].metrics
    if "accumulation" in features and kind == "DPO, LoRA":
        names.update(dict.fromkeys(metrics, LAST_PART))
    if "ranks" in kind:
        names["rewards/margins"] = MARGINS
        names["grad_norm"] = UNLOGGED
    if "bf16" in features and ("accumulation" in features or "ranks" in kind):
        names.update({name: ROUNDED for name in ("loss", *metrics) if name not in names})
    return names


def overrides(setup: SmallSetup, kind: str, features: Sequence[str]) -> tuple[str, ...]:
    extras = [override for name in features for override in EXTRAS[name]]
    own = KINDS[kind].overrides(setup)
    if KINDS[kind] is FULL_PAIRS:
        own = (*own, "optimizer.lr=1e-3")
    return (*own, "epochs=1", "batch_size=2", *extras)


def outcome(
    kind: str, features: Sequence[str], ours: Finished, stock: Finished, epoch: int = 0
) -> dict[str, Any]:
    """Compare two runs."""
    excused = not_compared(kind, features)
    # The stock recipe adds up the losses of ranks in its log.
    summed = RANKS if kind == "DPO, LoRA, 2 ranks" else 1
    stock_losses = [float(loss) / summed for loss in stock.losses]
    expected = stock_losses[-len(ours.losses) :]
    names = [*KINDS[kind].metrics, "grad_norm"]
    own_figures = {name: [float(figure) for figure in ours.figures(name)] for name in names}
    differing = [
        name
        for name in names
        if name not in excused
        and own_figures[name]
        != [float(figure) for figure in stock.figures(name)][-len(ours.losses) :]
    ]
    return {
        "kind": kind,
        "features": ", ".join(features),
        "steps": len(ours.losses),
        "losses": "loss" in excused or [float(loss) for loss in ours.losses] == expected != [],
        "differing": differing,
        "not_compared": excused,
        "weights": same_epoch(ours, stock, epoch),
    }


def compare(setup: SmallSetup, kind: str, features: Sequence[str]) -> list[dict[str, Any]]:
    own = overrides(setup, kind, features)
    recipe = KINDS[kind]
    if "ranks" in kind:
        recipes = (recipe.ours, recipe.stock_on_ranks)
        ours, stock = (setup.run(name, *own, ranks=RANKS) for name in recipes)
    else:
        ours, stock = (setup.run_in_process(name, *own) for name in (recipe.ours, recipe.stock))
    return [outcome(kind, features, ours, stock)]


def compare_resumed(setup: SmallSetup, kind: str, features: Sequence[str]) -> list[dict[str, Any]]:
    """Compare the second epoch after a stop with the stock recipe's run in one go."""
    own = (*overrides(setup, kind, features), *ALONE)
    recipe = KINDS[kind].ours
    ours, stock = (setup.run_in_process(name, *own) for name in (recipe, KINDS[kind].stock))
    folder = interrupted(ours, setup)
    resumed = setup.run_in_process(
        recipe, *own, f"output_dir={folder}", "resume_from_checkpoint=True"
    )
    return [{**outcome(kind, features, resumed, stock, epoch=1), "resumed": True}]


def is_identical(row: dict[str, Any]) -> bool:
    return bool(row["losses"] and row["weights"] and not row["differing"])


def main() -> None:
    parser = harness.parser(__doc__, quick=f"every {QUICK}th comparison")
    arguments = parser.parse_args()
    every = QUICK if arguments.quick else 1
    chosen = cases()[::every]
    resumed = [*product(("DPO, LoRA", "distillation, LoRA"), ((), ("bf16",)))][::every]
    with tempfile.TemporaryDirectory() as folder:
        setup = make_setup(Path(folder))
        tasks = [
            *(partial(compare, setup, *case) for case in chosen),
            *(partial(compare_resumed, setup, *case) for case in resumed),
        ]
        harness.run(
            "parity_tasks",
            arguments.output,
            harness.quietly(tasks),
            dict,
            columns="kind:<28 features:<40 steps:>5 losses:>6 differing:>9 not_compared:>12"
            " weights:>7",
            errors=lambda row: [] if is_identical(row) else [row],
            figures=lambda rows: {
                "identical": sum(map(is_identical, rows)),
                "comparisons": len(rows),
            },
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
