"""The tasks that recipes have: which one a configuration is of, and which keys are whose."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from adaptive_batch.errors import SettingError

from .config_errors import component_of
from .distillation import Distillation
from .preference_pairs import PreferencePairs, takes_pairs
from .task import NextTokens, Task

_TASKS: tuple[type[Task], ...] = (NextTokens, PreferencePairs, Distillation)


def task_of(cfg: DictConfig, loss_fn: Any) -> type[Task]:
    """Return the task of a configuration: by its loss, and by a teacher where it has one."""
    if takes_pairs(loss_fn):
        return PreferencePairs
    if cfg.get("teacher_model") is not None:
        return Distillation
    return NextTokens


def check_keys_of_others(cfg: DictConfig, task: type[Task]) -> None:
    """Refuse keys that no task has but another than this.

    Raises:
        SettingError: names the first such key, and the recipe that it is of.
    """
    for owner in _TASKS:
        for key in owner.keys:
            value = cfg.get(key)
            if value is not None and key not in task.keys:
                raise SettingError(key, component_of(value), f"{owner.without_it}; remove it")
