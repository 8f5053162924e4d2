"""One resume point: a folder with the files of torch.distributed.checkpoint, the small rest, and a manifest that vouches for all.

The manifest is written last and names every file with its size and checksum: ``.metadata`` is no proof that a checkpoint is
whole, as an old one may lie beside new data.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from adaptive_batch import __version__
from adaptive_batch.distributed import Agreement
from adaptive_batch.errors import CheckpointError

from .reading import read_into, read_optimizer, read_whole
from .saved_tensors import METADATA, SavedTensors, write_tensors
from .state_tree import unflatten

Result = TypeVar("Result")

MANIFEST, STATE = "resume.json", "state.pt"
FORMAT, FORMAT_VERSION = "adaptive_batch resume point", 1
_SEEN_SECONDS = 10.0  # in which a file that another node has written is to be seen
_CHUNK_BYTES = 4 * 2**20  # large enough that reading, not Python, takes the time


@dataclass(frozen=True)
class SavedFile:
    """What the manifest says of a file: its size, and its checksum of ``zlib.crc32``."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class PassedOver:
    """A folder that is no whole resume point.

    Attributes:
        path: the folder.
        reason: why it is not taken.
        is_ours: it was written as a resume point in a format that this version knows.
        order: as in :class:`ResumePoint`; None where it cannot be known.
    """

    path: Path
    reason: str
    is_ours: bool
    order: int | None = None

    def describe(self) -> str:
        """One line."""
        return f"{self.path} is passed over: {self.reason}"


@dataclass(frozen=True)
class ResumePoint:
    """A folder whose files are all there with the sizes that they were saved with.

    Attributes:
        path: the folder.
        step: optimizer steps when it was saved.
        order: grows with each save into one output directory, so that the largest is the newest.
        package_version: of adaptive_batch, when it was saved.
        world_size: ranks that wrote it.
        files: by name.
    """

    path: Path
    step: int
    order: int
    package_version: str
    world_size: int
    files: Mapping[str, SavedFile]

    @property
    def num_bytes(self) -> int:
        """Bytes of its files."""
        return sum(file.bytes for file in self.files.values())

    def damage(self) -> str | None:
        """Read every file, and say what differs from what was saved; None where nothing does.

        With several ranks one of them asks, and tells the others: the files are read once, not by every rank.
        """
        for name, saved in self.files.items():
            try:
                found = _crc32(self.path / name)
            except OSError as error:
                return f"{name} cannot be read ({error})"
            if found != saved.crc32:
                return f"{name} has another checksum (crc32 {found:08x}) than was saved ({saved.crc32:08x})"
        return None

    def load(self) -> tuple[Any, Any]:
        """What was saved, whole, on the CPU, by any number of ranks: the tree of tensors, and the small state.

        Nothing that a file could name is run: tensors and state are read with ``weights_only=True``, and of ``.metadata``, which is
        a pickle, only the classes of torch.distributed.checkpoint are accepted.

        Raises:
            CheckpointError: a file cannot be read; for tensor subclasses, their package (torchao) must have been imported. Or
                several ranks saved low-bit states, which are not to be had whole.
        """
        return self._read(lambda saved, state: (read_whole(saved, state), _small(state)), Agreement())

    def load_into(self, tree: Mapping[str, Any], *, process_group: Any = None) -> None:
        """Load into tensors that are there; each rank reads its own part of a DTensor, and no more. A collective.

        Args:
            tree: some entries of the tree that was saved, such as ``{"model": model.state_dict()}``; below these the keys are the
                same as when it was saved, and so are the shapes. Values that are no tensors are not looked at.
            process_group: whose ranks load together; None for one process.

        Raises:
            CheckpointError: a file cannot be read, or the trees differ; on every rank, if on one.
        """
        self._read(lambda saved, state: read_into(saved, state, tree), Agreement(process_group))

    def load_optimizer(
        self,
        optimizers: Iterable[Optimizer],
        names: Mapping[nn.Parameter, str],
        *,
        key: str = "optimizer",
        process_group: Any = None,
    ) -> dict[str, Any]:
        """The saved state of optimizers, sharded as their parameters are; each rank reads its own part. A collective.

        Args:
            optimizers: that it is for; they are not changed.
            names: of their parameters, as ``model.named_parameters()`` has them.
            key: of the state in the tree that was saved; it may have any form that :func:`.named_state.named_form` takes.
            process_group: whose ranks load together; None for one process.

        Returns:
            What :func:`.named_state.load_named_optimizer_state` takes.

        Raises:
            CheckpointError: a file cannot be read, the state belongs to other parameters, or it is of low-bit states and the ranks
                are not as many as saved it; on every rank, if on one.
        """
        ranks, optimizers = Agreement(process_group), list(optimizers)
        return self._read(lambda saved, state: read_optimizer(saved, state, key, optimizers, names, ranks), ranks)

    def _read(self, read: Callable[[SavedTensors, Any], Result], ranks: Agreement) -> Result:
        """Read tensors, each rank for itself, and fail alike."""
        results: list[Result] = []

        def part() -> None:
            results.append(read(SavedTensors(self.path), self._read_state()))

        try:
            ranks.gathered(part)
        except (Exception, CheckpointException) as error:
            if isinstance(error, CheckpointError) and str(self.path) in str(error):
                raise
            raise CheckpointError(f"resume point {self.path} cannot be read ({ranks.reason(error)})") from error
        return results[0]

    def load_small_state(self) -> Any:
        """The small state alone, without reading the tensors.

        Raises:
            CheckpointError: it cannot be read.
        """
        return _small(self._read_state())

    def _read_state(self) -> Any:
        try:
            return _read_small(self.path / STATE)
        except Exception as error:
            raise CheckpointError(f"checkpoint file {self.path / STATE} cannot be read ({_said(error)})") from error


def write_point(
    folder: Path, *, step: int, order: int, tensors: Mapping[str, torch.Tensor], state: Any, ranks: Agreement
) -> None:
    """Write a resume point into an empty folder, and flush it to the disk. A collective.

    Args:
        folder: where, of a file system that all ranks share; nothing else may be in it.
        step: optimizer steps so far.
        order: as in :class:`ResumePoint`.
        tensors: plain ones and DTensors, by name.
        state: ``skeleton`` and ``parts`` of the tensors; ``small_tensors`` and ``small_skeleton`` of the small state; that of rank zero.
        ranks: that write it together, rank zero what is not divided.

    Raises:
        OSError, RuntimeError, CheckpointException: writing failed on one rank at least; raised on every rank.
        CheckpointError: the state could not be read again with ``weights_only=True``, or rank zero does not see the files of
            another rank.
    """
    written = write_tensors(folder, tensors, ranks)
    files = [
        file
        for part in ranks.gathered(lambda: {name: _saved_file(folder / name) for name in written})
        for file in part.items()
    ]

    def vouch() -> None:
        with (folder / STATE).open("wb") as file:
            torch.save(state, file)
            _flush(file)
        try:
            _read_small(folder / STATE)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"the state could not be read again: {_said(error)}") from error
        ours = ((name, _saved_file(folder / name)) for name in (METADATA, STATE))
        point = ResumePoint(folder, step, order, __version__, ranks.num_ranks, dict(sorted([*files, *ours])))
        with (folder / MANIFEST).open("wb") as file:
            file.write(_manifest(point).encode())
            _flush(file)
        flush_folder(folder)
        until = time.monotonic() + _SEEN_SECONDS
        while isinstance(seen := examine(folder), PassedOver):
            if time.monotonic() > until:
                raise CheckpointError(
                    f"rank zero does not see all that was saved ({seen.reason}); output_dir must be of a file system that all "
                    "ranks share"
                )
            time.sleep(0.1)

    ranks.from_rank_zero(vouch)


def examine(folder: Path) -> ResumePoint | PassedOver:
    """Whether a folder is a resume point whose files have their sizes; :meth:`ResumePoint.damage` reads them."""
    has_dcp = (folder / METADATA).exists() and (folder / STATE).exists()
    try:
        text = (folder / MANIFEST).read_bytes().decode()
    except FileNotFoundError:
        if has_dcp:
            return PassedOver(folder, f"half written: it has no {MANIFEST}", is_ours=True)
        return PassedOver(folder, f"foreign: it has no {MANIFEST}", is_ours=False)
    except (OSError, ValueError) as error:
        return PassedOver(folder, f"{MANIFEST} cannot be read ({error})", is_ours=has_dcp)
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise ValueError("another format")
        version, order = int(content["format_version"]), int(content["order"])
    except (ValueError, KeyError, TypeError):
        ours = has_dcp or FORMAT in text
        return PassedOver(folder, f"{MANIFEST} is {'torn or changed' if ours else 'foreign'}", is_ours=ours)
    if version > FORMAT_VERSION:
        by = f"newer format {version}, written by adaptive_batch {content.get('package_version')}"
        return PassedOver(folder, f"{by}; this version reads up to {FORMAT_VERSION}: update it", False, order)
    try:
        files = {name: SavedFile(file["bytes"], file["crc32"]) for name, file in content["files"].items()}
        point = ResumePoint(folder, content["step"], order, content["package_version"], content["world_size"], files)
        is_unchanged = _manifest(point) == text
    except (KeyError, TypeError, AttributeError):
        is_unchanged = False
    if not is_unchanged:
        return PassedOver(folder, f"{MANIFEST} is torn or changed", is_ours=True)
    for name, saved in point.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            return PassedOver(folder, f"{name} is missing", True, order)
        if size != saved.bytes:
            return PassedOver(folder, f"{name} has {size:,} bytes, {saved.bytes:,} were saved", True, order)
    return point


def flush_folder(folder: Path) -> None:
    """Flush the names of a folder's files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _manifest(point: ResumePoint) -> str:
    content: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "package_version": point.package_version,
        "step": point.step,
        "order": point.order,
        "world_size": point.world_size,
        "files": {name: asdict(file) for name, file in point.files.items()},
    }
    content["crc32"] = zlib.crc32(json.dumps(content).encode())  # of the manifest itself
    return json.dumps(content, indent=1) + "\n"


def _read_small(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _said(error: Exception) -> str:
    """In one line; torch's own advice, to allow everything, is not for us."""
    if isinstance(error, pickle.UnpicklingError) and (named := re.search(r"GLOBAL (\S+)", str(error))):
        return f"it names {named[1]}, which torch.load(weights_only=True) does not allow; import its package first if that allows it, as torchao does"
    return str(error).partition("\n")[0]


def _small(state: Any) -> Any:
    return unflatten(state["small_tensors"], state["small_skeleton"])


def _saved_file(path: Path) -> SavedFile:
    return SavedFile(path.stat().st_size, _crc32(path))


def _crc32(path: Path) -> int:
    checksum, chunk = 0, bytearray(_CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(chunk):
            checksum = zlib.crc32(memoryview(chunk)[:read], checksum)
    return checksum


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
