"""Seeds, and bit-for-bit comparison of states."""

from __future__ import annotations

import random
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from adaptive_batch.memory import plain_tensors


def seed_all(seed: int = 0) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def bits(value: Any) -> Any:
    """Replace each tensor by its type, dtype, shape and bytes; of a DTensor, those of the local
    shard.
    """
    if isinstance(value, torch.Tensor):
        kind = torch.Tensor if type(value) is nn.Parameter else type(value)
        # contiguous() keeps the strides of a tensor with at most one entry.
        layout = torch.contiguous_format
        parts = [part.detach().cpu().clone(memory_format=layout) for part in plain_tensors(value)]
        context = getattr(value, "__tensor_flatten__", lambda: ())()
        return [kind.__name__, context] + [
            (part.dtype, part.shape, part.flatten().view(torch.uint8).numpy().tobytes())
            for part in parts
        ]
    if isinstance(value, np.ndarray):
        return [value.dtype, value.shape, value.tobytes()]
    if is_dataclass(value):
        return [type(value), bits(vars(value))]
    if isinstance(value, dict):
        return [(type(key), key, bits(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [type(value), *map(bits, value)]
    # The repr of 0.0 and -0.0 differs, and that of two NaNs is equal.
    return [type(value), repr(value) if isinstance(value, float | complex) else value]


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of the values that differ between two states."""
    names = sorted(before.keys() | after.keys())
    return [name for name in names if before.get(name, "absent") != after.get(name, "absent")]


def assert_same(found: Any, expected: Any) -> None:
    """Assert that two states have the same structure and bits."""
    assert bits(found) == bits(expected), "the states differ"
