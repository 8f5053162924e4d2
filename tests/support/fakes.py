"""A fake of ``torch.cuda``."""

from __future__ import annotations

import torch


class FakeBackend:
    """A fake of ``torch.cuda`` whose allocator holds the bytes that a test sets."""

    def __init__(self, *, total: int, used_by_others: int = 0) -> None:
        self.total, self.used_by_others = total, used_by_others
        self.allocated = self.reserved = self.peak_reserved = self.retries = 0
        self.fraction, self.fractions = 1.0, [1.0]

    def hold(self, allocated: int) -> None:
        """Set the allocated bytes; raise an OOM above the fraction, as CUDA's allocator does."""
        if allocated > self.fraction * self.total:
            self.retries += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self.allocated, self.reserved = allocated, max(self.reserved, allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def mem_get_info(self, _: torch.device) -> tuple[int, int]:
        return self.total - self.reserved - self.used_by_others, self.total

    def memory_allocated(self, _: torch.device) -> int:
        return self.allocated

    def memory_reserved(self, _: torch.device) -> int:
        return self.reserved

    def max_memory_reserved(self, _: torch.device) -> int:
        return self.peak_reserved

    def memory_stats(self, _: torch.device) -> dict[str, int]:
        return {"num_alloc_retries": self.retries}

    def reset_peak_memory_stats(self, _: torch.device) -> None:
        self.peak_reserved = self.reserved

    def get_per_process_memory_fraction(self, _: torch.device) -> float:
        return self.fraction

    def set_per_process_memory_fraction(self, fraction: float, _: torch.device) -> None:
        self.fraction = fraction
        self.fractions.append(fraction)

    def get_device_name(self, _: torch.device) -> str:
        return "Fake 1000"

    def synchronize(self, _: torch.device) -> None:
        pass

    def empty_cache(self) -> None:
        self.reserved = self.allocated
