"""The recipe on several ranks of this machine, started and started again as torchrun does, seconds
faster.

    attempts = launch(setup, 2, "batch_size=2", restarts=1)
    # How every rank ended and what it printed.
    attempts[-1].output, attempts[-1].exit_statuses

A server process imports everything once and forks each rank from there.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from support.cli import OURS, SmallSetup, losses, weights
from support.ranks import reserved_port

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["adaptive_full_finetune", "torchtune._cli.tune", "support.components", "support.launch"]
)

TIMEOUT = 150.0  # seconds of an attempt, after which what still runs is killed


@dataclass
class Attempt:
    """One start of all ranks.

    Attributes:
        exit_statuses: of the ranks; None for one that had to be killed as the time was over.
        outputs: what each printed, on both streams.
        output_dir: where it wrote.
        spread: seconds from the end of the first to that of the last.
    """

    exit_statuses: list[int | None]
    outputs: list[str]
    output_dir: Path
    spread: float

    @property
    def output(self) -> str:
        """What all printed."""
        return "\n".join(self.outputs)

    @property
    def losses(self) -> list[str]:
        """Of every step in the log of the run."""
        return losses(self.output_dir)

    def weights(self, epoch: int) -> dict[str, object]:
        """The tensors of a saved epoch."""
        return dict(weights(self.output_dir / f"epoch_{epoch}"))


def launch(
    setup: SmallSetup,
    world_size: int,
    *overrides: str,
    recipe: str = OURS,
    restarts: int = 0,
    environment: Callable[[int], dict[str, str]] = lambda rank: {},
    during: Callable[[list[int]], None] = lambda processes: None,
    before: str = "",
    ends_others_after: float = TIMEOUT,
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
        ends_others_after: seconds after a rank has failed at which the others are told to end, as
            torchrun tells them at once; by default never, as they are to end by themselves.
    """
    arguments, output_dir = setup._arguments(recipe, overrides, None)
    attempts: list[Attempt] = []
    launch_id = uuid.uuid4().hex
    while True:
        folder = setup.fresh_folder()
        with reserved_port() as port:
            common = {
                **setup._environment(),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RESTART_COUNT": str(len(attempts)),
                "TORCHELASTIC_RUN_ID": launch_id,
            }
            processes = []
            for rank in range(world_size):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **environment(rank)}
                printed = str(folder / f"{rank}.txt")
                args = (recipe, arguments[2:], {**common, **own}, printed, before)
                processes.append(_context.Process(target=_rank, args=args))
            for process in processes:
                process.start()
            during([process.pid or 0 for process in processes])
            spread = _wait(processes, ends_others_after)
        statuses = [process.exitcode for process in processes]
        for process in processes:
            if process.exitcode is None:
                process.kill()
            process.join()
        # A file is not there yet where a rank was killed at once.
        files = [folder / f"{rank}.txt" for rank in range(world_size)]
        outputs = [file.read_text(errors="replace") if file.exists() else "" for file in files]
        attempts.append(Attempt(statuses, outputs, output_dir, spread))
        if not any(statuses) or len(attempts) > restarts:
            return attempts


def _wait(processes: list[Any], ends_others_after: float) -> float:
    """Wait until all have ended or the time is over; return the seconds from the end of the first
    to that of the last.
    """
    begin, first, told = time.monotonic(), 0.0, False
    while any(process.is_alive() for process in processes) and time.monotonic() - begin < TIMEOUT:
        time.sleep(0.02)
        if not first and any(process.exitcode is not None for process in processes):
            first = time.monotonic()
        failed = any(process.exitcode for process in processes)
        if failed and not told and time.monotonic() - first > ends_others_after:
            told = True
            for process in processes:
                process.terminate()
    last = time.monotonic()
    return last - (first or last)


def _rank(
    recipe: str, arguments: list[str], environment: dict[str, str], printed: str, before: str
) -> None:
    """One rank: as ``python -m RECIPE ARGUMENTS`` under torchrun."""
    import torch

    with open(printed, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # Trials and retries collect garbage; what the server has imported need not be looked through.
    gc.freeze()
    own = environment.pop("OVERRIDES", "").split()
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = [recipe, *arguments, *own]
    if before:
        module, _, name = before.rpartition(".")
        getattr(import_module(module), name)()
    try:
        runpy.run_module(recipe, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        sys.stdout.flush()
        os._exit(int(ended.code or 0))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
