"""Time of an optimizer step: our recipe with everything adaptive off over torchtune's stock one, or
our own two ways.

    python benchmarks/step_time.py [--compare stock] [--pairs N] [--quick] [--device cuda]
        [--output DIR] [key=value ...]
    python benchmarks/step_time.py --compare micro ...
    python benchmarks/step_time.py --compare order ...

``micro`` compares ours with ``micro_batch_size: auto``, where one micro-batch holds the whole step,
with ours adaptive off. Both train in one process, each in a thread of its own, one step each in
turns: what slows the machine slows both. They are built anew for each of several rounds, and take
turns at being first: where their tensors happen to lie makes a difference of a percent or two,
which stays for as long as they live. The first step of an epoch, which saves a checkpoint, is left
out.

``order`` compares micro-batches with the most tokens first, as they run, with a random order of the
same ones. In the first steps of a round both are in the same order, and their losses have to be the
same bits; how far they are apart by the end of it is reported too.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import records
import torch
from omegaconf import DictConfig
from turns import (
    Enough,
    Relay,
    TurnLogger,
    configuration,
    our_recipe,
    printing_into,
    resampled_interval,
    stock_recipe,
)

from adaptive_batch.data import MicroBatch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import demo

ROUNDS = 8
WARM_UP = 5  # pairs of a round: allocators and lazy initialisation

Losses = dict[str, list[list[float]]]  # of each side, by rounds
Seconds = dict[str, list[list[float]]]  # of each side, by rounds


@dataclass(frozen=True)
class Side:
    """One of the two that are compared."""

    name: str
    build: Callable[[DictConfig], Any]
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """What is measured over what, and the name of its record."""

    record: str
    measured: Side
    over: Side
    target: float = 1.01


def shuffling_recipe(cfg: DictConfig) -> Any:
    """Our recipe, whose micro-batches run in a random order after the first steps."""
    recipe = our_recipe(cfg)
    runner = recipe.trainer.runner
    divide = runner.divide
    draw = random.Random(0)
    num_steps = 0

    def shuffled(*arguments: Any) -> tuple[list[MicroBatch], ...]:
        nonlocal num_steps
        num_steps += 1
        parts = tuple(list(part) for part in divide(*arguments))
        for part in parts if num_steps > WARM_UP else ():
            draw.shuffle(part)
        return parts

    runner.divide = shuffled  # type: ignore[method-assign, assignment]
    return recipe


BY_TOKENS = ("batch_size=32", "micro_batch_tokens=1024")
COMPARISONS = {
    "stock": Comparison("step_time", Side("ours", our_recipe), Side("stock", stock_recipe)),
    "micro": Comparison(
        "step_time_micro",
        Side(
            "auto",
            our_recipe,
            ("micro_batch_size=auto", "probe.objective=largest", "drop_last=True"),
        ),
        Side("off", our_recipe),
    ),
    "order": Comparison(
        "step_time_order",
        Side("largest first", our_recipe, BY_TOKENS),
        Side("random order", shuffling_recipe, BY_TOKENS),
        target=1.0,
    ),
}


def measure(
    folder: Path, comparison: Comparison, *, pairs: int, device: str, overrides: list[str]
) -> tuple[Seconds, Seconds, Losses, int]:
    """Seconds of each side's steps on the clock and of the processor, by rounds and in pairs; their
    losses, of all steps; and rows of a step.
    """
    demo.prepare(folder)
    rows = len(demo.read_rows(folder / "data" / "train.jsonl"))
    sides = (comparison.over, comparison.measured)
    common = [f"device={device}", *overrides]
    if sides[0].overrides == sides[1].overrides:
        common = [*sides[0].overrides, *common]
    cfg = configuration(folder, "any", common)
    step_rows = cfg.batch_size * cfg.gradient_accumulation_steps
    steps = rows // step_rows
    pairs = -(-pairs // ROUNDS)
    epochs = -(-(pairs + WARM_UP) // (steps - 1))
    kept = [step for step in range(epochs * steps) if step % steps][WARM_UP:][:pairs]

    def ends_turn(name: str, num_steps: int) -> bool:
        if num_steps > kept[-1]:
            raise Enough
        return True

    on_clock: Seconds = {side.name: [] for side in sides}
    of_processor: Seconds = {side.name: [] for side in sides}
    losses: Losses = {side.name: [] for side in sides}
    for number in range(ROUNDS):
        in_order = sides if number % 2 == 0 else sides[::-1]
        names = [side.name for side in in_order]
        TurnLogger.relay = relay = Relay(names, torch.device(device), after_step=ends_turn)
        recipes = {}
        for side in in_order:
            cfg = configuration(folder, side.name, [*common, *side.overrides, f"epochs={epochs}"])
            cfg.output_dir = str(folder / f"{side.name}_{number}")
            recipes[side.name] = side.build(cfg)
        relay.run(recipes)
        for side in sides:
            on_clock[side.name].append([relay.seconds[side.name][step] for step in kept])
            of_processor[side.name].append([relay.cpu_seconds[side.name][step] for step in kept])
            (lines,) = (folder / f"{side.name}_{number}").rglob("log_*.txt")
            losses[side.name].append([*map(float, re.findall(r" loss:(\S+)", lines.read_text()))])
    return on_clock, of_processor, losses, step_rows


def losses_apart(losses: Losses, comparison: Comparison) -> dict[str, Any]:
    """Whether the losses of the first steps are the same bits, and the largest difference of any
    pair, as a share.
    """
    pairs = [
        list(zip(*of_sides, strict=True))
        for of_sides in zip(
            losses[comparison.measured.name], losses[comparison.over.name], strict=True
        )
    ]
    return {
        "same_bits_in_first_steps": all(
            a == b for of_round in pairs for a, b in of_round[:WARM_UP]
        ),
        "same_bits": sum(a == b for of_round in pairs for a, b in of_round),
        "losses": sum(map(len, pairs)),
        "largest_difference": max(abs(a / b - 1) for of_round in pairs for a, b in of_round),
    }


def ratios(seconds: Seconds, comparison: Comparison) -> torch.Tensor:
    """Measured / over of each pair, `[rounds, pairs]`."""
    measured, over = (
        torch.tensor(seconds[side.name], dtype=torch.float64)
        for side in (comparison.measured, comparison.over)
    )
    return measured / over


def median_with_interval(ratios: torch.Tensor) -> tuple[float, float, float]:
    """Median over all pairs, and the bounds of its 95% bootstrap confidence interval."""
    return resampled_interval(
        lambda values: values[..., 0].quantile(0.5, dim=-1), ratios.unsqueeze(-1)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--compare", choices=tuple(COMPARISONS), default="stock", help="default: %(default)s"
    )
    parser.add_argument(
        "--pairs", type=int, default=320, help="steps of each recipe (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="30 pairs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=records.RESULTS, metavar="DIR")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="over the demo's configuration, for both"
    )
    arguments = parser.parse_args()
    pairs = 30 if arguments.quick else arguments.pairs
    comparison = COMPARISONS[arguments.compare]

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["ADAPTIVE_BATCH_CACHE"] = str(folder / "lengths")
        with printing_into(folder / "printed.txt"):
            on_clock, of_processor, losses, step_rows = measure(
                folder,
                comparison,
                pairs=pairs,
                device=arguments.device,
                overrides=arguments.overrides,
            )
    ratio, low, high = median_with_interval(ratios(on_clock, comparison))
    ratio_cpu, low_cpu, high_cpu = median_with_interval(ratios(of_processor, comparison))
    of_rounds = ratios(on_clock, comparison).quantile(0.5, dim=1).tolist()

    def flat(seconds: Seconds, side: Side) -> list[float]:
        return [value for of_round in seconds[side.name] for value in of_round]

    num_pairs = len(flat(on_clock, comparison.measured))
    print(
        f"{num_pairs} pairs of steps of {step_rows} rows on {arguments.device},"
        f" {torch.get_num_threads()} thread"
    )
    print(f"{'':<8} {'median ms':>10} {'10% ms':>8} {'90% ms':>8} {'processor ms':>13}")
    for side in (comparison.over, comparison.measured):
        seconds = flat(on_clock, side)
        tenths = statistics.quantiles(seconds, n=10)
        print(
            f"{side.name:<8} {1e3 * statistics.median(seconds):>10.2f} {1e3 * tenths[0]:>8.2f} "
            f"{1e3 * tenths[-1]:>8.2f} {1e3 * statistics.median(flat(of_processor, side)):>13.2f}"
        )
    verdict = "met" if low <= comparison.target else "NOT met"
    print(
        f"{comparison.measured.name} / {comparison.over.name}: median {ratio:.4f}, 95% interval"
        f" {low:.4f} to {high:.4f}; target {comparison.target} within it: {verdict}"
    )
    apart = losses_apart(losses, comparison)
    print(", ".join(f"{name}: {value}" for name, value in apart.items()))
    print(
        f"of the processor's time: median {ratio_cpu:.4f}, 95% interval {low_cpu:.4f} to"
        f" {high_cpu:.4f}"
    )
    print(f"by rounds: {', '.join(f'{median:.3f}' for median in of_rounds)}")

    records.write(
        comparison.record,
        arguments.output,
        pairs=num_pairs,
        step_rows=step_rows,
        overrides=arguments.overrides,
        measured=comparison.measured.name,
        over=comparison.over.name,
        ratio_median=ratio,
        ratio_interval_95=[low, high],
        ratio_of_rounds=of_rounds,
        target=comparison.target,
        losses_apart=apart,
        processor_ratio_median=ratio_cpu,
        processor_ratio_interval_95=[low_cpu, high_cpu],
        seconds=on_clock,
        processor_seconds=of_processor,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
