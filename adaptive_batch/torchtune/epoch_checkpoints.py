"""Epoch checkpoints through torchtune's checkpointers: complete or absent, and resumed from their
own files.

torchtune's checkpointer writes into a temporary folder; when everything is there the folders are
renamed into place. The recipe state carries an identity that the weights' folder carries too, so
weights of one epoch are never taken with the recipe state of another. A manifest in that folder has
the checksums of both.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torchtune import training

from adaptive_batch._util import atomic_write, move_into_place, sync_folder
from adaptive_batch.checkpoint import (
    SavedFile,
    SkippedCheckpoint,
    changed_content,
    changed_size,
    manifest_text,
    read_manifest,
    reason,
    remove_folder,
    saving,
)
from adaptive_batch.errors import CheckpointError, SettingError
from adaptive_batch.memory import is_out_of_memory, tensors_in

from .checks import check_output_dir
from .config_errors import instantiate, one_line

log = logging.getLogger("adaptive_batch")

STATE_KEY = "adaptive_batch"
# In the folder of an epoch, as torchtune names it.
ADAPTERS = "adapter_model.pt"
_MANIFEST = "adaptive_batch.json"
_RECIPE_STATE = Path("recipe_state") / "recipe_state.pt"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_EPOCH = "epoch_*"
_REPLACED = ".replaced-"
_OF_A_RECIPE = (training.EPOCHS_KEY, training.SEED_KEY, training.MAX_STEPS_KEY)


@dataclass(frozen=True)
class EpochManifest:
    """What was written down with the weights in a folder.

    Attributes:
        identity: identity of the save, which the recipe state has too: `id`, `folder` and `order`.
        weights: files of the weights, by name.
        recipe_state: file that was saved with them; None for weights alone.
        run: run that saved it; None for a save of an earlier version.
        ends_run: True for the last epoch of the run.
        preempted: True where the run was asked to end meanwhile.
    """

    identity: Mapping[str, Any]
    weights: Mapping[str, SavedFile]
    recipe_state: SavedFile | None
    run: str | None = None
    ends_run: bool = False
    preempted: bool = False

    @classmethod
    def read(cls, folder: Path) -> EpochManifest:
        """Raise an OSError or a ValueError where there is none."""
        content, weights = read_manifest((folder / _MANIFEST).read_text(errors="replace"))
        state = content.pop("recipe_state")
        facts = {
            name: content.pop(name) for name in ("run", "ends_run", "preempted") if name in content
        }
        return cls(content, weights, state and SavedFile(**state), **facts)

    def text(self) -> str:
        state = self.recipe_state and asdict(self.recipe_state)
        content = {
            **self.identity,
            "recipe_state": state,
            "run": self.run,
            "ends_run": self.ends_run,
            "preempted": self.preempted,
        }
        return manifest_text(content, self.weights)

    def files(self, state_file: Path) -> dict[str, SavedFile]:
        """Return all that resuming reads, by names in the folder of the weights, which may be a
        link.
        """
        assert self.recipe_state is not None
        return {**self.weights, str(state_file.absolute()): self.recipe_state}


@dataclass(frozen=True)
class SavedEpoch:
    """The last epoch that can be resumed from.

    Attributes:
        path: the folder of the weights.
        order: counted with resume points; 0 for a recipe of torchtune's own.
        weights: their files.
        state: what :meth:`EpochCheckpoints.save` was given, without the optimizer, and ``weights``
            and ``preempted`` of the save.
        state_file: that it was read from.
        files: with checksums, by names in the folder; none for a recipe of torchtune's own.
    """

    path: Path
    order: int
    weights: Sequence[Path]
    state: dict[str, Any]
    state_file: Path
    files: Mapping[str, SavedFile] = field(default_factory=dict)

    def load_small_state(self) -> dict[str, Any]:
        """Return the state, as a resume point does its own."""
        return self.state

    @property
    def step(self) -> int:
        """Optimizer steps so far; 0 for a recipe of torchtune's own."""
        return int(self.state.get(STATE_KEY, {}).get("progress", {}).get("steps", 0))


def manifests_in(output_dir: Path) -> Iterator[tuple[Path, EpochManifest]]:
    """Yield the folders of epochs whose manifests can be read, those too that a killed save has
    left aside.
    """
    for pattern in (_EPOCH, _REPLACED + _EPOCH):
        for folder in sorted(output_dir.glob(pattern)):
            with suppress(OSError, ValueError, KeyError, TypeError):
                yield folder, EpochManifest.read(folder)


def remove_epochs_of_others(output_dir: Path, run: str) -> None:
    """Remove the epochs that other runs of ours have saved in a folder."""
    state_file = output_dir / _RECIPE_STATE
    owner = None
    with suppress(Exception):
        state, _ = _read_state(state_file)
        owner = state.get(STATE_KEY, {}).get("run")
    # First, since without it no epoch is resumed from, wherever this is interrupted.
    if owner not in (None, run):
        state_file.unlink()
    for folder, manifest in list(manifests_in(output_dir)):
        if manifest.run != run:
            remove_folder(folder)


def inspect_epoch(cfg: DictConfig) -> SavedEpoch | SkippedCheckpoint | None:
    """Return the epoch that the recipe state belongs to; None where none was saved.

    Files are compared by their sizes, and not read.

    Args:
        cfg: the `checkpointer` block of the configuration.
    """
    output_dir = Path(cfg.output_dir)
    state_file = output_dir / (cfg.get("recipe_checkpoint") or _RECIPE_STATE)
    # A run that torchrun starts again may be configured with a file that it has replaced.
    if not state_file.exists():
        state_file = output_dir / _RECIPE_STATE
    with_state = [
        (folder, manifest) for folder, manifest in manifests_in(output_dir) if manifest.recipe_state
    ]
    if not with_state and not state_file.exists():
        return None
    try:
        state, identity = _read_state(state_file)
    except Exception as error:
        if not with_state:
            return SkippedCheckpoint(
                state_file, f"it cannot be read ({reason(error)})", is_ours=False
            )
        folder, manifest = max(with_state, key=lambda found: found[1].identity["order"])
        files = dict([manifest.files(state_file).popitem()])
        damage = changed_size(folder, files) or changed_content(folder, files) or reason(error)
        return SkippedCheckpoint(folder, damage, True, manifest.identity["order"])
    folder_name = f"epoch_{state[training.EPOCHS_KEY] - 1}"
    if identity:
        folder_name = identity["folder"]
    folder = output_dir / folder_name
    other_file = _file_of_another_epoch(cfg, folder)
    if other_file is not None:
        mismatch = (
            f"checkpoint_files names {other_file}, but {state_file} was saved with {folder.name};"
            " leave checkpoint_files as it was: resuming finds its own files"
        )
        return SkippedCheckpoint(folder, mismatch, False)
    if identity is None:
        return _of_torchtune(state, state_file, folder, dict(with_state).get(folder))
    # A killed save has left the replaced folder under another name.
    for place in (folder, folder.with_name(_REPLACED + folder.name)):
        for saved_folder, manifest in with_state:
            if saved_folder == place and manifest.identity["id"] == identity["id"]:
                state[STATE_KEY]["preempted"] = manifest.preempted
                return _of_ours(state, state_file, place, manifest)
    return SkippedCheckpoint(folder, _why_weights_are_others(folder), True, identity["order"])


def resumable_order(cfg: DictConfig) -> int:
    """Return the order of the epoch that can be resumed from; 0 where none can.

    Args:
        cfg: the `checkpointer` block of the configuration.
    """
    epoch = inspect_epoch(cfg)
    return epoch.order if isinstance(epoch, SavedEpoch) else 0


def _file_of_another_epoch(cfg: DictConfig, folder: Path) -> Path | None:
    """Return a configured file of weights that exists, and is not in the folder of the epoch."""
    names = cfg.get("checkpoint_files")
    # A block describes the base's files by a pattern.
    if not names or isinstance(names, DictConfig):
        return None
    for name in names:
        path = Path(cfg.output_dir) / str(name)
        if path.exists() and path.resolve().parent != folder.resolve():
            return path
    return None


def _why_weights_are_others(folder: Path) -> str:
    """Return why a folder of weights is not the one that was saved with the recipe state."""
    try:
        EpochManifest.read(folder)
    except OSError as error:
        return f"incomplete: {_MANIFEST} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError):
        return f"{_MANIFEST} is truncated or changed"
    return (
        "its weights are of another save than the recipe state; restore the folder that was saved"
        " with it"
    )


def _read_state(path: Path) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Return a recipe state without its optimizer, and the identity of its save.

    The identity is None for a recipe of torchtune's own.
    """
    state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    missing = [key for key in _OF_A_RECIPE if key not in state]
    if missing:
        raise ValueError(
            f"it holds no {', '.join(missing)}: it is not the state of a fine-tuning recipe"
        )
    state.pop(training.OPT_KEY, None)
    if STATE_KEY not in state:
        return state, None
    identity = state[STATE_KEY]["weights"]
    return state, {
        "id": str(identity["id"]),
        "folder": str(identity["folder"]),
        "order": int(identity["order"]),
    }


def _of_ours(
    state: dict[str, Any], state_file: Path, folder: Path, manifest: EpochManifest
) -> SavedEpoch | SkippedCheckpoint:
    files = manifest.files(state_file)
    order = manifest.identity["order"]
    damage = changed_size(folder, files)
    if damage:
        return SkippedCheckpoint(folder, damage, True, order)
    return SavedEpoch(
        folder, order, [folder / name for name in manifest.weights], state, state_file, files
    )


def _of_torchtune(
    state: dict[str, Any], state_file: Path, folder: Path, manifest: EpochManifest | None
) -> SavedEpoch | SkippedCheckpoint:
    """Return an epoch without checksums.

    It has them if it is one of ours, whose recipe state has lost its identity to damage.
    """
    if manifest:
        ours = _of_ours(state, state_file, folder, manifest)
        if isinstance(ours, SavedEpoch):
            return ours
    weights = _weights_in(folder)
    indexed: set[str] = set()
    for index in folder.glob("*.index.json"):
        with suppress(ValueError, KeyError, AttributeError):
            indexed |= set(json.loads(index.read_text())["weight_map"].values())
    missing = sorted(indexed - {path.name for path in weights})
    if missing:
        return SkippedCheckpoint(folder, f"{missing[0]} is missing", False, 0)
    if not weights:
        return SkippedCheckpoint(
            folder, "it holds no weights; resuming needs the folder as it was saved", False, 0
        )
    return SavedEpoch(folder, 0, weights, state, state_file)


class EpochCheckpoints:
    """Loads the base model or the weights of an epoch; saves an epoch so that a kill leaves the
    last one complete.

    Args:
        cfg: the `checkpointer` block of the configuration.
        epoch: whose weights are loaded, instead of the configured `checkpoint_files`.

    Raises:
        SettingError: the base checkpoint is not there.
    """

    def __init__(self, cfg: DictConfig, epoch: SavedEpoch | None = None) -> None:
        self._output_dir = Path(cfg.output_dir)
        self._model_type = cfg.get("model_type")
        self._temporary = self._output_dir / ".saving"
        overrides: dict[str, Any] = {
            "output_dir": str(self._temporary),
            "should_load_recipe_state": False,
        }
        if epoch:
            overrides["checkpoint_files"] = [str(path.resolve()) for path in epoch.weights]
        check_output_dir(self._output_dir, key="checkpointer.output_dir")
        self._base = Path(cfg.checkpoint_dir)
        if not self._base.is_dir():
            raise SettingError(
                "checkpointer.checkpoint_dir",
                str(self._base),
                "there is no such folder; see `tune download`",
            )
        try:
            self._checkpointer = instantiate("checkpointer", cfg, **overrides)
        except SettingError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError | ValueError):
                raise
            key = "checkpoint_files" if "No file with name" in str(cause) else "checkpoint_dir"
            remedy = f"{reason(cause).rstrip('.')}; give what `tune download` wrote"
            raise SettingError(f"checkpointer.{key}", cfg[key], remedy) from cause
        with suppress(OSError):
            # torchtune's checkpointer has made it.
            self._temporary.rmdir()

    def load_weights(self) -> dict[str, Any]:
        """Load the model's state dict, in torchtune's naming.

        Raises:
            CheckpointError: a file cannot be read; it is named.
        """
        try:
            state: dict[str, Any] = self._checkpointer.load_checkpoint()[training.MODEL_KEY]
        except Exception as error:
            for path in self._checkpointer._checkpoint_paths:
                damage = _unreadable(Path(path))
                if damage:
                    raise CheckpointError(
                        f"checkpoint file {path} cannot be read ({damage}); copy or download it"
                        " again, or take another checkpoint"
                    ) from error
            if is_out_of_memory(error):
                raise
            remedy = (
                f"the weights of checkpoint_dir cannot be read as such ({one_line(error)}); give"
                " the kind that they are of"
            )
            raise SettingError("checkpointer.model_type", str(self._model_type), remedy) from error
        return state

    def check_base(
        self, saved: Mapping[str, Mapping[str, int]] | None
    ) -> dict[str, dict[str, int]]:
        """Return size and checksum of each file that the weights are read from, by name, unless
        they differ from those that were saved.

        Raises:
            CheckpointError: they differ; the file is named.
        """
        paths = [Path(path) for path in self._checkpointer._checkpoint_paths]
        files = {path.name: asdict(SavedFile.of(path)) for path in paths}
        if saved is not None and saved != files:
            name = next(name for name in (*saved, *files) if saved.get(name) != files.get(name))
            remedy = "give the checkpoint_dir and checkpoint_files that it began with"
            verb = "is not" if name in files else "is not among checkpoint_files, but was"
            raise CheckpointError(
                f"{name} of {paths[0].parent} {verb} the base that the adapters were trained on;"
                f" {remedy}"
            )
        return files

    def save(
        self,
        content: Mapping[str, Any],
        *,
        recipe_state: Mapping[str, Any] | None,
        epoch: int,
        order: int,
        run: str,
        ends_run: bool,
        make_room: Callable[[int], object] = lambda num_bytes: None,
    ) -> None:
        """Save as `epoch_{epoch}`, and the recipe state beside it.

        Args:
            content: what torchtune's checkpointer saves by its keys: weights, or adapters, or both.
            recipe_state: None where the run will not go on from here.
            epoch: number of the epoch.
            order: place among the saves of the folder, counted with resume points.
            run: name of the run.
            ends_run: True for the last epoch of the run.
            make_room: function that is told the bytes of the save before it is written.

        Raises:
            CheckpointError: saving failed; what was saved before is untouched.
        """
        target = self._output_dir / f"epoch_{epoch}"
        identity = {"id": uuid.uuid4().hex, "folder": target.name, "order": order}
        state = {**content, **(recipe_state or {})}
        if recipe_state is not None:
            state[STATE_KEY] = {**state.get(STATE_KEY, {}), "weights": identity}
        num_bytes = sum(tensor.nbytes for tensor in tensors_in(state))
        saved = self._temporary / target.name
        new_state = self._temporary / _RECIPE_STATE

        # Called once the weights that it names are there, while the earlier ones still are.
        def replace_recipe_state() -> None:
            if recipe_state is not None:
                state_file = self._output_dir / _RECIPE_STATE
                state_file.parent.mkdir(parents=True, exist_ok=True)
                new_state.replace(state_file)
                sync_folder(state_file.parent)

        with saving(target, self._temporary, num_bytes=num_bytes):
            self._restore_replaced()
            make_room(num_bytes)
            alone = {} if training.MODEL_KEY in content else {"adapter_only": True}
            self._checkpointer.save_checkpoint(
                state, epoch=epoch, intermediate_checkpoint=recipe_state is not None, **alone
            )
            if training.ADAPTER_CONFIG in content:
                self._order_rows_for_peft(saved)
            weights = {path.name: SavedFile.of(path) for path in _weights_in(saved)}
            state_file = None
            if recipe_state is not None:
                state_file = SavedFile.of(new_state)
            manifest = EpochManifest(identity, weights, state_file, run, ends_run)
            (saved / _MANIFEST).write_text(manifest.text())
            _flush_to_disk(self._temporary)
            move_into_place(saved, target, then=replace_recipe_state)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _order_rows_for_peft(self, folder: Path) -> None:
        """Give rows of queries and keys the order that the base has in transformers.

        torchtune reorders ``lora_B`` for Qwen2, whose queries and keys it has in transformers'
        order, and never DoRA's magnitudes. Elsewhere it has the two halves of a head, which rotary
        embeddings pair, in turns.
        """
        for path in folder.glob("adapter_model.*"):
            if path.name == ADAPTERS:
                continue
            in_safetensors = path.suffix == ".safetensors"
            adapters = load_file(path) if in_safetensors else torch.load(path, weights_only=True)
            config = json.loads((self._base / "config.json").read_text())
            heads = {
                "q_proj": config["num_attention_heads"],
                "k_proj": config["num_key_value_heads"],
            }
            in_turns = self._checkpointer._model_type != training.ModelType.QWEN2
            kind = "lora_B"
            halves = (2, -1)
            if in_turns:
                kind = "lora_magnitude_vector"
                halves = (-1, 2)
            for name, rows in adapters.items():
                module = next((part for part in name.split(".") if part in heads), None)
                if module and kind in name:
                    in_halves = rows.unflatten(0, (heads[module], *halves)).transpose(1, 2)
                    adapters[name] = in_halves.reshape(rows.shape)
            if in_safetensors:
                save_file(adapters, path, metadata={"format": "pt"})
            else:
                torch.save(adapters, path)

    def _restore_replaced(self) -> None:
        """Put back the weights of the recipe state that is there, where a save was killed while it
        replaced both.
        """
        for replaced in self._output_dir.glob(_REPLACED + _EPOCH):
            try:
                _, identity = _read_state(self._output_dir / _RECIPE_STATE)
                is_needed = bool(identity) and EpochManifest.read(replaced).identity == identity
            except Exception:
                # Whichever of both is damaged, it is not resumed from.
                is_needed = False
            if is_needed:
                target = replaced.with_name(replaced.name.removeprefix(_REPLACED))
                shutil.rmtree(target, ignore_errors=True)
                replaced.rename(target)
            else:
                shutil.rmtree(replaced)

    def mark_preempted(self, epoch: int) -> None:
        """Mark a saved epoch: its run was asked to end while it was being saved."""
        folder = self._output_dir / f"epoch_{epoch}"
        atomic_write(folder / _MANIFEST, replace(EpochManifest.read(folder), preempted=True).text())


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
        return reason(error)
    return None


def _flush_to_disk(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        elif path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
