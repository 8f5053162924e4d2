"""The parts of a batch that run one after the other, and how many labels each of them has."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, TypeGuard

import torch

from adaptive_batch._util import count
from adaptive_batch.data import IGNORE_INDEX
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import RandomState

from .sizing import ConfiguredSize

# A dict is known at once; for an abstract class alone Python looks through its subclasses.
_MAPPING = (dict, Mapping)
# A tuple, since `list | tuple` is made anew each time.
_LIST = (list, tuple)
_CONTAINER = (*_MAPPING, list)

# Tensors of one sequence that a collate function pads together, each with the value of its padding;
# None where the mask or the labels alone show the padding.
_PADDING = {
    "attention_mask": 0,
    "completion_mask": 0,
    "labels": IGNORE_INDEX,
    "input_ids": None,
    "tokens": None,
    "position_ids": None,
    "token_type_ids": None,
    "mm_token_type_ids": None,
}

_SPLIT_REMEDY = "give split=, a function that returns SplitBatch(num_rows, part) of a batch"


class Part(NamedTuple):
    """Rows of a batch that run at once: what a `forward_backward` function is called with.

    Attributes:
        batch: these rows, in the form that the whole batch has.
        num_rows: how many they are.
        share: weight of the part's mean loss in the loss of the batch; 1.0 where it is the whole.
            Multiply the loss by it before ``backward()``.
        is_first: whether it is the first part that an attempt at the batch runs here: what an
            attempt before it has counted is to be dropped.
        is_last: whether it is the last part of the batch.
        is_trial: whether it only shows what fits, or whether a split changes the loss: metrics and
            logs should leave it out.
        statistics: what the step's ``statistics`` function returned, summed over the parts of the
            batch; empty without such a function, and within it.
    """

    batch: Any
    num_rows: int
    share: float = 1.0
    is_last: bool = True
    is_trial: bool = False
    is_first: bool = True
    statistics: Mapping[str, Any] = {}


class Splittable(Protocol):
    """A batch that can be split by rows."""

    @property
    def num_rows(self) -> int: ...
    @property
    def lengths(self) -> Sequence[int] | None: ...
    @property
    def knows_lengths(self) -> bool: ...
    @property
    def width(self) -> int: ...
    @property
    def is_packed(self) -> bool: ...
    @property
    def divided(self) -> tuple[bool, ...]: ...
    @property
    def cuts(self) -> bool: ...
    @property
    def treatment(self) -> str: ...
    def part(self, rows: Sequence[int], /) -> Any: ...
    def dummy(self) -> Any: ...
    def to_check(self) -> Splittable: ...
    def uncut(self) -> Splittable: ...


@dataclass(frozen=True)
class SplitBatch:
    """How a batch is split, as a function given as ``split=`` returns it.

    Attributes:
        num_rows: rows of the batch: what is never divided, such as a pair or a sequence.
        part: function that returns the batch of some rows, given by ascending numbers.
        lengths: tokens of each row; needed for `micro_batch_tokens`.
    """

    num_rows: int
    part: Callable[[Sequence[int]], Any]
    lengths: Sequence[int] | None = None
    is_packed: ClassVar[bool] = False
    cuts: ClassVar[bool] = False
    treatment: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if self.lengths is not None and len(self.lengths) != self.num_rows:
            lengths = f"SplitBatch of {count(len(self.lengths), 'length')}"
            remedy = f"give lengths one number for each of the {count(self.num_rows, 'row')}"
            raise SettingError("split", lengths, remedy)

    @property
    def knows_lengths(self) -> bool:
        """Whether lengths need not be worked out."""
        return self.lengths is not None

    @property
    def width(self) -> int:
        """Columns that rows are padded to; 0 as nothing shows them."""
        return 0

    @property
    def divided(self) -> tuple[bool, ...]:
        """Nothing: what a part has, `part` decides."""
        return ()

    def dummy(self) -> Any:
        """Return a part that runs with weight 0 where other ranks have more parts."""
        return self.part([0])

    def to_check(self) -> Splittable:
        """Return the batch as the check of a split divides it."""
        return self

    def uncut(self) -> Splittable:
        """Return the batch, as its parts are those of `part`."""
        return self


class OwnSplit:
    """A script's own function that splits a batch, whose results are looked at.

    Args:
        split: function that returns :class:`SplitBatch` of a batch.

    Raises:
        SettingError: when called: it returns something else, or its part of all rows leaves some
            out.
    """

    def __init__(self, split: Callable[[Any], Any]) -> None:
        self._split = split

    def __call__(self, batch: Any) -> SplitBatch:
        rows = self._split(batch)
        if not isinstance(rows, SplitBatch):
            remedy = "give a function that returns SplitBatch(num_rows, part)"
            raise SettingError("split", type(rows).__name__, remedy)

        def part(numbers: Sequence[int]) -> Any:
            some_rows = rows.part(list(numbers))
            # One part alone, or the check before the first split, has them all.
            if len(numbers) == rows.num_rows:
                self._compare(some_rows, batch, rows.num_rows)
            return some_rows

        return replace(rows, part=part)

    def _compare(self, all_rows: Any, batch: Any, num_rows: int) -> None:
        """Refuse a part of all rows whose tensors have not the rows of the batch's."""
        if isinstance(all_rows, torch.Tensor) and isinstance(batch, torch.Tensor):
            all_rows = {"a tensor": all_rows}
            batch = {"a tensor": batch}
        if not isinstance(all_rows, Mapping) or not isinstance(batch, Mapping):
            return
        for key in all_rows.keys() & batch.keys():
            tensors = (batch[key], all_rows[key])
            # Not items of another form, nor rows that are columns.
            have_rows_first = (
                isinstance(tensor, torch.Tensor)
                and tensor.dim()
                and tensor.shape[1:2] != (num_rows,)
                for tensor in tensors
            )
            if not all(have_rows_first):
                continue
            due, has = map(len, tensors)
            if has != due:
                split = f"SplitBatch of {count(num_rows, 'row')}"
                remedy = (
                    f"the part of all of them has {key} of first dimension {has}, and the batch of"
                    f" {due}; give num_rows and part of the whole batch"
                )
                raise SettingError("split", split, remedy)


class RowsOfBatch:
    """A batch whose tensors have the rows as their first dimension.

    Mappings, tuples and lists are split item by item; what has another first dimension stays whole.
    A part leaves out the trailing columns that hold padding in all of its rows: 0 in
    ``attention_mask`` and ``completion_mask``, -100 in ``labels``. Without ``attention_mask``
    padding is the last token of a row of ``tokens`` or ``input_ids``, repeated without labels.
    Where a tensor under another name is as wide, such as ``decoder_input_ids``, parts keep all
    columns.

    Args:
        batch: tensors in any nesting of mappings, tuples and lists. A list with one item for each
            row is divided by its items.
        trims: whether unused columns are cut.
        row_lengths: tokens of each row, so that all columns after them are padding; None where they
            are not known.

    Attributes:
        num_rows: rows of the batch; 1 if they are packed.
        is_packed: whether rows lie one after the other in one row, without padding.

    Raises:
        SettingError: no tensor shows the number of rows, or most tensors of a list have another.
    """

    knows_lengths = False

    def __init__(
        self, batch: Any, *, trims: bool = True, row_lengths: Sequence[int] | None = None
    ) -> None:
        self._batch = batch
        self._trims = trims
        self._row_lengths = row_lengths
        num_rows = _first_dimension(_outside_lists(batch))
        if num_rows is None:
            num_rows = _first_dimension(batch)
        if num_rows is None:
            remedy = f"no tensor in it shows the number of rows; {_SPLIT_REMEDY}"
            raise SettingError("batch", type(batch).__name__, remedy)
        self.is_packed = _is_packed(batch, num_rows)
        self.num_rows = num_rows = 1 if self.is_packed else num_rows
        if self.is_packed:
            return
        if any(self._is_unclear(items) for items in _lists_in(batch)):
            remedy = (
                f"its first tensor has {count(num_rows, 'row')}, and those of a list in it have"
                f" not; {_SPLIT_REMEDY}"
            )
            raise SettingError("batch", type(batch).__name__, remedy)

    def _is_unclear(self, items: list[Any]) -> bool:
        """Whether a list of tensors is neither of columns of all rows nor of one item a row."""
        num_columns = sum(map(self._has_rows, items))
        return len(items) != self.num_rows and 2 * num_columns < len(items)

    @property
    def divided(self) -> tuple[bool, ...]:
        """Whether each tensor of the batch is divided, in the order in which they lie there."""
        return tuple(
            bool(tensor.dim()) and len(tensor) == self.num_rows for tensor in _tensors(self._batch)
        )

    @property
    def width(self) -> int:
        """Columns that rows are padded to; 0 where nothing shows them."""
        if isinstance(self._batch, _MAPPING):
            for name in ("attention_mask", "tokens", "input_ids"):
                table = self._batch.get(name)
                if self._is_table(table):
                    return table.shape[1]
                if self.is_packed and isinstance(table, torch.Tensor):
                    return table.numel()
        return 0

    @cached_property
    def lengths(self) -> list[int] | None:
        """Columns that each row uses; None where nothing shows them."""
        used = self._used_columns()
        if used is None:
            return None
        columns = torch.arange(1, used.shape[1] + 1, device=used.device)
        lengths: list[int] = (used * columns).amax(dim=1).clamp(min=1).tolist()
        return lengths

    def _used_columns(self) -> torch.Tensor | None:
        """Return which columns each row uses: bool, `[rows, columns]`; None if nothing shows it."""
        if not isinstance(self._batch, _MAPPING):
            return None
        mask = self._batch.get("attention_mask")
        labels = self._batch.get("labels")
        tokens = self._batch.get("tokens", self._batch.get("input_ids"))
        if mask is None:
            if not (self._is_table(tokens) and self._is_table(labels)):
                return None
            if tokens.shape != labels.shape or labels.is_floating_point():
                return None
            mask = labels
        if not self._is_table(mask):
            return None
        used = torch.zeros_like(mask, dtype=torch.bool)
        has_other_width = self._is_table(tokens) and tokens.shape != mask.shape
        if not self._trims or has_other_width or self._has_other_tensor_as_wide():
            return ~used
        # In an additive mask 0 shows a token, and a large negative number hides it.
        if bool((mask < 0).any()) and mask is not labels:
            return ~used
        for name, padding in _PADDING.items():
            table = self._batch.get(name)
            if padding is not None and self._is_table(table) and table.shape == mask.shape:
                used |= (table != padding).to(used.device)
        if mask is labels:
            # After the last label of a row its padding is one token, again and again.
            used |= tokens != tokens[:, -1:]
        return used

    def _has_other_tensor_as_wide(self) -> bool:
        """Return whether a tensor is as wide as the rows, and perhaps not padded as they are."""
        if self._row_lengths is not None:
            return False
        named = [self._batch.get(name) for name in _PADDING]
        padded = {id(table) for table in named if self._is_table(table)}
        return any(
            self.width in tensor.shape[int(tensor.shape[:1] == (self.num_rows,)) :]
            for tensor in _tensors(self._batch)
            if id(tensor) not in padded
        )

    def _is_table(self, value: Any) -> TypeGuard[torch.Tensor]:
        """Whether a value is a tensor of `[rows, columns]`."""
        if not isinstance(value, torch.Tensor) or value.dim() != 2:
            return False
        return value.shape[0] == self.num_rows

    def part(self, rows: Sequence[int], /) -> Any:
        """Return the batch of some rows; the script's own tensors of all of them."""
        if len(rows) == self.num_rows:
            # A copy, since a function may pop from its batch and be called again.
            if isinstance(self._batch, _CONTAINER):
                return copy.copy(self._batch)
            return self._batch
        width = None
        used_width = None
        if self._trims and self.lengths is not None:
            width = self.width
            used_width = max(self.lengths[row] for row in rows)
            if self._row_lengths is not None:
                longest = max(self._row_lengths[row] for row in rows)
                used_width = min(width, max(used_width, longest))
        first = rows[0]
        last = rows[-1]
        index: Any = slice(first, last + 1) if last - first + 1 == len(rows) else list(rows)

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            some_rows = tensor[index]
            has_width = tensor.dim() == 2 and tensor.shape[1] == width
            if has_width:
                # Models call view() on their labels, which needs rows that lie side by side.
                return some_rows[:, :used_width].contiguous()
            return some_rows

        return self._map(self._batch, cut, index)

    def dummy(self) -> Any:
        """Return the row that has most labels, as the mean of none is no number."""
        labels = self._batch.get("labels") if isinstance(self._batch, _MAPPING) else None
        if not self._is_table(labels):
            return self.part([0])
        return self.part([int((labels[:, 1:] != IGNORE_INDEX).sum(dim=1).argmax())])

    def to_check(self) -> Splittable:
        """Return the batch as the check of a split divides it."""
        return self

    @property
    def cuts(self) -> bool:
        """Whether parts may have fewer columns than the batch."""
        lengths = self.lengths or []
        return not self.is_packed and any(length < self.width for length in lengths)

    def uncut(self) -> RowsOfBatch:
        """Return the same batch, whose parts keep all columns."""
        return RowsOfBatch(self._batch, trims=False)

    @property
    def treatment(self) -> str:
        """Whether each key is divided, cut or kept whole, for errors."""
        if not isinstance(self._batch, _MAPPING):
            return ""
        keys: dict[str, list[str]] = {}
        for key, value in self._batch.items():
            how = "divided" if self._has_rows(value) else "kept whole"
            if self.cuts and self._is_table(value) and value.shape[1] == self.width:
                how = "divided and cut"
            keys.setdefault(how, []).append(str(key))
        return "; ".join(f"{', '.join(names)} {how}" for how, names in keys.items())

    def _has_rows(self, value: Any) -> bool:
        return _first_dimension(value) == self.num_rows

    def _map(self, value: Any, cut: Callable[[torch.Tensor], torch.Tensor], index: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not value.dim() or len(value) != self.num_rows:
                return value
            return cut(value)
        if isinstance(value, _MAPPING):
            return _like(value, {key: self._map(item, cut, index) for key, item in value.items()})
        if not isinstance(value, list | tuple):
            return value
        if len(value) == self.num_rows and not any(map(self._has_rows, value)):
            # A column of texts or numbers, or of a tensor for each row.
            numbers = range(self.num_rows)[index] if isinstance(index, slice) else index
            return type(value)(value[number] for number in numbers)
        items = [self._map(item, cut, index) for item in value]
        # A named tuple.
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)


class RowSplitter:
    """Splits batches by rows.

    Args:
        trims: whether unused columns are cut.
        size: configured size of a part.
    """

    def __init__(self, *, trims: bool, size: ConfiguredSize) -> None:
        self._trims = trims
        self._size = size

    def __call__(self, batch: Any) -> RowsOfBatch:
        """Return a batch as rows.

        Raises:
            SettingError: its rows are packed into one, and a size of its parts is configured.
        """
        rows = RowsOfBatch(batch, trims=self._trims)
        if rows.is_packed:
            for key, value in asdict(self._size).items():
                if value is not None:
                    remedy = (
                        "the rows of the batch are packed into one without padding, which is not"
                        f" split; disable packing and padding_free, leave {key} out, or give split="
                    )
                    raise SettingError(key, value, remedy)
        return rows

    def stop_cutting(self) -> None:
        """Keep all columns in the parts of later batches."""
        self._trims = False


def _is_packed(batch: Any, num_rows: int) -> bool:
    """Return whether a batch has the ends of its rows, or positions that begin again in one row."""
    if not isinstance(batch, _MAPPING):
        return False
    if any(str(key).startswith("cu_seq") for key in batch):
        return True
    positions = batch.get("position_ids")
    tokens = batch.get("tokens", batch.get("input_ids"))
    if not isinstance(positions, torch.Tensor):
        return False
    is_flat = isinstance(tokens, torch.Tensor) and tokens.dim() == 1
    if positions.shape != (tokens.shape if is_flat else (num_rows, positions.numel())):
        return False
    begins = (positions[..., :-1] == 0) & (positions[..., 1:] == 1)
    return int(begins.sum()) > 1


def _first_dimension(value: Any) -> int | None:
    """Return the length of the first tensor in a batch that has dimensions; None without one."""
    if isinstance(value, torch.Tensor):
        if not value.dim():
            return None
        return value.shape[0]
    for item in _items_of(value):
        first_dimension = _first_dimension(item)
        if first_dimension is not None:
            return first_dimension
    return None


def _outside_lists(value: Any) -> Any:
    """Return a mapping without its lists and tuples, whose items may be one for each row."""
    if not isinstance(value, _MAPPING):
        return value
    return [item for item in value.values() if not isinstance(item, _LIST)]


def _lists_in(value: Any) -> Iterator[list[Any]]:
    """Yield the lists in a batch that hold tensors."""
    if isinstance(value, list) and any(isinstance(item, torch.Tensor) for item in value):
        yield value
    for item in _items_of(value):
        if not isinstance(item, torch.Tensor):
            yield from _lists_in(item)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a batch."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    for item in _items_of(value):
        yield from _tensors(item)


def _items_of(value: Any) -> Iterable[Any]:
    """Return what lies in a mapping, a list or a tuple; nothing of another value."""
    if isinstance(value, _MAPPING):
        return value.values()
    if isinstance(value, _LIST):
        return value
    return ()


def _like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return the items in the type of a mapping where that can be built of them, as of
    transformers' BatchEncoding.
    """
    if type(mapping) is dict:
        return items
    try:
        return type(mapping)(items)  # type: ignore[call-arg]  # Mapping itself takes nothing
    except TypeError:
        return items


def length_in_sample(
    sample: Callable[[int], Any], split: Callable[[Any], Splittable], device: torch.device
) -> int:
    """Return the tokens of the longest row of a sample of one, and leave random numbers as they
    were; 0 where nothing shows them.
    """
    with RandomState(device):
        try:
            lengths = split(sample(1)).lengths
        except SettingError:
            # A batch without a tensor can be tried, if not split.
            lengths = None
    return max(lengths or [0])


def counted_sample(
    sample: Callable[[int], Any], split: Callable[[Any], Splittable]
) -> Callable[[int], Any]:
    """Return a sample function that refuses a batch of fewer rows than it was asked for, where an
    earlier one had as many, or that has no more in it than one of fewer rows.
    """
    has_rows = False
    first: tuple[int, int] | None = None

    def make(num_rows: int) -> Any:
        nonlocal has_rows, first
        batch = sample(num_rows)
        try:
            rows = split(batch)
        except SettingError:
            # A batch without a tensor can be tried, if not split.
            return batch
        if rows.is_packed:
            return batch
        found = rows.num_rows
        has_rows |= found == num_rows
        size = sum(tensor.numel() for tensor in _tensors(batch))
        first = first or (num_rows, size)
        is_constant = num_rows > first[0] and size == first[1]
        if found < num_rows and (has_rows or not found or is_constant):
            remedy = "make as many, the longest more than once where there are no others"
            raise SettingError("sample", f"sample({num_rows}) of {count(found, 'row')}", remedy)
        return batch

    return make


class LabelCounter:
    """Counts the labels that the mean loss of a part is taken over, in each way that may be meant.

    Without a function that says so, ``labels`` of `[rows, columns]` may be shifted by the model,
    which leaves the first of each row out, or by the collate function. Which it is, the check of
    the first split shows.

    Args:
        num_labels: function that returns the labels of a batch, or the sum of their weights; None
            for its ``labels`` that are not -100, and where it has none, for its rows.
    """

    def __init__(self, num_labels: Callable[[Any], Any] | None) -> None:
        self._num_labels = num_labels

    def counts(self, batch: Any, num_rows: int) -> tuple[Any, ...]:
        """Return the labels of a batch, counted in each way that may be meant; the likelier first.

        Raises:
            SettingError: `num_labels` returned no number.
        """
        num_ways = 1
        if self._num_labels is None and _has_labels(batch) and batch["labels"].dim() == 2:
            num_ways = 2
        return tuple(self.count(batch, num_rows, way=way) for way in range(num_ways))

    def count(self, batch: Any, num_rows: int, *, way: int) -> float:
        """Return the labels of a batch, counted in one of the ways of :meth:`counts`."""
        if self._num_labels is not None:
            return label_count(self._num_labels(batch))
        if not _has_labels(batch):
            return num_rows
        labels = batch["labels"]
        if labels.dim() == 2 and way == 0:
            labels = labels[:, 1:]
        return int((labels != IGNORE_INDEX).count_nonzero())


def _has_labels(batch: Any) -> bool:
    labels = batch.get("labels") if isinstance(batch, _MAPPING) else None
    return isinstance(labels, torch.Tensor) and not labels.is_floating_point() and labels.dim() > 0


def has_shifted_labels(batch: Any) -> bool:
    """Return whether each label of a batch is the token after it, as where collate has shifted
    them, and not its own.
    """
    if not isinstance(batch, Mapping):
        return False
    labels: Any = batch.get("labels")
    tokens: Any = batch.get("tokens", batch.get("input_ids"))
    for tensor in (labels, tokens):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 2:
            return False
    if labels.shape != tokens.shape:
        return False
    is_label = labels != IGNORE_INDEX
    is_next = labels[:, :-1] == tokens[:, 1:]
    is_own = labels == tokens
    return bool(is_next[is_label[:, :-1]].all()) and not bool(is_own[is_label].all())


def label_count(count: Any) -> float:
    """Return the result of a user's `num_labels` as a number.

    Raises:
        SettingError: it is not a finite number, or it is below 0.
    """
    remedy = (
        "give a function that returns a number, 0 or more: how many labels are averaged over, or"
        " the sum of their weights"
    )
    try:
        tensor = torch.as_tensor(count, dtype=torch.float64 if type(count) is float else None)
    except (RuntimeError, TypeError, ValueError):
        raise SettingError("num_labels", count, remedy) from None
    if tensor.is_complex() or tensor.dim() or not 0 <= tensor < math.inf:
        raise SettingError("num_labels", count, remedy)
    return float(tensor) if tensor.is_floating_point() else int(tensor)
