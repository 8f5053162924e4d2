"""How the limit of a micro-batch shrinks where memory runs out, and grows back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from adaptive_batch import distributed
from adaptive_batch._util import count
from adaptive_batch.data import MicroBatch, MicroBatchLimit
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import DeviceMemory, Room, wanted_bytes
from adaptive_batch.probe import ProbeResult

# A limit waits so many times longer where no device says what is free.
_WAIT_UNSEEN = 8
# Room counts as given back when it is this many times what there was when the limit was lowered.
_ROOM_GIVEN_BACK = 1.02
# After so many failures of one step, what is known of its needs is not believed any more.
_BELIEVED_FAILURES = 2
# A cache that was just emptied asks for each block that is larger than others: it may retry so
# often.
_RETRIES_AFTER_GROWTH = 3


@dataclass(frozen=True)
class LimitCost:
    """The memory that micro-batches need, as far as it is known: a line.

    Attributes:
        amount: size of a micro-batch, in the limit's unit.
        peak_bytes: memory that it needs, all that is resident included.
        unit_bytes: memory of one row more, or one token more.
    """

    amount: int
    peak_bytes: int
    unit_bytes: float

    def fits(self, total_bytes: int) -> int:
        """Return how much a micro-batch may hold where so much may be allocated; at least 1."""
        return max(1, self.amount + math.floor((total_bytes - self.peak_bytes) / self.unit_bytes))


class SmallerLimit(NamedTuple):
    """A limit that one rank asks for; None where its micro-batch was one row."""

    rows: int
    length: int
    limit: MicroBatchLimit | None
    error: str


def of_all_ranks(request: SmallerLimit | None) -> dict[int, SmallerLimit]:
    """Return what ranks ask for, by rank, of those that ask for a smaller limit; a collective."""
    return {rank: asked for rank, asked in enumerate(distributed.all_gather(request)) if asked}


@dataclass(frozen=True)
class LimitChange:
    """A limit that was lowered during a run, or grew back.

    Attributes:
        before: limit until now.
        after: limit from now on.
        rows: rows of the micro-batch that was too large; 0 where the limit grew back.
        length: tokens that each of them was padded to; 0 where that is not known.
        out_of_memory: whether it ran out of memory; otherwise the allocator had to free its
            cache and ask again.
        error: message of the device; empty where it did not run out of memory.
        ranks: ranks on which it happened, of several; empty where there is one.
    """

    before: MicroBatchLimit
    after: MicroBatchLimit
    rows: int
    length: int
    out_of_memory: bool
    error: str
    ranks: tuple[int, ...] = ()

    @classmethod
    def to_smallest(
        cls, requests: Mapping[int, SmallerLimit], *, before: MicroBatchLimit
    ) -> LimitChange:
        """Return the change to the smallest limit that any rank asks for.

        Args:
            requests: limits by rank, none of them None.
            before: limit until now.
        """
        limits = {}
        for rank, request in requests.items():
            assert request.limit is not None
            limits[rank] = request.limit
        rank = min(limits, key=lambda rank: limits[rank].amount)
        rows, length, _, error = requests[rank]
        after = replace(before, amount=limits[rank].amount)
        ranks = tuple(requests) if distributed.world_size() > 1 else ()
        return cls(before, after, rows, length, bool(error), error, ranks)

    @property
    def grows(self) -> bool:
        """Whether a micro-batch may hold more than before."""
        return self.after.amount > self.before.amount

    def facts(self) -> dict[str, Any]:
        """Return what a log records of it, as plain values."""
        return {
            "before": self.before.amount,
            "after": self.after.amount,
            "unit": self.after.unit,
            "rows": self.rows,
            "length": self.length,
            "out_of_memory": self.out_of_memory,
            "error": self.error,
        }

    def describe(self) -> str:
        """Return one line, with numbers."""
        now = f"a micro-batch holds {self.after} from now on, not {self.before}"
        if self.grows:
            return f"memory has sufficed since: {now}"
        event = "the allocator freed its cache and asked again"
        what_next = ""
        if self.out_of_memory:
            event = "out of memory"
            what_next = "it is run again, and "
        if self.ranks:
            event += f" on rank {', '.join(map(str, self.ranks))}"
        error = f" ({self.error.splitlines()[0]})" if self.error else ""
        size = count(self.rows, "row")
        if self.length:
            size += f" of {count(self.length, 'token')}"
        return f"{event} with {size} at once: {what_next}{now}{error}"


@dataclass(frozen=True)
class OOMPolicy:
    """Decides what a micro-batch may hold after one ran out of memory, and how it grows back.

    Attributes:
        shrink_divisor: divisor of a micro-batch that ran out of memory, where what fits is unknown.
        ease_divisor: a micro-batch that only made the allocator free its cache loses this part of
            its rows.
        grow_divisor: the limit grows back by this part of what it was lowered from.
        grow_after: steps without a failure before each growth, where the device then has room;
            eight times as many where it does not report that, twice as many after each growth
            that was too early.
    """

    shrink_divisor: int = 2
    ease_divisor: int = 16
    grow_divisor: int = 8
    grow_after: int = 5

    def __post_init__(self) -> None:
        if self.shrink_divisor < 2:
            remedy = "give 2 or more, so that the limit shrinks"
            raise SettingError("shrink_divisor", self.shrink_divisor, remedy)
        for key in ("ease_divisor", "grow_divisor", "grow_after"):
            value = getattr(self, key)
            if value < 1:
                raise SettingError(key, value, "give 1 or more")

    def after_out_of_memory(
        self, limit: MicroBatchLimit, *, rows: int, length: int, fits: int | None = None
    ) -> MicroBatchLimit | None:
        """Return the limit after a micro-batch did not fit; None where it was one row.

        Args:
            limit: limit until now.
            rows: rows of the micro-batch.
            length: tokens that each was padded to.
            fits: amount that fits into what is free now, as far as it is known; None if unknown.
        """
        if rows == 1:
            return None
        row_amount = 1 if limit.unit == "rows" else length
        amount = rows * row_amount // self.shrink_divisor
        if fits is not None:
            fewer_rows = rows - max(1, rows // self.ease_divisor)
            amount = min(fits, fewer_rows * row_amount)
        return replace(limit, amount=max(row_amount, amount))

    def after_allocator_retry(
        self, limit: MicroBatchLimit, *, rows: int, length: int
    ) -> MicroBatchLimit | None:
        """Return the limit after a micro-batch only just fit, at least one row less.

        None where it was one row; for the arguments see :meth:`after_out_of_memory`.
        """
        if rows == 1:
            return None
        fewer_rows = rows - max(1, rows // self.ease_divisor)
        row_amount = 1 if limit.unit == "rows" else length
        return replace(limit, amount=fewer_rows * row_amount)

    def after_good_steps(
        self, limit: MicroBatchLimit, *, ceiling: MicroBatchLimit
    ) -> MicroBatchLimit:
        """Return the limit that a lowered one grows to next, on its way to the `ceiling`."""
        step = max(1, ceiling.amount // self.grow_divisor)
        return replace(limit, amount=min(ceiling.amount, limit.amount + step))


class _Room:
    """What the device has room for, and what micro-batches need of it, as far as either is known.

    Args:
        memory: memory of the device; None where nothing runs.
    """

    def __init__(self, memory: DeviceMemory | None) -> None:
        self._memory = memory
        self._cost: LimitCost | None = None
        self._total_when_lowered = 0

    def learn(self, result: ProbeResult, *, row_amount: int) -> None:
        """Take from a search what its maximum needed, and what a row more.

        Args:
            result: result of the search.
            row_amount: size of one of its rows, in the unit of limits.
        """
        rows = result.max_batch_size
        peak = result.peak_bytes()
        if peak is None or peak <= result.resident_bytes:
            return
        # A part is fixed, such as gradients; how much, sizes that are close together cannot tell.
        mean_bytes = (peak - result.resident_bytes) / rows
        measured = (trial for trial in result.trials if trial.fits and trial.peak_bytes)
        smallest = min(measured, key=lambda trial: trial.batch_size)
        distance = rows - smallest.batch_size
        slope = mean_bytes
        if 2 * distance >= rows:
            slope = (peak - (smallest.peak_bytes or 0)) / distance
        row_bytes = max(mean_bytes / 2, min(mean_bytes, slope))
        self._cost = LimitCost(rows * row_amount, peak, row_bytes / row_amount)

    def fitting_amount(self, error: str, *, amount: int) -> int | None:
        """Return how many rows or tokens fit in what is free now; None where that is unknown.

        What a search or the first failure has shown of their cost is kept for later ones.

        Args:
            error: message of the device.
            amount: size of the micro-batch that ran out of memory.
        """
        room = self._now()
        if room is None:
            return None
        if self._cost is None:
            needed = wanted_bytes(error)
            if needed is None or needed <= room.held_bytes:
                return None
            # At least: the allocator names what was needed when it failed.
            self._cost = LimitCost(amount, needed, (needed - room.held_bytes) / amount)
        return self._cost.fits(room.total_bytes)

    def remember(self) -> None:
        """Remember the room that there is as the limit is lowered."""
        room = self._now()
        if room is not None:
            self._total_when_lowered = room.total_bytes

    def suffices(self, limit: MicroBatchLimit, *, good_steps: int, stretch: int) -> bool:
        """Return whether there is room for a larger limit, after so many good steps in a row of a
        stretch of them.
        """
        room = self._now()
        if room is None:
            return good_steps >= _WAIT_UNSEEN * stretch
        if self._cost is not None and self._cost.fits(room.total_bytes) < limit.amount:
            return False
        is_given_back = room.total_bytes > _ROOM_GIVEN_BACK * self._total_when_lowered
        return is_given_back or good_steps >= stretch

    def release(self) -> None:
        """Empty the cache: larger micro-batches need larger blocks, for which a full one has no
        room.
        """
        if self._memory is not None:
            self._memory.release()

    def _now(self) -> Room | None:
        if self._memory is None:
            return None
        return self._memory.room()

    def state_dict(self) -> dict[str, Any]:
        return {"cost": self._cost and asdict(self._cost)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # A search that was made now knows it better.
        if self._cost is None and state["cost"]:
            self._cost = LimitCost(**state["cost"])


class LoweredLimit:
    """A limit that was lowered, and how it shrinks and grows back; at first nothing is lowered.

    Args:
        policy: how it shrinks and grows back.
        memory: memory of the device; None where nothing runs.

    Attributes:
        current: limit that was lowered; None where none was.
        ceiling: what it grows back to; None where it stays.
        must_ease: whether this rank's allocator only just had room, so that the limit is due to
            become a little smaller on all ranks.
        room: room of the device.
    """

    def __init__(self, policy: OOMPolicy, memory: DeviceMemory | None) -> None:
        self._policy = policy
        self.room = _Room(memory)
        self.current: MicroBatchLimit | None = None
        self.ceiling: MicroBatchLimit | None = None
        # What is never passed whatever happens, as longer rows have shown.
        self._held: MicroBatchLimit | None = None
        self._good_steps = 0
        # How often the limit has grown back too early, one after the other.
        self._relapses = 0
        self._has_grown = False
        # Runs in which the allocator retries before the limit is eased; later it has other reasons.
        self._retries_until_eased = 1
        self.must_ease = False

    def forget(self) -> None:
        self.current = None
        self.ceiling = None
        self._held = None

    def hold(self, limit: MicroBatchLimit) -> None:
        """Hold no more than this from now on, and grow back to no more."""
        self._held = limit
        if self.current is None or self.current.amount >= limit.amount:
            self.current = limit
            self.ceiling = None
        elif self.ceiling is not None and self.ceiling.amount > limit.amount:
            self.ceiling = limit

    def begin_below(self, limit: MicroBatchLimit, *, ceiling: MicroBatchLimit) -> MicroBatchLimit:
        """Begin with a limit that was lowered before; return the lower of it and the own one."""
        self.ceiling = self.ceiling or ceiling
        if self.current is None or limit.amount < self.current.amount:
            self.current = limit
        return self.current

    def after_out_of_memory(
        self, limit: MicroBatchLimit, failed: MicroBatch, error: str, *, failures: int
    ) -> SmallerLimit:
        """Return the smaller limit that this rank asks for; see :class:`MicroBatchSizer`."""
        rows = len(failed.rows)
        fits = None
        if error and failures <= _BELIEVED_FAILURES:
            amount = rows if limit.unit == "rows" else rows * failed.length
            fits = self.room.fitting_amount(error, amount=amount)
        smaller = self._policy.after_out_of_memory(
            limit, rows=rows, length=failed.length, fits=fits
        )
        return SmallerLimit(rows, failed.length, smaller, error)

    def after_attempt(self, *, allocator_retried: bool) -> None:
        """Count a step that ran to its end, and whether its allocator had to ask twice."""
        self._good_steps += 1
        if not allocator_retried:
            return
        self._retries_until_eased -= 1
        self.must_ease |= self._retries_until_eased == 0

    def easing(self, limit: MicroBatchLimit, fullest: MicroBatch) -> SmallerLimit | None:
        """Return the smaller limit that this rank asks for where its allocator only just had room,
        once; None where it had, or ran one row.
        """
        if not self.must_ease:
            return None
        self.must_ease = False
        rows = len(fullest.rows)
        smaller = self._policy.after_allocator_retry(limit, rows=rows, length=fullest.length)
        if smaller is None:
            # It was one row, and larger micro-batches may come.
            self._retries_until_eased = 1
            return None
        return SmallerLimit(rows, fullest.length, smaller, "")

    def lower(self, change: LimitChange) -> None:
        """Take a smaller limit; one that follows a growth closely makes the next growth later."""
        too_early = self._has_grown and (change.out_of_memory or self.ceiling is None)
        if self._good_steps >= self._stretch:
            self._relapses = 0
        else:
            self._relapses += too_early
        self.ceiling = self.ceiling or change.before
        if not change.out_of_memory:
            self._retries_until_eased = 0
        self.room.remember()
        self._take(change)

    def growth(self) -> MicroBatchLimit | None:
        """Return what the limit grows to now; None where it stays, or has no room to grow."""
        if self.current is None or self.ceiling is None:
            return None
        if self._good_steps < self._policy.grow_after:
            return None
        after = self._policy.after_good_steps(self.current, ceiling=self.ceiling)
        if self.room.suffices(after, good_steps=self._good_steps, stretch=self._stretch):
            return after
        return None

    def grow(self, after: MicroBatchLimit) -> LimitChange:
        """Take a larger limit; return the change."""
        assert self.current is not None
        self._retries_until_eased = _RETRIES_AFTER_GROWTH
        self.room.release()
        change = LimitChange(self.current, after, 0, 0, False, "")
        self._take(change)
        return change

    def _take(self, change: LimitChange) -> None:
        self.current = change.after
        self._has_grown = change.grows
        self._good_steps = 0
        if self.ceiling is not None and change.after.amount >= self.ceiling.amount:
            self.current = self._held
            self.ceiling = None

    @property
    def _stretch(self) -> int:
        """Good steps before the limit grows."""
        return self._policy.grow_after << self._relapses

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.room.state_dict(),
            "lowered": self.current and asdict(self.current),
            "ceiling": self.ceiling and asdict(self.ceiling),
            "held": self._held and asdict(self._held),
            "good_steps": self._good_steps,
            "relapses": self._relapses,
            "has_grown": self._has_grown,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.current = _limit(state["lowered"])
        self.ceiling = _limit(state["ceiling"])
        self._held = _limit(state["held"])
        self._good_steps = state["good_steps"]
        self._relapses = state["relapses"]
        self._has_grown = state["has_grown"]
        self.room.load_state_dict(state)


def _limit(saved: Mapping[str, Any] | None) -> MicroBatchLimit | None:
    return MicroBatchLimit(**saved) if saved else None
