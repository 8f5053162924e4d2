"""A packed batch, whose documents lie one after the other in one row, split between documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from adaptive_batch._util import count
from adaptive_batch.data import IGNORE_INDEX
from adaptive_batch.errors import SettingError

from .parts import SPLIT_REMEDY, BatchSource, copy_containers, like_mapping

_TOKENS = ("input_ids", "tokens")
# They begin with 0 in each document.
_POSITIONS = ("position_ids", "positions")
# Begins the keys of where documents end, and of the number of tokens of the longest.
_ENDS = "cu_seq"
_LONGEST = ("max_length", "max_seqlen")


class DocumentsOfBatch(BatchSource):
    """A packed batch, whose parts have whole documents.

    Tensors of all tokens are divided, ``[1, tokens, ...]``, ``[tokens, ...]`` or
    ``[..., 1, tokens]``, and masks of ``[..., tokens, tokens]`` along both. The ends of documents
    (``cu_seq...``), the length of the longest (``max_length...``, ``max_seqlen...``) and the
    numbers of documents (``seq_idx``) are those of the part. Positions stay, as they begin with 0
    in each document. Tensors and lists with an entry for each document are divided; numbers and
    text stay whole.

    Args:
        batch: tokens of one row, with other values by name.
        ends: where each document ends, in tokens, the last with all tokens.

    Attributes:
        num_rows: documents of the batch.
        lengths: tokens of each.
        width: tokens of all.
    """

    is_packed = True
    knows_lengths = True

    def __init__(self, batch: Mapping[str, Any], ends: Sequence[int]) -> None:
        self._batch = batch
        self._bounds = list(pairwise([0, *ends]))
        self.num_rows = len(ends)
        self._lengths = [end - begin for begin, end in self._bounds]
        self._width = ends[-1]

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
            SettingError: a value has an entry neither for each token nor for each document.
        """
        if len(rows) == self.num_rows:
            return copy_containers(self._batch)
        some = {
            key: self._of_documents(str(key), value, rows) for key, value in self._batch.items()
        }
        return like_mapping(self._batch, some)

    def dummy(self) -> Any:
        """Return the document that has most labels, as the mean of none is no number."""
        labels = self._batch.get("labels")
        most = 0
        if isinstance(labels, torch.Tensor) and labels.numel() == self._width:
            of_documents = torch.split(labels.flatten() != IGNORE_INDEX, self._lengths)
            numbers = torch.stack([each.count_nonzero() for each in of_documents])
            most = int(numbers.argmax())
        return self.part([most])

    def _of_documents(self, key: str, value: Any, documents: Sequence[int]) -> Any:
        """Return a value of some documents."""
        lengths = [self._lengths[number] for number in documents]
        is_tensor = isinstance(value, torch.Tensor)
        if key.startswith(_LONGEST):
            longest = max(lengths)
            return torch.full_like(value, longest) if is_tensor else longest
        if key.startswith(_ENDS):
            ends = torch.tensor([0, *lengths]).cumsum(0)
            return ends.to(value).reshape(*value.shape[:-1], -1)
        if key == "seq_idx":
            numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
            return numbers.to(value).reshape(*value.shape[:-1], -1)
        if is_tensor and (axes := self._axes_of_tokens(value.shape)):
            for axis in axes:
                value = self._along(axis, value, documents)
            return value
        if not isinstance(value, Mapping | list | tuple) and not (is_tensor and value.dim()):
            return value
        if isinstance(value, Mapping) or len(value) != self.num_rows:
            problem = f"{self.treatment}, and {key} has an entry for neither documents nor tokens"
            raise SettingError("batch", key, f"{problem}; {SPLIT_REMEDY}")
        if is_tensor:
            return value[list(documents)]
        return type(value)(value[number] for number in documents)

    def _axes_of_tokens(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the dimensions of tokens in a tensor; none where it has none."""
        tokens = self._width
        if tuple(shape[-2:]) == (tokens, tokens):
            return -2, -1
        if tuple(shape[:2]) == (1, tokens):
            return (1,)
        if shape[0] == tokens:
            return (0,)
        return (-1,) if tuple(shape[-2:]) == (1, tokens) else ()

    def _along(self, axis: int, value: torch.Tensor, documents: Sequence[int]) -> torch.Tensor:
        first, last = documents[0], documents[-1]
        if last - first + 1 == len(documents):
            begin = self._bounds[first][0]
            return value.narrow(axis, begin, self._bounds[last][1] - begin)
        bounds = (self._bounds[number] for number in documents)
        return torch.cat([value.narrow(axis, begin, end - begin) for begin, end in bounds], axis)


def documents_of(batch: Any) -> DocumentsOfBatch | None:
    """Return a packed batch as documents; None of another batch.

    Documents are known by the first that is there of: keys that begin with ``cu_seq``, where each
    ends; ``seq_idx``, the number of each token's document; ``position_ids`` or ``positions``, which
    begin again with 0 and 1; an ``attention_mask`` of numbers of documents above 1. What follows
    the last document, or has positions of 0 alone, belongs to the document before it.

    Raises:
        SettingError: keys tell different documents, or a batch of one dimension, tokens and labels
            alike, tells none.
    """
    if not isinstance(batch, Mapping):
        return None
    tokens = next((batch[key] for key in _TOKENS if key in batch), None)
    if not isinstance(tokens, torch.Tensor):
        tokens = next((batch[key] for key in _POSITIONS if key in batch), None)
    is_row = isinstance(tokens, torch.Tensor) and (tokens.dim() == 1 or tokens.shape[:1] == (1,))
    if tokens is None or not is_row or tokens.is_nested or tokens.dim() > 2:
        return None
    ends = _told_ends(batch, tokens.numel())
    labels: Any = batch.get("labels")
    has_labels = isinstance(labels, torch.Tensor) and labels.shape == tokens.shape
    if not ends and tokens.dim() == 1 and has_labels and not labels.is_floating_point():
        remedy = f"nothing shows where documents end; give positions, or {SPLIT_REMEDY}"
        raise SettingError("batch", f"tokens and labels of [{tokens.numel()}]", remedy)
    return DocumentsOfBatch(batch, ends) if len(ends) > 1 else None


def _told_ends(batch: Mapping[str, Any], num_tokens: int) -> list[int]:
    """Return where documents end as the batch tells it; nothing where it does not."""

    def flat(key: str) -> torch.Tensor | None:
        value: Any = batch.get(key)
        is_of_tokens = isinstance(value, torch.Tensor) and value.numel() == num_tokens
        return value.flatten() if is_of_tokens and not value.is_floating_point() else None

    told: list[int] = []
    for key, value in batch.items():
        if str(key).startswith(_ENDS) and isinstance(value, torch.Tensor):
            # Some are filled up with a negative number.
            ends = [end for end in dict.fromkeys(value.flatten().tolist()) if end > 0]
            told = told or ends
            if ends != told or ends != sorted(ends) or ends[-1:] != [num_tokens]:
                remedy = f"{num_tokens} tokens do not end so in each such key; {SPLIT_REMEDY}"
                raise SettingError("batch", f"{key} of {ends}", remedy)
    for positions in map(flat, _POSITIONS):
        if not told and positions is not None:
            begins = ((positions[:-1] == 0) & (positions[1:] == 1)).nonzero().flatten().tolist()
            told = [*begins[1:], num_tokens] if begins else []
    numbers = flat("seq_idx")
    mask = flat("attention_mask")
    if numbers is None and mask is not None and int(mask.max()) > 1:
        numbers = mask
    if len(told) < 2 and numbers is not None:
        # 0 in a mask is padding, after the last document.
        changes = (numbers[1:] != numbers[:-1]) & (numbers[1:] != 0)
        told = [*(changes.nonzero().flatten() + 1).tolist(), num_tokens]
    return told
