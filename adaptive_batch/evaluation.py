"""The loss of many rows without gradients, in as large micro-batches as fit; it has a capacity of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch import nn

from .accumulation import Accumulator
from .batching import Capacity, Shapes, micro_batches
from .memory import DeviceMemory, device_memory
from .replay import CapacityChange, Replay

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
    """

    def __init__(
        self,
        model: nn.Module,
        accumulator: Accumulator,
        *,
        collate: Callable[[Sequence[dict[str, Any]]], dict[str, Any]],
        capacity: Capacity,
        shapes: Shapes | None = None,
        on_change: Callable[[CapacityChange], object] | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        self._model = model
        self._accumulator = accumulator
        self._collate = collate
        self._shapes = shapes
        memory = memory or device_memory(next(model.parameters()).device)
        self._replay = Replay(capacity, memory=memory, on_change=on_change)

    @property
    def capacity(self) -> Capacity:
        """What one micro-batch may hold now."""
        return self._replay.capacity

    def run(self, rows: Iterable[dict[str, Any]]) -> float:
        """The mean loss over the label tokens of all `rows`; nan where there are none.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
        """
        loss_sum, label_tokens = 0.0, 0
        training = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            unread = iter(rows)
            while chunk := self._read(unread):
                loss, count = self._replay.run(lambda chunk=chunk: self._attempt(chunk), undo=lambda: None)  # type: ignore[misc]
                loss_sum, label_tokens = loss_sum + loss, label_tokens + count
        finally:
            for module, was_training in training:
                module.training = was_training
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
        pieces = micro_batches([len(row["tokens"]) for row in rows], self.capacity, self._shapes)
        for piece in pieces:
            self._replay.current = piece
            loss, count = self._accumulator.evaluate(self._collate([rows[i] for i in piece.rows]))
            loss_sum, label_tokens = loss_sum + loss, label_tokens + count
        self._replay.current = self.capacity.fullest(pieces)
        return loss_sum, label_tokens
