"""Runs a function on several ranks, each a process of its own on gloo, as torchrun would start
them.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.context
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Ranks are forked off a server that has imported what takes long; a process has one, so it has the
# recipe too.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    ["torch.distributed.fsdp", "adaptive_full_finetune", "torchtune._cli.tune"]
)
SPAWNED = multiprocessing.get_context("spawn")


@dataclass
class Ended:
    """How one rank ended.

    Attributes:
        result: what the function returned; None where it did not return.
        error: the text of its traceback; None where it returned.
        exit_status: of its process; None where it had to be killed at the end of the time.
        seconds: from the start of all to its end.
    """

    result: Any = None
    error: str | None = None
    exit_status: int | None = None
    seconds: float = 0.0


def run_on_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 120.0
) -> list[Any]:
    """Call `function(*arguments)`, a module's own function, on each rank with a process group of
    gloo; their results by rank.
    """
    ended = end_of_ranks(function, world_size, *arguments, timeout=timeout)
    for rank, one in enumerate(ended):
        assert one.error is None, f"rank {rank}:\n{one.error}"
        assert one.exit_status == 0, (
            f"rank {rank} ended with {one.exit_status} after {one.seconds:.0f} s"
        )
    return [one.result for one in ended]


def end_of_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout: float = 120.0,
    begins_group: bool = True,
    context: multiprocessing.context.BaseContext = FORKED,
) -> list[Ended]:
    """The same where ranks may fail, hang or be killed: how each ended, by rank.

    What they write to stderr goes where the server's does; pass ``SPAWNED`` where a test reads it.
    """
    with tempfile.TemporaryDirectory() as folder, reserved_port() as port:
        begin = time.monotonic()
        processes = [
            context.Process(
                target=_run,
                args=(
                    function,
                    arguments,
                    rank,
                    world_size,
                    port,
                    folder,
                    begins_group,
                ),
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        ended = [Ended() for _ in processes]
        waiting = dict(enumerate(processes))
        while waiting and time.monotonic() - begin < timeout:
            for rank, process in list(waiting.items()):
                process.join(0.02)
                if process.exitcode is not None:
                    ended[rank].exit_status = process.exitcode
                    ended[rank].seconds = time.monotonic() - begin
                    del waiting[rank]
        for rank, process in waiting.items():
            process.kill()
            process.join()
            ended[rank].seconds = time.monotonic() - begin
        for rank, one in enumerate(ended):
            path = Path(folder) / f"{rank}.pickle"
            if path.exists():
                one.result, one.error = pickle.loads(path.read_bytes())
        return ended


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port on which a process of ours can listen, and that the system gives to nobody else until
    the end.
    """
    with socket.socket() as held:
        # Bound and not listening: with this option on both, as torch's store sets it, another may
        # listen there by its number.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield int(held.getsockname()[1])


def _run(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    begins_group: bool,
) -> None:
    # Trials and retries collect garbage; what the server has imported need not be looked through.
    gc.freeze()
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    result, error = None, None
    try:
        if begins_group:
            dist.init_process_group("gloo")
            # A rank that ends before another has connected to it makes that one fail.
            dist.barrier()
        result = function(*arguments)
    except BaseException:
        error = traceback.format_exc()
    aside = Path(folder) / f"{rank}.tmp"
    aside.write_bytes(pickle.dumps((result, error)))
    aside.rename(Path(folder) / f"{rank}.pickle")
    if error is None and dist.is_initialized():
        dist.destroy_process_group()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # As the ranks of launch end: a thread of gloo's that lets go of a tensor while Python ends
    # would abort the process.
    os._exit(0 if error is None else 1)
