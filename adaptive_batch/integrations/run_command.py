"""``adaptive-batch run``: the launcher of an unmodified program, and the hook that it installs in
each Python process of this program.

The hook patches ``Trainer.train()`` to adopt the trainer. The processes load this file without the
package, which the program's environment may lack, so it imports the package where it needs it.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_TRAINER = "transformers.trainer"


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
    # Imported here, since every process of the program imports this module.
    import signal
    import subprocess
    import tempfile

    from adaptive_batch.errors import AdaptiveBatchError
    from adaptive_batch.inject.sitecustomize import environment_with

    from .arguments import AdaptiveArguments

    # Refuse bad arguments before the program starts.
    AdaptiveArguments(**arguments)
    with tempfile.TemporaryDirectory(prefix="adaptive_batch-") as folder:
        adopted = Path(folder, "adopted")
        try:
            program = subprocess.Popen(
                command,
                env={
                    **environment_with(Path(__file__)),
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


# --- in a process of the program


def install() -> None:
    """Install the hook in this process."""
    sys.meta_path.insert(0, TrainerFinder())


class TrainerFinder:
    """Patches ``Trainer.train`` at the end of the import of its module."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of Trainer's module with a patched loader; None for other modules."""
        if name != _TRAINER:
            return None
        specs = (
            finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self
        )
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            exec_module = spec.loader.exec_module

            def exec_and_patch(module: ModuleType) -> None:
                exec_module(module)
                module.Trainer.train = _adopting(module.Trainer.train)

            spec.loader.exec_module = exec_and_patch  # type: ignore[method-assign]
        return spec


def _adopting(train: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``train()`` that adopts the trainer first, and reports this to the launcher."""

    @functools.wraps(train)
    def adopt_and_train(trainer: Any, *arguments: Any, **keywords: Any) -> Any:
        _adopt(trainer)
        try:
            return train(trainer, *arguments, **keywords)
        finally:
            # The launcher warns if no process leaves this file. A trainer that overrides
            # training_step may never call AdaptiveTrainer's, and then has no adaptive_step. The
            # folder no longer exists if this process outlives the launcher.
            adopted = Path(os.environ["ADAPTIVE_BATCH_ADOPTED"])
            if getattr(trainer, "adaptive_step", None) is not None and adopted.parent.is_dir():
                adopted.touch()

    return adopt_and_train


def _adopt(trainer: Any) -> None:
    """Adopt a trainer with the arguments of the command line, unless it is adaptive already."""
    folder = str(Path(__file__).parents[2])
    if folder not in sys.path:
        # Appended: the program's own packages take precedence over this environment's.
        sys.path.append(folder)
    from adaptive_batch.integrations.transformers import AdaptiveArguments, AdaptiveTrainer, adopt

    if not isinstance(trainer, AdaptiveTrainer):
        given = json.loads(os.environ["ADAPTIVE_BATCH_ARGUMENTS"])
        log = logging.getLogger("adaptive_batch")
        if log.level == logging.NOTSET:
            log.setLevel(logging.INFO)
        if not log.hasHandlers():
            # The program configures no logging.
            log.addHandler(logging.StreamHandler())
        adopt(trainer, AdaptiveArguments(**given))
        if trainer.args.process_index == 0:
            chosen = ", ".join(f"{name}={value}" for name, value in given.items())
            how = f"run in micro-batches ({chosen})" if chosen else "split when out of memory"
            log.info("adopted %s: its steps %s", type(trainer).__name__, how)
