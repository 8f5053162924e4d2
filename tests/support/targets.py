"""Devices of an estimate, without an allocator."""

from collections.abc import Iterable
from dataclasses import replace

from adaptive_batch.estimate import LengthEstimate, Target, counted_fit, with_composition


def counted(target: Target, lengths: Iterable[LengthEstimate], *, maximum: int) -> Target:
    """Return the device with what fits where each byte that is allocated is one that is taken, as
    on a CPU. A fifth of what is not resident counts as made by backward.
    """
    fits = []
    for length in lengths:
        fit = counted_fit(length, target.budget_bytes, maximum=maximum)
        resident = length.resident
        others = length.curve.peak_bytes(max(1, fit.max_batch_size)) - resident.total
        composition = {
            "parameters": resident.parameters,
            "buffers": resident.buffers,
            "optimizer state": resident.optimizer,
            "gradients": resident.gradients,
            "activations": others - others // 5,
            "backward temporaries": others // 5,
        }
        fits.append(with_composition(length, fit, composition))
    return replace(target, lengths=tuple(fits))
