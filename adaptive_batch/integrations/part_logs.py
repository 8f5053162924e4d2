"""Values that the parts of a batch log, as those of the whole batch."""

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
    """Return a value of all parts; the last one of what is no number. NaN is left out where a part
    has another number, as a part may have nothing that a metric is taken over.

    Args:
        values: value of each part.
        weights: weight of each part.
        reduction: ``sum``, ``min`` or ``max``; any other is the mean.
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


def _over_parts_by_name(name: str, values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return a value of all parts: the extreme that its name says, or the mean."""
    extreme = _EXTREME.search(name)
    return over_parts(values, weights, extreme[1].lower() if extreme else "mean")


def log_calls(
    log: Callable[[dict[str, Any]], object],
    logged: Sequence[tuple[float, Sequence[Mapping[str, Any]]]],
) -> None:
    """Log once what each part has logged.

    Args:
        log: function that logs values by name.
        logged: weight of each part, and what it has called `log` with.
    """
    alike: defaultdict[Any, list[tuple[float, Mapping[str, Any]]]] = defaultdict(list)
    for weight, calls in logged:
        for number, call in enumerate(calls):
            alike[number, tuple(call)].append((weight, call))
    for (_, names), pairs in alike.items():
        weights, calls = zip(*pairs, strict=True)
        log(
            {
                name: _over_parts_by_name(name, [call[name] for call in calls], weights)
                for name in names
            }
        )


def merge_lists(lists: Any, before: Any, weights: Sequence[float], *, name: str = "") -> None:
    """Replace the numbers that parts have added to lists, each one, by the number of the batch.

    Args:
        lists: a list, or mappings of lists by name.
        before: the same before the parts have run; None where it was not there.
        weights: weight of each part.
        name: name of a list.
    """
    if isinstance(lists, Mapping):
        for key, item in lists.items():
            merge_lists(item, (before or {}).get(key), weights, name=str(key))
    elif isinstance(lists, list):
        new = lists[len(before or ()) :]
        if 1 < len(new) <= len(weights) and all(map(_is_number, new)):
            # A metric that only some parts have does not show which.
            own_weights = weights if len(new) == len(weights) else [1.0] * len(new)
            lists[-len(new) :] = [_over_parts_by_name(name, new, own_weights)]
