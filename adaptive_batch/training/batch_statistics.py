"""Statistics of a whole batch that its loss needs before the first backward: sums over its parts,
which a pass without gradients computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatch
from adaptive_batch.errors import SettingError

from .agreement import MicroBatchPlan
from .parts import BatchSource, Part, copy_containers
from .snapshot import StepSnapshot
from .step import Step

Statistics = dict[str, Any]

# The kind of micro-batch by which ranks know its collectives: the function need not run the model
# as often as the loss does.
STATISTICS = "statistics"

_REMEDY = (
    "return a mapping of names to numbers or tensors that add up over parts, such as"
    ' {"loss": losses.sum(), "labels": count}, the same names and shapes for each part'
)


class BatchStatistics:
    """Runs a function on each part of a batch, and adds up what it returns.

    The model is in the mode in which it is trained. Random numbers and persistent buffers are as
    before afterwards, so that the loss draws the same numbers, as if one forward had served both.

    Args:
        function: ``function(part)`` returns a mapping of names to numbers or tensors; None where a
            loss needs no statistics.
        step: runs the parts of a batch.
        over_ranks: whether sums are taken over all ranks, and not over this rank's batch.
    """

    def __init__(
        self,
        function: Callable[[Part], Mapping[str, Any]] | None,
        step: Step,
        *,
        over_ranks: bool,
    ) -> None:
        self._function = function
        self._step = step
        self._over_ranks = over_ranks
        self._snapshot = StepSnapshot(step.model, step.memory.device)

    @property
    def are_needed(self) -> bool:
        """Whether there is a function."""
        return self._function is not None

    def of_part(self, part: Part) -> Statistics:
        """Return the statistics of a part alone; empty where none are needed.

        Raises:
            SettingError: the function returned no mapping.
        """
        if self._function is None:
            return {}
        with torch.no_grad():
            statistics = self._function(part._replace(batch=copy_containers(part.batch)))
        if not isinstance(statistics, Mapping):
            raise SettingError("statistics", type(statistics).__name__, _REMEDY)
        return dict(statistics)

    def of_batch(
        self, rows: BatchSource, parts: Sequence[Part | None], plan: MicroBatchPlan
    ) -> Statistics:
        """Return the sums over the parts of a batch; empty where none are needed. A collective.

        Args:
            rows: rows of the batch.
            parts: parts of the batch, on all ranks as many; None where this rank has fewer.
            plan: their micro-batches.

        Raises:
            OutOfMemoryElsewhereError: a rank ran out of memory, and all came to the end.
            SettingError: parts have different statistics.
        """
        if self._function is None:
            return {}
        left = list(parts)

        def forward(_: MicroBatch | None) -> Statistics:
            part = left.pop(0)
            if part is not None:
                return self.of_part(part)
            if self._step.sharding.needs_dummy(is_last=not left):
                return self.of_part(Part(rows.dummy(), 1, share=0.0))
            return {}

        restore = self._snapshot.take()
        results = self._step.run_forward(
            plan, forward, retry=self._step.retry, evaluates=STATISTICS
        )
        restore()
        of_parts = [statistics for micro_batch, statistics in results if micro_batch is not None]
        if self._over_ranks:
            return self._sum_over_ranks(of_parts)
        # A rank without rows runs dummies alone, whose loss has weight 0.
        return sum_of(of_parts) or next((each for _, each in results if each), {})

    def _sum_over_ranks(self, of_parts: Sequence[Statistics]) -> Statistics:
        device = self._step.memory.device
        on_host = [_moved(statistics, torch.device("cpu")) for statistics in of_parts]
        return _moved(sum_of(list(chain(*distributed.all_gather(on_host)))), device)


def sum_of(statistics: Sequence[Statistics]) -> Statistics:
    """Return the sums by name; one alone as it is.

    Raises:
        SettingError: names or shapes differ.
    """
    if not statistics:
        return {}
    total, *others = statistics
    for other in others:
        if other.keys() != total.keys():
            names = " and ".join(str(sorted(each)) for each in (total, other))
            raise SettingError("statistics", f"of two parts {names}", _REMEDY)
        for name in total:
            shapes = [tuple(torch.as_tensor(each[name]).shape) for each in (total, other)]
            if shapes[0] != shapes[1]:
                value = f"{name} of shapes {shapes[0]} and {shapes[1]} of two parts"
                raise SettingError("statistics", value, _REMEDY)
        total = {name: value + other[name] for name, value in total.items()}
    return total


def _moved(statistics: Statistics, device: torch.device) -> Statistics:
    """Return statistics with their tensors on a device."""
    moved = {}
    for name, value in statistics.items():
        moved[name] = value.to(device) if isinstance(value, torch.Tensor) else value
    return moved
