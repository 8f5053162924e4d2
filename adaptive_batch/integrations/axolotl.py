"""Axolotl plugin that runs each training step in micro-batches.

In the configuration::

    plugins:
      - adaptive_batch.integrations.axolotl.AdaptivePlugin
    adaptive_micro_batch_tokens: auto
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

from pydantic import create_model
from transformers import Trainer

from .command_line import PlainArguments
from .transformers import AdaptiveArguments, adopt

_PREFIX = "adaptive_"
_FIELDS: dict[str, Any] = {
    _PREFIX + name: (kind | None, None) for name, kind in get_type_hints(PlainArguments).items()
}
AdaptiveConfig = create_model("AdaptiveConfig", __module__=__name__, **_FIELDS)


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
        given = {key.removeprefix(_PREFIX): cfg[key] for key in _FIELDS if cfg.get(key) is not None}
        adopt(trainer, AdaptiveArguments(**given))

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments, **keywords: None
