"""Losses and weights of our recipe beside torchtune's stock one, with everything adaptive off:
identical to the bit?

    python benchmarks/parity.py [--quick] [--compiled] [--output DIR]

Every run is a real one of two epochs on a small model. Losses are compared as they stand in the
logs, final weights as they were saved. A resumed run is also begun from the checkpoint that the
other recipe wrote. ``--compiled`` compares whole runs with ``compile=True`` instead, each beside
two runs of the stock recipe: where these differ, ours is not counted.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

import records
import torch
from torch._dynamo.utils import counters
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.cli import (
    FEATURES,
    OURS,
    STOCK,
    Finished,
    SmallSetup,
    interrupted,
    make_setup,
    resume,
    same_weights,
)

Features = tuple[str, ...]

# All combinations of these four, and with each combination one of the others.
SWITCHES = ("accumulation", "activation checkpointing", "plain cross-entropy", "bf16")
OTHERS = (None, *(name for name in FEATURES if name not in SWITCHES))
RESUMED: tuple[Features, ...] = (
    (),
    ("bf16",),
    ("dropout",),
    ("packed",),
    ("clipping",),
    ("concatenated",),
    ("cosine",),
    ("cosine", "dropout"),
    ("cosine", "clipping", "activation checkpointing"),
    ("cosine", "max_steps_per_epoch", "plain cross-entropy"),
    ("cosine", "SGD with momentum"),
)
COMPILED: tuple[Features, ...] = (
    (),
    ("accumulation",),
    ("clipping",),
    ("activation checkpointing",),
    ("plain cross-entropy",),
    ("bf16",),
    ("packed",),
    ("dropout",),
)
STOCK_TWICE = "the stock recipe twice, compiled"
QUICK = 8  # combinations of each kind


def combinations() -> list[Features]:
    """Every whole run to compare."""
    found = []
    for on in product((False, True), repeat=len(SWITCHES)):
        switches = tuple(name for name, is_on in zip(SWITCHES, on, strict=True) if is_on)
        found += [switches if other is None else (*switches, other) for other in OTHERS]
    return found


def compare_whole(setup: SmallSetup, features: Features) -> list[dict[str, Any]]:
    """Two epochs with each recipe."""
    overrides = [override for feature in features for override in FEATURES[feature]]
    stock, ours = (setup.run_in_process(recipe, *overrides) for recipe in (STOCK, OURS))
    return [outcome("whole", features, stock, ours)]


def compare_resumed(setup: SmallSetup, features: Features) -> list[dict[str, Any]]:
    """The second epoch after a stop, ours from our own checkpoint and from the stock recipe's."""
    overrides = [override for feature in features for override in FEATURES[feature]]
    stock, ours = (setup.run_in_process(recipe, *overrides) for recipe in (STOCK, OURS))
    folders = [interrupted(begun, setup) for begun in (stock, ours, stock)]
    expected = resume(setup, STOCK, folders[0], *overrides)
    from_ours, from_stock = (resume(setup, OURS, folder, *overrides) for folder in folders[1:])
    return [
        outcome("resumed from our checkpoint", features, expected, from_ours),
        outcome("resumed from the stock checkpoint", features, expected, from_stock),
    ]


def compare_compiled(setup: SmallSetup, features: Features) -> list[dict[str, Any]]:
    """Two epochs with each recipe, compiled, and two more with the stock one."""
    overrides = [override for feature in features for override in FEATURES[feature]]
    runs = []
    for recipe in (STOCK, STOCK, OURS):
        torch.compiler.reset()
        counters.clear()
        runs.append(setup.run_in_process(recipe, "compile=True", *overrides))
        assert counters["stats"]["unique_graphs"], f"{recipe} has compiled nothing"
    stock, again, ours = runs
    return [
        outcome(STOCK_TWICE, features, stock, again),
        outcome("whole, compiled", features, stock, ours),
    ]


def outcome(kind: str, features: Features, stock: Finished, ours: Finished) -> dict[str, Any]:
    """What two runs have in common."""
    pairs = list(zip(stock.losses, ours.losses, strict=False))
    return {
        "kind": kind,
        "features": list(features),
        "steps": len(stock.losses),
        "steps_ours": len(ours.losses),
        "identical_losses": sum(one == other for one, other in pairs),
        "largest_difference": max(abs(float(one) - float(other)) for one, other in pairs),
        "identical_grad_norms": ours.figures("grad_norm") == stock.figures("grad_norm"),
        "identical_weights": same_weights(stock.weights(1), ours.weights(1)),
        "last_loss": stock.losses[-1],
    }


def identical(row: dict[str, Any]) -> bool:
    same_losses = row["steps"] == row["steps_ours"] == row["identical_losses"] > 0
    return bool(same_losses and row["identical_grad_norms"] and row["identical_weights"])


def print_table(rows: list[dict[str, Any]]) -> None:
    table = records.Table(
        "kind:<34 feature:<26 runs:>5 identical:>9 losses:>7 identical_losses:>16"
        " largest_difference:>18g"
    )
    for kind in dict.fromkeys(row["kind"] for row in rows):
        for feature in ("any", *FEATURES):
            chosen = [
                row
                for row in rows
                if row["kind"] == kind and (feature == "any" or feature in row["features"])
            ]
            if chosen:
                table.print(
                    {"kind": kind, "feature": feature, "runs": len(chosen)},
                    identical=sum(map(identical, chosen)),
                    losses=sum(row["steps"] for row in chosen),
                    identical_losses=sum(row["identical_losses"] for row in chosen),
                    largest_difference=max(row["largest_difference"] for row in chosen),
                )


def report(
    name: str,
    folder: Path,
    rows: list[dict[str, Any]],
    is_identical: Callable[[dict[str, Any]], Any],
    *,
    start: float,
) -> NoReturn:
    """Print the counts of each kind and the rows that differ, write the record, and exit with 1 if
    a row differs.
    """
    for kind in dict.fromkeys(row["kind"] for row in rows):
        same = [is_identical(row) for row in rows if row["kind"] == kind]
        print(f"{kind:<34} {len(same):>4} comparisons, {sum(map(bool, same)):>4} identical")
    differing = [row for row in rows if not is_identical(row)]
    for row in differing:
        print(f"differs: {row}")
    num_identical = len(rows) - len(differing)
    print(f"{num_identical} of {len(rows)} comparisons identical")
    seconds = round(time.perf_counter() - start, 1)
    records.write(name, folder, seconds=seconds, identical=num_identical, comparisons=rows)
    sys.exit(bool(differing))


def main() -> None:
    parser = records.parser(__doc__, quick=f"about {QUICK} combinations of each kind")
    parser.add_argument("--compiled", action="store_true", help="compile=True in all runs")
    arguments = parser.parse_args()

    start = time.perf_counter()
    whole, resumed = (
        combinations(),
        [(*switch, *features) for switch in ((), ("accumulation",)) for features in RESUMED],
    )
    if arguments.quick:
        whole, resumed = whole[:: len(whole) // QUICK + 1], resumed[:: len(resumed) // QUICK + 1]
    tasks = [(compare_whole, features) for features in whole] + [
        (compare_resumed, features) for features in resumed
    ]
    if arguments.compiled:
        tasks = [(compare_compiled, features) for features in COMPILED]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, os.fdopen(os.dup(2), "w") as terminal:
        setup = make_setup(Path(folder))
        for compare, features in tqdm(tasks, file=terminal, desc="comparisons"):
            with records.printing_into():
                rows += compare(setup, features)
    print_table(rows)
    undecided = [
        row["features"] for row in rows if row["kind"] == STOCK_TWICE and not identical(row)
    ]
    counted = [
        row for row in rows if row["kind"] != STOCK_TWICE and row["features"] not in undecided
    ]
    if undecided:
        print(f"the stock recipe differs from itself with {undecided}")
    name = "parity_compiled" if arguments.compiled else "parity"
    report(name, arguments.output, counted, identical, start=start)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
