"""The limit of a micro-batch after memory ran out: half or what fits now, and later the former."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from adaptive_batch import distributed
from adaptive_batch._util import count
from adaptive_batch.data import MicroBatch, MicroBatchLimit
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import DeviceMemory, wanted_bytes

# Memory counts as given back if the device has this many times what it had when memory ran out.
_GIVEN_BACK = 1.02
# A restart after a lost rank costs more than a step that runs again: it waits eight times as long.
_TRIES_THAT_A_LOST_RANK_COUNTS = 3


class ShrinkRequest(NamedTuple):
    """A smaller limit that a rank asks for after it ran out of memory.

    Attributes:
        rows: rows of the micro-batch that ran out of memory.
        length: tokens that each of them was padded to; 0 if that is not known.
        limit: limit that the rank asks for; None if the micro-batch was one row.
        error: message of the device.
    """

    rows: int
    length: int
    limit: MicroBatchLimit | None
    error: str


def gather_requests(request: ShrinkRequest | None) -> dict[int, ShrinkRequest]:
    """Return the requests of the ranks that have one, by rank; a collective."""
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
        noun: what a row is called.
    """

    before: MicroBatchLimit
    after: MicroBatchLimit
    rows: int = 0
    length: int = 0
    error: str = ""
    ranks: tuple[int, ...] = ()
    good_steps: int = 0
    noun: str = "row"

    @property
    def grows(self) -> bool:
        """Whether the former limit is tried again; if not, memory ran out."""
        return self.good_steps > 0

    def facts(self) -> dict[str, Any]:
        """Return what a log records of it, as plain values."""
        return {
            "before": self.before.amount,
            "after": self.after.amount,
            "unit": self.after.unit,
            "rows": self.rows,
            "length": self.length,
            "out_of_memory": not self.grows,
            "error": self.error,
        }

    def describe(self) -> str:
        """Return one line that says what changed, from what to what, and why."""
        limits = f"from {self.before.describe(self.noun)} to {self.after.describe(self.noun)}"
        if self.grows:
            steps = count(self.good_steps, "step")
            return f"no out of memory in {steps}: micro-batch limit raised {limits}"
        where = f" on rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        size = count(self.rows, self.noun)
        if self.length:
            size += f" of {count(self.length, 'token')}"
        return (
            f"out of memory{where} with {size} at once: micro-batch limit lowered {limits}, and the"
            f" step runs again ({self.error.splitlines()[0]})"
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


class LimitRecovery:
    """Keeps the limit that was lowered, and decides when the former one is tried again.

    Args:
        policy: when the former limit is tried again.
        memory: memory of the device; None if nothing runs.

    Attributes:
        lowered: limit that was lowered; None if none was, or the former one is tried again.
        good_steps: steps that have fit since the limit changed last.
    """

    def __init__(self, policy: OOMPolicy, memory: DeviceMemory | None) -> None:
        self._policy = policy
        self._memory = memory
        self.lowered: MicroBatchLimit | None = None
        # Nothing has been tried again yet that could fail too early.
        self.good_steps = policy.grow_after
        # Tries of the former limit that have failed, one after the other.
        self._failed_tries = 0
        # Bytes that the device had when memory ran out; 0 if it did not report them.
        self._total_bytes = 0

    def request(
        self, limit: MicroBatchLimit, failed: MicroBatch, error: str, *, halves: bool
    ) -> ShrinkRequest:
        """Return the smaller limit that this rank asks for after a micro-batch ran out of memory.

        Args:
            limit: limit until now.
            failed: micro-batch that ran out of memory.
            error: message of the device.
            halves: whether to halve without a look at what is free now.
        """
        fits = None
        if not halves:
            amount = len(failed.rows) * _row_amount(limit, failed)
            fits = fitting_amount(self._memory, error, amount=amount)
        smaller = smaller_limit(limit, failed, fits=fits)
        return ShrinkRequest(len(failed.rows), failed.length, smaller, error)

    def lower(self, limit: MicroBatchLimit) -> None:
        """Lower the limit; soon after a try of the former one, the next try comes later."""
        if self.lowered is None:
            is_too_early = self.good_steps < self._steps_to_wait
            self._failed_tries = self._failed_tries + 1 if is_too_early else 0
        self.lowered = limit
        self.good_steps = 0
        self._total_bytes = self._available_bytes()

    def start_below(self, limit: MicroBatchLimit) -> None:
        """Start with a limit at which an earlier attempt of the run ended."""
        if self.lowered is None or limit.amount < self.lowered.amount:
            self.lowered = limit
        self.good_steps = 0
        self._failed_tries = _TRIES_THAT_A_LOST_RANK_COUNTS

    def is_due(self) -> bool:
        """Return whether it is time to try the former limit again."""
        if self.lowered is None or self.good_steps < self._policy.grow_after:
            return False
        return (
            self.good_steps >= self._steps_to_wait
            or self._available_bytes() > _GIVEN_BACK * self._total_bytes > 0
        )

    def try_former(self) -> None:
        """Try the former limit again."""
        self.lowered = None
        self.good_steps = 0

    def _available_bytes(self) -> int:
        room = None if self._memory is None else self._memory.room()
        return 0 if room is None else room.total_bytes

    @property
    def _steps_to_wait(self) -> int:
        return self._policy.grow_after << self._failed_tries

    def state_dict(self) -> dict[str, Any]:
        return {
            "lowered": self.lowered and asdict(self.lowered),
            "good_steps": self.good_steps,
            "failed_tries": self._failed_tries,
            "total_bytes": self._total_bytes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.lowered = state["lowered"] and MicroBatchLimit(**state["lowered"])
        self.good_steps = state["good_steps"]
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
    needed_bytes = wanted_bytes(error)
    if room is None or needed_bytes is None or needed_bytes <= room.held_bytes:
        return None
    free_bytes = room.total_bytes - room.held_bytes
    return amount * free_bytes // (needed_bytes - room.held_bytes)


def smaller_limit(
    limit: MicroBatchLimit, failed: MicroBatch, *, fits: int | None
) -> MicroBatchLimit | None:
    """Return the limit after a micro-batch ran out of memory; None if it was one row.

    Args:
        limit: limit until now.
        failed: micro-batch that ran out of memory.
        fits: amount that fits in what is free now; None for half of the rows.
    """
    rows = len(failed.rows)
    if rows == 1:
        return None
    row_amount = _row_amount(limit, failed)
    amount = rows * row_amount // 2
    if fits is not None:
        # It did not fit, whatever the device says.
        amount = min(fits, (rows - max(1, rows // 16)) * row_amount)
    return replace(limit, amount=max(row_amount, amount))


def _row_amount(limit: MicroBatchLimit, piece: MicroBatch) -> int:
    """Return what a row of a micro-batch takes of a limit."""
    return 1 if limit.unit == "rows" else piece.length
