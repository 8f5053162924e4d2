"""Reduction of the values that micro-batches log to values of the batch."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from numbers import Real
from types import NoneType
from typing import Any

import torch
from torch import nn

from adaptive_batch._util import replaced
from adaptive_batch.training import Part

log = logging.getLogger("adaptive_batch")

# Types of values that are saved.
_SCALARS = (int, float, bool, str, NoneType)
_VALUES = (*_SCALARS, torch.Tensor, dict, list, deque)
# Larger tensors in attributes, such as copies of weights, are not saved.
_MOST_ELEMENTS = 2**16
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

    Saved attributes are numbers, texts, tensors, lists, dictionaries and metric objects (with
    `update` and `compute`). A subclass defines :meth:`record` and :meth:`log_values`.

    Args:
        logger: trainer or module with the method ``log``.
        holders: objects whose attributes are saved.
        skipped: names of attributes that are not saved.
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
        skipped: Collection[str],
        merged: Collection[str] = (),
    ) -> None:
        self.logger = logger
        self._holders = holders
        self._skipped = skipped
        self._merged = merged
        self.weights: list[float] = []
        self.calls: list[dict[Any, Any]] = []
        # Lengths of lists by identity. `_undo` keeps the lists alive and restores them in place.
        self._lengths = {id(each): len(each) for _, each in self._lists()}
        self._undo = self.snapshot()

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
        return {
            name: value
            for name, value in vars(holder).items()
            if name not in self._skipped and (isinstance(value, _VALUES) or _is_metric(value))
        }

    def _lists(self) -> Iterator[tuple[Sequence[str], list[Any]]]:
        """Yield each list in the attributes with the names that lead to it."""
        for holder in self._holders:
            yield from _lists_in((type(holder).__name__,), self._attributes(holder))

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the current logs and attributes."""
        calls, weights = [*self.calls], [*self.weights]
        saved = [(holder, self._attributes(holder)) for holder in self._holders]
        restore_values = [_save(attributes) for _, attributes in saved]

        def restore() -> None:
            self.calls, self.weights = [*calls], [*weights]
            for restore_attributes in restore_values:
                restore_attributes()
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
            num_before = self._lengths.get(id(each), 0)
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


def _lists_in(names: Sequence[str], value: Any) -> Iterator[tuple[Sequence[str], list[Any]]]:
    if isinstance(value, list):
        yield names, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _lists_in((*names, str(name)), item)


@cache
def _warn_of_list(name: str) -> None:
    log.warning(
        "%s got one number for each micro-batch, not for each batch, so its mean is not that of the"
        " batches; log the number with self.log, or update a torchmetrics metric",
        name,
    )


def _save(values: dict[str, Any]) -> Callable[[], None]:
    """Return a function that restores the contents of a dictionary and of all containers and
    metric objects in it, which keep their identity.
    """
    saved = []
    for container, is_metric in _containers_in(values):
        contents: Any = [*container]
        copies: dict[Any, tuple[torch.Tensor, int | None]] = {}
        if isinstance(container, dict):
            contents = {**container}
            for name, item in container.items():
                # Other tensors, and those in lists, do not change in place, and take much memory.
                is_tensor = isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter)
                if is_tensor and (is_metric or item.numel() <= _MOST_ELEMENTS):
                    copies[name] = item.clone(), _num_changes(item)
        saved.append((container, contents, copies))

    def restore() -> None:
        for container, contents, copies in saved:
            container.clear()
            if not isinstance(container, dict):
                container.extend(contents)
                continue
            container.update(contents)
            for name, (copied, num_changes) in copies.items():
                if num_changes is None or _num_changes(contents[name]) != num_changes:
                    container[name] = copied.clone()

    return restore


def _num_changes(tensor: torch.Tensor) -> int | None:
    """Return the number of changes in place; None if PyTorch does not count them."""
    return None if tensor.is_inference() else tensor._version


def _containers_in(value: Any, is_metric: bool = False) -> Iterator[tuple[Any, bool]]:
    """Yield the containers in a value, and whether they belong to a metric object."""
    if _is_metric(value):
        value, is_metric = vars(value), True
    items: Iterable[Any] = ()
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, list | deque):
        # A list may be long.
        has_only_scalars = set(map(type, value)) <= {*_SCALARS, torch.Tensor, nn.Parameter}
        items = () if has_only_scalars else value
    else:
        return
    yield value, is_metric
    for item in items:
        yield from _containers_in(item, is_metric)


def _is_metric(value: Any) -> bool:
    kind = type(value)
    return hasattr(kind, "update") and hasattr(kind, "compute") and hasattr(value, "__dict__")


def leaves(value: Any) -> Iterator[Any]:
    """Yield the values in nested mappings and lists."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | deque):
        for item in value:
            yield from leaves(item)
    else:
        yield value
