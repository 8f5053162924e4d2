"""Packed batches, whose documents lie one after the other in rows, split between documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

import torch
from torch.nn import functional

from adaptive_batch._util import count
from adaptive_batch.data import IGNORE_INDEX
from adaptive_batch.errors import SettingError

from .parts import SPLIT_REMEDY, BatchSource, RowsOfBatch, copy_containers, is_array, like_mapping

_TOKENS = ("input_ids", "tokens")
_POSITIONS = ("position_ids", "positions")
# Begins the keys of where documents end, and of the number of tokens of the longest.
_ENDS = "cu_seq"
_LONGEST = ("max_length", "max_seqlen")


class DocumentsOfBatch(BatchSource):
    """A packed batch, whose parts have whole documents, one after the other in one row.

    Tensors of all tokens are divided, ``[rows, columns, ...]``, ``[..., rows, columns]`` or, of a
    batch without a dimension of rows, ``[columns, ...]``; masks of ``[rows, heads, columns,
    columns]`` along both. The ends of documents (``cu_seq...``), the length of the longest
    (``max_length...``, ``max_seqlen...``) and the numbers of documents (``seq_idx``, or a mask with
    numbers above 1) are those of the part. Positions stay, as they begin again in each document.
    Tensors, arrays and lists with an entry for each document are divided; numbers and text stay
    whole. Tokens after the last document of a row are in no part.

    Args:
        batch: tokens with other values by name.
        spans: where each document begins and ends, in tokens of all rows laid end to end.
        num_rows: packed rows of the batch.
        problem: why the batch cannot be split; empty where it can.

    Attributes:
        num_rows: documents of the batch.
        num_packed_rows: rows that they are packed into.
        lengths: tokens of each.
        width: tokens of all rows.
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
        self._lengths = [end - begin for begin, end in spans]
        self._problem = problem

    @property
    def lengths(self) -> Sequence[int]:
        return self._lengths

    @property
    def width(self) -> int:
        return int(self._tokens.numel())

    @property
    def treatment(self) -> str:
        rows, columns = self._shape
        documents = count(self.num_rows, "document")
        return f"{documents} packed into {count(rows, 'row')} of {columns} tokens"

    def part(self, rows: Sequence[int], /) -> Any:
        """Return the batch of some documents; the script's own tensors of all of them.

        Raises:
            SettingError: the size of a value is neither that of the tokens nor that of the
                documents, or the first label of a document would be lost.
        """
        if len(rows) == self.num_rows:
            return copy_containers(self._batch)
        problem = self._problem or self._lost_labels()
        if problem:
            raise SettingError("batch", self.treatment, f"{problem}; {SPLIT_REMEDY}")
        some = {
            key: self._of_documents(str(key), value, rows) for key, value in self._batch.items()
        }
        return like_mapping(self._batch, some)

    def can_divide(self) -> bool:
        """Return whether each value can be divided by documents, and documents of several rows stay
        apart in one row.
        """
        try:
            self.part([0])
        except SettingError:
            return False
        return not any(
            isinstance(value, torch.Tensor) and self._joins_documents(str(key), value)
            for key, value in self._batch.items()
        )

    def _joins_documents(self, key: str, value: torch.Tensor) -> bool:
        """Return whether documents of several rows may see each other by a value in one row."""
        rows, columns = self._shape
        begins = torch.tensor([begin for begin, _ in self._spans], device=value.device)
        if self._is_square_mask(key, value):
            hidden = _hidden_in(value)
            row, column = begins // columns, begins % columns
            if bool((value[row, ..., column, column] == hidden).any()):
                return True
            is_begin = torch.zeros(rows * columns, dtype=torch.int32, device=value.device)
            is_begin[begins] = 1
            numbers = is_begin.view(rows, columns).cumsum(1)
            return any(
                bool(((own != hidden) & (of_row[:, None] != of_row)).any())
                for own, of_row in zip(value, numbers, strict=True)
            )
        is_known = key in (*_TOKENS, *_POSITIONS, "labels", "seq_idx", "attention_mask")
        if is_known or value.shape != self._shape or value.is_floating_point():
            return False
        # Numbers of documents under another name begin again in each row, and each has one run.
        flat = value.flatten()
        inner = begins[begins % columns > 0]
        if not len(inner) or not bool((flat[inner] != flat[inner - 1]).all()):
            return False
        have_one_run = all(len(list(groupby(row))) == len(set(row)) for row in value.tolist())
        return have_one_run and len(set(flat[begins].tolist())) < self.num_rows

    def dummy(self) -> Any:
        """Return the document that has most labels, as the mean of none is no number."""
        labels = self._batch.get("labels")
        most = 0
        if isinstance(labels, torch.Tensor) and labels.numel() == self.width:
            is_label = labels.flatten() != IGNORE_INDEX
            counts = [is_label[begin:end].count_nonzero() for begin, end in self._spans]
            most = int(torch.stack(counts).argmax())
        return self.part([most])

    @cached_property
    def _shifted_labels(self) -> torch.Tensor | None:
        """Labels that are tokens, which the model shifts; None of others."""
        labels = self._batch.get("labels")
        if not isinstance(labels, torch.Tensor) or labels.dim() != 2:
            return None
        if labels.shape != self._tokens.shape:
            return None
        is_label = labels != IGNORE_INDEX
        return labels if bool((labels == self._tokens)[is_label].all()) else None

    def _lost_labels(self) -> str:
        """Return what is wrong where the first label of a document counts: the token before, of
        another document, predicts it in the batch, and none does in a part.
        """
        labels = self._shifted_labels
        # The first of a row has no token before it.
        begins = [begin for begin, _ in self._spans if begin % self._shape[1]]
        if labels is None or not bool((labels.flatten()[begins] != IGNORE_INDEX).any()):
            return ""
        return (
            "the first token of a document is a label of the document before it; give it the label"
            " -100"
        )

    def _of_documents(self, key: str, value: Any, documents: Sequence[int]) -> Any:
        """Return a value of some documents."""
        lengths = [self._lengths[number] for number in documents]
        is_tensor = isinstance(value, torch.Tensor)
        if key.startswith(_LONGEST):
            longest = max(lengths)
            return torch.full_like(value, longest) if is_tensor else longest
        if key.startswith(_ENDS):
            ends = torch.tensor([0, *lengths]).cumsum(0)
            if not is_tensor:
                return type(value)(ends.tolist())
            return ends.to(value).reshape(*[1] * (value.dim() - 1), -1)
        if is_tensor:
            tokens = self._tokens_in(key, value, documents)
            if tokens is not None:
                is_mask = key == "attention_mask" and _has_numbers(value)
                if key == "seq_idx" or is_mask:
                    counted = [torch.full([n], number) for number, n in enumerate(lengths)]
                    numbers = torch.cat(counted).to(value).reshape(tokens.shape)
                    # 0 in a mask is padding.
                    return torch.where(tokens == 0, 0, numbers + 1) if is_mask else numbers
                return tokens
        if isinstance(value, list | tuple) and len(value) == self.num_rows:
            return type(value)(value[number] for number in documents)
        if is_array(value) and value.ndim and len(value) == self.num_rows:
            return value[list(documents)]
        if value is None or isinstance(value, int | float | str) or not getattr(value, "ndim", 1):
            return value
        size = f"its size is neither {self.num_rows} documents nor {self.width} tokens"
        raise SettingError("batch", key, f"{self.treatment}, and {size}; {SPLIT_REMEDY}")

    def _tokens_in(
        self, key: str, value: torch.Tensor, documents: Sequence[int]
    ) -> torch.Tensor | None:
        """Return the tokens of some documents in a tensor; None where it has no dimension of
        tokens.
        """
        rows, columns = self._shape
        shape = value.shape
        if self._is_square_mask(key, value):
            if rows == 1:
                return self._along(-1, self._along(-2, value, documents), documents)
            return self._blocks(value, documents) if shape[:1] == (rows,) else None
        if rows > 1 and value is self._shifted_labels:
            # In a part the first token of a row may follow another document.
            value = value.clone()
            value[:, 0] = IGNORE_INDEX
        if shape[:2] == (rows, columns):
            return self._along(1, value.flatten(0, 1)[None], documents)
        if rows == 1 and (shape == (columns,) or shape[:1] == self._tokens.shape):
            return self._along(0, value, documents)
        if shape[-2:] == (rows, columns):
            return self._along(-1, value.flatten(-2)[..., None, :], documents)
        return None

    def _is_square_mask(self, key: str, value: torch.Tensor) -> bool:
        rows, columns = self._shape
        has_rows = rows == 1 or value.dim() > 2
        return "mask" in key and has_rows and value.shape[-2:] == (columns, columns)

    def _along(self, axis: int, value: torch.Tensor, documents: Sequence[int]) -> torch.Tensor:
        spans = [self._spans[number] for number in documents]
        # Documents that lie side by side are a view.
        if all(end == begin for (_, end), (begin, _) in pairwise(spans)):
            begin, end = spans[0][0], spans[-1][1]
            return value.narrow(axis, begin, end - begin)
        return torch.cat([value.narrow(axis, begin, end - begin) for begin, end in spans], axis)

    def _blocks(self, mask: torch.Tensor, documents: Sequence[int]) -> torch.Tensor:
        """Return the mask of documents from several rows, which see nothing of each other."""
        num_tokens = sum(self._lengths[number] for number in documents)
        blocks = mask.new_full((1, *mask.shape[1:-2], num_tokens, num_tokens), _hidden_in(mask))
        last = 0
        for number in documents:
            row, first = divmod(self._spans[number][0], self._shape[1])
            length = self._lengths[number]
            own = mask[row, ..., first : first + length, first : first + length]
            blocks[0, ..., last : last + length, last : last + length] = own
            last += length
        return blocks


class TokensWithoutEnds(RowsOfBatch):
    """Tokens and labels of one dimension, which may be one row whose documents nothing shows."""

    num_packed_rows = 1

    def part(self, rows: Sequence[int], /) -> Any:
        """Return the batch as it is.

        Raises:
            SettingError: it is to be split.
        """
        if len(rows) < self.num_rows:
            remedy = f"nothing shows where documents end; give positions, or {SPLIT_REMEDY}"
            raise SettingError("batch", f"tokens and labels of [{self.num_rows}]", remedy)
        return super().part(rows)


def documents_of(batch: Any) -> DocumentsOfBatch | TokensWithoutEnds | None:
    """Return a packed batch as documents; None of another batch.

    The first of these that the batch has shows where documents end: keys that begin with
    ``cu_seq``; ``seq_idx``, the number of each token's document; ``position_ids`` or ``positions``,
    which begin again as the first document of the row does; of a single row an ``attention_mask``
    with numbers above 1, those of documents. By positions and by a mask, padding at the end belongs
    to the last document, and by positions a document of one token to the one before it. Several
    rows are divided by rows without labels, with a value of another size, such as one for each row,
    or if documents may see each other, in their row or in one of several rows: beside positions a
    mask shows padding alone, a row begins with another position than the smallest, a mask of
    tokens x tokens does not hide each document from others, or other numbers of documents begin
    again in each row.
    """
    tokens = _tokens_of(batch) if isinstance(batch, Mapping) else None
    if not isinstance(tokens, torch.Tensor) or tokens.is_nested or tokens.dim() not in (1, 2):
        return None
    num_rows, columns = tokens.shape if tokens.dim() == 2 else (1, len(tokens))
    ends, problem = _ends_in(batch, num_rows, columns) if tokens.numel() else ([], "")
    mask: Any = batch.get("attention_mask")
    # Of rows with a mask of tokens x tokens nothing else shows their lengths.
    has_square_mask = num_rows > 1 and isinstance(mask, torch.Tensor) and mask.dim() == 4
    if ends and (has_square_mask or sum(map(len, ends)) > num_rows):
        spans = [
            (row * columns + begin, row * columns + end)
            for row, of_row in enumerate(ends)
            for begin, end in pairwise([0, *of_row])
        ]
        documents = DocumentsOfBatch(batch, spans, num_rows, problem)
        # Without labels the share of a part would be that of its documents.
        can_divide = "labels" in batch and documents.can_divide()
        return documents if num_rows == 1 or can_divide else None
    labels: Any = batch.get("labels")
    has_labels = isinstance(labels, torch.Tensor) and labels.shape == tokens.shape
    if not ends and tokens.dim() == 1 and has_labels and not labels.is_floating_point():
        return TokensWithoutEnds(batch)
    return None


def _tokens_of(batch: Mapping[str, Any]) -> Any:
    return next((batch[key] for key in _TOKENS if key in batch), None)


def _has_numbers(mask: torch.Tensor) -> bool:
    """Return whether a mask numbers documents, from 1."""
    return not mask.is_floating_point() and mask.dim() == 2 and int(mask.max()) > 1


def _hidden_in(mask: torch.Tensor) -> float:
    """Return the value of a mask where a token does not see another one."""
    least, most = mask.min().item(), mask.max().item()
    if mask.dtype == torch.bool or least < most:
        return least if least < most else 0
    # A mask that hides nothing multiplies by 1, or adds 0.
    return torch.finfo(mask.dtype).min if not most and mask.is_floating_point() else 0


def _ends_in(batch: Mapping[str, Any], num_rows: int, columns: int) -> tuple[list[list[int]], str]:
    """Return where documents end in each row, nothing where the batch does not show it; and why
    they cannot be divided.
    """
    found: list[list[list[int]]] = []
    for key, value in batch.items():
        if str(key).startswith(_ENDS) and (isinstance(value, list) or is_array(value)):
            try:
                numbers = torch.as_tensor(value)
            except (TypeError, ValueError):
                # A list for each row, which has as many as the row has documents.
                return [], ""
            if num_rows > 1 and numbers.shape[:-1] != (num_rows,):
                return [], ""
            # Some are filled up with a negative number.
            rows = numbers.reshape(num_rows, -1).tolist()
            found.append([[end for end in dict.fromkeys(row) if end > 0] for row in rows])
    labels = _table(batch, "labels", num_rows, columns)
    for row, ends in enumerate(found[0] if found else []):
        if any(others[row] != ends for others in found):
            return found[0], f"keys that begin with {_ENDS} show different documents"
        if ends != sorted(ends) or ends[-1:] > [columns]:
            return found[0], f"ends {ends} do not ascend to {columns} tokens"
        if labels is not None and ends and bool((labels[row, ends[-1] :] != IGNORE_INDEX).any()):
            return found[0], "there are labels after the last document"
    if found:
        return found[0], ""
    begins = _begins_in(batch, num_rows, columns)
    if begins is None:
        return [], ""
    ends_of_rows: list[list[int]] = [[] for _ in range(num_rows)]
    for row, column in begins.nonzero().tolist():
        ends_of_rows[row].append(column)
    return [[*ends, columns] for ends in ends_of_rows], ""


def _begins_in(batch: Mapping[str, Any], num_rows: int, columns: int) -> torch.Tensor | None:
    """Return where documents after the first of each row begin: bool, `[rows, columns]`; None where
    neither numbers nor positions of tokens show it.
    """
    numbers = _table(batch, "seq_idx", num_rows, columns)
    if numbers is not None:
        return _changes(numbers)
    mask = _table(batch, "attention_mask", num_rows, columns)
    if num_rows > 1 and mask is not None and not _has_numbers(mask):
        # By a mask of padding alone, documents of a row see each other.
        return None
    begins = None
    for positions in (_table(batch, key, num_rows, columns) for key in _POSITIONS):
        if positions is not None and begins is None:
            first = positions[:, :1]
            if num_rows > 1 and bool((first != positions.min()).any()):
                # A row goes on with a document, so that in a part it may follow another one.
                return None
            is_begin = (positions[:, :-1] == first) & (positions[:, 1:] == first + 1)
            begins = functional.pad(is_begin & (is_begin.cumsum(1) > 1), (0, 1))
    has_begins = begins is not None and bool(begins.any())
    if not has_begins and num_rows == 1 and mask is not None and _has_numbers(mask):
        return _changes(mask)
    return begins


def _table(batch: Mapping[str, Any], key: str, num_rows: int, columns: int) -> torch.Tensor | None:
    """Return a value of whole numbers, one for each token, as `[rows, columns]`; None of others."""
    value: Any = batch.get(key)
    if not isinstance(value, torch.Tensor) or value.numel() != num_rows * columns:
        return None
    return None if value.is_floating_point() else value.reshape(num_rows, columns)


def _changes(numbers: torch.Tensor) -> torch.Tensor:
    """Return where the numbers of documents change; 0 in a mask is padding, after the last
    document.
    """
    changes = (numbers[:, 1:] != numbers[:, :-1]) & (numbers[:, 1:] != 0)
    return functional.pad(changes, (1, 0))
