"""The layouts that micro-batches of a dataset's rows may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from adaptive_batch.data import IGNORE_INDEX, DatasetAdapter
from adaptive_batch.errors import SettingError
from adaptive_batch.probe import OBJECTIVES

from .model_checks import is_compiled
from .packing import Batch, Row, pack_rows
from .packing_check import why_not_packed
from .sizing import MicroBatchSizer
from .throughput_search import Choices


class RowLayouts:
    """Knows which layouts train the model alike, of which a search may choose the fastest.

    Args:
        model: model on its device.
        dataset: rows.
        collate: function that makes one padded batch of a list of rows, on the host.
        token_loss: function that returns the sum of the losses of a batch of one row.
        sizer: takes the layout that is configured.
        written: layout as configured; None for what is found fastest.
        chooses: whether a search chooses the fastest micro-batches.

    Attributes:
        chooses: as given.

    Raises:
        SettingError: packed rows are configured, and would not train the model as padded ones do.
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: DatasetAdapter,
        collate: Callable[[list[Row]], Batch],
        token_loss: Callable[[Batch], torch.Tensor],
        sizer: MicroBatchSizer,
        *,
        written: str | None,
        chooses: bool,
    ) -> None:
        self.chooses = chooses
        self._model = model
        self._dataset = dataset
        self._collate = collate
        self._token_loss = token_loss
        self._sizer = sizer
        self._written = written
        if written is not None:
            sizer.use_layout(written)
        if written == "packed":
            reason = self._why_not_packed()
            if reason:
                raise SettingError("micro_batch_layout", "packed", f"{reason}; or give grouped")

    def choices(self, step_rows: int, objective: str) -> Choices | None:
        """Return what the fastest micro-batches are chosen from; None where as much at once as fits
        is wanted.

        Args:
            step_rows: rows of a step on one device.
            objective: name of what is sought.
        """
        # With a saved state steps are cut as they were.
        is_known = self._sizer.throughput is not None
        times = OBJECTIVES[objective].cost is not None
        if not (self.chooses and times) or is_known or is_compiled(self._model):
            return None
        return Choices(self.kinds(), "tokens", step_rows, objective)

    def kinds(self) -> tuple[str, ...]:
        """Return the layouts of which the fastest may be; ranks ask together."""
        if self._written is not None:
            return (self._written,)
        if self._why_not_packed():
            return ("grouped",)
        return ("grouped", "packed")

    def _why_not_packed(self) -> str:
        """Return why packed rows would not train the model as padded ones do; empty where they
        would. Ranks ask together.
        """
        # A row of one token has no label.
        rows = self._dataset.longest(min(2, len(self._dataset)))
        if is_compiled(self._model):
            return (
                "the model is compiled, and packed micro-batches change shape every step, which"
                " recompiles"
            )
        for row in rows:
            if not (
                isinstance(row, Mapping)
                and "labels" in row
                and row.keys() & {"tokens", "input_ids"}
            ):
                return "rows are no mappings with `labels` and `tokens` or `input_ids`"

        def collate(rows: Sequence[Any], length: int) -> Any:
            return self._collate([dict(row) for row in rows])

        def pack(rows: Sequence[Any]) -> Any:
            return pack_rows(rows, ignore_index=IGNORE_INDEX)

        return why_not_packed(self._model, self._token_loss, rows, collate=collate, pack=pack)
