"""The tensors of a resume point, in the files of torch.distributed.checkpoint, which divides them among any number of ranks."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from adaptive_batch.distributed import Agreement, portable

METADATA = ".metadata"


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], ranks: Agreement) -> list[str]:
    """Write tensors into a folder and flush them to the disk; a collective.

    Args:
        folder: empty.
        tensors: plain ones, the same on each rank that has one of this name, and DTensors, of which each rank writes its part.
        ranks: that write together.

    Returns:
        The names of the files that this rank wrote, ``.metadata`` of rank zero not among them.

    Raises:
        OSError, RuntimeError, CheckpointException: writing failed on one rank at least; raised on every rank.
    """
    _silence_single_process()
    writer = _Writer(folder, overwrite=False)
    if all(tensor.device.type == "cpu" for tensor in tensors.values()):
        # Copying ahead makes a CUDA context, in a thread of its own on device 0, also where nothing lies on a device.
        writer.per_thread_copy_ahead = 0
    state_dict_saver.save(
        dict(tensors),
        storage_writer=writer,
        process_group=ranks.process_group,
        no_dist=ranks.process_group is None,
    )
    return sorted(path.name for path in folder.glob(f"__{ranks.rank}_*"))


class SavedTensors:
    """What :func:`write_tensors` wrote.

    Nothing that a file could name is run: tensors are read with ``weights_only=True``, and of ``.metadata``, which is a pickle,
    only the classes of torch.distributed.checkpoint are accepted. Each rank reads for itself, without communication.

    Args:
        folder: with the files.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = _MetadataReader(folder)

    @cached_property
    def entries(self) -> Mapping[str, TensorStorageMetadata]:
        """Size and dtype of each tensor, by name.

        Raises:
            Exception: of many kinds; the file cannot be read, or is not what it should be.
        """
        entries = self._reader.read_metadata().state_dict_metadata
        if unfit := [name for name, entry in entries.items() if not isinstance(entry, TensorStorageMetadata)]:
            raise pickle.UnpicklingError(f"{unfit[0]} is no tensor")
        return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    def empty(self, name: str) -> torch.Tensor:
        """A tensor on the host that one can be read into, whole."""
        entry = self.entries[name]
        return torch.empty(entry.size, dtype=entry.properties.dtype)

    def read(self, tensors: dict[str, torch.Tensor]) -> None:
        """Read into tensors, by name; of a DTensor, this rank's part.

        Raises:
            Exception, CheckpointException: of many kinds, as for :attr:`entries`.
        """
        _silence_single_process()
        state_dict_loader.load(tensors, storage_reader=self._reader, no_dist=True)


class _Writer(FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """As it is; but what failed can be told to the other ranks."""
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise portable(error) from error


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes that ``.metadata`` is made of, and no other: a pickle may name anything to be run."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _METADATA_CLASSES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{METADATA} names {module}.{name}, which does not belong there")


_METADATA_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}


class _MetadataReader(FileSystemReader):
    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            with (Path(self.checkpoint_id) / METADATA).open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError(f"{METADATA} holds a {type(metadata).__qualname__}")
            self._metadata = metadata
        return self._metadata


def _silence_single_process() -> None:
    """torch.distributed.checkpoint warns whenever one process writes or reads alone, which is meant here.

    The filter stays: ``catch_warnings`` puts back the filters of the whole process, which is not safe in a thread.
    """
    for action in ("save", "load"):
        message = f"torch.distributed is disabled, unavailable or uninitialized, assuming the intent is to {action} in"
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
