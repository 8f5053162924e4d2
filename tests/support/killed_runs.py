"""Runs that are killed at random moments and resumed each time, held against one that was never
killed.

    PYTHONPATH=tests python -m support.killed_runs --kills 30 --seed 0 --folder DIR plain growth

It prints one JSON object for each way.

A process of its own imports everything once and forks for each start, so that a start takes two
seconds; it must not have run a backward itself, as autograd's threads do not survive a fork. The
kills are genuine: SIGKILL, from outside, aimed at where the run's files show that it is, a random
moment later. What was hit is told by what the kill has left.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import adaptive_distill  # noqa: F401  # what each start would import anew
import adaptive_dpo  # noqa: F401
import adaptive_lora_finetune  # noqa: F401
import torchtune._cli.tune  # noqa: F401
from support import (  # what the ways name
    adapters,
    components,  # noqa: F401
    distillation,
    preferences,
)
from support.cli import OURS, SmallSetup, cosine_after, make_setup
from support.trajectories import read_run

from adaptive_batch.report import read_records

SCHEDULE = cosine_after(3)
DROPOUT = ("model.attn_dropout=0.2", "clip_grad_norm=0.5")
VALIDATION = ("dataset_val=${dataset}", "run_val_every_n_steps=4", "max_validation_batches=2")
ROWS = ("probe.device_memory=64MiB", "batch_size=2")
SAVES = ("epochs=3", "save_every_n_steps=3")

# What is killed, each as the command line gives it.
WAYS: dict[str, tuple[str, ...]] = {
    "plain": (*SAVES, "batch_size=2"),
    "growth": (
        *SAVES,
        *ROWS,
        *DROPOUT,
        *SCHEDULE,
        "batch_increase_function=support.components.four_more",
        "keep_final_state=True",
    ),
    "schedule": (
        *SAVES,
        *ROWS,
        *DROPOUT,
        *SCHEDULE,
        *VALIDATION,
        "batch_size_schedule._component_=adaptive_batch.schedules.linear_ramp",
        "batch_size_schedule.start=1",
        "batch_size_schedule.end=8",
        "batch_size_schedule.over=2ep",
        "grow_beyond_maximum=True",
        "micro_batch_size=3",
        "log_gradient_noise_scale=True",
        "keep_last_n_checkpoints=2",
        "lr_scaling=sqrt",
    ),
    "tokens": (
        *SAVES,
        *DROPOUT,
        *VALIDATION,
        "probe.device_memory=64MiB",
        "batch_tokens=160",
        "probe.objective=largest",  # a run that dies before it saves anything chooses anew
        "batch_size_schedule._component_=adaptive_batch.schedules.steps",
        "batch_size_schedule.batch_sizes=[90,160,240]",
        "batch_size_schedule.thresholds=[600tok,1800tok]",
        "sample_order=seqlen",
        "sample_window=16",
        "lr_clock=tokens",
        *SCHEDULE,
        "enable_async_checkpointing=True",
    ),
    "seesaw": (
        *SAVES,
        *ROWS,
        *DROPOUT,
        *SCHEDULE,
        "batch_size_schedule._component_=adaptive_batch.schedules.seesaw",
        "batch_size_schedule.maximum=16",
        "grow_beyond_maximum=True",
        "micro_batch_size=3",
        "scale_with_batch={beta2: half_life, weight_decay: per_token}",
    ),
    # memory runs out in whatever step holds one of these rows and more than two beside it at once
    "out of memory": (
        *SAVES,
        *ROWS,
        *DROPOUT,
        "dataset._component_=support.components.OfLengths",
        f"dataset.lengths={[6 + 5 * (row % 9) for row in range(40)]}",
        "model._component_=support.components.refusing",
        "model.refused=[7,23]",
        "model.rows_fit=3",
        "batch_size=8",
        "micro_batch_size=6",
        "batch_increase_function=support.components.four_more",
        "grow_beyond_maximum=True",
        "optimizer=torch.optim.SGD",
        "optimizer.momentum=0.9",
        "optimizer.lr=0.05",
    ),
    "in backward": (
        *SAVES,
        "batch_size=2",
        "model.attn_dropout=0.2",
        "optimizer_in_bwd=True",
        *SCHEDULE,
    ),
    "adapters": (
        *SAVES,
        *ROWS,
        *adapters.LORA,
        *adapters.KINDS["DoRA"],
        *DROPOUT,
        "model.lora_dropout=0.1",
        "batch_increase_function=support.components.four_more",
    ),
    # beside a second model; files of both are written by `overrides_of`
    "pairs": (
        *SAVES,
        *ROWS,
        *preferences.PAIRS,
        "clip_grad_norm=0.5",
        "batch_increase_function=support.components.four_more",
    ),
    "distillation": (
        *SAVES,
        *ROWS,
        *distillation.LORA,
        *DROPOUT,
        *VALIDATION,
        "model.lora_dropout=0.1",
        "micro_batch_size=3",
        "batch_increase_function=support.components.four_more",
        "grow_beyond_maximum=True",
    ),
    # with torchao's low-bit states, whose step is compiled
    "8 bit": (
        "epochs=2",
        "save_every_n_steps=3",
        "batch_size=4",
        "model.attn_dropout=0.2",
        "dtype=bf16",
        "optimizer=torchao.optim.AdamW8bit",
        "~optimizer.fused",
        "optimizer.lr=1e-3",
        "optimizer.bf16_stochastic_round=True",
    ),
}

# The recipe of a way that has an override, the first that it has; OURS of others.
RECIPES = {
    distillation.FULL[0]: distillation.OURS,
    preferences.PAIRS[0]: preferences.OURS,
    adapters.LORA[0]: adapters.OURS,
}

# Where a kill may hit a run, and how long after the run's files show it the kill comes at most, in
# seconds.
MOMENTS = {
    "in the probe": 0.5,
    "among steps": 0.05,
    "in a save": 0.04,
    "after a rename": 0.003,
    "in an epoch's save": 0.02,
    "where the batch grows": 0.006,
    "elsewhere": 2.5,  # and wherever else the kill finds it, from the start of the process
}
# seconds within which a kill comes just after a rename; file systems know the time to 4 ms
JUST_AFTER = 0.01
MOST_PER_RUN = 10


def overrides_of(setup: SmallSetup, way: str) -> tuple[str, ...]:
    """The overrides of a way, of which files are written that the setup has not."""
    files: tuple[str, ...] = ()
    if way == "pairs":
        files = (*preferences.write_pairs(setup), *preferences.reference_of(setup))
    elif way == "distillation":
        files = distillation.write_teacher(setup)
    return (*WAYS[way], *files)


def start(setup: SmallSetup, folder: Path, *overrides: str) -> int:
    """Fork a run, or one that goes on where something was saved; returns its process number."""
    saved = (folder / "recipe_state").exists() or any(folder.glob("step_*"))
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        with (folder / "printed.txt").open("a") as printed:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
        resumes = ("resume_from_checkpoint=True",) if saved else ()
        recipe = next((RECIPES[mark] for mark in RECIPES if mark in overrides), OURS)
        setup.run_in_process(recipe, f"output_dir={folder}", *overrides, *resumes)
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ended(child: int, folder: Path) -> bool:
    """Whether a process has come to its end; one that failed is an error."""
    found, status = os.waitpid(child, os.WNOHANG)
    return bool(found) and went_well(status, folder)


def went_well(status: int, folder: Path) -> bool:
    """True for the status of a process that went well; AssertionError with what it printed for
    another.
    """
    if code := os.waitstatus_to_exitcode(status):
        raise AssertionError(f"exit status {code}:\n{(folder / 'printed.txt').read_text()[-5000:]}")
    return True


class Watchdog:
    """What a run's files show since it was started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._record = folder / "adaptive_batch" / "run.jsonl"
        self._begin = self._record.stat().st_size if self._record.exists() else 0
        self._before = self._folders()

    def is_at(self, moment: str, count: int) -> bool:
        """Whether the run has come to the moment, for the `count`-th time where it comes often."""
        kinds = self._kinds()
        match moment:
            case "in the probe":
                return "start" in kinds
            case "among steps":
                return kinds.count("step") >= count
            case "in a save":
                return kinds.count("step") >= count and self._has_new(".saving-step_")
            case "after a rename":
                return self._has_new("step_")
            case "in an epoch's save":
                return self._saves_epoch(kinds)
            case "where the batch grows":
                return self._grows(kinds)
            case _:
                return True

    def was_at(self, killed_ns: int, *, has_probe: bool, grows: bool) -> str:
        """The moment at which a run that was killed was, by what it has left."""
        kinds = self._kinds()
        if self._saves_epoch(kinds):
            return "in an epoch's save"
        if self._has_new(".saving-step_"):
            return "in a save"
        renamed = max(
            (at for name, (_, at) in self._folders().items() if name.startswith("step_")), default=0
        )
        if killed_ns - renamed < JUST_AFTER * 1e9 or self._has_new(".removed-", ".replaced-step_"):
            return "after a rename"
        if (
            has_probe
            and "start" in kinds
            and not (self._folder / "adaptive_batch" / "probe.json").exists()
        ):
            return "in the probe"
        if grows and self._grows(kinds):
            return "where the batch grows"
        return "among steps" if "step" in kinds else "elsewhere"

    def _kinds(self) -> list[str]:
        """Of the records since it was started."""
        if not self._record.exists():
            return []
        with self._record.open("rb") as file:
            file.seek(self._begin)
            lines = file.read().split(b"\n")
        return [
            line.split(b'"')[3].decode()
            for line in lines
            if line.startswith(b'{"kind": "') and line.count(b'"') > 3
        ]

    def _folders(self) -> dict[str, tuple[int, int]]:
        """Each folder of a save: its identity, and when it was last changed or renamed."""
        found = {}
        for name in os.listdir(self._folder):
            path = self._folder / name
            if name.startswith((".", "step_", "epoch_")):
                try:
                    if name != ".saving" or os.listdir(
                        path
                    ):  # empty while a checkpointer is being built
                        found[name] = (path.stat().st_ino, path.stat().st_ctime_ns)
                except FileNotFoundError:
                    continue
        return found

    def _new(self) -> set[str]:
        return {name for name, at in self._folders().items() if self._before.get(name) != at}

    def _has_new(self, *prefixes: str) -> bool:
        return any(name.startswith(prefixes) for name in self._new())

    def _grows(self, kinds: list[str]) -> bool:
        """Between two steps, or before the first step of a run that goes on, the batch grows."""
        if "step" in kinds:
            kinds = kinds[len(kinds) - kinds[::-1].index("step") :]
            return "batch_size" in kinds or "checkpoint" in kinds
        return bool(self._before) and "batch_size" in kinds

    def _saves_epoch(self, kinds: list[str]) -> bool:
        """Something of an epoch lies aside, or is in place and is not recorded yet."""
        new = self._new()
        in_place = sum(name.startswith("epoch_") for name in new)
        return ".saving" in new or in_place > kinds.count("checkpoint")


@dataclass(frozen=True)
class Whole:
    """A run that was never killed.

    Attributes:
        folder: where it wrote.
        moments: those that a run of its way has.
        num_steps: optimizer steps.
    """

    folder: Path
    moments: tuple[str, ...]
    num_steps: int

    @classmethod
    def run(cls, setup: SmallSetup, overrides: tuple[str, ...]) -> Whole:
        folder = setup.fresh_folder()
        run_to_its_end(setup, folder, *overrides)
        kinds = [record["kind"] for record in read_records(folder / "adaptive_batch" / "run.jsonl")]
        missing = {
            "in the probe": "bound" not in kinds,
            "where the batch grows": "batch_size" not in kinds,
        }
        return cls(folder, tuple(m for m in MOMENTS if not missing.get(m)), kinds.count("step"))


def run_to_its_end(setup: SmallSetup, folder: Path, *overrides: str) -> None:
    """Start a run, or go on with it, and wait."""
    _, status = os.waitpid(start(setup, folder, *overrides), 0)
    went_well(status, folder)


def kill_once(
    setup: SmallSetup,
    folder: Path,
    overrides: tuple[str, ...],
    *,
    aim: str,
    whole: Whole,
    chance: random.Random,
) -> str | None:
    """Start a run, or go on with it, and kill it; returns the moment that was hit, None where it
    came to its end before.
    """
    watch, count, delay = Watchdog(folder), chance.randint(1, 6), chance.uniform(0, MOMENTS[aim])
    child = start(setup, folder, *overrides)
    while not watch.is_at(aim, count):
        if ended(child, folder):
            return None
        time.sleep(0.0002)
    deadline = time.perf_counter() + delay
    while time.perf_counter() < deadline:
        if ended(child, folder):
            return None
        time.sleep(0.0002)
    killed = time.time_ns()
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != -signal.SIGKILL and went_well(status, folder):
        return None
    has_probe, grows = ("in the probe" in whole.moments), ("where the batch grows" in whole.moments)
    return watch.was_at(killed, has_probe=has_probe, grows=grows)


def differences(folder: Path, whole: Path) -> list[str]:
    """Compare a run that was killed and resumed with one that was not."""
    return read_run(folder).differences(read_run(whole))


def experiment(
    setup: SmallSetup,
    way: str,
    *,
    kills: int,
    seed: int,
    say: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Kill and resume runs of a way until there were so many kills, and let each run come to its
    end.
    """
    begin = time.perf_counter()
    chance, overrides = random.Random(f"{way} {seed}"), overrides_of(setup, way)
    whole = Whole.run(setup, overrides)
    hits: dict[str, int] = dict.fromkeys(whole.moments, 0)
    differing: list[str] = []
    runs = 0
    while sum(hits.values()) < kills:
        folder, runs, in_run = setup.fresh_folder(), runs + 1, 0
        while sum(hits.values()) < kills and in_run < MOST_PER_RUN:
            is_known = (folder / "adaptive_batch" / "probe.json").exists()
            aims = [
                moment for moment in whole.moments if not (is_known and moment == "in the probe")
            ]
            least = min(hits[moment] for moment in aims)
            aim = chance.choice([moment for moment in aims if hits[moment] == least])
            hit = kill_once(setup, folder, overrides, aim=aim, whole=whole, chance=chance)
            if hit is None:
                break
            hits[hit] += 1
            in_run += 1
            say(f"{way}: aimed at {aim}, killed {hit}, {sum(hits.values())} of {kills}")
        else:
            run_to_its_end(setup, folder, *overrides)
        differing += [
            f"run {runs}: {name}" for name in read_run(folder).differences(read_run(whole.folder))
        ]
    return {
        "way": way,
        "kills": sum(hits.values()),
        "by_moment": hits,
        "runs": runs,
        "steps": whole.num_steps,
        "differing": differing,
        "seconds": round(time.perf_counter() - begin, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ways", nargs="+", choices=WAYS, metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True, help="an empty one")
    arguments = parser.parse_args()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no workers that outlive a kill
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(arguments.folder / "compiled")
    setup = make_setup(arguments.folder)
    gc.collect()
    gc.freeze()  # what is imported stays, so a start need not go through it

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    for way in arguments.ways:
        found = experiment(setup, way, kills=arguments.kills, seed=arguments.seed, say=say)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
