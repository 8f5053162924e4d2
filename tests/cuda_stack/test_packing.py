"""Packed rows on PyTorch's CUDA build: one attention kernel, and a peak that depends only on the
numbers of tokens and rows.
"""

from __future__ import annotations

import pytest
import torch
from support.processes import run_python
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from adaptive_batch.training import isolated_rows, pack_rows

pytestmark = pytest.mark.cuda_stack

CUDA, VOCABULARY, WIDTH, HEADS = torch.device("cuda", 0), 1000, 512, 8


class Layer(nn.Module):
    """A decoder layer with four query heads per key head, without biases."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, WIDTH + WIDTH // 2, bias=False)
        self.up, self.down = (
            nn.Linear(WIDTH, 4 * WIDTH, bias=False),
            nn.Linear(4 * WIDTH, WIDTH, bias=False),
        )

    def forward(self, x):
        heads = self.qkv(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
        q, k, v = heads.split([HEADS, HEADS // 4, HEADS // 4], 1)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + attended.transpose(1, 2).flatten(-2)
        return x + self.down(functional.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, *, checkpointing=False):
        super().__init__()
        self.ids, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16384, WIDTH)
        self.layers, self.out = (
            nn.ModuleList(Layer() for _ in range(3)),
            nn.Linear(WIDTH, VOCABULARY, bias=False),
        )
        self.checkpointing = checkpointing

    def forward(self, tokens, input_pos):
        x = self.ids(tokens) + self.places(input_pos)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return self.out(x)


def step(model, lengths, device=CUDA):
    """Run forward and backward of packed rows; return the number of attention calls."""
    rows = [{"tokens": [1] * length, "labels": [1] * length} for length in lengths]
    batch = {key: value.to(device) for key, value in pack_rows(rows, ignore_index=-100).items()}
    labels = batch.pop("labels")
    model.zero_grad()
    with isolated_rows(lengths) as packed:
        functional.cross_entropy(model(**batch)[0, :-1].float(), labels[0, 1:]).backward()
    return packed.calls


def peak(model, lengths):
    """Return the requested peak of a step without parameters, which earlier steps do not change."""
    step(model, lengths)
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    step(model, lengths)
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def operators(model, lengths):
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        calls = step(model, lengths)
    return calls, {
        event.key: event.count
        for event in profiled.key_averages()
        if "attention" in event.key.lower() or "attn" in event.key
    }


@pytest.mark.parametrize(("checkpointing", "forwards"), [(False, 3), (True, 6)])
def test_attention_of_rows_of_several_lengths_is_one_kernel(checkpointing, forwards):
    model = Decoder(checkpointing=checkpointing).to(CUDA, torch.bfloat16)
    calls, ran = operators(model, [100, 17, 300, 5])
    assert calls == forwards
    assert (ran["torch_attn::_varlen_attn"], ran["torch_attn::_varlen_attn_backward"]) == (
        forwards,
        3,
    )
    assert not any("scaled_dot_product" in name for name in ran)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_without_a_kernel_runs_row_by_row(dtype):
    query = torch.randn(1, 4, 10, 20, device=CUDA, dtype=dtype)  # head_dim is not a multiple of 8
    with profile(activities=[ProfilerActivity.CPU]) as profiled, isolated_rows([7, 3]):
        out = functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    ran = {event.key: event.count for event in profiled.key_averages()}
    assert out.shape == query.shape
    assert ran["aten::scaled_dot_product_attention"] == 2
    assert "torch_attn::_varlen_attn" not in ran


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_depends_only_on_tokens_and_rows(checkpointing):
    model, peaks = Decoder(checkpointing=checkpointing).to(CUDA, torch.bfloat16), {}
    for tokens in (4096, 8192, 16384):
        rows = tokens // 128
        shapes = [
            [128] * rows,
            [tokens - 3 * (rows - 1), *[3] * (rows - 1)],
            [8, 248] * (rows // 2),
        ]
        assert {(sum(lengths), len(lengths)) for lengths in shapes} == {(tokens, rows)}
        of_shapes = [peak(model, lengths) for lengths in shapes]
        assert max(of_shapes) < 1.01 * min(of_shapes)
        peaks[tokens] = of_shapes[0]
    assert peaks[8192] == pytest.approx((2 * peaks[4096] + peaks[16384]) / 3, rel=0.01)


def test_cumulative_lengths_are_on_the_device_of_each_layer():
    program = """
import torch
from torch.nn import functional
from adaptive_batch.training import isolated_rows
with isolated_rows([3, 5]) as packed:
    for number in range(2):
        heads = torch.zeros(3, 1, 2, 8, 64, dtype=torch.float16, device=f"cuda:{number}")
        functional.scaled_dot_product_attention(*heads, is_causal=True)
        print(packed._device_cu_seqlens.device)
"""
    done = run_python("-c", program, EMULATE_DEVICE_COUNT="2")
    assert done.stdout.split() == ["cuda:0", "cuda:1"]
