"""Reduction of the values that micro-batches log to values of the batch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

_REDUCTIONS: dict[str, Callable[[Any], Any]] = {"sum": sum, "min": min, "max": max}
_EXTREME = re.compile(r"(?<![a-z])(min|max)(?:imum)?(?![a-z])", re.IGNORECASE)


def over_parts(values: Sequence[Any], weights: Sequence[float], reduction: str) -> Any:
    """Reduce one value per micro-batch; return the last one if any is not a number.

    NaN is skipped unless all values are NaN: a metric may apply to no row of a micro-batch.

    Args:
        values: value of each micro-batch.
        weights: weight of each micro-batch.
        reduction: ``sum``, ``min`` or ``max``; the weighted mean otherwise.
    """
    if len(values) == 1 or not all(map(_is_number, values)):
        return values[-1]
    kept = [number for number, value in enumerate(values) if value == value] or [0]
    if reduction in _REDUCTIONS:
        return _REDUCTIONS[reduction](values[number] for number in kept)
    weighted = sum(weights[number] * values[number] for number in kept)
    return weighted / sum(weights[number] for number in kept)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _reduce_by_name(name: str, values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Reduce by minimum or maximum if `name` has that word, by the weighted mean otherwise."""
    extreme = _EXTREME.search(name)
    return over_parts(values, weights, extreme[1].lower() if extreme else "mean")


def log_calls(
    log: Callable[[dict[str, Any]], object],
    logged: Sequence[tuple[float, Sequence[Mapping[str, Any]]]],
) -> None:
    """Reduce the ``log`` calls of all micro-batches, and log each result once.

    Args:
        log: function that logs values by name.
        logged: weight and ``log`` calls of each micro-batch.
    """
    # Calls of different parts match if they have the same position and the same names.
    matching: defaultdict[Any, list[tuple[float, Mapping[str, Any]]]] = defaultdict(list)
    for weight, calls in logged:
        for position, values in enumerate(calls):
            names = tuple(values)
            matching[position, names].append((weight, values))
    for (_, names), pairs in matching.items():
        weights, values_of_parts = zip(*pairs, strict=True)
        log(
            {
                name: _reduce_by_name(name, [values[name] for values in values_of_parts], weights)
                for name in names
            }
        )


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
        new = lists[len(before or ()) :]
        if 1 < len(new) <= len(weights) and all(map(_is_number, new)):
            # If only some micro-batches appended a number, their weights are unknown.
            own_weights = weights if len(new) == len(weights) else [1.0] * len(new)
            lists[-len(new) :] = [_reduce_by_name(name, new, own_weights)]
