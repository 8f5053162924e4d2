"""A small training that runs out of memory at a chosen operation, for facts about replays.

Every operation: benchmarks/faults.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from support.runners import build_runner
from support.same_state import bits, differences
from support.sharded_model import make_rows
from support.training_cases import Case, Training
from torch.utils._python_dispatch import TorchDispatchMode

from adaptive_batch._util import replaced
from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.training import LimitChange
from adaptive_batch.training.step import MicroBatchRunner

PHASES = ("forward", "backward", "around them")


class OutOfMemoryMode(TorchDispatchMode):
    """Out of memory once so many operations have begun; never if `left` is 0."""

    def __init__(self, left: int = 0) -> None:
        super().__init__()
        self.left = left

    def on_out_of_memory(self) -> None:
        """React to memory that runs out now."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            self.on_out_of_memory()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return func(*args, **(kwargs or {}))


class RunsOutAt(OutOfMemoryMode):
    """Out of memory at a given operation of the first attempt, of the second, and so on. After an
    attempt that went well the next operation is waited for too.

    Args:
        operations: number of the operation in each attempt; 0 for one that does not run out.
        on_attempt: function that is called before each attempt.

    Attributes:
        failed_in: the phases in which it ran out.
    """

    def __init__(self, *operations: int, on_attempt: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._operations = iter(operations)
        self._on_attempt = on_attempt
        self._attempts = MicroBatchRunner.attempts
        self._in_forward = False
        self.failed_in: list[str] = []

    def __enter__(self) -> Any:
        def attempts(runner: MicroBatchRunner, **arguments: Any) -> Iterator[Any]:
            return map(self._counted, self._attempts(runner, **arguments))

        MicroBatchRunner.attempts = attempts  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        MicroBatchRunner.attempts = self._attempts  # type: ignore[method-assign]
        super().__exit__(*error)

    @contextmanager
    def _counted(self, attempt: Any) -> Iterator[None]:
        """Count operations from the beginning of an attempt, and from its end."""
        with attempt:
            self._begin()
            yield
            self._begin()

    def _begin(self) -> None:
        self._on_attempt()
        self.left = next(self._operations, 0)

    def in_forward(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        with replaced(self, _in_forward=True):
            return run()

    def on_out_of_memory(self) -> None:
        phase = "forward" if self._in_forward else "around them"
        in_backward = torch._C._current_graph_task_id() != -1
        self.failed_in.append("backward" if in_backward else phase)


@dataclass(frozen=True)
class Way:
    """One way of training."""

    unit: str  # of the limit
    checkpointing: bool
    nested: bool = False  # it runs out again in the replay
    adapters: str = ""  # which kind is on a frozen base
    task: str = ""  # DPO or distillation; else next tokens

    def __str__(self) -> str:
        marks = (
            f"by {self.unit}",
            "checkpointing" * self.checkpointing,
            "twice" * self.nested,
            self.adapters,
            self.task,
        )
        return ", ".join(filter(None, marks))


# Of the rows of a step: two micro-batches of four either way, pairs after a failure in one, single
# rows after one more.
LENGTHS = (9, 7, 9, 9, 6, 9, 8, 9)
LIMITS = {"rows": MicroBatchLimit(4), "tokens": MicroBatchLimit(36, "tokens")}


def step_rows(step: int) -> list[dict[str, Any]]:
    """The rows of a step: other tokens in each."""
    return make_rows(LENGTHS, seed=step)


@dataclass
class Trained:
    """The state, rows and figures that a training left.

    Attributes:
        state: the state bit by bit, the figures of each step, and the rows whose gradients each
            step kept, sorted.
        limits: those that each step ran with.
        changes: of the limit.
        failed_in: the phases in which it ran out.
    """

    state: dict[str, Any] = field(default_factory=dict)
    limits: list[MicroBatchLimit] = field(default_factory=list)
    changes: list[LimitChange] = field(default_factory=list)
    failed_in: list[str] = field(default_factory=list)


def train(
    way: Way,
    *,
    operations: Sequence[int] = (),
    at_step: int = 0,
    limits: Sequence[MicroBatchLimit] = (),
    steps: int = 3,
) -> Trained:
    """Train from the start.

    Args:
        way: of training.
        operations: of step `at_step`: where its first attempt runs out, where its second, and so
            on.
        at_step: counted from 0.
        limits: forced on each step.
        steps: of the optimizer.
    """
    case = Case("AdamW", checkpointing=way.checkpointing, adapters=way.adapters, task=way.task)
    training = Training(case)
    (optimizer,) = training.optimizers
    optimizer.zero_grad()
    trained, fault = Trained(), RunsOutAt()
    attempts: list[list[int]] = []

    def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        attempts[-1].extend(row["row"] for row in rows)
        return training.collate(rows)

    runner = build_runner(
        training.model,
        LIMITS[way.unit],
        collate=collate,
        mean_loss=lambda batch: fault.in_forward(lambda: training.mean_loss(batch)),
        max_grad_norm=0.5,
        on_change=trained.changes.append,
    )
    if training.learned is not None:
        runner.loss = training.learned.of_rows(runner.loss, collate)
    results, rows_run = [], []
    for step in range(steps):
        if limits:
            runner.sizer.current = limits[step]
        own = operations if step == at_step else ()
        fault = RunsOutAt(*own, on_attempt=lambda: attempts.append([]))
        with fault:
            result = runner.run(step_rows(step))
        trained.failed_in += fault.failed_in
        optimizer.step()
        optimizer.zero_grad()
        results.append(bits(result))
        trained.limits.append(runner.sizer.limit())
        rows_run.append(sorted(next(rows for rows in reversed(attempts) if rows)))
    trained.state = {**training.everything(), "steps": results, "rows": rows_run}
    return trained


@functools.cache
def undisturbed(way: Way, limits: tuple[MicroBatchLimit, ...]) -> Trained:
    """Train without running out, with given limits."""
    return train(way, limits=limits, steps=len(limits))


def sweep(way: Way, *, every: int = 1) -> Iterator[tuple[str, list[str]]]:
    """Run out at every operation of a step, or at every so many-th, each time in a training of its
    own.

    Yields:
        The phase in which it first ran out, and the names of what differs from one that never did.
    """
    for at_step in (0, 1):
        operation = 1
        while True:
            second = (1 + operation * 7 % 400,) if way.nested else ()
            found = train(way, operations=(operation, *second), at_step=at_step)
            if not found.failed_in:
                break
            expected = undisturbed(replace(way, nested=False), tuple(found.limits))
            differing = differences(expected.state, found.state)
            if [change.grows for change in found.changes] != [False] * len(found.failed_in):
                differing.append("changes")
            if any(rows != list(range(len(LENGTHS))) for rows in found.state["rows"]):
                differing.append("not all rows")
            if way.nested and len(found.failed_in) != 2:
                differing.append("did not run out twice")
            yield found.failed_in[0], differing
            operation += every
