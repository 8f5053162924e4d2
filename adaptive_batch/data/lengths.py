"""Row lengths of a dataset: measured once by reading all rows, in worker processes if that pays,
and cached.
"""

from __future__ import annotations

import hashlib
import logging
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from adaptive_batch._random import RandomState
from adaptive_batch._util import ProgressBar, atomic_write
from adaptive_batch.errors import SettingError

logger = logging.getLogger("adaptive_batch")

# Rows are measured for this time in this process first, which gives the seconds per row.
TIMED_SECONDS = 0.5
# workers start in well under a second each, but every one opens its own copy of the dataset
WORTHWHILE_SECONDS = 5.0
MAX_WORKERS = 16
# Work of one message of a worker: the bar moves, and messages cost little.
CHUNK_SECONDS = 0.25
# a forked worker can inherit a lock that nobody releases; a chunk is due after CHUNK_SECONDS
STALLED_SECONDS = 60.0
RECHECKED_ROWS = 8
# A token and its label.
_BYTES_PER_TOKEN = 16
# Bytes of SHA-256.
_CHECKSUM_BYTES = 32

Numbers = Sequence[int]
Measure = Callable[[int, Any], Numbers]


def count_rows(dataset: Any, *, key: str = "dataset", name: str | None = None) -> int:
    """Return the number of rows of a dataset; errors have `key` and `name`, or its class.

    Raises:
        SettingError: it has none, or no length, or gives no row by its number.
    """
    if name is None:
        name = type(dataset).__name__
    remedy = (
        "give a map-style dataset, with a length and rows by number; of a DataLoader, give its"
        " dataset and its collate_fn"
    )
    if isinstance(dataset, IterableDataset | Mapping) or not hasattr(dataset, "__getitem__"):
        problem = f"a {type(dataset).__name__} has no row by its number"
        raise SettingError(key, name, f"{problem}; {remedy}")
    try:
        num_rows = len(dataset)
    except TypeError as error:
        # A dataset that is streamed raises TypeError too, hence the remedy streaming=False.
        raise SettingError(key, name, f"{error}; {remedy}, and streaming=False") from None
    if num_rows == 0:
        raise SettingError(key, name, "it has no rows; check its source, split and filter")
    return num_rows


def measure_rows(
    dataset: Any,
    measure: Measure,
    *,
    num_numbers: int = 1,
    cache_file: Path | None = None,
    reads_cache: bool = True,
    show_progress: bool = True,
) -> torch.Tensor:
    """Measure each row of a dataset, or read earlier measurements.

    A cached result is used if its checksum, name and number of rows are right, and a few rows,
    including the longest, still have the cached integers. The random state of Python, numpy and
    torch (CPU) is restored. Worker processes measure if the first rows show that it helps. If they
    fail, the reason is logged and the rest is measured in this process.

    Args:
        dataset: map-style; need not be picklable.
        measure: ``measure(index, row)`` returns integers, the number of tokens of the row first.
        num_numbers: number of integers that `measure` returns.
        cache_file: file whose name has a fingerprint of data, tokenizer and settings; None for no
            cache. A file that cannot be written is logged.
        reads_cache: False ignores the file and replaces it.
        show_progress: whether to show a progress bar on stderr, which needs tqdm.

    Returns:
        The integers of each row: int64 ``[rows, num_numbers]``.

    Raises:
        SettingError: the dataset has no rows or no length.
        Exception: any error of reading or measuring a row.
    """
    num_rows = count_rows(dataset)
    rows = _Rows(dataset, measure)
    # Reading a row may draw random numbers, and a run must not depend on a hit of the cache.
    with RandomState(torch.device("cpu")):
        cached = None
        if cache_file is not None and reads_cache:
            cached = _read_cache(cache_file, num_rows, num_numbers)
        if cached is not None:
            # Measure a few evenly spaced rows and the longest again: the data may have changed.
            spaced = torch.linspace(0, num_rows - 1, RECHECKED_ROWS - 1, dtype=torch.float64)
            rechecked = sorted({*spaced.long().tolist(), int(cached[:, 0].argmax())})
            changed = [row for row in rechecked if [*rows[row]] != cached[row].tolist()]
            if not changed:
                return cached
            logger.warning(
                "%s: row %d has changed; measuring all rows again", cache_file, changed[0]
            )
        measured: Iterable[Numbers] = _measure_all(rows, num_rows)
        if show_progress:
            measured = _with_progress(measured, num_rows)
        numbers = torch.tensor([*measured], dtype=torch.int64)
    if cache_file is not None:
        content = numbers.numpy().tobytes()
        try:
            atomic_write(cache_file, _checksum(cache_file, content) + content, sync=True)
        except OSError as error:
            logger.warning(
                "%s cannot be written (%s); the rows will be counted again next time",
                cache_file,
                error,
            )
    return numbers


def longest_rows(lengths: torch.Tensor, count: int) -> list[int]:
    """Choose the longest rows.

    Args:
        lengths: int tensor ``[rows]``, tokens of each row.
        count: how many, 1 to the number of rows.

    Returns:
        `count` row numbers, longest first; of rows equally long, the one that comes first in the
        dataset.
    """
    assert 1 <= count <= len(lengths)
    order: list[int] = torch.sort(lengths, descending=True, stable=True).indices[:count].tolist()
    return order


def largest_rows(lengths: torch.Tensor, other_bytes: torch.Tensor) -> list[int]:
    """Return the numbers of all rows, those first whose tensors have most bytes: rows of text alone
    as :func:`longest_rows` has them.

    Args:
        lengths: int tensor ``[rows]``, tokens of each row.
        other_bytes: int tensor ``[rows]``, see :func:`count_other_bytes`.
    """
    return longest_rows(lengths * _BYTES_PER_TOKEN + other_bytes, len(lengths))


def count_other_bytes(row: Any) -> int:
    """Return the bytes of the tensors, arrays and lists of a row that do not hold tokens: those of
    floating-point numbers, of several dimensions or of uint8, such as images.
    """
    if hasattr(row, "nbytes") and hasattr(row, "dtype"):
        is_text = row.ndim < 2 and "float" not in str(row.dtype) and "uint8" not in str(row.dtype)
        return 0 if is_text else int(row.nbytes)
    if isinstance(row, Mapping):
        return sum(map(count_other_bytes, row.values()))
    if isinstance(row, list | tuple) and row:
        first = row[0]
        # One number stands for all numbers of a list, which may be long.
        if isinstance(first, float) or getattr(first, "ndim", None) == 0:
            is_float = "float" in str(getattr(first, "dtype", "float"))
            # Collate functions turn a list of floats into float32.
            return 4 * len(row) * is_float
        if not isinstance(first, int | str):
            return sum(map(count_other_bytes, row))
    # Tokens or text in a list, or a value without a size.
    return 0


def mean_rows(num_tokens: int, lengths: torch.Tensor) -> int:
    """Return the number of rows that have `num_tokens` tokens on average, at least 1.

    Args:
        num_tokens: tokens of a step.
        lengths: tokens of each row of the dataset.
    """
    return max(1, int(num_tokens / lengths.double().mean()))


class _Rows(Dataset[Numbers]):
    """Measurements of each row."""

    def __init__(self, dataset: Any, measure: Measure) -> None:
        self._dataset = dataset
        self._measure = measure

    def __getitem__(self, row: int) -> Numbers:
        return self._measure(row, self._dataset[row])


def _measure_all(rows: _Rows, num_rows: int) -> Iterator[Numbers]:
    """Yield the numbers of each row in order: those of the first rows from this process, then from
    worker processes if they help, and if they fail, from this process again.
    """
    start = time.monotonic()
    row = 0
    # Read at least one row here even if workers read the rest: they inherit what the dataset opens
    # lazily.
    while row < num_rows and (row == 0 or time.monotonic() - start < TIMED_SECONDS):
        yield rows[row]
        row += 1
    seconds_per_row = (time.monotonic() - start) / row
    rows_left = num_rows - row
    num_workers = _worthwhile_workers(seconds_per_row * rows_left)
    if num_workers > 0 and rows_left:
        # At least four chunks for each worker, so that all end at nearly the same time.
        chunk_rows = min(
            math.ceil(rows_left / (4 * num_workers)),
            int(CHUNK_SECONDS / max(seconds_per_row, 1e-9)),
        )
        try:
            # The processes are forked, so that the dataset is not pickled. The loader has a
            # generator, as it would otherwise draw its base seed from torch's global one.
            chunks = DataLoader(
                rows,
                batch_size=max(1, chunk_rows),
                sampler=range(row, num_rows),
                collate_fn=list,
                num_workers=num_workers,
                multiprocessing_context="fork",
                timeout=STALLED_SECONDS,
                generator=torch.Generator(),
            )
            for chunk in chunks:
                yield from chunk
                row += len(chunk)
        except Exception as error:
            # If a row cannot be read, it raises its own error below.
            message = "worker processes failed (%s); counting the rows from %d on in this process"
            # A worker's error begins with its traceback.
            *_, reason = str(error).strip().split("\n")
            logger.warning(message, reason, row)
    for number in range(row, num_rows):
        yield rows[number]


def _worthwhile_workers(seconds_left: float) -> int:
    """Return the number of worker processes for work that takes `seconds_left` in this process."""
    # macOS has fork, but its system libraries may crash in the child:
    # https://bugs.python.org/issue33725
    is_safe = sys.platform != "darwin" and "fork" in multiprocessing.get_all_start_methods()
    if not is_safe or seconds_left <= WORTHWHILE_SECONDS:
        return 0
    num_cpus = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        num_cpus = len(os.sched_getaffinity(0))
    # One worker would not be faster than this process.
    if num_cpus == 1:
        return 0
    return min(num_cpus, MAX_WORKERS)


def _with_progress(measured: Iterable[Numbers], num_rows: int) -> Iterator[Numbers]:
    with ProgressBar(num_rows, "rows", "counting tokens") as bar:
        for numbers in measured:
            yield numbers
            bar.advance()


def _checksum(path: Path, content: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + content).digest()


def _read_cache(path: Path, num_rows: int, num_numbers: int) -> torch.Tensor | None:
    """Read a cache file; None if it cannot be read or, after a log line, cannot be trusted."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    content = data[_CHECKSUM_BYTES:]
    is_intact = data[:_CHECKSUM_BYTES] == _checksum(path, content)
    # The numbers are int64: 8 bytes each.
    if is_intact and len(content) == 8 * num_rows * num_numbers:
        return torch.frombuffer(bytearray(content), dtype=torch.int64).view(num_rows, num_numbers)
    logger.warning("%s is truncated or not of these %d rows; counting them again", path, num_rows)
    return None
