"""A recipe step on a small model. Its rows are mappings with `tokens` and `labels`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from adaptive_batch import distributed
from adaptive_batch.data import (
    MicroBatch,
    MicroBatchLayout,
    MicroBatchLimit,
    lengthened,
    micro_batches,
)
from adaptive_batch.memory import DeviceMemory, device_memory
from adaptive_batch.training import (
    LimitChange,
    MicroBatchSizer,
    RankReport,
    RecipeStep,
    RowLoss,
    StepResult,
    count_shifted_labels,
)

IGNORED = -100


def sizer_of(limit: MicroBatchLimit, **options: Any) -> MicroBatchSizer:
    """Return a sizer with a limit."""
    sizer = MicroBatchSizer(**options)
    set_limit(sizer, limit)
    return sizer


def set_limit(sizer: MicroBatchSizer, limit: MicroBatchLimit) -> None:
    """Set the configured limit of a sizer, and forget a lowered one."""
    sizer.micro_batch_size = limit.amount if limit.unit == "rows" else None
    sizer.micro_batch_tokens = limit.amount if limit.unit == "tokens" else None
    sizer._reset_lowered_limit()


class SmallRunner(RecipeStep):
    """A recipe step that needs no report of its rank."""

    def run(
        self, rows: Sequence[Any], report: RankReport | None = None, **options: Any
    ) -> StepResult:
        """Run the rows of a step; measure noise if the step can."""
        options.setdefault("measures_noise", self._measures_noise)
        return super().run(rows, report or report_of(rows), **options)

    def divide(self, rows: Sequence[Any]) -> list[MicroBatch]:
        """Divide rows as a step does."""
        lengths = list(map(self.loss.row_length, rows))
        return micro_batches(lengths, self.sizer.limit(), self.sizer.layout)


def report_of(rows: Sequence[Any]) -> RankReport:
    """Return the report of a rank with these rows of a step."""
    num_rows = sum(distributed.all_gather(len(rows)))
    return RankReport(batch_size=max(1, len(rows)), num_rows=num_rows)


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
    layout: MicroBatchLayout | None = None,
    kind: type[SmallRunner] = SmallRunner,
    **options: Any,
) -> SmallRunner:
    """Return a step with a limit."""

    def length(row: Any) -> int:
        return len(row["tokens"])

    def collate_to(rows: Sequence[Any], padded: int) -> dict[str, Any]:
        if padded > max(map(length, rows)):
            rows = lengthened(rows, padded, pad_id=0, ignore_index=IGNORED)
        return collate(rows)

    count_labels = partial(count_shifted_labels, ignore_index=IGNORED)
    loss = RowLoss(collate_to, to_device, mean_loss, count_labels, length, length, dummy_row)
    memory = memory or device_memory(next(model.parameters()).device)
    sizer = sizer_of(limit, layout=layout, memory=memory, on_change=on_change)
    return kind(model, loss, sizer, memory=memory, **options)
