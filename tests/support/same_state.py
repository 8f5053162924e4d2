"""Comparison of states to the last bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def assert_same(found: Any, expected: Any, path: str = "state") -> None:
    """The same structure, and tensors of the same bits, shapes, strides and kinds."""
    if isinstance(expected, torch.Tensor):
        kind = torch.Tensor if type(expected) is nn.Parameter else type(expected)
        assert type(found) is kind, path
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        if hasattr(expected, "__tensor_flatten__"):
            names, context = expected.__tensor_flatten__()
            assert found.__tensor_flatten__() == (names, context)
            for name in names:
                assert_same(getattr(found, name), getattr(expected, name), f"{path}.{name}")
            return
        assert torch.equal(bits(found), bits(expected)), path
    elif isinstance(expected, dict):
        assert list(found) == list(expected), path
        assert [type(key) for key in found] == [type(key) for key in expected], path
        for key in expected:
            assert_same(found[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected), path
        assert len(found) == len(expected), path
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{path}.{number}")
    else:
        assert type(found) is type(expected), path
        assert found == expected or found != found, path  # nan is itself


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
