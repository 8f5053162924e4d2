"""A run that resumes on 1, 2, 4, 2 and 1 ranks equals a run on one device.

    python benchmarks/resume_across_ranks.py [--ways WAY ...] [--output DIR]

Each way is trained once on one device without interruption, and once in parts. Each part stops
within an epoch, and the next part resumes on a different number of ranks. Rows, global batch and
learning rate of every step must be equal, and the audit must succeed. The table has the largest
relative difference of a loss, and the norm of the difference of all weights relative to their norm.
Exits with 1 if anything is not equal, or a loss differs by more than 1e-5.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from support.cli import FEATURES, OURS, block, make_setup
from support.stops import asks_at_step, asks_in_epoch
from support.trajectories import (
    OF_DATA,
    SCHEDULE,
    SGD,
    TOKENS,
    VALIDATION,
    Part,
    Trajectory,
    read_run,
    train_in_parts,
)

from adaptive_batch.distributed import EXIT_STATUS

MOST_APART = 1e-5


@dataclass(frozen=True)
class Way:
    """Configuration of a run, and the parts that train it."""

    overrides: tuple[str, ...]
    parts: list[Part]
    # Further overrides of the run on one device: the batch size, if several ranks begin.
    alone: tuple[str, ...] = ()


def on_ranks(*ranks: int, until: tuple[int, ...]) -> list[Part]:
    """Return parts on numbers of ranks that end at the given steps, and the last at the end."""
    asked: list[Part] = [
        (number, asks_at_step(step), EXIT_STATUS)
        for number, step in zip(ranks[:-1], until, strict=True)
    ]
    return [*asked, (ranks[-1], (), 0)]


def there_and_back(*until: int) -> list[Part]:
    return on_ranks(1, 2, 4, 2, 1, until=until)


def after_an_epoch(first: int, second: int) -> list[Part]:
    """Return two parts; the first one is asked to end in the save of the first epoch."""
    return [(first, asks_in_epoch(0), EXIT_STATUS), (second, (), 0)]


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
    "3 ranks": Way((*SAVES, *SGD, "batch_size=8", "dtype=fp64"), on_ranks(1, 3, 1, until=(3, 6))),
    "begun on 4": Way((*SGD, "batch_size=1"), on_ranks(4, 2, 1, until=(3, 9)), ALONE),
    "epoch of 2 on 1": Way((*SGD, "batch_size=2"), after_an_epoch(2, 1), ALONE),
    "epoch of 2 on 4": Way((*SGD, "batch_size=2"), after_an_epoch(2, 4), ALONE),
    "epoch of 1 on 2": Way(COSINE, after_an_epoch(1, 2)),
}


def relative_differences(ours: Trajectory, theirs: Trajectory, name: str) -> list[float]:
    """Return the differences of a figure of each step that has it."""
    both = [step for step in ours.steps.keys() & theirs.steps.keys() if name in theirs.steps[step]]
    pairs = [(ours.steps[step][name], theirs.steps[step][name]) for step in both]
    return [abs(one - other) / abs(other) for one, other in pairs]


def errors(row: dict[str, Any]) -> list[str]:
    apart = [f"a loss differs by {row['loss']:.1e}"] if row["loss"] > MOST_APART else []
    return [*row["differing"], *apart]


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        setup = make_setup(Path(folder))

        def measure(name: str) -> dict[str, Any]:
            way = WAYS[name]
            ours = read_run(train_in_parts(setup, way.overrides, way.parts))
            theirs = read_run(setup.run(OURS, *way.overrides, *way.alone, ranks=1).output_dir)
            apart = [
                one
                for figure in ("loss", "val_loss")
                for one in relative_differences(ours, theirs, figure)
            ]
            return {
                "way": name,
                "ranks": ", ".join(str(number) for number, *_ in way.parts),
                "steps": sum(isinstance(step, int) for step in theirs.steps),
                "differing": ours.differences(theirs, rounding=(0.0, float("inf")), only=OF_DATA),
                "loss": max(apart),
                "weights": ours.weights_apart(theirs),
            }

        harness.run(
            "resume_across_ranks",
            arguments.output,
            arguments.ways,
            measure,
            columns="way:<24 ranks:<13 steps:>5 differing:>9 loss:>8.1e weights:>8.1e",
            errors=errors,
            figures=lambda rows: {
                "differing": sum(len(row["differing"]) for row in rows),
                "loss_apart": max(row["loss"] for row in rows),
            },
        )


if __name__ == "__main__":
    main()
