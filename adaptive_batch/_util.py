"""Helpers for all packages: checks of values, progress bars, atomic writes, the cache folder,
fingerprints.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from adaptive_batch.errors import SettingError

log = logging.getLogger("adaptive_batch")
T = TypeVar("T")

# Seconds between two log lines of progress without a terminal.
SECONDS_BETWEEN_LINES = 10.0
# Held while functions of torch are replaced, which all threads call.
one_thread = threading.RLock()
# Limit of hashed files; hashing 64 MiB takes about 0.1 s.
HASHED_BYTES = 64 * 2**20
# Limit of rows, tokens and steps: beyond any training run, and products of two stay far from
# overflow in double precision.
LARGEST_NUMBER = 10**12


def check_whole(
    key: str,
    value: object,
    *,
    remedy: str = "give a whole number, 1 or more",
    least: int = 1,
    most: int = LARGEST_NUMBER,
) -> int:
    """Return `value`; raise SettingError unless it is a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingError(key, value, remedy)
    if value > most:
        raise SettingError(key, value, f"give {most} or less")
    return value


def auto_or_whole(key: str, value: object) -> None:
    """Raise SettingError if a value is neither ``auto`` nor a whole number, 1 or more."""
    if value != "auto":
        check_whole(key, value, remedy="give auto, or a whole number, 1 or more")


def check_bool(key: str, value: object) -> bool:
    """Return `value`; raise SettingError unless it is a bool."""
    if not isinstance(value, bool):
        raise SettingError(key, value, "give True or False")
    return value


def instance_of(kind: type[T], key: str, value: T | None) -> T:
    """Return `value`, or `kind()` for None; raise SettingError for any other type."""
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise SettingError(key, value, f"give {kind.__name__}(...)")
    return value


def check_state(state: object, names: Iterable[str], *, owner: str) -> None:
    """Raise SettingError unless `state` has the given names."""
    if not isinstance(state, Mapping) or not state.keys() >= set(names):
        remedy = f"give the result of state_dict() of {owner}"
        raise SettingError("state", type(state).__name__, remedy)


def check_built_alike(
    own: Mapping[str, object], saved: Mapping[str, object], *, what: str, sets_batch: str = ""
) -> None:
    """Raise SettingError if an object resumes from a state with other constructor arguments.

    Args:
        own: arguments of the object.
        saved: arguments in the saved state.
        what: name of the object.
        sets_batch: advice for changing the batch size after resuming.
    """
    for key, value in own.items():
        if key not in saved:
            remedy = f"the saved {what} has no {key}; resume with the version that saved it"
            raise SettingError(key, value, remedy)
        if saved[key] != value:
            remedy = f"the saved {what} was built with {saved[key]}; resume with that"
            # The batch size can be changed after resuming.
            if key == "batch_size":
                remedy += f", then {sets_batch}"
            raise SettingError(key, value, remedy)


def check_choice(key: str, value: str, options: Sequence[str]) -> None:
    """Raise SettingError if a value is not one of the options."""
    if value not in options:
        raise SettingError(key, value, f"give one of {', '.join(options)}")


@dataclass(frozen=True)
class Option:
    """Metadata of an option: a field of a dataclass of options, and a key of the configuration.

    Attributes:
        read: function of the option's name and the given value. It returns the value to store,
            or None to store the given one, and raises SettingError for a value out of range.
        shown: default in the documentation, if it differs from the field's.
        needs: keys of which one must be set for this one to have an effect; ``key=value`` asks
            for that value.
        resume: effect of a value that differs from the checkpoint's: ``refuse`` raises unless
            `resume_allow_changes` lists the key, ``epoch`` raises within an epoch and is logged
            between epochs, ``report`` is logged, ``free`` is not.
        fills_steps: whether the option decides the rows of a step if `batch_tokens` is set, so
            that a change counts as ``epoch``.
    """

    read: Callable[[str, Any], Any]
    shown: str = ""
    needs: tuple[str, ...] = ()
    resume: str = "free"
    fills_steps: bool = False


def option(
    default: Any = MISSING, read: Callable[[str, Any], Any] = check_bool, **more: Any
) -> Any:
    """Return the dataclass field of an :class:`Option`; without a default it is required."""
    return field(default=default, metadata={"option": Option(read, **more)})


def one_of(*options: str) -> Callable[[str, Any], Any]:
    """Return the reader of an option that is one of some words."""
    return partial(check_choice, options=options)


def check_options(options: Any) -> None:
    """Raise SettingError for the first option of a dataclass that is out of range."""
    for each in fields(options):
        value = getattr(options, each.name)
        # A default may be a value that the user cannot give, such as None.
        if "option" in each.metadata and value is not each.default:
            each.metadata["option"].read(each.name, value)


def check_share(key: str, value: object) -> None:
    """Raise SettingError unless `value` is a share in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise SettingError(key, value, "give a share of at least 0 and below 1, such as 0.05")


def check_headroom(key: str, value: object) -> None:
    """Raise SettingError unless `value` is ``auto`` or a share in [0, 1)."""
    if value != "auto":
        check_share(key, value)


def round_up(number: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-number // multiple) * multiple


def format_bytes(num_bytes: float) -> str:
    """Format an amount of memory in GiB (from 16 MiB), MiB (from 128 KiB), KiB or bytes."""
    # Name and bytes of each unit, and the fewest bytes that it is used for.
    units = (("GiB", 2**30, 2**24), ("MiB", 2**20, 2**17), ("KiB", 2**10, 2**10))
    for unit, unit_bytes, least_bytes in units:
        if num_bytes >= least_bytes:
            number = num_bytes / unit_bytes
            digits = 2 if number >= 1 else 3
            return f"{number:.{digits}f} {unit}"
    return count(round(num_bytes), "byte")


def count(number: int, what: str, form: str = "") -> str:
    """Format a count, such as ``1 row`` and ``2 rows``, with an optional format such as ``","``."""
    return f"{number:{form}} {what}{'s' * (number != 1)}"


def rows_fit(rows: int) -> str:
    """Return ``1 row fits``, ``2 rows fit`` and so on."""
    return f"{count(rows, 'row')} fit{'s' * (rows == 1)}"


def format_bound(rows: int | None, maximum: int) -> str:
    """Format the rows that fit; `maximum` or any number (None) gets a plus."""
    if rows is None or rows >= maximum > 0:
        return f"{maximum}+"
    return str(rows)


class ProgressBar:
    """Shows progress: a bar on a terminal, else a log line every ten seconds and at the end.

    Args:
        total: total units of work.
        unit: name of the units, in the plural.
        what: description, such as "counting tokens".
        done: units that are already done.
        shown: whether to show anything.
    """

    def __init__(
        self, total: int, unit: str, what: str = "", *, done: int = 0, shown: bool = True
    ) -> None:
        self._total = total
        self._unit = unit
        self._what = what
        self._done = done
        self._shown = shown
        self._last_line = time.monotonic()
        self._bar = None
        # tqdm is optional.
        if shown and sys.stderr.isatty() and find_spec("tqdm"):
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=what, initial=done, unit=f" {unit}")

    def advance(self, what: str | None = None) -> None:
        """Count one unit as done and optionally change the description."""
        self._done += 1
        if what is not None:
            self._what = what
        if self._bar is not None:
            self._bar.set_description(self._what, refresh=False)
            self._bar.update()
        elif self._shown:
            now = time.monotonic()
            if now - self._last_line >= SECONDS_BETWEEN_LINES or self._done == self._total:
                self._last_line = now
                log.info("%s: %d of %d %s", self._what, self._done, self._total, self._unit)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object or module in this context and restore them afterwards."""
    attributes = vars(owner)
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        attributes.update(before)
        # The others came from the class, or did not exist.
        for name in values.keys() - before.keys():
            del attributes[name]


def belongs_to(thread: threading.Thread) -> bool:
    """Return whether this code runs in a thread, or in one that Python did not start, such as those
    of backward, which may run for any thread.
    """
    current = threading.current_thread()
    return current is thread or isinstance(current, threading._DummyThread)


@contextmanager
def replaced_for_thread(module: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    """Replace functions of a module in this context for this thread. Other threads of Python call
    the former functions, and wait here to replace any themselves.
    """
    thread = threading.current_thread()

    def for_thread(function: Callable[..., Any], former: Callable[..., Any]) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            chosen = function if belongs_to(thread) else former
            return chosen(*arguments, **keywords)

        return call

    with one_thread:
        replacements = {
            name: for_thread(function, vars(module)[name]) for name, function in functions.items()
        }
        with replaced(module, **replacements):
            yield


@contextmanager
def around_autocast(around: Callable[[Any], AbstractContextManager[object]]) -> Iterator[None]:
    """Enter each ``torch.autocast`` of this thread inside the context `around(autocast)`."""
    import torch

    thread = threading.current_thread()
    with one_thread:
        enter: Callable[[Any], Any] = torch.autocast.__enter__

        def entered(autocast: Any) -> Any:
            with around(autocast) if belongs_to(thread) else nullcontext():
                return enter(autocast)

        torch.autocast.__enter__ = entered  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.autocast.__enter__ = enter  # type: ignore[method-assign]


def nearest(name: str, names: list[str]) -> str:
    """Return a suggestion for an unknown name: similar names, or all of up to 100 names."""
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close or len(names) > 100:
        return f"near it: {', '.join(close) or 'none'}"
    return f"there are: {', '.join(names)}"


def atomic_write(path: Path, content: str | bytes, *, sync: bool = False) -> None:
    """Write a file atomically: readers see the old or the new content, even after a kill.

    Args:
        path: the file; its folder is created if missing.
        content: content; text is encoded as UTF-8.
        sync: whether to flush file and name to disk, to survive a power failure.

    Raises:
        OSError: the file cannot be written; the old content is kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the file, since only a rename within one file system is atomic.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        # An error of write() names no file, and one of open() names the temporary file.
        error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    if sync:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names of a folder's files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move_into_place(
    folder: Path, target: Path, *, then: Callable[[], object] = lambda: None
) -> None:
    """Rename a folder to `target` and call `then`.

    An existing `target` is kept as ``.replaced-NAME`` until `then` has returned.
    """
    former = target.with_name(f".replaced-{target.name}")
    shutil.rmtree(former, ignore_errors=True)
    if target.exists():
        target.rename(former)
    try:
        folder.rename(target)
    except BaseException:
        if former.exists():
            former.rename(target)
        raise
    sync_folder(target.parent)
    then()
    shutil.rmtree(former, ignore_errors=True)


def installed_version(name: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    # Slow to import, and not needed for `import adaptive_batch`.
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def is_emulated() -> bool:
    """Return whether the program runs under `adaptive-batch emulate`, without real values and
    times.
    """
    return "ADAPTIVE_BATCH_EMULATED" in os.environ


def cache_directory() -> Path:
    """Return the cache folder: ADAPTIVE_BATCH_CACHE, or a folder in the user's cache."""
    chosen = os.environ.get("ADAPTIVE_BATCH_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "adaptive_batch"


def fingerprint(*parts: object) -> str:
    """Hash settings to 24 hexadecimal digits, equally in every process and on every machine.

    The order of a dictionary's keys is ignored. Types matter: ``1``, ``"1"``, ``1.0`` and ``True``
    all differ, but a path equals its text and a tuple a list.

    Args:
        parts: None, bool, int, float, str, path, and lists and dictionaries of these.

    Raises:
        TypeError: a part has another type, such as a tensor.
    """
    text = json.dumps(parts, sort_keys=True, default=os.fspath)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def file_signature(path: str | Path) -> list[str | int]:
    """Describe a file for `fingerprint`, so that changed content changes the signature.

    Returns:
        ``["file", bytes, sha256]`` of a file up to 64 MiB, ``["file", bytes, mtime_ns]`` of a
        larger one, or ``["missing"]``.
    """
    path = Path(path)
    if not os.path.isfile(path):
        return ["missing"]
    status = path.stat()
    if status.st_size > HASHED_BYTES:
        return ["file", status.st_size, status.st_mtime_ns]
    return ["file", status.st_size, hashlib.sha256(path.read_bytes()).hexdigest()]


def described_with_files(value: object) -> object:
    """Return settings with the signature of each file that a text names, by its path or by the
    dotted path of an object in an imported module.

    Folders are not described: caches and outputs of a run would change their signature. Modules
    that a named module imports do not count.
    """
    if isinstance(value, Mapping):
        return {str(key): described_with_files(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [described_with_files(item) for item in value]
    if isinstance(value, str):
        # `my_module.my_function` names the file of my_module.
        module = sys.modules.get(value.rpartition(".")[0])
        file = value if os.path.isfile(value) else getattr(module, "__file__", None)
        if file is not None:
            return [value, file_signature(file)]
    return value


def from_json(kind: Any, value: Any) -> Any:
    """Build a value of an annotated type from JSON.

    Args:
        kind: A dataclass, a tuple, ``X | None``, a number or a text.
        value: The result of ``asdict``, possibly after a round trip through JSON.

    Raises:
        TypeError, ValueError: The value does not match the type, or lacks a field of a dataclass.
    """
    if is_dataclass(kind):
        # Raises TypeError unless the value is a mapping.
        given = {**value}
        hints = get_type_hints(kind)
        if not given.keys() >= hints.keys():
            raise ValueError(f"it lacks {', '.join(sorted(hints.keys() - given.keys()))}")
        arguments = {name: from_json(hint, given[name]) for name, hint in hints.items()}
        return kind(**arguments)  # type: ignore[operator]
    origin = get_origin(kind)
    if origin is UnionType:
        # X | None.
        return None if value is None else from_json(get_args(kind)[0], value)
    if origin is tuple:
        item_kinds = get_args(kind)
        # tuple[X, ...].
        if item_kinds[-1] is Ellipsis:
            item_kinds = item_kinds[:1] * len(value)
        pairs = zip(item_kinds, value, strict=True)
        return tuple(from_json(item_kind, item) for item_kind, item in pairs)
    if kind is float:
        return float(value)
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value
