"""Files of a checkpoint on any number of ranks: tensors by torch.distributed.checkpoint, a manifest
with size and checksum of each file, and one-line reasons for failures to read or write them.

Errors of torch are long, or recommend disabling ``weights_only``.
"""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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

Result = TypeVar("Result")

METADATA = ".metadata"
# Names in ``.metadata``. Classes of the modules are accepted too.
_ACCEPTED_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_ACCEPTED_MODULES = ("torch.distributed.checkpoint.metadata", "pathlib", "pathlib._local")
# Large enough that reading dominates the time, not Python.
_CHUNK_BYTES = 4 * 2**20


# --- tensors


class Ranks:
    """Ranks that save or load together. All ranks receive the results of each rank or its error.

    With several ranks, an error is raised on all of them. It is a TypeError if the original is one,
    otherwise a CheckpointError. The message names the rank.

    Args:
        group: process group of all ranks, not used by another thread meanwhile; None for this
            process only, even if there are other ranks.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.rank: int = 0
        self.count: int = 1
        if group is not None:
            self.rank = group.rank()
            self.count = group.size()

    def each(self, act: Callable[[], Result]) -> list[Result]:
        """Call `act` on every rank; return all results, by rank, on every rank."""
        if self.count == 1:
            return [act()]
        return distributed.from_each_rank(lambda: self._named(act), self.group)

    def first(self, act: Callable[[], Result]) -> Result:
        """Call `act` on rank 0 only; return its result on every rank."""
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
    """Write tensors into an empty folder and flush them to disk; a collective.

    Args:
        folder: empty folder.
        tensors: plain tensors, equal on all ranks that have their name, and DTensors, of which each
            rank writes its part.
        ranks: ranks that write together.

    Returns:
        Names of the files that this rank wrote, without ``.metadata``.

    Raises:
        CheckpointError: writing failed on a rank; raised on all ranks.
    """
    _ignore_single_process_warnings()
    writer = _Writer(folder, overwrite=False)
    if all(tensor.device.type == "cpu" for tensor in tensors.values()):
        # Copying ahead creates a CUDA context on device 0 in another thread, even if all tensors
        # are on the CPU.
        writer.per_thread_copy_ahead = 0
    try:
        state_dict_saver.save(
            dict(tensors),
            storage_writer=writer,
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
    except CheckpointException as error:
        # Each failure is an error with its traceback, by rank.
        rank, (cause, _) = next(iter(error.failures.items()))
        message = reason(cause)
        if ranks.count > 1:
            message = f"rank {rank}: {message}"
        raise CheckpointError(message) from error
    return sorted(path.name for path in folder.glob(f"__{ranks.rank}_*"))


def read_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Read tensors written by :func:`write_tensors`, by name, without communication. Each rank
    reads its part of a DTensor.

    No pickled code runs: tensors are read with ``weights_only=True``, and the pickle ``.metadata``
    may only name classes of torch.distributed.checkpoint.

    Raises:
        Exception: a file is unreadable or damaged; the type varies.
    """
    _ignore_single_process_warnings()
    try:
        state_dict_loader.load(tensors, storage_reader=_Reader(folder), no_dist=True)
    except CheckpointException as error:
        # CheckpointException does not derive from Exception, so callers would not catch it.
        cause, _ = next(iter(error.failures.values()))
        raise RuntimeError(reason(cause)) from error


def low_bit_file(rank: int) -> str:
    """Return the name of the file with the low-bit tensors of a rank."""
    return f"low_bit_{rank}.pt"


def load_safely(path: Path, *, mmap: bool = False) -> Any:
    """Load a file of ``torch.save`` to the CPU without running pickled code."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


class _Writer(FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write; replace an error by one that can be pickled for other ranks."""
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise RuntimeError(reason(error)) from error


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler restricted to the classes of ``.metadata``: a pickle can run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ACCEPTED_NAMES:
            return super().find_class(module, name)
        if module in _ACCEPTED_MODULES:
            loaded = super().find_class(module, name)
            # A module also has the names that it imports, such as functions of `os`.
            if isinstance(loaded, type) and loaded.__module__ == module:
                return loaded
        if module == "torch":
            loaded = super().find_class(module, name)
            if isinstance(loaded, torch.dtype):
                return loaded
        raise RuntimeError(f"{METADATA} names {module}.{name}: not allowed")


class _Reader(FileSystemReader):
    """Reads the metadata first: torch before 2.13 ignores unreadable metadata and does not report
    the reason.
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
    """Ignore the warning of torch.distributed.checkpoint that one process reads or writes alone.

    The filter stays installed: ``catch_warnings`` is not thread-safe.
    """
    for action in ("save", "load"):
        message = (
            "torch.distributed is disabled, unavailable or uninitialized, assuming the intent is"
            f" to {action} in"
        )
        warnings.filterwarnings("ignore", message=message, category=UserWarning)


# --- manifest


@dataclass(frozen=True)
class SavedFile:
    """Size of a file and its ``zlib.crc32``."""

    bytes: int
    crc32: int

    @classmethod
    def of(cls, path: Path) -> SavedFile:
        """Read size and checksum of a file."""
        return cls(path.stat().st_size, _crc32(path))


def manifest_text(content: Mapping[str, Any], files: Mapping[str, SavedFile]) -> str:
    """Return a manifest as text: its content, the files by name, and a checksum of both."""
    manifest: dict[str, Any] = {
        **content,
        "files": {name: asdict(files[name]) for name in sorted(files)},
    }
    manifest["crc32"] = zlib.crc32(json.dumps(manifest).encode())
    return json.dumps(manifest, indent=1) + "\n"


def read_manifest(text: str) -> tuple[dict[str, Any], dict[str, SavedFile]]:
    """Parse a text of :func:`manifest_text` into its content and files.

    Raises:
        ValueError: the text is not a manifest, or its checksum differs.
    """
    try:
        content = json.loads(text)
        del content["crc32"]
        files = {name: SavedFile(**file) for name, file in content.pop("files").items()}
        # The text has its checksum again only if nothing was changed.
        if manifest_text(content, files) == text:
            return content, files
    except (KeyError, TypeError, AttributeError):
        pass
    raise ValueError("truncated or changed")


def changed_size(folder: Path, files: Mapping[str, SavedFile]) -> str:
    """Describe the first file that is missing or has a different size; empty if there is none.
    Reads no content.
    """
    for name, saved in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != saved.bytes:
            return f"{name} has {size:,} bytes, {saved.bytes:,} were saved"
    return ""


def changed_content(folder: Path, files: Mapping[str, SavedFile]) -> str:
    """Describe the first file that is unreadable or has a different checksum; empty if there is
    none.
    """
    for name, saved in files.items():
        try:
            checksum = _crc32(folder / name)
        except OSError as error:
            return f"{name} cannot be read ({error})"
        if checksum != saved.crc32:
            return (
                f"{name} has another checksum (crc32 {checksum:08x}) than was saved"
                f" ({saved.crc32:08x})"
            )
    return ""


def _crc32(path: Path) -> int:
    checksum = 0
    chunk = bytearray(_CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while num_read := file.readinto(chunk):
            checksum = zlib.crc32(memoryview(chunk)[:num_read], checksum)
    return checksum


def reason(error: BaseException) -> str:
    """Return an error as one line; prefer the OSError that torch wrapped, if there is one."""
    os_error = _os_error_behind(error)
    if os_error is None and isinstance(error, pickle.UnpicklingError):
        # torch's own message recommends weights_only=False, which would run pickled code.
        return (
            "torch.load(weights_only=True) does not accept it: it is damaged, or has a class whose"
            " package is not imported"
        )
    text = str(os_error or error) or type(error).__name__
    first_line = text.partition("\n")[0]
    return "".join(char if char.isprintable() else "?" for char in first_line)


def _os_error_behind(error: BaseException) -> OSError | None:
    """Return the error itself or the first of its causes that is an OSError; None without one."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause


@contextmanager
def saving(target: Path, temporary: Path, *, removes: bool = True) -> Iterator[None]:
    """Raise a CheckpointError if writing or renaming the temporary folder fails. The folder is
    removed afterwards, and first, since a killed save may have left it.

    Args:
        target, temporary: final folder, and the folder to write.
        removes: whether this rank removes the folder.

    Raises:
        CheckpointError: saving failed; the message has the reason.
    """
    if removes:
        shutil.rmtree(temporary, ignore_errors=True)
    try:
        yield
    except Exception as error:
        cause = reason(error)
        if not isinstance(error, CheckpointError | OSError):
            cause = f"{type(error).__name__}: {cause}"
        raise CheckpointError(
            f"saving {target} failed ({cause}): earlier saves are unchanged"
        ) from error
    finally:
        if removes:
            shutil.rmtree(temporary, ignore_errors=True)
