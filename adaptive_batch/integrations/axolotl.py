"""Axolotl's trainers, whose steps run in parts that fit.

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

_PREFIX = "adaptive_"


class AdaptiveConfig(BaseModel):
    """Keys of a configuration; see :class:`AdaptiveArguments` for what they set."""

    adaptive_micro_batch_size: int | str | None = None
    adaptive_micro_batch_tokens: int | str | None = None
    adaptive_device_memory: int | float | str | None = None
    adaptive_headroom: float | str | None = None
    adaptive_loss_reduction: str | None = None


class AdaptivePlugin:
    """Adopts the trainer that Axolotl builds; every other hook of a plugin does nothing."""

    def get_input_args(self) -> str:
        """Return the model of this plugin's keys."""
        return f"{AdaptiveConfig.__module__}.{AdaptiveConfig.__qualname__}"

    def get_adapter_capabilities(self) -> list[Any]:
        """Return none."""
        return []

    def post_trainer_create(self, cfg: Any, trainer: Trainer) -> None:
        """Adopt a trainer.

        Raises:
            SettingError: a value cannot be used.
        """
        given = {name.removeprefix(_PREFIX): cfg.get(name) for name in AdaptiveConfig.model_fields}
        chosen = {name: value for name, value in given.items() if value is not None}
        adopt(trainer, AdaptiveArguments(**chosen))

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments, **keywords: None
