"""The loss of many rows without gradients, in as large micro-batches as fit; it has a limit of its
own.

With several ranks each evaluates its own rows, and all run the same number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatchLimit

from .model_checks import evaluation_mode
from .recipe_step import RecipeStep
from .row_loss import RowLoss
from .sizing import MicroBatchSizer

# Rows that are read at a time, at least.
_ROWS_READ = 256
# By tokens, what is read at a time is so many times the limit.
_LIMITS_READ = 4


class Evaluator:
    """Mean loss of a label token over rows, whatever they are divided into.

    Args:
        step: step that trains the model, which is in evaluation mode while it is evaluated.
        loss: how rows of the evaluation become a batch; what a batch's loss is, the step knows.
        sizer: decides what one micro-batch of evaluation may hold, apart from training's; the kind
            of its layout is training's.
    """

    def __init__(self, step: RecipeStep, loss: RowLoss, sizer: MicroBatchSizer) -> None:
        self._step = step
        self._loss = loss
        self._sizer = sizer
        self._retry = step.retry.with_sizer(sizer)

    @property
    def limit(self) -> MicroBatchLimit:
        """What one micro-batch may hold now."""
        return self._sizer.limit_of_step

    def run(self, rows: Iterable[Any]) -> float:
        """Return the mean loss over the label tokens of all `rows` of all ranks; nan where there
        are none.

        Args:
            rows: of this rank.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            RankLostError: out of memory on this rank where the others cannot be told.
        """
        loss_sum = 0.0
        label_tokens = 0
        # Training's, where rows can be joined.
        kind = "padded" if self._loss.join is None else self._step.sizer.layout.kind
        forward = partial(self._step.sum_losses, loss=self._loss)
        self._sizer.agree()
        with evaluation_mode(self._step.model):
            unread = iter(rows)
            chunk = self._read(unread)
            while distributed.any_of_ranks(bool(chunk)):
                results = self._step.evaluate_rows(
                    chunk,
                    forward,
                    retry=self._retry,
                    loss=self._loss,
                    kind=kind,
                    doing="in validation",
                )
                # Sum each chunk first: one running sum would round differently.
                loss_sum += sum(loss for _, (loss, _) in results)
                label_tokens += sum(labels for _, (_, labels) in results)
                chunk = self._read(unread)
        of_ranks = distributed.all_gather((loss_sum, label_tokens))
        loss_sum = sum(loss for loss, _ in of_ranks)
        label_tokens = sum(labels for _, labels in of_ranks)
        if not label_tokens:
            return float("nan")
        return loss_sum / label_tokens

    def _read(self, unread: Iterator[Any]) -> list[Any]:
        """Read the next rows, enough for several micro-batches."""
        amount = self.limit.amount
        if self.limit.unit == "rows":
            return list(islice(unread, amount * -(-_ROWS_READ // amount)))
        rows = []
        tokens = 0
        for row in unread:
            rows.append(row)
            tokens += self._loss.row_length(row)
            if len(rows) >= _ROWS_READ and tokens >= _LIMITS_READ * amount:
                break
        return rows
