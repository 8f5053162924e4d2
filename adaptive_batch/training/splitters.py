"""Split a batch by a function of the script, by the documents of packed rows, or by rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

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

_POSITIONS = ("position_ids", "positions")
# Prefix of the keys for document ends and for the length of the longest document.
_ENDS = "cu_seq"
_LONGEST = ("max_length", "max_seqlen")


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
    is_tensor = isinstance(value, torch.Tensor) and value.dim() > 0
    return is_tensor and value.shape[1:2] != (num_rows,)


class RowSplitter:
    """Splits a packed row between documents, and other batches between rows.

    The first batch with several rows decides which keys are divided.

    Args:
        trims: whether unused columns are cut.
    """

    def __init__(self, *, trims: bool) -> None:
        self._trims = trims
        self._is_divided: dict[str, bool | None] = {}

    def __call__(self, batch: Any) -> RowsOfBatch | DocumentsOfBatch:
        """Return a batch as rows, and divide the same keys in later batches.

        Raises:
            SettingError: the number of rows is unknown.
        """
        # After batches of several packed rows, the last batch may have one: it stays a row.
        has_rows_of_tokens = self._is_divided.get("input_ids") or self._is_divided.get("tokens")
        documents = None if has_rows_of_tokens else documents_of(batch)
        if documents is not None:
            return documents
        rows = RowsOfBatch(batch, trims=self._trims, is_divided=self._is_divided)
        # In a batch of one row, a first dimension of 1 does not show that a tensor has rows.
        if rows.num_rows > 1:
            self._is_divided = rows.is_divided
        return rows

    def split_sample(self, batch: Any) -> RowsOfBatch | DocumentsOfBatch:
        """Return a sample of a search as rows, which does not decide on keys of later batches."""
        return documents_of(batch) or RowsOfBatch(batch, trims=self._trims)


class DocumentsOfBatch(BatchSource):
    """A packed row, whose parts have whole documents, one after the other in one row.

    Tensors of tokens are divided: ``[1, tokens, ...]``, ``[..., 1, tokens]`` and, without a
    dimension of rows, ``[tokens, ...]``; a mask ``[1, heads, tokens, tokens]`` in both dimensions.
    The ends of documents (``cu_seq...``), the length of the longest (``max_length...``,
    ``max_seqlen...``) and the numbers of documents (``seq_idx``, or a mask with numbers above 1)
    are computed again. Positions do not change, since they restart in each document. Tensors,
    arrays and lists with one entry per document are divided; numbers and text are copied. Tokens
    after the last document are in no part.

    Args:
        batch: tokens and other values by name.
        ends: end of each document in the tokens.
        problem: reason why the documents cannot be separated; empty if they can.

    Attributes:
        num_rows: number of documents.
        lengths: number of tokens of each document.
        width: number of tokens, padding included.
    """

    noun = "document"
    is_packed = True
    knows_lengths = True
    lengths: Sequence[int] = ()

    def __init__(self, batch: Mapping[str, Any], ends: Sequence[int], problem: str) -> None:
        self._batch = batch
        self._problem = problem
        self._tokens: torch.Tensor = batch.get("input_ids", batch.get("tokens"))
        self._begins = [0, *ends[:-1]]
        self.num_rows = len(ends)
        self.lengths = [end - begin for begin, end in zip(self._begins, ends, strict=True)]

    @property
    def width(self) -> int:
        return self._tokens.numel()

    @property
    def treatment(self) -> str:
        return f"{count(self.num_rows, 'document')} packed into 1 row of {self.width} tokens"

    def part(self, rows: Sequence[int], /) -> Any:
        """Return the batch of some documents; the script's own tensors if these are all.

        Raises:
            SettingError: a value has neither one entry per token nor one per document, or the
                first label of a document would be lost.
        """
        if len(rows) == self.num_rows:
            return copy_containers(self._batch)
        if self._problem:
            raise SettingError("batch", self.treatment, f"{self._problem}; {SPLIT_REMEDY}")
        self._check_first_labels()
        values = {
            key: self._part_of_value(str(key), value, rows) for key, value in self._batch.items()
        }
        return like_mapping(self._batch, values)

    def dummy(self) -> Any:
        """Return the document with the most labels: the mean loss of no label is NaN."""
        labels = self._batch.get("labels")
        document = 0
        if isinstance(labels, torch.Tensor) and labels.numel() == self.width:
            is_label = labels.flatten() != IGNORE_INDEX
            counts = [
                is_label[begin : begin + length].count_nonzero()
                for begin, length in zip(self._begins, self.lengths, strict=True)
            ]
            document = int(torch.stack(counts).argmax())
        return self.part([document])

    def _check_first_labels(self) -> None:
        """Raise if a split would lose labels: in the batch, the last token of a document predicts
        the first label of the next document. In a part, no token may predict it.

        Raises:
            SettingError: a first label would be lost.
        """
        labels = self._batch.get("labels")
        if not is_table(labels) or labels.shape != self._tokens.shape:
            return
        is_label = labels != IGNORE_INDEX
        if bool((labels != self._tokens)[is_label].any()):
            # The labels are shifted already.
            return
        # The first token of the row is never predicted.
        if bool(is_label[0, self._begins[1:]].any()):
            problem = (
                "the last token of a document predicts the first token of the next one; give first"
                " tokens the label -100"
            )
            raise SettingError("batch", self.treatment, f"{problem}; {SPLIT_REMEDY}")

    def _part_of_value(self, key: str, value: Any, documents: Sequence[int]) -> Any:
        """Return the part of a value that belongs to some documents."""
        lengths = [self.lengths[number] for number in documents]
        is_tensor = isinstance(value, torch.Tensor)
        if key.startswith(_LONGEST):
            longest = max(lengths)
            return torch.full_like(value, longest) if is_tensor else longest
        if key.startswith(_ENDS) and is_tensor:
            ends = torch.tensor([0, *lengths]).cumsum(0)
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
        has_items = isinstance(value, list | tuple) or (is_array(value) and value.ndim)
        if has_items and len(value) == self.num_rows:
            if isinstance(value, list | tuple):
                return type(value)(value[number] for number in documents)
            return value[list(documents)]
        if value is None or isinstance(value, int | float | str) or not getattr(value, "ndim", 1):
            return value
        size = f"its size is neither {self.num_rows} documents nor {self.width} tokens"
        raise SettingError("batch", key, f"{self.treatment}, and {size}; {SPLIT_REMEDY}")

    def _entries_of_tokens(
        self, key: str, value: torch.Tensor, documents: Sequence[int]
    ) -> torch.Tensor | None:
        """Return the entries for the tokens of some documents; None if the tensor has no tokens."""
        tokens = self.width
        shape = value.shape
        of_documents = [
            torch.arange(self._begins[number], self._begins[number] + self.lengths[number])
            for number in documents
        ]
        places = torch.cat(of_documents).to(value.device)
        if "mask" in key and shape[-2:] == (tokens, tokens):
            return value.index_select(-2, places).index_select(-1, places)
        if shape[:2] == (1, tokens):
            return value.index_select(1, places)
        if shape == (tokens,) or shape[:1] == self._tokens.shape:
            return value.index_select(0, places)
        if shape[-2:] == (1, tokens):
            return value.index_select(-1, places)
        return None


def documents_of(batch: Any) -> DocumentsOfBatch | None:
    """Return a packed row as documents; None if the batch is divided by rows.

    The ends of documents are read from the first of these values that the batch has: keys that
    begin with ``cu_seq``; ``seq_idx``, the number of each token's document; ``position_ids`` or
    ``positions``, which restart at each document; an ``attention_mask`` with numbers above 1, the
    numbers of documents. With positions or a mask, padding at the end belongs to the last document.
    With positions, a document of one token belongs to the one before.
    """
    if not isinstance(batch, Mapping):
        return None
    tokens: Any = batch.get("input_ids", batch.get("tokens"))
    if not isinstance(tokens, torch.Tensor) or tokens.is_nested or not tokens.numel():
        return None
    # A packed row has the shape [1, tokens] or [tokens].
    if tokens.dim() not in (1, 2) or tokens.shape[:-1] not in ((), (1,)):
        return None
    ends_by_key = _ends_in(batch)
    labels = _of_tokens(batch, "labels", tokens.numel())
    # Without a dimension of rows, each token would count as a row.
    is_flat = tokens.dim() == 1 and labels is not None
    if ends_by_key:
        ends = ends_by_key[0]
        problem = _problem_of_ends(ends_by_key, labels, tokens.numel())
        return DocumentsOfBatch(batch, ends, problem) if is_flat or len(ends) > 1 else None
    begins = _begins_in(batch, tokens.numel())
    if begins or (is_flat and begins is not None):
        return DocumentsOfBatch(batch, [*begins, tokens.numel()], "")
    if is_flat:
        problem = "without positions, a document may end at each token"
        return DocumentsOfBatch(batch, range(1, tokens.numel() + 1), problem)
    return None


def _ends_in(batch: Mapping[Any, Any]) -> list[list[int]]:
    """Return the ends of documents of each key that has them."""
    ends_by_key = []
    for key, value in batch.items():
        if str(key).startswith(_ENDS) and (is_array(value) or isinstance(value, list)):
            # A list shows the ends too, but cannot be divided.
            arrays = value if isinstance(value, list) else [value]
            numbers = [end for each in arrays for end in torch.as_tensor(each).flatten().tolist()]
            # The numbers begin with 0. At the end, the last one may be repeated as padding;
            # Automodel pads with a negative number.
            ends_by_key.append([end for end in dict.fromkeys(numbers) if end > 0])
    return [ends for ends in ends_by_key if ends]


def _problem_of_ends(
    ends_by_key: Sequence[list[int]], labels: torch.Tensor | None, num_tokens: int
) -> str:
    """Return the reason why documents with these ends cannot be separated; empty if they can.

    Args:
        ends_by_key: ends of the documents, for each key that has them.
        labels: label of each token; None without labels.
        num_tokens: tokens of the row.
    """
    ends = ends_by_key[0]
    if any(other_ends != ends for other_ends in ends_by_key):
        return f"keys that begin with {_ENDS} show different documents"
    if ends != sorted(ends) or ends[-1] > num_tokens:
        return f"ends {ends} do not ascend to {num_tokens} tokens"
    if labels is not None and bool((labels[ends[-1] :] != IGNORE_INDEX).any()):
        return "there are labels after the last document"
    return ""


def _begins_in(batch: Mapping[str, Any], num_tokens: int) -> list[int] | None:
    """Return the place of the first token of each document except the first one; None if the batch
    does not show it.
    """
    numbers = _of_tokens(batch, "seq_idx", num_tokens)
    if numbers is not None:
        return _changes(numbers)
    begins: list[int] | None = None
    for key in _POSITIONS:
        positions = _of_tokens(batch, key, num_tokens)
        if positions is not None:
            # A document begins where positions restart and then count up: padding may repeat the
            # first position.
            first = positions[0]
            is_begin = (positions[:-1] == first) & (positions[1:] == first + 1)
            begins = is_begin.nonzero().flatten().tolist()[1:]
            break
    mask = _of_tokens(batch, "attention_mask", num_tokens)
    if not begins and mask is not None and _has_numbers(mask):
        return _changes(mask)
    return begins


def _of_tokens(batch: Mapping[str, Any], key: str, num_tokens: int) -> torch.Tensor | None:
    """Return a value with one integer per token as `[tokens]`; None for other values."""
    value: Any = batch.get(key)
    if not isinstance(value, torch.Tensor) or value.numel() != num_tokens:
        return None
    return None if value.is_floating_point() else value.flatten()


def _has_numbers(mask: torch.Tensor) -> bool:
    """Return whether a mask numbers documents, from 1."""
    return not mask.is_floating_point() and int(mask.max()) > 1


def _changes(numbers: torch.Tensor) -> list[int]:
    """Return the places where the number of the document changes. In a mask, 0 is padding after the
    last document.
    """
    changes = (numbers[1:] != numbers[:-1]) & (numbers[1:] != 0)
    return [place + 1 for place in changes.nonzero().flatten().tolist()]
