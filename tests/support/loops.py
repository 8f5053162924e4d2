"""A model, its optimizer and an AdaptiveLoop for tests."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from support.same_state import seed_all
from support.sharded_model import Decoder, collate, make_rows, padded, token_losses
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from adaptive_batch.data import Sampling
from adaptive_batch.training import AdaptiveLoop, StepOptions

ROWS = make_rows([3 + (5 * number) % 13 for number in range(40)])
RATE = 0.05


def training(
    *,
    model: nn.Module | None = None,
    rows: Any = ROWS,
    optimizer: Any = torch.optim.AdamW,
    **options: Any,
) -> SimpleNamespace:
    """Return a model, its optimizer and a loop."""
    model = model or Decoder()
    seed_all()
    optimizer = optimizer(model.parameters(), lr=RATE)
    options.setdefault("mean_loss", lambda batch: token_losses(model, batch, "mean"))
    options.setdefault("collate", collate)
    options.setdefault("batch_size", 4)
    if schedule := options.pop("schedule", None):
        options["lr_scheduler"] = LambdaLR(optimizer, schedule)
    for name, group in (("sampling", Sampling), ("options", StepOptions)):
        own = options.keys() & {field.name for field in fields(group)}
        options.setdefault(name, group(**{key: options.pop(key) for key in own}))
    loop = AdaptiveLoop(model, optimizer, rows, **options)
    return SimpleNamespace(model=model, optimizer=optimizer, loop=loop)


def train(one: SimpleNamespace, *, epochs: int = 1, until: int = 10**9) -> list[SimpleNamespace]:
    """Train for `epochs` epochs or until step `until`; return rows, loss and rate of each step."""
    seen: list[SimpleNamespace] = []
    while one.loop.progress.epoch < epochs and one.loop.progress.steps < until:
        epoch = one.loop.progress.epoch
        for rows in one.loop:
            result = one.loop.run(rows)
            one.optimizer.step()
            one.optimizer.zero_grad()
            step = SimpleNamespace(epoch=epoch, result=result, loss=result.loss)
            step.rows, step.rate = [row["row"] for row in rows], one.loop.learning_rate
            seen.append(step)
            if one.loop.progress.steps >= until:
                return seen
    return seen


def of_ranks(state: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return the state of a loop as saved on `ranks` ranks."""
    changed = copy.deepcopy(state)
    changed["batches"]["steps"]["ranks"] = ranks
    return changed


def sizes(seen: list[SimpleNamespace], epoch: int | None = None) -> list[int]:
    return [step.result.rows for step in seen if epoch is None or step.epoch == epoch]


def collate_features(features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate rows of input_ids to a padded batch, as Transformers does."""
    ids = [row["input_ids"] for row in features]
    rows = [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in ids]
    return padded(rows, input_ids=0, attention_mask=0, labels=-100)


class RunsOut:
    """A mean loss that runs out of memory if a micro-batch has too many rows."""

    def __init__(self, model: nn.Module, *, most: int, times: int = 10**9) -> None:
        self.model, self.most, self.times = model, most, times

    def __call__(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = len(batch["tokens"])
        loss = token_losses(self.model, batch, "mean")
        if rows > self.most and self.times > 0:
            self.times -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss


class Scaler(torch.amp.GradScaler):
    """A gradient scaler that stores the scale of each step."""

    def __init__(self, *, init_scale):
        super().__init__("cpu", init_scale=init_scale, growth_interval=2)
        self.scales = []

    def update(self, new_scale=None):
        self.scales.append(self.get_scale())
        super().update(new_scale)
