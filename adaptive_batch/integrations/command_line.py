"""Trainer arguments of command lines and configuration files, and the launcher of unmodified
programs. Imports no torch.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from adaptive_batch._util import Option, one_of
from adaptive_batch.errors import AdaptiveBatchError
from adaptive_batch.inject.sitecustomize import environment_with


def _plain(default: Any, metavar: str, meaning: str, **checked: Option) -> Any:
    return field(default=default, metadata={"metavar": metavar, "help": meaning, **checked})


@dataclass(frozen=True)
class PlainArguments:
    """Numeric and text arguments; documented in :class:`.AdaptiveArguments`."""

    micro_batch_size: int | str | None = _plain(
        None, "N", "maximum rows of a micro-batch: a number, or auto to search for the largest"
    )
    micro_batch_tokens: int | str | None = _plain(
        None, "N", "maximum tokens of a micro-batch, padding included: a number or auto"
    )
    device_memory: int | float | str | None = _plain(
        None, "SIZE", "memory that the search may use, such as 12GiB"
    )
    headroom: float | str = _plain("auto", "SHARE", "share of that memory to leave free; 0.05")
    loss_reduction: str = _plain(
        "auto",
        "NAME",
        "mean weights the losses of micro-batches, sum adds them; or auto",
        option=Option(one_of("auto", "mean", "sum")),
    )


def add_options(parser: ArgumentParser) -> None:
    """Add an option for each plain argument."""
    for each in fields(PlainArguments):
        parser.add_argument(
            "--" + each.name.replace("_", "-"),
            type=_number_or_text,
            metavar=each.metadata["metavar"],
            help=each.metadata["help"],
        )


def given_options(options: Namespace) -> dict[str, Any]:
    """Return the plain arguments given on the command line, by name."""
    names = {each.name for each in fields(PlainArguments)}
    given = vars(options).items()
    return {name: value for name, value in given if name in names and value is not None}


def _number_or_text(text: str) -> int | float | str:
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def run_program(command: Sequence[str], arguments: Mapping[str, Any]) -> int:
    """Run a program that adopts each Transformers Trainer on ``train()``, also in its child
    processes, and return its exit status. Print a warning if it trained no adopted trainer.

    Args:
        command: program and its arguments.
        arguments: arguments of :class:`AdaptiveArguments`, as JSON values.

    Raises:
        SettingError: an argument is invalid.
        AdaptiveBatchError: the program cannot be started.
    """
    from .arguments import AdaptiveArguments

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
            if command[0].endswith(".py"):
                problem += f"; start it with python {command[0]}"
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
