"""Small tools that every package may use: checks of values, the cache folder, fingerprints."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path, PurePath

from adaptive_batch.errors import SettingError

HASHED_BYTES = 64 * 2**20  # hashing this much takes about 0.1 s


def check_whole(key: str, value: object, *, remedy: str = "give a whole number, 1 or more") -> int:
    """Refuse what is not a whole number, 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingError(key, value, remedy)
    return value


def check_bool(key: str, value: object) -> bool:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise SettingError(key, value, "give True or False")
    return value


def check_share(key: str, value: object) -> None:
    """Refuse what is not a share in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value < 1:
        raise SettingError(key, value, "give a share of at least 0 and below 1, such as 0.05")


def format_bytes(num_bytes: int) -> str:
    """Format an amount of memory in GiB, or in MiB or bytes where two decimals of GiB would not show it."""
    if num_bytes >= 0.1 * 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.2f} MiB" if num_bytes >= 0.1 * 2**20 else f"{num_bytes} bytes"


def nearest(name: str, names: list[str]) -> str:
    """The end of a sentence that refuses a name: those near it, or all that there are."""
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"near it: {', '.join(close)}" if close else f"there are: {', '.join(names)}"


def cache_directory() -> Path:
    """Where row lengths are kept between runs: ADAPTIVE_BATCH_CACHE, or the user's cache folder."""
    if chosen := os.environ.get("ADAPTIVE_BATCH_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "adaptive_batch"


def fingerprint(*parts: object) -> str:
    """Hashes settings to a short name that is the same in every process and on every machine.

    The order of a mapping's keys makes no difference; types do (``1``, ``"1"``, ``1.0`` and ``True`` all differ). A
    path counts as its text and a tuple as a list.

    Args:
        parts: None, bool, int, float, str, path, and lists and mappings of these.

    Returns:
        24 hexadecimal digits of a SHA-256.

    Raises:
        TypeError: a part is something else, a tensor for instance.
    """
    text = json.dumps([_plain(part) for part in parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def file_signature(path: str | Path) -> list[str | int]:
    """Describes what is at a path, as a part for `fingerprint`: another signature means another content.

    Args:
        path: a file, a folder or nothing. The path itself is not part of the signature.

    Returns:
        ``["file", bytes, sha256]`` of a file up to 64 MiB, ``["file", bytes, mtime_ns]`` of a larger one,
        ``["folder", files, bytes, sha256 of the files' relative names, sizes and mtime_ns]``, ``["missing"]``, or
        ``["other"]`` for what is neither a file nor a folder.
    """
    path = Path(path)
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return ["missing"]
    if stat.S_ISREG(status.st_mode):
        if status.st_size > HASHED_BYTES:
            return ["file", status.st_size, status.st_mtime_ns]
        return ["file", status.st_size, hashlib.sha256(path.read_bytes()).hexdigest()]
    if not stat.S_ISDIR(status.st_mode):
        return ["other"]
    listing = sorted(_listing(path))
    digest = hashlib.sha256(json.dumps(listing).encode()).hexdigest()
    return ["folder", len(listing), sum(size for _, size, _ in listing), digest]


def described_with_files(value: object) -> object:
    """Settings in which each text that names a file is followed by the file's signature.

    Folders are left as they are: what a run writes into one, a cache or its own output, would change its signature.
    """
    if isinstance(value, Mapping):
        return {str(key): described_with_files(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [described_with_files(item) for item in value]
    if isinstance(value, str) and os.path.isfile(value):
        return [value, file_signature(value)]
    return value


def _listing(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Yields name, bytes and mtime_ns of each file below a folder."""
    for parent, _, names in os.walk(folder):
        for name in names:
            file = Path(parent, name)
            try:
                status = file.stat()
            except OSError:  # a link that leads nowhere
                status = file.lstat()
            yield file.relative_to(folder).as_posix(), status.st_size, status.st_mtime_ns


def _plain(part: object) -> object:
    """Returns what JSON can hold, keeping apart what JSON would merge: the keys ``1`` and ``"1"``."""
    if part is None or isinstance(part, bool | int | float | str):
        return part
    if isinstance(part, PurePath):
        return str(part)
    if isinstance(part, list | tuple):
        return [_plain(item) for item in part]
    if isinstance(part, Mapping):
        return {json.dumps(_plain(key), sort_keys=True): _plain(value) for key, value in part.items()}
    remedy = "use None, bool, int, float, str, a path, or lists and mappings of these"
    raise TypeError(f"cannot fingerprint a {type(part).__name__}: {remedy}")


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return a package's ``__getattr__`` that imports what it is asked for (PEP 562).

    Args:
        package: its ``__name__``.
        modules: the module, relative to the package, that holds each public name.
    """

    def __getattr__(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name], package), name)

    return __getattr__
