"""One resume point: a folder with the files of torch.distributed.checkpoint, the small rest, and a manifest that vouches for all.

The manifest is written last and names every file with its size and checksum: ``.metadata`` is no proof that a checkpoint is
whole, as an old one may lie beside new data.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from . import __version__
from .errors import CheckpointError
from .state_tree import unflatten

MANIFEST, STATE, METADATA = "resume.json", "state.pt", ".metadata"
FORMAT, FORMAT_VERSION = "adaptive_batch resume point", 1
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
        """Read every file, and say what differs from what was saved; None where nothing does."""
        for name, saved in self.files.items():
            try:
                found = _crc32(self.path / name)
            except OSError as error:
                return f"{name} cannot be read ({error})"
            if found != saved.crc32:
                return f"{name} has another checksum (crc32 {found:08x}) than was saved ({saved.crc32:08x})"
        return None

    def load(self) -> tuple[Any, Any]:
        """What was saved, on the CPU: the tree of tensors, and the small state.

        Nothing that a file could name is run: tensors and state are read with ``weights_only=True``, and of ``.metadata``, which is
        a pickle, only the classes of torch.distributed.checkpoint are accepted.

        Raises:
            CheckpointError: a file cannot be read; for tensor subclasses, their package (torchao) must have been imported.
        """
        state = self._read_state()
        try:
            reader = _MetadataReader(self.path)
            saved = reader.read_metadata().state_dict_metadata
            if unfit := [name for name, entry in saved.items() if not isinstance(entry, TensorStorageMetadata)]:
                raise pickle.UnpicklingError(f"{unfit[0]} is no tensor")
            tensors = {
                name: torch.empty(entry.size, dtype=entry.properties.dtype)
                for name, entry in saved.items()
                if isinstance(entry, TensorStorageMetadata)
            }
            _silence_single_process()
            state_dict_loader.load(tensors, storage_reader=reader, no_dist=True)
            return unflatten(tensors, state["skeleton"]), _small(state)
        except (Exception, CheckpointException) as error:
            raise CheckpointError(f"resume point {self.path} cannot be read ({cause(error)})") from error

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
    folder: Path, *, step: int, order: int, tensors: Mapping[str, torch.Tensor], state: Any, process_group: Any = None
) -> ResumePoint:
    """Write a resume point into an empty folder, and flush it to the disk.

    Args:
        folder: where; nothing else may be in it.
        step: optimizer steps so far.
        order: as in :class:`ResumePoint`.
        tensors: plain ones, by name.
        state: ``skeleton`` of the tensors; ``small_tensors`` and ``small_skeleton`` of the small state.
        process_group: whose ranks write it together, rank zero the manifest; None for one process.

    Raises:
        OSError, RuntimeError, CheckpointException: writing failed.
        CheckpointError: the state could not be read again with ``weights_only=True``.
    """
    _silence_single_process()
    writer = FileSystemWriter(folder, overwrite=False)
    state_dict_saver.save(
        dict(tensors), storage_writer=writer, process_group=process_group, no_dist=process_group is None
    )
    world_size = 1 if process_group is None else process_group.size()
    if process_group is not None and process_group.rank() > 0:
        return ResumePoint(folder, step, order, __version__, world_size, {})
    with (folder / STATE).open("wb") as file:
        torch.save(state, file)
        _flush(file)
    try:
        _read_small(folder / STATE)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"the state could not be read again: {_said(error)}") from error
    files = {p.name: SavedFile(p.stat().st_size, _crc32(p)) for p in sorted(folder.iterdir())}
    point = ResumePoint(folder, step, order, __version__, world_size, files)
    with (folder / MANIFEST).open("wb") as file:
        file.write(_manifest(point).encode())
        _flush(file)
    flush_folder(folder)
    return point


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


def cause(error: BaseException) -> BaseException:
    """What failed, out of what torch.distributed.checkpoint and torch.save wrap around it: the system's error if there is one."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, OSError):
            return below
        below = below.__cause__ or below.__context__
    return error


def flush_folder(folder: Path) -> None:
    """Flush the names of a folder's files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.checkpoint_id) / METADATA).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"{METADATA} holds a {type(metadata).__qualname__}")
        return metadata


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


def _silence_single_process() -> None:
    """torch.distributed.checkpoint warns whenever one process writes or reads alone, which is meant here.

    The filter stays: ``catch_warnings`` puts back the filters of the whole process, which is not safe in a thread.
    """
    for action in ("save", "load"):
        message = f"torch.distributed is disabled, unavailable or uninitialized, assuming the intent is to {action} in"
        warnings.filterwarnings("ignore", message=message, category=UserWarning)


def _crc32(path: Path) -> int:
    checksum, chunk = 0, bytearray(_CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(chunk):
            checksum = zlib.crc32(memoryview(chunk)[:read], checksum)
    return checksum


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
