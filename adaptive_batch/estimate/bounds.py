"""How many rows fit where a caching allocator hands out the memory: what training allocates and
frees is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from adaptive_batch._util import format_bytes

from .allocator import AllocatorSettings, CachingAllocator
from .result import Fit, LengthEstimate


class ReplayedBounds:
    """The bounds of rows of one length, on any device of a kind.

    Args:
        length: what tensors hold; no bound exceeds what follows from it.
        log: function that returns what training with that many rows allocates and frees, from
            loading on (:mod:`.allocator`).
        settings: settings of the allocator.
        maximum: more rows are of no interest.
    """

    def __init__(
        self,
        length: LengthEstimate,
        log: Callable[[int], Sequence[int]],
        settings: AllocatorSettings,
        *,
        maximum: int,
    ) -> None:
        self._length = length
        self._settings = settings
        self._maximum = maximum
        self._log = lru_cache(maxsize=4)(log)
        self._peaks: dict[int, tuple[int, int]] = {}

    def fit(self, budget_bytes: int, expected: Fit | None = None) -> Fit:
        """Return what fits in what the driver gives.

        Args:
            budget_bytes: what the driver gives.
            expected: what is expected to fit. The search begins there, and looks for no more rows
                with retries.
        """
        counted = self._length.counted_fit(budget_bytes, maximum=self._maximum)
        counted_rows = counted.max_batch_size
        guess = counted_rows
        if expected is not None:
            guess = expected.max_batch_size
        elif counted_rows and self.peaks(counted_rows)[1] > budget_bytes:
            guess = int(counted_rows * budget_bytes / self.peaks(counted_rows)[1])
        rows = _largest(
            lambda rows: self.peaks(rows)[1] <= budget_bytes, most=counted_rows, guess=guess
        )
        with_retries = rows
        if expected is not None:
            with_retries = max(rows, expected.max_batch_size_with_retries)
        elif rows < counted_rows:
            with_retries = _largest(
                lambda rows: self.fits_with_retries(rows, budget_bytes),
                most=counted_rows,
                least=rows,
            )
        allocated, reserved = self.peaks(max(1, rows))
        reason = counted.first_too_large
        if rows == 0 and reason is None:
            reason = (
                f"what the allocator reserves for one row ({format_bytes(reserved)} at the peak)"
            )
        return Fit(self._length.sequence_length, rows, with_retries, allocated, reserved, reason)

    def peaks(self, rows: int) -> tuple[int, int]:
        """Return the most bytes allocated and reserved where the device has no end, which are those
        where it is large enough.
        """
        if rows not in self._peaks:
            allocator = CachingAllocator(2**50, self._settings)
            allocator.replay(self._log(rows))
            peaks = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
            allocated, reserved = (int(peak * (1 + self._length.margin)) for peak in peaks)
            self._peaks[rows] = allocated, reserved
        return self._peaks[rows]

    def fits_with_retries(self, rows: int, budget_bytes: int) -> bool:
        """Return whether training with that many rows fits at all."""
        try:
            capacity = int(budget_bytes / (1 + self._length.margin))
            CachingAllocator(capacity, self._settings).replay(self._log(rows))
        except torch.OutOfMemoryError:
            return False
        return True


def _largest(
    fits: Callable[[int], bool], *, most: int, least: int = 0, guess: int | None = None
) -> int:
    """Return the most rows that fit, of which `least` do: by bisection, around a guess first in
    growing steps.
    """
    low = least
    high = most + 1
    step = 1
    rows = most if guess is None else guess
    while high - low > 1:
        rows = min(max(rows, low + 1), high - 1)
        if fits(rows):
            low = rows
            rows = rows + step
        else:
            high = rows
            rows = rows - step
        step *= 2
        # Between a size that fits and one that does not.
        if least < low and high <= most:
            rows = (low + high) // 2
    return low
