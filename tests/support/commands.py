"""Runs command lines in processes of their own that have imported what takes long.

They are forked off a server, where ``tune`` or ``python`` as a person starts it imports torch and
torchtune anew: seconds of each command.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path

import torch

_forkserver = multiprocessing.get_context("forkserver")
_forkserver.set_forkserver_preload(
    ["torch.distributed.fsdp", "adaptive_full_finetune", "torchtune._cli.tune"]
)


def run_command(
    arguments: list[str],
    *,
    folder: Path,
    environment: dict[str, str],
    timeout: float,
    joins_streams: bool = False,
) -> tuple[int | None, str, str]:
    """Run ``tune ...``, ``adaptive-batch ...``, ``python FILE ...`` or ``python -m MODULE ...``
    in a folder; return its exit status, None where it had to be killed, and what it wrote to stdout
    and stderr: all of it as both where streams are joined, as on a terminal.
    """
    with tempfile.TemporaryDirectory() as written:
        stdout = Path(written) / "stdout"
        stderr = stdout if joins_streams else Path(written) / "stderr"
        process = _forkserver.Process(
            target=_run, args=(arguments, folder, environment, stdout, stderr)
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            return None, stdout.read_text(), stderr.read_text()
        return process.exitcode, stdout.read_text(), stderr.read_text()


def _run(
    arguments: list[str], folder: Path, environment: dict[str, str], stdout: Path, stderr: Path
) -> None:
    for path, stream in ((stdout, 1), (stderr, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(folder)
    os.environ.update(environment)
    # Trials and retries collect garbage; what the server has imported need not be looked through.
    gc.freeze()
    # As in a process of a person's: the server's way to begin processes is not the usual one.
    multiprocessing.set_start_method(None, force=True)
    # Two workers of pytest share two cores.
    torch.set_num_threads(1)
    program, *rest = arguments
    try:
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
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    for printed in (sys.stdout, sys.stderr):
        printed.flush()
    sys.exit(status)
