"""A small decoder whose training step runs on fake tensors."""

from __future__ import annotations

from functools import partial

import torch
import torchao.optim
from support import sharded_model
from torch import nn
from torch.nn import functional as F
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


def Decoder(*, checkpointing=False, words=WORDS, layers=3):
    """A decoder with tied embeddings and a frozen layer."""
    size = {"width": WIDTH, "vocabulary": words, "layers": layers}
    return sharded_model.Decoder(**size, checkpointing=checkpointing, dtype=torch.float32)


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
