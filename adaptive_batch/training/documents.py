"""A packed batch, whose documents lie one after the other in one row, split between documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

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
    """A packed batch, whose parts have whole documents.

    Tensors of all tokens are divided, ``[1, tokens, ...]``, ``[..., 1, tokens]`` or, of a batch
    without a dimension of rows, ``[tokens, ...]``; masks of ``[..., tokens, tokens]`` along both.
    The ends of documents (``cu_seq...``), the length of the longest (``max_length...``,
    ``max_seqlen...``) and the numbers of documents (``seq_idx``) are those of the part. Positions
    stay, as they begin again in each document. Tensors, arrays and lists with an entry for each
    document are divided; numbers and text stay whole. Tokens after the last document are in no
    part.

    Args:
        batch: tokens of one row, with other values by name.
        ends: where each document ends, in tokens.
        num_tokens: tokens of the row.
        problem: why the batch cannot be split; empty where it can.

    Attributes:
        num_rows: documents of the batch.
        lengths: tokens of each.
        width: tokens of the row.
    """

    is_packed = True
    knows_lengths = True

    def __init__(
        self, batch: Mapping[str, Any], ends: Sequence[int], num_tokens: int, problem: str = ""
    ) -> None:
        self._batch = batch
        self._bounds = list(pairwise([0, *ends]))
        self.num_rows = len(ends)
        self._lengths = [end - begin for begin, end in self._bounds]
        self._width = num_tokens
        self._problem = problem

    @property
    def lengths(self) -> Sequence[int]:
        return self._lengths

    @property
    def width(self) -> int:
        return self._width

    @property
    def treatment(self) -> str:
        return f"{count(self.num_rows, 'document')} of {self._width} tokens packed into one row"

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

    def dummy(self) -> Any:
        """Return the document that has most labels, as the mean of none is no number."""
        labels = self._batch.get("labels")
        most = 0
        if isinstance(labels, torch.Tensor) and labels.numel() == self._width:
            is_label = labels.flatten() != IGNORE_INDEX
            counts = [is_label[begin:end].count_nonzero() for begin, end in self._bounds]
            most = int(torch.stack(counts).argmax())
        return self.part([most])

    def _lost_labels(self) -> str:
        """Return what is wrong where labels are tokens that the model shifts, and those at the
        beginning of documents are not masked: the token before, of another document, predicts them
        in the batch, and none does in a part.
        """
        labels = self._batch.get("labels")
        tokens = next((self._batch[key] for key in _TOKENS if key in self._batch), None)
        if not isinstance(labels, torch.Tensor) or labels.dim() != 2:
            return ""
        if not isinstance(tokens, torch.Tensor) or labels.shape != tokens.shape:
            return ""
        is_label = labels != IGNORE_INDEX
        is_own = bool((labels == tokens)[is_label].all())
        begins = [begin for begin, _ in self._bounds[1:]]
        if is_own and bool(is_label[0, begins].any()):
            return (
                "the first token of a document is a label of the document before it; give it the"
                " label -100"
            )
        return ""

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
            return ends.to(value).reshape(*value.shape[:-1], -1)
        if key == "seq_idx":
            numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
            return numbers.to(value).reshape(*value.shape[:-1], -1)
        if is_tensor and (axes := self._axes_of_tokens(key, value)):
            for axis in axes:
                value = self._along(axis, value, documents)
            return value
        is_list = isinstance(value, list | tuple)
        if (is_list or (is_array(value) and value.ndim)) and len(value) == self.num_rows:
            if is_list:
                return type(value)(value[number] for number in documents)
            return value[list(documents)]
        if (
            value is None
            or isinstance(value, int | float | str)
            or (is_array(value) and not value.ndim)
        ):
            return value
        size = f"its size is neither {self.num_rows} documents nor {self._width} tokens"
        raise SettingError("batch", key, f"{self.treatment}, and {size}; {SPLIT_REMEDY}")

    def _axes_of_tokens(self, key: str, value: torch.Tensor) -> tuple[int, ...]:
        """Return the dimensions of tokens in a tensor; none where it has none."""
        shape = tuple(value.shape)
        tokens = self._width
        if "mask" in key and shape[-2:] == (tokens, tokens):
            return -2, -1
        if shape[:2] == (1, tokens):
            return (1,)
        if shape == (tokens,) or (self._is_flat and shape[:1] == (tokens,)):
            return (0,)
        return (-1,) if shape[-2:] == (1, tokens) else ()

    @property
    def _is_flat(self) -> bool:
        tokens = next((self._batch[key] for key in _TOKENS if key in self._batch), None)
        return isinstance(tokens, torch.Tensor) and tokens.dim() == 1

    def _along(self, axis: int, value: torch.Tensor, documents: Sequence[int]) -> torch.Tensor:
        first, last = documents[0], documents[-1]
        if last - first + 1 == len(documents):
            begin = self._bounds[first][0]
            return value.narrow(axis, begin, self._bounds[last][1] - begin)
        bounds = (self._bounds[number] for number in documents)
        return torch.cat([value.narrow(axis, begin, end - begin) for begin, end in bounds], axis)


class TokensWithoutEnds(RowsOfBatch):
    """Tokens and labels of one dimension, which may be one row whose documents nothing shows."""

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
    which begin again as the first document does; an ``attention_mask`` with numbers above 1, those
    of documents. By positions and by a mask, padding at the end belongs to the last document, and
    by positions a document of one token to the one before it.
    """
    if not isinstance(batch, Mapping):
        return None
    tokens = next((batch[key] for key in _TOKENS if key in batch), None)
    if not isinstance(tokens, torch.Tensor) or tokens.is_nested or tokens.dim() not in (1, 2):
        return None
    if tokens.dim() == 2 and len(tokens) != 1:
        return None
    ends, problem = _ends_in(batch, tokens.numel())
    if len(ends) > 1:
        return DocumentsOfBatch(batch, ends, tokens.numel(), problem)
    labels: Any = batch.get("labels")
    has_labels = isinstance(labels, torch.Tensor) and labels.shape == tokens.shape
    if not ends and tokens.dim() == 1 and has_labels and not labels.is_floating_point():
        return TokensWithoutEnds(batch)
    return None


def _ends_in(batch: Mapping[str, Any], num_tokens: int) -> tuple[list[int], str]:
    """Return where documents end in a batch, nothing where it does not show it; and why they cannot
    be divided.
    """

    def flat(key: str) -> torch.Tensor | None:
        value: Any = batch.get(key)
        is_of_tokens = isinstance(value, torch.Tensor) and value.numel() == num_tokens
        return value.flatten() if is_of_tokens and not value.is_floating_point() else None

    found: list[list[int]] = []
    for key, value in batch.items():
        if str(key).startswith(_ENDS) and (isinstance(value, list) or is_array(value)):
            # Some are filled up with a negative number.
            numbers = torch.as_tensor(value).flatten().tolist()
            found.append([end for end in dict.fromkeys(numbers) if end > 0])
    if found:
        ends = found[0]
        labels = flat("labels")
        is_ascending = ends == sorted(ends) and ends[-1:] <= [num_tokens]
        problem = "" if is_ascending else f"ends {ends} do not ascend to {num_tokens} tokens"
        if any(others != ends for others in found):
            problem = f"keys that begin with {_ENDS} show different documents"
        elif is_ascending and labels is not None and ends:
            is_label = labels[ends[-1] :] != IGNORE_INDEX
            problem = "there are labels after the last document" if bool(is_label.any()) else ""
        return ends if len(ends) > 1 or problem else [num_tokens], problem
    numbers_of = flat("seq_idx")
    if numbers_of is not None:
        return _changes(numbers_of), ""
    for positions in map(flat, _POSITIONS):
        if positions is not None and num_tokens > 1:
            first = positions[0]
            is_begin = (positions[:-1] == first) & (positions[1:] == first + 1)
            begins: list[int] = is_begin.nonzero().flatten().tolist()
            if len(begins) > 1:
                return [*begins[1:], num_tokens], ""
    mask = flat("attention_mask")
    if mask is not None and int(mask.max()) > 1:
        return _changes(mask), ""
    has_positions = any(flat(key) is not None for key in _POSITIONS)
    return ([num_tokens] if has_positions else []), ""


def _changes(numbers: torch.Tensor) -> list[int]:
    """Return where the numbers of documents change, and the end; 0 in a mask is padding, after the
    last document.
    """
    changes = (numbers[1:] != numbers[:-1]) & (numbers[1:] != 0)
    return [*(changes.nonzero().flatten() + 1).tolist(), len(numbers)]
