"""Axolotl plugin that runs each training step in micro-batches.

In the configuration::

    plugins:
      - adaptive_batch.integrations.axolotl.AdaptivePlugin
    adaptive_micro_batch_tokens: auto
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel
from transformers import Trainer

from .transformers import AdaptiveArguments, adopt


class AdaptiveConfig(BaseModel):
    """Keys of this plugin: arguments of :class:`.AdaptiveArguments` with a prefix."""

    adaptive_micro_batch_size: int | str | None = None
    adaptive_micro_batch_tokens: int | str | None = None
    adaptive_device_memory: int | float | str | None = None
    adaptive_headroom: float | str | None = None
    adaptive_loss_reduction: str | None = None


class AdaptivePlugin:
    """Adopts the trainer that Axolotl builds; all other plugin hooks do nothing."""

    def get_input_args(self) -> str:
        """Return the import path of the pydantic model of this plugin's keys."""
        return f"{__name__}.AdaptiveConfig"

    def get_adapter_capabilities(self) -> list[Any]:
        """Return no capabilities."""
        return []

    def post_trainer_create(self, cfg: Any, trainer: Trainer) -> None:
        """Adopt a trainer.

        Raises:
            SettingError: a value is invalid.
        """
        given = {
            key.removeprefix("adaptive_"): cfg[key]
            for key in AdaptiveConfig.model_fields
            if cfg.get(key) is not None
        }
        adopt(trainer, AdaptiveArguments(**given))

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments, **keywords: None
