"""Which operators of a graph Inductor runs in one kernel, and in which order kernels run.

The rule is that of torch/_inductor/scheduler.py in torch 2.13. Each operator that writes to memory
is a kernel at first. In each of a few rounds, pairs of generated kernels that share memory are
fused, those that share most first, and kernels are sorted again: by the first of their operators,
after the makers of what they read. Two kernels can be fused where

* their loops are of one size, or one reduces what the other computes;
* neither needs what runs between them;
* they are of at most 64 operators together;
* kernels apart would not write over more memory than they share;
* one needs the result of the other, or they are near each other in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, total_ordering
from itertools import chain

import torch
from torch import fx

_ROUNDS = 10  # fuse_nodes
_LARGEST_DISTANCE = 64  # are_long_distant_nodes
_LARGEST_KERNEL = 64  # config.max_fusion_size
_NEIGHBOURS = 64  # config.max_fusion_buffer_group_pairwise_attempts
_LEAST_SHARED_BYTES = 10  # config.score_fusion_memory_threshold
_LEAST_OVERLAP = 0.5  # config.min_overlap_ratio
# Elements that are written over for each shared byte: fewer do not keep kernels apart.
_WORTH_OF_A_BYTE = 32  # can_fusion_increase_peak_memory
_MUCH_MORE = 16  # choices.FusionScore


@dataclass(frozen=True)
class Access:
    """What a kernel reads or writes.

    Attributes:
        memory: the node whose result it is.
        index: which of it, in which order. A fused kernel loads once what has equal ones.
        num_bytes: of what is read or written.
    """

    memory: fx.Node
    index: object
    num_bytes: int


@dataclass(frozen=True)
class Operation:
    """An operator that writes to memory.

    Attributes:
        node: of the graph.
        accesses: what it reads, then what it writes.
        writes: the nodes of its results.
        made_bytes: of the memory that it allocates.
        loop: number of elements that are computed, and of those that each is reduced from.
        is_fused: whether Inductor generates its kernel.
        is_reduction: whether it is a reduction.
        is_over_rows: whether it is a sum over all dimensions but the last.
        number: of the operation in Inductor's order; its results have the next ones.
    """

    node: fx.Node
    accesses: tuple[Access, ...]
    writes: tuple[fx.Node, ...]
    made_bytes: int
    loop: tuple[int, int]
    is_fused: bool
    is_reduction: bool
    is_over_rows: bool
    number: int

    @property
    def last_number(self) -> int:
        """That of its last result."""
        if not self.is_fused:
            return self.number
        return self.number + num_operations_of(self.node, is_over_rows=self.is_over_rows) - 1

    def numbered_results(self) -> Iterator[tuple[fx.Node, int]]:
        """Yield the results with their numbers."""
        first = self.last_number - len(self.writes) + 1
        yield from zip(self.writes, range(first, self.last_number + 1), strict=True)


def num_operations_of(node: fx.Node, *, is_over_rows: bool) -> int:
    """Return how many operations Inductor makes of a node."""
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        return 1 + sum(isinstance(result, torch.Tensor) for result in value)
    # The rows are summed up in parts first.
    return 2 if is_over_rows else 1


class Kernel:
    """Operations that run at once, in their order."""

    def __init__(self, operations: Sequence[Operation], bits: int, ancestors: int) -> None:
        self.operations = operations
        # Of numbers: its own, and those of all that has to run before.
        self.bits = bits
        self.ancestors = ancestors
        self.nodes = [operation.node for operation in operations]
        self.first = min(operation.number for operation in operations)
        self.last = max(operation.last_number for operation in operations)
        self.accesses = dict.fromkeys(
            chain.from_iterable(operation.accesses for operation in operations)
        )
        # What they write to memory, with Inductor's numbers of it.
        self.results = dict(
            chain.from_iterable(operation.numbered_results() for operation in operations)
        )
        self.is_fused = operations[0].is_fused
        self.is_over_rows = operations[0].is_over_rows
        reductions = [operation for operation in operations if operation.is_reduction]
        self.is_reduction = bool(reductions)
        self.loop = (reductions or operations)[0].loop
        self.made_bytes = sum(operation.made_bytes for operation in operations)

    @cached_property
    def reads(self) -> dict[fx.Node, None]:
        """What others have written."""
        memories = (access.memory for access in self.accesses)
        return dict.fromkeys(memory for memory in memories if memory not in self.results)

    @cached_property
    def num_bytes_read(self) -> int:
        return sum(
            access.num_bytes for access in self.accesses if access.memory not in self.results
        )

    def distance(self, other: Kernel) -> int:
        """Return how far apart two are in the graph, from end to end."""
        return max(abs(self.first - other.last), abs(other.first - self.last))


def fused_kernels(
    operations: Sequence[Operation], num_users: Mapping[fx.Node, int]
) -> list[Kernel]:
    """Return the kernels in the order in which they run.

    Args:
        operations: in the order in which Inductor meets them.
        num_users: of results: how many operations read each, and one more where it is returned.
    """
    return _Fusion(operations, num_users).kernels


class _Fusion:
    def __init__(self, operations: Sequence[Operation], num_users: Mapping[fx.Node, int]) -> None:
        self._num_users = num_users
        self._makers: dict[fx.Node, Kernel] = {}
        self._numbers: dict[fx.Node, int] = {}
        kernels = []
        for operation in operations:
            kernel = Kernel([operation], bits=1 << operation.number, ancestors=0)
            for memory in kernel.reads:
                if memory in self._makers:
                    maker = self._makers[memory]
                    kernel.ancestors |= maker.bits | maker.ancestors
            self._makers.update(dict.fromkeys(kernel.results, kernel))
            self._numbers.update(kernel.results)
            kernels.append(kernel)
        self.kernels = kernels
        for _ in range(_ROUNDS):
            num_kernels = len(self.kernels)
            self._fuse_once()
            if len(self.kernels) == num_kernels:
                break

    def _fuse_once(self) -> None:
        pairs = dict.fromkeys(self._pairs())
        scores = {pair: _Score.of(*pair) for pair in pairs if self._can_fuse(*pair)}
        kernels = dict.fromkeys(self.kernels)
        fused_into: dict[Kernel, Kernel] = {}
        for pair in sorted(scores, key=scores.__getitem__, reverse=True):
            first, second = (_latest(kernel, fused_into) for kernel in pair)
            if first is second or not self._can_fuse(first, second):
                continue
            bits = first.bits | second.bits
            kernel = Kernel(
                [*first.operations, *second.operations],
                bits=bits,
                ancestors=(first.ancestors | second.ancestors) & ~bits,
            )
            for part in (first, second):
                fused_into[part] = kernel
                del kernels[part]
            kernels[kernel] = None
            self._makers.update(dict.fromkeys(kernel.results, kernel))
            for other in kernels:
                if other.ancestors & bits:
                    other.ancestors |= kernel.ancestors | bits
        by_place = sorted(kernels, key=lambda kernel: kernel.first)
        self.kernels = after_makers(by_place, self._makers_of)

    def _pairs(self) -> Iterator[tuple[Kernel, Kernel]]:
        """Yield pairs of generated kernels that read or write the same memory."""
        groups: dict[fx.Node, list[Kernel]] = {}
        for kernel in self.kernels:
            if kernel.is_fused:
                for memory in dict.fromkeys(access.memory for access in kernel.accesses):
                    groups.setdefault(memory, []).append(kernel)
        for group in groups.values():
            for place, kernel in enumerate(group, start=1):
                for other in group[place : place + _NEIGHBOURS]:
                    yield kernel, other

    def _can_fuse(self, first: Kernel, second: Kernel) -> bool:
        shared = sum(_shared_bytes(first, second))
        num_operations = len(first.operations) + len(second.operations)
        if not shared or num_operations > _LARGEST_KERNEL or second.bits & first.ancestors:
            return False
        if not _have_like_loops(first, second) or self._keeps_memory(first, second, shared):
            return False
        if first.bits & second.ancestors:
            return self._can_follow(first, second)
        return shared >= _LEAST_SHARED_BYTES and first.distance(second) <= _LARGEST_DISTANCE

    def _can_follow(self, first: Kernel, second: Kernel) -> bool:
        """Return whether one kernel can go on with what another has computed: it reads that as it
        is written, and nothing runs between them.
        """
        for access in second.accesses:
            if access.memory in first.results and access not in first.accesses:
                return False
        makers = self._makers_of(second)
        return not any(maker.ancestors & first.bits for maker in makers if maker is not first)

    def _keeps_memory(self, first: Kernel, second: Kernel, shared: int) -> bool:
        """Return whether kernels apart could write over what they alone read, which is worth more
        than what they share.
        """
        sizes = []
        for kernel in (first, second):
            own = (memory for memory in kernel.reads if self._num_users.get(memory) == 1)
            sizes.append({size_of(memory) for memory in own if memory in self._makers})
        num_elements = sum(size[1] for size in sizes[0] & sizes[1] if size is not None)
        return num_elements > _WORTH_OF_A_BYTE * shared

    def _makers_of(self, kernel: Kernel) -> Iterator[Kernel]:
        """Yield the kernels that make what one reads, by the names that Inductor gives memory."""
        made = [memory for memory in kernel.reads if memory in self._makers]
        for memory in sorted(made, key=lambda memory: str(self._numbers[memory])):
            yield self._makers[memory]


def after_makers(
    kernels: Iterable[Kernel], makers_of: Callable[[Kernel], Iterator[Kernel]]
) -> list[Kernel]:
    """Return kernels, each after the makers of what it reads, else as they were."""
    result: dict[Kernel, None] = {}
    for kernel in kernels:
        # From the kernel on, each with those of its makers that are not visited yet.
        path = [(kernel, makers_of(kernel))]
        while path:
            last, makers = path[-1]
            maker = next((maker for maker in makers if maker not in result), None)
            if maker is not None:
                path.append((maker, makers_of(maker)))
            else:
                result[last] = None
                path.pop()
    return list(result)


@total_ordering
@dataclass(frozen=True)
class _Score:
    """What speaks for fusing two kernels, the most important first."""

    are_alike: bool
    shared_bytes: int
    overlap_bytes: int
    nearness: int

    @classmethod
    def of(cls, first: Kernel, second: Kernel) -> _Score:
        shared, overlap = _shared_bytes(first, second)
        are_alike = first.is_reduction == second.is_reduction and shared > 0
        return cls(are_alike, shared, overlap, -first.distance(second))

    def __lt__(self, other: _Score) -> bool:
        lower, upper = sorted((self.shared_bytes, other.shared_bytes))
        if upper > _MUCH_MORE * lower:
            return self.shared_bytes < other.shared_bytes
        return self._key < other._key

    @property
    def _key(self) -> tuple[int, ...]:
        return (self.are_alike, self.shared_bytes, self.overlap_bytes, self.nearness)


def _shared_bytes(first: Kernel, second: Kernel) -> tuple[int, int]:
    """Return the bytes that two kernels access alike; and, where there are none, those of memory
    that both read, if it is most of what they read.
    """
    shared = sum(access.num_bytes for access in first.accesses.keys() & second.accesses.keys())
    if shared or first.is_reduction or second.is_reduction:
        return shared, 0
    common = first.reads.keys() & second.reads.keys()
    overlap = max(
        sum(access.num_bytes for access in kernel.accesses if access.memory in common)
        for kernel in (first, second)
    )
    if overlap < _LEAST_OVERLAP * max(first.num_bytes_read, second.num_bytes_read):
        return 0, 0
    return 0, overlap


def _have_like_loops(first: Kernel, second: Kernel) -> bool:
    if first.is_over_rows != second.is_over_rows:
        return False
    if first.is_reduction == second.is_reduction:
        return first.loop == second.loop
    pointwise, reduction = (second, first) if first.is_reduction else (first, second)
    num_results, num_summands = reduction.loop
    return pointwise.loop[0] in (num_results, num_results * num_summands)


def _latest(kernel: Kernel, fused_into: Mapping[Kernel, Kernel]) -> Kernel:
    while kernel in fused_into:
        kernel = fused_into[kernel]
    return kernel


def size_of(memory: fx.Node) -> tuple[torch.dtype, int] | None:
    """Return the dtype and the number of elements of a tensor."""
    value = memory.meta.get("val")
    return (value.dtype, value.numel()) if isinstance(value, torch.Tensor) else None


def num_bytes_of(memory: fx.Node) -> int:
    """Return the bytes of a tensor."""
    size = size_of(memory)
    return size[0].itemsize * size[1] if size is not None else 0
