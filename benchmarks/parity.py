"""With everything adaptive off, our recipe has the losses and weights of torchtune's, bit for bit.

    python benchmarks/parity.py [--quick] [--compiled] [--output DIR]

Each run is a real one of two epochs on a small model. Losses are compared as they are logged, final
weights as they are saved. Each recipe resumes from its own checkpoint.
``--compiled`` compares whole runs with ``compile=True`` instead, each with two runs of the stock
recipe; if these two differ, ours is not counted.
"""

from __future__ import annotations

import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import harness
import torch
from support.cli import (
    FEATURES,
    OURS,
    STOCK,
    Finished,
    SmallSetup,
    interrupted,
    make_setup,
    resume_run,
    same_weights,
)
from torch._dynamo.utils import counters

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
# Combinations of each kind.
QUICK = 8


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
    """Compare the second epoch after a stop; each recipe resumes from its own checkpoint."""
    overrides = [override for feature in features for override in FEATURES[feature]]
    stock, ours = (setup.run_in_process(recipe, *overrides) for recipe in (STOCK, OURS))
    expected = resume_run(setup, interrupted(stock, setup), *overrides, recipe=STOCK)
    resumed = resume_run(setup, interrupted(ours, setup), *overrides)
    return [outcome("resumed", features, expected, resumed)]


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
    both = outcome("whole, compiled", features, stock, ours)
    both["is_counted"] = is_identical(outcome("the stock recipe twice", features, stock, again))
    return [both]


def outcome(kind: str, features: Features, stock: Finished, ours: Finished) -> dict[str, Any]:
    """Compare two runs."""
    pairs = list(zip(stock.losses, ours.losses, strict=False))
    return {
        "kind": kind,
        # False if the stock recipe differs from itself.
        "is_counted": True,
        "features": ", ".join(features),
        "steps": len(stock.losses),
        "steps_ours": len(ours.losses),
        "identical_losses": sum(one == other for one, other in pairs),
        "largest_difference": max(abs(float(one) - float(other)) for one, other in pairs),
        "identical_grad_norms": ours.figures("grad_norm") == stock.figures("grad_norm"),
        "identical_weights": same_weights(stock.weights(1), ours.weights(1)),
        "last_loss": stock.losses[-1],
    }


def is_identical(row: dict[str, Any]) -> bool:
    same_losses = row["steps"] == row["steps_ours"] == row["identical_losses"] > 0
    return bool(same_losses and row["identical_grad_norms"] and row["identical_weights"])


def main() -> None:
    parser = harness.parser(__doc__, quick=f"about {QUICK} combinations of each kind")
    parser.add_argument("--compiled", action="store_true", help="compile=True in all runs")
    arguments = parser.parse_args()
    whole = combinations()
    resumed = [(*switch, *features) for switch in ((), ("accumulation",)) for features in RESUMED]
    if arguments.quick:
        whole, resumed = whole[:: len(whole) // QUICK + 1], resumed[:: len(resumed) // QUICK + 1]
    comparisons = [(compare_whole, features) for features in whole]
    comparisons += [(compare_resumed, features) for features in resumed]
    if arguments.compiled:
        comparisons = [(compare_compiled, features) for features in COMPILED]
    with tempfile.TemporaryDirectory() as folder:
        setup = make_setup(Path(folder))
        harness.run(
            "parity_compiled" if arguments.compiled else "parity",
            arguments.output,
            harness.quietly(partial(compare, setup, features) for compare, features in comparisons),
            dict,
            columns="kind:<32 features:<64 steps:>5 identical_losses:>16 largest_difference:>18g"
            " identical_grad_norms:>20 identical_weights:>17",
            errors=lambda row: [row] if row["is_counted"] and not is_identical(row) else [],
            figures=lambda rows: {
                "identical": sum(map(is_identical, rows)),
                "comparisons": sum(row["is_counted"] for row in rows),
            },
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
