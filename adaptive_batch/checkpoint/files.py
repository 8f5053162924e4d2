"""Files of a checkpoint: the manifest with size and checksum of each, and one-line reasons for
failures to read or write them.

Errors of torch are long, or recommend disabling ``weights_only``.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adaptive_batch.errors import CheckpointError

# Large enough that reading dominates the time, not Python.
_CHUNK_BYTES = 4 * 2**20


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


def changed_size(folder: Path, files: Mapping[str, SavedFile]) -> str | None:
    """Describe the first file that is missing or has a different size, or return None. Reads
    no content.
    """
    for name, saved in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != saved.bytes:
            return f"{name} has {size:,} bytes, {saved.bytes:,} were saved"
    return None


def changed_content(folder: Path, files: Mapping[str, SavedFile]) -> str | None:
    """Describe the first file that is unreadable or has a different checksum; None if there is
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
    return None


def _crc32(path: Path) -> int:
    checksum = 0
    chunk = bytearray(_CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while num_read := file.readinto(chunk):
            checksum = zlib.crc32(memoryview(chunk)[:num_read], checksum)
    return checksum


# A disk with less free space counts as full.
_FULL_BYTES = 2**16


def reason(error: BaseException) -> str:
    """Return an error as one line; prefer the OSError that torch wrapped, if there is one."""
    os_error = _os_error_behind(error)
    if os_error is None and isinstance(error, pickle.UnpicklingError):
        # torch's own message recommends weights_only=False, which would run pickled code.
        unknown = re.search(r"GLOBAL (\S+)", str(error))
        if unknown:
            return (
                f"it names {unknown[1]}, which torch.load(weights_only=True) allows only once its"
                " package is imported, if at all"
            )
        return "it is not what torch.save writes: truncated or changed"
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
def saving(
    target: Path, temporary: Path, *, num_bytes: int, removes: bool = True
) -> Iterator[None]:
    """Remove the temporary folder if writing or renaming it fails, and raise a CheckpointError.

    A folder that a killed save left is removed first.

    Args:
        target, temporary: final folder, and the folder to write.
        num_bytes: bytes of the tensors.
        removes: whether this rank removes the folder.

    Raises:
        CheckpointError: saving failed; the message has the reason, the required and the free bytes.
    """
    if removes:
        shutil.rmtree(temporary, ignore_errors=True)
    nearest = next(folder for folder in target.parents if folder.exists())
    free_before = shutil.disk_usage(nearest).free
    try:
        yield
    except BaseException as error:
        # Read the free space before the removal frees more.
        free_after = shutil.disk_usage(nearest).free
        if removes:
            shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, Exception):
            raise
        cause = reason(error)
        if _os_error_behind(error) is None:
            # torch does not report why a write failed.
            if free_after < _FULL_BYTES:
                cause = os.strerror(errno.ENOSPC)
            elif not isinstance(error, CheckpointError):
                cause = f"{type(error).__name__}: {cause}"
        raise CheckpointError(
            f"saving {target} failed ({cause}): it needs {num_bytes:,} bytes and a little more, and"
            f" {free_before:,} bytes were free; earlier saves are unchanged"
        ) from error
