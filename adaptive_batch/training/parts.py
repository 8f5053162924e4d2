"""Split a batch into parts that run one after the other, and count the labels of each part."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeGuard

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from adaptive_batch._util import count
from adaptive_batch.data import IGNORE_INDEX
from adaptive_batch.errors import SettingError

# `isinstance` with dict is fast; with `Mapping`, it searches the subclasses.
_MAPPING = (dict, Mapping)
# A tuple: `list | tuple` would build a union at each call.
_LIST = (list, tuple)

# If several first dimensions are equally common, the one of these keys is the number of rows.
_ROW_KEYS = ("input_ids", "tokens", "attention_mask", "labels")
# A list of more mappings than this has one per row; a shorter one may have collated views.
_MOST_VIEWS = 3

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
        treatment: description of the division of each key, for errors.
    """

    num_rows: int
    part: Callable[[Sequence[int]], Any]
    noun: ClassVar[str] = "row"
    is_packed: ClassVar[bool] = False

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
    def keeps_values(self) -> bool:
        """True if each part has some values of the whole batch."""
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

    The number of rows is the most common first dimension of the tensors and NumPy arrays. Mappings,
    tuples and lists are split key by key. Tensors with this number of rows are divided; so are
    nested and sparse tensors, packed sequences, and lists with one item per row. Other values are
    kept whole. If all tensors are in lists of one length, each list has one item per row, unless
    all tensors have the same first dimension.

    A part has no columns that are padding in all of its rows. Padding is 0 in ``attention_mask``
    and ``completion_mask``, and -100 in ``labels``. Without ``attention_mask``, padding is the
    repetition of a row's last token in ``tokens`` or ``input_ids``, without labels. Parts keep all
    columns if another tensor is as wide, such as ``decoder_input_ids``.

    Args:
        batch: tensors in any nesting of mappings, tuples and lists, or a list of rows.
        trims: whether unused columns are cut.
        row_lengths: tokens of each row, after which all columns are padding; None if unknown.
        is_divided: whether each key of an earlier batch was divided. Other keys are decided here.

    Attributes:
        num_rows: rows of the batch.
        is_divided: whether each key is divided.

    Raises:
        SettingError: the number of rows is unknown.
    """

    def __init__(
        self,
        batch: Any,
        *,
        trims: bool = True,
        row_lengths: Sequence[int] | None = None,
        is_divided: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        self._batch = batch
        self._trims = trims
        self._row_lengths = row_lengths
        self.is_divided = dict(is_divided)
        # Values of the shape `[rows, columns]` by name.
        self._tables: dict[str, torch.Tensor] = {}
        # Values that were divided in an earlier batch show the number of rows.
        values = _values(batch, known=is_divided)
        num_rows = _most_common(_length(value) for name, value in values if is_divided.get(name))
        if num_rows is None:
            num_rows, lists_of_rows = _count_rows(batch)
            self.is_divided.update(dict.fromkeys(lists_of_rows, True))
        if num_rows is None:
            remedy = f"nothing in it shows the number of rows ({self.treatment}); {SPLIT_REMEDY}"
            raise SettingError("batch", type(batch).__name__, remedy)
        self.num_rows = num_rows
        if isinstance(batch, _MAPPING):
            for name, value in batch.items():
                if is_table(value) and value.shape[0] == num_rows:
                    self._tables[name] = value
        for name, value in _values(batch, known=self.is_divided, num_rows=num_rows):
            length = _length(value)
            # Do not decide for None or an empty list: the next batch may have a value for each row.
            if length:
                self.is_divided.setdefault(name, length == num_rows)

    @property
    def width(self) -> int:
        """Padded length of the rows; 0 if unknown."""
        for name in ("attention_mask", "tokens", "input_ids"):
            if name in self._tables:
                return self._tables[name].shape[1]
        return 0

    @cached_property
    def lengths(self) -> list[int] | None:
        """For each row, its columns up to the last used one; None if unknown."""
        used = self._used_columns()
        if used is None:
            return None
        # The length up to a used column is its number, counted from 1; an unused column has 0.
        column_numbers = torch.arange(1, used.shape[1] + 1, device=used.device)
        lengths: list[int] = (used * column_numbers).amax(dim=1).clamp(min=1).tolist()
        return lengths

    def _used_columns(self) -> torch.Tensor | None:
        """Return a bool tensor `[rows, columns]`, true where a column is used; None if unknown."""
        mask_or_labels = self._mask_or_labels()
        if mask_or_labels is None:
            return None
        if not self._trims or self._must_keep_columns(mask_or_labels):
            return torch.ones_like(mask_or_labels, dtype=torch.bool)
        used = torch.zeros_like(mask_or_labels, dtype=torch.bool)
        for name, padding in _KNOWN_PADDING.items():
            table = self._tables.get(name)
            if table is not None and table.shape == mask_or_labels.shape:
                used |= (table != padding).to(used.device)
        tokens = self._tokens
        if tokens is not None and "attention_mask" not in self._tables:
            # Tokens without a label are used too, such as a prompt. Padding repeats one token, so
            # a token that differs from the last one of its row is not padding.
            used |= tokens != tokens[:, -1:]
        return used

    @property
    def _tokens(self) -> torch.Tensor | None:
        return self._tables.get("tokens", self._tables.get("input_ids"))

    def _mask_or_labels(self) -> torch.Tensor | None:
        """Return the tensor `[rows, columns]` that shows padding: the attention mask, or the labels
        of a batch without one; None if neither shows it.
        """
        if isinstance(self._batch, _MAPPING) and self._batch.get("attention_mask") is not None:
            # A mask of another shape is not in the tables. Padding is then unknown, whatever the
            # labels show.
            return self._tables.get("attention_mask")
        labels, tokens = self._tables.get("labels"), self._tokens
        if labels is None or tokens is None or labels.shape != tokens.shape:
            return None
        # Probabilities have no value for padding.
        return None if labels.is_floating_point() else labels

    def _must_keep_columns(self, mask_or_labels: torch.Tensor) -> bool:
        """Return whether the padding of some tensor is unknown."""
        tokens = self._tokens
        if tokens is not None and tokens.shape != mask_or_labels.shape:
            return True
        if self._row_lengths is None and any(map(self._may_be_padded, arrays_in(self._batch))):
            return True
        # An additive mask is 0 for a token and a large negative number for padding, which is not
        # the padding of _KNOWN_PADDING.
        return "attention_mask" in self._tables and bool((mask_or_labels < 0).any())

    def _may_be_padded(self, tensor: Any) -> bool:
        """Return whether a tensor may have columns of padding that is unknown."""
        for name in (*_KNOWN_PADDING, *_OTHER_PADDED):
            if tensor is self._tables.get(name):
                return False
        if isinstance(tensor, PackedSequence) or getattr(tensor, "is_nested", False):
            return True
        dimensions = list(tensor.shape)
        if dimensions[:1] == [self.num_rows]:
            # The rows may be as many as the columns.
            del dimensions[0]
        return self.width in dimensions

    def part(self, rows: Sequence[int], /) -> Any:
        """Return the batch of some rows; the script's own tensors if these are all rows.

        Raises:
            SettingError: a key that an earlier batch divided has a different number of rows.
        """
        if len(rows) == self.num_rows:
            return copy_containers(self._batch)
        used_width = self._used_width(rows)
        if rows[-1] - rows[0] + 1 == len(rows):
            # Adjacent rows of a tensor are a view.
            rows = range(rows[0], rows[-1] + 1)

        def take(value: Any, name: str) -> Any:
            if not self.is_divided.get(name):
                # A container may have divided values inside.
                return rebuild(value, name, take)
            length = _length(value)
            if length != self.num_rows:
                remedy = (
                    f"{name} was divided in an earlier batch, but has {length or 'no'} rows in this"
                    f" one of {self.num_rows} ({self.treatment}); {SPLIT_REMEDY}"
                )
                raise SettingError("batch", type(self._batch).__name__, remedy)
            some_rows = _select(value, rows)
            if used_width is not None and is_table(value) and value.shape[1] == self.width:
                # Models call view() on their labels, which needs contiguous rows.
                return some_rows[:, :used_width].contiguous()
            return some_rows

        return take(self._batch, "")

    def _used_width(self, rows: Sequence[int]) -> int | None:
        """Return how many columns the given rows use; None if they keep all columns."""
        if not self._trims or self.lengths is None:
            return None
        used_width = max(self.lengths[row] for row in rows)
        if self._row_lengths is not None:
            # Keep the given tokens of each row, such as a last token that looks like padding.
            longest = max(self._row_lengths[row] for row in rows)
            used_width = min(self.width, max(used_width, longest))
        return used_width

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
    def keeps_values(self) -> bool:
        """True if a value is kept whole."""
        return not all(self.is_divided.values())

    @property
    def treatment(self) -> str:
        """Description of the keys for errors: divided, cut or kept whole."""
        keys_by_treatment: dict[str, list[str]] = {}
        for name, value in _values(self._batch, known=self.is_divided):
            treatment = "kept whole"
            if self.is_divided.get(name):
                is_cut = self.cuts and is_table(value) and value.shape[1] == self.width
                treatment = "divided and cut" if is_cut else "divided"
            keys_by_treatment.setdefault(treatment, []).append(name or "the batch")
        return "; ".join(
            f"{', '.join(keys)} {treatment}" for treatment, keys in keys_by_treatment.items()
        )


def _count_rows(batch: Any) -> tuple[int | None, Collection[str]]:
    """Return the number of rows, None if unknown, and the names of lists with one item per row.

    Lists are named only if no other value shows the number of rows.
    """
    if _is_list(batch) and _have_item_per_row([batch]):
        return len(batch), [""]
    # _most_common() prefers the first of equally common lengths, so known keys come first.
    values = dict(named_items(batch)) or {"": batch}
    values = dict(sorted(values.items(), key=lambda item: item[0] not in _ROW_KEYS))
    lists = {name: value for name, value in values.items() if _is_list(value)}
    num_rows = _most_common(_lengths_in(values[name] for name in values if name not in lists))
    if num_rows is not None or not lists:
        return num_rows, ()
    columns = list(lists.values())
    if _have_item_per_row(columns):
        return len(columns[0]), lists
    return _most_common(_lengths_in(columns)), ()


def _have_item_per_row(lists: Sequence[Sequence[Any]]) -> bool:
    """Return whether each list has one item per row. Otherwise each of its items has all rows, as
    the first dimension of its tensors.

    Items of rows have one form. Their tensors have the dimensions of a row, which differ, while
    tensors with all rows have one first dimension.
    """
    first_list, *others = lists
    num_items = len(first_list)
    if num_items < 2 or any(len(other) != num_items for other in others):
        return False
    if any(len(set(map(_form, items))) > 1 for items in lists):
        return False
    if not others and isinstance(first_list[0], _MAPPING) and num_items > _MOST_VIEWS:
        return True
    lengths = {_length(value) for items in lists for item in items for _, value in _values(item)}
    # In a single list of tensors with all rows, one tensor may have another size.
    max_lengths = 2 if not others and is_array(first_list[0]) else 1
    # A scalar has no length, so it belongs to one row.
    return None in lengths or len(lengths) > max_lengths


def _form(value: Any) -> Any:
    """Return a key that is equal for values of the same kind: the keys of a mapping, the forms of a
    list's items, or the type and number of dimensions of another value.
    """
    if isinstance(value, _MAPPING):
        return frozenset(value)
    if _is_list(value):
        return frozenset(map(_form, value))
    return type(value), getattr(value, "ndim", None), getattr(value, "dtype", None)


def _most_common(lengths: Iterable[int | None]) -> int | None:
    """Return the most common length, the first of several; None if there is no length."""
    lengths = [length for length in lengths if length is not None]
    return Counter(lengths).most_common(1)[0][0] if lengths else None


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    """Return whether a value is a list or a tuple, but not a named tuple."""
    return isinstance(value, _LIST) and not hasattr(value, "_fields")


def _length(value: Any) -> int | None:
    """Return the first dimension of a tensor or an array, or the length of a list; None for other
    values.
    """
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    if isinstance(value, torch.Tensor):
        return value.size(0) if value.dim() else None
    if _is_list(value) or (is_array(value) and value.ndim):
        return len(value)
    return None


def is_array(value: Any) -> bool:
    """Return whether a value is a tensor, an array of NumPy or a packed sequence."""
    if isinstance(value, torch.Tensor | PackedSequence):
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


def _lengths_in(values: Iterable[Any]) -> Iterator[int | None]:
    """Return the first dimensions of all tensors and arrays in the values."""
    return (_length(array) for value in values for array in arrays_in(value))


def named_items(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Return the items of a container with their names; an empty list for other values."""
    if isinstance(value, _MAPPING):
        prefix = f"{name}." if name else ""
        return [(f"{prefix}{key}", item) for key, item in value.items()]
    if isinstance(value, _LIST) and not isinstance(value, PackedSequence):
        return [(f"{name}[{number}]", item) for number, item in enumerate(value)]
    return []


def _values(
    value: Any, name: str = "", *, known: Collection[str] = (), num_rows: int | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield the values of a batch with their names. A list is one value if its name is known, if it
    has no tensors, or if it has one item per row and its tensors do not have all rows.
    """
    is_one_value = name in known
    # If the first item's name is known, each item is a value.
    if _is_list(value) and not is_one_value and f"{name}[0]" not in known:
        lengths = set(_lengths_in(value))
        has_tensors_of_all_rows = lengths == {num_rows}
        has_item_per_row = len(value) == num_rows and not has_tensors_of_all_rows
        is_one_value = not lengths or has_item_per_row
    items = named_items(value, name)
    if is_one_value or not items:
        yield name, value
        return
    for item_name, item in items:
        yield from _values(item, item_name, known=known, num_rows=num_rows)


def _select(value: Any, rows: Sequence[int]) -> Any:
    """Return some rows of a value with one entry per row."""
    if isinstance(value, PackedSequence):
        sequences = unpack_sequence(value)
        # torch keeps these indices only if the sequences were not sorted by length.
        is_sorted = value.sorted_indices is None
        return pack_sequence([sequences[row] for row in rows], enforce_sorted=is_sorted)
    if _is_list(value):
        return type(value)(copy_containers(value[row]) for row in rows)  # type: ignore[call-arg]
    if isinstance(value, torch.Tensor) and value.is_nested:
        tensors = value.unbind()
        return torch.nested.as_nested_tensor([tensors[row] for row in rows], layout=value.layout)
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        numbers = torch.tensor(rows, device=value.device)
        coo: torch.Tensor = value.to_sparse_coo()  # type: ignore[no-untyped-call]
        return coo.index_select(0, numbers).to_sparse(layout=value.layout)
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
    items = [change(item, item_name) for item_name, item in named_items(value, name)]
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
            return label_count(self._num_labels(batch))
        labels = batch.get("labels") if isinstance(batch, _MAPPING) else None
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or not labels.dim():
            return num_rows
        first = 0 if counts_first else 1
        if labels.is_nested:
            # A nested tensor has no columns to slice.
            rows = labels.unbind()
            return sum(_num_labels(row[first:] if row.dim() == 1 else row) for row in rows)
        if labels.dim() == 2 and self._are_of_tokens(labels, batch):
            labels = labels[:, first:]
        return _num_labels(labels)

    @staticmethod
    def _are_of_tokens(labels: torch.Tensor, batch: Mapping[str, Any]) -> bool:
        """Return whether labels `[rows, columns]` belong to tokens. A single column has the labels
        of classes, which no model shifts, unless the rows have a single token.
        """
        tokens = batch.get("tokens", batch.get("input_ids"))
        return labels.shape[1] > 1 or (is_table(tokens) and tokens.shape == labels.shape)


def _num_labels(labels: torch.Tensor) -> int:
    return int((labels != IGNORE_INDEX).count_nonzero())


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


def label_count(count: Any) -> float:
    """Return the result of a user's `num_labels` as a number.

    Raises:
        SettingError: the result is negative or not finite.
    """
    remedy = (
        "give a function that returns the number of labels that the loss averages over, or the sum"
        " of their weights: 0 or more"
    )
    # torch would round a Python float to float32.
    dtype = torch.float64 if type(count) is float else None
    try:
        tensor = torch.as_tensor(count, dtype=dtype)
    except (RuntimeError, TypeError, ValueError):
        raise SettingError("num_labels", count, remedy) from None
    if tensor.is_complex() or tensor.dim() or not 0 <= tensor < math.inf:
        raise SettingError("num_labels", count, remedy)
    return float(tensor) if tensor.is_floating_point() else int(tensor)
