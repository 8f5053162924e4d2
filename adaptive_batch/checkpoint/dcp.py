"""The tensors of a checkpoint in the files of torch.distributed.checkpoint, which divides them
among any number of ranks.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from adaptive_batch import distributed
from adaptive_batch.errors import CheckpointError

from .failures import reason

Result = TypeVar("Result")

METADATA = ".metadata"


class Ranks:
    """The ranks that save or load together: each learns what all returned, or that one failed, and
    none is left waiting.

    With several ranks, an error is raised on all of them as a CheckpointError, or a TypeError if it
    was one, which names the rank.

    Args:
        group: of all ranks, which no other thread uses meanwhile; None for one process alone, also
            where there are other ranks.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.rank: int = 0
        self.count: int = 1
        if group is not None:
            self.rank = group.rank()
            self.count = group.size()

    def each(self, act: Callable[[], Result]) -> list[Result]:
        """Act on every rank; return the results by rank, on every rank."""
        if self.count == 1:
            return [act()]
        return distributed.from_each_rank(lambda: self._named(act), self.group)

    def first(self, act: Callable[[], Result]) -> Result:
        """Act on rank zero alone; return its result on every rank."""
        if self.count == 1:
            return act()
        return distributed.from_rank_zero(lambda: self._named(act), self.group)

    def _named(self, act: Callable[[], Result]) -> Result:
        try:
            return act()
        except Exception as error:
            kind = TypeError if isinstance(error, TypeError) else CheckpointError
            raise kind(f"rank {self.rank}: {reason(error)}") from error


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> list[str]:
    """Write tensors into an empty folder and flush them to the disk; a collective.

    Args:
        folder: empty.
        tensors: plain ones, the same on each rank that has one of this name, and DTensors, of which
            each rank writes its part.
        ranks: that write together.

    Returns:
        The names of the files that this rank wrote, ``.metadata`` of rank zero not among them.

    Raises:
        RuntimeError: writing failed on one rank at least; raised on every rank.
    """
    _ignore_single_process_warnings()
    writer = _Writer(folder, overwrite=False)
    if all(tensor.device.type == "cpu" for tensor in tensors.values()):
        # Copying ahead makes a CUDA context on device 0, in another thread, also where no tensor is
        # on a device.
        writer.per_thread_copy_ahead = 0
    try:
        state_dict_saver.save(
            dict(tensors),
            storage_writer=writer,
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
    except CheckpointException as error:
        rank, (failed, _) = next(iter(error.failures.items()))
        message = reason(failed)
        if ranks.count > 1:
            message = f"rank {rank}: {message}"
        raise RuntimeError(message) from error
    return sorted(path.name for path in folder.glob(f"__{ranks.rank}_*"))


def read_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Read what :func:`write_tensors` wrote into tensors, by name; of a DTensor, this rank's part.
    Without communication.

    Nothing that a file names is run: tensors are read with ``weights_only=True``, and of
    ``.metadata``, which is a pickle, only the classes of torch.distributed.checkpoint are accepted.

    Raises:
        Exception: of many kinds; a file cannot be read, or is not what it should be.
    """
    _ignore_single_process_warnings()
    try:
        state_dict_loader.load(tensors, storage_reader=_Reader(folder), no_dist=True)
    except CheckpointException as error:
        # It is a BaseException, and no Exception.
        raise RuntimeError(reason(next(iter(error.failures.values()))[0])) from error


class _Writer(FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write; an error is replaced by one that can be pickled for other ranks."""
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise RuntimeError(reason(error)) from error


class _MetadataUnpickler(pickle.Unpickler):
    """Accepts the classes that ``.metadata`` is made of, and nothing else: a pickle may name
    anything to be run.
    """

    def find_class(self, module: str, name: str) -> Any:
        accepted = (module, name) in {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        }
        if accepted or module in (
            "torch",
            "torch.distributed.checkpoint.metadata",
            "pathlib",
            "pathlib._local",
        ):
            loaded = super().find_class(module, name)
            is_own_class = isinstance(loaded, type) and loaded.__module__ == module != "torch"
            if accepted or is_own_class or isinstance(loaded, torch.dtype):
                return loaded
        raise RuntimeError(f"{METADATA} names {module}.{name}, which does not belong there")


class _Reader(FileSystemReader):
    """Reads the metadata at once: torch before 2.13 tries to do without those that cannot be read,
    and does not say why they cannot.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with (folder / METADATA).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise RuntimeError(f"{METADATA} holds a {type(metadata).__qualname__}")
        self._metadata: Metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def _ignore_single_process_warnings() -> None:
    """torch.distributed.checkpoint warns whenever one process writes or reads alone, which is meant
    here.

    The filter stays: ``catch_warnings`` restores the filters of the whole process, which is not
    safe in a thread.
    """
    for action in ("save", "load"):
        message = (
            "torch.distributed is disabled, unavailable or uninitialized, assuming the intent is"
            f" to {action} in"
        )
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
