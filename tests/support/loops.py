"""A model, its optimizer and a loop around them, for tests of AdaptiveLoop and of its parts."""

from __future__ import annotations

import copy
import random
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from support.sharded_model import (
    Decoder,
    collate,
    make_rows,
    token_losses,
)
from torch import nn
from torch.optim.lr_scheduler import (
    LambdaLR,
)

from adaptive_batch.data import Sampling
from adaptive_batch.memory import device_memory
from adaptive_batch.training import AdaptiveLoop, StepOptions

ROWS = make_rows([3 + (5 * number) % 13 for number in range(40)])
RATE = 0.05


def seed_all() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def training(
    *,
    model: nn.Module | None = None,
    rows: Any = ROWS,
    optimizer: Any = torch.optim.AdamW,
    **options: Any,
) -> SimpleNamespace:
    """A model, its optimizer and the loop around them."""
    model = model or Decoder()
    seed_all()
    optimizer = optimizer(model.parameters(), lr=RATE)
    options.setdefault("mean_loss", lambda batch: token_losses(model, batch, "mean"))
    options.setdefault("collate", collate)
    options.setdefault("batch_size", 4)
    if schedule := options.pop("schedule", None):
        options["lr_scheduler"] = LambdaLR(optimizer, schedule)
    for name, group in (("sampling", Sampling), ("options", StepOptions)):
        given = {
            field.name: options.pop(field.name) for field in fields(group) if field.name in options
        }
        options.setdefault(name, group(**given))
    return SimpleNamespace(
        model=model, optimizer=optimizer, loop=AdaptiveLoop(model, optimizer, rows, **options)
    )


def train(one: SimpleNamespace, *, epochs: int = 1, until: int = 10**9) -> list[SimpleNamespace]:
    """Train to the end of so many epochs, or until so many steps are done: what each step held and
    came to.
    """
    seen: list[SimpleNamespace] = []
    while one.loop.progress.epoch < epochs and one.loop.progress.steps < until:
        epoch = one.loop.progress.epoch
        for rows in one.loop:
            result = one.loop.run(rows)
            one.optimizer.step()
            one.optimizer.zero_grad()
            numbers = [row["row"] for row in rows]
            rate = one.loop.learning_rate
            seen.append(
                SimpleNamespace(
                    epoch=epoch, rows=numbers, result=result, rate=rate, loss=result.loss
                )
            )
            if one.loop.progress.steps >= until:
                return seen
    return seen


def of_ranks(state: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The state of a loop as if it had been saved on so many ranks."""
    changed = copy.deepcopy(state)
    changed["batches"]["steps"]["ranks"] = ranks
    return changed


def sizes(seen: list[SimpleNamespace], epoch: int | None = None) -> list[int]:
    return [step.result.rows for step in seen if epoch is None or step.epoch == epoch]


class RunsOut:
    """A mean loss that runs out of memory, as a device does, where a micro-batch has too
    many rows.
    """

    def __init__(self, model: nn.Module, *, most: int, after: int = 0, times: int = 10**9) -> None:
        self.model, self.most, self.left, self.times = model, most, after, times

    def __call__(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = len(batch["tokens"])
        loss = token_losses(self.model, batch, "mean")
        self.left -= 1
        if rows > self.most and self.left < 0 and self.times > 0:
            self.times -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss


def peak_by_hand(one: SimpleNamespace, size: int) -> int:
    """Return the peak of forward and backward of the longest rows in plain torch, with the
    optimizer's state in memory.
    """
    longest = sorted(ROWS, key=lambda row: -len(row["tokens"]))[:size]
    one.optimizer.zero_grad()
    state = [value for state in one.optimizer.state.values() for value in state.values()]
    resident = [*one.model.parameters(), *one.model.buffers(), *state]
    with device_memory(torch.device("cpu")).measure(resident, budget_bytes=2**60) as usage:
        batch = collate(longest)
        count = (batch["labels"][:, 1:] != -100).sum()
        (token_losses(one.model, batch, "mean") * count).backward()
    one.optimizer.zero_grad()
    return usage.peak_bytes


def classes() -> tuple[dict[str, Any], Any]:
    """Rows of three classes as tuples, and what a loop needs to know of them."""
    generator = torch.Generator().manual_seed(0)
    points = [(torch.randn(5, generator=generator), number % 3) for number in range(32)]
    options = {
        "collate": lambda rows: (
            torch.stack([point for point, _ in rows]),
            torch.tensor([one for _, one in rows]),
        ),
        "num_labels": lambda batch: len(batch[1]),
    }
    return options, points
