"""How long each row of a dataset is, counted once and cached on disk.

The probe tries the longest real rows, so it has to know which they are. Counting means tokenizing the
whole dataset once: worker processes are used where that is worth their start, and the result goes to one file named by
a `fingerprint` of everything that it depends on. Where that file is torn, foreign or no longer true, the log says so
and the rows are counted again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import multiprocessing
import os
import random
import re
import sys
import time
import uuid
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from adaptive_batch.errors import SettingError

logger = logging.getLogger("adaptive_batch")

TIMED_SECONDS = 0.5  # counted in this process first, which gives the seconds per row
WORTHWHILE_SECONDS = 5.0  # workers start in well under a second each, but every one opens its own copy of the dataset
MAX_WORKERS = 16
CHUNK_SECONDS = 0.25  # work of one message of a worker: the bar moves, and messages cost nothing beside it
STALLED_SECONDS = 60.0  # a forked worker can inherit a lock that nobody releases; a chunk is due after CHUNK_SECONDS
RECHECKED_ROWS = 8


class RowDataset(Protocol):
    """A map-style dataset: it has a length, and row ``i`` is a mapping whose ``tokens`` is a list or a 1-D tensor."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def row_lengths(
    dataset: RowDataset,
    *,
    cache_dir: Path | None,
    fingerprint: str,
    num_workers: int | None = None,
    show_progress: bool = True,
) -> torch.Tensor:
    """Measures each row of a dataset in tokens, or reads what was measured before.

    A cached result is believed if its checksum, fingerprint and number of rows are right and a few rows, the longest
    among them, are still as long as it says. The random state of Python, numpy and torch (CPU) is left as it was.

    Args:
        dataset: map-style dataset; need not be picklable.
        cache_dir: folder of the cache file, made if absent; None caches nothing. One that cannot be written is logged.
        fingerprint: names the cache file; from `fingerprint()` of all that decides a row's length (data, tokenizer,
            settings).
        num_workers: None uses all CPUs where the first rows show that it helps; 0 counts in this process; otherwise
            that many processes. Where they fail, the rest is counted in this process, and the reason is logged.
        show_progress: whether a line on stderr says how far it is.

    Returns:
        int64 tensor ``[rows]``: tokens of each row.

    Raises:
        SettingError: the dataset has no rows or no length, or a row has no list of tokens.
        ValueError: `fingerprint` cannot be part of a file name.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+", fingerprint):
        raise ValueError(f"fingerprint={fingerprint!r}: it names a file; use letters, digits, - and _ only")
    num_rows = _num_rows(dataset)
    path = None if cache_dir is None else Path(cache_dir) / f"lengths-{fingerprint}.bin"
    with _random_state_kept():
        cached = None if path is None else _read(path, fingerprint=fingerprint, num_rows=num_rows)
        if cached is not None:
            changed = _changed_row(dataset, cached)
            if changed is None:
                logger.info("lengths of %d rows read from %s", num_rows, path)
                return cached
            logger.warning("%s: row %d no longer has that length; counting all rows again", path, changed)
        lengths = _count(dataset, num_rows=num_rows, num_workers=num_workers, show_progress=show_progress)
    if path is not None:
        _write(path, lengths, fingerprint=fingerprint)
    return torch.tensor(lengths, dtype=torch.int64)


def longest_rows(lengths: torch.Tensor, count: int) -> list[int]:
    """Chooses the longest rows.

    Args:
        lengths: int tensor ``[rows]``, tokens of each row.
        count: how many, 1 to the number of rows.

    Returns:
        `count` row numbers, longest first; of rows equally long, the one that comes first in the dataset.

    Raises:
        ValueError: `count` is below 1 or above the number of rows.
    """
    if not 1 <= count <= len(lengths):
        raise ValueError(f"count={count}: must be 1 to {len(lengths)}, the number of rows")
    order: list[int] = torch.sort(lengths, descending=True, stable=True).indices[:count].tolist()
    return order


def _num_rows(dataset: RowDataset) -> int:
    name = type(dataset).__name__
    try:
        num_rows = len(dataset)
    except TypeError as error:
        raise SettingError("dataset", name, f"a map-style dataset with a length is needed ({error})") from error
    if num_rows == 0:
        raise SettingError("dataset", name, "it has no rows; check its source, split and filter")
    return num_rows


def _row_length(dataset: RowDataset, row: int) -> int:
    sample = dataset[row]
    tokens = sample.get("tokens") if isinstance(sample, Mapping) else None
    if isinstance(tokens, list | tuple):
        return len(tokens)
    shape = getattr(tokens, "shape", None)
    if shape is not None and len(shape) == 1:
        return int(shape[0])
    if isinstance(sample, Mapping):
        found = f"'tokens' is a {type(tokens).__name__}" if "tokens" in sample else f"keys {sorted(map(str, sample))}"
    else:
        found = f"a {type(sample).__name__}"
    raise SettingError(
        "dataset",
        type(dataset).__name__,
        f"row {row} must be a mapping with a list or 1-D tensor 'tokens', not {found}",
    )


def _changed_row(dataset: RowDataset, lengths: torch.Tensor) -> int | None:
    """Measures a few rows again: first, last, the longest and some between; returns the first that differs."""
    last = len(lengths) - 1
    rows = {last * i // (RECHECKED_ROWS - 2) for i in range(RECHECKED_ROWS - 1)} | {int(lengths.argmax())}
    return next((row for row in sorted(rows) if _row_length(dataset, row) != int(lengths[row])), None)


def _count(dataset: RowDataset, *, num_rows: int, num_workers: int | None, show_progress: bool) -> list[int]:
    lengths: list[int] = []
    with _ProgressLine(num_rows, shown=show_progress) as progress:
        timed_seconds = TIMED_SECONDS if num_workers is None else 0.0
        # One row at least is read here even when workers do the rest: what a dataset opens lazily is then open already.
        while len(lengths) < num_rows and (not lengths or progress.seconds < timed_seconds):
            lengths.append(_row_length(dataset, len(lengths)))
            progress.show(len(lengths))
        seconds_per_row = progress.seconds / len(lengths)
        num_left = num_rows - len(lengths)
        if num_workers is None:
            num_workers = _worthwhile_workers(seconds_per_row * num_left)
        failure: str | None = None
        if num_workers > 0 and num_left > 0:
            chunk_rows = max(
                1, min(math.ceil(num_left / (4 * num_workers)), int(CHUNK_SECONDS / max(seconds_per_row, 1e-9)))
            )
            chunks = _Chunks(dataset, first_row=len(lengths), num_rows=num_rows, chunk_rows=chunk_rows)
            for counted, failure in _counted_by_workers(chunks, num_workers):
                lengths += counted
                progress.show(len(lengths))
                if failure is not None:
                    break
        for row in range(len(lengths), num_rows):
            # The row at which a worker failed is read first: a mistake in the dataset raises here, as itself.
            lengths.append(_row_length(dataset, row))
            progress.show(len(lengths))
            if failure is not None:
                logger.warning(
                    "worker processes failed at row %d (%s); counting the other rows in this process", row, failure
                )
                failure = None
    return lengths


def _worthwhile_workers(seconds_left: float) -> int:
    """Returns how many worker processes to use for work that this process alone would need `seconds_left` for."""
    if not _fork_is_safe() or seconds_left <= WORTHWHILE_SECONDS:
        return 0
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(num_cpus, MAX_WORKERS) if num_cpus > 1 else 0


def _fork_is_safe() -> bool:
    # macOS has fork, but its system libraries may crash in the child: https://bugs.python.org/issue33725
    return sys.platform != "darwin" and "fork" in multiprocessing.get_all_start_methods()


class _Chunks(Dataset[tuple[list[int], str | None]]):
    """Chunk ``i`` is the lengths of its rows in order; where one could not be read, those before it and the reason."""

    def __init__(self, dataset: RowDataset, *, first_row: int, num_rows: int, chunk_rows: int) -> None:
        self._dataset = dataset
        self._num_rows = num_rows
        self._starts = range(first_row, num_rows, chunk_rows)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[list[int], str | None]:
        start = self._starts[index]
        lengths: list[int] = []
        try:
            for row in range(start, min(start + self._starts.step, self._num_rows)):
                lengths.append(_row_length(self._dataset, row))
        except Exception as error:
            return lengths, f"{type(error).__name__}: {error}"
        return lengths, None


def _counted_by_workers(chunks: _Chunks, num_workers: int) -> Iterator[tuple[list[int], str | None]]:
    """Yields the chunks in order; where the workers themselves fail, an empty chunk with the reason is the last."""
    if not _fork_is_safe():
        yield [], f"there is no safe fork on {sys.platform}"
        return
    try:
        # Forked, so that the dataset is not pickled. With its own generator, as it would draw from torch's global one.
        yield from DataLoader(
            chunks,
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=num_workers,
            multiprocessing_context="fork",
            timeout=STALLED_SECONDS,
            generator=torch.Generator(),
        )
    except Exception as error:
        yield [], f"{type(error).__name__}: {error}"


def _unchanged(chunk: Any) -> Any:
    return chunk


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Puts the random state back: reading a row may draw from it, and a run must not depend on a hit of the cache."""
    python_state = random.getstate()
    numpy_random = sys.modules.get("numpy.random")
    numpy_state = None if numpy_random is None else numpy_random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)


class _ProgressLine(contextlib.AbstractContextManager["_ProgressLine"]):
    """Says on stderr how many rows are done: one line that moves in a terminal, a line every 10 s in a log file."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._total = total
        self._shown = shown
        self._moves = sys.stderr.isatty()
        self._start = time.monotonic()
        self._done = 0
        self._interval_seconds = 0.1 if self._moves else 10.0
        self._next_seconds = self._interval_seconds

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def show(self, done: int) -> None:
        self._done = done
        if self._shown and self.seconds >= self._next_seconds:
            self._next_seconds = self.seconds + self._interval_seconds
            self._print(end="" if self._moves else "\n")

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._print(end="\n")

    def _print(self, *, end: str) -> None:
        start = "\r" if self._moves else ""
        text = (
            f"counting tokens: {self._done}/{self._total} rows ({self._done / self._total:.0%}), {self.seconds:.1f} s"
        )
        print(start + text, end=end, file=sys.stderr, flush=True)


def _header(payload: bytes, *, fingerprint: str, num_rows: int) -> bytes:
    """Returns the first line of a cache file. All of it is known to the reader, so one comparison checks the file."""
    return json.dumps(
        {
            "format": "adaptive_batch.lengths 1, int64",
            "byteorder": sys.byteorder,
            "fingerprint": fingerprint,
            "rows": num_rows,
            "sha256": hashlib.sha256(payload).hexdigest(),
        }
    ).encode()


def _read(path: Path, *, fingerprint: str, num_rows: int) -> torch.Tensor | None:
    """Reads a cache file; None if there is none, or (said) none that can be believed."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s cannot be read (%s); counting the rows", path, error)
        return None
    head, _, payload = content.partition(b"\n")
    if len(payload) != 8 * num_rows or head != _header(payload, fingerprint=fingerprint, num_rows=num_rows):
        logger.warning("%s is torn or not of these %d rows; counting them again", path, num_rows)
        return None
    return torch.frombuffer(bytearray(payload), dtype=torch.int64)


def _write(path: Path, lengths: list[int], *, fingerprint: str) -> None:
    """Writes a cache file aside and renames it, so that a reader, or a second writer, sees a whole one or none."""
    payload = array("q", lengths).tobytes()
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("xb") as file:
                file.write(_header(payload, fingerprint=fingerprint, num_rows=len(lengths)) + b"\n" + payload)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be written (%s); the rows will be counted again next time", path, error)
