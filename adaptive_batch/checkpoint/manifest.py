"""What a save writes last: the name, size and checksum of every file, with a checksum of its own,
so that damage is known before use.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Large enough that reading, not Python, takes the time.
_CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class SavedFile:
    """Size of a file and its ``zlib.crc32``, as the manifest has them."""

    bytes: int
    crc32: int

    @classmethod
    def of(cls, path: Path) -> SavedFile:
        """Read a file."""
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
    """Return what :func:`manifest_text` was given.

    Raises:
        ValueError: the text is none of these.
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
    """Return which file of a folder is missing or has another size than was saved; None where none.
    The files are not read.
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
    """Read the files of a folder; return which of them is not what was saved, or None."""
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
