"""Rows and losses of the user's code: lengths, rows read ahead, and checks of results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import index
from typing import Any

import torch
from torch.utils.data import Dataset

from adaptive_batch import distributed
from adaptive_batch._random import RandomState
from adaptive_batch._util import check_whole
from adaptive_batch.errors import SettingError

from .lengths import count_other_bytes, count_rows, longest_rows, measure_rows

# Label that torch's cross-entropy and Hugging Face's models ignore.
IGNORE_INDEX = -100

RowLength = Callable[[Any], int] | int | None

# Datasets of training and validation may share a file, so only one row is read at a time.
_reading = threading.Lock()


class DatasetAdapter(Dataset[Any]):
    """A map-style dataset whose rows may be anything.

    Args:
        dataset: with a length.
        row_length: tokens of a row, or a number where all rows are alike; None for those of its
            ``tokens`` or ``input_ids``.

    Raises:
        SettingError: it has no rows.
    """

    def __init__(self, dataset: Any, row_length: RowLength = None) -> None:
        count_rows(dataset)
        if row_length is not None and not callable(row_length):
            check_whole(
                "row_length",
                row_length,
                remedy="give a function of a row, a whole number, 1 or more, or None",
            )
        self._dataset = dataset
        self._row_length = row_length

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> Any:
        try:
            return self._dataset[number]
        except StopIteration as error:
            # Otherwise the error would end the loop over the loader, and the epoch, in silence.
            raise RuntimeError(f"row {number} of the dataset raised StopIteration") from error

    @property
    def real_lengths(self) -> torch.Tensor:
        """Tokens of each row without padding: all tokens, as no row is padded."""
        return self.lengths

    def recount(self) -> str:
        """Return "": lengths are measured once."""
        return ""

    def num_real_tokens(self, row: Any) -> int:
        """Return the tokens of a row without padding: all tokens."""
        return self.length(row)

    def length(self, row: Any) -> int:
        """Return the tokens of a row.

        Raises:
            SettingError: `row_length` returned no number of tokens.
        """
        if isinstance(self._row_length, int):
            return self._row_length
        tokens = (self._row_length or _tokens)(row)
        try:
            length = index(tokens)
        except TypeError:
            length = -1
        if length < 0:
            remedy = "give a function that returns the tokens of a row: a whole number, 0 or more"
            raise SettingError("row_length", tokens, remedy)
        # An empty row counts as one token: limits of tokens need rows of 1 or more.
        return max(1, length)

    @property
    def are_alike(self) -> bool:
        """Return whether all rows have one length, so that none is read to measure it."""
        return isinstance(self._row_length, int)

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each row: int64, `[rows]`."""
        return self._measured[:, 0]

    @property
    def other_bytes(self) -> torch.Tensor:
        """Bytes of each row besides its text, see :func:`.count_other_bytes`: int64, `[rows]`."""
        return self._measured[:, 1]

    @cached_property
    def _measured(self) -> torch.Tensor:
        """Length and other bytes of each row, measured once, by rank zero."""
        if isinstance(self._row_length, int):
            return torch.tensor([[self._row_length, 0]]).repeat(len(self), 1)
        return distributed.from_rank_zero(
            lambda: measure_rows(
                self,
                lambda _, row: (self.length(row), count_other_bytes(row)),
                num_numbers=2,
                show_progress=False,
            )
        )

    def longest(self, count: int) -> list[Any]:
        """Return the `count` longest rows."""
        return [self[number] for number in longest_rows(self.lengths, count)]


class ReadAhead:
    """A map-style dataset whose next rows a thread reads while the device is busy.

    A worker process of a DataLoader would hide the time of tokenizing too, but would draw other
    random numbers and lose the types of errors.

    Expected rows are only a hint: a row that the thread has not read is read on demand. A call for
    any row stops the thread after its current row, so only one row is read at a time. No row is
    read ahead after a row failed in the thread, nor if one of the first rows draws random numbers
    of Python, numpy or torch, whose order training depends on.

    Args:
        dataset: dataset whose rows do not depend on the thread or the order of reads.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        # Rows that the thread has read, by number.
        self._rows: dict[int, Any] = {}
        # Numbers of the rows that the thread reads, in order.
        self._expected: list[int] = []
        self._thread: threading.Thread | None = None
        # Number of further reads to watch for random draws before a row is read ahead. None after
        # a draw or a failure: no row is read ahead.
        self._reads_to_watch: int | None = 32

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> Any:
        self._stop()
        if number in self._rows:
            return self._rows.pop(number)
        with _reading:
            # All reads are watched (0), or rows are not read ahead anyway (None).
            if not self._reads_to_watch:
                return self._dataset[number]
            random_state = RandomState(torch.device("cpu"))
            row = self._dataset[number]
            self._reads_to_watch -= 1
            if random_state.changed():
                self._reads_to_watch = None
            return row

    def expect(self, numbers: Iterable[int]) -> None:
        """Set the rows that :meth:`start` reads ahead, in order, and drop all others."""
        self._stop()
        self._rows.clear()
        self._expected = list(numbers)

    def start(self) -> None:
        """Start the thread that reads the expected rows, unless it has been started."""
        if self._expected and self._thread is None and self._reads_to_watch == 0:
            self._thread = threading.Thread(target=self._read, name="adaptive_batch_read_ahead")
            self._thread.start()

    def _stop(self) -> None:
        """Wait until the thread has read its current row, and expect no further ones."""
        # This ends the thread's loop over the list.
        self._expected.clear()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _read(self) -> None:
        """Read the expected rows in the thread."""
        for number in self._expected:
            # The interpreter waits for this thread before it exits.
            if not threading.main_thread().is_alive():
                return
            try:
                with _reading:
                    self._rows[number] = self._dataset[number]
            except BaseException:
                # The row raises its error again where it is read on demand.
                self._reads_to_watch = None
                return


def check_loss(loss: Any) -> torch.Tensor:
    """Return the result of a user's `mean_loss` as a tensor without dimensions, of 32 bits or more:
    sums of 16-bit numbers over many micro-batches drift.

    Raises:
        SettingError: the loss is not a tensor of one number, or needs no gradient.
    """
    remedy = "return the mean over the labels alone, a tensor of one number"
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        returned = type(loss).__name__
        if isinstance(loss, torch.Tensor):
            returned = f"{loss.dtype} of {list(loss.shape)}"
        raise SettingError("mean_loss", returned, f"that is what it returned; {remedy}")
    if torch.is_grad_enabled() and not loss.requires_grad:
        problem = "its result depends on no parameter that needs gradients"
        remedy = "compute it without detach(), item() or no_grad(), of a model that trains"
        raise SettingError("mean_loss", float(loss), f"{problem}; {remedy}")
    single: torch.Tensor = loss
    if single.dim():
        single = single.reshape(())
    if single.dtype.itemsize < 4:
        single = single.float()
    return single


def move_to_device(value: Any, device: torch.device) -> Any:
    """Move objects with ``to`` to a device, also in mappings, lists and tuples; keep all others."""
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: move_to_device(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [move_to_device(item, device) for item in value]
        # A named tuple.
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    return value


def lengthened(
    rows: Sequence[dict[str, Any]],
    length: int,
    *,
    pad_id: int,
    ignore_index: int,
    fields: Sequence[tuple[str, str]] = (("tokens", "labels"),),
) -> Sequence[dict[str, Any]]:
    """Pad the longest of some rows to `length` tokens, so that collating pads all of them to it.

    Args:
        rows: rows as mappings of lists.
        length: tokens that the rows are padded to.
        pad_id: token that pads.
        ignore_index: label of padding.
        fields: keys of the tokens and the labels of each sequence of a row.
    """

    def row_length(number: int) -> int:
        return max(len(rows[number][tokens]) for tokens, _ in fields)

    longest = max(range(len(rows)), key=row_length)
    if row_length(longest) >= length:
        return rows
    padded = dict(rows[longest])
    for tokens, labels in fields:
        missing = length - len(padded[tokens])
        padded[tokens] = [*padded[tokens], *[pad_id] * missing]
        padded[labels] = [*padded[labels], *[ignore_index] * missing]
    return [*rows[:longest], padded, *rows[longest + 1 :]]


def _tokens(row: Any) -> int:
    for key in ("tokens", "input_ids"):
        if isinstance(row, Mapping) and key in row and getattr(row[key], "ndim", 1) == 1:
            return len(row[key])
    remedy = "give a function of a row, or 1 where all rows are alike"
    problem = f"a row is a {type(row).__name__} without `tokens` or `input_ids` of one dimension"
    raise SettingError("row_length", None, f"{problem}; {remedy}")
