"""Kill runs at random moments, resume them, and compare them with a run that was never killed;
benchmarks/kills.py does this.

Another process sends SIGKILL a random time after the files of a run show a chosen moment. The files
after the kill show the actual moment.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import adapters, distillation, preferences
from support.cli import OURS, SmallSetup, block, cosine_after
from support.processes import start
from support.trajectories import SCHEDULE, TOKENS, VALIDATION, run_differences

from adaptive_batch.report import read_records

COSINE = cosine_after(3)
DROPOUT = ("model.attn_dropout=0.2", "clip_grad_norm=0.5")
FOUR_MORE = "batch_increase_function=support.components.four_more"
ROWS = ("probe.device_memory=64MiB", "batch_size=2")
SAVES = ("epochs=3", "save_every_n_steps=3")
SMALL_STEPS = ("grow_beyond_maximum=True", "micro_batch_size=3")


@dataclass(frozen=True)
class Way:
    """Configuration of a run; `write_files` writes a second model and returns its overrides."""

    overrides: tuple[str, ...]
    recipe: str = OURS
    write_files: Callable[[SmallSetup], tuple[str, ...]] = lambda setup: ()


def write_pairs_and_reference(setup: SmallSetup) -> tuple[str, ...]:
    return (*preferences.write_pairs(setup), *preferences.reference_of(setup))


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
            *(*SAVES, *ROWS, *adapters.LORA, *adapters.KINDS["DoRA"], *DROPOUT, FOUR_MORE),
            "model.lora_dropout=0.1",
        ),
        adapters.OURS,
    ),
    "pairs": Way(
        (*SAVES, *ROWS, *preferences.PAIRS, "clip_grad_norm=0.5", FOUR_MORE),
        preferences.OURS,
        write_pairs_and_reference,
    ),
    "distillation": Way(
        (
            *(*SAVES, *ROWS, *distillation.LORA, *DROPOUT, *VALIDATION, FOUR_MORE, *SMALL_STEPS),
            "model.lora_dropout=0.1",
        ),
        distillation.OURS,
        distillation.write_teacher,
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
# Moments of a kill, and its maximum delay in seconds after the run's files show the moment.
MOMENTS = {
    "in the probe": 0.5,
    "among steps": 0.05,
    "in a save": 0.04,
    "after a rename": 0.003,
    "in an epoch's save": 0.02,
    "where the batch grows": 0.006,
    "elsewhere": 2.5,  # any moment after the start of the process
}
# Maximum seconds from a rename to a kill "after a rename"; file systems store times to 4 ms.
JUST_AFTER = 0.01
MOST_PER_RUN = 10
PAUSE = 0.0002


def signal_ranks(
    folder: Path,
    aim: str,
    ranks: Sequence[int],
    *,
    count: int = 1,
    number: signal.Signals = signal.SIGKILL,
) -> Callable[[list[int]], None]:
    """Return a function for ``during`` of a run. It sends ranks a signal at a moment of
    ``MOMENTS``; ``among steps`` is after `count` steps.
    """

    def send(processes: list[int]) -> None:
        watch = Watchdog(folder)
        while not watch.is_at(aim, count):
            if not all(Path(f"/proc/{process}").exists() for process in processes):
                return
            time.sleep(PAUSE)
        for rank in ranks:
            os.kill(processes[rank], number)

    return send


@dataclass(frozen=True)
class Run:
    """A run in a folder that is started repeatedly."""

    setup: SmallSetup
    recipe: str
    overrides: tuple[str, ...]
    folder: Path

    def start(self) -> Any:
        """Start the run, or resume it from its last save; return the process."""
        saved = any(self.folder.glob("step_*"))
        resumes = ("resume_from_checkpoint=True",) if saved else ()
        keys = (f"output_dir={self.folder}", *self.overrides, *resumes)
        output = self.folder / "printed.txt"
        return start(self.setup.run_in_process, self.recipe, *keys, output=output)

    def finish(self) -> None:
        """Train to the end."""
        process = self.start()
        process.join()
        self.check(process)

    def check(self, process: Any) -> None:
        """Raise AssertionError with the output of a failed process."""
        if process.exitcode:
            printed = (self.folder / "printed.txt").read_text()[-5000:]
            raise AssertionError(f"exit status {process.exitcode}:\n{printed}")

    def kill(self, aim: str, chance: random.Random, moments: tuple[str, ...]) -> str | None:
        """Start the run and kill it; return the actual moment, or None if the run ended before."""
        watch, count = Watchdog(self.folder), chance.randint(1, 6)
        delay, process = chance.uniform(0, MOMENTS[aim]), self.start()
        deadline = None
        while deadline is None or time.perf_counter() < deadline:
            if not process.is_alive():
                self.check(process)
                return None
            if deadline is None and watch.is_at(aim, count):
                deadline = time.perf_counter() + delay
            time.sleep(PAUSE)
        killed = time.time_ns()
        process.kill()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            self.check(process)
            return None
        return watch.was_at(killed, moments)


class Watchdog:
    """Reads the files of a run since its start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._record = folder / "adaptive_batch" / "run.jsonl"
        self._begin = self._record.stat().st_size if self._record.exists() else 0
        self._before = self._folders()

    def is_at(self, moment: str, count: int) -> bool:
        """Return whether the run has reached a moment; moments among steps count `count` steps."""
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

    def was_at(self, killed_ns: int, moments: tuple[str, ...]) -> str:
        """Return the moment at which a run was killed, from its files."""
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
        probe = self._folder / "adaptive_batch" / "probe.json"
        if "in the probe" in moments and "start" in kinds and not probe.exists():
            return "in the probe"
        if "where the batch grows" in moments and self._grows(kinds):
            return "where the batch grows"
        return "among steps" if "step" in kinds else "elsewhere"

    def _kinds(self) -> list[str]:
        """Return the kinds of the records since the start."""
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
        """Return the inode and the time of the last change or rename of each save's folder."""
        found = {}
        for name in os.listdir(self._folder):
            path = self._folder / name
            if name.startswith((".", "step_", "epoch_")):
                try:
                    # torchtune's checkpointer creates an empty folder.
                    if name != ".saving" or os.listdir(path):
                        found[name] = (path.stat().st_ino, path.stat().st_ctime_ns)
                except FileNotFoundError:
                    continue
        return found

    def _new(self) -> set[str]:
        return {name for name, at in self._folders().items() if self._before.get(name) != at}

    def _has_new(self, *prefixes: str) -> bool:
        return any(name.startswith(prefixes) for name in self._new())

    def _grows(self, kinds: list[str]) -> bool:
        """Return whether the batch grows after the last step or before the first resumed one."""
        if "step" in kinds:
            kinds = kinds[len(kinds) - kinds[::-1].index("step") :]
            return "batch_size" in kinds or "checkpoint" in kinds
        return bool(self._before) and "batch_size" in kinds

    def _saves_epoch(self, kinds: list[str]) -> bool:
        """Return whether an epoch is being saved or not recorded yet."""
        new = self._new()
        in_place = sum(name.startswith("epoch_") for name in new)
        return ".saving" in new or in_place > kinds.count("checkpoint")


def experiment(setup: SmallSetup, name: str, *, kills: int, seed: int) -> dict[str, Any]:
    """Kill and resume runs of a way `kills` times, and train each run to its end."""
    begin = time.perf_counter()
    way, chance = WAYS[name], random.Random(f"{name} {seed}")
    overrides = (*way.overrides, *way.write_files(setup))

    def new_run() -> Run:
        return Run(setup, way.recipe, overrides, setup.fresh_folder())

    whole = new_run()
    whole.finish()
    log = read_records(whole.folder / "adaptive_batch" / "run.jsonl")
    kinds = [record["kind"] for record in log]
    missing = {
        "in the probe": "bound" not in kinds,
        "where the batch grows": "batch_size" not in kinds,
    }
    moments = tuple(moment for moment in MOMENTS if not missing.get(moment))
    hits = dict.fromkeys(moments, 0)
    differing: list[str] = []
    runs = 0
    while sum(hits.values()) < kills:
        run, runs, in_run = new_run(), runs + 1, 0
        while sum(hits.values()) < kills and in_run < MOST_PER_RUN:
            is_known = (run.folder / "adaptive_batch" / "probe.json").exists()
            aims = [moment for moment in moments if not (is_known and moment == "in the probe")]
            least = min(hits[moment] for moment in aims)
            aim = chance.choice([moment for moment in aims if hits[moment] == least])
            hit = run.kill(aim, chance, moments)
            if hit is None:
                break
            hits[hit] += 1
            in_run += 1
        else:
            run.finish()
        found = run_differences(run.folder, whole.folder)
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
