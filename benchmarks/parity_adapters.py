"""With everything adaptive off, our recipe trains adapters as torchtune's does, bit for bit.

    python benchmarks/parity_adapters.py [--ranks] [--quick] [--output DIR]

Each run is a real one on a small model: LoRA and DoRA, and QLoRA on a wider one. Losses and
gradient norms are compared as they are logged; adapters, PEFT's files and merged weights as they
are saved. On a CPU the stock recipe merges the adapters into the model that it continues to train
when it saves merged weights, so runs of two epochs save the adapters alone. Resumed runs end their
epochs early, as the stock recipe otherwise restarts its schedule. `--ranks` runs two ranks of gloo
with torchtune's distributed recipe. That recipe initializes DoRA's magnitudes again when it
resumes, so only LoRA is resumed there.
"""

from __future__ import annotations

import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import harness
import torch
from support.cli import FEATURES, Finished, SmallSetup, interrupted, make_setup
from support.tasks import ADAPTERS, KINDS, make_wide_setup, same_epoch

EXTRAS = {
    **{name: FEATURES[name] for name in ("accumulation", "clipping", "packed")},
    "plain cross-entropy": FEATURES["plain cross-entropy"],
}
EXTRAS["dropout"] = ("model.lora_dropout=0.1",)
MERGED, ALONE = ("epochs=1",), ("epochs=2", "save_adapter_weights_only=True")
QUICK = 7  # every so many-th
RANKS = 2
STOCKS = {1: ADAPTERS.stock, RANKS: ADAPTERS.stock_on_ranks}
Features = tuple[str, ...]


def whole() -> list[Features]:
    """Return the features of each whole run; the last one is the form of its weights."""
    switches = product(
        ("LoRA", "DoRA"), ("", "bf16"), ("", "activation checkpointing"), ("", *EXTRAS)
    )
    cases = [
        (*filter(None, each), ("merged", "adapters alone")[number % 2])
        for number, each in enumerate(switches)
    ]
    return [
        *cases,
        ("QLoRA", "merged"),
        ("QLoRA", "accumulation", "adapters alone"),
        ("QLoRA", "activation checkpointing", "merged"),
    ]


def overrides(features: Features) -> tuple[str, ...]:
    given = {**FEATURES, **EXTRAS, **KINDS, "merged": MERGED, "adapters alone": ALONE}
    return (*ADAPTERS.keys, *(one for name in features for one in given[name]))


def outcome(
    kind: str, features: Features, ours: Finished, stock: Finished, epoch: int
) -> dict[str, Any]:
    """Compare two runs."""
    return {
        "kind": kind,
        "features": ", ".join(features),
        "steps": len(stock.losses),
        "losses": ours.losses == stock.losses != [],
        "grad_norms": ours.figures("grad_norm") == stock.figures("grad_norm"),
        "adapters": same_epoch(ours, stock, epoch),
    }


def whole_on_ranks() -> list[Features]:
    """The same, of fewer runs."""
    alone = [(), *((one,) for one in ("bf16", "activation checkpointing", *EXTRAS))]
    cases = [(kind, *each) for each in alone for kind in ("LoRA", "DoRA")]
    return [
        *(
            (*each, ("merged", "adapters alone")[number // 2 % 2])
            for number, each in enumerate(cases)
        ),
        ("LoRA", "bf16", "activation checkpointing", "accumulation", "merged"),
        ("DoRA", "bf16", "accumulation", "adapters alone"),
        ("QLoRA", "merged"),
        ("QLoRA", "accumulation", "adapters alone"),
    ]


def run_one(setup: SmallSetup, recipe: str, *keys: str, ranks: int) -> Finished:
    """Run a recipe in this process, or on ranks."""
    if ranks == 1:
        return setup.run_in_process(recipe, *keys)
    return setup.run(recipe, *keys, "batch_size=2", ranks=ranks)


def run_both(setup: SmallSetup, features: Features, ranks: int, *more: str) -> list[Finished]:
    """Run our recipe and the stock recipe."""
    return [
        run_one(setup, recipe, *overrides(features), *more, ranks=ranks)
        for recipe in (ADAPTERS.ours, STOCKS[ranks])
    ]


def compare_whole(setup: SmallSetup, features: Features, ranks: int) -> list[dict[str, Any]]:
    runs = run_both(setup, features, ranks)
    return [outcome("whole", features, *runs, int("adapters alone" in features))]


def compare_resumed(setup: SmallSetup, features: Features, ranks: int) -> list[dict[str, Any]]:
    """Compare the second epoch after a stop; each recipe resumes from its own checkpoint."""
    keys = (*overrides(features), "epochs=2", "max_steps_per_epoch=2")
    resumed = []
    for recipe in (ADAPTERS.ours, STOCKS[ranks]):
        folder = interrupted(run_one(setup, recipe, *keys, ranks=ranks), setup)
        goes_on = (f"output_dir={folder}", "resume_from_checkpoint=True")
        resumed.append(run_one(setup, recipe, *keys, *goes_on, ranks=ranks))
    return [outcome("resumed", features, *resumed, 1)]


def is_identical(row: dict[str, Any]) -> bool:
    return bool(row["losses"] and row["grad_norms"] and row["adapters"])


def main() -> None:
    parser = harness.parser(__doc__, quick=f"every {QUICK}th comparison")
    parser.add_argument("--ranks", action="store_true", help=f"on {RANKS} ranks")
    arguments = parser.parse_args()
    ranks, kinds = (RANKS, ("LoRA",)) if arguments.ranks else (1, KINDS)
    kinds = [kind for kind in kinds if kind != "QLoRA"]
    extras = ((), ("bf16",), ("clipping",), ("accumulation",))
    resumed = [(kind, *more) for kind in kinds for more in extras]
    every = QUICK if arguments.quick else 1
    whole_runs = whole_on_ranks() if arguments.ranks else whole()
    with tempfile.TemporaryDirectory() as folder:
        small, wide = Path(folder) / "small", Path(folder) / "wide"
        small.mkdir()
        wide.mkdir()
        setups = make_setup(small), make_wide_setup(wide)
        tasks = [
            partial(compare, setups["QLoRA" in features], features, ranks)
            for compare, chosen in ((compare_whole, whole_runs), (compare_resumed, resumed))
            for features in chosen[::every]
        ]
        harness.run(
            "parity_adapters_on_ranks" if arguments.ranks else "parity_adapters",
            arguments.output,
            harness.quietly(tasks),
            dict,
            columns="kind:<28 features:<64 steps:>5 losses:>6 grad_norms:>10 adapters:>8",
            errors=lambda row: [] if is_identical(row) else [row],
            figures=lambda rows: {
                "identical": sum(map(is_identical, rows)),
                "comparisons": len(rows),
            },
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
