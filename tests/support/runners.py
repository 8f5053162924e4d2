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


class HeldSizer(MicroBatchSizer):
    """A sizer with a fixed limit until an OOM lowers it."""

    def __init__(
        self,
        current: MicroBatchLimit,
        *,
        layout: MicroBatchLayout | None = None,
        memory: DeviceMemory | None = None,
        on_change: Callable[[LimitChange], object] = lambda change: None,
    ) -> None:
        super().__init__(layout=layout, memory=memory, on_change=on_change)
        self._full_limit = current
        # Limit of the sizers of other passes; None for the configured one.
        self.limit_of_others: MicroBatchLimit | None = None

    def _limit_without_oom(self, batch_size: int) -> MicroBatchLimit:
        return self._full_limit

    def for_other_pass(
        self, kind: str, rows: int | str, layout: MicroBatchLayout
    ) -> MicroBatchSizer:
        """Return a sizer with `limit_of_others`, if it is set."""
        if self.limit_of_others is None:
            return super().for_other_pass(kind, rows, layout)
        return HeldSizer(self.limit_of_others, layout=layout, memory=self._memory)

    @property
    def current(self) -> MicroBatchLimit:
        """Current limit. An assignment also drops a lowered limit."""
        return self.limit()

    @current.setter
    def current(self, limit: MicroBatchLimit) -> None:
        self._reset_lowered_limit()
        self._full_limit = limit


class SmallRunner(RecipeStep):
    """A recipe step whose limit does not depend on the batch size."""

    sizer: HeldSizer

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
    """Return a step whose limit is ``sizer.current``."""

    def length(row: Any) -> int:
        return len(row["tokens"])

    def collate_to(rows: Sequence[Any], padded: int) -> dict[str, Any]:
        if padded > max(map(length, rows)):
            rows = lengthened(rows, padded, pad_id=0, ignore_index=IGNORED)
        return collate(rows)

    count_labels = partial(count_shifted_labels, ignore_index=IGNORED)
    loss = RowLoss(collate_to, to_device, mean_loss, count_labels, length, length, dummy_row)
    memory = memory or device_memory(next(model.parameters()).device)
    sizer = HeldSizer(limit, layout=layout, memory=memory, on_change=on_change)
    return kind(model, loss, sizer, memory=memory, **options)
