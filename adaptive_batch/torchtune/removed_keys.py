"""Keys and functions of earlier releases, each with the sentence that names its replacement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaptive_batch.errors import SettingError

# Dotted key -> the fix, which follows "KEY=VALUE: this key was removed; ".
REMOVED: dict[str, str] = {
    "probe.tune": (
        "adaptive_estimate with estimate.changes=True estimates single changes of the settings, and"
        " docs/configuration.md#recommended-settings lists which settings to use"
    ),
}


def check_removed(config: Mapping[str, Any]) -> None:
    """Raise SettingError if a plain configuration has a removed key, whatever its value."""
    for key, remedy in REMOVED.items():
        *blocks, name = key.split(".")
        values: Any = config
        for block in blocks:
            values = values.get(block) if isinstance(values, Mapping) else None
        if isinstance(values, Mapping) and name in values:
            raise SettingError(key, values[name], f"this key was removed; {remedy}")
