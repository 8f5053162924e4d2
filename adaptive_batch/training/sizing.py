"""What one micro-batch may hold: configured or found, lowered where memory runs out, grown back.

One object owns the largest batch that was found, the limit of a micro-batch and its layout.
Whoever needs one of them is given the sizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from adaptive_batch import distributed
from adaptive_batch._util import count, from_json, rows_fit
from adaptive_batch.data import NO_LIMIT, MicroBatch, MicroBatchLayout, MicroBatchLimit
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import DeviceMemory, Room, wanted_bytes
from adaptive_batch.probe import NEWER_FIELDS, ProbeResult, Throughput

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


@dataclass(frozen=True, kw_only=True)
class ConfiguredSize:
    """Configured size of a micro-batch: in rows or in tokens, padding included, or neither.

    ``auto`` is what a search finds: what is fastest, where that is sought, or else as much as fits.

    Attributes:
        micro_batch_size: rows at once: a number, ``auto``, or None for the rows of a step that fit.
        micro_batch_tokens: tokens at once: a number, ``auto``, or None.
    """

    micro_batch_size: int | str | None = None
    micro_batch_tokens: int | str | None = None

    @property
    def is_given(self) -> bool:
        """Whether there is one: a larger step runs as several micro-batches, whatever fits."""
        return self.micro_batch_size is not None or self.micro_batch_tokens is not None

    @property
    def needs_search(self) -> bool:
        """Whether a search finds it."""
        return "auto" in (self.micro_batch_size, self.micro_batch_tokens)

    @property
    def is_number(self) -> bool:
        """Whether it is known without a search."""
        return self.is_given and not self.needs_search

    def check(self, result: ProbeResult, layout: MicroBatchLayout) -> None:
        """Refuse a size above what fits in a layout; it is never cut in silence."""
        rows = self.micro_batch_size
        tokens = self.micro_batch_tokens
        max_batch_size = result.max_batch_size
        length = result.sequence_length
        fitting_tokens = layout.amount(max_batch_size, length, unit="tokens")
        if isinstance(rows, int) and rows > max_batch_size:
            remedy = f"{rows_fit(max_batch_size)}; give {max_batch_size} or less"
            raise SettingError("micro_batch_size", rows, remedy)
        if isinstance(tokens, int) and tokens > fitting_tokens:
            fit = f"{count(max_batch_size, 'row')} of {length} tokens fit"
            remedy = f"{fit}; give {fitting_tokens} or less, or auto"
            raise SettingError("micro_batch_tokens", tokens, remedy)


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


class _LoweredLimit:
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


class MicroBatchSizer:
    """Decides what one micro-batch may hold, and how its rows lie in it.

    Args:
        micro_batch: configured size of a micro-batch.
        layout: layout of micro-batches.
        memory: memory of the device; None where nothing runs.
        policy: how the limit shrinks and grows back; None for :class:`OOMPolicy` as it is.
        on_change: function that is called with each change of the limit.

    Attributes:
        layout: layout of micro-batches.
        max_batch_size: the most rows that were tried and fit; None where none were sought.
        tried_length: tokens of the longest row that was tried, 1 where they are not known; 0 where
            none was.
        throughput: what is fastest, which ``auto`` takes; None for as much as fits.
        num_out_of_memory: out-of-memory errors so far, those of trials included.
    """

    def __init__(
        self,
        micro_batch: ConfiguredSize = ConfiguredSize(),
        *,
        layout: MicroBatchLayout | None = None,
        memory: DeviceMemory | None = None,
        policy: OOMPolicy | None = None,
        on_change: Callable[[LimitChange], object] = lambda change: None,
    ) -> None:
        self._micro_batch = micro_batch
        self.layout = layout or MicroBatchLayout()
        self._on_change = on_change
        self.max_batch_size: int | None = None
        self.tried_length = 0
        self.throughput: Throughput | None = None
        self.num_out_of_memory = 0
        self._batch_size = 1
        self._lowered = _LoweredLimit(policy or OOMPolicy(), memory)

    # --- what may run at once ---------------------------------------------------------------------

    def begin_step(self, batch_size: int) -> None:
        """Take it that a step begins of which so many rows run at once, see :meth:`limit`."""
        self._batch_size = batch_size

    @property
    def limit_of_step(self) -> MicroBatchLimit:
        """What a micro-batch of the step that began last may hold now."""
        return self.limit(self._batch_size)

    def limit(self, batch_size: int) -> MicroBatchLimit:
        """Return what a micro-batch may hold now, of a step that may not have begun.

        Args:
            batch_size: rows that run at once where no size is configured and all of them fit.
        """
        if self.throughput is not None:
            usual = self.throughput.limit
        else:
            usual = self.limit_where_fits(
                self.max_batch_size, length=self.tried_length, batch_size=batch_size
            )
        lowered = self._lowered.current
        if lowered is not None and lowered.amount < usual.amount:
            return lowered
        return usual

    def limit_where_fits(
        self, max_batch_size: int | None, *, length: int, batch_size: int
    ) -> MicroBatchLimit:
        """Return what a micro-batch would hold where so many rows fit, as it is configured.

        Args:
            max_batch_size: the most rows that fit at once there; None leaves ``auto`` unlimited.
            length: tokens of each of them.
            batch_size: see :meth:`limit`.
        """
        rows = self._micro_batch.micro_batch_size
        tokens = self._micro_batch.micro_batch_tokens
        if tokens == "auto":
            tokens = self.layout.amount(max_batch_size or 0, length, unit="tokens") or NO_LIMIT
        if tokens is not None:
            return MicroBatchLimit(int(tokens), "tokens")
        if rows == "auto":
            rows = max_batch_size or NO_LIMIT
        if rows is None:
            rows = min(batch_size, max_batch_size or batch_size)
        return MicroBatchLimit(int(rows))

    @property
    def may_split(self) -> bool:
        """Whether a step that would fit at once may run as several micro-batches."""
        return self._micro_batch.is_given or self.layout.sorts

    @property
    def waits_for_search(self) -> bool:
        """Whether what fits has to be found before anything can run."""
        return self._micro_batch.needs_search and not self.tried_length

    def use_layout(self, kind: str) -> None:
        """Take the layout of a name, from the next step on."""
        self.layout = self.layout.of_kind(kind, time=self.layout.time)

    @contextmanager
    def trying(self, layout: MicroBatchLayout) -> Iterator[None]:
        """Inside, micro-batches have another layout, as a trial times it."""
        usual = self.layout
        self.layout = layout
        try:
            yield
        finally:
            self.layout = usual

    # --- searches ---------------------------------------------------------------------------------

    def found(self, result: ProbeResult) -> None:
        """Take what a search found; a limit that was lowered from another maximum is forgotten.

        Raises:
            SettingError: a configured size is above what fits; it is never cut in silence.
        """
        self._micro_batch.check(result, self.layout)
        self.assume(result)
        self._learn_cost(result)

    def assume(self, result: ProbeResult) -> None:
        """Take what a search found, whatever is configured: for what is looked at, and not run."""
        if result.max_batch_size != self.max_batch_size:
            self._lowered.forget()
        self.max_batch_size = result.max_batch_size
        self.tried_length = max(1, result.sequence_length)
        if self.throughput is not None:
            # It may have been found where more fits.
            limit = self.throughput.limit
            fitting = self.layout.amount(self.max_batch_size, self.tried_length, unit=limit.unit)
            limit = replace(limit, amount=min(limit.amount, fitting))
            self.throughput = replace(self.throughput, limit=limit)
        if result.throughput is not None:
            self._choose(result.throughput)

    def found_longer(
        self, result: ProbeResult, limit: MicroBatchLimit, *, tried_rows: int, can_split: bool
    ) -> None:
        """Take what a search found for rows that are longer than any that were tried.

        Args:
            result: result of the search.
            limit: what a micro-batch may hold until now.
            tried_rows: the most rows that the search was allowed to try.
            can_split: whether a step may run as several micro-batches.
        """
        length = result.sequence_length
        fitting_rows = result.max_batch_size
        if not can_split:
            self.max_batch_size = min(self.max_batch_size or fitting_rows, fitting_rows)
        elif fitting_rows < tried_rows:
            amount = self.layout.amount(fitting_rows, length, unit=limit.unit)
            self._lowered.hold(MicroBatchLimit(amount, limit.unit))
        elif self._micro_batch.micro_batch_tokens == "auto":
            # The limit would be the maximum batch size times the new length.
            self._lowered.hold(self._lowered.ceiling or limit)
        self._learn_cost(result)
        self.tried_length = length

    def _learn_cost(self, result: ProbeResult) -> None:
        unit = self.limit_of_step.unit
        row_amount = self.layout.amount(1, result.sequence_length, unit=unit)
        self._lowered.room.learn(result, row_amount=row_amount)

    def _choose(self, fastest: Throughput) -> None:
        self.throughput = fastest
        self.layout = self.layout.of_kind(fastest.kind, time=fastest.time)

    # --- out of memory, and growing back ----------------------------------------------------------

    def after_out_of_memory(
        self, failed: MicroBatch, error: str, *, failures: int = 0
    ) -> SmallerLimit:
        """Return the limit that this rank asks for after a micro-batch ran out of memory.

        Args:
            failed: micro-batch that did not fit.
            error: message of the device; empty to shrink without a look at what is free now, as
                where the process ends.
            failures: failures of this step so far, this one included.
        """
        return self._lowered.after_out_of_memory(
            self.limit_of_step, failed, error, failures=failures
        )

    def after_attempt(self, fullest: MicroBatch, *, allocator_retried: bool) -> None:
        """Count a step that ran to its end; one rank alone makes its limit smaller at once where
        its allocator only just had room.

        Args:
            fullest: the largest micro-batch of the step.
            allocator_retried: whether the allocator had to ask twice.
        """
        self._lowered.after_attempt(allocator_retried=allocator_retried)
        if allocator_retried and distributed.world_size() == 1:
            self.ease(fullest)

    @property
    def has_to_agree(self) -> bool:
        """Whether there are other ranks, or the limit is due to grow."""
        return distributed.world_size() > 1 or self._lowered.growth() is not None

    def agree(self, numbers: Sequence[int], *, fullest: MicroBatch) -> tuple[Sequence[int], bool]:
        """Make the limit a little smaller where a rank's allocator only just had room, or larger
        where all ranks have room; all of them call it.

        Args:
            numbers: what ranks compare in the same collective.
            fullest: the largest micro-batch of this rank's last step.

        Returns:
            The largest of each number on any rank; and whether the limit has changed.
        """
        grown = self._lowered.growth()
        any_eases, any_stays, *largest = distributed.all_reduce_max(
            [int(self._lowered.must_ease), int(grown is None), *numbers]
        )
        if any_eases:
            self.ease(fullest)
        elif grown is not None and not any_stays:
            self._on_change(self._lowered.grow(grown))
        return largest, bool(any_eases or not any_stays)

    def ease(self, fullest: MicroBatch) -> None:
        """Make a limit that the fullest micro-batch only just fits a little smaller, once; all
        ranks call it.
        """
        requests = of_all_ranks(self._lowered.easing(self.limit_of_step, fullest))
        if requests:
            self.lower(requests)

    def lower(self, requests: Mapping[int, SmallerLimit]) -> None:
        """Take the smallest of these limits, one for each rank that asks; none of them is None."""
        change = LimitChange.to_smallest(requests, before=self.limit_of_step)
        self.num_out_of_memory += change.out_of_memory
        self._lowered.lower(change)
        self._on_change(change)
        now = self.limit_of_step
        assert now.amount <= change.after.amount, (
            f"lowered to {change.after}, and the limit is {now}"
        )

    def keep_below(self, limit: MicroBatchLimit, *, ceiling: MicroBatchLimit) -> MicroBatchLimit:
        """Begin with a limit below which an earlier attempt of the run ended, and which grows back
        to a ceiling; return the limit.
        """
        return self._lowered.begin_below(limit, ceiling=ceiling)

    def count_out_of_memory(self, times: int) -> None:
        """Count out-of-memory errors elsewhere: of trials, or of validation."""
        self.num_out_of_memory += times

    # --- state ------------------------------------------------------------------------------------

    def conditions(self) -> dict[str, Any]:
        """Return what a lowered limit depends on; with another of them it is found again."""
        return {"bound": self.max_batch_size, **asdict(self._micro_batch)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {
            **self.conditions(),
            "throughput": self.throughput and asdict(self.throughput),
            "tried_length": self.tried_length,
            "num_out_of_memory": self.num_out_of_memory,
            **self._lowered.state_dict(),
        }

    def load_search(self, state: Mapping[str, Any]) -> None:
        """Take the maximum batch size of a saved state, where none was found since."""
        if self.max_batch_size is None and state["bound"] is not None:
            self.max_batch_size = state["bound"]
            self.tried_length = state["tried_length"]

    def load_throughput(self, state: Mapping[str, Any], *, kinds: Collection[str]) -> None:
        """Cut steps as the saved run did, which had found what is fastest.

        Args:
            state: saved state.
            kinds: layouts that may be chosen now; of another one nothing is taken.
        """
        saved = state["throughput"]
        if saved and saved["kind"] in kinds:
            self._choose(from_json(Throughput, saved, optional=NEWER_FIELDS))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, after a maximum was found or without one.

        A lowered limit is kept where it was lowered from the same maximum under the same settings,
        and grows back from there.
        """
        self.num_out_of_memory = state["num_out_of_memory"]
        self._lowered.forget()
        if any(state[key] != value for key, value in self.conditions().items()):
            return
        self._lowered.load_state_dict(state)


def _limit(saved: Mapping[str, Any] | None) -> MicroBatchLimit | None:
    return MicroBatchLimit(**saved) if saved else None
