"""Keys and functions of earlier releases, each with the sentence that names its replacement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaptive_batch.errors import SettingError

_CRITICAL_BATCH = (
    "log_gradient_noise_scale=True estimates the batch beyond which more rows improve a step"
    " little, and docs/accuracy.md#does-a-growing-batch-pay compares rules that grow the batch"
)

# Dotted key -> the fix, which follows "KEY=VALUE: this key was removed; ".
REMOVED: dict[str, str] = {
    "probe.critical_batch": _CRITICAL_BATCH,
    "probe.critical_batch_from": _CRITICAL_BATCH,
    "probe.critical_batch_rows": _CRITICAL_BATCH,
    "probe.critical_batch_tolerance": _CRITICAL_BATCH,
    "probe.tune": (
        "adaptive_estimate with estimate.changes=True estimates single changes of the settings, and"
        " docs/configuration.md#recommended-settings lists which settings to use"
    ),
}

# Dotted path of a function -> the fix, which follows "KEY=PATH: this function was removed; ".
REMOVED_FUNCTIONS: dict[str, str] = {
    "adaptive_batch.schedules.by_critical_batch": (
        "give the same batches to adaptive_batch.schedules.steps, as in {batch_sizes: [16, 24, 64],"
        " thresholds: [1e5tok, 1e6tok]}"
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
