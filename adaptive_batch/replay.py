"""Runs what may run out of memory, and runs it again with less capacity.

Capacity is lowered and not won back within a run. What failed is undone first, so that a replay leaves what a run with
that capacity from the start would have left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .batching import Capacity, MicroBatch
from .errors import MEMORY_REMEDIES, DoesNotFitError
from .memory import DeviceMemory, is_out_of_memory, recover

log = logging.getLogger("adaptive_batch")

Result = TypeVar("Result")


@dataclass(frozen=True)
class CapacityChange:
    """A capacity that was lowered in mid-run.

    Attributes:
        before: what a micro-batch might hold.
        after: what it may hold from now on.
        rows: rows of the micro-batch that was too large.
        length: tokens that each of them was padded to.
        out_of_memory: it ran out of memory; otherwise the allocator only thrashed.
        error: what the device said; empty where it only thrashed.
    """

    before: Capacity
    after: Capacity
    rows: int
    length: int
    out_of_memory: bool
    error: str

    def describe(self) -> str:
        """One line, with numbers."""
        happened = "out of memory" if self.out_of_memory else "the allocator gave back its cache and asked again"
        what_next = "it is run again, and " if self.out_of_memory else ""
        said = f" ({self.error.splitlines()[0]})" if self.error else ""
        return (
            f"{happened} with {self.rows} rows of {self.length} tokens at once: {what_next}a micro-batch holds "
            f"{self.after} from now on, not {self.before}{said}"
        )


class Replay:
    """Runs something in micro-batches; where it runs out of memory, undoes it and runs it again with half of the capacity.

    Args:
        capacity: what one micro-batch may hold.
        memory: of the device.
        on_change: is told of every lowered capacity, before anything is run with it.

    Attributes:
        capacity: what one micro-batch may hold now.
        current: the micro-batch that is being run; set by what is run.
    """

    def __init__(
        self, capacity: Capacity, *, memory: DeviceMemory, on_change: Callable[[CapacityChange], object] | None = None
    ) -> None:
        self.capacity = capacity
        self.current = MicroBatch([], 0)
        self._memory = memory
        self._on_change = on_change or (lambda change: log.warning("%s", change.describe()))
        self._has_thrashed = False

    def run(self, attempt: Callable[[], Result], *, undo: Callable[[], object]) -> Result:
        """Call `attempt` until it does not run out of memory.

        Args:
            attempt: reads :attr:`capacity` and says in :attr:`current` what it runs.
            undo: takes back what a failed attempt has done.

        Raises:
            DoesNotFitError: a micro-batch of one row ran out of memory.
        """
        while True:
            retries = self._memory.num_retries()
            try:
                result = attempt()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                said = str(error) or type(error).__name__
            else:
                if self._memory.num_retries() > retries:
                    self._reduce()
                return result
            # The except block has been left: until then the error kept the failed forward's tensors alive.
            undo()
            recover(self._memory)
            self._halve(said)

    def _halve(self, said: str) -> None:
        rows, length = len(self.current.rows), self.current.length
        after = self.capacity.halved(rows=rows, length=length)
        if after is None:
            raise DoesNotFitError(
                f"one row of {length} tokens ran out of memory on {self._memory.device}, alone in its micro-batch: {said}; "
                f"{MEMORY_REMEDIES}"
            )
        self._change(after, error=said)

    def _reduce(self) -> None:
        """A size that only thrashes the allocator is made a little smaller, once: later retries may have other reasons."""
        after = self.capacity.reduced(rows=len(self.current.rows), length=self.current.length)
        if after is not None and not self._has_thrashed:
            self._has_thrashed = True
            self._change(after)

    def _change(self, after: Capacity, *, error: str = "") -> None:
        before, self.capacity = self.capacity, after
        rows, length = len(self.current.rows), self.current.length
        self._on_change(CapacityChange(before, after, rows, length, bool(error), error))


def lengthened(
    rows: Sequence[dict[str, Any]], length: int, *, pad_id: int, ignore_index: int
) -> Sequence[dict[str, Any]]:
    """The rows, the longest of them padded to `length` tokens, so that collating pads all of them to it."""
    longest = max(range(len(rows)), key=lambda i: len(rows[i]["tokens"]))
    row = rows[longest]
    missing = length - len(row["tokens"])
    if missing <= 0:
        return rows
    padded = {
        **row,
        "tokens": [*row["tokens"], *[pad_id] * missing],
        "labels": [*row["labels"], *[ignore_index] * missing],
    }
    return [*rows[:longest], padded, *rows[longest + 1 :]]
