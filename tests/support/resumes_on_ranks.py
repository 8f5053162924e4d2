"""Runs that go on with another number of ranks again and again, held against one device that was
never interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.cli import FEATURES, SmallSetup, weights
from support.launch import Attempt, launch

from adaptive_batch.distributed import EXIT_STATUS
from adaptive_batch.report import audit, read_records

# Of every step: what another number of ranks must not change at all.
EXACT = ("epoch", "position", "rows", "lr", "batch_size", "samples_seen", "tokens_seen")
SAVES = ("save_every_n_steps=2",)
SGD = (
    *FEATURES["SGD with momentum"],
    "optimizer.fused=False",
)  # fused SGD does not take sharded parameters


@dataclass(frozen=True)
class Part:
    """A part of a run.

    Attributes:
        ranks: that train it.
        until: the step at which it is asked to end; None for its end.
        epoch: or the epoch in whose save it is asked to.
    """

    ranks: int
    until: int | None = None
    epoch: int | None = None

    @property
    def is_last(self) -> bool:
        """Nothing asks it to end."""
        return self.until is None and self.epoch is None

    def overrides(self) -> tuple[str, ...]:
        """What makes it end."""
        if self.epoch is not None:
            return (
                "checkpointer._component_=support.stops.AskingCheckpointer",
                f"checkpointer.at_epoch={self.epoch}",
            )
        if self.until is not None:
            return (
                "metric_logger._component_=support.stops.AskingToEnd",
                f"metric_logger.at_step={self.until}",
            )
        return ()


@dataclass(frozen=True)
class Way:
    """A run, and the numbers of ranks that train it.

    Attributes:
        overrides: key=value.
        parts: in their order.
        alone: what one device from beginning to end is given besides, as its batch where several
            ranks begin.
    """

    overrides: tuple[str, ...]
    parts: tuple[Part, ...]
    alone: tuple[str, ...] = ()


def there_and_back(*until: int) -> tuple[Part, ...]:
    """1, 2, 4, 2 and 1 ranks."""
    return (*(Part(ranks, step) for ranks, step in zip((1, 2, 4, 2), until, strict=True)), Part(1))


SCHEDULE = (*FEATURES["cosine"], *FEATURES["clipping"])
VALIDATION = ("dataset_val=${dataset}", "run_val_every_n_steps=3", "max_validation_batches=2")
GROWTH = (
    "batch_size=2",
    "batch_increase_function=support.components.four_more",
    "probe.device_memory=64MiB",
)
RAMP = (
    "batch_size_schedule._component_=adaptive_batch.schedules.linear_ramp",
    "batch_size_schedule.start=1",
    "batch_size_schedule.end=8",
    "batch_size_schedule.over=1ep",
    "grow_beyond_maximum=True",
    "micro_batch_size=3",
    "lr_scaling=sqrt",
    "probe.device_memory=64MiB",
)
TOKENS = (
    "batch_tokens=160",
    "probe.objective=largest",
    "batch_size_schedule._component_=adaptive_batch.schedules.steps",
    "batch_size_schedule.batch_sizes=[90,160,240]",
    "batch_size_schedule.thresholds=[600tok,1800tok]",
    "sample_order=seqlen",
    "sample_window=16",
    "lr_clock=tokens",
    "probe.device_memory=64MiB",
)

WAYS: dict[str, Way] = {
    "AdamW, cosine, clipping": Way((*SAVES, *SCHEDULE), there_and_back(3, 6, 9, 13)),
    "SGD, float64": Way((*SAVES, *SGD, "dtype=fp64"), there_and_back(3, 6, 9, 13)),
    "growth": Way((*SAVES, *SCHEDULE, *GROWTH), there_and_back(5, 15, 17, 19)),
    "ramp, validation": Way(
        (*SAVES, *SCHEDULE, *SGD, *RAMP, *VALIDATION), there_and_back(2, 5, 8, 11)
    ),
    "tokens": Way((*SAVES, *SCHEDULE, *SGD, *TOKENS), there_and_back(3, 6, 9, 13)),
    "accumulation": Way(
        (*SAVES, *SGD, "batch_size=2", *FEATURES["accumulation"], "dtype=fp64"),
        there_and_back(3, 6, 9, 13),
    ),
    "optimizer in backward": Way(
        (*SAVES, *SGD, "optimizer_in_bwd=True"), there_and_back(3, 6, 9, 13)
    ),
    "saved in the background": Way(
        (*SAVES, *SGD, "enable_async_checkpointing=True"), there_and_back(3, 6, 9, 13)
    ),
    "3 ranks": Way((*SAVES, *SGD, "batch_size=8", "dtype=fp64"), (Part(1, 3), Part(3, 6), Part(1))),
    "begun on 4": Way(
        (*SGD, "batch_size=1"), (Part(4, 3), Part(2, 9), Part(1)), alone=("batch_size=4",)
    ),
    "epoch of 2 on 1": Way(
        (*SGD, "batch_size=2"), (Part(2, epoch=0), Part(1)), alone=("batch_size=4",)
    ),
    "epoch of 2 on 4": Way(
        (*SGD, "batch_size=2"), (Part(2, epoch=0), Part(4)), alone=("batch_size=4",)
    ),
    "epoch of 1 on 2": Way((*SCHEDULE,), (Part(1, epoch=0), Part(2))),
}


def train_in_parts(setup: SmallSetup, way: Way) -> list[Attempt]:
    """Train the parts of a way, each going on from the one before; AssertionError where one ends
    otherwise than it was asked to.
    """
    folder, done = setup.fresh_folder(), []
    for number, part in enumerate(way.parts):
        goes_on = ("resume_from_checkpoint=True",) if number else ()
        (ended,) = launch(
            setup, part.ranks, *way.overrides, *part.overrides(), f"output_dir={folder}", *goes_on
        )
        expected = [0 if part.is_last else EXIT_STATUS] * part.ranks
        if ended.exit_statuses != expected:
            raise AssertionError(
                f"{part} ended with {ended.exit_statuses}, not {expected}:\n{ended.output[-6000:]}"
            )
        done.append(ended)
    return done


def train_alone(setup: SmallSetup, way: Way) -> Path:
    """Train it on one device from beginning to end; returns its folder."""
    (whole,) = launch(setup, 1, *way.overrides, *way.alone)
    if whole.exit_statuses != [0]:
        raise AssertionError(whole.output[-6000:])
    return whole.output_dir


def steps(folder: Path) -> dict[int, dict[str, Any]]:
    """The records of the steps that count, by their numbers."""
    records = read_records(folder / "adaptive_batch" / "run.jsonl")
    return {record["step"]: record for record in records if record["kind"] == "step"}


def validations(folder: Path) -> dict[int, float]:
    """Their losses by the steps after which they were."""
    records = read_records(folder / "adaptive_batch" / "run.jsonl")
    return {
        record["steps"]: record["val_loss"] for record in records if record["kind"] == "validation"
    }


def compare(folder: Path, whole: Path, *, exact: Sequence[str] = EXACT) -> dict[str, Any]:
    """How a run in parts differs from the whole one.

    Returns:
        `differing`: sentences on what must be the same and is not. `loss`, `validation`: the
        largest relative difference of any step. `weights`: the norm of the difference of all
        weights over their norm; `largest`: that of one weight.
    """
    ours, theirs = steps(folder), steps(whole)
    found = [f"step {step} is not in both" for step in sorted(ours.keys() ^ theirs.keys())]
    for step in sorted(ours.keys() & theirs.keys()):
        for name in exact:
            if ours[step].get(name) != theirs[step].get(name):
                found.append(
                    f"step {step}: {name} {ours[step].get(name)}, and {theirs[step].get(name)}"
                    " alone"
                )
    checked = audit(folder)
    found += [f"audit: {problem}" for problem in checked.problems]
    found += [f"left behind: {path.name}" for path in folder.glob(".*")]
    epochs = sorted(path.name for path in whole.glob("epoch_*"))
    if epochs != sorted(path.name for path in folder.glob("epoch_*")):
        found.append(
            f"epochs: {sorted(path.name for path in folder.glob('epoch_*'))}, and {epochs} alone"
        )
    relative, largest = weights_apart(folder / epochs[-1], whole / epochs[-1])
    both = sorted(ours.keys() & theirs.keys())
    here, there = validations(folder), validations(whole)
    if here.keys() != there.keys():
        found.append(f"validations after steps {sorted(here)}, and {sorted(there)} alone")
    return {
        "steps": len(theirs),
        "differing": found,
        "loss": max(
            (_apart(ours[step]["loss"], theirs[step]["loss"]) for step in both), default=0.0
        ),
        "validation": max(
            (_apart(here[step], there[step]) for step in here.keys() & there.keys()), default=0.0
        ),
        "weights": relative,
        "largest": largest,
        "verdict": checked.lines[-1],
    }


def weights_apart(one: Path, other: Path) -> tuple[float, float]:
    """The norm of the difference of two checkpoints over the norm of the second, and the largest
    difference of a weight.
    """
    ours, theirs = weights(one), weights(other)
    if ours.keys() != theirs.keys() or not ours:
        raise AssertionError(
            f"{one} and {other} hold other weights: {sorted(ours.keys() ^ theirs.keys())}"
        )
    apart = torch.cat([(ours[name].double() - theirs[name].double()).flatten() for name in theirs])
    norm = torch.cat([theirs[name].double().flatten() for name in theirs]).norm()
    return float(apart.norm() / norm), float(apart.abs().max())


def _apart(one: float, other: float) -> float:
    return abs(one - other) / abs(other)
