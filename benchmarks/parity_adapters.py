"""Adapters as our recipe trains them beside torchtune's stock one, with everything adaptive off: identical to the bit?

    python benchmarks/parity_adapters.py [--quick] [--output DIR]

Every run is a real one on a small model: LoRA and DoRA, and QLoRA on a wider one. Losses and gradient norms are compared as they
stand in the logs, adapters, PEFT's files and merged weights as they were saved. On a CPU the stock recipe merges the adapters
into the model that goes on training wherever it saves merged weights, so runs of two epochs save the adapters alone. Resumed
runs end their epochs early, as the stock recipe begins its schedule again otherwise; each goes on from the other's epoch as well.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import records
import torch
from parity import quiet
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.adapters import KINDS, LORA, OURS, STOCK, make_wide_setup, same_epoch
from support.cli import FEATURES, LOG, Finished, SmallSetup, make_setup

EXTRAS = {
    **{name: FEATURES[name] for name in ("accumulation", "clipping", "packed")},
    "plain cross-entropy": FEATURES["plain cross-entropy"],
}
EXTRAS["dropout"] = ("model.lora_dropout=0.1",)
MERGED, ALONE = ("epochs=1",), ("epochs=2", "save_adapter_weights_only=True")
QUICK = 7  # every so many-th


def whole() -> list[tuple[str, ...]]:
    """The features of each whole run, what it saves last."""
    switches = product(("LoRA", "DoRA"), ("", "bf16"), ("", "activation checkpointing"), ("", *EXTRAS))
    cases = [(*filter(None, each), ("merged", "adapters alone")[number % 2]) for number, each in enumerate(switches)]
    return [
        *cases,
        ("QLoRA", "merged"),
        ("QLoRA", "accumulation", "adapters alone"),
        ("QLoRA", "activation checkpointing", "merged"),
    ]


def overrides(features: tuple[str, ...]) -> tuple[str, ...]:
    given = {**FEATURES, **EXTRAS, **KINDS, "merged": MERGED, "adapters alone": ALONE}
    return (*LORA, *(one for name in features for one in given[name]))


def outcome(kind: str, features: tuple[str, ...], ours: Finished, stock: Finished, epoch: int) -> dict[str, Any]:
    """What two runs have in common."""
    return {
        "kind": kind,
        "features": list(features),
        "steps": len(stock.losses),
        "losses": ours.losses == stock.losses != [],
        "grad_norms": ours.figures("grad_norm") == stock.figures("grad_norm"),
        "adapters": same_epoch(ours, stock, epoch),
    }


def compare_whole(setup: SmallSetup, features: tuple[str, ...]) -> list[dict[str, Any]]:
    ours, stock = (setup.run_in_process(recipe, *overrides(features)) for recipe in (OURS, STOCK))
    return [outcome("whole", features, ours, stock, int("adapters alone" in features))]


def compare_resumed(setup: SmallSetup, features: tuple[str, ...]) -> list[dict[str, Any]]:
    """The second epoch after a stop: ours from either's epoch, and the stock recipe's from ours."""
    own = (*overrides(features), "epochs=2", "max_steps_per_epoch=2")
    ours, stock = (setup.run_in_process(recipe, *own) for recipe in (OURS, STOCK))

    def resume(recipe: str, begun: Finished) -> Finished:
        folder = setup.fresh_folder()
        shutil.copytree(begun.output_dir, folder, dirs_exist_ok=True)
        shutil.rmtree(folder / "epoch_1")
        (folder / "logs" / LOG).unlink()
        return setup.run_in_process(recipe, *own, f"output_dir={folder}", "resume_from_checkpoint=True")

    expected = resume(STOCK, stock)
    ways = {"ours from ours": (OURS, ours), "ours from stock's": (OURS, stock), "stock from ours": (STOCK, ours)}
    return [outcome(f"resumed, {name}", features, resume(*way), expected, 1) for name, way in ways.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"every {QUICK}th comparison")
    parser.add_argument("--output", type=Path, default=records.RESULTS, metavar="DIR")
    arguments = parser.parse_args()
    start = time.perf_counter()
    resumed = [(kind, *more) for kind in ("LoRA", "DoRA") for more in ((), ("bf16",), ("clipping",), ("accumulation",))]
    tasks = [(compare_whole, features) for features in whole()] + [(compare_resumed, features) for features in resumed]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, os.fdopen(os.dup(2), "w") as terminal:
        small, wide = Path(folder) / "small", Path(folder) / "wide"
        small.mkdir()
        wide.mkdir()
        setups = make_setup(small), make_wide_setup(wide)
        for compare, features in tqdm(tasks[:: QUICK if arguments.quick else 1], file=terminal, desc="comparisons"):
            with quiet():
                rows += compare(setups["QLoRA" in features], features)
    identical = [row["losses"] and row["grad_norms"] and row["adapters"] for row in rows]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        same = [is_same for row, is_same in zip(rows, identical, strict=True) if row["kind"] == kind]
        print(f"{kind:<28} {len(same):>4} comparisons, {sum(same):>4} identical")
    for row, is_same in zip(rows, identical, strict=True):
        if not is_same:
            print(f"differs: {row}")
    print(f"{sum(identical)} of {len(rows)} comparisons identical in every loss, gradient norm and adapter")
    seconds = round(time.perf_counter() - start, 1)
    records.write("parity_adapters", arguments.output, seconds=seconds, identical=sum(identical), comparisons=rows)
    sys.exit(0 if all(identical) else 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
