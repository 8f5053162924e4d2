"""Attention of packed rows as a custom operator."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from adaptive_batch.memory import packed_attention

LENGTHS = [5, 1, 7, 3]
ENDS = torch.tensor([0, 5, 6, 13, 16], dtype=torch.int32)


def heads(dtype=torch.float64, number=2):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(16, number, 8, generator=generator, dtype=dtype).requires_grad_()
        for _ in range(3)
    ]


def of_each_row(query, key, value, scale):
    rows = zip(*(tensor.split(LENGTHS) for tensor in (query, key, value)), strict=True)
    return torch.cat(
        [
            functional.scaled_dot_product_attention(
                *(tensor.transpose(0, 1)[None] for tensor in row), is_causal=True, scale=scale
            )[0].transpose(0, 1)
            for row in rows
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_output_and_gradients_are_those_of_each_row_alone(dtype, scale):
    tensors = heads(dtype)
    gradient = torch.linspace(-1, 1, 256, dtype=dtype).view(16, 2, 8)
    output, sums = packed_attention(*tensors, ENDS, scale)
    expected = of_each_row(*tensors, scale)
    torch.testing.assert_close(output, expected)
    assert sums.shape == (2, 16)
    gradients = torch.autograd.grad(output, tensors, gradient)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, tensors, gradient))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_fake_operator_returns_the_same_shapes_and_strides(dtype):
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    outcome = torch.library.opcheck(
        packed_attention, (*heads(dtype), ENDS, None), test_utils=checks
    )
    assert outcome == dict.fromkeys(checks, "SUCCESS")


def test_ends_that_do_not_match_the_tokens_are_refused():
    with pytest.raises(ValueError, match=r"^attention of 16 tokens .* rows of 13 "):
        packed_attention(*heads(), ENDS[:-1], None)
