"""Runs on several ranks of which some or all are killed at random moments and that are started
again as torchrun does.

Each is held against one on as many ranks that nothing happened to. The kills are genuine, aimed as
those of `killed_runs`.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import killed_runs
from support.cli import OURS, TUNE, SmallSetup
from support.killed_runs import DROPOUT, MOMENTS, SAVES, SCHEDULE, VALIDATION
from support.launch import Attempt, launch
from support.paths import subprocess_environment

from adaptive_batch.report import read_records

RANKS = 2
ENDS_WITHIN = 60.0  # seconds from a kill to the end of the last rank
COMMAND_ENDS_WITHIN = 400.0  # seconds, after which `tune run` is ended
TOLD_AFTER = 10.0  # seconds in which survivors are to end by themselves
MOST_RUNS = 4  # of a way, until it was killed at all moments
_PAUSE = 0.0005

# What is killed, each as the command line gives it.
WAYS: dict[str, tuple[str, ...]] = {
    "plain": (*SAVES, *DROPOUT, "batch_size=2"),
    "growth": (
        *SAVES,
        *DROPOUT,
        *SCHEDULE,
        "probe.device_memory=64MiB",
        "batch_size=1",
        "batch_increase_function=support.components.four_more",
    ),
    "schedule": (
        *SAVES,
        *DROPOUT,
        *SCHEDULE,
        *VALIDATION,
        "probe.device_memory=64MiB",
        "batch_size_schedule._component_=adaptive_batch.schedules.linear_ramp",
        "batch_size_schedule.start=2",
        "batch_size_schedule.end=8",
        "batch_size_schedule.over=2ep",
        "grow_beyond_maximum=True",
        "micro_batch_size=2",
        "keep_last_n_checkpoints=2",
        "lr_scaling=sqrt",
    ),
    "tokens, saved in the background": killed_runs.WAYS["tokens"],
}


@dataclass
class Kill:
    """One kill.

    Attributes:
        victims: ranks.
        aim: at which moment.
        hit: what the run was at.
        ended_after: seconds from it to the end of the last rank.
        said: the messages that the survivors gave.
    """

    victims: tuple[int, ...]
    aim: str
    hit: str = ""
    ended_after: float = 0.0
    said: list[str] = field(default_factory=list)

    @property
    def is_early(self) -> bool:
        """Before ranks may know of each other; then torchrun alone can end those that wait."""
        return self.hit in ("elsewhere", "before its first line")


@dataclass
class Killer:
    """Kills ranks of a run, once in each of its attempts until there were enough.

    Args:
        folder: the run's.
        chance: whom and when.
        whole: an undisturbed run of the same way.
        kills: how many.
        aims: at which moments, one after the other; by chance after the last.
    """

    folder: Path
    chance: random.Random
    whole: killed_runs.Whole
    kills: int
    aims: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    done: list[Kill] = field(default_factory=list)

    def __call__(self, processes: list[int]) -> None:
        """In an attempt: wait for the moment, and kill."""
        if len(self.done) >= self.kills:
            return
        aim, victims = self.aims.pop(0) if self.aims else self._by_chance()
        if aim == "in the probe" and (self.folder / "adaptive_batch" / "probe.json").exists():
            aim = "among steps"
        watch, count = killed_runs.Watchdog(self.folder), self.chance.randint(1, 5)
        until = None
        delay = self.chance.uniform(0, MOMENTS[aim])
        while until is None or time.perf_counter() < until:
            if until is None and watch.is_at(aim, count):
                until = time.perf_counter() + delay
            if not all(map(_lives, processes)):
                self.aims.append((aim, victims))
                return
            time.sleep(_PAUSE)
        killed = time.time_ns()
        for victim in victims:
            os.kill(processes[victim], signal.SIGKILL)
        has_probe, grows = (
            ("in the probe" in self.whole.moments),
            ("where the batch grows" in self.whole.moments),
        )
        hit = watch.was_at(killed, has_probe=has_probe, grows=grows)
        self.done.append(Kill(victims, aim, hit))

    def _by_chance(self) -> tuple[str, tuple[int, ...]]:
        return self.chance.choice(self.whole.moments), victims_by_chance(self.chance)


def victims_by_chance(chance: random.Random) -> tuple[int, ...]:
    """One rank three times of four, or all."""
    return chance.choice(
        [*((rank,) for rank in range(RANKS)), (chance.randrange(RANKS),), tuple(range(RANKS))]
    )


def undisturbed(setup: SmallSetup, overrides: tuple[str, ...]) -> killed_runs.Whole:
    """Train a way to its end."""
    (whole,) = launch(setup, RANKS, *overrides)
    if any(whole.exit_statuses):
        raise AssertionError(f"it ended with {whole.exit_statuses}:\n{whole.output[-5000:]}")
    kinds = [
        record["kind"] for record in read_records(whole.output_dir / "adaptive_batch" / "run.jsonl")
    ]
    missing = {
        "in the probe": "bound" not in kinds,
        "where the batch grows": "batch_size" not in kinds,
    }
    moments = tuple(moment for moment in MOMENTS if not missing.get(moment))
    return killed_runs.Whole(whole.output_dir, moments, kinds.count("step"))


def run_killed(setup: SmallSetup, overrides: tuple[str, ...], killer: Killer) -> list[str]:
    """Train a way while it is killed and started again; returns how it differs from the undisturbed
    run.
    """
    before = len(killer.done)
    attempts = launch(
        setup,
        RANKS,
        f"output_dir={killer.folder}",
        *overrides,
        restarts=killer.kills,
        during=killer,
        ends_others_after=TOLD_AFTER,
    )
    found = [] if attempts[-1].exit_statuses == [0] * RANKS else [_failed(attempts[-1])]
    for kill, attempt in zip(killer.done[before:], attempts, strict=False):
        kill.ended_after = attempt.spread
        kill.said = [said for rank, said in enumerate(attempt.outputs) if rank not in kill.victims]
        kill.said = [message for printed in kill.said for message in messages(printed)]
        found += problems_of(kill, attempt)
    return found or killed_runs.differences(killer.folder, killer.whole.folder)


def send_after(
    folder: Path, step: int, number: int, victims: tuple[int, ...]
) -> Callable[[list[int]], None]:
    """What sends a signal to ranks once the record of this start has so many steps."""

    def send(processes: list[int]) -> None:
        watch = killed_runs.Watchdog(folder)
        while not watch.is_at("among steps", step) and all(map(_lives, processes)):
            time.sleep(_PAUSE)
        for victim in victims:
            os.kill(processes[victim], number)

    return send


def problems_of(kill: Kill, attempt: Attempt) -> list[str]:
    """What a kill did that it must not."""
    found = []
    for rank, status in enumerate(attempt.exit_statuses):
        if rank in kill.victims and status != -signal.SIGKILL:
            found.append(f"{kill}: rank {rank} ended with {status}, which was killed")
        if rank not in kill.victims and status not in (
            (1, -signal.SIGTERM) if kill.is_early else (1,)
        ):
            found.append(
                f"{kill}: rank {rank} ended with {status}, not 1:\n{attempt.outputs[rank][-3000:]}"
            )
    if kill.ended_after > ENDS_WITHIN:
        found.append(f"{kill}: the last rank ended {kill.ended_after:.0f} s later")
    expected = len(kill.victims) < len(attempt.exit_statuses)
    if len(kill.said) != expected and not (kill.is_early and not kill.said):
        found.append(
            f"{kill}: {len(kill.said)} messages, not {expected:d}:\n{attempt.output[-3000:]}"
        )
    return found


def messages(printed: str) -> list[str]:
    """Why a rank has ended, as it said, and the first lines of tracebacks."""
    return re.findall(r"^(?:rank \d+:.*|Traceback.*)$", printed, flags=re.MULTILINE)


def _failed(attempt: Attempt) -> str:
    return f"it did not come to its end: {attempt.exit_statuses}\n{attempt.output[-5000:]}"


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- under torchrun itself


def ranks_of(folder: Path) -> dict[int, int]:
    """The processes that train in a folder: process numbers by rank."""
    found = {}
    for process, arguments, environment in _processes():
        rank = re.search(r"(?:^|\0)RANK=(\d+)", environment)
        if f"output_dir={folder}" in arguments and rank:
            found[int(rank[1])] = process
    return found


def left_of(folder: Path) -> list[int]:
    """Every process that was given a folder and is there."""
    return [
        process for process, arguments, _ in _processes() if f"output_dir={folder}" in arguments
    ]


def _processes() -> Iterator[tuple[int, str, str]]:
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            try:
                yield (
                    int(path.name),
                    (path / "cmdline").read_text(),
                    (path / "environ").read_text(errors="replace"),
                )
            except (OSError, UnicodeDecodeError):
                continue


@dataclass
class TuneRun:
    """A run that `tune run --nproc_per_node 2 --max-restarts N` has brought to its end.

    Attributes:
        returncode: of the command.
        output: what it printed.
        kills: in their order.
        left: processes that outlived it.
    """

    returncode: int
    output: str
    kills: list[Kill]
    left: list[int]


def tune_run(
    setup: SmallSetup,
    folder: Path,
    *overrides: str,
    restarts: int,
    act: Callable[[dict[int, int]], Kill | None],
) -> TuneRun:
    """Run the real command line.

    Args:
        setup: data and configuration.
        folder: where it writes.
        overrides: key=value.
        restarts: that torchrun may make.
        act: called once with the ranks of each attempt as soon as they are there; returns what it
            has killed.
    """
    command = [
        str(TUNE),
        "run",
        "--nproc_per_node",
        str(RANKS),
        "--max-restarts",
        str(restarts),
        OURS,
    ]
    # Each start prints its configuration, which is counted.
    command += ["--config", str(setup.config), f"output_dir={folder}", "verbose=True", *overrides]
    begin, kills, seen = time.monotonic(), [], set[int]()
    printed = setup.fresh_folder() / "printed.txt"
    with printed.open("w") as file:
        process = subprocess.Popen(
            command,
            env=subprocess_environment(**setup._environment()),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None and time.monotonic() - begin < COMMAND_ENDS_WITHIN:
                ranks = ranks_of(folder)
                if len(ranks) == RANKS and not seen & set(ranks.values()):
                    seen |= set(ranks.values())
                    if killed := act(ranks):
                        kills.append(killed)
                time.sleep(0.05)
        finally:
            process.terminate()  # torchrun passes it on
            process.wait()
    time.sleep(0.5)
    return TuneRun(process.returncode, printed.read_text(), kills, left_of(folder))


def facts(kill: Kill) -> dict[str, Any]:
    """Of a kill, for a record."""
    return {
        "victims": list(kill.victims),
        "aim": kill.aim,
        "hit": kill.hit,
        "ended_after": round(kill.ended_after, 2),
        "said": kill.said,
    }


# --- what is done to a run


def experiment(setup: SmallSetup, way: str, *, seed: int) -> dict[str, Any]:
    """Kill runs of a way once at each of its moments."""
    begin, chance = time.perf_counter(), random.Random(f"{way} {seed}")
    whole = undisturbed(setup, WAYS[way])
    aims = [(moment, victims_by_chance(chance)) for moment in whole.moments]
    done: list[Kill] = []
    differing: list[str] = []
    for _ in range(MOST_RUNS):
        if aims:
            killer = Killer(setup.fresh_folder(), chance, whole, len(aims), aims)
            differing += run_killed(setup, WAYS[way], killer)
            done += killer.done
    differing += [f"never killed {moment}" for moment, _ in aims]
    return _found(way, done, differing, begin)


def killed_after_it_was_resumed(
    setup: SmallSetup, whole: killed_runs.Whole, *, seed: int
) -> dict[str, Any]:
    """Have a run end at a step, go on with it, and kill that start before it has saved anything,
    and again among its steps.
    """
    begin, chance, folder = (
        time.perf_counter(),
        random.Random(f"resumed {seed}"),
        setup.fresh_folder(),
    )
    asks = (
        "metric_logger._component_=support.stops.AskingToEnd",
        "metric_logger.at_step=4",
        f"output_dir={folder}",
    )
    (ended,) = launch(setup, RANKS, *WAYS["plain"], *asks)
    aims = [("elsewhere", (0,)), ("among steps", (1,)), ("in an epoch's save", (0, 1))]
    killer = Killer(folder, chance, whole, len(aims), aims)
    differing = [] if ended.exit_statuses == [75] * RANKS else [_failed(ended)]
    differing += run_killed(setup, (*WAYS["plain"], "resume_from_checkpoint=True"), killer)
    return _found("started with resume_from_checkpoint", killer.done, differing, begin)


def killed_before_its_first_save(setup: SmallSetup, whole: killed_runs.Whole) -> dict[str, Any]:
    """Begin a run in a folder that holds an earlier one's points, and kill it as it starts, and
    again just before it saves.
    """
    begin, folder = time.perf_counter(), setup.fresh_folder()
    (earlier,) = launch(setup, RANKS, *WAYS["plain"], "epochs=1", "seed=8", f"output_dir={folder}")
    job = folder / "adaptive_batch" / "job.json"
    before = job.read_bytes(), (folder / "adaptive_batch" / "run.jsonl").stat().st_size
    done: list[Kill] = []

    def act(processes: list[int]) -> None:
        if len(done) == 2:
            return
        watch = killed_runs.Watchdog(folder)
        while done and not watch.is_at("among steps", 1):
            time.sleep(_PAUSE)
        for process in processes if done else processes[:1]:
            os.kill(process, signal.SIGKILL)
        unwritten = (
            job.read_bytes(),
            (folder / "adaptive_batch" / "run.jsonl").stat().st_size,
        ) == before
        hit = "before its first line" if unwritten else "before its first save"
        done.append(Kill(tuple(range(RANKS)) if done else (0,), "before its first save", hit))

    attempts = launch(
        setup,
        RANKS,
        *WAYS["plain"],
        f"output_dir={folder}",
        restarts=2,
        during=act,
        ends_others_after=1.0,
    )
    for kill, attempt in zip(done, attempts, strict=False):
        kill.ended_after = attempt.spread
    differing = [] if not any(earlier.exit_statuses) else [_failed(earlier)]
    differing += [_failed(attempts[-1])] if any(attempts[-1].exit_statuses) else []
    differing = differing or killed_runs.differences(folder, whole.folder)
    return _found("in the folder of an earlier run", done, differing, begin)


def killed_under_torchrun(
    setup: SmallSetup, whole: killed_runs.Whole, *, kills: int, seed: int
) -> dict[str, Any]:
    """The real command line with so many kills, and as many restarts left."""
    begin, chance, folder = (
        time.perf_counter(),
        random.Random(f"torchrun {seed}"),
        setup.fresh_folder(),
    )
    done: list[Kill] = []

    def act(ranks: dict[int, int]) -> Kill | None:
        if len(done) == kills:
            return None
        killer = Killer(folder, chance, whole, 1, [("among steps", (len(done) % RANKS,))])
        killer([ranks[rank] for rank in sorted(ranks)])
        done.extend(killer.done)
        return killer.done[0] if killer.done else None

    ended = tune_run(setup, folder, *WAYS["plain"], restarts=5, act=act)
    differing = (
        []
        if ended.returncode == 0
        else [f"exit status {ended.returncode}:\n{ended.output[-5000:]}"]
    )
    differing += [f"{len(ended.kills)} kills, not {kills}"] if len(ended.kills) != kills else []
    starts = ended.output.count("with resolved config:")
    differing += (
        [f"{starts} starts, not {kills + 1}:\n{ended.output[-5000:]}"]
        if starts != kills + 1
        else []
    )
    differing += [f"process {process} was left behind" for process in ended.left]
    said = messages(ended.output)
    for kill, message in zip(ended.kills, said, strict=False):
        kill.said = [message]
    differing += [f"{len(said)} messages for {kills} kills: {said}"] if len(said) > kills else []
    differing = differing or killed_runs.differences(folder, whole.folder)
    return _found("tune run --max-restarts 5", ended.kills, differing, begin)


def _found(way: str, kills: list[Kill], differing: list[str], begin: float) -> dict[str, Any]:
    return {
        "way": way,
        "kills": [facts(kill) for kill in kills],
        "differing": differing,
        "seconds": round(time.perf_counter() - begin, 1),
    }
