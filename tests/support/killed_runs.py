"""Kill runs at random moments, resume them, and compare them with a run that was never killed;
benchmarks/kills.py does this.

A timer of the process kills it a random time after the call of a method, at any instruction.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.cli import SmallSetup, block, cosine_after
from support.processes import run
from support.rank_faults import before_call
from support.tasks import ADAPTERS, DISTILLATION, FULL, FULL_PAIRS, KINDS, Recipe
from support.trajectories import SCHEDULE, TOKENS, VALIDATION, run_differences

from adaptive_batch.checkpoint import CheckpointManager
from adaptive_batch.report import RunLog, read_records
from adaptive_batch.torchtune import Job, LimitFinder, Saver, Trainer

COSINE = cosine_after(3)
DROPOUT = ("model.attn_dropout=0.2", "clip_grad_norm=0.5")
FOUR_MORE = "batch_increase_function=support.components.four_more"
ROWS = ("probe.device_memory=64MiB", "batch_size=2")
SAVES = ("epochs=3", "save_every_n_steps=3")
SMALL_STEPS = ("grow_beyond_maximum=True", "micro_batch_size=3")


@dataclass(frozen=True)
class Way:
    """Configuration of a run."""

    overrides: tuple[str, ...]
    recipe: Recipe = FULL


RAMP = block(SCHEDULE, "adaptive_batch.schedules.linear_ramp", start=1, end=8, over="2ep")
WAYS: dict[str, Way] = {
    "plain": Way((*SAVES, "batch_size=2")),
    "growth": Way((*SAVES, *ROWS, *DROPOUT, *COSINE, FOUR_MORE, "keep_final_state=True")),
    "schedule": Way(
        (
            *(*SAVES, *ROWS, *DROPOUT, *COSINE, *VALIDATION, *SMALL_STEPS, *RAMP),
            *("log_gradient_noise_scale=True", "keep_last_n_checkpoints=2", "lr_scaling=sqrt"),
        )
    ),
    "tokens": Way(
        (*SAVES, *DROPOUT, *COSINE, *VALIDATION, *TOKENS, "enable_async_checkpointing=True")
    ),
    "seesaw": Way(
        (
            *(*SAVES, *ROWS, *DROPOUT, *COSINE, *SMALL_STEPS),
            *block(SCHEDULE, "adaptive_batch.schedules.seesaw", maximum=16),
            "scale_with_batch={beta2: half_life, weight_decay: per_token}",
        )
    ),
    # A micro-batch of one of these rows and more than two others runs out of memory.
    "out of memory": Way(
        (
            *(*SAVES, *ROWS, *DROPOUT, FOUR_MORE, "grow_beyond_maximum=True"),
            "dataset._component_=support.components.OfLengths",
            f"dataset.lengths={[6 + 5 * (row % 9) for row in range(40)]}",
            "model._component_=support.components.watched",
            *("model.refused=[7,23]", "model.rows_fit=3", "batch_size=8", "micro_batch_size=6"),
            *("optimizer=torch.optim.SGD", "optimizer.momentum=0.9", "optimizer.lr=0.05"),
        )
    ),
    "in backward": Way(
        (*SAVES, *COSINE, "batch_size=2", "model.attn_dropout=0.2", "optimizer_in_bwd=True")
    ),
    "adapters": Way(
        (
            *(*SAVES, *ROWS, *KINDS["DoRA"], *DROPOUT, FOUR_MORE),
            "model.lora_dropout=0.1",
        ),
        ADAPTERS,
    ),
    "pairs": Way((*SAVES, *ROWS, "clip_grad_norm=0.5", FOUR_MORE), FULL_PAIRS),
    "distillation": Way(
        (*SAVES, *ROWS, *DROPOUT, *VALIDATION, FOUR_MORE, *SMALL_STEPS, "model.lora_dropout=0.1"),
        DISTILLATION,
    ),
    # The step of torchao's optimizer is compiled.
    "8 bit": Way(
        (
            *("epochs=2", "save_every_n_steps=3", "batch_size=4", "model.attn_dropout=0.2"),
            *("dtype=bf16", "optimizer=torchao.optim.AdamW8bit", "~optimizer.fused"),
            *("optimizer.lr=1e-3", "optimizer.bf16_stochastic_round=True"),
        )
    ),
}


@dataclass(frozen=True)
class Moment:
    """A kill some seconds after the start of a call of a method."""

    owner: type
    method: str
    seconds: float  # maximum
    calls: int = 2  # maximum number of the call
    where: Callable[..., bool] = lambda *_, **__: True


MOMENTS = {
    "in the probe": Moment(LimitFinder, "find_limits", 0.5, calls=1),
    "among steps": Moment(Trainer, "step", 0.05, calls=6),
    "in a save": Moment(CheckpointManager, "_write", 0.04),
    "after a rename": Moment(Path, "rename", 0.003),
    "in an epoch's save": Moment(Saver, "_export", 0.02),
    "where the batch grows": Moment(
        RunLog, "event", 0.006, where=lambda log, kind, *_, **__: kind == "batch_size"
    ),
    # Any moment after the start of the recipe.
    "elsewhere": Moment(Job, "__init__", 2.5, calls=1),
}
MOST_PER_RUN = 10


def ending(moment: str, *, call: int, seconds: float = 0.0) -> dict[str, str]:
    """Return the variables of a process that :func:`arm` ends at a moment: it is killed some
    seconds after the call, or with 0 seconds gets SIGTERM.
    """
    return {"ENDING": json.dumps([moment, call, seconds])}


def arm() -> None:
    """Let this process end as its variables say, if they are set; see :func:`ending`."""
    if "ENDING" not in os.environ:
        return
    name, number, seconds = json.loads(os.environ["ENDING"])
    moment = MOMENTS[name]

    def end() -> None:
        if seconds:
            # Its signal, SIGALRM, kills the process, whatever runs then.
            signal.setitimer(signal.ITIMER_REAL, seconds)
        else:
            signal.raise_signal(signal.SIGTERM)

    before_call(moment.owner, moment.method, end, numbers=[number], where=moment.where)


def _start(setup: SmallSetup, recipe: str, keys: Sequence[str]) -> None:
    arm()
    setup.run_in_process(recipe, *keys)


def experiment(setup: SmallSetup, name: str, *, kills: int, seed: int) -> dict[str, Any]:
    """Kill and resume runs of a way `kills` times, and train each run to its end."""
    begin = time.perf_counter()
    way, chance = WAYS[name], random.Random(f"{name} {seed}")
    overrides = (*way.recipe.overrides(setup), *way.overrides)

    def start(folder: Path, variables: dict[str, str]) -> bool:
        """Start or resume a run; return whether it was killed."""
        resumes = ("resume_from_checkpoint=True",) * any(folder.glob("step_*"))
        keys = (f"output_dir={folder}", *overrides, *resumes)
        (ended,) = run(
            _start, setup, way.recipe.ours, keys, environment=lambda rank: variables, timeout=500
        )
        assert ended.exit_status in (0, -signal.SIGALRM), ended.output[-5000:]
        return ended.exit_status != 0

    whole = setup.fresh_folder()
    start(whole, {})
    log = read_records(whole / "adaptive_batch" / "run.jsonl")
    kinds = [record["kind"] for record in log]
    missing = {
        "in the probe": "bound" not in kinds,
        "where the batch grows": "batch_size" not in kinds,
    }
    hits = {moment: 0 for moment in MOMENTS if not missing.get(moment)}
    differing: list[str] = []
    runs = 0
    while sum(hits.values()) < kills:
        folder, runs, in_run = setup.fresh_folder(), runs + 1, 0
        while sum(hits.values()) < kills and in_run < MOST_PER_RUN:
            is_known = (folder / "adaptive_batch" / "probe.json").exists()
            aims = [moment for moment in hits if not (is_known and moment == "in the probe")]
            least = min(hits[moment] for moment in aims)
            aim = chance.choice([moment for moment in aims if hits[moment] == least])
            moment = MOMENTS[aim]
            seconds = chance.uniform(0.0001, moment.seconds)
            if not start(
                folder, ending(aim, call=chance.randint(1, moment.calls), seconds=seconds)
            ):
                break
            hits[aim] += 1
            in_run += 1
        else:
            start(folder, {})
        found = run_differences(folder, whole)
        differing += [f"run {runs}: {difference}" for difference in found]
    return {
        "way": name,
        "kills": sum(hits.values()),
        "by_moment": hits,
        "runs": runs,
        "steps": kinds.count("step"),
        "differing": differing,
        "seconds": round(time.perf_counter() - begin, 1),
    }
