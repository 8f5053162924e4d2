"""The order in which Inductor runs the kernels of a graph: of several orders that with the lowest
peak, as torch/_inductor/memory.py has it in torch 2.13.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate

from torch import fx

from .fused_kernels import Kernel, after_makers, num_bytes_of


class KernelOrders:
    """Orders of kernels, and the memory that is alive in each.

    Args:
        kernels: in the order of their fusion.
        saved: arguments that forward has saved, which are freed in the graph.
        returned: results that are not.
    """

    def __init__(
        self, kernels: Sequence[Kernel], saved: Collection[fx.Node], returned: Collection[fx.Node]
    ) -> None:
        self._kernels = kernels
        self._places = {kernel: place for place, kernel in enumerate(kernels)}
        self._returned = returned
        self._makers = {memory: kernel for kernel in kernels for memory in kernel.results}
        self._makers_of: dict[Kernel, dict[Kernel, None]] = {}
        # Of memory that can be freed: kernels that read it.
        self._readers: dict[fx.Node, dict[Kernel, None]] = {memory: {} for memory in self._makers}
        self._freeable_reads: dict[Kernel, list[fx.Node]] = {}
        for kernel in kernels:
            own = [memory for memory in kernel.reads if memory in self._makers]
            self._makers_of[kernel] = dict.fromkeys(self._makers[memory] for memory in own)
            freeable = [*own, *(memory for memory in kernel.reads if memory in saved)]
            self._freeable_reads[kernel] = freeable
            for memory in freeable:
                self._readers.setdefault(memory, {})[kernel] = None
        self._users_of: dict[Kernel, list[Kernel]] = {kernel: [] for kernel in kernels}
        for kernel, makers in self._makers_of.items():
            for maker in makers:
                self._users_of[maker].append(kernel)
        self._saved_bytes = sum(
            num_bytes_of(memory) for memory in self._readers if memory not in self._makers
        )

    def best(self) -> Sequence[Kernel]:
        """Return the order with the lowest peak, the given one before others that are as low."""
        orders = (self._kernels, self._by_freed_memory(), self._breadth_first(), self._by_size())
        return min(orders, key=self.peak_bytes)

    def peak_bytes(self, order: Sequence[Kernel]) -> int:
        """Return the most that is alive after a kernel, in bytes."""
        steps = {kernel: step for step, kernel in enumerate(order)}
        changes = [0] * (len(order) + 1)
        changes[0] = self._saved_bytes
        for kernel, step in steps.items():
            changes[step] += kernel.made_bytes
        for memory, readers in self._readers.items():
            if memory not in self._returned:
                last = max((steps[reader] for reader in readers), default=None)
                if last is None:
                    last = steps[self._makers[memory]]
                changes[last + 1] -= num_bytes_of(memory)
        return max(accumulate(changes))

    def _by_freed_memory(self) -> list[Kernel]:
        """Run next what leaves least memory, of what does not raise the peak."""
        num_makers = {kernel: len(makers) for kernel, makers in self._makers_of.items()}
        num_readers = {
            memory: len(readers) + (memory in self._returned)
            for memory, readers in self._readers.items()
        }
        freed_bytes = dict.fromkeys(self._kernels, 0)
        for kernel in self._kernels:
            last = [memory for memory in self._freeable_reads[kernel] if num_readers[memory] == 1]
            unread = [memory for memory in kernel.results if not num_readers[memory]]
            freed_bytes[kernel] = sum(map(num_bytes_of, (*last, *unread)))
        live_bytes = self._saved_bytes
        returned = (memory for memory in self._readers if memory in self._returned)
        peak_bytes = max(live_bytes, sum(map(num_bytes_of, returned)))
        ready = {kernel for kernel in self._kernels if not num_makers[kernel]}
        order: list[Kernel] = []
        while ready:
            gap = peak_bytes - live_bytes
            kernel = min(ready, key=self._least(freed_bytes, gap))
            ready.remove(kernel)
            order.append(kernel)
            live_bytes += kernel.made_bytes
            peak_bytes = max(peak_bytes, live_bytes)
            live_bytes -= freed_bytes[kernel]
            for user in self._users_of[kernel]:
                num_makers[user] -= 1
                if not num_makers[user]:
                    ready.add(user)
            for memory in self._freeable_reads[kernel]:
                num_readers[memory] -= 1
                if num_readers[memory] == 1:
                    for reader in self._readers[memory]:
                        freed_bytes[reader] += num_bytes_of(memory)
        return order

    def _least(
        self, freed_bytes: dict[Kernel, int], gap: int
    ) -> Callable[[Kernel], tuple[int, int, int]]:
        def key(kernel: Kernel) -> tuple[int, int, int]:
            made = kernel.made_bytes
            above = made if made > gap else 0
            return above, made - freed_bytes[kernel], self._places[kernel]

        return key

    def _breadth_first(self) -> list[Kernel]:
        """Run next that whose makers ran first."""
        num_makers = {kernel: len(makers) for kernel, makers in self._makers_of.items()}
        order: dict[Kernel, int] = {}
        ready: list[tuple[list[int], int]] = []
        for kernel in self._kernels:
            if not num_makers[kernel]:
                ready.append(([], self._places[kernel]))
        while ready:
            kernel = self._kernels[heapq.heappop(ready)[1]]
            order[kernel] = len(order)
            for user in self._users_of[kernel]:
                num_makers[user] -= 1
                if not num_makers[user]:
                    places = sorted(order[maker] for maker in self._makers_of[user])
                    heapq.heappush(ready, (places, self._places[user]))
        return list(order)

    def _by_size(self) -> list[Kernel]:
        """Run first what reads and writes least, after all that it needs."""
        sizes = {}
        for kernel in self._kernels:
            read_bytes = sum(map(num_bytes_of, self._freeable_reads[kernel]))
            sizes[kernel] = (kernel.made_bytes + read_bytes, self._places[kernel])

        def by_size(kernels: Iterable[Kernel]) -> list[Kernel]:
            return sorted(kernels, key=sizes.__getitem__)

        return after_makers(
            by_size(self._kernels), lambda kernel: iter(by_size(self._makers_of[kernel]))
        )
