"""Reduction of the values that micro-batches log to values of the batch."""

from __future__ import annotations

import copy
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch

from adaptive_batch._util import replaced
from adaptive_batch.training import Part

# Attributes of TRL's trainers that hold metrics: lists with one number per batch.
_LISTS = ("_metrics", "_stored_metrics")

# Types of values in metric attributes.
_VALUES = (int, float, str, torch.Tensor)
_REDUCTIONS: dict[str, Any] = {"sum": sum, "min": min, "max": max}
_EXTREME = re.compile(r"(?<![a-z])(min|max)(?:imum)?(?![a-z])", re.IGNORECASE)


def over_parts(values: Sequence[Any], weights: Sequence[float], reduction: str) -> Any:
    """Reduce one value per micro-batch; return the last one if any is not a number.

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


def _reduce_by_name(name: str, values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Reduce by minimum or maximum if `name` has that word, by the weighted mean otherwise."""
    extreme = _EXTREME.search(name)
    return over_parts(values, weights, extreme[1].lower() if extreme else "mean")


def merge_lists(lists: Any, before: Any, weights: Sequence[float], *, name: str = "") -> None:
    """Replace the numbers that micro-batches appended to lists by one number per list.

    Args:
        lists: a list, or nested mappings of lists.
        before: copy of `lists` from before the micro-batches; None if it did not exist.
        weights: weight of each micro-batch.
        name: name of the list.
    """
    if isinstance(lists, Mapping):
        for key, item in lists.items():
            merge_lists(item, (before or {}).get(key), weights, name=str(key))
    elif isinstance(lists, list):
        appended = lists[len(before or ()) :]
        # A list with more numbers than micro-batches does not hold one number per batch.
        if 1 < len(appended) <= len(weights) and all(map(is_number, appended)):
            # If only some micro-batches appended a number, their weights are unknown.
            own_weights = weights if len(appended) == len(weights) else [1.0] * len(appended)
            lists[-len(appended) :] = [_reduce_by_name(name, appended, own_weights)]


class PartLogs:
    """Logs and metric attributes of a trainer during the micro-batches of one batch.

    Metric attributes of the trainer and of its state hold numbers, texts, tensors and metric
    objects (with `update` and `compute`), also nested in mappings and lists.

    Args:
        trainer: trainer with a method ``log`` for a mapping of values by name.

    Attributes:
        weights: weight of each micro-batch so far.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.weights: list[float] = []
        # The `log` calls of each micro-batch.
        self._calls: list[list[dict[str, Any]]] = []
        self._lists_before = {name: _copy(vars(trainer).get(name)) for name in _LISTS}
        self._undo = self.snapshot()

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the current logs and metric attributes."""
        calls, weights = [*self._calls], [*self.weights]
        holders = (self._trainer, self._trainer.state)
        saved = [_copy(_metrics_of(holder)) for holder in holders]
        restore_objects = save_objects(filter(_is_object, leaves(saved)))

        def restore() -> None:
            self._calls, self.weights = [*calls], [*weights]
            for holder, metrics in zip(holders, saved, strict=True):
                for name in _metrics_of(holder):
                    delattr(holder, name)
                vars(holder).update(_copy(metrics))
            restore_objects()

        return restore

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Collect the ``log`` calls of a micro-batch instead of logging them."""
        calls: list[dict[str, Any]] = []
        self._calls.append(calls)

        def log(values: Mapping[str, Any], *_: Any, **__: Any) -> None:
            calls.append(
                {
                    name: value.detach() if isinstance(value, torch.Tensor) else value
                    for name, value in values.items()
                }
            )

        with replaced(self._trainer, log=log):
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
        if part.is_first:
            # An earlier attempt may have updated the metrics, on ranks with enough memory too.
            self._undo()
        with self.collect():
            yield
        self.weights.append(weight)

    def log(self) -> None:
        """Reduce the logs and list entries of the micro-batches to one value for the batch."""
        for name, before in self._lists_before.items():
            merge_lists(vars(self._trainer).get(name), before, self.weights)
        # The weights and values of the calls of different micro-batches that match: they have the
        # same position among the calls of their micro-batch, and the same names.
        matching: defaultdict[Any, list[tuple[float, Mapping[str, Any]]]] = defaultdict(list)
        for weight, calls in zip(self.weights, self._calls, strict=True):
            for position, values in enumerate(calls):
                matching[position, tuple(values)].append((weight, values))
        for (_, names), pairs in matching.items():
            weights = [weight for weight, _ in pairs]
            self._trainer.log(
                {
                    name: _reduce_by_name(name, [values[name] for _, values in pairs], weights)
                    for name in names
                }
            )


def save_objects(objects: Iterable[Any]) -> Callable[[], None]:
    """Return a function that restores the current attributes of metric objects."""

    def copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
        copies: dict[str, Any] = {}
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor):
                # An object may change its tensors in place.
                copies[name] = value.clone()
            elif isinstance(value, list) and set(map(type, value)) <= {torch.Tensor}:
                # Objects only append to lists of tensors, which may become long.
                copies[name] = [*value]
            else:
                copies[name] = _copy(value)
        return copies

    saved = [(each, copied(vars(each))) for each in objects]

    def restore() -> None:
        for each, attributes in saved:
            vars(each).update(copied(attributes))

    return restore


def _metrics_of(holder: Any) -> dict[str, Any]:
    """Return the metric attributes of a trainer or of its state, except its long list of logs."""
    return {
        name: value
        for name, value in vars(holder).items()
        if name != "log_history"
        and all(isinstance(leaf, _VALUES) or _is_object(leaf) for leaf in leaves(value))
    }


def _is_object(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("update", "compute", "__dict__"))


def _copy(value: Any) -> Any:
    """Copy nested mappings and lists, but not the values in them."""
    return copy.deepcopy(value, {id(leaf): leaf for leaf in leaves(value)})


def leaves(value: Any) -> Iterator[Any]:
    """Yield the values in nested mappings and lists."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | deque):
        for item in value:
            yield from leaves(item)
    else:
        yield value
