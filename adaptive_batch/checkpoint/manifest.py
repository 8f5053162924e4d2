"""Manifest of a checkpoint: name, size and checksum of every file, and its own checksum."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
    whole: dict[str, Any] = {
        **content,
        "files": {name: asdict(files[name]) for name in sorted(files)},
    }
    whole["crc32"] = zlib.crc32(json.dumps(whole).encode())
    return json.dumps(whole, indent=1) + "\n"


def read_manifest(text: str) -> tuple[dict[str, Any], dict[str, SavedFile]]:
    """Parse a text of :func:`manifest_text` into its content and files.

    Raises:
        ValueError: the text is not a manifest, or its checksum differs.
    """
    try:
        content = json.loads(text)
        del content["crc32"]
        files = {name: SavedFile(**file) for name, file in content.pop("files").items()}
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
        while read := file.readinto(chunk):
            checksum = zlib.crc32(memoryview(chunk)[:read], checksum)
    return checksum
