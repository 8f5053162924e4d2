"""Files of weights through torchtune's checkpointer: the base that a run begins with, and the
exports of its epochs.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from safetensors.torch import load_file, save_file
from torchtune import config, training

from adaptive_batch._util import check_choice, move_into_place, sync_folder
from adaptive_batch.checkpoint import SavedFile, clear_leftovers, saving
from adaptive_batch.errors import CheckpointError, SettingError
from adaptive_batch.memory import is_out_of_memory

from .checks import check_output_dir
from .configuration import one_line, refusing

# File in the folder of an epoch: the run that exported it, see :class:`Export`.
_MANIFEST = "adaptive_batch.json"


@dataclass(frozen=True)
class Export:
    """The weights of an epoch in the format of torchtune's checkpointer: the folder ``epoch_N``.

    Attributes:
        path: the folder.
        run: name of the run that saved it; None if unknown, as for torchtune's recipe.
        step: optimizer steps of the run until the export.
        order: order of the newest checkpoint before the export; 0 without one.
    """

    path: Path
    run: str | None = None
    step: int | None = None
    order: int = 0

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return int(self.path.name.removeprefix("epoch_"))


def exports_in(output_dir: Path) -> list[Export]:
    """Return the exports in a folder, by epoch."""
    exports = []
    for folder in output_dir.glob("epoch_*"):
        if folder.name.removeprefix("epoch_").isdigit():
            try:
                export = Export(folder, **json.loads((folder / _MANIFEST).read_text()))
            except (OSError, ValueError, TypeError):
                # Without a readable manifest, the run is unknown.
                export = Export(folder)
            exports.append(export)
    return sorted(exports, key=lambda export: export.epoch)


class ModelFiles:
    """Loads a model, and exports epochs; each export is complete or absent.

    Args:
        cfg: block of a checkpointer of torchtune.
        key: key of that block in the configuration.

    Raises:
        SettingError: the checkpointer cannot be built, for example without its files.
    """

    def __init__(self, cfg: DictConfig, *, key: str = "checkpointer") -> None:
        self._key = key
        self._cfg = cfg
        self._output_dir = check_output_dir(cfg.output_dir, key=f"{key}.output_dir")
        self._temporary = self._output_dir / ".saving"
        self._base_dir = Path(str(cfg.checkpoint_dir))
        if "model_type" in cfg:
            types = [*training.ModelType.__members__]
            check_choice(f"{key}.model_type", cfg.model_type, types)
        remedy = f"give what `tune download` wrote as {key}.checkpoint_dir"
        with refusing(key, cfg.get("_component_"), remedy):
            self._checkpointer = config.instantiate(
                cfg,
                checkpoint_dir=str(self._base_dir),
                output_dir=str(self._temporary),
                should_load_recipe_state=False,
            )
        # The checkpointer has made this folder, which a preview or a refused run must not leave.
        # Files that a killed export left in it stay until clean_up().
        with suppress(OSError):
            self._temporary.rmdir()

    def clean_up(self) -> None:
        """Remove the files of a killed export, and restore the export that it was replacing."""
        shutil.rmtree(self._temporary, ignore_errors=True)
        clear_leftovers(self._output_dir, "epoch")

    def load_weights(self) -> dict[str, Any]:
        """Load the state dict of the model, in torchtune's naming.

        Raises:
            SettingError: the files cannot be read.
        """
        try:
            state: dict[str, Any] = self._checkpointer.load_checkpoint()[training.MODEL_KEY]
        except Exception as error:
            if is_out_of_memory(error):
                raise
            model_type = self._cfg.get("model_type", "this model")
            remedy = (
                f"its files cannot be read as weights of {model_type} ({one_line(error)}); give the"
                f" {self._key}.model_type that they are of, or copy or download them again"
            )
            base_dir = str(self._base_dir)
            raise SettingError(f"{self._key}.checkpoint_dir", base_dir, remedy) from error
        return state

    def check_base(
        self, saved: Mapping[str, Mapping[str, int]] | None
    ) -> dict[str, dict[str, int]]:
        """Return size and checksum of each file that the weights are read from, by name.

        Args:
            saved: what this method returned for the base of the saved adapters; None without.

        Raises:
            CheckpointError: the files differ from those that were saved.
        """
        paths = [Path(path) for path in self._checkpointer._checkpoint_paths]
        files = {path.name: asdict(SavedFile.of(path)) for path in paths}
        if saved is not None and saved != files:
            raise CheckpointError(
                f"the weights in {self._base_dir} are not the base that the adapters were trained"
                " on; give the checkpoint_dir and checkpoint_files that the run began with"
            )
        return files

    def export(
        self,
        content: Mapping[str, Any],
        *,
        epoch: int,
        run: str,
        step: int,
        order: int,
    ) -> None:
        """Save the weights of an epoch as ``epoch_{epoch}``.

        Args:
            content: weights, adapters or both, by the keys of torchtune's checkpointer.
            epoch: number of the epoch.
            run, step, order: as in :class:`Export`.

        Raises:
            CheckpointError: saving failed; earlier saves are unchanged.
        """
        target = self._output_dir / f"epoch_{epoch}"
        # Write into a temporary folder, so that a kill leaves no partial export under its name.
        written = self._temporary / target.name
        with saving(target, self._temporary):
            options = {} if training.MODEL_KEY in content else {"adapter_only": True}
            self._checkpointer.save_checkpoint(dict(content), epoch=epoch, **options)
            if training.ADAPTER_CONFIG in content:
                self._order_rows_for_peft(written)
            manifest = {"run": run, "step": step, "order": order}
            (written / _MANIFEST).write_text(json.dumps(manifest))
            _flush_to_disk(written)
            move_into_place(written, target)

    def _order_rows_for_peft(self, folder: Path) -> None:
        """Undo or complete torchtune's reordering of the output rows of queries and keys, so that
        adapters have the order of the base in transformers.

        Rotary embeddings pair each row of the first half of a head with a row of the second half.
        transformers stores the halves one after the other; torchtune stores pairs next to each
        other, except for Qwen2. In its files for PEFT, torchtune reorders every ``lora_B`` from
        pairs to halves, which is wrong for Qwen2, and never DoRA's magnitudes, which is wrong for
        all other models.
        """
        for path in folder.glob("adapter_model.*"):
            # PEFT does not read the .pt file, which keeps torchtune's order.
            if path.suffix == ".pt":
                continue
            in_safetensors = path.suffix == ".safetensors"
            adapters = load_file(path) if in_safetensors else torch.load(path, weights_only=True)
            config = json.loads((self._base_dir / "config.json").read_text())
            heads = {
                "q_proj": config["num_attention_heads"],
                "k_proj": config["num_key_value_heads"],
            }
            if self._cfg.model_type == "QWEN2":
                # Undo torchtune's order: from halves back to pairs.
                reordered, dims_of_head = "lora_B", (2, -1)
            else:
                # From pairs to halves.
                reordered, dims_of_head = "lora_magnitude_vector", (-1, 2)
            for name, rows in adapters.items():
                module = next((part for part in name.split(".") if part in heads), None)
                if module and reordered in name:
                    # Swapping both dimensions of a head turns one order into the other.
                    swapped = rows.unflatten(0, (heads[module], *dims_of_head)).transpose(1, 2)
                    adapters[name] = swapped.reshape(rows.shape)
            if in_safetensors:
                save_file(adapters, path, metadata={"format": "pt"})
            else:
                torch.save(adapters, path)


def _flush_to_disk(folder: Path) -> None:
    """Flush all files and folders below a folder, so that a power failure cannot truncate them."""
    for path in (*folder.rglob("*"), folder):
        if path.is_dir():
            sync_folder(path)
        elif path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
