"""The loss of many rows without gradients, in as large micro-batches as fit; it has a limit apart from training's.

With several ranks each evaluates its own rows, and all run the same number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from torch import nn

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatch, MicroBatchLayout, MicroBatchLimit, micro_batches

from .micro_batch_runner import MicroBatchRunner, RowLoss
from .oom_retry import LimitChange, OOMRetry, OutOfMemoryElsewhereError

_ROWS_READ = 256  # at a time, at least; by tokens, so many times the limit:
_LIMITS_READ = 4


class Evaluator:
    """Mean loss of a label token over rows, whatever they are split into.

    Args:
        runner: trains the model, which is in evaluation mode while it is evaluated.
        loss: how rows of the evaluation become a batch; what a batch's loss is, the runner knows.
        limit: of one micro-batch; an out-of-memory error lowers it, and never training's.
        layout: of micro-batches, whose kind is training's; None for nothing else.
        on_change: takes every lowered limit.

    Attributes:
        limit: what one micro-batch may hold now.
    """

    def __init__(
        self,
        runner: MicroBatchRunner,
        loss: RowLoss,
        *,
        limit: MicroBatchLimit,
        layout: MicroBatchLayout | None = None,
        on_change: Callable[[LimitChange], object] = lambda change: None,
    ) -> None:
        self.limit = limit
        self._runner, self._loss, self._on_change = runner, loss, on_change
        self._layout = layout or MicroBatchLayout()
        self._retry = OOMRetry(lambda: self.limit, self._lower, memory=runner.retry.memory, is_of_training=False)

    def run(self, rows: Iterable[Any]) -> float:
        """Return the mean loss over the label tokens of all `rows` of all ranks; nan where there are none.

        Args:
            rows: of this rank.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            RankLostError: out of memory on this rank where the others cannot be told.
        """
        loss_sum, label_tokens = 0.0, 0
        with _evaluation_mode(self._runner.model):
            unread = iter(rows)
            while distributed.any_of_ranks(bool(chunk := self._read(unread))):
                loss, count = self._retry.run(
                    partial(self._attempt, chunk),
                    undo=self._runner.sharding.reset,
                    doing="in validation",
                )
                loss_sum, label_tokens = loss_sum + loss, label_tokens + count
        if distributed.world_size() > 1 and distributed.any_of_ranks(self._retry.allocator_retried):
            self._retry.ease()
        parts = distributed.all_gather((loss_sum, label_tokens))
        loss_sum, label_tokens = sum(loss for loss, _ in parts), sum(count for _, count in parts)
        return loss_sum / label_tokens if label_tokens else float("nan")

    def _lower(self, change: LimitChange) -> None:
        self.limit = change.after
        self._on_change(change)

    def _read(self, unread: Iterator[Any]) -> list[Any]:
        """Read the next rows, enough for several micro-batches."""
        amount = self.limit.amount
        if self.limit.unit == "rows":
            return list(islice(unread, amount * -(-_ROWS_READ // amount)))
        rows, tokens = [], 0
        for row in unread:
            rows.append(row)
            tokens += self._loss.row_length(row)
            if len(rows) >= _ROWS_READ and tokens >= _LIMITS_READ * amount:
                break
        return rows

    def _attempt(self, rows: Sequence[Any]) -> tuple[float, int]:
        retry, sharding, length = self._retry, self._runner.sharding, self._loss.row_length
        loss_sum, label_tokens = 0.0, 0
        kind = "padded" if self._loss.pack is None else self._runner.layout.kind
        layout = replace(self._layout, kind=kind, time=self._runner.layout.time)
        pieces = micro_batches(list(map(length, rows)), self.limit, layout)

        def run_piece(piece: MicroBatch, those: Sequence[Any], *, counts: bool) -> None:
            nonlocal loss_sum, label_tokens
            loss, count = self._runner.evaluate(those, loss=self._loss, length=piece.length)
            if counts:
                loss_sum, label_tokens = loss_sum + loss, label_tokens + count

        for number in range(distributed.maximum(len(pieces))):
            if retry.has_failed:
                sharding.run_dummy_collectives(evaluates=True)
                continue
            counts = number < len(pieces)
            if counts:
                piece = retry.current = pieces[number]
                those = [rows[i] for i in piece.rows]
            else:
                assert self._loss.dummy_row is not None, "several ranks need a dummy row"
                those = [self._loss.dummy_row()]
                piece = MicroBatch([0], self._layout.padded(length(those[0])))
                retry.current = retry.current if pieces else piece
            retry.run_micro_batch(
                partial(run_piece, piece, those, counts=counts),
                sharding=sharding,
                drop=sharding.reset,
            )
        if not retry.has_failed and pieces:
            retry.current = self.limit.fullest(pieces)
        if distributed.any_of_ranks(retry.has_failed):
            raise OutOfMemoryElsewhereError
        return loss_sum, label_tokens


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode; afterwards each module is as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
