"""Estimates of compiled models in scripts, compared with the memory of Inductor's code."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from adaptive_batch import estimate_memory

pytestmark = pytest.mark.cuda_stack

VOCABULARY, WIDTH, ROWS, LENGTH = 8000, 1024, 8, 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 16, 64)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def made(device: str, how: str) -> nn.Module:
    with torch.device(device):
        layers = [Block() for _ in range(3)]
        model = nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY)
        ).to(torch.bfloat16)
    if how == "by layer":
        for layer in layers:
            layer.compile(dynamic=False)
    elif how == "wrapped layers":
        for number, layer in enumerate(layers, start=1):
            model[number] = torch.compile(layer, dynamic=False)
    return model


def mean_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def allocated(how: str) -> int:
    """Return the peak of three steps on the emulated device, in bytes."""
    model = made("cuda", how)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = {name: torch.ones(ROWS, LENGTH, dtype=torch.long) for name in ("tokens", "labels")}
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        on_device = {name: tensor.cuda() for name, tensor in batch.items()}
        mean_loss(model, on_device).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("how", ["eager", "by layer", "wrapped layers"])
def test_an_eager_estimate_is_exact_and_a_compiled_one_an_upper_bound(how):
    model = made("meta", how)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = {name: torch.ones(ROWS, LENGTH, dtype=torch.long) for name in ("tokens", "labels")}
    estimate = estimate_memory(
        model,
        batch,
        optimizer,
        "H100",
        mean_loss=lambda batch: mean_loss(model, batch),
        maximum=ROWS,
    )
    assert not any("the eager program" in sentence for sentence in estimate.left_out)
    (fit,) = estimate.devices[0].lengths
    assert fit.max_batch_size == ROWS
    gc.collect()
    # The estimate does not use up the recompilation limit.
    peak = allocated(how)
    if how == "eager":
        assert fit.allocated_bytes == pytest.approx(peak, rel=0.002)
    assert 0.998 * peak <= fit.allocated_bytes <= 1.1 * peak
