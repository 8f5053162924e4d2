"""Devices of an estimate, without an allocator."""

from collections.abc import Iterable
from dataclasses import replace

from adaptive_batch.estimate import LengthEstimate, Target, counted_fit, explained


def counted(target: Target, lengths: Iterable[LengthEstimate], *, maximum: int) -> Target:
    """Return the device with what fits where each byte that is allocated is one that is taken, as
    on a CPU.
    """
    return replace(
        target,
        lengths=tuple(
            explained(one, counted_fit(one, target.budget_bytes, maximum=maximum))
            for one in lengths
        ),
    )
