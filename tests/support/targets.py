"""Devices of an estimate, without an allocator."""

from collections.abc import Iterable
from dataclasses import replace

from adaptive_batch.estimate import LengthEstimate, Target, counted_fit


def counted(target: Target, lengths: Iterable[LengthEstimate], *, maximum: int) -> Target:
    """Return the device with the sizes that fit if reserved equals allocated memory, as on a CPU. A
    fifth of the memory that is not resident counts as temporaries of backward.
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
        fits.append(replace(fit, composition=composition))
    return replace(target, lengths=tuple(fits))
