"""What a loss takes of each row from a frozen reference, for all rows of a step at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .row_loss import RowLoss
from .sizing import MicroBatchSizer
from .snapshot import StepSnapshot

if TYPE_CHECKING:
    from .recipe_step import RecipeStep

# The kind of micro-batch by which ranks know its collectives.
REFERENCE = "reference"
# The key of a batch under which its loss takes what the reference has computed of it.
REFERENCE_VALUES = "reference_values"


@dataclass(frozen=True)
class RowReference:
    """What a loss takes of each row from a frozen reference.

    Attributes:
        values: function that returns it of a batch on the device, which it may empty:
            `[rows, numbers]`.
        num_values: numbers of each row.
        sizer: decides what a micro-batch of the reference may hold, apart from training's.
    """

    values: Callable[[dict[str, Any]], torch.Tensor]
    num_values: int
    sizer: MicroBatchSizer


class ReferencePass:
    """Runs the reference of a loss on the rows of a step, before the first of these is trained, in
    micro-batches of its own.

    Without gradients more rows fit at once than train at once. Random numbers and persistent
    buffers are as before afterwards.

    Args:
        step: step that trains the model.
        loss: loss of its rows, which says how these become a batch.
        reference: what is computed of them.

    Attributes:
        sizer: see :class:`RowReference`.
    """

    def __init__(self, step: RecipeStep, loss: RowLoss, reference: RowReference) -> None:
        self.sizer = reference.sizer
        self._step = step
        self._loss = loss
        self._reference = reference
        self._retry = step.retry.with_sizer(reference.sizer)
        self._snapshot = StepSnapshot(step.model, step.memory.device)

    def of_rows(self, rows: Sequence[Any]) -> torch.Tensor:
        """Return the numbers of each row of a step, on the device: `[rows, numbers]`; ranks call it
        together.

        Args:
            rows: rows of this rank; none where other ranks have some.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            RankLostError: out of memory on this rank where the others cannot be told.
        """
        self.sizer.agree()
        restore = self._snapshot.take()
        results = self._step.evaluate_rows(
            rows,
            self._values,
            retry=self._retry,
            loss=self._loss,
            kind=self.sizer.layout.kind,
            doing="in the reference",
            evaluates=REFERENCE,
            undo=restore,
        )
        restore()
        if not results:
            return self.dummy_values(0)
        by_micro_batch = torch.cat([values for _, values in results])
        positions = [position for micro_batch, _ in results for position in micro_batch.rows]
        of_rows = torch.empty_like(by_micro_batch)
        of_rows[positions] = by_micro_batch
        return of_rows

    def dummy_values(self, num_rows: int) -> torch.Tensor:
        """Return numbers in the shape of :meth:`of_rows`, on the host, for rows whose loss does not
        count.
        """
        return torch.zeros(num_rows, self._reference.num_values)

    def try_rows(self, rows: Sequence[Any]) -> None:
        """Run one micro-batch as :meth:`of_rows` does, and forget what it computed."""
        length = self.sizer.layout.padded(max(map(self._loss.row_length, rows)))
        with torch.no_grad(), self._step.trial(evaluates=REFERENCE):
            self._values(rows, length)

    def _values(self, rows: Sequence[Any], length: int) -> torch.Tensor:
        batch = self._loss.collate(rows, length)
        self._loss.to_device(batch)
        return self._reference.values(batch)
