"""Split a batch by a function of the script, by the documents of packed rows, or by rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from adaptive_batch._util import count
from adaptive_batch.data import IGNORE_INDEX
from adaptive_batch.errors import SettingError

from .parts import (
    SPLIT_REMEDY,
    BatchSource,
    RowsOfBatch,
    SplitBatch,
    copy_containers,
    is_array,
    is_table,
    like_mapping,
)

_TOKENS = ("input_ids", "tokens")
_POSITIONS = ("position_ids", "positions")
# Prefix of the keys for document ends and for the length of the longest document.
_ENDS = "cu_seq"
_LONGEST = ("max_length", "max_seqlen")
# Keys whose values may have one entry per token, `[rows, columns]`.
_OF_TOKENS = (*_TOKENS, *_POSITIONS, "labels", "seq_idx", "attention_mask")


class CustomSplit:
    """Calls a script's own split function and checks its results.

    Args:
        split: function that returns the :class:`SplitBatch` of a batch.
    """

    def __init__(self, split: Callable[[Any], Any]) -> None:
        self._split = split

    def __call__(self, batch: Any) -> SplitBatch:
        """Return the split of a batch, which raises a SettingError if the part of all rows does not
        have all rows.

        Raises:
            SettingError: the function did not return a SplitBatch.
        """
        rows = self._split(batch)
        if not isinstance(rows, SplitBatch):
            remedy = "give a function that returns SplitBatch(num_rows, part)"
            raise SettingError("split", type(rows).__name__, remedy)

        def checked_part(numbers: Sequence[int]) -> Any:
            some_rows = rows.part(list(numbers))
            # A batch in a single part, and the check before the first split, need all rows.
            if len(numbers) == rows.num_rows:
                self._check_all_rows(some_rows, batch, rows.num_rows)
            return some_rows

        return replace(rows, part=checked_part)

    split_sample = __call__

    def _check_all_rows(self, all_rows: Any, batch: Any, num_rows: int) -> None:
        """Raise if a tensor in the part of all rows has more or fewer rows than in the batch."""
        pairs = {"a tensor": (batch, all_rows)}
        if isinstance(all_rows, Mapping) and isinstance(batch, Mapping):
            pairs = {key: (batch[key], all_rows[key]) for key in all_rows.keys() & batch.keys()}
        for key, (in_batch, in_part) in pairs.items():
            if not (_may_have_rows(in_batch, num_rows) and _may_have_rows(in_part, num_rows)):
                continue
            if len(in_batch) != len(in_part):
                split = f"SplitBatch of {count(num_rows, 'row')}"
                remedy = (
                    f"in the part of all rows, {key} has {len(in_part)} rows, but in the batch"
                    f" {len(in_batch)}; num_rows and part must cover the whole batch"
                )
                raise SettingError("split", split, remedy)


def _may_have_rows(value: Any, num_rows: int) -> bool:
    """Return whether the first dimension of a value may be the rows, and its second is not."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return False
    return value.shape[1:2] != (num_rows,)


class RowSplitter:
    """Splits packed batches between documents, and other batches between rows.

    The first batch with several rows decides which keys are divided.

    Args:
        trims: whether unused columns are cut.
        keeps_rows: whether several packed rows are divided by rows, and not by documents.
    """

    def __init__(self, *, trims: bool, keeps_rows: bool = False) -> None:
        self._trims = trims
        self._keeps_rows = keeps_rows
        self._is_divided: dict[str, bool] = {}

    def __call__(self, batch: Any) -> RowsOfBatch | DocumentsOfBatch:
        """Return a batch as rows, and divide the same keys in later batches.

        Raises:
            SettingError: the number of rows is unknown.
        """
        rows = self.split_sample(batch, self._is_divided)
        # In a batch of one row, a first dimension of 1 does not show that a tensor has rows.
        if type(rows) is RowsOfBatch and rows.num_rows > 1:
            self._is_divided = rows.is_divided
        return rows

    def split_sample(
        self, batch: Any, is_divided: Mapping[str, bool] | None = None
    ) -> RowsOfBatch | DocumentsOfBatch:
        """Return a sample of a search as rows, which does not decide on keys of later batches."""
        documents = documents_of(batch)
        if documents is None or (self._keeps_rows and documents.num_packed_rows > 1):
            return RowsOfBatch(batch, trims=self._trims, is_divided=is_divided or {})
        return documents


class DocumentsOfBatch(BatchSource):
    """A packed batch, whose parts have whole documents, one after the other in one row.

    Tensors of tokens are divided: ``[rows, columns, ...]``, ``[..., rows, columns]`` and, without a
    dimension of rows, ``[columns, ...]``; a mask ``[1, heads, columns, columns]`` in both
    dimensions. The ends of documents (``cu_seq...``), the length of the longest
    (``max_length...``, ``max_seqlen...``) and the numbers of documents (``seq_idx``, or a mask with
    numbers above 1) are computed again. Positions do not change, since they restart in each
    document. Tensors, arrays and lists with one entry per document are divided; numbers and text
    are copied. Tokens after the last document of a row are in no part.

    Args:
        batch: tokens and other values by name.
        spans: start and end of each document in the flattened tokens of all rows.
        num_rows: packed rows of the batch.
        problem: reason why the documents cannot be separated; empty if they can.

    Attributes:
        num_rows: number of documents.
        num_packed_rows: number of rows that contain them.
        lengths: number of tokens of each document.
        width: number of tokens of all rows, padding included.
    """

    noun = "document"
    is_packed = True
    knows_lengths = True

    def __init__(
        self,
        batch: Mapping[str, Any],
        spans: Sequence[tuple[int, int]],
        num_rows: int,
        problem: str,
    ) -> None:
        self._batch = batch
        self._spans = spans
        self._tokens = _tokens_of(batch)
        self.num_packed_rows = num_rows
        self._shape = (num_rows, self._tokens.shape[-1])
        self.num_rows = len(spans)
        self._problem = problem

    @cached_property
    def lengths(self) -> list[int]:
        return [end - begin for begin, end in self._spans]

    @property
    def width(self) -> int:
        return int(self._tokens.numel())

    @property
    def treatment(self) -> str:
        rows, columns = self._shape
        documents = count(self.num_rows, "document")
        return f"{documents} packed into {count(rows, 'row')} of {columns} tokens"

    def part(self, rows: Sequence[int], /) -> Any:
        """Return the batch of some documents; the script's own tensors if these are all.

        Raises:
            SettingError: a value has neither one entry per token nor one per document, or the
                first label of a document would be lost.
        """
        documents = rows
        if len(documents) == self.num_rows:
            return copy_containers(self._batch)
        problem = self._problem or self._lost_labels()
        if problem:
            raise SettingError("batch", self.treatment, f"{problem}; {SPLIT_REMEDY}")
        values = {
            key: self._part_of_value(str(key), value, documents)
            for key, value in self._batch.items()
        }
        return like_mapping(self._batch, values)

    def dummy(self) -> Any:
        """Return the document with the most labels: the mean loss of no label is NaN."""
        labels = self._batch.get("labels")
        document = 0
        if isinstance(labels, torch.Tensor) and labels.numel() == self.width:
            is_label = labels.flatten() != IGNORE_INDEX
            counts = [is_label[begin:end].count_nonzero() for begin, end in self._spans]
            document = int(torch.stack(counts).argmax())
        return self.part([document])

    @cached_property
    def _unshifted_labels(self) -> torch.Tensor | None:
        """Labels that the model will shift, since they equal the tokens; None if they differ."""
        labels = self._batch.get("labels")
        if not is_table(labels) or labels.shape != self._tokens.shape:
            return None
        is_label = labels != IGNORE_INDEX
        equal_tokens = bool((labels == self._tokens)[is_label].all())
        return labels if equal_tokens else None

    def _lost_labels(self) -> str:
        """Return the problem if a split would lose labels; empty if not.

        In the batch, the last token of a document predicts the first label of the next document. In
        a part, no token may predict it.
        """
        labels = self._unshifted_labels
        if labels is None:
            return ""
        # The first token of a row is never predicted.
        _, columns = self._shape
        begins = [begin for begin, _ in self._spans if begin % columns != 0]
        if bool((labels.flatten()[begins] == IGNORE_INDEX).all()):
            return ""
        return (
            "the last token of a document predicts the first token of the next one; give first"
            " tokens the label -100"
        )

    def _part_of_value(self, key: str, value: Any, documents: Sequence[int]) -> Any:
        """Return the part of a value that belongs to some documents."""
        lengths = [self.lengths[number] for number in documents]
        is_tensor = isinstance(value, torch.Tensor)
        if key.startswith(_LONGEST):
            longest = max(lengths)
            return torch.full_like(value, longest) if is_tensor else longest
        if key.startswith(_ENDS):
            ends = torch.tensor([0, *lengths]).cumsum(0)
            if not is_tensor:
                return type(value)(ends.tolist())
            # Keep the number of dimensions: [documents + 1] or [1, documents + 1].
            leading_ones = [1] * (value.dim() - 1)
            return ends.to(value).reshape(*leading_ones, -1)
        entries = self._entries_of_tokens(key, value, documents) if is_tensor else None
        if entries is not None:
            is_numbered_mask = key == "attention_mask" and _has_numbers(value)
            if not is_numbered_mask and key != "seq_idx":
                return entries
            # Number the documents of the part: from 0, and in a mask from 1, where 0 is padding.
            numbers = torch.repeat_interleave(torch.tensor(lengths))
            numbers = numbers.to(value).reshape(entries.shape)
            return torch.where(entries == 0, 0, numbers + 1) if is_numbered_mask else numbers
        if isinstance(value, list | tuple) and len(value) == self.num_rows:
            return type(value)(value[number] for number in documents)
        if is_array(value) and value.ndim and len(value) == self.num_rows:
            return value[list(documents)]
        is_scalar = not getattr(value, "ndim", 1)
        if value is None or isinstance(value, int | float | str) or is_scalar:
            return value
        size = f"its size is neither {self.num_rows} documents nor {self.width} tokens"
        raise SettingError("batch", key, f"{self.treatment}, and {size}; {SPLIT_REMEDY}")

    def _entries_of_tokens(
        self, key: str, value: torch.Tensor, documents: Sequence[int]
    ) -> torch.Tensor | None:
        """Return the entries for the tokens of some documents in one row; None if the tensor has
        no tokens.
        """
        rows, columns = self._shape
        shape = value.shape
        if rows == 1 and "mask" in key and shape[-2:] == (columns, columns):
            of_queries = self._along(-2, value, documents)
            return self._along(-1, of_queries, documents)
        if rows > 1 and value is self._unshifted_labels:
            # In a part, the first token of a row may follow another document.
            value = value.clone()
            value[:, 0] = IGNORE_INDEX
        if shape[:2] == (rows, columns):
            # [rows, columns, ...] becomes [1, rows * columns, ...].
            return self._along(1, value.flatten(0, 1)[None], documents)
        if rows == 1 and (shape == (columns,) or shape[:1] == self._tokens.shape):
            return self._along(0, value, documents)
        if shape[-2:] == (rows, columns):
            # [..., rows, columns] becomes [..., 1, rows * columns].
            return self._along(-1, value.flatten(-2)[..., None, :], documents)
        return None

    def _along(self, axis: int, value: torch.Tensor, documents: Sequence[int]) -> torch.Tensor:
        """Return the entries of some documents along an axis."""
        spans = [self._spans[number] for number in documents]
        are_adjacent = all(end == next_begin for (_, end), (next_begin, _) in pairwise(spans))
        if are_adjacent:
            # A view of all of them takes no memory.
            begin, end = spans[0][0], spans[-1][1]
            return value.narrow(axis, begin, end - begin)
        return torch.cat([value.narrow(axis, begin, end - begin) for begin, end in spans], axis)


class TokensWithoutEnds(RowsOfBatch):
    """Tokens and labels of one dimension, which may be documents with unknown ends."""

    num_packed_rows = 1

    def part(self, rows: Sequence[int], /) -> Any:
        """Return the whole batch.

        Raises:
            SettingError: `rows` are not all rows.
        """
        if len(rows) < self.num_rows:
            remedy = f"nothing shows where documents end; give positions, or {SPLIT_REMEDY}"
            raise SettingError("batch", f"tokens and labels of [{self.num_rows}]", remedy)
        return super().part(rows)


def documents_of(batch: Any) -> DocumentsOfBatch | TokensWithoutEnds | None:
    """Return a packed batch as documents; None if the batch is divided by rows.

    The ends of documents are read from the first of these values that the batch has: keys that
    begin with ``cu_seq``; ``seq_idx``, the number of each token's document; ``position_ids`` or
    ``positions``, which restart at each document; in a single row, an ``attention_mask`` with
    numbers above 1, the numbers of documents. With positions or a mask, padding at the end belongs
    to the last document. With positions, a document of one token belongs to the one before.

    Several rows are divided into documents only if the batch has labels and its other values are
    known. With an unknown value, documents of two rows might attend to each other in one row.
    """
    tokens = _tokens_of(batch) if isinstance(batch, Mapping) else None
    if not isinstance(tokens, torch.Tensor) or tokens.is_nested or tokens.dim() not in (1, 2):
        return None
    num_rows, columns = tokens.shape if tokens.dim() == 2 else (1, len(tokens))
    ends_of_rows: list[list[int]] = []
    problem = ""
    if tokens.numel():
        ends_of_rows, problem = _ends_in(batch, num_rows, columns)
    num_documents = sum(map(len, ends_of_rows))
    if num_documents > num_rows:
        if num_rows > 1 and not _has_only_documents(batch, num_rows, columns):
            return None
        # Each document begins where the one before it ends.
        spans = [
            (row * columns + begin, row * columns + end)
            for row, ends in enumerate(ends_of_rows)
            for begin, end in pairwise([0, *ends])
        ]
        return DocumentsOfBatch(batch, spans, num_rows, problem)
    labels: Any = batch.get("labels")
    has_labels = isinstance(labels, torch.Tensor) and labels.shape == tokens.shape
    if not ends_of_rows and tokens.dim() == 1 and has_labels and not labels.is_floating_point():
        return TokensWithoutEnds(batch)
    return None


def _has_only_documents(batch: Mapping[str, Any], num_rows: int, columns: int) -> bool:
    """Return whether the batch has labels, and all its values are those of tokens or documents."""
    if "labels" not in batch:
        return False
    for key, value in batch.items():
        is_of_documents = str(key).startswith((_ENDS, *_LONGEST))
        has_shape = getattr(value, "shape", None) == (num_rows, columns)
        is_of_tokens = key in _OF_TOKENS and has_shape
        if not (is_of_documents or is_of_tokens):
            return False
    return True


def _tokens_of(batch: Mapping[str, Any]) -> Any:
    return batch.get("input_ids", batch.get("tokens"))


def _has_numbers(mask: torch.Tensor) -> bool:
    """Return whether a mask numbers documents, from 1."""
    return not mask.is_floating_point() and mask.dim() == 2 and int(mask.max()) > 1


def _ends_in(batch: Mapping[str, Any], num_rows: int, columns: int) -> tuple[list[list[int]], str]:
    """Return the ends of the documents of each row, empty if unknown, and the reason why the
    documents cannot be separated, empty if they can.
    """
    ends_by_key: list[list[list[int]]] = []
    for key, value in batch.items():
        if str(key).startswith(_ENDS) and (isinstance(value, list) or is_array(value)):
            try:
                numbers = torch.as_tensor(value)
            except (TypeError, ValueError):
                # Lists of different lengths, one per row.
                return [], ""
            if num_rows > 1 and numbers.shape[:-1] != (num_rows,):
                return [], ""
            # The numbers begin with 0. At the end, the last one may be repeated as padding;
            # Automodel pads with a negative number.
            ends_by_key.append(
                [
                    [end for end in dict.fromkeys(row) if end > 0]
                    for row in numbers.reshape(num_rows, -1).tolist()
                ]
            )
    if ends_by_key:
        return ends_by_key[0], _problem_of_ends(ends_by_key, batch, num_rows, columns)
    begins = _begins_in(batch, num_rows, columns)
    if begins is None:
        return [], ""
    # A document ends where the next one begins, and the last one at the end of the row.
    ends_of_rows: list[list[int]] = [[] for _ in range(num_rows)]
    for row, column in begins.nonzero().tolist():
        ends_of_rows[row].append(column)
    for ends in ends_of_rows:
        ends.append(columns)
    return ends_of_rows, ""


def _problem_of_ends(
    ends_by_key: Sequence[Sequence[list[int]]],
    batch: Mapping[str, Any],
    num_rows: int,
    columns: int,
) -> str:
    """Return the reason why documents with these ends cannot be separated; empty if they can.

    Args:
        ends_by_key: ends in each row, for each key that has them.
        batch: tokens and other values by name.
        num_rows: rows of the batch.
        columns: tokens of a row.
    """
    labels = _table(batch, "labels", num_rows, columns)
    for row, ends in enumerate(ends_by_key[0]):
        if any(of_key[row] != ends for of_key in ends_by_key):
            return f"keys that begin with {_ENDS} show different documents"
        last_end = ends[-1] if ends else 0
        if ends != sorted(ends) or last_end > columns:
            return f"ends {ends} do not ascend to {columns} tokens"
        if labels is not None and ends and bool((labels[row, last_end:] != IGNORE_INDEX).any()):
            return "there are labels after the last document"
    return ""


def _begins_in(batch: Mapping[str, Any], num_rows: int, columns: int) -> torch.Tensor | None:
    """Return a bool tensor `[rows, columns]`, true at the first token of each document except the
    first of a row; None if the batch does not show it.
    """
    numbers = _table(batch, "seq_idx", num_rows, columns)
    if numbers is not None:
        return _changes(numbers)
    mask = _table(batch, "attention_mask", num_rows, columns)
    if num_rows > 1 and mask is not None and not _has_numbers(mask):
        # With a mask of padding only, the documents of a row attend to each other.
        return None
    begins = None
    position_tables = [_table(batch, key, num_rows, columns) for key in _POSITIONS]
    positions = next((table for table in position_tables if table is not None), None)
    if positions is not None:
        first = positions[:, :1]
        if num_rows > 1 and bool((first != positions.min()).any()):
            # A row continues a document of the row before. In a part, it might follow another
            # document.
            return None
        # A document begins where positions restart and then count up: padding may repeat the first
        # position.
        is_begin = (positions[:, :-1] == first) & (positions[:, 1:] == first + 1)
        is_first_of_row = is_begin.cumsum(1) <= 1
        begins = functional.pad(is_begin & ~is_first_of_row, (0, 1))
        if bool(begins.any()):
            return begins
    if num_rows == 1 and mask is not None and _has_numbers(mask):
        return _changes(mask)
    return begins


def _table(batch: Mapping[str, Any], key: str, num_rows: int, columns: int) -> torch.Tensor | None:
    """Return a value with one integer per token as `[rows, columns]`; None for other values."""
    value: Any = batch.get(key)
    if not isinstance(value, torch.Tensor) or value.numel() != num_rows * columns:
        return None
    return None if value.is_floating_point() else value.reshape(num_rows, columns)


def _changes(numbers: torch.Tensor) -> torch.Tensor:
    """Return a bool tensor, true where the number of the document changes. In a mask, 0 is padding
    after the last document.
    """
    is_other_number = numbers[:, 1:] != numbers[:, :-1]
    changes = is_other_number & (numbers[:, 1:] != 0)
    # The first token of a row changes nothing.
    return functional.pad(changes, (1, 0))
