"""Runs that are killed at random moments and resumed each time, held against one that was never killed.

    python tests/small_kills.py --way plain --kills 30 --seed 0 --folder DIR        prints one JSON object

A process of its own imports everything once and forks for each start, so that a start takes a second; it must not have
run a backward itself, as autograd's threads do not survive a fork. The kills are genuine: SIGKILL, from outside, when
the run's files show that it is where it is to be killed, and a random moment later.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import small_growth  # noqa: F401  # what the ways name
from small_run import OURS, SmallSetup, make_setup, same_weights, weights

from adaptive_batch.audit import audit
from adaptive_batch.report import read_records

SCHEDULE = (
    "lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "lr_scheduler.num_warmup_steps=3",
)
DROPOUT = ("model.attn_dropout=0.2", "clip_grad_norm=0.5")
VALIDATION = ("dataset_val=${dataset}", "run_val_every_n_steps=4", "max_validation_batches=2")
ROWS = ("probe.device_memory=64MiB", "batch_size=2")
SAVES = ("epochs=3", "save_every_n_steps=3")

# What is killed, each as the command line gives it.
WAYS: dict[str, tuple[str, ...]] = {
    "plain": (*SAVES, "batch_size=2"),
    "growth": (*SAVES, *ROWS, *DROPOUT, *SCHEDULE, "batch_increase_function=small_growth.four_more"),
    "schedule": (
        *SAVES,
        *ROWS,
        *DROPOUT,
        *SCHEDULE,
        *VALIDATION,
        "batch_size_schedule._component_=adaptive_batch.growth.linear_ramp",
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
        "batch_size_schedule._component_=adaptive_batch.growth.steps",
        "batch_size_schedule.batch_sizes=[90,160,240]",
        "batch_size_schedule.thresholds=[600tok,1800tok]",
        "sample_order=seqlen",
        "sample_window=16",
        "lr_clock=tokens",
        *SCHEDULE,
        "enable_async_checkpointing=True",
    ),
    # memory runs out in whatever step holds one of these rows and more than two beside it at once
    "out of memory": (
        *SAVES,
        *ROWS,
        *DROPOUT,
        "dataset._component_=small_growth.OfLengths",
        f"dataset.lengths={[6 + 5 * (row % 9) for row in range(40)]}",
        "model._component_=small_growth.refusing",
        "model.refused=[7,23]",
        "model.rows_fit=3",
        "batch_size=8",
        "micro_batch_size=6",
        "batch_increase_function=small_growth.four_more",
        "grow_beyond_maximum=True",
        "optimizer=torch.optim.SGD",
        "optimizer.momentum=0.9",
        "optimizer.lr=0.05",
    ),
}
MOMENTS = ("probe", "step", "save", "saved", "epoch", "growth", "any")
FIGURES_OF_TIME = ("time", "seconds", "tokens_per_second_per_gpu")


def start(setup: SmallSetup, folder: Path, *overrides: str) -> int:
    """Fork a run; returns its process number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        with (folder / "printed.txt").open("a") as printed:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
        setup.run_in_process(OURS, f"output_dir={folder}", *overrides)
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ended(child: int) -> int | None:
    """The exit status of a process that has ended; None while it goes on."""
    found, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


class Watch:
    """What a run's files show since it was started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._record = folder / "adaptive_batch" / "run.jsonl"
        self._begin = self._record.stat().st_size if self._record.exists() else 0
        self._points = self._whole()

    def _lines(self, *kinds: str) -> int:
        if not self._record.exists():
            return 0
        with self._record.open("rb") as file:
            file.seek(self._begin)
            text = file.read()
        return sum(text.count(b'{"kind": "%s"' % kind.encode()) for kind in kinds)

    def _whole(self) -> set[str]:
        return {path.name for path in self._folder.glob("step_*")}

    def is_at(self, moment: str, count: int) -> bool:
        """Whether the run has come to the moment, for the `count`-th time where it comes often."""
        match moment:
            case "probe":
                return self._lines("start") > 0
            case "step":
                return self._lines("step") >= count
            case "save":
                return self._lines("step") >= count and any(self._folder.glob(".saving-step_*"))
            case "saved":
                return bool(self._whole() - self._points)
            case "epoch":
                return (self._folder / ".saving").exists()
            case "growth":
                return self._lines("batch_size") >= min(count, 2)
            case _:
                return True


DELAYS = {"probe": 0.3, "step": 0.05, "save": 0.02, "saved": 0.003, "epoch": 0.03, "growth": 0.01, "any": 3.0}


def kill_once(setup: SmallSetup, folder: Path, overrides: tuple[str, ...], moment: str, chance: random.Random) -> bool:
    """Start or resume a run and kill it at a moment; False where it came to its end before."""
    saved = (folder / "recipe_state").exists() or any(folder.glob("step_*"))
    watch, count, delay = Watch(folder), chance.randint(1, 6), chance.uniform(0, DELAYS[moment])
    child = start(setup, folder, *overrides, *(["resume_from_checkpoint=True"] if saved else []))
    while not watch.is_at(moment, count):
        if (status := ended(child)) is not None:
            return _finished(status, folder)
        time.sleep(0.0002)
    deadline = time.perf_counter() + delay
    while time.perf_counter() < deadline:
        if (status := ended(child)) is not None:
            return _finished(status, folder)
        time.sleep(0.0002)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == -signal.SIGKILL or _finished(os.waitstatus_to_exitcode(status), folder)


def _finished(status: int, folder: Path) -> bool:
    if status:
        raise AssertionError(f"exit status {status}:\n{(folder / 'printed.txt').read_text()[-5000:]}")
    return False


def figures(folder: Path) -> dict[str, Any]:
    """Every figure of every step that counts, and of every validation, but those of time."""
    found: dict[str, Any] = {}
    for record in read_records(folder / "adaptive_batch" / "run.jsonl"):
        if record["kind"] in ("step", "validation"):
            name = f"{record['kind']} {record.get('step', record.get('steps'))}"
            found[name] = {key: value for key, value in record.items() if key not in FIGURES_OF_TIME}
    return found


def differences(folder: Path, whole: Path) -> list[str]:
    """What a run that was killed and resumed has otherwise than one that was not."""
    ours, theirs = figures(folder), figures(whole)
    found = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    last = sorted(path.name for path in whole.glob("epoch_*"))
    found += [name for name in last if not same_weights(weights(folder / name), weights(whole / name))]
    checked = audit(folder)
    return found + ([] if checked.holds else [f"audit: {problem}" for problem in checked.problems])


def experiment(
    setup: SmallSetup, way: str, *, kills: int, seed: int, say: Callable[[str], object] = lambda _: None
) -> dict[str, Any]:
    """Kill and resume runs of a way until there were so many kills, each run to its end."""
    chance = random.Random(seed)
    overrides = WAYS[way]
    whole = setup.fresh_folder()
    begin = time.perf_counter()
    child = start(setup, whole, *overrides)
    _, status = os.waitpid(child, 0)
    _finished(os.waitstatus_to_exitcode(status), whole)
    DELAYS["any"] = time.perf_counter() - begin
    by_moment: dict[str, int] = dict.fromkeys(MOMENTS, 0)
    differing: list[str] = []
    runs = 0
    while sum(by_moment.values()) < kills:
        folder, runs = setup.fresh_folder(), runs + 1
        while sum(by_moment.values()) < kills:
            moment = chance.choice(MOMENTS)
            if not kill_once(setup, folder, overrides, moment, chance):
                break
            by_moment[moment] += 1
            say(f"{way}: killed in {moment}, {sum(by_moment.values())} of {kills}")
        else:
            saved = (folder / "recipe_state").exists() or any(folder.glob("step_*"))
            child = start(setup, folder, *overrides, *(["resume_from_checkpoint=True"] if saved else []))
            _, status = os.waitpid(child, 0)
            _finished(os.waitstatus_to_exitcode(status), folder)
        differing += [f"run {runs}: {name}" for name in differences(folder, whole)]
    steps = sum(name.startswith("step") for name in figures(whole))
    return {
        "way": way,
        "kills": sum(by_moment.values()),
        "by_moment": by_moment,
        "runs": runs,
        "steps": steps,
        "differing": differing,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True, help="an empty one")
    arguments = parser.parse_args()
    setup = make_setup(arguments.folder)
    say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    print(json.dumps(experiment(setup, arguments.way, kills=arguments.kills, seed=arguments.seed, say=say)))


if __name__ == "__main__":
    main()
