"""How the limit of a micro-batch shrinks if memory runs out, and is tried again later."""

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

# Room counts as given back if it is this many times what there was when memory ran out.
_GIVEN_BACK = 1.02
# A restart after a lost rank costs more than a step that runs again: it waits eight times as long.
_TRIES_THAT_A_LOST_RANK_COUNTS = 3


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
    """A limit that was lowered during a run, or that is tried again.

    Attributes:
        before: limit until now.
        after: limit from now on.
        rows: rows of the micro-batch that ran out of memory; 0 if the former limit is tried again.
        length: tokens that each of them was padded to; 0 if that is not known.
        error: message of the device; empty if the former limit is tried again.
        ranks: ranks that ran out of memory, of several; empty if there is one.
        good_steps: steps that have fit since the limit was lowered, if the former one is tried
            again.
    """

    before: MicroBatchLimit
    after: MicroBatchLimit
    rows: int = 0
    length: int = 0
    error: str = ""
    ranks: tuple[int, ...] = ()
    good_steps: int = 0

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
        return cls(before, after, rows, length, error, ranks)

    @property
    def grows(self) -> bool:
        """Whether a micro-batch may hold more than before."""
        return self.after.amount > self.before.amount

    @property
    def out_of_memory(self) -> bool:
        """True if memory ran out."""
        return not self.grows

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
        if self.grows:
            steps = "the last step has" if self.good_steps == 1 else f"{self.good_steps} steps have"
            return f"{steps} fit: a micro-batch may hold {self.after} again, not {self.before}"
        where = f" on rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        size = count(self.rows, "row")
        if self.length:
            size += f" of {count(self.length, 'token')}"
        return (
            f"out of memory{where} with {size} at once: the step runs again, and a micro-batch"
            f" holds {self.after} from now on, not {self.before} ({self.error.splitlines()[0]})"
        )


@dataclass(frozen=True)
class OOMPolicy:
    """Decides when the limit that ran out of memory is tried again.

    Attributes:
        grow_after: steps without a failure before the former limit is tried again; twice as many
            after each try that fails within them, unless the device has more room since.
    """

    grow_after: int = 5

    def __post_init__(self) -> None:
        if self.grow_after < 1:
            raise SettingError("grow_after", self.grow_after, "give 1 or more")


class LoweredLimit:
    """A limit that was lowered, until the former one is tried again; at first nothing is lowered.

    Args:
        policy: when the former limit is tried again.
        memory: memory of the device; None if nothing runs.

    Attributes:
        current: limit that was lowered; None if none was.
        ceiling: former limit; None if the current one stays.
    """

    def __init__(self, policy: OOMPolicy, memory: DeviceMemory | None) -> None:
        self._policy = policy
        self._memory = memory
        self.current: MicroBatchLimit | None = None
        self.ceiling: MicroBatchLimit | None = None
        # Longer rows have shown that no more fits: it is never passed.
        self._held: MicroBatchLimit | None = None
        # At first nothing is tried again, so nothing can fail too early.
        self._good_steps = policy.grow_after
        # Tries of the former limit that have failed, one after the other.
        self._failed_tries = 0
        # What there was room for when memory ran out; 0 if no device said it.
        self._total_bytes = 0

    def forget(self) -> None:
        self.current = None
        self.ceiling = None
        self._held = None
        self._good_steps = self._policy.grow_after
        self._failed_tries = 0

    def hold(self, limit: MicroBatchLimit) -> None:
        """Hold no more than this from now on, and try no more again."""
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
        self._good_steps = 0
        self._failed_tries = _TRIES_THAT_A_LOST_RANK_COUNTS
        return self.current

    def after_out_of_memory(
        self, limit: MicroBatchLimit, failed: MicroBatch, error: str, *, failures: int
    ) -> SmallerLimit:
        """Return the smaller limit that this rank asks for; see :class:`MicroBatchSizer`."""
        rows = len(failed.rows)
        row_amount = 1 if limit.unit == "rows" else failed.length
        # If the step fails again, the device's word did not help.
        fits = None
        if failures == 1:
            fits = fitting_amount(self._memory, error, amount=rows * row_amount)
        smaller = smaller_limit(limit, rows=rows, row_amount=row_amount, fits=fits)
        return SmallerLimit(rows, failed.length, smaller, error)

    def after_attempt(self) -> None:
        """Count a step that ran to its end."""
        self._good_steps += 1

    def lower(self, change: LimitChange) -> None:
        """Take a smaller limit; one that follows a try closely makes the next try later."""
        if self.ceiling is None:
            too_early = self._good_steps < self._steps_to_wait
            self._failed_tries = self._failed_tries + 1 if too_early else 0
            self.ceiling = change.before
        self.current = change.after
        self._good_steps = 0
        room = self._room()
        self._total_bytes = 0 if room is None else room.total_bytes

    def growth(self) -> MicroBatchLimit | None:
        """Return the former limit, if it is time to try it again."""
        if self.current is None or self.ceiling is None:
            return None
        is_due = self._good_steps >= self._steps_to_wait
        if not is_due and self._good_steps >= self._policy.grow_after:
            is_due = self._is_given_back()
        return self.ceiling if is_due and self.ceiling.amount > self.current.amount else None

    def _is_given_back(self) -> bool:
        """Return whether the device has more room than when memory ran out."""
        room = self._room()
        return room is not None and room.total_bytes > _GIVEN_BACK * self._total_bytes > 0

    def _room(self) -> Room | None:
        return None if self._memory is None else self._memory.room()

    def grow(self) -> LimitChange:
        """Take the former limit again; return the change."""
        assert self.current is not None
        assert self.ceiling is not None
        change = LimitChange(self.current, self.ceiling, good_steps=self._good_steps)
        self.current = self._held
        self.ceiling = None
        self._good_steps = 0
        return change

    @property
    def _steps_to_wait(self) -> int:
        return self._policy.grow_after << self._failed_tries

    def state_dict(self) -> dict[str, Any]:
        return {
            "lowered": self.current and asdict(self.current),
            "ceiling": self.ceiling and asdict(self.ceiling),
            "held": self._held and asdict(self._held),
            "good_steps": self._good_steps,
            "failed_tries": self._failed_tries,
            "total_bytes": self._total_bytes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.current = _limit(state["lowered"])
        self.ceiling = _limit(state["ceiling"])
        self._held = _limit(state["held"])
        self._good_steps = state["good_steps"]
        self._failed_tries = state.get("failed_tries", 0)
        self._total_bytes = state.get("total_bytes", 0)


def fitting_amount(memory: DeviceMemory | None, error: str, *, amount: int) -> int | None:
    """Return how many rows or tokens fit in what is free now; None if that is unknown.

    Args:
        memory: memory of the device.
        error: message of the device, which names what was needed in all.
        amount: size of the micro-batch that ran out of memory.
    """
    room = None if memory is None else memory.room()
    needed = wanted_bytes(error)
    if room is None or needed is None or needed <= room.held_bytes:
        return None
    unit_bytes = (needed - room.held_bytes) / amount
    return max(1, math.floor((room.total_bytes - room.held_bytes) / unit_bytes))


def smaller_limit(
    limit: MicroBatchLimit, *, rows: int, row_amount: int, fits: int | None
) -> MicroBatchLimit | None:
    """Return the limit after a micro-batch ran out of memory; None if it was one row.

    Args:
        limit: limit until now.
        rows: rows of the micro-batch.
        row_amount: size of each, in the unit of the limit.
        fits: amount that fits into what is free now; None for half of the rows.
    """
    if rows == 1:
        return None
    amount = rows * row_amount // 2
    if fits is not None:
        # It did not fit, whatever the device says.
        amount = min(fits, (rows - max(1, rows // 16)) * row_amount)
    return replace(limit, amount=max(row_amount, amount))


def _limit(saved: Mapping[str, Any] | None) -> MicroBatchLimit | None:
    return MicroBatchLimit(**saved) if saved else None
