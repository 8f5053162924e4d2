"""Launcher of unmodified programs that adopts each Transformers Trainer on ``train()``.

Trainers of child processes are adopted too.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adaptive_batch.errors import AdaptiveBatchError
from adaptive_batch.injection import environment_with

from .arguments import AdaptiveArguments


def run_program(command: Sequence[str], arguments: Mapping[str, Any]) -> int:
    """Run a program and return its exit status; print a warning if it trained no adopted trainer.

    Args:
        command: program and its arguments.
        arguments: arguments of :class:`AdaptiveArguments`, as JSON values.

    Raises:
        SettingError: an argument is invalid.
        AdaptiveBatchError: the program cannot be started.
    """
    # Refuse bad arguments before the program starts.
    AdaptiveArguments(**arguments)
    with tempfile.TemporaryDirectory(prefix="adaptive_batch-") as folder:
        adopted = Path(folder, "adopted")
        try:
            program = subprocess.Popen(
                command,
                env={
                    **environment_with(Path(__file__).with_name("hook.py")),
                    "ADAPTIVE_BATCH_ARGUMENTS": json.dumps(arguments),
                    "ADAPTIVE_BATCH_ADOPTED": str(adopted),
                },
            )
        except OSError as error:
            problem = f"{command[0]} cannot be started: {error.strerror}"
            raise AdaptiveBatchError(problem) from None
        # The terminal sends Ctrl-C to the program as well; a scheduler signals only this process.
        signal.signal(signal.SIGINT, lambda *_: None)
        for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), lambda number, _: program.send_signal(number))
        code = program.wait()
        if not adopted.exists():
            print(
                "adaptive-batch run: the program trained no Transformers Trainer in micro-batches;"
                " start it without -S, -I and -E and keep its PYTHONPATH, or use AdaptiveStep for"
                " other loops",
                file=sys.stderr,
            )
    return code if code >= 0 else 128 - code
