"""Time of an optimizer step: our recipe with everything adaptive off over torchtune's stock one.

    python benchmarks/step_time.py [--pairs N] [--quick] [--device cuda] [--output DIR]
        [key=value ...]

Both train in one process, each in a thread of its own, one step each in turns: what slows the
machine slows both. They are built anew for each of several rounds, and take turns at being first:
where their tensors happen to lie makes a difference of a percent or two, which stays for as long as
they live. The first step of an epoch, which saves a checkpoint, is left out. Losses of both are
compared bit by bit.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import records
import torch
from turns import (
    Enough,
    Relay,
    TurnLogger,
    configuration,
    our_recipe,
    resampled_interval,
    stock_recipe,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import demo

ROUNDS = 8
# Pairs of a round, for allocators and lazy initialisation.
WARM_UP = 5
TARGET = 1.01
RECIPES = {"stock": stock_recipe, "ours": our_recipe}

# Of each recipe, by rounds.
Figures = dict[str, list[list[float]]]


def measure(
    folder: Path, *, pairs: int, device: str, overrides: list[str]
) -> tuple[Figures, Figures, Figures, int]:
    """Return seconds of each recipe's steps on the clock and of the processor, in pairs; their
    losses, of all steps; and rows of a step.
    """
    demo.prepare(folder)
    rows = len(demo.read_rows(folder / "data" / "train.jsonl"))
    cfg = configuration(folder, "any", [f"device={device}", *overrides])
    step_rows = cfg.batch_size * cfg.gradient_accumulation_steps
    steps = rows // step_rows
    pairs = -(-pairs // ROUNDS)
    epochs = -(-(pairs + WARM_UP) // (steps - 1))
    kept = [step for step in range(epochs * steps) if step % steps][WARM_UP:][:pairs]

    def ends_turn(name: str, num_steps: int) -> bool:
        if num_steps > kept[-1]:
            raise Enough
        return True

    seconds: Figures = {name: [] for name in RECIPES}
    cpu_seconds: Figures = {name: [] for name in RECIPES}
    losses: Figures = {name: [] for name in RECIPES}
    for number in range(ROUNDS):
        names = list(RECIPES) if number % 2 == 0 else list(RECIPES)[::-1]
        TurnLogger.relay = relay = Relay(names, torch.device(device), after_step=ends_turn)
        recipes = {}
        for name in names:
            own = [f"device={device}", f"epochs={epochs}", *overrides]
            cfg = configuration(folder, name, own)
            cfg.output_dir = str(folder / f"{name}_{number}")
            recipes[name] = RECIPES[name](cfg)
        relay.run(recipes)
        for name in names:
            seconds[name].append([relay.seconds[name][step] for step in kept])
            cpu_seconds[name].append([relay.cpu_seconds[name][step] for step in kept])
            (lines,) = (folder / f"{name}_{number}").rglob("log_*.txt")
            losses[name].append([*map(float, re.findall(r" loss:(\S+)", lines.read_text()))])
    return seconds, cpu_seconds, losses, step_rows


def flat(figures: Figures, name: str) -> list[float]:
    return [value for of_round in figures[name] for value in of_round]


def ratio_of(seconds: Figures) -> dict[str, Any]:
    """Return the median of ours over stock's with its 95% bootstrap interval, and that of each
    round.
    """
    ours, stock = (torch.tensor(seconds[name], dtype=torch.float64) for name in ("ours", "stock"))
    ratios = ours / stock
    median, low, high = resampled_interval(
        lambda values: values[..., 0].quantile(0.5, dim=-1), ratios.unsqueeze(-1)
    )
    of_rounds = ratios.quantile(0.5, dim=1).tolist()
    return {"median": median, "interval_95": [low, high], "of_rounds": of_rounds}


def main() -> None:
    parser = records.parser(__doc__, quick="30 pairs")
    parser.add_argument(
        "--pairs", type=int, default=320, help="steps of each recipe (default: %(default)s)"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="over the demo's configuration, for both"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["ADAPTIVE_BATCH_CACHE"] = str(folder / "lengths")
        with records.printing_into(folder / "printed.txt"):
            seconds, cpu_seconds, losses, step_rows = measure(
                folder,
                pairs=30 if arguments.quick else arguments.pairs,
                device=arguments.device,
                overrides=arguments.overrides,
            )
    num_pairs = len(flat(seconds, "ours"))
    print(
        f"{num_pairs} pairs of steps of {step_rows} rows on {arguments.device},"
        f" {torch.get_num_threads()} thread"
    )
    table = records.Table(
        "recipe:<8 median_ms:>9.2f tenth_ms:>8.2f last_tenth_ms:>13.2f cpu_ms:>8.2f"
    )
    for name in RECIPES:
        milliseconds = [1e3 * value for value in flat(seconds, name)]
        tenths = statistics.quantiles(milliseconds, n=10)
        table.print(
            {"recipe": name, "median_ms": statistics.median(milliseconds)},
            tenth_ms=tenths[0],
            last_tenth_ms=tenths[-1],
            cpu_ms=1e3 * statistics.median(flat(cpu_seconds, name)),
        )
    ratio, cpu_ratio = ratio_of(seconds), ratio_of(cpu_seconds)
    for of, found in (("time", ratio), ("processor's time", cpu_ratio)):
        low, high = found["interval_95"]
        print(
            f"ours over stock, {of}: median {found['median']:.4f}, 95% interval {low:.4f} to"
            f" {high:.4f}, target {TARGET}"
        )
    pairs = list(zip(flat(losses, "ours"), flat(losses, "stock"), strict=True))
    same_bits = sum(one == other for one, other in pairs)
    print(f"{same_bits} of {len(pairs)} losses are the same bits")
    records.write(
        "step_time",
        arguments.output,
        pairs=num_pairs,
        step_rows=step_rows,
        overrides=arguments.overrides,
        ratio=ratio,
        processor_ratio=cpu_ratio,
        target=TARGET,
        losses=len(pairs),
        same_bits=same_bits,
        seconds=seconds,
        processor_seconds=cpu_seconds,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
