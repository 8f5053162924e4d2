"""What a run's results depend on, held against those of the checkpoint that it goes on from."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from omegaconf import OmegaConf

from adaptive_batch._util import fingerprint
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import RandomState
from adaptive_batch.report import RunLog

from .parts import TrainingParts
from .rate import reference_batch

# What a run is: another one is refused, unless it is allowed by name.
RUN = ("dataset", "model", "batch_size_schedule", "batch_increase_function", "lr_scheduler", "lr_clock")
# Which rows come when: another one would lose or repeat rows of an epoch that has begun.
ROWS = (
    "shuffle",
    "batch_tokens",
    "sample_order",
    "sample_window",
    "min_rows_per_batch",
    "max_rows_per_batch",
    "long_rows",
)
# The same of steps that are filled by tokens.
ROWS_BY_TOKENS = ("uniform_micro_batches", "batch_size_schedule")
# Everything else that results depend on: another one is said.
SAID = (
    "gradient_accumulation_steps",
    "use_maximum_batch_size",
    "grow_beyond_maximum",
    "reference_batch_size",
    "dtype",
    "loss",
    "clip_grad_norm",
    "drop_last",
    "micro_batch_size",
    "micro_batch_tokens",
    "uniform_micro_batches",
    "pad_to_multiple_of",
    "enable_activation_checkpointing",
    "enable_activation_offloading",
    "compile",
)
# What the checkpoint brings with it: another one has no effect, which is said.
KEPT = "optimizer_settings"
_OWN_WORDS = ("_component_", "lr")  # of the optimizer, which are said in their own words
_SAMPLED_ROWS = 64


def conditions_of(parts: TrainingParts) -> dict[str, Any]:
    """What a run's results depend on beside its progress, as plain values."""
    cfg, settings = parts.cfg, parts.settings
    found: dict[str, Any] = {name: _plain(cfg.get(name, None)) for name in (*RUN, *SAID) if name != "dataset"}
    found["lr_clock"] = str(settings.lr_clock)
    found |= {name: getattr(settings, name) for name in (*ROWS, *SAID) if hasattr(settings, name)}
    found |= {"shuffle": bool(cfg.shuffle), "reference_batch_size": str(reference_batch(parts))}
    found[KEPT] = _plain(OmegaConf.masked_copy(cfg.optimizer, [key for key in cfg.optimizer if key not in _OWN_WORDS]))
    return {**found, "dataset": _name_of_rows(parts), "rows": len(parts.dataset)}


def compare(
    saved: Mapping[str, Any], now: Mapping[str, Any], *, allowed: Sequence[str], in_mid_epoch: bool
) -> tuple[list[str], bool]:
    """Hold the settings of a run against those of the checkpoint that it goes on from.

    Args:
        saved: what :func:`conditions` gave when it was saved; other keys are ignored.
        now: what it gives for this run.
        allowed: keys that may differ.
        in_mid_epoch: the run goes on within an epoch.

    Returns:
        The keys that differ, and whether the rows that are left of the epoch are not known any more.

    Raises:
        SettingError: a key differs that must not, unless it is allowed; or one is allowed that nothing compares.
    """
    known = (*RUN, *ROWS, *ROWS_BY_TOKENS)
    for name in allowed:
        if name not in known:
            options = ", ".join(dict.fromkeys(known))
            raise SettingError("resume_allow_changes", list(allowed), f"{name} is none of {options}")
    moves_rows = ("dataset", *ROWS, *(ROWS_BY_TOKENS if now["batch_tokens"] else ()))
    differs = [name for name in now if name in saved and saved[name] != now[name] and name != "rows"]
    refused = (*RUN, *moves_rows) if in_mid_epoch else RUN
    for name in differs:
        if name in refused and name not in allowed:
            after, before = _shown(name, now, saved), _shown(name, saved, now)
            remedy = (
                f"the checkpoint was trained with {before!r}; go on with that, or say resume_allow_changes=[{name}]"
            )
            raise SettingError(name, after, remedy)
    return differs, in_mid_epoch and any(name in moves_rows for name in differs)


def say_changes(differs: Sequence[str], saved: Mapping[str, Any], now: Mapping[str, Any], *, record: RunLog) -> None:
    """One line for each setting that differs from the checkpoint's."""
    for name in differs:
        before, after = _shown(name, saved, now), _shown(name, now, saved)
        if name == KEPT:
            message = f"optimizer {after} has no effect: the checkpoint's {before} goes on"
            record.decision("no_effect", message, key="optimizer", configured=now[name], kept=saved[name])
            continue
        message = f"{name} {before} -> {after}: not what the checkpoint was trained with"
        record.decision(name, message, before=saved[name], after=now[name])


def _shown(name: str, conditions: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
    """What is of one and not of the other; a dataset has no short name that says anything to people."""
    value, other = conditions[name], others[name]
    if name == "dataset":
        return f"{conditions['rows']} rows, {value[:8]}"
    if not (isinstance(value, str) and isinstance(other, str) and value.startswith("{") and other.startswith("{")):
        return value
    block, other_block = json.loads(value), json.loads(other)
    return {key: block[key] for key in block if key not in other_block or block[key] != other_block[key]}


def _plain(value: Any) -> Any:
    if not OmegaConf.is_config(value):
        return value
    return json.dumps(OmegaConf.to_container(value, resolve=True), sort_keys=True)


def _name_of_rows(parts: TrainingParts) -> str:
    """A short name for the rows of the dataset: how many, and some of them, wherever their files lie."""
    rows = len(parts.dataset)
    before = RandomState(parts.device)
    torch.manual_seed(0)  # rows that are augmented when they are read are read alike
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    numbers = sorted({round(i * (rows - 1) / max(1, _SAMPLED_ROWS - 1)) for i in range(min(rows, _SAMPLED_ROWS))})
    try:
        sampled = [_tokens(parts.dataset[number]) for number in numbers]
    finally:
        before.restore()
    return fingerprint("rows", rows, numbers, sampled)


def _tokens(row: Any) -> Any:
    tokens = row.get("tokens") if isinstance(row, Mapping) else None
    return tokens.tolist() if isinstance(tokens, torch.Tensor) else (None if tokens is None else list(tokens))
