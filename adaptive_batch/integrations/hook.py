"""In each process of a program that ``adaptive-batch run`` has started: adopt a Trainer when its
``train()`` is called. Nothing is imported before the program imports Transformers' Trainer.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_TRAINER = "transformers.trainer"


def install() -> None:
    """Prepare this process."""
    sys.meta_path.insert(0, TrainerFinder())


class TrainerFinder(MetaPathFinder):
    """Finds the module of Trainer once, and changes Trainer when it has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the module as others find it; None of another module."""
        if name != _TRAINER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            exec_module = spec.loader.exec_module

            def exec_and_change(module: ModuleType) -> None:
                exec_module(module)
                module.Trainer.train = _adopting(module.Trainer.train)

            spec.loader.exec_module = exec_and_change  # type: ignore[method-assign]
        return spec


def _adopting(train: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train)
    def adopt_and_train(trainer: Any, *arguments: Any, **keywords: Any) -> Any:
        _adopt(trainer)
        try:
            return train(trainer, *arguments, **keywords)
        finally:
            # A trainer with a step of its own may never reach ours. The folder is gone where this
            # process has outlived the launcher.
            adopted = Path(os.environ["ADAPTIVE_BATCH_ADOPTED"])
            if getattr(trainer, "adaptive_step", None) is not None and adopted.parent.is_dir():
                adopted.touch()

    return adopt_and_train


def _adopt(trainer: Any) -> None:
    folder = str(Path(__file__).parents[2])
    if folder not in sys.path:
        # Appended, so that the program's own packages win over those installed beside this one.
        sys.path.append(folder)
    from adaptive_batch.integrations.transformers import AdaptiveArguments, AdaptiveTrainer, adopt

    given = json.loads(os.environ["ADAPTIVE_BATCH_ARGUMENTS"])
    if not isinstance(trainer, AdaptiveTrainer):
        log = logging.getLogger("adaptive_batch")
        if log.level == logging.NOTSET:
            log.setLevel(logging.INFO)
        if not log.hasHandlers():
            # The program shows no log of its own.
            log.addHandler(logging.StreamHandler())
        adopt(trainer, AdaptiveArguments(**given))
        if trainer.args.process_index == 0:
            chosen = ", ".join(f"{name}={value}" for name, value in given.items())
            how = f"in parts that fit ({chosen})" if chosen else "in parts if memory runs out"
            log.info("%s is adopted, and runs its steps %s", type(trainer).__name__, how)
