"""Runs that go on with another number of ranks again and again, held against one device that was
never interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.cli import FEATURES, OURS, Finished, SmallSetup
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

SAVES = ("save_every_n_steps=2",)


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
        """Return the overrides that end the part."""
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


COSINE = (*FEATURES["cosine"], *FEATURES["clipping"])
GROWTH = ("batch_size=2", "batch_increase_function=support.components.four_more")
RAMP = (
    f"{SCHEDULE}._component_=adaptive_batch.schedules.linear_ramp",
    *(f"{SCHEDULE}.start=1", f"{SCHEDULE}.end=8", f"{SCHEDULE}.over=1ep"),
    *("grow_beyond_maximum=True", "micro_batch_size=3", "lr_scaling=sqrt"),
)
MEMORY = "probe.device_memory=64MiB"
ALONE = ("batch_size=4",)

WAYS: dict[str, Way] = {
    "AdamW, cosine, clipping": Way((*SAVES, *COSINE), there_and_back(3, 6, 9, 13)),
    "SGD, float64": Way((*SAVES, *SGD, "dtype=fp64"), there_and_back(3, 6, 9, 13)),
    "growth": Way((*SAVES, *COSINE, *GROWTH, MEMORY), there_and_back(5, 15, 17, 19)),
    "ramp, validation": Way(
        (*SAVES, *COSINE, *SGD, *RAMP, MEMORY, *VALIDATION), there_and_back(2, 5, 8, 11)
    ),
    "tokens": Way((*SAVES, *COSINE, *SGD, *TOKENS), there_and_back(3, 6, 9, 13)),
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
    "begun on 4": Way((*SGD, "batch_size=1"), (Part(4, 3), Part(2, 9), Part(1)), ALONE),
    "epoch of 2 on 1": Way((*SGD, "batch_size=2"), (Part(2, epoch=0), Part(1)), ALONE),
    "epoch of 2 on 4": Way((*SGD, "batch_size=2"), (Part(2, epoch=0), Part(4)), ALONE),
    "epoch of 1 on 2": Way(COSINE, (Part(1, epoch=0), Part(2))),
}


def train_in_parts(setup: SmallSetup, way: Way) -> list[Finished]:
    """Train the parts of a way, each going on from the one before."""
    folder, done = setup.fresh_folder(), []
    for part in way.parts:
        goes_on = ("resume_from_checkpoint=True",) if done else ()
        keys = (*way.overrides, *part.overrides(), f"output_dir={folder}", *goes_on)
        ends = 0 if part.is_last else EXIT_STATUS
        done.append(setup.run(OURS, *keys, ranks=part.ranks, expect=ends))
    return done


def train_alone(setup: SmallSetup, way: Way) -> Path:
    """Train it on one device from beginning to end; returns its folder."""
    return setup.run(OURS, *way.overrides, *way.alone, ranks=1).output_dir


def compare(folder: Path, whole: Path) -> dict[str, Any]:
    """Compare a run in parts with the whole run.

    Returns:
        `differing`: what must be the same and is not. `loss`, `validation`: the largest relative
        difference of any step. `weights`: the norm of the difference of all weights over their
        norm; `largest`: that of one weight.
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
    both = ours.steps.keys() & theirs.steps.keys()
    pairs = [
        (ours.steps[step][name], theirs.steps[step][name])
        for step in both
        if name in theirs.steps[step]
    ]
    return max((abs(one - other) / abs(other) for one, other in pairs), default=0.0)
