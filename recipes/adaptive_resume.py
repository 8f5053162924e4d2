"""Where a run goes on: the newest whole checkpoint, of a step or an epoch, and whether it is of this run's settings."""

from __future__ import annotations

import json
import logging
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from adaptive_checkpoint import STATE_KEY, EpochCheckpoints
from adaptive_parts import TrainingParts
from adaptive_rate import reference_batch
from omegaconf import DictConfig, OmegaConf
from torchtune import training

from adaptive_batch.errors import CheckpointError, SettingError
from adaptive_batch.fingerprint import fingerprint
from adaptive_batch.report import RunRecord
from adaptive_batch.resume import ResumePoint, ResumePoints, newest_whole
from adaptive_batch.settings import Settings
from adaptive_batch.snapshot import RandomState

log = logging.getLogger("adaptive_batch")

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


class Checkpoints:
    """Epoch checkpoints and resume points of a run.

    Args:
        cfg: the configuration.
        settings: the same, checked.

    Attributes:
        recipe_state: what was saved; None unless resuming.
        passed_over: a line for each resume point that was newer and could not be used.
        on_failure: is told of a resume point that failed in the background while training went on; logs a warning unless set.

    Raises:
        CheckpointError: resuming, and nothing whole is there.
    """

    def __init__(self, cfg: DictConfig, settings: Settings) -> None:
        self._points = ResumePoints(
            Path(cfg.output_dir), keep_last=settings.keep_last_n_checkpoints, asynchronous=settings.saves_asynchronously
        )
        self.on_failure: Callable[[CheckpointError], object] = _warn
        self._point: ResumePoint | None = None
        self.passed_over: list[str] = []
        self.holds_earlier_run = False
        self.recipe_state: dict[str, Any] | None = None
        self.source = ""
        if not cfg.resume_from_checkpoint:
            folder = Path(cfg.output_dir)
            self.holds_earlier_run = (folder / "recipe_state").exists() or any(folder.glob("step_*/resume.json"))
            self._epochs = EpochCheckpoints(cfg.checkpointer, resume=False)
            return
        point, passed_over = newest_whole(Path(cfg.output_dir))
        self.passed_over = [passed.describe() for passed in passed_over]
        try:
            self._epochs = EpochCheckpoints(cfg.checkpointer, resume=True)
        except CheckpointError as error:
            has_epoch = (Path(cfg.checkpointer.output_dir) / "recipe_state").exists()
            if point is None:
                raise CheckpointError(self._nothing_whole(cfg.output_dir, str(error) if has_epoch else "")) from error
            if has_epoch:
                self.passed_over.append(str(error))
            self._epochs = EpochCheckpoints(cfg.checkpointer, resume=False)
        if point is None or self._is_newer(self._epochs, point):
            self.recipe_state = self._epochs.recipe_state
            self.source = self._epochs.source
            return
        if self._epochs.recipe_state is not None:
            self._epochs = EpochCheckpoints(cfg.checkpointer, resume=False)
        self._point = point
        self.recipe_state = point.load_small_state()
        self.source = str(point.path)

    @staticmethod
    def _is_newer(epochs: EpochCheckpoints, point: ResumePoint) -> bool:
        """Whether the last epoch was saved after the resume point; of one run, by its steps, whatever the clock said.

        Where an epoch was begun anew, steps were counted anew.
        """
        if epochs.recipe_state is None:
            return False
        ours, theirs = epochs.recipe_state.get(STATE_KEY, {}), point.load_small_state()[STATE_KEY]
        if ours.get("run") == theirs["run"]:
            steps, others = ((state["begun_anew"], state["progress"]["steps"]) for state in (ours, theirs))
            return bool(steps >= others)
        return epochs.order > point.order

    def _nothing_whole(self, folder: str, epoch: str) -> str:
        """Why there is nothing to go on from; `epoch` is what is wrong with the last epoch, if there is one."""
        reasons = [*filter(None, [epoch]), *self.passed_over]
        if len(reasons) == 1 and epoch:
            return epoch
        if reasons:
            return "\n".join(
                [
                    f"{folder} holds nothing whole to go on from; restore one of these, or give another output_dir:",
                    *reasons,
                ]
            )
        if any(Path(folder).glob("epoch_*")):
            return (
                f"{folder} holds the weights of a run that is done, and nothing to go on from: the last epoch is saved without "
                "its recipe_state; train on from its weights with another output_dir and resume_from_checkpoint=False"
            )
        return (
            f"{folder} holds nothing to go on from: no resume point (step_N), and no recipe_state of an epoch; check output_dir, "
            "or set resume_from_checkpoint=False to begin, as for a run that was ended before its first save"
        )

    def load_weights(self) -> Mapping[str, Any]:
        """The model's state dict, in torchtune's naming; the optimizer's comes into :attr:`recipe_state`."""
        weights: Mapping[str, Any] = self._epochs.load_weights()
        if self._point is None:
            return weights
        del weights  # of the base: torchtune's checkpointer learns from reading them how to save
        assert self.recipe_state is not None
        tensors, _ = self._point.load()
        self.recipe_state[training.OPT_KEY] = tensors["optimizer"]
        model: Mapping[str, Any] = tensors["model"]
        return model

    def save_epoch(self, model_state: Mapping[str, Any], *, recipe_state: Mapping[str, Any] | None, epoch: int) -> None:
        """Save an epoch, once a resume point that is being written is whole or has failed.

        Raises:
            CheckpointError: saving failed; what was saved before is untouched.
        """
        self._settle()
        self._epochs.save(model_state, recipe_state=recipe_state, epoch=epoch)

    def save_step(
        self, step: int, *, model_state: Mapping[str, Any], optimizer_state: Mapping[str, Any], state: Mapping[str, Any]
    ) -> float:
        """Save a resume point; returns the seconds that training stood still.

        Raises:
            CheckpointError: saving failed, unless it goes on in the background; what was saved before is untouched.
        """
        start = time.perf_counter()
        self._settle()
        self._points.save(step, {"model": model_state, "optimizer": optimizer_state}, dict(state))
        return time.perf_counter() - start

    def wait(self) -> None:
        """Wait for a resume point that is being written.

        Raises:
            CheckpointError: it failed.
        """
        self._points.wait()

    def close(self) -> None:
        """Wait, and take no more.

        Raises:
            CheckpointError: the last one failed.
        """
        self._points.close()

    def _settle(self) -> None:
        """Wait for a resume point that is being written in the background; that it failed is said, and no more."""
        try:
            self._points.wait()
        except CheckpointError as error:
            self.on_failure(error)


def _warn(error: CheckpointError) -> None:
    log.warning("training goes on without a resume point: %s", error)


def conditions(parts: TrainingParts) -> dict[str, Any]:
    """What a run's results depend on beside its progress, as plain values."""
    cfg, settings = parts.cfg, parts.settings
    found: dict[str, Any] = {name: _plain(cfg.get(name, None)) for name in (*RUN, *SAID) if name != "dataset"}
    found["lr_clock"] = str(settings.lr_clock)
    found |= {name: getattr(settings, name) for name in (*ROWS, *SAID) if hasattr(settings, name)}
    found |= {"shuffle": bool(cfg.shuffle), "reference_batch_size": str(reference_batch(settings))}
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


def say_changes(differs: Sequence[str], saved: Mapping[str, Any], now: Mapping[str, Any], *, record: RunRecord) -> None:
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
