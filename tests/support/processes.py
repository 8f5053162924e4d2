"""Start a function or a command line in a child process that has imported torch and torchtune.

Children are forked off a server, which saves seconds of imports for each. Everything that starts a
process goes through :func:`start_child`: commands here, ranks in support.ranks, recipes on several
ranks in support.launch.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.context
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "torch.distributed.fsdp",
        "adaptive_full_finetune",
        "torchtune._cli.tune",
        "support.components",
    ]
)
SPAWNED = multiprocessing.get_context("spawn")


def start_child(
    function: Callable[..., object],
    *arguments: Any,
    environment: Mapping[str, str],
    streams: Sequence[Path] = (),
    context: multiprocessing.context.BaseContext = FORKED,
) -> Any:
    """Start a process that calls a module's own function; its exit status is that of a program.

    Args:
        function: function that is called.
        arguments: its arguments.
        environment: variables that are set first.
        streams: files that stdout and stderr are appended to; one for both.
        context: how the process starts.
    """
    child = (function, arguments, dict(environment), [str(path) for path in streams])
    process = context.Process(target=_run, args=child)
    process.start()
    return process


def wait_for(
    processes: Sequence[Any], seconds: float, each: Callable[[], object] = lambda: None
) -> None:
    """Wait until all processes have ended, and kill those that run longer.

    Args:
        processes: that are waited for.
        seconds: before they are killed.
        each: function that is called now and then, and once before any is killed.
    """
    deadline = time.monotonic() + seconds
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
        each()
    each()
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()


def _run(
    function: Callable[..., object],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
    streams: list[str],
) -> None:
    for stream, path in zip((1, 2), streams * 2, strict=False):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    # Trials and retries collect garbage, and imported objects need not be traversed each time.
    gc.freeze()
    os.environ.update(environment)
    # Two workers of pytest share two cores.
    torch.set_num_threads(1)
    status = 0
    try:
        function(*arguments)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if "RANK" in environment:
        # A thread of gloo that releases a tensor while Python ends would abort the process.
        os._exit(status)
    sys.exit(status)


def run_command(
    arguments: list[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    timeout: float,
    joins_streams: bool = False,
) -> tuple[int | None, str, str]:
    """Run ``tune ...``, ``adaptive-batch ...``, ``python FILE ...`` or ``python -m MODULE ...``
    in a folder.

    Returns:
        The exit status, None where the process was killed after `timeout` seconds; and what it
        wrote to stdout and stderr, all of it as both where streams are joined, as on a terminal.
    """
    with tempfile.TemporaryDirectory() as written:
        stdout = Path(written) / "stdout"
        stderr = stdout if joins_streams else Path(written) / "stderr"
        streams = [stdout, stderr]
        process = start_child(_command, arguments, folder, environment=environment, streams=streams)
        process.join(timeout)
        status = process.exitcode
        wait_for([process], 0)
        return status, stdout.read_text(), stderr.read_text()


def _command(arguments: list[str], folder: Path) -> None:
    os.chdir(folder)
    # The server's way to start processes is not the usual one.
    multiprocessing.set_start_method(None, force=True)
    program, *rest = arguments
    if program in ("tune", "adaptive-batch"):
        script = Path(sys.executable).parent / program
        sys.argv = [str(script), *rest]
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
    elif rest[0] == "-m":
        sys.argv = rest[1:]
        sys.path.insert(0, str(folder))
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = rest
        sys.path.insert(0, str((folder / rest[0]).parent))
        runpy.run_path(rest[0], run_name="__main__")
