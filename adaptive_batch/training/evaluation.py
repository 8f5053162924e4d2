"""The loss of many rows without gradients, in as large micro-batches as fit; it has a capacity of its own.

With several ranks each evaluates rows of its own, and all run the same number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatch, MicroBatchLayout, MicroBatchLimit, micro_batches
from adaptive_batch.memory import DeviceMemory, device_memory, is_out_of_memory, recover

from .micro_batch_runner import MicroBatchRunner
from .oom_retry import LimitChange, OOMRetry, OutOfMemoryElsewhereError

_ROWS_READ = 256  # at a time, at least; by tokens, so many capacities:
_CAPACITIES_READ = 4


class Evaluator:
    """Mean loss of a label token over rows, whatever they are split into.

    Args:
        model: it is in evaluation mode while it is evaluated, and as it was afterwards.
        accumulator: what trains it; the loss is the one that training has.
        collate: makes one padded batch of rows on the host.
        shapes: what `collate` pads to; None for nothing.
        capacity: what one micro-batch may hold; an out-of-memory error lowers it, and never training's.
        on_change: is told of every lowered capacity; None logs it.
        memory: of the model's device; None asks torch.
        filler: gives a row for a rank that has none left, where there are several.
    """

    def __init__(
        self,
        model: nn.Module,
        accumulator: MicroBatchRunner,
        *,
        collate: Callable[[Sequence[dict[str, Any]]], dict[str, Any]],
        capacity: MicroBatchLimit,
        shapes: MicroBatchLayout | None = None,
        on_change: Callable[[LimitChange], object] | None = None,
        memory: DeviceMemory | None = None,
        filler: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self._model = model
        self._accumulator = accumulator
        self._collate = collate
        self._shapes = shapes
        self._filler = filler
        self._memory = memory or device_memory(next(model.parameters()).device)
        self._replay = OOMRetry(capacity, memory=self._memory, on_change=on_change)

    @property
    def capacity(self) -> MicroBatchLimit:
        """What one micro-batch may hold now."""
        return self._replay.capacity

    def run(self, rows: Iterable[dict[str, Any]]) -> float:
        """The mean loss over the label tokens of all `rows` of all ranks; nan where there are none.

        Args:
            rows: of this rank.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            RankLostError: out of memory on this rank where the others cannot be told.
        """
        loss_sum, label_tokens = 0.0, 0
        training = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            unread = iter(rows)
            while distributed.any_of_ranks(bool(chunk := self._read(unread))):
                loss, count = self._replay.run(
                    lambda chunk=chunk: self._attempt(chunk),  # type: ignore[misc]
                    undo=self._accumulator.sharding.reset,
                )
                loss_sum, label_tokens = loss_sum + loss, label_tokens + count
        finally:
            for module, was_training in training:
                module.training = was_training
        if distributed.world_size() > 1 and distributed.any_of_ranks(self._replay.thrashes):
            self._replay.reduce()
        parts = distributed.all_gather((loss_sum, label_tokens))
        loss_sum, label_tokens = sum(loss for loss, _ in parts), sum(count for _, count in parts)
        return loss_sum / label_tokens if label_tokens else float("nan")

    def _read(self, unread: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
        """The next rows, enough for several micro-batches."""
        amount = self.capacity.amount
        if self.capacity.unit == "rows":
            return list(islice(unread, amount * -(-_ROWS_READ // amount)))
        rows, tokens = [], 0
        for row in unread:
            rows.append(row)
            tokens += len(row["tokens"])
            if len(rows) >= _ROWS_READ and tokens >= _CAPACITIES_READ * amount:
                break
        return rows

    def _attempt(self, rows: Sequence[dict[str, Any]]) -> tuple[float, int]:
        loss_sum, label_tokens = 0.0, 0
        said: str | None = None
        try:
            pieces = micro_batches([len(row["tokens"]) for row in rows], self.capacity, self._shapes)
            sharding = self._accumulator.sharding
            for number in range(distributed.maximum(len(pieces))):
                if said is not None:
                    sharding.run_dummy_collectives(evaluates=True)
                    continue
                if number < len(pieces):
                    self._replay.current = pieces[number]
                    those = [rows[i] for i in pieces[number].rows]
                else:
                    assert self._filler is not None, "several ranks need a filler"
                    those = [self._filler()]
                    if not pieces:
                        self._replay.current = MicroBatch([0], len(those[0]["tokens"]))
                try:
                    loss, count = self._accumulator.evaluate(self._collate(those))
                except Exception as error:
                    if distributed.world_size() == 1 or not (is_out_of_memory(error) and sharding.can_finish):
                        raise
                    said = str(error) or type(error).__name__
                if said is not None:
                    sharding.reset()
                    recover(self._memory)
                    sharding.finish()
                elif number < len(pieces):
                    loss_sum, label_tokens = loss_sum + loss, label_tokens + count
            if said is None:
                self._replay.current = self.capacity.fullest(pieces) if pieces else self._replay.current
            failed = distributed.any_of_ranks(said is not None)
        except Exception as error:
            if distributed.world_size() == 1 or not is_out_of_memory(error):
                raise
            raise self._replay.lost(error, "in validation", of_training=False) from error
        if failed:
            raise torch.OutOfMemoryError(said) if said is not None else OutOfMemoryElsewhereError
        return loss_sum, label_tokens
