"""Which results of a graph Inductor writes over memory that is read no more.

The rule is that of torch/_inductor/codegen/wrapper.py in torch 2.13: memory of the same dtype and
size is taken again, that which was freed last first, where keeping it until then does not raise
the peak of the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import torch
from torch import fx

from .fused_kernels import Kernel, num_bytes_of, size_of


class MemoryReuse:
    """Memory that kernels have freed, and that others can take.

    Args:
        kernels: in the order in which they run.
        freed_after: what is read for the last time by each of them.
        saved: arguments that forward has saved, which are freed in the graph.
    """

    def __init__(
        self,
        kernels: Sequence[Kernel],
        freed_after: Mapping[Kernel | None, Sequence[fx.Node]],
        saved: Collection[fx.Node],
    ) -> None:
        self._steps = {kernel: step for step, kernel in enumerate(kernels)}
        changes = [0] * (len(kernels) + 1)
        for kernel, step in self._steps.items():
            changes[step] += kernel.made_bytes
            for memory in freed_after.get(kernel, ()):
                changes[step + 1] -= num_bytes_of(memory)
                if memory in saved:
                    changes[0] += num_bytes_of(memory)
        self._live_bytes = list(accumulate(changes))
        self._peak_bytes = max(self._live_bytes)
        self._freed: dict[tuple[torch.dtype, int] | None, list[tuple[fx.Node, Kernel]]] = {}

    def free(self, memory: fx.Node, kernel: Kernel) -> None:
        """Take in what a kernel was the last to read."""
        self._freed.setdefault(size_of(memory), []).append((memory, kernel))

    def take(self, node: fx.Node, kernel: Kernel) -> tuple[fx.Node, Kernel] | None:
        """Return the memory that a kernel writes a result to, and the kernel that has freed it;
        None for new memory.
        """
        freed = self._freed.get(size_of(node))
        if not freed:
            return None
        _, freed_by = freed[-1]
        between = range(self._steps[freed_by] + 1, self._steps[kernel])
        num_bytes = num_bytes_of(node)
        peak = max((self._live_bytes[step] for step in between), default=0)
        if between and peak + num_bytes > self._peak_bytes:
            return None
        for step in between:
            self._live_bytes[step] += num_bytes
        return freed.pop()
