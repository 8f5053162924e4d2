"""Start a function or a command line in one process, or on several ranks, and return how it ended.

    (ended,) = run(["tune", "run", "adaptive_full_finetune", "--config", "small.yaml"])
    first, second = run(function, argument, ranks=2)
    results = run_on_ranks(function, 2, argument)
    done = run_python("-m", "adaptive_batch", "check", EMULATE_DEVICE="H100")

Processes are forked off a server that has imported torch and torchtune, which saves seconds each.
:func:`run_python` starts a new interpreter, for variables that are read as Python starts.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.paths import subprocess_environment

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "torch.distributed.fsdp",
        "adaptive_full_finetune",
        "torchtune._cli.tune",
        "support.components",
    ]
)
# Seconds from the end of a rank with an error to the others' SIGTERM and SIGKILL: torchrun sends
# the first at once, and here ranks that end by themselves keep their exit status.
TERMINATE_AFTER, KILL_AFTER = 2.0, 8.0


@dataclass
class Ended:
    """The end of one process."""

    # Negative where a signal ended it; None where it was killed for its timeout.
    exit_status: int | None = None
    output: str = ""  # of both its streams
    result: Any = None
    error: str | None = None  # the traceback
    seconds: float = 0.0  # from the start of all processes


def run(
    target: Callable[..., Any] | Sequence[str],
    *arguments: Any,
    ranks: int | None = None,
    environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
    folder: Path | None = None,
    timeout: float = 150.0,
    joins_group: bool = False,
    terminates: bool = False,
    during: Callable[[list[int]], object] = lambda processes: None,
) -> list[Ended]:
    """Run processes to their end, or kill them.

    Args:
        target: a module's own function, or the words of a command: ``tune``, ``adaptive-batch`` or
            ``python FILE``.
        arguments: of the function.
        ranks: number of processes, with the variables that torchrun sets; None for a single one.
        environment: returns further variables of a rank.
        folder: current folder of a command.
        timeout: seconds until all are killed.
        joins_group: whether ranks join a process group of gloo first.
        terminates: whether an error of one rank ends the others soon.
        during: called with the process numbers as soon as all run.
    """
    function = target if callable(target) else _run_command
    given = arguments if callable(target) else (list(target), folder or Path.cwd())
    with tempfile.TemporaryDirectory() as notes:
        store = hosted_store() if ranks else None
        outputs = [Path(notes) / f"{rank}.txt" for rank in range(ranks or 1)]
        begin = time.monotonic()
        processes = []
        for rank, output in enumerate(outputs):
            variables = environment_of_rank(rank, ranks, store.port) if ranks and store else {}
            variables |= environment(rank)
            processes.append(_started(function, given, variables, output, joins_group))
        during([process.pid or 0 for process in processes])
        ended = [Ended() for _ in processes]
        _wait(processes, ended, begin, timeout, terminates)
        for one, output in zip(ended, outputs, strict=True):
            # A process that was killed at once has not made its file.
            one.output = output.read_text(errors="replace") if output.exists() else ""
            result = output.with_suffix(".pickle")
            if result.exists():
                one.result, one.error = pickle.loads(result.read_bytes())
        return ended


def run_on_ranks(
    function: Callable[..., Any], ranks: int, *arguments: Any, timeout: float = 120.0
) -> list[Any]:
    """Call `function(*arguments)` on each rank with a process group of gloo; return the results."""
    ended = run(function, *arguments, ranks=ranks, timeout=timeout, joins_group=True)
    for rank, one in enumerate(ended):
        assert one.exit_status == 0, (
            f"rank {rank} ended with {one.exit_status} after {one.seconds:.0f} s:"
            f"\n{one.error or one.output[-3000:]}"
        )
    return [one.result for one in ended]


def run_python(
    *words: object,
    folder: Path | None = None,
    expect: int | None = 0,
    timeout: float | None = 300.0,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS`` in a new interpreter.

    Args:
        words: arguments of Python.
        folder: the current one.
        expect: the exit status; None for any.
        timeout: seconds until it is killed.
        variables: of its environment.
    """
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=subprocess_environment(**{"OMP_NUM_THREADS": "1", **variables}),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert expect in (None, done.returncode), done.stdout[-2000:] + done.stderr[-4000:]
    return done


def run_torchrun(ranks: int, *words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program on ranks under torchrun, with an emulated NCCL that carries small messages."""
    launch = ("-m", "torch.distributed.run", "--nproc_per_node", ranks)
    return run_python(*launch, *words, **{"EMULATE_COPIED_BYTES": "65536", **options})


def start(function: Callable[..., Any], *arguments: Any, output: Path) -> Any:
    """Start a process that calls a module's own function and appends its output to a file."""
    return _started(function, arguments, {}, output, False)


def hosted_store() -> dist.TCPStore:
    """Return a store that this process hosts, as torchrun does."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def environment_of_rank(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets on one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _started(*child: Any) -> Any:
    process = FORKED.Process(target=_call, args=child)
    process.start()
    return process


def _call(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
    output: Path,
    joins_group: bool,
) -> None:
    """Run the function in a child; its exit status is that of a program."""
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    # Trials and retries collect garbage, and imported objects need not be traversed each time.
    gc.freeze()
    os.environ.update(environment)
    # Two workers of pytest share two cores.
    torch.set_num_threads(1)
    status, result, error = 0, None, None
    try:
        if joins_group:
            dist.init_process_group("gloo")
            # A rank that ends before another has connected to it makes that one fail.
            dist.barrier()
        result = function(*arguments)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        status, error = 1, traceback.format_exc()
        sys.excepthook(*sys.exc_info())
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    aside = output.with_suffix(".tmp")
    aside.write_bytes(pickle.dumps((result, error)))
    aside.rename(output.with_suffix(".pickle"))
    if "RANK" not in environment:
        sys.exit(status)
    if dist.is_initialized() and not status:
        dist.destroy_process_group()
    # A thread of gloo that releases a tensor while Python ends would abort the process.
    os._exit(status)


def _wait(
    processes: list[Any], ended: list[Ended], begin: float, timeout: float, terminates: bool
) -> None:
    """Wait until all have ended, and kill those that run for too long."""
    signals = [(TERMINATE_AFTER, signal.SIGTERM), (KILL_AFTER, signal.SIGKILL)] * terminates
    first_end: float | None = None
    while any(one.exit_status is None for one in ended):
        time.sleep(0.02)
        seconds = time.monotonic() - begin
        for one, process in zip(ended, processes, strict=True):
            if one.exit_status is None:
                one.exit_status, one.seconds = process.exitcode, seconds
                if one.exit_status is not None and first_end is None:
                    first_end = seconds
        has_failed = any(one.exit_status for one in ended)
        if has_failed and signals and first_end and seconds - first_end > signals[0][0]:
            _, number = signals.pop(0)
            for one, process in zip(ended, processes, strict=True):
                if one.exit_status is None:
                    os.kill(process.pid, number)
        if seconds > timeout:
            for process in processes:
                process.kill()
                process.join()
            return


def _run_command(words: list[str], folder: Path) -> None:
    os.chdir(folder)
    # The server's way to start processes is not the usual one.
    multiprocessing.set_start_method(None, force=True)
    program, *rest = words
    script = folder / rest[0] if program == "python" else Path(sys.executable).parent / program
    if program == "python" and rest[0] == "-m":
        sys.argv = rest[1:]
        sys.path.insert(0, str(folder))
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = rest if program == "python" else [str(script), *rest]
        sys.path.insert(0, str(script.parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
