"""Packed rows on PyTorch's CUDA build: the kernel they take, and a peak that depends on their tokens alone.

Proved here: which operators run and what they allocate, on autograd's own threads too. Not proved: values, and times.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from adaptive_batch.training import pack_rows, rows_apart

pytestmark = pytest.mark.cuda_stack

CUDA, VOCABULARY, WIDTH, HEADS = torch.device("cuda", 0), 1000, 512, 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, WIDTH + WIDTH // 2)  # a key and value for four heads each
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        heads = self.qkv(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
        q, k, v = heads.split([HEADS, HEADS // 4, HEADS // 4], 1)
        x = x + functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(-2)
        return x + self.down(functional.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, *, checkpointing=False):
        super().__init__()
        self.ids, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(1024, WIDTH)
        self.layers, self.out = nn.ModuleList(Layer() for _ in range(3)), nn.Linear(WIDTH, VOCABULARY)
        self.checkpointing = checkpointing

    def forward(self, tokens, input_pos):
        x = self.ids(tokens) + self.places(input_pos)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return self.out(x)


def step(model, lengths, device=CUDA):
    """Forward and backward of packed rows; return how many calls of attention there were."""
    rows = [{"tokens": [1] * length, "labels": [1] * length} for length in lengths]
    batch = {key: value.to(device) for key, value in pack_rows(rows, ignore_index=-100).items()}
    labels = batch.pop("labels")
    model.zero_grad()
    with rows_apart(lengths) as packed:
        functional.cross_entropy(model(**batch)[0, :-1].float(), labels[0, 1:]).backward()
    return packed.calls


def peak(model, lengths):
    step(model, lengths)
    torch.cuda.synchronize()
    model.zero_grad()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(model, lengths)
    return torch.cuda.max_memory_allocated() - before


def operators(model, lengths):
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        calls = step(model, lengths)
    return calls, {
        event.key: event.count
        for event in profiled.key_averages()
        if "attention" in event.key.lower() or "attn" in event.key
    }


@pytest.mark.parametrize(("checkpointing", "forwards"), [(False, 3), (True, 6)])
def test_attention_is_one_kernel_of_rows_of_several_lengths_in_backward_too(checkpointing, forwards):
    model = Decoder(checkpointing=checkpointing).to(CUDA, torch.bfloat16)
    calls, ran = operators(model, [100, 17, 300, 5])
    assert calls == forwards
    assert (ran["torch_attn::_varlen_attn"], ran["torch_attn::_varlen_attn_backward"]) == (forwards, 3)
    assert not any("scaled_dot_product" in name for name in ran)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_kernel_does_not_take_is_attended_row_by_row(dtype):
    query = torch.randn(1, 4, 10, 20, device=CUDA, dtype=dtype)  # heads of no multiple of 8
    with profile(activities=[ProfilerActivity.CPU]) as profiled, rows_apart([7, 3]):
        out = functional.scaled_dot_product_attention(query, query, query)
    ran = {event.key: event.count for event in profiled.key_averages()}
    assert out.shape == query.shape
    assert ran["aten::scaled_dot_product_attention"] == 2
    assert "torch_attn::_varlen_attn" not in ran


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_is_linear_in_tokens_whatever_the_rows(checkpointing):
    model = Decoder(checkpointing=checkpointing).to(CUDA, torch.bfloat16)
    per_token = {}
    for tokens in (2048, 4096, 8192):
        shapes = [[512] * (tokens // 512), [32] * (tokens // 32), [1000, *[8] * 131] * (tokens // 2048)]
        peaks = [peak(model, lengths) for lengths in shapes]
        assert {sum(lengths) for lengths in shapes} == {tokens}
        assert max(peaks) / min(peaks) < 1.01
        per_token[tokens] = peaks[0]
    slope = (per_token[8192] - per_token[2048]) / 6144
    assert per_token[4096] == pytest.approx(per_token[2048] + slope * 2048, rel=0.01)
