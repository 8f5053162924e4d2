"""What one micro-batch of a run may hold: configured or found, lowered by what happens and grown back, never above what was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from adaptive_batch._util import count, rows_fit
from adaptive_batch.data import MicroBatchLayout, MicroBatchLimit
from adaptive_batch.errors import SettingError
from adaptive_batch.probe import ProbeResult, Throughput

from .oom_retry import LimitChange, LimitCost


class MicroBatchLimits:
    """The one owner of the maximum batch size that was found and of the limit of a micro-batch.

    Args:
        micro_batch_size: rows at once: a number, ``auto`` for the bound, or None for the rows of a step that fit.
        micro_batch_tokens: padded tokens at once: a number, ``auto`` for those of the bound, or None.
        layout: of micro-batches.

    Attributes:
        layout: of micro-batches, from the next step on.
        throughput: what is fastest, which ``auto`` takes; None for as much as fits.
        bound: the most rows, of `tried_length` tokens, that were tried and fit; None where none was sought.
        tried_length: the longest row that was tried, in tokens; 0 where none was.
        lowered: what a micro-batch may hold at most after it ran out of memory; None where it has not.
        ceiling: what it grows back to; None where it is not lowered, or stays so.
        good_steps: since the last change, or the beginning.
        relapses: how often it has grown back too early, one after the other.
        cost: what micro-batches need; None where nothing has shown it.
        num_out_of_memory: out-of-memory errors so far, those of trials included.
    """

    def __init__(
        self,
        *,
        micro_batch_size: int | str | None = None,
        micro_batch_tokens: int | str | None = None,
        layout: MicroBatchLayout | None = None,
    ) -> None:
        self.micro_batch_size, self.micro_batch_tokens = micro_batch_size, micro_batch_tokens
        self.layout = layout or MicroBatchLayout()
        self.throughput: Throughput | None = None
        self.lowered: MicroBatchLimit | None = None
        self.ceiling: MicroBatchLimit | None = None
        self.good_steps = self.relapses = 0
        self.cost: LimitCost | None = None
        self._held: MicroBatchLimit | None = None  # whatever happens: longer rows have been tried
        self._has_grown = False  # by the last change
        self.bound: int | None = None
        self.tried_length = 0
        self.num_out_of_memory = 0

    def of(self, batch_size: int) -> MicroBatchLimit:
        """Return what a micro-batch may hold now, at a batch size."""
        rows, tokens = self.micro_batch_size, self.micro_batch_tokens
        if self.throughput is not None:
            limit = self.throughput.limit
        elif tokens is not None:
            limit = MicroBatchLimit(self.tried_tokens if tokens == "auto" else int(tokens), "tokens")
        elif rows is not None:
            limit = MicroBatchLimit((self.bound or 0) if rows == "auto" else int(rows))
        else:
            limit = MicroBatchLimit(min(batch_size, self.bound or batch_size))
        return self.lowered if self.lowered and self.lowered.amount < limit.amount else limit

    @property
    def tried_tokens(self) -> int:
        """Padded tokens of the largest micro-batch that was tried and fits."""
        return self.layout.padded_tokens([self.tried_length] * (self.bound or 0))

    @property
    def splits(self) -> bool:
        """Whether steps run as several micro-batches whatever fits."""
        return self.micro_batch_size is not None or self.micro_batch_tokens is not None

    def set_bound(self, bound: int, *, tried_length: int) -> None:
        """Take what a search has found; a limit that was lowered from another bound is forgotten.

        Raises:
            SettingError: a configured size is above what fits; it is never cut in silence.
        """
        rows, tokens = self.micro_batch_size, self.micro_batch_tokens
        most = self.layout.padded_tokens([tried_length] * bound)
        if isinstance(rows, int) and rows > bound:
            raise SettingError("micro_batch_size", rows, f"{rows_fit(bound)}; give {bound} or less")
        if isinstance(tokens, int) and tokens > most:
            remedy = f"{count(bound, 'row')} of {tried_length} tokens fit; give {most} or less, or auto"
            raise SettingError("micro_batch_tokens", tokens, remedy)
        if bound != self.bound:
            self.lowered = self.ceiling = self._held = None
        self.bound, self.tried_length = bound, tried_length
        if self.throughput is not None:  # found where more fits
            limit = self.throughput.limit
            most = min(limit.amount, bound if limit.unit == "rows" else self.tried_tokens)
            self.throughput = replace(self.throughput, limit=replace(limit, amount=most))

    def choose(self, fastest: Throughput | None) -> None:
        """Take what is fastest, and its layout, from the next step on; None changes nothing."""
        if fastest is not None:
            self.throughput = fastest
            self.layout = replace(self.layout, kind=fastest.kind, time=fastest.time)

    def learn_cost(self, result: ProbeResult) -> None:
        """Take from a search what its bound needed, and what a row more."""
        rows, peak = result.max_batch_size, result.peak_bytes()
        if peak is None or peak <= result.resident_bytes:
            return
        # A part is fixed, such as gradients; how much, sizes that are close to each other cannot say.
        mean = (peak - result.resident_bytes) / rows
        fewest = min((t for t in result.trials if t.fits and t.peak_bytes), key=lambda t: t.batch_size)
        farther = rows - fewest.batch_size
        slope = (peak - (fewest.peak_bytes or 0)) / farther if 2 * farther >= rows else mean
        row = max(mean / 2, min(mean, slope))
        tokens = self.layout.padded_tokens([result.sequence_length]) if self.of(rows).unit == "tokens" else 1
        self.cost = LimitCost(rows * tokens, peak, row / tokens)

    def hold(self, limit: MicroBatchLimit) -> None:
        """Hold no more than this from now on, and grow back to no more."""
        self._held = limit
        if self.lowered is None or self.lowered.amount >= limit.amount:
            self.lowered, self.ceiling = limit, None
        elif self.ceiling is not None:
            self.ceiling = min(self.ceiling, limit, key=lambda one: one.amount)

    def change(self, change: LimitChange, *, stretch: int) -> None:
        """Take in what a micro-batch holds from now on: less, as a step ran out of memory, or more after good steps.

        Args:
            change: of the limit.
            stretch: good steps that it was to grow after; one that is lowered within them has grown too early.
        """
        self.num_out_of_memory += change.out_of_memory
        if not change.grows:
            too_early = self._has_grown and (change.out_of_memory or self.ceiling is None)
            self.relapses = self.relapses + too_early if self.good_steps < stretch else 0
            self.ceiling = self.ceiling or change.before
        self.lowered, self._has_grown, self.good_steps = change.after, change.grows, 0
        if self.ceiling is not None and self.lowered.amount >= self.ceiling.amount:
            self.lowered, self.ceiling = self._held, None

    def lowered_from(self) -> dict[str, Any]:
        """Return what a lowered limit depends on; with another bound or setting it is found again."""
        return {
            "bound": self.bound,
            "micro_batch_size": self.micro_batch_size,
            "micro_batch_tokens": self.micro_batch_tokens,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {
            **self.lowered_from(),
            "throughput": self.throughput and asdict(self.throughput),
            "tried_length": self.tried_length,
            "num_out_of_memory": self.num_out_of_memory,
            "lowered": self.lowered and asdict(self.lowered),
            "ceiling": self.ceiling and asdict(self.ceiling),
            "held": self._held and asdict(self._held),
            "cost": self.cost and asdict(self.cost),
            "good_steps": self.good_steps,
            "relapses": self.relapses,
            "has_grown": self._has_grown,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, after a bound was found or without one.

        A lowered limit is kept where it was lowered from the same bound under the same settings, and grows back from there.
        """
        self.num_out_of_memory = state["num_out_of_memory"]
        if (
            self.throughput is None
            and state["throughput"]
            and "auto" in (self.micro_batch_size, self.micro_batch_tokens)
        ):
            self.choose(Throughput.from_dict(state["throughput"]))
        self.lowered = self.ceiling = self._held = None
        if any(state[key] != value for key, value in self.lowered_from().items()):
            return
        self.lowered, self.ceiling, self._held = (
            state[name] and MicroBatchLimit(**state[name]) for name in ("lowered", "ceiling", "held")
        )
        self.good_steps, self.relapses, self._has_grown = (
            state[name] for name in ("good_steps", "relapses", "has_grown")
        )
        if self.cost is None and state["cost"]:  # of a search that was made now, it is known better
            self.cost = LimitCost(**state["cost"])
