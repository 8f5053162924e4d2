"""How long each row of a dataset is, counted once and cached on disk.

The probe tries the longest real rows, so it has to know which they are. Counting means tokenizing the
whole dataset once: worker processes are used where that is worth their start, and the result goes to one file named by
a `fingerprint` of everything that it depends on. Where that file is truncated, unrecognized or out of date, this is logged
and the rows are counted again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import math
import multiprocessing
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from adaptive_batch._util import atomic_write
from adaptive_batch.errors import SettingError

logger = logging.getLogger("adaptive_batch")

TIMED_SECONDS = 0.5  # counted in this process first, which gives the seconds per row
WORTHWHILE_SECONDS = 5.0  # workers start in well under a second each, but every one opens its own copy of the dataset
MAX_WORKERS = 16
CHUNK_SECONDS = 0.25  # work of one message of a worker: the bar moves, and messages cost nothing beside it
STALLED_SECONDS = 60.0  # a forked worker can inherit a lock that nobody releases; a chunk is due after CHUNK_SECONDS
RECHECKED_ROWS = 8
_CHECKSUM_BYTES = 32  # SHA-256: torch.load verifies no checksum


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
    """Measure each row of a dataset in tokens, or read what was measured before.

    A cached result is trusted if its checksum, fingerprint and number of rows are right and a few rows, the longest
    among them, are still as long as it says. The random state of Python, numpy and torch (CPU) is left as it was.

    Args:
        dataset: map-style dataset; need not be picklable.
        cache_dir: folder of the cache file, made if absent; None caches nothing. One that cannot be written is logged.
        fingerprint: names the cache file; from `fingerprint()` of all that decides a row's length (data, tokenizer,
            settings).
        num_workers: None uses all CPUs where the first rows show that it helps; 0 counts in this process; otherwise
            that many processes. Where they fail, the rest is counted in this process, and the reason is logged.
        show_progress: whether a progress bar is shown on stderr; it needs tqdm.

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
        counted = _count(dataset, num_rows=num_rows, num_workers=num_workers, show_progress=show_progress)
    lengths = torch.tensor(counted, dtype=torch.int64)
    if path is not None:
        _write(path, lengths, fingerprint=fingerprint)
    return lengths


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
    failure: str | None = None
    with _progress(num_rows, shown=show_progress) as advance:
        start = time.monotonic()
        timed_seconds = TIMED_SECONDS if num_workers is None else 0.0
        # One row at least is read here even when workers do the rest: what a dataset opens lazily is then open already.
        while len(lengths) < num_rows and (not lengths or time.monotonic() - start < timed_seconds):
            lengths.append(_row_length(dataset, len(lengths)))
            advance(1)
        seconds_per_row = (time.monotonic() - start) / len(lengths)
        num_left = num_rows - len(lengths)
        if num_workers is None:
            num_workers = _worthwhile_workers(seconds_per_row * num_left)
        if num_workers > 0 and num_left > 0:
            chunk = min(math.ceil(num_left / (4 * num_workers)), int(CHUNK_SECONDS / max(seconds_per_row, 1e-9)))
            rows = range(len(lengths), num_rows)
            for length in _counted_by_workers(dataset, rows, num_workers=num_workers, chunk_rows=max(1, chunk)):
                if isinstance(length, str):
                    failure = length
                    break
                lengths.append(length)
                advance(1)
        for row in range(len(lengths), num_rows):
            # The row at which a worker failed is read first: a mistake in the dataset raises here, as itself.
            lengths.append(_row_length(dataset, row))
            advance(1)
            if failure is not None:
                message = "worker processes failed at row %d (%s); counting the other rows in this process"
                logger.warning(message, row, failure)
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


class _Lengths(Dataset[int | str]):
    """The length of each row; the reason where a row cannot be read."""

    def __init__(self, dataset: RowDataset) -> None:
        self._dataset = dataset

    def __getitem__(self, row: int) -> int | str:
        try:
            return _row_length(self._dataset, row)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def _counted_by_workers(dataset: RowDataset, rows: range, *, num_workers: int, chunk_rows: int) -> Iterator[int | str]:
    """Yield the length of each row in order; a reason where a row or the workers failed."""
    if not _fork_is_safe():
        yield f"there is no safe fork on {sys.platform}"
        return
    try:
        # Forked, so that the dataset is not pickled. With its own generator, as it would draw from torch's global one.
        chunks = DataLoader(
            _Lengths(dataset),
            batch_size=chunk_rows,
            sampler=rows,
            collate_fn=list,
            num_workers=num_workers,
            multiprocessing_context="fork",
            timeout=STALLED_SECONDS,
            generator=torch.Generator(),
        )
        for chunk in chunks:
            yield from chunk
    except Exception as error:
        yield f"{type(error).__name__}: {error}"


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


@contextlib.contextmanager
def _progress(num_rows: int, *, shown: bool) -> Iterator[Callable[[int], object]]:
    """Yield what is to be called with each number of rows that are done; without tqdm, a line is logged instead of a bar."""
    try:
        from tqdm import tqdm
    except ImportError:
        if shown:
            logger.info("counting the tokens of %d rows", num_rows)
        yield lambda _: None
        return
    interval = 0.1 if sys.stderr.isatty() else 10.0  # in a log file each update is a line
    with tqdm(
        total=num_rows, desc="counting tokens", unit=" rows", mininterval=interval, disable=not shown, leave=True
    ) as bar:
        yield bar.update


def _read(path: Path, *, fingerprint: str, num_rows: int) -> torch.Tensor | None:
    """Read a cache file; None where there is none, and where there is none to be trusted, which is logged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s cannot be read (%s); counting the rows", path, error)
        return None
    checksum, packed = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    if checksum == hashlib.sha256(packed).digest():
        cached = torch.load(io.BytesIO(packed), weights_only=True)
        lengths: torch.Tensor = cached["lengths"]
        if cached["fingerprint"] == fingerprint and len(lengths) == num_rows:
            return lengths
    logger.warning("%s is truncated or not of these %d rows; counting them again", path, num_rows)
    return None


def _write(path: Path, lengths: torch.Tensor, *, fingerprint: str) -> None:
    buffer = io.BytesIO()
    torch.save({"fingerprint": fingerprint, "lengths": lengths}, buffer)
    packed = buffer.getvalue()
    try:
        atomic_write(path, hashlib.sha256(packed).digest() + packed, sync=True)
    except OSError as error:
        logger.warning("%s cannot be written (%s); the rows will be counted again next time", path, error)
