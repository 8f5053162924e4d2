"""What a run's results depend on, compared with the checkpoint that it resumes; each key has its policy in :mod:`.settings`."""

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
from .settings import FILLS_STEPS, RESUME

# What the checkpoint brings with it: another one has no effect, which is logged.
KEPT = "optimizer_settings"
_OWN_WORDS = ("_component_", "lr")  # of the optimizer, which have messages of their own
_SAMPLED_ROWS = 64


def run_conditions(parts: TrainingParts) -> dict[str, Any]:
    """Return what a run's results depend on besides its progress, as plain values."""
    cfg, settings = parts.cfg, parts.settings
    found: dict[str, Any] = {}
    for name, policy in RESUME.items():
        if policy == "refuse" or (policy != "free" and not hasattr(settings, name)):
            found[name] = _plain(cfg.get(name, None))
        elif policy != "free":
            found[name] = getattr(settings, name)
    found |= {"lr_clock": str(settings.lr_clock), "reference_batch_size": str(reference_batch(parts))}
    found |= {"shuffle": bool(cfg.shuffle), "dataset": _name_of_rows(parts), "rows": len(parts.dataset)}
    found[KEPT] = _plain(OmegaConf.masked_copy(cfg.optimizer, [key for key in cfg.optimizer if key not in _OWN_WORDS]))
    return found


def compare(
    saved: Mapping[str, Any], now: Mapping[str, Any], *, allowed: Sequence[str], in_mid_epoch: bool
) -> tuple[list[str], bool]:
    """Compare the settings of a run with those of the checkpoint that it resumes.

    Args:
        saved: what :func:`run_conditions` gave when it was saved; other keys are ignored.
        now: what it gives for this run.
        allowed: keys that may differ.
        in_mid_epoch: the run resumes within an epoch.

    Returns:
        The keys that differ, and whether the rows that are left of the epoch are not known any more.

    Raises:
        SettingError: a key differs that must not, unless it is allowed; or one is allowed that nothing compares.
    """
    refused = {name for name, policy in RESUME.items() if policy == "refuse"}
    moves_rows = {"dataset", *(name for name, policy in RESUME.items() if policy == "epoch")}
    for name in allowed:
        if name not in (known := refused | moves_rows | set(FILLS_STEPS)):
            raise SettingError("resume_allow_changes", list(allowed), f"{name} is none of {', '.join(sorted(known))}")
    if now["batch_tokens"]:
        moves_rows |= set(FILLS_STEPS)
    differs = [name for name in now if name in saved and saved[name] != now[name] and name != "rows"]
    if in_mid_epoch:
        refused |= moves_rows
    for name in differs:
        if name in refused and name not in allowed:
            after, before = _shown(name, now, saved), _shown(name, saved, now)
            remedy = (
                f"the checkpoint was trained with {before!r}; resume with that, or set resume_allow_changes=[{name}]"
            )
            raise SettingError(name, after, remedy)
    return differs, in_mid_epoch and any(name in moves_rows for name in differs)


def say_changes(differs: Sequence[str], saved: Mapping[str, Any], now: Mapping[str, Any], *, record: RunLog) -> None:
    """Log one line for each setting that differs from the checkpoint's."""
    for name in differs:
        before, after = _shown(name, saved, now), _shown(name, now, saved)
        if name == KEPT:
            message = f"optimizer {after} has no effect: the checkpoint's {before} is kept"
            record.decision("no_effect", message, key="optimizer", configured=now[name], kept=saved[name])
            continue
        message = f"{name} {before} -> {after}: not what the checkpoint was trained with"
        record.decision(name, message, before=saved[name], after=now[name])


def _shown(name: str, conditions: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
    """Return what differs between two blocks; a dataset is shown as its number of rows and the head of its fingerprint."""
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
    """Return a fingerprint of the rows of the dataset: how many, and some of them, wherever their files are."""
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
