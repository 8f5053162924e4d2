"""The order in which training allocates and frees: what the caching allocator of a device is asked
for, in bytes.

A log is an array. A positive entry allocates, and allocations are numbered from 0 on: its lower 48
bits are bytes, and those above them the number of the stream that they are for, 0 for the default
one. A negative entry n frees the allocation that is numbered ``~n``.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

import torch

# An entry that allocates is stream x STREAM + bytes.
STREAM = 2**48
# Of a tensor's storage: the tensor's kind and number, and the storage's place in it.
Name = tuple[str, int, int]


@dataclass(frozen=True)
class Phase:
    """The log of a part of training. Allocations that were there before have the first numbers.

    Attributes:
        log: without what was there before.
        before: what was there before, by the name under which another phase left it.
        after: what is left for other phases, and its number.
        once: positions in the log, and bytes, of what is allocated there when training does it
            first, and kept.
        activations: numbers of the allocations that forward made.
    """

    log: array[int]
    before: tuple[Name, ...]
    after: Mapping[Name, int]
    once: tuple[tuple[int, int], ...] = ()
    activations: frozenset[int] = frozenset()

    def is_like(self, other: Phase) -> bool:
        """Whether another differs in sizes alone."""
        pairs = zip(self.log, other.log, strict=True)
        return len(self.log) == len(other.log) and all(
            a == b or (a > 0 and b > 0) for a, b in pairs
        )

    def between(self, more: Phase, share: Fraction) -> Phase:
        """Return this one with the sizes that lie at a share of the way to another's, or beyond."""
        if self.log == more.log:
            return self
        entries = torch.frombuffer(self.log, dtype=torch.int64)
        differences = torch.frombuffer(more.log, dtype=torch.int64) - entries
        # Rounded up, in whole numbers: bytes of any device times tokens are below 2 ** 63.
        steps = -torch.div(differences * -share.numerator, share.denominator, rounding_mode="floor")
        sizes = (entries + steps).clamp_(min=1)
        log = array("q")
        log.frombytes(torch.where(differences == 0, entries, sizes).numpy().tobytes())
        return replace(self, log=log)

    def held_at_peak(self) -> Counter[str]:
        """Return the bytes of this phase's own allocations at its peak, by kind."""
        sizes = [0] * len(self.before)
        live = peak = end = 0
        for position, entry in enumerate(self.log, 1):
            if entry > 0:
                sizes.append(entry % STREAM)
                live += sizes[-1]
            else:
                live -= sizes[~entry]
            if live > peak:
                peak = live
                end = position
        gradients = {number for name, number in self.after.items() if name[0] == "gradient"}
        freed = {~entry for entry in self.log[:end] if entry <= 0}
        num_allocations = len(self.before) + end - len(freed)
        # What is allocated once, as workspaces, stays for all later steps.
        held = Counter({"backward temporaries": sum(size % STREAM for _, size in self.once)})
        for number in set(range(num_allocations)) - freed:
            kind = "backward temporaries"
            if number in self.activations:
                kind = "activations"
            elif number in gradients:
                kind = "gradients"
            held[kind] += sizes[number]
        return held


def joined(phases: Iterable[tuple[Phase, bool]]) -> array[int]:
    """Return the log of phases that follow each other.

    Args:
        phases: each phase, and whether training runs it for the first time.
    """
    log = array("q")
    num_allocations = 0
    alive: dict[Name, int] = {}
    for phase, is_first in phases:
        # A parameter that no row uses has no gradient, which the optimizer's step would free.
        numbers = [alive.pop(name, -1) for name in phase.before]
        once = list(phase.once) if is_first else []
        for position, entry in enumerate(phase.log):
            while once and once[0][0] == position:
                log.append(once.pop(0)[1])
                num_allocations += 1
            if entry > 0:
                numbers.append(num_allocations)
                log.append(entry)
                num_allocations += 1
            elif numbers[~entry] >= 0:
                log.append(~numbers[~entry])
        alive.update({name: numbers[number] for name, number in phase.after.items()})
    return log
