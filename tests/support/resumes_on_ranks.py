"""Runs that resume repeatedly on another number of ranks, compared with an uninterrupted run on one
device.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.cli import FEATURES, OURS, SmallSetup, block
from support.stops import asks_at_step, asks_in_epoch
from support.trajectories import (
    OF_DATA,
    SCHEDULE,
    SGD,
    TOKENS,
    VALIDATION,
    Trajectory,
    read_run,
    weights_apart,
)

from adaptive_batch.distributed import EXIT_STATUS
from adaptive_batch.report import audit

# Number of ranks, and the overrides that end the run; empty for the last part.
Part = tuple[int, tuple[str, ...]]


@dataclass(frozen=True)
class Way:
    """Configuration of a run, and the parts that train it."""

    overrides: tuple[str, ...]
    parts: tuple[Part, ...]
    # Further overrides of the run on one device: the batch size, if several ranks begin.
    alone: tuple[str, ...] = ()


def there_and_back(*until: int) -> tuple[Part, ...]:
    """Return parts on 1, 2, 4, 2 and 1 ranks that end at the given steps."""
    asked = zip((1, 2, 4, 2), map(asks_at_step, until), strict=True)
    return (*asked, (1, ()))


SAVES = ("save_every_n_steps=2",)
COSINE = (*FEATURES["cosine"], *FEATURES["clipping"])
GROWTH = ("batch_size=2", "batch_increase_function=support.components.four_more")
RAMP = (
    *block(SCHEDULE, "adaptive_batch.schedules.linear_ramp", start=1, end=8, over="1ep"),
    *("grow_beyond_maximum=True", "micro_batch_size=3", "lr_scaling=sqrt"),
)
MEMORY = "probe.device_memory=64MiB"
ALONE = ("batch_size=4",)
USUAL = there_and_back(3, 6, 9, 13)
EPOCH_OF_2 = (2, asks_in_epoch(0))

WAYS: dict[str, Way] = {
    "AdamW, cosine, clipping": Way((*SAVES, *COSINE), USUAL),
    "SGD, float64": Way((*SAVES, *SGD, "dtype=fp64"), USUAL),
    "growth": Way((*SAVES, *COSINE, *GROWTH, MEMORY), there_and_back(5, 15, 17, 19)),
    "ramp, validation": Way(
        (*SAVES, *COSINE, *SGD, *RAMP, MEMORY, *VALIDATION), there_and_back(2, 5, 8, 11)
    ),
    "tokens": Way((*SAVES, *COSINE, *SGD, *TOKENS), USUAL),
    "accumulation": Way(
        (*SAVES, *SGD, "batch_size=2", *FEATURES["accumulation"], "dtype=fp64"), USUAL
    ),
    "optimizer in backward": Way((*SAVES, *SGD, "optimizer_in_bwd=True"), USUAL),
    "saved in the background": Way((*SAVES, *SGD, "enable_async_checkpointing=True"), USUAL),
    "3 ranks": Way(
        (*SAVES, *SGD, "batch_size=8", "dtype=fp64"),
        ((1, asks_at_step(3)), (3, asks_at_step(6)), (1, ())),
    ),
    "begun on 4": Way(
        (*SGD, "batch_size=1"), ((4, asks_at_step(3)), (2, asks_at_step(9)), (1, ())), ALONE
    ),
    "epoch of 2 on 1": Way((*SGD, "batch_size=2"), (EPOCH_OF_2, (1, ())), ALONE),
    "epoch of 2 on 4": Way((*SGD, "batch_size=2"), (EPOCH_OF_2, (4, ())), ALONE),
    "epoch of 1 on 2": Way(COSINE, ((1, asks_in_epoch(0)), (2, ()))),
}


def train_in_parts(setup: SmallSetup, way: Way) -> Path:
    """Train the parts of a way, each resumed from the previous one; return their folder."""
    keys = (*way.overrides, f"output_dir={setup.fresh_folder()}")
    for ranks, asks in way.parts:
        ends = EXIT_STATUS if asks else 0
        finished = setup.run(OURS, *keys, *asks, ranks=ranks, expect=ends)
        keys = (*keys, "resume_from_checkpoint=True")
    return finished.output_dir


def train_alone(setup: SmallSetup, way: Way) -> Path:
    """Train a way on one device without interruption; return its folder."""
    return setup.run(OURS, *way.overrides, *way.alone, ranks=1).output_dir


def compare(folder: Path, whole: Path) -> dict[str, Any]:
    """Compare a run in parts with the whole run.

    Returns:
        `differing`: differences of figures that must be equal. `loss`, `validation`: the largest
        relative difference of any step. `weights`: the norm of the difference of all weights
        relative to their norm. `largest`: the largest difference of a weight.
    """
    ours, theirs = read_run(folder), read_run(whole)
    relative, largest = weights_apart(ours.weights, theirs.weights)
    return {
        "steps": sum(isinstance(step, int) for step in theirs.steps),
        "differing": ours.differences(theirs, rounding=(0.0, float("inf")), only=OF_DATA),
        "loss": _largest_difference(ours, theirs, "loss"),
        "validation": _largest_difference(ours, theirs, "val_loss"),
        "weights": relative,
        "largest": largest,
        "audit": audit(folder).lines,
    }


def _largest_difference(ours: Trajectory, theirs: Trajectory, name: str) -> float:
    both = [step for step in ours.steps.keys() & theirs.steps.keys() if name in theirs.steps[step]]
    pairs = [(ours.steps[step][name], theirs.steps[step][name]) for step in both]
    return max((abs(one - other) / abs(other) for one, other in pairs), default=0.0)
