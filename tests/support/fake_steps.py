"""A small decoder whose training step runs on fake tensors."""

from __future__ import annotations

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


# torchao reads the values of these tables, so fill its cache before tensors are fake.
for states in (subclass_4bit, subclass_8bit):
    states.get_qmap_signed()
    states.get_qmap_unsigned()


def Decoder(*, checkpointing=False):
    """A decoder with tied embeddings and a frozen layer."""
    size = {"width": WIDTH, "vocabulary": WORDS, "layers": 3}
    return sharded_model.Decoder(**size, checkpointing=checkpointing, dtype=torch.float32)


def step_arguments(model, device, optimizer="AdamW fused", *, in_backward=False, accumulates=False):
    """Return the arguments of a step on fake tensors, or of a dry run if `device` is None."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    make = OPTIMIZERS[optimizer]
    if in_backward:
        stepping = OptimizerInBackward({parameter: make([parameter]) for parameter in trained})
    else:
        stepping = make(trained)

    def forward_backward(rows):
        batch = {"tokens": torch.ones(rows, LENGTH, dtype=torch.int64), "rows": rows}
        if device is not None:
            device.move_batch(batch)
        logits = model(batch["tokens"])
        F.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten()).backward()

    def step():
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepping.step()

    return {
        "model": model,
        "optimizer": stepping,
        "forward_backward": forward_backward,
        "step": step,
        "accumulates": accumulates,
    }


def fake_step(optimizer="AdamW fused", *, model=None, checkpointing=False, **how):
    device = FakeDevice()
    if model is None:
        with torch.device("meta"):
            model = Decoder(checkpointing=checkpointing)
    device.move(model)
    with device.mode:
        arguments = step_arguments(model, device, optimizer, **how)
    return FakeStep(device=device, **arguments)
