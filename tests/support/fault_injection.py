"""A small training that runs out of memory at a chosen operation, for facts about replays.

Shared by test_step.py (a short form) and benchmarks/faults.py (every
operation).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from support import sharded_model
from support.runners import build_runner
from support.sharded_model import collate, make_rows, token_losses
from support.training_cases import bits, put_adapters
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.training import LimitChange
from adaptive_batch.training.step import MicroBatchRunner

PHASES = ("forward", "backward", "around them")


def mean_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Return the mean loss of a label token; labels are shifted."""
    return token_losses(model, batch, "mean")


class Decoder(sharded_model.Decoder):
    """A causal transformer that draws from every generator and keeps running statistics, in place
    and anew.
    """

    def __init__(self, *, checkpointing: bool) -> None:
        super().__init__(draws=True, checkpointing=checkpointing, dtype=torch.float32)


class RunsOutAt(TorchDispatchMode):
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
        self._left = 0
        self._in_forward = False
        self.failed_in: list[str] = []

    def __enter__(self) -> Any:
        def attempts(runner: MicroBatchRunner, **arguments: Any) -> Iterator[Any]:
            return map(self._heard, self._attempts(runner, **arguments))

        MicroBatchRunner.attempts = attempts  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        MicroBatchRunner.attempts = self._attempts  # type: ignore[method-assign]
        super().__exit__(*error)

    @contextmanager
    def _heard(self, attempt: Any) -> Iterator[None]:
        with attempt:
            self._begin()
            yield
            self._begin()

    def _begin(self) -> None:
        """Count operations from here."""
        self._on_attempt()
        self._left = next(self._operations, 0)

    def in_forward(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._in_forward = True
        try:
            return run()
        finally:
            self._in_forward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left == 0:
            backward = torch._C._current_graph_task_id() != -1
            self.failed_in.append(
                PHASES[1] if backward else PHASES[0] if self._in_forward else PHASES[2]
            )
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Way:
    """One way of training.

    Attributes:
        unit: of the capacity.
        checkpointing: of activations, non-reentrant.
        nested: it runs out again in the replay.
        adapters: which kind is on a frozen base, if any.
        task: DPO or distillation, if any; else next tokens.
    """

    unit: str
    checkpointing: bool
    nested: bool = False
    adapters: str = ""
    task: str = ""

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
CAPACITIES = {"rows": MicroBatchLimit(4), "tokens": MicroBatchLimit(36, "tokens")}


def step_rows(step: int) -> list[dict[str, Any]]:
    """The rows of a step: other tokens in each."""
    return make_rows(LENGTHS, seed=step)


@dataclass
class Trained:
    """The state and the figures that a training left.

    Attributes:
        state: model, optimizer and random numbers, bit by bit.
        steps: loss, label tokens, rows, tokens, micro-batches, padding and gradient norm of each
            step.
        capacities: that each step ran with.
        run_rows: the rows whose gradients each step kept, sorted.
        changes: of the capacity.
        failed_in: the phases in which it ran out.
    """

    state: dict[str, Any] = field(default_factory=dict)
    steps: list[tuple[Any, ...]] = field(default_factory=list)
    capacities: list[MicroBatchLimit] = field(default_factory=list)
    run_rows: list[list[int]] = field(default_factory=list)
    changes: list[LimitChange] = field(default_factory=list)
    failed_in: list[str] = field(default_factory=list)


def train(
    way: Way,
    *,
    operations: Sequence[int] = (),
    at_step: int = 0,
    capacities: Sequence[MicroBatchLimit] = (),
    steps: int = 3,
) -> Trained:
    """Train from the start, as if what was given before had never been.

    Args:
        way: of training.
        operations: of step `at_step`: where its first attempt runs out, where its second, and so
            on.
        at_step: counted from 0.
        capacities: forced on each step.
        steps: of the optimizer.
    """
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Decoder(checkpointing=way.checkpointing)
    if way.adapters:
        put_adapters(model, way.adapters)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    models: nn.Module = model
    collate_rows = collate
    mean = partial(mean_loss, model)
    learned = None
    if way.task:
        # Which imports what other ways need not wait for.
        from support.learned_tasks import LearnedTask

        needs_second = way.task == "distillation" or not way.adapters
        second = Decoder(checkpointing=False) if needs_second else None
        learned = LearnedTask(way.task, model, second)
        models = learned.models
        collate_rows = learned.collate
        mean = learned.mean_loss
    trained = Trained()
    fault = RunsOutAt()
    attempts: list[list[int]] = []

    def collate_seen(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        attempts[-1].extend(row["row"] for row in rows)
        return collate_rows(rows)

    runner = build_runner(
        model,
        CAPACITIES[way.unit],
        collate=collate_seen,
        mean_loss=lambda batch: fault.in_forward(lambda: mean(batch)),
        max_grad_norm=0.5,
        on_change=trained.changes.append,
    )
    if learned is not None:
        runner.loss = learned.of_rows(runner.loss, collate_seen)
    for step in range(steps):
        if capacities:
            runner.sizer.current = capacities[step]
        fault = RunsOutAt(
            *(operations if step == at_step else ()), on_attempt=lambda: attempts.append([])
        )
        with fault:
            result = runner.run(step_rows(step))
        trained.failed_in += fault.failed_in
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert result.grad_norm is not None
        numbers = result._replace(
            num_labels=int(result.num_labels), grad_norm=float(result.grad_norm)
        )
        trained.steps.append(tuple(numbers))
        trained.capacities.append(runner.sizer.limit())
        trained.run_rows.append(sorted(next(rows for rows in reversed(attempts) if rows)))
    trained.state = {
        "model": bits(models.state_dict()),
        "optimizer": bits(optimizer.state_dict()),
        "torch": bits(torch.get_rng_state()),
        "python": random.getstate(),
        "numpy": bits(np.random.get_state(legacy=False)),
    }
    return trained


@functools.cache
def undisturbed(way: Way, capacities: tuple[MicroBatchLimit, ...]) -> Trained:
    """Train without running out, with given capacities."""
    return train(way, capacities=capacities, steps=len(capacities))


def differences(faulted: Trained, expected: Trained) -> list[str]:
    """Names of what differs."""
    names = [name for name, bits in faulted.state.items() if bits != expected.state[name]]
    pairs = {"steps": (faulted.steps, expected.steps)}
    pairs["run_rows"] = faulted.run_rows, expected.run_rows
    return names + [name for name, (one, other) in pairs.items() if one != other]


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
            differing = differences(
                found, undisturbed(replace(way, nested=False), tuple(found.capacities))
            )
            if [change.grows for change in found.changes] != [False] * len(found.failed_in):
                differing.append("changes")
            if any(rows != list(range(len(LENGTHS))) for rows in found.run_rows):
                differing.append("rows")
            if way.nested and len(found.failed_in) != 2:
                differing.append("did not run out twice")
            yield found.failed_in[0], differing
            operation += every
