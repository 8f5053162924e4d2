"""Split a batch into parts that run one after the other, and count the labels of each part."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeGuard

import torch
from torch.nn.utils.rnn import PackedSequence

from adaptive_batch._util import count
from adaptive_batch.data import IGNORE_INDEX
from adaptive_batch.errors import SettingError

# `isinstance` with dict is fast; with `Mapping`, it searches the subclasses.
_MAPPING = (dict, Mapping)
# A tuple: `list | tuple` would build a union at each call.
_LIST = (list, tuple)

# If several first dimensions are equally common, the one of these keys is the number of rows.
_ROW_KEYS = ("input_ids", "tokens", "attention_mask", "labels")
# Padding values that show which columns of a row are used.
_KNOWN_PADDING = {"attention_mask": 0, "completion_mask": 0, "labels": IGNORE_INDEX}
# Other tensors that a collate function pads to the same columns.
_OTHER_PADDED = ("input_ids", "tokens", "position_ids", "token_type_ids", "mm_token_type_ids")

SPLIT_REMEDY = "give split=, a function that returns SplitBatch(num_rows, part) of a batch"


class Part(NamedTuple):
    """Rows of a batch that run at once. This is the argument of a `forward_backward` function.

    Attributes:
        batch: the rows, in the form of the whole batch.
        num_rows: number of rows.
        share: weight of the part's mean loss in the loss of the batch; 1.0 for the whole batch.
            Multiply the loss by it before ``backward()``.
        is_first: whether this is the first part of an attempt. Reset the metrics of the batch: an
            earlier attempt may have run out of memory.
        is_last: whether this is the last part of the batch.
        is_trial: whether this is a trial of a search or a check of a split. Metrics and logs should
            ignore it.
        statistics: results of the step's ``statistics`` function, summed over the parts of the
            batch; empty without such a function, and within it.
        rows: numbers of the part's rows in the whole batch, in the order of `batch`. In a packed
            batch, the rows are documents. Empty in a trial, and for a row of share 0 that this rank
            runs while other ranks run their last parts.
    """

    batch: Any
    num_rows: int
    share: float = 1.0
    is_last: bool = True
    is_trial: bool = False
    is_first: bool = True
    statistics: Mapping[str, Any] = {}
    rows: Sequence[int] = ()


class BatchSource:
    """A batch that can be split by rows.

    Attributes:
        num_rows: rows of the batch.
        part: function that returns the batch of some rows, given by ascending numbers.
        noun: name of a row in messages.
        lengths: tokens of each row; None if unknown.
        width: padded length of the rows; 0 if unknown.
        is_packed: whether the rows are documents of packed rows.
        cuts: whether parts may have fewer columns than the batch.
        collates_parts: whether each part is collated by itself, so that parts cannot keep columns.
        treatment: description of the division of each key, for errors.
    """

    num_rows: int
    part: Callable[[Sequence[int]], Any]
    noun: ClassVar[str] = "row"
    is_packed: ClassVar[bool] = False
    collates_parts: ClassVar[bool] = False

    @property
    def lengths(self) -> Sequence[int] | None:
        return None

    @property
    def knows_lengths(self) -> bool:
        """True if lengths are known without reading the tensors."""
        return False

    @property
    def width(self) -> int:
        return 0

    @property
    def cuts(self) -> bool:
        return False

    @property
    def treatment(self) -> str:
        return ""

    def dummy(self) -> Any:
        """Return a part that runs with weight 0 while other ranks run their last parts."""
        return self.part([0])

    def to_check(self) -> BatchSource:
        """Return the batch in the form that the split check divides."""
        return self

    def uncut(self) -> BatchSource:
        """Return this batch in a form whose parts keep all columns."""
        return self


@dataclass(frozen=True)
class SplitBatch(BatchSource):
    """A split of a batch, which the function ``split=`` returns.

    Attributes:
        num_rows: number of rows in the batch. A row is a unit that is never divided, such as a pair
            or a sequence.
        part: function that returns the batch of the rows with given numbers, in ascending order.
        lengths: number of tokens in each row; needed for `micro_batch_tokens`.
    """

    num_rows: int
    part: Callable[[Sequence[int]], Any]
    lengths: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.lengths is not None and len(self.lengths) != self.num_rows:
            lengths = f"SplitBatch of {count(len(self.lengths), 'length')}"
            remedy = f"give lengths one number for each of the {count(self.num_rows, 'row')}"
            raise SettingError("split", lengths, remedy)

    @property
    def knows_lengths(self) -> bool:
        return self.lengths is not None


class RowsOfBatch(BatchSource):
    """A batch whose tensors have the rows as their first dimension.

    The values of a batch are the items of its mappings, in any nesting, and of a list or tuple
    around them. The number of rows is the most common first dimension of tensors and NumPy arrays.
    Those with this first dimension are divided, and so are lists with one item per row. Other
    values are kept whole.

    Some values train in a whole batch but cannot be divided: nested and sparse tensors, packed
    sequences, lists of tensors that have all rows, and tensors of another size in a tuple.

    A part has no columns that are padding in all of its rows. Padding is 0 in ``attention_mask``
    and ``completion_mask``, and -100 in ``labels``. Parts keep all columns without
    ``attention_mask``, or if another tensor is as wide, such as ``decoder_input_ids``.

    Args:
        batch: tensors in mappings, or a list or tuple of these.
        trims: whether unused columns are cut.
        is_divided: `is_divided` of an earlier batch. Other values are decided here.

    Attributes:
        num_rows: rows of the batch.
        width: padded length of the rows; 0 if unknown.
        is_divided: whether each value is divided; None if it cannot be divided.

    Raises:
        SettingError: the number of rows is unknown.
    """

    # Reading lengths from tensors waits for the device.
    knows_lengths = False
    width: int = 0

    def __init__(
        self,
        batch: Any,
        *,
        trims: bool = True,
        is_divided: Mapping[str, bool | None] = MappingProxyType({}),
    ) -> None:
        self._batch = batch
        self._trims = trims
        self.is_divided = dict(is_divided)
        self._values = _values(batch)
        num_rows = _count_rows(self._values, is_divided)
        if num_rows is None:
            remedy = f"nothing in it shows the number of rows ({self.treatment}); {SPLIT_REMEDY}"
            raise SettingError("batch", type(batch).__name__, remedy)
        self.num_rows = num_rows
        # Values of the shape `[rows, columns]` by name.
        self._tables: dict[str, torch.Tensor] = {}
        for name, value in self._values.items():
            if is_table(value) and value.shape[0] == num_rows:
                self._tables[name] = value
            # Do not decide for None or an empty list: the next batch may have a value for each row.
            if is_unusual(value):
                self.is_divided[name] = None
            elif _length(value) and name not in self.is_divided:
                self.is_divided[name] = self._decide(value)
        for name in ("input_ids", "tokens", "attention_mask"):
            if name in self._tables:
                self.width = self._tables[name].shape[1]

    def _decide(self, value: Any) -> bool | None:
        """Return whether a value is divided; None if this is unclear."""
        has_rows = _length(value) == self.num_rows
        if isinstance(value, _LIST):
            lengths = {_length(array) for array in arrays_in(value)}
            # With 2 rows, [picture, picture] has an item per row. If a picture had 2 rows of
            # pixels too, both the list and its items could be the rows.
            has_item_per_row = has_rows and lengths != {self.num_rows}
            is_clear = has_item_per_row or self.num_rows not in lengths
        else:
            # In a batch that is a list, a tensor of another length may be a row itself.
            is_clear = has_rows or not isinstance(self._batch, _LIST)
        return has_rows if is_clear else None

    @cached_property
    def lengths(self) -> list[int] | None:
        """For each row, its columns up to the last used one; all columns if padding is unknown;
        None without columns.
        """
        if not self.width:
            return None
        if not self._trims or not self._shows_padding():
            return [self.width] * self.num_rows
        lengths = [1] * self.num_rows
        # The length up to a used column is its number, counted from 1.
        column_numbers = torch.arange(1, self.width + 1)
        for name, padding in _KNOWN_PADDING.items():
            table = self._tables.get(name)
            if table is not None and table.shape[1] == self.width:
                is_used = table != padding
                last_used = (is_used * column_numbers.to(table.device)).amax(dim=1).tolist()
                lengths = list(map(max, lengths, last_used))
        return lengths

    def _shows_padding(self) -> bool:
        """Return whether the batch shows which of its columns are padding."""
        mask = self._tables.get("attention_mask")
        # An additive mask is 0 for a token and a large negative number for padding.
        if mask is None or bool((mask < 0).any()):
            return False
        tokens = self._tables.get("tokens", self._tables.get("input_ids"))
        if tokens is not None and tokens.shape[1] != self.width:
            return False
        return not any(map(self._may_be_padded, arrays_in(self._batch)))

    def _may_be_padded(self, tensor: Any) -> bool:
        """Return whether a tensor may have columns of padding that is unknown."""
        if any(tensor is self._tables.get(name) for name in (*_KNOWN_PADDING, *_OTHER_PADDED)):
            return False
        dimensions = list(tensor.shape)
        if dimensions[:1] == [self.num_rows]:
            # The rows may be as many as the columns.
            del dimensions[0]
        return self.width in dimensions

    def part(self, rows: Sequence[int], /) -> Any:
        """Return the batch of some rows; the script's own tensors if these are all rows.

        Raises:
            SettingError: a value cannot be divided, or has a different number of rows than in an
                earlier batch that divided it.
        """
        if len(rows) == self.num_rows:
            return copy_containers(self._batch)
        for name in self._values:
            if self.is_divided.get(name, False) is None:
                raise self._error(f"{name or 'the batch'} cannot be divided by rows")
        used_width = self.width
        if self.lengths is not None:
            used_width = max(self.lengths[row] for row in rows)
        if rows[-1] - rows[0] + 1 == len(rows):
            # Adjacent rows of a tensor are a view.
            rows = range(rows[0], rows[-1] + 1)

        def take(value: Any, name: str) -> Any:
            if not self.is_divided.get(name):
                # A container may have divided values inside.
                return rebuild(value, name, take)
            length = _length(value)
            if length != self.num_rows:
                raise self._error(
                    f"{name} was divided in an earlier batch, but has {length or 'no'} rows in this"
                    f" one of {self.num_rows}"
                )
            some_rows = _select(value, rows)
            is_cut = used_width < self.width and is_table(value) and value.shape[1] == self.width
            # Models call view() on their labels, which needs contiguous rows.
            return some_rows[:, :used_width].contiguous() if is_cut else some_rows

        return take(self._batch, "")

    def _error(self, problem: str) -> SettingError:
        remedy = f"{problem} ({self.treatment}); {SPLIT_REMEDY}"
        return SettingError("batch", type(self._batch).__name__, remedy)

    def dummy(self) -> Any:
        """Return the row with the most labels: the mean loss of no label is NaN."""
        row = 0
        labels = self._tables.get("labels")
        if labels is not None:
            row = int((labels[:, 1:] != IGNORE_INDEX).sum(dim=1).argmax())
        return self.part([row])

    @property
    def cuts(self) -> bool:
        """True if parts may have fewer columns than the batch."""
        return any(length < self.width for length in self.lengths or ())

    def uncut(self) -> RowsOfBatch:
        """Return the same batch in a form whose parts keep all columns."""
        return RowsOfBatch(self._batch, trims=False, is_divided=self.is_divided)

    @property
    def treatment(self) -> str:
        """Description of the values for errors: divided, kept whole or not divisible."""
        treatments = []
        for kind, treatment in ((True, "divided"), (False, "kept whole"), (None, "not divisible")):
            names = [
                name or "the batch"
                for name in self._values
                if self.is_divided.get(name, False) is kind
            ]
            if names:
                treatments.append(f"{', '.join(names)} {treatment}")
        return "; ".join(treatments)


def _values(batch: Any, name: str = "") -> dict[str, Any]:
    """Return the values of a batch by name; see :class:`RowsOfBatch`. A list within it is one
    value, and so is a list of mappings, which may be rows.
    """
    is_outermost_list = (
        not name
        and isinstance(batch, _LIST)
        and not isinstance(batch, PackedSequence)
        and not all(isinstance(item, _MAPPING) for item in batch)
    )
    if not is_outermost_list and not isinstance(batch, _MAPPING):
        return {name: batch}
    values: dict[str, Any] = {}
    for item_name, item in named_items(batch, name):
        values.update(_values(item, item_name))
    return values


def _count_rows(values: Mapping[str, Any], is_divided: Mapping[str, bool | None]) -> int | None:
    """Return the most common first dimension of tensors and arrays; None without one. If an earlier
    batch divided some of them, only these count.
    """
    known: list[int] = []
    new: list[int] = []
    # Counter prefers the first of equally common lengths.
    for name in dict.fromkeys((*_ROW_KEYS, *values)):
        value = values.get(name)
        length = _length(value)
        if length is None or isinstance(value, _LIST):
            continue
        if is_divided.get(name):
            known.append(length)
        elif is_divided.get(name) is None:
            new.append(length)
    lengths = known or new
    return Counter(lengths).most_common(1)[0][0] if lengths else None


def _length(value: Any) -> int | None:
    """Return the first dimension of a tensor or an array, or the length of a list; None for other
    values.
    """
    if isinstance(value, torch.Tensor):
        return value.size(0) if value.dim() else None
    if isinstance(value, _LIST) or (is_array(value) and value.ndim):
        return len(value)
    return None


def is_unusual(value: Any) -> bool:
    """Return whether a value is a tensor or a named tuple whose rows cannot be indexed, such as a
    packed sequence.
    """
    if isinstance(value, torch.Tensor):
        return value.is_nested or value.layout != torch.strided
    return isinstance(value, tuple) and hasattr(value, "_fields")


def is_array(value: Any) -> bool:
    """Return whether a value is a tensor or an array of NumPy."""
    if isinstance(value, torch.Tensor):
        return True
    # Ask the type: reading the attribute of a PIL image copies its pixels.
    return hasattr(type(value), "__array_interface__") and hasattr(value, "ndim")


def is_table(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor `[rows, columns]`."""
    return isinstance(value, torch.Tensor) and not value.is_nested and value.dim() == 2


def arrays_in(value: Any) -> Iterator[Any]:
    """Yield the tensors and arrays in a batch."""
    if is_array(value):
        yield value
    for _, item in named_items(value):
        yield from arrays_in(item)


def named_items(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Return the items of a container with their names; an empty list for other values."""
    if isinstance(value, _MAPPING):
        prefix = f"{name}." if name else ""
        return [(f"{prefix}{key}", item) for key, item in value.items()]
    if isinstance(value, _LIST):
        return [(f"{name}[{number}]", item) for number, item in enumerate(value)]
    return []


def _select(value: Any, rows: Sequence[int]) -> Any:
    """Return some rows of a value with one entry per row."""
    if isinstance(value, _LIST):
        return type(value)(copy_containers(value[row]) for row in rows)
    return value[rows.start : rows.stop] if isinstance(rows, range) else value[list(rows)]


def copy_containers(value: Any) -> Any:
    """Copy all containers of a batch but not its tensors, so that a function may pop from them."""
    if not isinstance(value, _MAPPING):
        return rebuild(value, "", lambda item, name: copy_containers(item))
    try:
        copied: Any = copy.copy(value)
        for key, item in value.items():
            copied[key] = copy_containers(item)
    except (RuntimeError, TypeError):
        # The mapping is immutable, so a function cannot pop from it.
        return value
    return copied


def rebuild(value: Any, name: str, change: Callable[[Any, str], Any]) -> Any:
    """Return a copy of a container with changed items; return other values unchanged."""
    items = []
    for item_name, item in named_items(value, name):
        items.append(change(item, item_name))
    if isinstance(value, _MAPPING):
        return like_mapping(value, dict(zip(value, items, strict=True)))
    if not items:
        return value
    is_named_tuple = hasattr(value, "_fields")
    return type(value)(*items) if is_named_tuple else type(value)(items)


def like_mapping(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return the items in a mapping of the same type, such as BatchEncoding; in a dict if this type
    cannot be built.
    """
    if type(mapping) is dict:
        return items
    try:
        return type(mapping)(items)  # type: ignore[call-arg]  # Mapping itself takes nothing
    except TypeError:
        return items


class LabelCounter:
    """Counts the labels that the mean loss of a part averages over.

    Either the collate function or the model shifts ``labels`` of `[rows, columns]`. If the model
    does, the first label of each row has no loss. The check of the first split finds out.

    Args:
        num_labels: function that returns the number of labels of a batch, or the sum of their
            weights. None counts the ``labels`` that are not -100, or the rows of a batch without
            labels.
    """

    def __init__(self, num_labels: Callable[[Any], Any] | None) -> None:
        self._num_labels = num_labels

    def candidates(self, batch: Any, num_rows: int) -> tuple[float, float]:
        """Return the number of labels without and with the first label of each row.

        Raises:
            SettingError: `num_labels` did not return a number.
        """
        without = self.count(batch, num_rows, counts_first=False)
        if self._num_labels is not None:
            return without, without
        return without, self.count(batch, num_rows, counts_first=True)

    def count(self, batch: Any, num_rows: int, *, counts_first: bool) -> float:
        """Return the number of labels of a batch."""
        if self._num_labels is not None:
            return self._given_count(self._num_labels(batch))
        labels = batch.get("labels") if isinstance(batch, _MAPPING) else None
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or not labels.dim():
            return num_rows
        tokens = batch.get("tokens", batch.get("input_ids"))
        # A single column has the labels of classes, which no model shifts, unless the rows have a
        # single token.
        is_of_tokens = labels.dim() == 2 and (
            labels.shape[1] > 1 or (is_table(tokens) and tokens.shape == labels.shape)
        )
        if is_of_tokens and not counts_first:
            labels = labels[:, 1:]
        return int((labels != IGNORE_INDEX).count_nonzero())

    @staticmethod
    def _given_count(given: Any) -> float:
        """Return the result of `num_labels` as a number.

        Raises:
            SettingError: it is not a number, negative or not finite.
        """
        try:
            number = float(given)
        except (RuntimeError, TypeError, ValueError):
            number = math.nan
        # NaN is not in this range.
        if not 0 <= number < math.inf:
            remedy = (
                "give a function that returns the number of labels that the loss averages over, or"
                " the sum of their weights: 0 or more"
            )
            raise SettingError("num_labels", given, remedy)
        return number


def shares_of(counts: Sequence[float]) -> tuple[float, ...]:
    """Return the share of each part in the labels; zeros without labels."""
    # If all counts are 0, divide by 1, which gives zeros.
    total = sum(counts) or 1
    return tuple(count / total for count in counts)


def has_shifted_labels(batch: Any) -> bool:
    """Return whether the collate function has shifted the labels: each label equals the next token,
    and not all equal the token at their own place.
    """
    if not isinstance(batch, Mapping):
        return False
    labels: Any = batch.get("labels")
    tokens: Any = batch.get("tokens", batch.get("input_ids"))
    if not (is_table(labels) and is_table(tokens)) or labels.shape != tokens.shape:
        return False
    is_label = labels != IGNORE_INDEX
    is_next_token = labels[:, :-1] == tokens[:, 1:]
    is_own_token = labels == tokens
    all_are_next = bool(is_next_token[is_label[:, :-1]].all())
    all_are_own = bool(is_own_token[is_label].all())
    return all_are_next and not all_are_own
