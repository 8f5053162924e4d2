"""Train a small model that runs out of memory at a chosen operation, and compare its state with a
run that does not. benchmarks/faults.py runs all operations.
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
from adaptive_batch.training.step import Attempts

PHASES = ("forward", "backward", "around them")


class OutOfMemoryMode(TorchDispatchMode):
    """Raises an OOM at operation number `left` from now; never if it is 0."""

    def __init__(self, left: int = 0) -> None:
        super().__init__()
        self.left = left

    def on_out_of_memory(self) -> None:
        """Record the OOM."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            self.on_out_of_memory()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return func(*args, **(kwargs or {}))


class RunsOutAt(OutOfMemoryMode):
    """Raises an OOM at a given operation of each attempt, or after an attempt that succeeded.

    Args:
        operations: number of the operation in each attempt; 0 for an attempt without an OOM.
        on_attempt: function that is called before each attempt.

    Attributes:
        failed_in: phases of the OOMs.
    """

    def __init__(self, *operations: int, on_attempt: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._operations = iter(operations)
        self._on_attempt = on_attempt
        self._repeat = Attempts.repeat
        self._in_forward = False
        self.failed_in: list[str] = []

    def __enter__(self) -> Any:
        def repeat(attempts: Attempts, **arguments: Any) -> Iterator[Any]:
            return map(self._counted, self._repeat(attempts, **arguments))

        Attempts.repeat = repeat  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        Attempts.repeat = self._repeat  # type: ignore[method-assign]
        super().__exit__(*error)

    @contextmanager
    def _counted(self, attempt: Any) -> Iterator[None]:
        """Count operations from the beginning and from the end of an attempt."""
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
    """Configuration of a training."""

    unit: str  # unit of the limit
    checkpointing: bool
    nested: bool = False  # whether the replay runs out of memory too
    adapters: str = ""  # kind of adapters; none if empty
    task: str = ""  # DPO or distillation; next-token prediction if empty

    def __str__(self) -> str:
        marks = (
            f"by {self.unit}",
            "checkpointing" * self.checkpointing,
            "twice" * self.nested,
            self.adapters,
            self.task,
        )
        return ", ".join(filter(None, marks))


# Lengths of the rows of a step. Both limits make two micro-batches of four rows; an OOM halves
# them.
LENGTHS = (9, 7, 9, 9, 6, 9, 8, 9)
LIMITS = {"rows": MicroBatchLimit(4), "tokens": MicroBatchLimit(36, "tokens")}


def step_rows(step: int) -> list[dict[str, Any]]:
    """Return the rows of a step; each step has other tokens."""
    return make_rows(LENGTHS, seed=step)


@dataclass
class Trained:
    """Result of a training.

    Attributes:
        state: bits of the state, result of each step, and sorted rows of its successful attempt.
        limits: limit of each step.
        changes: changes of the limit.
        failed_in: phases of the OOMs.
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
    """Train from the initial state.

    Args:
        way: configuration.
        operations: operation of each attempt of step `at_step` that runs out of memory.
        at_step: number of the step, from 0.
        limits: limit to set before each step.
        steps: number of optimizer steps.
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
    """Train without an OOM, with given limits."""
    return train(way, limits=limits, steps=len(limits))


def sweep(way: Way, *, every: int = 1) -> Iterator[tuple[str, list[str]]]:
    """Run a new training for each operation of a step, or one in `every`, that runs out of memory.

    Yields:
        Phase of the first OOM, and names of values that differ from a training without an OOM.
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
