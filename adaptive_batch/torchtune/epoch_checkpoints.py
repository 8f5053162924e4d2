"""Epoch checkpoints through torchtune's checkpointers: complete or absent, and resumed from their own files.

torchtune's checkpointer writes into a temporary folder; when everything is there the folders are renamed into place. The recipe
state carries an identity that the weights' folder carries too, so weights of one epoch are never taken with the recipe
state of another.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from safetensors import safe_open
from torchtune import training

from adaptive_batch._util import atomic_write, move_into_place, sync_folder
from adaptive_batch.errors import CheckpointError
from adaptive_batch.memory import is_out_of_memory

from .config_errors import instantiate

log = logging.getLogger("adaptive_batch")

STATE_KEY = "adaptive_batch"
_IDENTITY = "adaptive_batch.json"
_RECIPE_STATE = Path("recipe_state") / "recipe_state.pt"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class SavedEpoch:
    """The last complete epoch.

    Attributes:
        state: what :meth:`EpochCheckpoints.save` was given, without the optimizer, and ``weights`` and ``preempted`` of the save.
        state_file: that it was read from.
        folder: of the weights.
    """

    state: dict[str, Any]
    state_file: Path
    folder: Path

    @property
    def order(self) -> int:
        """When it was saved, in nanoseconds; 0 for a recipe of torchtune's own."""
        return int(self.state.get(STATE_KEY, {}).get("weights", {}).get("order", 0))


def read_epoch(cfg: DictConfig) -> SavedEpoch:
    """Read the recipe state of the last epoch, and check that its weights are complete and of the same save.

    Args:
        cfg: the `checkpointer` block of the configuration.

    Raises:
        CheckpointError: a file is missing, truncated, or belongs to another epoch; it is named.
    """
    output_dir = Path(cfg.output_dir)
    path = output_dir / (cfg.get("recipe_checkpoint") or _RECIPE_STATE)
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise CheckpointError(f"checkpoint file {path} cannot be read ({error})") from error
    missing = [k for k in (training.EPOCHS_KEY, training.SEED_KEY, training.MAX_STEPS_KEY) if k not in state]
    if missing:
        raise CheckpointError(f"{path} holds no {', '.join(missing)}; it is not the state of a fine-tuning recipe")
    state.pop(training.OPT_KEY, None)
    identity = state.get(STATE_KEY, {}).get("weights")
    folder = output_dir / (identity["folder"] if identity else f"epoch_{state[training.EPOCHS_KEY] - 1}")
    files = cfg.get("checkpoint_files")
    for name in files if not isinstance(files, DictConfig) and files else ():
        typed = output_dir / str(name)
        if typed.exists() and typed.resolve().parent != folder.resolve():
            raise CheckpointError(
                f"checkpoint_files names {typed}, but the recipe state in {output_dir} was saved with {folder}; "
                "leave checkpoint_files as it was: resuming finds its own files"
            )
    if identity:
        state[STATE_KEY]["preempted"] = _check_weights(folder, identity["id"]).get("preempted", False)
    if not _weights_in(folder):
        raise CheckpointError(f"{folder} holds no weights; resume needs the folder as it was saved")
    return SavedEpoch(state, path, folder)


def _check_weights(folder: Path, identity: str) -> dict[str, Any]:
    """Return what was written down of the weights in a folder, if they are complete and of that save."""
    try:
        saved: dict[str, Any] = json.loads((folder / _IDENTITY).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / _IDENTITY} cannot be read ({error}); {folder} is incomplete") from error
    if saved["id"] != identity:
        raise CheckpointError(
            f"the weights in {folder} are of another save than the recipe state; restore the folder that was saved with it"
        )
    for name, size in saved["bytes"].items():
        found = (folder / name).stat().st_size if (folder / name).exists() else "no file"
        if found != size:
            raise CheckpointError(
                f"checkpoint file {folder / name} is incomplete: {size} bytes were saved, found {found}"
            )
    return saved


class EpochCheckpoints:
    """Loads the base model or the weights of an epoch; saves an epoch so that a kill leaves the last one complete.

    Args:
        cfg: the `checkpointer` block of the configuration.
        epoch: whose weights are loaded, instead of the configured `checkpoint_files`.
    """

    def __init__(self, cfg: DictConfig, epoch: SavedEpoch | None = None) -> None:
        self._output_dir = Path(cfg.output_dir)
        self._temporary = self._output_dir / ".saving"
        overrides: dict[str, Any] = {"output_dir": str(self._temporary), "should_load_recipe_state": False}
        if epoch:
            files = [path.resolve() for path in _weights_in(epoch.folder)]
            overrides["checkpoint_files"] = [str(path) for path in files]
            log.info("resuming from %s: %s", epoch.folder, ", ".join(path.name for path in files))
        self._checkpointer = instantiate("checkpointer", cfg, **overrides)
        with contextlib.suppress(OSError):
            self._temporary.rmdir()  # which torchtune's checkpointer makes

    def load_weights(self) -> dict[str, Any]:
        """Load the model's state dict, in torchtune's naming.

        Raises:
            CheckpointError: a file cannot be read; it is named.
        """
        try:
            state: dict[str, Any] = self._checkpointer.load_checkpoint()[training.MODEL_KEY]
        except Exception as error:
            for path in self._checkpointer._checkpoint_paths:
                if why := _unreadable(Path(path)):
                    raise CheckpointError(
                        f"checkpoint file {path} cannot be read ({why}); copy or download it again, or take another checkpoint"
                    ) from error
            raise
        return state

    def save(self, model_state: Mapping[str, Any], *, recipe_state: Mapping[str, Any] | None, epoch: int) -> None:
        """Save the weights as `epoch_{epoch}` and, unless training is done, the recipe state with them.

        Raises:
            CheckpointError: saving failed; what was saved before is untouched.
        """
        shutil.rmtree(self._temporary, ignore_errors=True)
        folder = f"epoch_{epoch}"
        identity = {"id": uuid.uuid4().hex, "folder": folder, "order": time.time_ns()}
        state = {training.MODEL_KEY: dict(model_state), **(recipe_state or {})}
        if recipe_state is not None:
            state[STATE_KEY] = {**state.get(STATE_KEY, {}), "weights": identity}
        try:
            self._checkpointer.save_checkpoint(state, epoch=epoch, intermediate_checkpoint=recipe_state is not None)
            saved = self._temporary / folder
            sizes = {path.name: path.stat().st_size for path in _weights_in(saved)}
            (saved / _IDENTITY).write_text(json.dumps({**identity, "bytes": sizes}, indent=2))
            _flush_to_disk(self._temporary)
        except Exception as error:
            shutil.rmtree(self._temporary, ignore_errors=True)
            remedy = "free memory" if is_out_of_memory(error) else "free disk space or correct the path"
            raise CheckpointError(
                f"saving {self._output_dir / folder} failed ({error}); what was saved before is untouched: "
                f"{remedy}, and resume with resume_from_checkpoint=True"
            ) from error

        def replace_recipe_state() -> None:  # once the weights that it names are there, and while those before are
            if (self._temporary / _RECIPE_STATE).exists():
                state_file = self._output_dir / _RECIPE_STATE
                state_file.parent.mkdir(parents=True, exist_ok=True)
                (self._temporary / _RECIPE_STATE).replace(state_file)
                sync_folder(state_file.parent)

        move_into_place(saved, self._output_dir / folder, then=replace_recipe_state)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def mark_preempted(self, epoch: int) -> None:
        """Mark a saved epoch: its run was asked to end while it was being saved."""
        path = self._output_dir / f"epoch_{epoch}" / _IDENTITY
        atomic_write(path, json.dumps({**json.loads(path.read_text()), "preempted": True}, indent=2))


def _weights_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix in _WEIGHTS)


def _unreadable(path: Path) -> str | None:
    """Why a file of weights cannot be read; None where it can."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                list(file.keys())
        else:
            torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _flush_to_disk(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        elif path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
