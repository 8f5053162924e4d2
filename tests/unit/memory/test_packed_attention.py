"""Attention of packed rows as a custom operator."""

from __future__ import annotations

import pytest
import torch

from adaptive_batch.memory import packed_attention

ENDS = torch.tensor([0, 5, 6, 13, 16], dtype=torch.int32)


def heads(dtype=torch.float64, number=2):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(16, number, 8, generator=generator, dtype=dtype).requires_grad_()
        for _ in range(3)
    ]


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
