"""Runs what may run out of memory, and runs it again with a smaller limit that grows back, on all ranks alike.

What failed is undone first, so that a retry leaves what a run with that limit from the start would have left. With several
ranks an attempt fails on all of them or on none: a rank that had room raises :class:`OutOfMemoryElsewhereError`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from adaptive_batch import distributed
from adaptive_batch._util import count
from adaptive_batch.data import MicroBatch, MicroBatchLimit
from adaptive_batch.distributed import Sharding
from adaptive_batch.errors import MEMORY_REMEDIES, DoesNotFitError, RankLostError, SettingError
from adaptive_batch.memory import DeviceMemory, is_out_of_memory, recover, wanted_bytes

if TYPE_CHECKING:
    from .limits import MicroBatchLimits

log = logging.getLogger("adaptive_batch")

Result = TypeVar("Result")

_UNSEEN = 8  # times as long a stretch where no device says what is free
_MORE = 1.02  # times what there was when a limit was lowered: memory has been given back
_BELIEVED = 2  # failures of one step up to which what is known of its needs is believed


@dataclass(frozen=True)
class LimitCost:
    """What micro-batches need of a device, as far as it is known: a line.

    Attributes:
        amount: of a micro-batch, in the limit's unit.
        peak_bytes: what it needs, all that is resident included.
        unit_bytes: what one row more, or one token more, needs.
    """

    amount: int
    peak_bytes: int
    unit_bytes: float

    def fits(self, total_bytes: int) -> int:
        """Return how much a micro-batch may hold where so much may be allocated in all; at least 1."""
        return max(1, self.amount + math.floor((total_bytes - self.peak_bytes) / self.unit_bytes))


class OutOfMemoryElsewhereError(torch.OutOfMemoryError):
    """Another rank ran out of memory in the attempt that all ranks made."""


@dataclass(frozen=True)
class LimitChange:
    """A limit that was lowered during a run, or grew back.

    Attributes:
        before: what a micro-batch might hold.
        after: what it may hold from now on.
        rows: rows of the micro-batch that was too large; 0 where it grew back.
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

    @property
    def grows(self) -> bool:
        """Whether a micro-batch may hold more than before."""
        return self.after.amount > self.before.amount

    def describe(self) -> str:
        """Return one line, with numbers."""
        if self.grows:
            return f"memory has sufficed since: a micro-batch holds {self.after} from now on, not {self.before}"
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
    """Decides what a micro-batch may hold after one ran out of memory, and how it grows back.

    Attributes:
        shrink_divisor: a micro-batch that ran out of memory is divided by this, where what would fit is not known.
        ease_divisor: one that only made the allocator free its cache and ask again loses its rows divided by this.
        grow_divisor: it grows back in steps of the limit that it was lowered from, divided by this.
        grow_after: steps without a failure before each of these, where the device then says that there is room; eight times as
            many where it says nothing; twice as many after each that was too early.
    """

    shrink_divisor: int = 2
    ease_divisor: int = 16
    grow_divisor: int = 8
    grow_after: int = 5

    def __post_init__(self) -> None:
        if self.shrink_divisor < 2:
            raise SettingError("shrink_divisor", self.shrink_divisor, "give 2 or more, so that the limit shrinks")
        for key in ("ease_divisor", "grow_divisor", "grow_after"):
            if (value := getattr(self, key)) < 1:
                raise SettingError(key, value, "give 1 or more")

    def after_out_of_memory(
        self, limit: MicroBatchLimit, *, rows: int, length: int, fits: int | None = None
    ) -> MicroBatchLimit | None:
        """Return the limit after a micro-batch of `rows` rows padded to `length` did not fit; None where it was one row.

        Of what is free now, `fits` is as much as a micro-batch may hold by what is known; None where nothing is.
        """
        if rows == 1:
            return None
        row = 1 if limit.unit == "rows" else length
        amount = rows * row // self.shrink_divisor
        if fits is not None:
            amount = min(fits, (rows - max(1, rows // self.ease_divisor)) * row)
        return replace(limit, amount=max(row, amount))

    def after_good_steps(self, limit: MicroBatchLimit, *, ceiling: MicroBatchLimit) -> MicroBatchLimit:
        """Return the limit that a lowered one grows to next, on its way to the `ceiling` that it was lowered from."""
        step = max(1, ceiling.amount // self.grow_divisor)
        return replace(limit, amount=min(ceiling.amount, limit.amount + step))

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
        lower: takes each change, before anything is run with it; :attr:`limit` then returns the new one.
        memory: of the device.
        retries: False lets an out-of-memory error through.
        remedies: the end of the sentence that says that one row does not fit.
        policy: decides how the limit shrinks and grows back; None for :class:`OOMPolicy` as it is.
        is_of_training: what is lowered is the limit of training, which a restart begins with where this rank is lost.

    Attributes:
        limits: know what may grow back, and what micro-batches need; None for a limit that stays lowered.
        current: the micro-batch that is being run; set by what is run.
        allocator_retried: the allocator of this rank, of several, only just had room; :meth:`ease` is due
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
        self.limits: MicroBatchLimits | None = None
        self.current = MicroBatch([], 0)
        self.allocator_retried = False
        self.remedies = remedies
        self._lower, self._retries = lower, retries
        self._policy, self._is_of_training = policy or OOMPolicy(), is_of_training
        self._until_eased = 1  # so many runs in which the allocator asks again; beyond them it may have other reasons
        self._failures = 0  # of what is run now
        self._had_bytes = 0  # this rank, to allocate from, when the limit was lowered last
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
        self._failures = 0
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
                    self._until_eased -= 1
                    self.allocator_retried |= self._until_eased == 0
                    if self.allocator_retried and distributed.world_size() == 1:
                        self.ease()
                if self.limits is not None:
                    self.limits.good_steps += 1
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
        """Make a limit that only just fits a little smaller, once, on all ranks."""
        mine = self._request(self._policy.after_allocator_retry, "") if self.allocator_retried else None
        self.allocator_retried = False
        requests = {rank: one for rank, one in enumerate(distributed.all_gather(mine)) if one and one.limit}
        if mine and not requests:  # one row; larger ones may come
            self._until_eased = 1
        elif requests:
            self._until_eased = 0
        self._take(requests)

    def next_limit(self) -> MicroBatchLimit | None:
        """Return what a lowered limit grows to now, the same on all ranks; None where it stays as it is."""
        limits = self.limits
        if limits is None or limits.lowered is None or limits.ceiling is None:
            return None
        if limits.good_steps < self._policy.grow_after:
            return None
        return self._policy.after_good_steps(limits.lowered, ceiling=limits.ceiling)

    def has_room(self, limit: MicroBatchLimit) -> bool:
        """Return whether this rank may grow to a limit now: there is room for it, and it did not grow too early before."""
        assert self.limits is not None
        room, cost = self.memory.room(), self.limits.cost
        if room is None:
            return self.limits.good_steps >= _UNSEEN * self._stretch
        if cost is not None and cost.fits(room.total_bytes) < limit.amount:
            return False
        return self.limits.good_steps >= self._stretch or room.total_bytes > _MORE * self._had_bytes

    def grow(self, after: MicroBatchLimit) -> None:
        """Let a lowered limit grow, on all ranks."""
        assert self.limits is not None
        assert self.limits.lowered is not None
        # The cache has to come by its largest blocks again, and asks for each that is larger than others.
        self._until_eased = 3
        self.memory.release()  # larger micro-batches need larger blocks, for which a full cache has no room
        self._change(LimitChange(self.limits.lowered, after, 0, 0, False, ""))

    @property
    def _stretch(self) -> int:
        return self._policy.grow_after << (self.limits.relapses if self.limits else 0)

    def _change(self, change: LimitChange) -> None:
        if not change.grows and (room := self.memory.room()):
            self._had_bytes = room.total_bytes
        if self.limits is not None:
            self.limits.change(change, stretch=self._stretch)
        self._lower(change)

    def _shrink(self) -> None:
        """Shrink what was too large on any rank."""
        self._failures += 1
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
        known = {"fits": self._fits(rows, length, error)} if error else {}
        return _Request(rows, length, smaller(self.limit(), rows=rows, length=length, **known), error)

    def _fits(self, rows: int, length: int, error: str) -> int | None:
        """Return how much of what is free now a micro-batch may hold, by what is known; None where nothing is, or it proved wrong."""
        room, cost = self.memory.room(), self.limits.cost if self.limits else None
        if room is None or self._failures > _BELIEVED:
            return None
        if cost is None and (wanted := wanted_bytes(error)) is not None and wanted > room.held_bytes:
            amount = rows if self.limit().unit == "rows" else rows * length
            cost = LimitCost(amount, wanted, (wanted - room.held_bytes) / amount)  # at least
            if self.limits is not None:
                self.limits.cost = cost
        return cost.fits(room.total_bytes) if cost is not None else None

    def _take(self, requests: dict[int, _Request]) -> None:
        """Take the smallest limit that a rank has requested, if any has."""
        if not requests:
            return
        before = self.limit()
        least = min(requests.values(), key=lambda one: one.limit.amount if one.limit else 0)
        assert least.limit is not None
        after = replace(before, amount=least.limit.amount)
        ranks = tuple(requests) if distributed.world_size() > 1 else ()
        self._change(LimitChange(before, after, least.rows, least.length, bool(least.error), least.error, ranks))
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
