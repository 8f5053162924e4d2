"""A runner of micro-batches around a small model whose rows are mappings with `tokens` and `labels`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.memory import DeviceMemory, device_memory
from adaptive_batch.training import (
    LimitChange,
    MicroBatchRunner,
    OOMRetry,
    RowLoss,
    count_shifted_labels,
    lengthened,
)

IGNORED = -100


class HeldLimit:
    """What one micro-batch may hold, until it is lowered."""

    def __init__(self, current: MicroBatchLimit, on_change: Callable[[LimitChange], object]) -> None:
        self.current, self._on_change = current, on_change

    def __call__(self) -> MicroBatchLimit:
        return self.current

    def lower(self, change: LimitChange) -> None:
        """Take a change, and pass it on."""
        self.current = change.after
        self._on_change(change)


def build_runner(
    model: nn.Module,
    limit: MicroBatchLimit,
    *,
    collate: Callable[[Sequence[Any]], dict[str, Any]],
    mean_loss: Callable[[dict[str, Any]], torch.Tensor],
    to_device: Callable[[dict[str, Any]], object] = lambda batch: None,
    dummy_row: Callable[[], Any] | None = None,
    on_change: Callable[[LimitChange], object] = lambda change: None,
    memory: DeviceMemory | None = None,
    retries: bool = True,
    pad_id: int = 0,
    kind: type[MicroBatchRunner] = MicroBatchRunner,
    **options: Any,
) -> MicroBatchRunner:
    """Return a runner whose limit is at ``retry.limit.current``."""

    def length(row: Any) -> int:
        return len(row["tokens"])

    def collate_to(rows: Sequence[Any], padded: int) -> dict[str, Any]:
        if padded > max(map(length, rows)):
            rows = lengthened(rows, padded, pad_id=pad_id, ignore_index=IGNORED)
        return collate(rows)

    count_labels = partial(count_shifted_labels, ignore_index=IGNORED)
    loss = RowLoss(collate_to, to_device, mean_loss, count_labels, length, length, dummy_row)
    held = HeldLimit(limit, on_change)
    memory = memory or device_memory(next(model.parameters()).device)
    return kind(model, loss, retry=OOMRetry(held, held.lower, memory=memory, retries=retries), **options)
