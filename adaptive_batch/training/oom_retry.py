"""Runs what may run out of memory, and runs it again with less capacity, on all ranks alike.

The limit of a micro-batch is lowered, and does not grow back within a run. What failed is undone first, so that a replay leaves what a run with
that capacity from the start would have left. With several ranks an attempt fails on all of them or on none: one that had
room raises :class:`OutOfMemoryElsewhereError`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatch, MicroBatchLimit
from adaptive_batch.errors import MEMORY_REMEDIES, DoesNotFitError, RankLostError, SettingError
from adaptive_batch.memory import DeviceMemory, is_out_of_memory, recover

log = logging.getLogger("adaptive_batch")

Result = TypeVar("Result")


class OutOfMemoryElsewhereError(torch.OutOfMemoryError):
    """Another rank ran out of memory in the attempt that all ranks made."""


@dataclass(frozen=True)
class LimitChange:
    """A capacity that was lowered in mid-run.

    Attributes:
        before: what a micro-batch might hold.
        after: what it may hold from now on.
        rows: rows of the micro-batch that was too large.
        length: tokens that each of them was padded to.
        out_of_memory: it ran out of memory; otherwise the allocator only thrashed.
        error: what the device said; empty where it only thrashed.
        ranks: those on which it happened, of several; empty where there is one.
    """

    before: MicroBatchLimit
    after: MicroBatchLimit
    rows: int
    length: int
    out_of_memory: bool
    error: str
    ranks: tuple[int, ...] = ()

    def describe(self) -> str:
        """One line, with numbers."""
        happened = "out of memory" if self.out_of_memory else "the allocator gave back its cache and asked again"
        what_next = "it is run again, and " if self.out_of_memory else ""
        said = f" ({self.error.splitlines()[0]})" if self.error else ""
        if self.ranks:
            happened += f" on rank {', '.join(map(str, self.ranks))}"
        return (
            f"{happened} with {self.rows} rows of {self.length} tokens at once: {what_next}a micro-batch holds "
            f"{self.after} from now on, not {self.before}{said}"
        )


@dataclass(frozen=True)
class OOMPolicy:
    """Decides what a micro-batch may hold after one ran out of memory. It does not grow back within a run.

    Attributes:
        shrink_divisor: a micro-batch that ran out of memory is divided by this.
        ease_divisor: one that only made the allocator free its cache and ask again loses its rows divided by this.
    """

    shrink_divisor: int = 2
    ease_divisor: int = 16

    def __post_init__(self) -> None:
        if self.shrink_divisor < 2:
            raise SettingError("shrink_divisor", self.shrink_divisor, "give 2 or more, so that the limit shrinks")
        if self.ease_divisor < 1:
            raise SettingError("ease_divisor", self.ease_divisor, "give 1 or more")

    def after_out_of_memory(self, limit: MicroBatchLimit, *, rows: int, length: int) -> MicroBatchLimit | None:
        """Return the limit after a micro-batch of `rows` rows padded to `length` did not fit; None where it was one row."""
        if rows == 1:
            return None
        if limit.unit == "rows":
            return replace(limit, amount=max(1, rows // self.shrink_divisor))
        return replace(limit, amount=max(length, rows * length // self.shrink_divisor))

    def after_allocator_retry(self, limit: MicroBatchLimit, *, rows: int, length: int) -> MicroBatchLimit | None:
        """Return the limit after a micro-batch only just fit, one row less at least; None where it was one row."""
        if rows == 1:
            return None
        fewer = rows - max(1, rows // self.ease_divisor)
        return replace(limit, amount=fewer if limit.unit == "rows" else fewer * length)


class OOMRetry:
    """Runs something in micro-batches; where it runs out of memory, undoes it and runs it again with the limit that the policy gives.

    Args:
        capacity: what one micro-batch may hold.
        memory: of the device.
        on_change: is told of every lowered capacity, before anything is run with it.
        remedies: the end of the sentence that says that one row does not fit.
        policy: decides how the limit shrinks; None halves it.

    Attributes:
        capacity: what one micro-batch may hold now.
        current: the micro-batch that is being run; set by what is run.
        thrashes: the allocator has thrashed once on this rank, of several; :meth:`reduce` is due on all of them.
    """

    def __init__(
        self,
        capacity: MicroBatchLimit,
        *,
        memory: DeviceMemory,
        on_change: Callable[[LimitChange], object] | None = None,
        remedies: str = MEMORY_REMEDIES,
        policy: OOMPolicy | None = None,
    ) -> None:
        self.capacity = capacity
        self._policy = policy or OOMPolicy()
        self.current = MicroBatch([], 0)
        self.thrashes = False
        self._memory = memory
        self._on_change = on_change or (lambda change: log.warning("%s", change.describe()))
        self._remedies = remedies
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
                if isinstance(error, RankLostError) or not is_out_of_memory(error):
                    raise
                said = None if isinstance(error, OutOfMemoryElsewhereError) else str(error) or type(error).__name__
            else:
                if self._memory.num_retries() > retries:
                    self.thrashes = not self._has_thrashed
                    if self.thrashes and distributed.world_size() == 1:
                        self.reduce()
                return result
            # The except block has been left: until then the error kept the failed forward's tensors alive.
            try:
                undo()
                recover(self._memory)
            except Exception as error:
                if distributed.world_size() == 1 or not is_out_of_memory(error):
                    raise
                raise self.lost(error, "as a step was undone") from error
            self._halve(said)

    def lost(self, error: BaseException, doing: str, *, of_training: bool = True) -> RankLostError:
        """What to raise where this rank ran out of memory and the others cannot be told: with what to go on with.

        Args:
            error: the device's.
            doing: the end of a sentence.
            of_training: the capacity is that of training, which is to begin with less when it is started again.
        """
        rows, length, device = len(self.current.rows), self.current.length, self._memory.device
        said = str(error) or type(error).__name__
        after = self._policy.after_out_of_memory(self.capacity, rows=rows, length=length)
        facts: dict[str, Any] = {"rows": rows, "length": length, "before": self.capacity.amount, "error": said}
        if after is not None and of_training:
            facts |= {"capacity": after.amount, "unit": after.unit}
        what_next = f"{after} would be less" if after is not None else self._remedies
        return RankLostError(
            f"{device} ran out of memory {doing}, with {rows} rows of {length} tokens at once: {said.splitlines()[0]}; the other ranks "
            f"wait there and cannot be told, so all end; {what_next}",
            facts,
        )

    def reduce(self) -> None:
        """Make a size that only thrashes the allocator a little smaller, once: later retries may have other reasons."""
        mine = self._asked(self._policy.after_allocator_retry, said=None) if self.thrashes else None
        self.thrashes = False
        self._take({rank: one for rank, one in enumerate(distributed.all_gather(mine)) if one and one.amount})

    def _halve(self, said: str | None) -> None:
        """Half of what was too large on any rank; `said` is None where it was too large on others alone."""
        mine = self._asked(self._policy.after_out_of_memory, said) if said is not None else None
        asked = {rank: one for rank, one in enumerate(distributed.all_gather(mine)) if one}
        for rank, one in asked.items():
            if one.amount is None:
                where = f"rank {rank}" if distributed.world_size() > 1 else str(self._memory.device)
                raise DoesNotFitError(
                    f"one row of {one.length} tokens ran out of memory on {where}, alone in its micro-batch: {one.said}; "
                    f"{self._remedies}"
                )
        self._take(asked)

    def _asked(self, smaller: Callable[..., MicroBatchLimit | None], said: str | None) -> _Asked:
        rows, length = len(self.current.rows), self.current.length
        after = smaller(self.capacity, rows=rows, length=length)
        return _Asked(rows, length, None if after is None else after.amount, said)

    def _take(self, asked: Mapping[int, _Asked]) -> None:
        """Take the smallest capacity that a rank has asked for, if any has."""
        if not asked:
            return
        least = min(asked.values(), key=lambda one: one.amount or 0)
        assert least.amount is not None
        self._has_thrashed |= least.said is None
        before, self.capacity = self.capacity, MicroBatchLimit(least.amount, self.capacity.unit)
        ranks = tuple(asked) if distributed.world_size() > 1 else ()
        error = least.said or ""
        self._on_change(LimitChange(before, self.capacity, least.rows, least.length, bool(error), error, ranks))


@dataclass(frozen=True)
class _Asked:
    """What one rank asks for after it ran out of memory: less capacity, None where it was one row; `said` by the device."""

    rows: int
    length: int
    amount: int | None
    said: str | None


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
