"""A small decoder whose training step runs on fake tensors."""

from __future__ import annotations

from functools import partial

import torch
import torchao.optim
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchao.optim import subclass_4bit, subclass_8bit

from adaptive_batch.estimate import FakeDevice, FakeStep
from adaptive_batch.memory import OptimizerInBackward

WORDS, WIDTH, LENGTH = 600, 64, 24
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=False),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW8bit": torchao.optim.AdamW8bit,
    "AdamW4bit": torchao.optim.AdamW4bit,
}


for states in (
    subclass_4bit,
    subclass_8bit,
):  # tables that are looked into, which fake ones cannot be
    states.get_qmap_signed()
    states.get_qmap_unsigned()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return x + self.mlp(x)


class Decoder(nn.Module):
    """Tied embeddings, a frozen parameter and a buffer that a forward changes in place."""

    def __init__(self, *, checkpointing: bool = False, words: int = WORDS, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.register_buffer("seen", torch.zeros(5))
        self.checkpointing = checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += len(tokens)
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return x @ self.embed.weight.T


def run(model, put, rows, *, length=LENGTH):
    batch = {"tokens": torch.ones(rows, length, dtype=torch.int64), "rows": rows}
    put(batch)
    logits = model(batch["tokens"])
    F.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten()).backward()


def made(model, optimizer, in_backward):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not in_backward:
        return OPTIMIZERS[optimizer](trained)
    return OptimizerInBackward(
        {parameter: OPTIMIZERS[optimizer]([parameter]) for parameter in trained}
    )


def stepped(model, optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def fake_step(
    optimizer="AdamW fused",
    *,
    in_backward=False,
    accumulates=False,
    model=None,
    device=None,
    **options,
):
    device = device or FakeDevice()
    if model is None:
        with torch.device("meta"):
            model = Decoder(**options)
    device.move(model)
    with device.mode:
        taking = made(model, optimizer, in_backward)
    return FakeStep(
        model=model,
        optimizer=taking,
        forward_backward=partial(run, model, device.move_batch),
        step=lambda: stepped(model, taking),
        accumulates=accumulates,
        device=device,
    )
