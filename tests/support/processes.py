"""Run a function or a command line in new processes, and return exit status, output and result.

    (ended,) = run(["tune", "run", "adaptive_full_finetune", "--config", "small.yaml"])
    first, second = run(function, argument, ranks=2)
    results = run_on_ranks(function, 2, argument)
    done = run_python("-m", "adaptive_batch", "check", EMULATE_DEVICE="H100")

Processes are forked from a server that has imported torch and torchtune, which saves seconds.
:func:`run_python` starts a new interpreter, for variables that Python reads at its start.
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
# Seconds from a rank's error to the SIGTERM and SIGKILL of the other ranks. torchrun sends SIGTERM
# at once; a delay lets other ranks end by themselves, with their own exit status.
TERMINATE_AFTER, KILL_AFTER = 2.0, 8.0


@dataclass
class Ended:
    """Exit status, output and result of a process."""

    # Negative if a signal ended the process; None if it was killed after the timeout.
    exit_status: int | None = None
    output: str = ""  # stdout and stderr
    result: Any = None
    error: str | None = None  # traceback
    seconds: float = 0.0  # since the start of all processes


def run(
    target: Callable[..., Any] | Sequence[str],
    *arguments: Any,
    ranks: int | None = None,
    environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
    folder: Path | None = None,
    timeout: float = 150.0,
    joins_group: bool = False,
    terminates: bool = False,
) -> list[Ended]:
    """Run processes until they end or the timeout passes.

    Args:
        target: function of a module, or the words of a command: ``tune``, ``adaptive-batch`` or
            ``python FILE``.
        arguments: arguments of the function.
        ranks: number of processes with the variables of torchrun; None for one without them.
        environment: returns further variables of a rank.
        folder: working directory of a command.
        timeout: seconds until all processes are killed.
        joins_group: whether ranks join a gloo process group first.
        terminates: whether an error of one rank soon ends the other ranks.
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
        ended = [Ended() for _ in processes]
        _wait(processes, ended, begin, timeout, terminates)
        for one, output in zip(ended, outputs, strict=True):
            # A process that was killed early has no file.
            one.output = output.read_text(errors="replace") if output.exists() else ""
            result = output.with_suffix(".pickle")
            if result.exists():
                one.result, one.error = pickle.loads(result.read_bytes())
        return ended


def run_on_ranks(
    function: Callable[..., Any], ranks: int, *arguments: Any, timeout: float = 120.0
) -> list[Any]:
    """Call `function(*arguments)` on each rank of a gloo process group; return the results."""
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
        folder: working directory.
        expect: exit status; None for any.
        timeout: seconds until the process is killed.
        variables: further environment variables.
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
    """Run a program under torchrun, with an emulated NCCL that transfers small messages."""
    launch = ("-m", "torch.distributed.run", "--nproc_per_node", ranks)
    return run_python(*launch, *words, **{"EMULATE_COPIED_BYTES": "65536", **options})


def hosted_store() -> dist.TCPStore:
    """Return a store that this process hosts, as torchrun does for its ranks."""
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
    """Run the function in a child process, and exit with the status of a program."""
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    # Trials and retries collect garbage; frozen imported objects are not traversed.
    gc.freeze()
    os.environ.update(environment)
    # A forked child inherits the start method of the server.
    multiprocessing.set_start_method(None, force=True)
    # Two workers of pytest share two cores.
    torch.set_num_threads(1)
    status, result, error = 0, None, None
    try:
        if joins_group:
            dist.init_process_group("gloo")
            # If a rank ends before another rank has connected to it, the other rank fails.
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
    # A gloo thread that frees a tensor during the exit of Python, or of its process group, would
    # abort the process.
    os._exit(status)


def _wait(
    processes: list[Any], ended: list[Ended], begin: float, timeout: float, terminates: bool
) -> None:
    """Wait until all processes have ended; kill them after the timeout."""
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
