"""Reduction of the values that micro-batches log to values of the batch."""

from __future__ import annotations

import logging
import math
import re
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from numbers import Real
from typing import Any

import numpy as np
import torch

from adaptive_batch._util import replaced
from adaptive_batch.training import Part

log = logging.getLogger("adaptive_batch")

# Other subclasses of dict may refuse to be changed.
_DICTS = (dict, defaultdict, OrderedDict, Counter)
# Levels of dictionaries in an attribute whose items are restored in place.
_NUM_LEVELS = 2
# Larger tensors, such as copies of weights, and items of larger dictionaries are not restored.
MOST_ELEMENTS = 2**16
MOST_ENTRIES = 2**10
_REDUCTIONS: dict[str, Any] = {"sum": sum, "min": min, "max": max}
_EXTREME = re.compile(r"(?<![a-z])(min|max)(?:imum)?(?![a-z])", re.IGNORECASE)


def over_parts(values: Sequence[Any], weights: Sequence[float], reduction: str) -> Any:
    """Reduce one value per micro-batch; return the last one if any has no numeric type.

    NaN is skipped unless all values are NaN: a metric may apply to no row of a micro-batch.

    Args:
        values: value of each micro-batch.
        weights: weight of each micro-batch.
        reduction: ``sum``, ``min`` or ``max``; the weighted mean otherwise.
    """
    if len(values) == 1 or not all(map(is_number, values)):
        return values[-1]
    # NaN is not equal to itself. If all values are NaN, the first one gives NaN.
    kept = [number for number, value in enumerate(values) if value == value] or [0]
    if reduction in _REDUCTIONS:
        return _REDUCTIONS[reduction](values[number] for number in kept)
    weighted_sum = sum(weights[number] * values[number] for number in kept)
    return weighted_sum / sum(weights[number] for number in kept)


def is_number(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def reduce_by_name(name: str, values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Reduce by minimum or maximum if `name` has that word, by the weighted mean otherwise."""
    extreme = _EXTREME.search(name)
    return over_parts(values, weights, extreme[1].lower() if extreme else "mean")


class PartLogs(ABC):
    """Logs and attributes of a trainer or module during the micro-batches of one batch.

    Trials and failed attempts are undone: each attribute gets its earlier object again. Lists,
    deques, dictionaries of the standard library, metric objects (with `update` and `compute`), and
    tensors and arrays of at most 65,536 elements get their earlier contents. This also holds for
    the items of two levels of dictionaries of at most 1,024 items, and for metric objects among the
    last 1,024 items of a list. Changes inside other objects remain.

    A subclass defines :meth:`record` and :meth:`log_values`.

    Args:
        logger: trainer or module with the method ``log``.
        holders: objects whose attributes are restored.
        metrics: other metric objects that are restored.
        skipped: names of attributes that are not restored.
        merged: names of attributes whose lists have one number per batch.

    Attributes:
        weights: weight of each micro-batch so far.
        calls: ``log`` calls of each micro-batch, by a key that matches those of others.
    """

    def __init__(
        self,
        logger: Any,
        holders: Sequence[Any],
        *,
        metrics: Sequence[Any] = (),
        skipped: Collection[str],
        merged: Collection[str] = (),
    ) -> None:
        self.logger = logger
        self._holders = holders
        self._metrics = metrics
        self._skipped = skipped
        self._merged = merged
        self.weights: list[float] = []
        self.calls: list[dict[Any, Any]] = []
        # Lists by identity, which stay alive, and their lengths before the batch.
        self._lengths = {id(each): (each, len(each)) for _, each in self._lists()}
        # Restores the attributes before the batch; only training needs it.
        self._undo: Callable[[], None] | None = None

    @abstractmethod
    def record(self, calls: dict[Any, Any], *arguments: Any, **keywords: Any) -> None:
        """Add a call of ``log`` to the calls of a micro-batch."""

    @abstractmethod
    def log_values(self, key: Any, calls: Sequence[Any], weights: Sequence[float]) -> None:
        """Log the value of the batch.

        Args:
            key: key of the calls.
            calls: calls of the micro-batches that have one with this key.
            weights: weights of these micro-batches.
        """

    def _attributes(self, holder: Any) -> dict[str, Any]:
        return {name: value for name, value in vars(holder).items() if name not in self._skipped}

    def _values(self) -> Iterator[tuple[Sequence[str], Any]]:
        """Yield each value in the attributes with the names that lead to it."""
        for holder in self._holders:
            for name, value in self._attributes(holder).items():
                yield from _walk((type(holder).__name__, name), value)

    def _lists(self) -> Iterator[tuple[Sequence[str], list[Any]]]:
        return ((names, value) for names, value in self._values() if type(value) is list)

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the current logs and attributes."""
        calls, weights = [*self.calls], [*self.weights]
        saved = [(holder, self._attributes(holder)) for holder in self._holders]
        in_metrics = chain.from_iterable(_walk((), metric) for metric in self._metrics)
        undos = [undo for _, value in chain(in_metrics, self._values()) for undo in _undos(value)]

        def restore() -> None:
            self.calls, self.weights = [*calls], [*weights]
            for undo in undos:
                undo()
            for holder, attributes in saved:
                for name in self._attributes(holder).keys() - attributes.keys():
                    del vars(holder)[name]
                vars(holder).update(attributes)

        return restore

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Collect the ``log`` calls of a micro-batch instead of logging them."""
        calls: dict[Any, Any] = {}
        self.calls.append(calls)
        with replaced(self.logger, log=partial(self.record, calls)):
            yield

    @contextmanager
    def of_part(self, part: Part, weight: float) -> Iterator[None]:
        """Collect a micro-batch of a training step; undo trials, dummies and failed attempts."""
        # Nothing is undone in a `finally`: after an error, the first micro-batch of the next
        # attempt undoes all.
        if self._undo is None:
            self._undo = self.snapshot()
        if part.is_trial or part.share == 0:
            undo = self.snapshot()
            with self.collect():
                yield
            undo()
            return
        if part.is_first and self.calls:
            # An earlier attempt has changed the attributes, on ranks with enough memory too.
            self._undo()
        with self.collect():
            yield
        self.weights.append(weight)

    def log(self) -> None:
        """Reduce the logs and list entries of the micro-batches to one value for the batch."""
        for (holder, attribute, *keys), each in self._lists():
            _, num_before = self._lengths.get(id(each), (each, 0))
            appended = each[num_before:]
            is_one_each = len(appended) == len(self.weights)
            # A list with more numbers than micro-batches does not hold one number per batch.
            if not 1 < len(appended) <= len(self.weights) or not all(map(is_number, appended)):
                continue
            if attribute in self._merged:
                # If only some micro-batches appended a number, their weights are unknown.
                weights = self.weights if is_one_each else [1.0] * len(appended)
                name = keys[-1] if keys else attribute
                each[num_before:] = [reduce_by_name(name, appended, weights)]
            elif is_one_each:
                _warn_of_list(f"{holder}.{attribute}")
        for key in dict.fromkeys(chain(*self.calls)):
            with_key = [
                (calls[key], weight)
                for calls, weight in zip(self.calls, self.weights, strict=True)
                if key in calls
            ]
            self.log_values(key, *zip(*with_key, strict=True))


@cache
def _warn_of_list(name: str) -> None:
    log.warning(
        "%s got one number for each micro-batch, not for each batch, so its mean is not that of the"
        " batches; log the number with self.log, or update a torchmetrics metric",
        name,
    )


def _walk(
    names: Sequence[str],
    value: Any,
    num_levels: int = _NUM_LEVELS,
    most_elements: float = MOST_ELEMENTS,
    metrics: frozenset[int] = frozenset(),
) -> Iterator[tuple[Sequence[str], Any]]:
    """Yield a value, the items of its dictionaries and the metric objects in its lists, each with
    the names that lead to it.

    Args:
        names: names that lead to the value.
        value: value; of a metric object, its dictionary of attributes is visited.
        num_levels: levels of dictionaries whose items are visited.
        most_elements: limit of the elements of a visited tensor or array.
        metrics: identities of the metric objects that contain the value.
    """
    if _is_metric(value):
        # A metric object may contain itself.
        if id(value) in metrics:
            return
        metrics |= {id(value)}
        value, num_levels, most_elements = vars(value), _NUM_LEVELS, math.inf
    if isinstance(value, torch.Tensor) and value.numel() > most_elements:
        return
    if isinstance(value, np.ndarray) and value.size > most_elements:
        return
    yield names, value
    items: Iterable[tuple[Any, Any]] = ()
    if type(value) in _DICTS and num_levels and len(value) <= MOST_ENTRIES:
        items = value.items()
    elif type(value) is list:
        last = value[-MOST_ENTRIES:]
        items = [(number, item) for number, item in enumerate(last) if _is_metric(item)]
    for name, item in items:
        yield from _walk((*names, str(name)), item, num_levels - 1, most_elements, metrics)


def _is_metric(value: Any) -> bool:
    kind = type(value)
    return hasattr(kind, "update") and hasattr(kind, "compute") and hasattr(value, "__dict__")


def _undos(value: Any) -> Iterator[Callable[[], object]]:
    """Yield functions that restore the contents of a value in place, one after another."""
    kind = type(value)
    if kind is torch.Tensor:
        yield partial(_copy_back, value, value.detach().clone(), _num_changes(value))
    elif kind is np.ndarray and value.flags.writeable:
        yield partial(np.copyto, value, value.copy())
    elif kind in _DICTS:
        yield value.clear
        yield partial(value.update, {**value})
    elif kind in (list, deque):
        yield value.clear
        yield partial(value.extend, [*value])


def _copy_back(tensor: torch.Tensor, copied: torch.Tensor, num_changes: int | None) -> None:
    if num_changes is None or _num_changes(tensor) != num_changes:
        # This mode also changes tensors that were created in it.
        with torch.inference_mode():
            tensor.copy_(copied)


def _num_changes(tensor: torch.Tensor) -> int | None:
    """Return the number of changes in place; None if PyTorch does not count them."""
    return None if tensor.is_inference() else tensor._version
