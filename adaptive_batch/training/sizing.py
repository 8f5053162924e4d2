"""The limit of a micro-batch: configured or found by a search, and lowered after an OOM."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from adaptive_batch import distributed
from adaptive_batch._util import (
    auto_or_whole,
    check_state,
    count,
    from_json,
    replaced,
)
from adaptive_batch.data import NO_LIMIT, MicroBatch, MicroBatchLayout, MicroBatchLimit
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import DeviceMemory, wanted_bytes
from adaptive_batch.probe import ProbeResult, Throughput

# A restart after a lost rank costs more than a repeated step, so the former limit is retried 2**3
# times as late.
_FAILED_TRIES_AFTER_LOST_RANK = 3


class ShrinkRequest(NamedTuple):
    """Smaller limit that a rank requests after an OOM.

    Attributes:
        rows: rows of the micro-batch that ran out of memory.
        length: padded length of these rows in tokens; 0 if unknown.
        limit: requested limit; None if the micro-batch had one row.
        error: message of the device.
    """

    rows: int
    length: int
    limit: MicroBatchLimit | None
    error: str


@dataclass(frozen=True)
class LimitChange:
    """Change of a limit: lowered after an OOM, or raised to retry the former limit.

    Attributes:
        before: limit until now.
        after: limit from now on.
        rows: rows of the micro-batch that ran out of memory; 0 if the limit is raised.
        length: padded length of these rows in tokens; 0 if unknown.
        error: message of the device; empty if the limit is raised.
        ranks: ranks that ran out of memory; empty if there is only one rank.
        good_steps: steps without an OOM before the limit is raised; 0 if it is lowered.
        noun: name of a row in messages.
        kind: kind of the event in logs.
    """

    before: MicroBatchLimit
    after: MicroBatchLimit
    rows: int = 0
    length: int = 0
    error: str = ""
    ranks: tuple[int, ...] = ()
    good_steps: int = 0
    noun: str = "row"
    kind: str = "limit"

    @property
    def grows(self) -> bool:
        """True if the limit is raised, False after an OOM."""
        return self.good_steps > 0

    def facts(self) -> dict[str, Any]:
        """Return the change as plain values for logs."""
        return {
            "before": self.before.amount,
            "after": None if self.after.amount == NO_LIMIT else self.after.amount,
            "unit": self.after.unit,
            "rows": self.rows,
            "length": self.length,
            "out_of_memory": not self.grows,
            "error": self.error,
        }

    def describe(self) -> str:
        """Return a line for logs: the limits before and after, and the reason."""
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
    """Decides when the limit before an OOM is retried.

    Attributes:
        grow_after: number of steps without an OOM before a retry. Each retry that fails within this
            number of steps doubles the wait.
    """

    grow_after: int = 5

    def __post_init__(self) -> None:
        if self.grow_after < 1:
            raise SettingError("grow_after", self.grow_after, "give 1 or more")


class MicroBatchSizer:
    """Limits a micro-batch, and holds the layout of its rows.

    Args:
        micro_batch_size: most rows of a micro-batch; ``auto`` for the result of a search.
        micro_batch_tokens: most padded tokens of a micro-batch; ``auto`` for the result of a
            search. Give only one of both. Without them, a whole step runs at once if it fits.
        layout: layout of micro-batches.
        memory: memory of the device; None if nothing runs.
        policy: when the limit before an OOM is retried; None for the default policy.
        on_change: function that is called with each change of the limit.

    Attributes:
        micro_batch_size, micro_batch_tokens: as given.
        layout: layout of micro-batches.
        max_batch_size: the most rows that were tried and fit; None before a search.
        tried_length: tokens of the longest row that was tried; 1 if unknown, 0 before a search.
        throughput: fastest micro-batches, which ``auto`` uses; None if ``auto`` uses the largest.
        num_out_of_memory: out-of-memory errors so far, including those of trials.
        is_packed: whether the batch of this step is packed. A limit from a search then counts
            tokens.
        noun: name of a row of this step's batch in messages.

    Raises:
        SettingError: a size cannot be used.
    """

    def __init__(
        self,
        *,
        micro_batch_size: int | str | None = None,
        micro_batch_tokens: int | str | None = None,
        layout: MicroBatchLayout | None = None,
        memory: DeviceMemory | None = None,
        policy: OOMPolicy | None = None,
        on_change: Callable[[LimitChange], object] = lambda change: None,
    ) -> None:
        sizes = {"micro_batch_size": micro_batch_size, "micro_batch_tokens": micro_batch_tokens}
        for key, value in sizes.items():
            if value is not None:
                auto_or_whole(key, value)
        if None not in sizes.values():
            remedy = f"micro_batch_size={micro_batch_size} is set too; remove one"
            raise SettingError("micro_batch_tokens", micro_batch_tokens, remedy)
        self.micro_batch_size = micro_batch_size
        self.micro_batch_tokens = micro_batch_tokens
        self.layout = layout or MicroBatchLayout()
        self._on_change = on_change
        self.max_batch_size: int | None = None
        self.tried_length = 0
        self.throughput: Throughput | None = None
        self.num_out_of_memory = 0
        self.is_packed = False
        self.noun = "row"
        self._memory = memory
        self._grow_after = (policy or OOMPolicy()).grow_after
        # Sets the attributes of lowered limits.
        self._reset_lowered_limit()

    def for_other_pass(
        self, kind: str, rows: int | str, layout: MicroBatchLayout
    ) -> MicroBatchSizer:
        """Return the sizer of a pass without gradients, whose OOMs this sizer counts, too.

        Args:
            kind: kind of its changes in logs.
            rows: most rows at once; ``auto`` for as many tokens as a search finds.
            layout: layout of its micro-batches.
        """

        def changed(change: LimitChange) -> None:
            self.count_out_of_memory(not change.grows)
            self._on_change(replace(change, kind=kind))

        return MicroBatchSizer(
            micro_batch_size=None if rows == "auto" else rows,
            micro_batch_tokens="auto" if rows == "auto" else None,
            layout=layout,
            memory=self._memory,
            on_change=changed,
        )

    def _reset_lowered_limit(self) -> None:
        # None if no limit was lowered, or if the former limit is being retried.
        self._lowered: MicroBatchLimit | None = None
        # Steps without an OOM since the limit last changed. The start value keeps the first OOM
        # from counting as a failed try.
        self._good_steps = self._grow_after
        # Consecutive failed tries of the former limit.
        self._failed_tries = 0

    # --- what may run at once ---------------------------------------------------------------------

    def limit(self, batch_size: int = NO_LIMIT) -> MicroBatchLimit:
        """Return the current limit of a micro-batch.

        Args:
            batch_size: most rows at once if no size is configured.
        """
        limit = self._limit_without_oom(batch_size)
        lowered = self._lowered
        if lowered is None or lowered.unit != limit.unit or lowered.amount >= limit.amount:
            return limit
        return lowered

    def _limit_without_oom(self, batch_size: int) -> MicroBatchLimit:
        """Return the configured limit, or the one that a search found, before any OOM."""
        rows = self.micro_batch_size
        tokens = self.micro_batch_tokens
        # None before a search.
        max_rows = self.max_batch_size
        if self.throughput is not None:
            # A search has timed the micro-batches of `auto`.
            return self.throughput.limit
        if isinstance(tokens, int):
            return MicroBatchLimit(tokens, "tokens")
        if isinstance(rows, int):
            return MicroBatchLimit(rows)
        # A search tries packed rows, not documents, so its limit of documents counts tokens.
        is_of_documents = self.is_packed and max_rows is not None
        if tokens == "auto" or is_of_documents:
            amount = self.layout.amount(max_rows or 0, self.tried_length, unit="tokens")
            return MicroBatchLimit(amount or NO_LIMIT, "tokens")
        if rows == "auto":
            return MicroBatchLimit(max_rows or NO_LIMIT)
        # Without a configured size, a step runs at once if it fits.
        return MicroBatchLimit(min(batch_size, max_rows or batch_size))

    @property
    def may_split(self) -> bool:
        """True if a step that fits at once may run as several micro-batches."""
        is_given = self.micro_batch_size is not None or self.micro_batch_tokens is not None
        return is_given or self.layout.kind == "grouped"

    @property
    def waits_for_search(self) -> bool:
        """True if a search has to find the limit first."""
        is_auto = "auto" in (self.micro_batch_size, self.micro_batch_tokens)
        return is_auto and not self.tried_length

    def trying(self, layout: MicroBatchLayout) -> AbstractContextManager[None]:
        """Return a context that uses another layout, as for a timed trial."""
        return replaced(self, layout=layout)

    # --- searches ---------------------------------------------------------------------------------

    def check(self, result: ProbeResult) -> None:
        """Raise SettingError if the configured size is above the result of a search."""
        rows = self.micro_batch_size
        tokens = self.micro_batch_tokens
        max_rows = result.max_batch_size
        max_tokens = self.layout.amount(max_rows, result.sequence_length, unit="tokens")
        if isinstance(rows, int) and rows > max_rows:
            remedy = f"{result.describe()}; give {max_rows} or less"
            raise SettingError("micro_batch_size", rows, remedy)
        if isinstance(tokens, int) and tokens > max_tokens:
            remedy = f"{result.describe()}; give {max_tokens} or less, or auto"
            raise SettingError("micro_batch_tokens", tokens, remedy)

    def set_bound(self, result: ProbeResult) -> None:
        """Use the result of a search; drop a limit that was lowered from another maximum."""
        if result.max_batch_size != self.max_batch_size:
            self._reset_lowered_limit()
        self.max_batch_size = result.max_batch_size
        self.tried_length = max(1, result.sequence_length)
        if self.throughput is not None:
            # A saved choice may be of a device on which more fits.
            limit = self.throughput.limit
            fitting = self.layout.amount(self.max_batch_size, self.tried_length, unit=limit.unit)
            limit = replace(limit, amount=min(limit.amount, fitting))
            self.throughput = replace(self.throughput, limit=limit)
        if result.throughput is not None:
            self._choose(result.throughput)

    def _choose(self, fastest: Throughput) -> None:
        self.throughput = fastest
        self.layout = replace(self.layout, kind=fastest.kind, time=fastest.time)

    # --- out of memory ----------------------------------------------------------------------------

    def after_out_of_memory(
        self, failed: MicroBatch, error: str, *, failures: int = 0
    ) -> ShrinkRequest:
        """Return the smaller limit that this rank requests after an OOM.

        Args:
            failed: micro-batch that ran out of memory.
            error: message of the device.
            failures: failures of this step so far, this one included; 0 if the process ends. Only
                the first one estimates the limit from the free memory; others halve it.
        """
        limit = self.limit()
        rows = len(failed.rows)
        if rows == 1:
            return ShrinkRequest(rows, failed.length, None, error)
        # Amounts are rows or tokens, as in the limit.
        amount_of_row = 1 if limit.unit == "rows" else failed.length
        failed_amount = rows * amount_of_row
        amount = failed_amount // 2
        room = None
        if self._memory is not None and failures == 1:
            room = self._memory.room()
        needed_bytes = wanted_bytes(error)
        if room is not None and needed_bytes is not None and needed_bytes > room.held_bytes:
            # Estimate that memory beyond what is held between steps grows with the rows.
            free_bytes = room.total_bytes - room.held_bytes
            fitting = failed_amount * free_bytes // (needed_bytes - room.held_bytes)
            # Request fewer rows than failed, whatever the device reports.
            fewer_rows = rows - max(1, rows // 16)
            amount = min(fitting, fewer_rows * amount_of_row)
        smaller_limit = replace(limit, amount=max(amount_of_row, amount))
        return ShrinkRequest(rows, failed.length, smaller_limit, error)

    def after_attempt(self) -> None:
        """Count a step without an OOM."""
        self._good_steps += 1

    @property
    def retry_is_due(self) -> bool:
        """True if this rank may retry the former limit, see :class:`OOMPolicy`."""
        if self._lowered is None or self._good_steps < self._steps_before_retry:
            return False
        # Without a difference there is nothing to regain.
        return self.limit() != self._limit_without_oom(batch_size=NO_LIMIT)

    @property
    def _steps_before_retry(self) -> int:
        # Doubled for each failed try.
        return self._grow_after << self._failed_tries

    def retry_if_due(self) -> None:
        """Retry the former limit if it is due on all ranks. A collective."""
        if not distributed.any_of_ranks(not self.retry_is_due):
            self.retry_former_limit()

    def retry_former_limit(self) -> None:
        """Use the limit before the OOM again, as all ranks must."""
        before = self.limit()
        good_steps = self._good_steps
        self._lowered = None
        self._good_steps = 0
        after = self.limit()
        self._on_change(LimitChange(before, after, good_steps=good_steps, noun=self.noun))

    def lower(self, requests: Mapping[int, ShrinkRequest]) -> None:
        """Use the smallest limit that ranks request; each request has a limit."""
        limits = {rank: request.limit for rank, request in requests.items() if request.limit}
        rank = min(limits, key=lambda rank: limits[rank].amount)
        limit = limits[rank]
        rows, length, _, error = requests[rank]
        before = self.limit()
        if before == MicroBatchLimit(NO_LIMIT):
            # For the log: the rows that ran at once.
            before = MicroBatchLimit(rows)
        ranks = tuple(requests) if distributed.world_size() > 1 else ()
        self.num_out_of_memory += 1
        if self._lowered is None:
            # The former limit was being retried. If it failed soon, the next retry is later.
            failed_soon = self._good_steps < self._steps_before_retry
            self._failed_tries = self._failed_tries + 1 if failed_soon else 0
        self._lowered = limit
        self._good_steps = 0
        self._on_change(LimitChange(before, limit, rows, length, error, ranks, noun=self.noun))
        now = self.limit()
        assert now.amount <= limit.amount, f"lowered to {limit}, and the limit is {now}"

    def start_below(self, limit: MicroBatchLimit) -> None:
        """Start with the limit that a lost rank requested before a restart."""
        if self._lowered is None or limit.amount < self._lowered.amount:
            self._lowered = limit
        self._good_steps = 0
        self._failed_tries = _FAILED_TRIES_AFTER_LOST_RANK

    def count_out_of_memory(self, times: int) -> None:
        """Count out-of-memory errors elsewhere: of trials, or of validation."""
        self.num_out_of_memory += times

    # --- state ------------------------------------------------------------------------------------

    def conditions(self) -> dict[str, Any]:
        """Return the settings that a lowered limit depends on; if they change, it is dropped."""
        return {
            "bound": self.max_batch_size,
            "micro_batch_size": self.micro_batch_size,
            "micro_batch_tokens": self.micro_batch_tokens,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {
            **self.conditions(),
            "throughput": self.throughput and asdict(self.throughput),
            "tried_length": self.tried_length,
            "num_out_of_memory": self.num_out_of_memory,
            "lowered": self._lowered and asdict(self._lowered),
            "good_steps": self._good_steps,
            "failed_tries": self._failed_tries,
        }

    def load_search(self, state: Mapping[str, Any]) -> None:
        """Use the maximum batch size of a saved state if no search has found one since.

        Raises:
            SettingError: the state is damaged.
        """
        check_state(state, self.state_dict(), owner="a step")
        if self.max_batch_size is None and state["bound"] is not None:
            self.max_batch_size = state["bound"]
            self.tried_length = state["tried_length"]

    def load_throughput(self, state: Mapping[str, Any], *, kinds: Collection[str]) -> None:
        """Use the fastest micro-batches that a saved run has found.

        Args:
            state: saved state.
            kinds: layouts that may be chosen now. A choice of another layout is ignored.
        """
        saved = state["throughput"]
        if saved and saved["kind"] in kinds:
            self._choose(from_json(Throughput, saved))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, after a search or without one.

        A lowered limit is kept if it was lowered from the same maximum under the same settings.
        """
        self.num_out_of_memory = state["num_out_of_memory"]
        self._reset_lowered_limit()
        if any(state[key] != value for key, value in self.conditions().items()):
            return
        if state["lowered"]:
            self._lowered = MicroBatchLimit(**state["lowered"])
        self._good_steps = state["good_steps"]
        self._failed_tries = state["failed_tries"]
