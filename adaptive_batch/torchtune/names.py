"""The names of keys: which are read, and which is probably meant by one that nothing reads."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from adaptive_batch.errors import SettingError

from .config_errors import component_of
from .keys import TORCHTUNE_KEYS, keys_of

_OF_OTHER_RECIPES = {
    "quantizer": (
        "weights are trained as they are here, with nothing quantized (QAT is torchtune's"
        " qat_distributed)"
    ),
    "policy_model": (
        "there is no reinforcement learning here (torchtune's ppo_full_finetune_single_device"
        " does it)"
    ),
}
# Similar enough to be a typo: lr_scale is taken for lr_scaling, compile_mode (0.74) not for
# compile.
_CLOSE = 0.77


def check_names(settings: type, config: Mapping[str, Any] | DictConfig) -> None:
    """Refuse the keys of another recipe, and those that nothing reads and that are close to one
    that is read.

    Args:
        settings: Dataclass of the top-level keys that are ours.
        config: Configuration as it was given, with its references.
    """
    for key, reason in _OF_OTHER_RECIPES.items():
        value = config.get(key)
        if value is not None:
            raise SettingError(
                key, component_of(value), f"{reason}; remove it, and every weight is trained"
            )
    for name in unread(settings, config):
        matches = difflib.get_close_matches(name, _known(settings), n=1, cutoff=_CLOSE)
        if matches:
            remedy = f"there is no such key; {matches[0]} is probably meant"
            raise SettingError(name, config[name], remedy)


def unread(settings: type, config: Mapping[str, Any] | DictConfig) -> list[str]:
    """Return the top-level keys that neither we nor torchtune read, and that no value refers to."""
    read = _known(settings) | _referred_to(str(config))
    return [str(name) for name in config if str(name) not in read]


def _known(settings: type) -> set[str]:
    return {*keys_of(settings), *TORCHTUNE_KEYS}


def _referred_to(text: str) -> set[str]:
    """Return the top-level names that the references in a configuration's text may mean."""
    names = set()
    for reference in re.findall(r"\$\{([^}]*)", text):
        words = re.findall(r"[\w-]+", reference)
        # ${model.embed_dim} means the model; of ${resolver:...} any word may be a name
        is_resolved = ":" in reference or "${" in reference
        names.update(words if is_resolved else words[:1])
    return names
