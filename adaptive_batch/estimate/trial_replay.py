"""A search's trial of some rows on a simulated device, where trials have the block that training
makes of what a step needs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from adaptive_batch.memory import AllocatorCache

from .allocator import CachingAllocator
from .fake_step import Between, FakeStep, Run
from .simulated_memory import SimulatedMemory
from .step_log import LogWriter


class TrialPiece(NamedTuple):
    """A micro-batch of a trial.

    Attributes:
        rows: how many rows it has.
        run: forward and backward of rows of its length.
        size: its tokens, as :class:`~adaptive_batch.memory.AllocatorCache` takes them.
    """

    rows: int
    run: Run | Between
    size: int


# The micro-batches of each step of a trial of so many rows.
TrialSteps = Callable[[int], Sequence[Sequence[TrialPiece]]]


class TrialStepLog(NamedTuple):
    """What a step allocates and frees, in its micro-batches and in the optimizer's step; and the
    tokens of its largest micro-batch.
    """

    size: int
    micro_batches: Sequence[int]
    optimizer: Sequence[int]


@dataclass(frozen=True)
class TrialLog:
    """What a search allocates and frees up to the end of a trial.

    Attributes:
        before: logs of what comes before the trial, the cache being given back after each: loading,
            and one step of one row, which makes the optimizer's states.
        steps: steps of the trial.
        writer: writer of the log; a copy of it writes what follows the trial.
        leaves_gradients: whether gradients are there when backward has ended.
    """

    before: Sequence[Sequence[int]]
    steps: Sequence[TrialStepLog]
    writer: LogWriter = field(default_factory=LogWriter)
    leaves_gradients: bool = True

    @classmethod
    def of(cls, step: FakeStep, pieces: Sequence[Sequence[TrialPiece]]) -> TrialLog:
        """Write the log of a trial.

        Args:
            step: the step.
            pieces: micro-batches of each step of the trial; the first is of the longest rows.
        """
        writer = LogWriter()
        before = [writer.add(step.loading, is_first=True)]
        if step.accumulates:
            before.append(writer.add(step.given_gradients(), is_first=True))
        in_backward = step.optimizer_peak_bytes is None
        one_row = step.micro_batch(1, pieces[0][0].run, finds_no_gradients=in_backward)
        before.append(writer.add(one_row, is_first=True))
        before.append(writer.add(step.optimizer_step(0), is_first=False))
        steps = []
        for of_step in pieces:
            log = array("q")
            for place, piece in enumerate(of_step):
                finds_none = step.accumulates and place == 0
                phase = step.micro_batch(piece.rows, piece.run, finds_no_gradients=finds_none)
                log.extend(writer.add(phase, is_first=False))
            optimizer = writer.add(step.optimizer_step(1), is_first=False)
            steps.append(TrialStepLog(max(piece.size for piece in of_step), log, optimizer))
        return cls(before, steps, writer, leaves_gradients=not in_backward)


class TrialReplay:
    """A trial on a simulated device whose segments do not expand, with the blocks of a search
    (:meth:`.AllocatorCache.try_first_step`).

    Args:
        trial: what it allocates and frees.
        budget_bytes: bytes that the allocator may take of the device.

    Attributes:
        fits: whether memory sufficed, without a retry of the allocator.
        peaks: most bytes allocated and reserved in the steps that follow the first one.
        allocator, cache: as the trial has left them.
    """

    def __init__(self, trial: TrialLog, *, budget_bytes: int) -> None:
        self.allocator = CachingAllocator(budget_bytes)
        self.cache = AllocatorCache(SimulatedMemory(self.allocator))
        self._leaves_gradients = trial.leaves_gradients
        self.fits = self._begin(trial.before) and self._try(trial.steps)
        self.peaks = self.allocator.peak_allocated_bytes, self.allocator.peak_reserved_bytes

    def _begin(self, logs: Iterable[Sequence[int]]) -> bool:
        try:
            for log in logs:
                self.allocator.replay(log)
                self.allocator.empty_cache()
        except torch.OutOfMemoryError:
            return False
        return self.allocator.num_retries == 0

    def _try(self, steps: Sequence[TrialStepLog]) -> bool:
        def attempt(make_room: Callable[[], object]) -> bool | None:
            return self._run(steps[:1], make_room) or None

        is_first_run = self.cache.try_first_step(
            attempt, budget_bytes=self.allocator.capacity_bytes
        )
        return bool(is_first_run) and self._run(steps[1:])

    def _run(
        self, steps: Iterable[TrialStepLog], make_room: Callable[[], object] = lambda: None
    ) -> bool:
        """Run steps from an empty cache; return whether memory sufficed without a retry."""
        allocator = self.allocator
        allocator.empty_cache()
        allocator.reset_peaks()
        num_retries = allocator.num_retries
        num_allocations = allocator.num_replayed
        make_room()
        try:
            for step in steps:
                self.cache.begin_step([step.size])
                allocator.replay(step.micro_batches)
                self.cache.end_step(leaves_gradients=lambda: self._leaves_gradients)
                allocator.replay(step.optimizer)
            fits = allocator.num_retries == num_retries
        except torch.OutOfMemoryError:
            fits = False
        if not fits:
            allocator.undo(num_allocations)
        return fits
