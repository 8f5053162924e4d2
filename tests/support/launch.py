"""Run a recipe on several ranks of this machine, started and restarted as torchrun does.

attempts = launch(setup, 2, "batch_size=2", restarts=1)
# How every rank ended and what it printed.
attempts[-1].output, attempts[-1].exit_statuses
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch.distributed as dist
from support.cli import OURS, Finished, SmallSetup
from support.processes import start_child, wait_for
from support.ranks import environment_of_rank

TIMEOUT = 150.0  # seconds after which the ranks of an attempt are killed
# Seconds from the end of a rank with an error to the others' SIGTERM and SIGKILL: torchrun sends
# the first at once, and here ranks that end by themselves keep their exit status.
TERMINATE_AFTER = 2.0
KILL_AFTER = 8.0


@dataclass(frozen=True)
class Attempt(Finished):
    """One start of all ranks.

    Attributes:
        exit_statuses: of the ranks; negative where a signal ended one.
        outputs: what each printed, on both streams; ``output`` has all of it.
        spread: seconds from the end of the first to that of the last.
    """

    exit_statuses: list[int]
    outputs: list[str]
    spread: float


def launch(
    setup: SmallSetup,
    world_size: int,
    *overrides: str,
    recipe: str = OURS,
    restarts: int = 0,
    environment: Callable[[int], dict[str, str]] = lambda rank: {},
    during: Callable[[list[int]], None] = lambda processes: None,
    before: str = "",
) -> list[Attempt]:
    """Run the recipe on ranks until it ends well or has been started again `restarts` times.

    Args:
        setup: data and configuration.
        world_size: ranks.
        overrides: key=value; a run without ``output_dir`` gets a fresh one.
        recipe: its module.
        restarts: how often all are started again after one has failed, as ``--max-restarts``.
        environment: of a rank, beside torchrun's; a value of ``key=value`` pairs given as
            ``OVERRIDES`` goes to that rank alone.
        during: called in each attempt with the process numbers of the ranks, as soon as they run.
        before: the dotted path of a function without arguments that each rank calls first.
    """
    arguments, output_dir = setup._arguments(recipe, overrides, None)
    attempts: list[Attempt] = []
    common = {**setup._environment(), "TORCHELASTIC_RUN_ID": uuid.uuid4().hex}
    common["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    while True:
        common["TORCHELASTIC_RESTART_COUNT"] = str(len(attempts))
        folder = setup.fresh_folder()
        files = [folder / f"{rank}.txt" for rank in range(world_size)]
        # The ranks' store, which torchrun hosts.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes = []
        for rank, file in enumerate(files):
            variables = {**common, **environment_of_rank(rank, world_size, store.port)}
            variables |= environment(rank)
            own = variables.pop("OVERRIDES", "").split()
            argv = [recipe, *arguments[2:], *own]
            processes.append(
                start_child(_rank, argv, before, environment=variables, streams=[file])
            )
        during([process.pid or 0 for process in processes])
        spread = _wait(processes)
        # A file is not there yet where a rank was killed at once.
        outputs = [file.read_text(errors="replace") if file.exists() else "" for file in files]
        statuses = [process.exitcode for process in processes]
        attempts.append(Attempt("\n".join(outputs), output_dir, statuses, outputs, spread))
        if not any(statuses) or len(attempts) > restarts:
            return attempts


def _wait(processes: list[Any]) -> float:
    """Wait until all have ended; return the seconds from the first end to the last."""
    ends: list[float] = []
    signals = [(TERMINATE_AFTER, signal.SIGTERM), (KILL_AFTER, signal.SIGKILL)]

    def note() -> None:
        statuses = [process.exitcode for process in processes]
        now = time.monotonic()
        ends.extend([now] * (len(statuses) - statuses.count(None) - len(ends)))
        if any(statuses) and signals and now - ends[0] > signals[0][0]:
            _, number = signals.pop(0)
            for process, status in zip(processes, statuses, strict=True):
                if status is None:
                    os.kill(process.pid, number)

    wait_for(processes, TIMEOUT, each=note)
    return time.monotonic() - ends[0] if ends else 0.0


def _rank(argv: list[str], before: str) -> None:
    """Run ``python -m RECIPE ARGUMENTS`` as torchrun does."""
    sys.argv = argv
    if before:
        module, _, name = before.rpartition(".")
        getattr(import_module(module), name)()
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
