"""Run a function on several ranks, each a process of its own on gloo, as torchrun starts them."""

from __future__ import annotations

import multiprocessing.context
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support.processes import FORKED, SPAWNED, start_child, wait_for

__all__ = [
    "SPAWNED",
    "Ended",
    "end_of_ranks",
    "environment_of_rank",
    "reserved_port",
    "run_on_ranks",
]


@dataclass
class Ended:
    """The end of one rank.

    Attributes:
        result: what the function returned; None where it did not return.
        error: the text of its traceback; None where it returned.
        exit_status: of its process; negative where a signal ended it.
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
    gloo; return the results by rank.
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
    """Do the same where ranks may fail, hang or be killed; return how each ended, by rank.

    What ranks write to stderr goes to the server's; pass ``SPAWNED`` where a test reads it.
    """
    with tempfile.TemporaryDirectory() as folder, reserved_port() as port:
        begin = time.monotonic()
        processes = [
            start_child(
                _call,
                function,
                arguments,
                Path(folder) / f"{rank}.pickle",
                begins_group,
                environment=environment_of_rank(rank, world_size, port),
                context=context,
            )
            for rank in range(world_size)
        ]
        ended = [Ended() for _ in processes]

        def note_ends() -> None:
            for one, process in zip(ended, processes, strict=True):
                if one.exit_status is None and process.exitcode is not None:
                    one.exit_status = process.exitcode
                    one.seconds = time.monotonic() - begin

        wait_for(processes, timeout, each=note_ends)
        for one in ended:
            one.seconds = one.seconds or time.monotonic() - begin
        for rank, one in enumerate(ended):
            path = Path(folder) / f"{rank}.pickle"
            if path.exists():
                one.result, one.error = pickle.loads(path.read_bytes())
        return ended


@contextmanager
def reserved_port() -> Iterator[int]:
    """Return a port that a process of ours can listen on, and that the system gives to nobody else
    until the end.
    """
    with socket.socket() as held:
        # Bound and not listening: with this option on both, as torch's store sets it, another may
        # listen there by its number.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield int(held.getsockname()[1])


def environment_of_rank(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets on one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _call(
    function: Callable[..., Any], arguments: tuple[Any, ...], path: Path, begins_group: bool
) -> None:
    result, error = None, None
    try:
        if begins_group:
            dist.init_process_group("gloo")
            # A rank that ends before another has connected to it makes that one fail.
            dist.barrier()
        result = function(*arguments)
    except BaseException:
        error = traceback.format_exc()
    aside = path.with_suffix(".tmp")
    aside.write_bytes(pickle.dumps((result, error)))
    aside.rename(path)
    if error is not None:
        raise SystemExit(1)
    if dist.is_initialized():
        dist.destroy_process_group()
