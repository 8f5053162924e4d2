"""Time of a step under DDP on two ranks: `AdaptiveStep`, without and with the overlap of its last
part with the reduction of gradients, over DDP's own.

    python benchmarks/step_time_ddp.py [--pairs 9] [--width 1024] [--output DIR]

All three train in the same processes, one step each in turns; a step ends when both ranks have
ended it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import records
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from adaptive_batch import distributed
from adaptive_batch.training import AdaptiveStep, Part, StepOptions

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.ranks import run_on_ranks

LAYERS = 48
ROWS = 32
PARTS = 2


def model_of(width: int) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(LAYERS)]
    return DistributedDataParallel(nn.Sequential(*layers))


def steps_of(width: int, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Return a step of each kind, of the same model in two micro-batches."""
    model = model_of(width)
    half = ROWS // PARTS

    def forward_backward(part: Part) -> None:
        inputs, targets = part.batch
        (mse_loss(model(inputs), targets) * part.share).backward()

    def plain() -> None:
        first, second = ((batch[0][rows], batch[1][rows]) for rows in halves)
        with model.no_sync():
            forward_backward(Part(first, half, share=1 / PARTS))
        forward_backward(Part(second, half, share=1 / PARTS))

    halves = (slice(0, half), slice(half, ROWS))
    ours = AdaptiveStep(model, forward_backward, micro_batch_size=half)
    overlaps = AdaptiveStep(
        model,
        forward_backward,
        micro_batch_size=half,
        options=StepOptions(overlap_reduction=True),
    )
    steps = {
        "DDP": plain,
        "AdaptiveStep": lambda: ours(batch),
        "AdaptiveStep, overlap": lambda: overlaps(batch),
    }

    def clear_after(step: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            step()
            model.zero_grad()

        return run

    return {name: clear_after(step) for name, step in steps.items()}


def timed(width: int, pairs: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(distributed.rank())
    inputs, targets = (torch.randn(ROWS, width, generator=generator) for _ in range(2))
    steps = steps_of(width, (inputs, targets))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(pairs + 2):
        for name, step in steps.items():
            distributed.any_of_ranks(False)
            start = time.perf_counter()
            step()
            distributed.any_of_ranks(False)
            # In the first two DDP and the check of a split set themselves up.
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--output", type=Path, default=records.RESULTS)
    arguments = parser.parse_args()
    parameters = LAYERS * arguments.width * (arguments.width + 1)
    seconds, _ = run_on_ranks(timed, 2, arguments.width, arguments.pairs, timeout=3600)
    print(f"{parameters / 1e6:.1f} million parameters, 2 ranks, {ROWS} rows in {PARTS} parts")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    over_ddp = {}
    for name, values in seconds.items():
        pairs = zip(values, seconds["DDP"], strict=True)
        over_ddp[name] = statistics.median(own / plain for own, plain in pairs)
        print(f"{name:<24} {1e3 * medians[name]:8.1f} ms  {over_ddp[name]:.3f} of DDP's")
    records.write(
        "step_time_ddp",
        arguments.output,
        parameters=parameters,
        median_seconds=medians,
        over_ddp=over_ddp,
    )


if __name__ == "__main__":
    main()
