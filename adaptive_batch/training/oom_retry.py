"""Runs what may run out of memory, and runs it again with a smaller limit, on all ranks alike.

What failed is undone first, so that a retry leaves what a run with that limit from the start would have left. With several
ranks an attempt fails on all of them or on none: a rank that had room raises :class:`OutOfMemoryElsewhereError`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch

from adaptive_batch import distributed
from adaptive_batch._util import count
from adaptive_batch.data import MicroBatch, MicroBatchLimit
from adaptive_batch.distributed import Sharding
from adaptive_batch.errors import MEMORY_REMEDIES, DoesNotFitError, RankLostError, SettingError
from adaptive_batch.memory import DeviceMemory, is_out_of_memory, recover

log = logging.getLogger("adaptive_batch")

Result = TypeVar("Result")


class OutOfMemoryElsewhereError(torch.OutOfMemoryError):
    """Another rank ran out of memory in the attempt that all ranks made."""


@dataclass(frozen=True)
class LimitChange:
    """A limit that was lowered during a run.

    Attributes:
        before: what a micro-batch might hold.
        after: what it may hold from now on.
        rows: rows of the micro-batch that was too large.
        length: tokens that each of them was padded to.
        out_of_memory: it ran out of memory; otherwise the allocator had to free its cache and ask again.
        error: the device's message; empty where it did not run out of memory.
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
        """Return one line, with numbers."""
        happened = "out of memory" if self.out_of_memory else "the allocator freed its cache and asked again"
        what_next = "it is run again, and " if self.out_of_memory else ""
        error = f" ({self.error.splitlines()[0]})" if self.error else ""
        if self.ranks:
            happened += f" on rank {', '.join(map(str, self.ranks))}"
        return (
            f"{happened} with {count(self.rows, 'row')} of {count(self.length, 'token')} at once: {what_next}a micro-batch holds "
            f"{self.after} from now on, not {self.before}{error}"
        )


@dataclass(frozen=True)
class OOMPolicy:
    """Decides what a micro-batch may hold after one ran out of memory. The limit does not grow back within a run.

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
        limit: returns what one micro-batch may hold now.
        lower: takes each change, before anything is run with it; :attr:`limit` then returns the lowered one.
        memory: of the device.
        retries: False lets an out-of-memory error through.
        remedies: the end of the sentence that says that one row does not fit.
        policy: decides how the limit shrinks; None halves it.
        is_of_training: what is lowered is the limit of training, which a restart begins with where this rank is lost.

    Attributes:
        current: the micro-batch that is being run; set by what is run.
        allocator_retried: the allocator of this rank, of several, only just had room, for the first time; :meth:`ease` is due
            on all of them.
    """

    def __init__(
        self,
        limit: Callable[[], MicroBatchLimit],
        lower: Callable[[LimitChange], object],
        *,
        memory: DeviceMemory,
        retries: bool = True,
        remedies: str = MEMORY_REMEDIES,
        policy: OOMPolicy | None = None,
        is_of_training: bool = True,
    ) -> None:
        self.limit, self.memory = limit, memory
        self.current = MicroBatch([], 0)
        self.allocator_retried = False
        self.remedies = remedies
        self._lower, self._retries = lower, retries
        self._policy, self._is_of_training = policy or OOMPolicy(), is_of_training
        self._has_eased = False
        self._error: str | None = None

    @property
    def has_failed(self) -> bool:
        """Whether this rank has run out of memory in the current attempt."""
        return self._error is not None

    def run(self, attempt: Callable[[], Result], *, undo: Callable[[], object], doing: str) -> Result:
        """Call `attempt` until it does not run out of memory.

        Args:
            attempt: reads :attr:`limit`, sets :attr:`current` and, with several ranks, runs each micro-batch by
                :meth:`run_micro_batch`.
            undo: takes back what a failed attempt has done.
            doing: the end of a sentence, for a rank that is lost.

        Raises:
            DoesNotFitError: a micro-batch of one row ran out of memory.
            RankLostError: this rank ran out of memory where the others cannot be told.
        """
        while True:
            self._error, retries = None, self.memory.num_retries()
            try:
                result = attempt()
            except OutOfMemoryElsewhereError:
                pass
            except Exception as error:
                if isinstance(error, RankLostError) or not is_out_of_memory(error):
                    raise
                if distributed.world_size() > 1:
                    raise self.lost(error, doing) from error
                if not self._retries:
                    raise
                self._error = _message(error)
            else:
                if self._retries and self.memory.num_retries() > retries:
                    self.allocator_retried = not self._has_eased
                    if self.allocator_retried and distributed.world_size() == 1:
                        self.ease()
                return result
            # The except block has been left: until then the error kept the failed forward's tensors alive.
            try:
                undo()
                recover(self.memory)
            except Exception as error:
                if distributed.world_size() == 1 or not is_out_of_memory(error):
                    raise
                raise self.lost(error, "as an attempt was undone") from error
            self._shrink()

    def run_micro_batch(
        self,
        run: Callable[[], object],
        *,
        sharding: Sharding,
        drop: Callable[[], object],
        can_continue: Callable[[], bool] = lambda: True,
    ) -> None:
        """Run one micro-batch of an attempt; with several ranks, bring its collectives to their end where it runs out of memory.

        Args:
            run: the micro-batch.
            sharding: of the model.
            drop: frees what the micro-batch has made.
            can_continue: whether the collectives of those that follow are known.
        """
        try:
            run()
            return
        except Exception as error:
            known = distributed.world_size() > 1 and self._retries and sharding.can_finish
            if not (known and is_out_of_memory(error) and can_continue()):
                raise
            self._error = _message(error)
        drop()  # outside of the except block, which keeps the failed forward's tensors alive
        recover(self.memory)
        sharding.finish()

    def lost(self, error: BaseException, doing: str) -> RankLostError:
        """Build the error of a rank that ran out of memory where the others cannot be told, with the limit to restart with."""
        rows, length, message = len(self.current.rows), self.current.length, _message(error)
        limit = self.limit()
        after = self._policy.after_out_of_memory(limit, rows=rows, length=length)
        facts: dict[str, Any] = {"rows": rows, "length": length, "before": limit.amount, "error": message}
        if after is not None and self._is_of_training:
            facts |= {"limit": after.amount, "unit": after.unit}
        what_next = f"{after} would be less" if after is not None else self.remedies
        return RankLostError(
            f"{self.memory.device} ran out of memory {doing}, with {count(rows, 'row')} of {count(length, 'token')} at once: "
            f"{message.splitlines()[0]}; the other ranks wait there and cannot be told, so all end; {what_next}",
            facts,
        )

    def ease(self) -> None:
        """Make a limit that only just fits a little smaller, once, on all ranks: later allocator retries may have other reasons."""
        mine = self._request(self._policy.after_allocator_retry, "") if self.allocator_retried else None
        self.allocator_retried = False
        requests = {rank: one for rank, one in enumerate(distributed.all_gather(mine)) if one and one.limit}
        self._has_eased |= bool(requests)
        self._take(requests)

    def _shrink(self) -> None:
        """Shrink what was too large on any rank."""
        mine = None if self._error is None else self._request(self._policy.after_out_of_memory, self._error)
        requests = {rank: one for rank, one in enumerate(distributed.all_gather(mine)) if one}
        for rank, one in requests.items():
            if one.limit is None:
                where = f"rank {rank}" if distributed.world_size() > 1 else str(self.memory.device)
                raise DoesNotFitError(
                    f"one row of {count(one.length, 'token')} ran out of memory on {where}, alone in its micro-batch: {one.error}; "
                    f"{self.remedies}"
                )
        self._take(requests)

    def _request(self, smaller: Callable[..., MicroBatchLimit | None], error: str) -> _Request:
        rows, length = len(self.current.rows), self.current.length
        return _Request(rows, length, smaller(self.limit(), rows=rows, length=length), error)

    def _take(self, requests: dict[int, _Request]) -> None:
        """Take the smallest limit that a rank has requested, if any has."""
        if not requests:
            return
        before = self.limit()
        least = min(requests.values(), key=lambda one: one.limit.amount if one.limit else 0)
        assert least.limit is not None
        after = replace(before, amount=least.limit.amount)
        ranks = tuple(requests) if distributed.world_size() > 1 else ()
        self._lower(LimitChange(before, after, least.rows, least.length, bool(least.error), least.error, ranks))
        assert self.limit().amount <= after.amount, f"the limit was lowered to {after} and is {self.limit()}"


class _Request(NamedTuple):
    """What one rank asks for after it ran out of memory: a smaller limit, None where it was one row."""

    rows: int
    length: int
    limit: MicroBatchLimit | None
    error: str


def _message(error: BaseException) -> str:
    return str(error) or type(error).__name__


def lengthened(
    rows: Sequence[dict[str, Any]], length: int, *, pad_id: int, ignore_index: int
) -> Sequence[dict[str, Any]]:
    """Return the rows, the longest of them padded to `length` tokens, so that collating pads all of them to it."""
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
