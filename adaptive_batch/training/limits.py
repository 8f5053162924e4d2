"""What one micro-batch of a run may hold: configured or found, lowered by what happens, never above what was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from adaptive_batch._util import count, rows_fit
from adaptive_batch.data import MicroBatchLayout, MicroBatchLimit
from adaptive_batch.errors import SettingError

from .oom_retry import LimitChange


class MicroBatchLimits:
    """The one owner of the maximum batch size that was found and of the limit of a micro-batch.

    Args:
        micro_batch_size: rows at once: a number, ``auto`` for the bound, or None for the rows of a step that fit.
        micro_batch_tokens: padded tokens at once: a number, ``auto`` for those of the bound, or None.
        layout: of micro-batches.

    Attributes:
        bound: the most rows, of `tried_length` tokens, that were tried and fit; None where none was sought.
        tried_length: the longest row that was tried, in tokens; 0 where none was.
        lowered: what a micro-batch may hold at most after it ran out of memory; None where it has not.
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
        self._layout = layout or MicroBatchLayout()
        self.lowered: MicroBatchLimit | None = None
        self.bound: int | None = None
        self.tried_length = 0
        self.num_out_of_memory = 0

    def of(self, batch_size: int) -> MicroBatchLimit:
        """Return what a micro-batch may hold now, at a batch size."""
        rows, tokens = self.micro_batch_size, self.micro_batch_tokens
        if tokens is not None:
            limit = MicroBatchLimit(self.tried_tokens if tokens == "auto" else int(tokens), "tokens")
        elif rows is not None:
            limit = MicroBatchLimit((self.bound or 0) if rows == "auto" else int(rows))
        else:
            limit = MicroBatchLimit(min(batch_size, self.bound or batch_size))
        return self.lowered if self.lowered and self.lowered.amount < limit.amount else limit

    @property
    def tried_tokens(self) -> int:
        """Padded tokens of the largest micro-batch that was tried and fits."""
        return self._layout.padded_tokens([self.tried_length] * (self.bound or 0))

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
        most = self._layout.padded_tokens([tried_length] * bound)
        if isinstance(rows, int) and rows > bound:
            raise SettingError("micro_batch_size", rows, f"{rows_fit(bound)}; give {bound} or less")
        if isinstance(tokens, int) and tokens > most:
            remedy = f"{count(bound, 'row')} of {tried_length} tokens fit; give {most} or less, or auto"
            raise SettingError("micro_batch_tokens", tokens, remedy)
        if bound != self.bound:
            self.lowered = None
        self.bound, self.tried_length = bound, tried_length

    def lower(self, change: LimitChange) -> None:
        """Take in that a step ran out of memory, and what a micro-batch holds from now on."""
        self.num_out_of_memory += change.out_of_memory
        self.lowered = change.after

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
            "tried_length": self.tried_length,
            "num_out_of_memory": self.num_out_of_memory,
            "lowered": asdict(self.lowered) if self.lowered else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, after a bound was found or without one.

        A lowered limit is kept where it was lowered from the same bound under the same settings.
        """
        self.num_out_of_memory = state["num_out_of_memory"]
        same = all(state[key] == value for key, value in self.lowered_from().items())
        self.lowered = MicroBatchLimit(**state["lowered"]) if same and state["lowered"] else None
