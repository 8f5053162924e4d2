"""Trials: measured training steps that leave no trace.

The memory that is resident in training is resident in a trial. All ranks run the same trial, and a
size that does not fit on one rank does not fit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from types import TracebackType
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batch import distributed
from adaptive_batch._util import count, format_bytes
from adaptive_batch.distributed import Sharding, sharding_of
from adaptive_batch.errors import (
    MEMORY_REMEDIES,
    AdaptiveBatchError,
    DoesNotFitError,
    RankLostError,
)
from adaptive_batch.memory import (
    DeviceMemory,
    OptimizerInBackward,
    TrainingSnapshot,
    Usage,
    is_out_of_memory,
    optimizer_list,
    optimizer_state_tensors,
    recover,
)

from .search import Trial

# Functions that run the micro-batches of a step.
TrialStep = Sequence[Callable[[], None]]


class _Outcome(NamedTuple):
    """Outcome of a measured part of a trial.

    Attributes:
        usage: memory of the part; None if it does not fit on some rank.
        retried: whether it does not fit only because an allocator freed its cache and retried.
        held_bytes: peak of this rank before an OOM; None without an OOM or if unknown.
    """

    usage: Usage | None
    retried: bool
    held_bytes: int | None


class DryRun:
    """Runs trials of a training step.

    Entering the context saves the training state, and leaving it restores the state bit for bit.
    Entering also runs one whole step with the fewest rows, so that the optimizer's state is
    resident during every trial. This step also measures the peak of the optimizer's step, which
    does not grow with the batch.

    Args:
        model: model with loaded weights. It is put into training mode, unless ``model.training`` is
            set already: then single modules may stay in evaluation mode.
        optimizer: the optimizer, or the optimizers in backward.
        forward_backward: function that runs forward and backward of the given number of longest
            rows with the code of training.
        step: function that ends a training step: clipping and ``optimizer.step()``.
        accumulates: True if a step may have several micro-batches, so that gradients exist before a
            forward.
        memory: memory of the device.
        budget_bytes: memory limit of a trial, resident bytes included.
        min_rows: fewest rows that the model trains on.
        row: description of the fewest rows for errors, with their length.
        sharding: sharding of the model; needed with several ranks.
        keep_gradients: function that runs a micro-batch of one row and keeps its gradients
            unsharded, as within a step.
        varying_steps: function that returns training steps of varying lengths, the largest first,
            for the given size of the largest micro-batch. A trial then runs all of them from an
            empty cache, since varying lengths fragment a caching allocator. None if a trial is one
            micro-batch.
        remedies: advice at the end of the error that one row does not fit.
        frozen_modules: frozen modules that are on the device besides the model.
        leaves_cache: whether to keep the allocator's cache after the last trial.

    Attributes:
        resident_bytes: bytes alive before a trial, known after entering.
        optimizer_peak_bytes: peak of clipping and the optimizer's step; None with the optimizer in
            backward.
        min_rows_seconds: shortest duration of the fewest rows; infinity before they ran.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer | OptimizerInBackward,
        forward_backward: Callable[[int], None],
        step: Callable[[], object],
        accumulates: bool,
        memory: DeviceMemory,
        budget_bytes: int,
        min_rows: int = 1,
        row: str = "one row",
        sharding: Sharding | None = None,
        keep_gradients: Callable[[], object] | None = None,
        varying_steps: Callable[[int], Iterator[TrialStep]] | None = None,
        remedies: str = MEMORY_REMEDIES,
        frozen_modules: Sequence[nn.Module] = (),
        leaves_cache: bool = False,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.resident_bytes = 0
        self.optimizer_peak_bytes: int | None = None
        self.min_rows_seconds = math.inf
        self._model = model
        self._in_backward = optimizer if isinstance(optimizer, OptimizerInBackward) else None
        # Empty if the optimizer runs in backward, which undoes its own steps.
        self._optimizers = [optimizer] if isinstance(optimizer, Optimizer) else []
        self._forward_backward = forward_backward
        self._step = step
        self._memory = memory
        self._min_rows = min_rows
        self._row = row
        self._varying_steps = varying_steps
        self._leaves_cache = leaves_cache
        self._optimizer = optimizer
        self._sharding = sharding or sharding_of(model)
        self._accumulates = accumulates
        self._keep_gradients = keep_gradients if accumulates else None
        self._remedies = remedies
        self._frozen_modules = frozen_modules
        self._exit = ExitStack()

    def __enter__(self) -> DryRun:
        """Save the training state and create the optimizer's state.

        Raises:
            DoesNotFitError: the fewest rows do not fit.
            RankLostError: this rank ran out of memory while other ranks wait in a collective.
        """
        # An error undoes what was done before it. Otherwise __exit__() does, the last first.
        with ExitStack() as stack:
            if not self._leaves_cache:
                stack.callback(self._memory.release)
            snapshot = TrainingSnapshot(
                self._model,
                self._optimizers,
                device=self._memory.device,
                parameters_change=self._in_backward is None,
            )
            stack.callback(snapshot.restore)
            if self._varying_steps is not None:
                for optimizer in self._optimizers:
                    stack.callback(_hold_state_until_step, optimizer)
            stack.callback(self._drop_gradients)
            if self._in_backward:
                stack.enter_context(self._in_backward.dry_run())
            # train() would also change modules that stay in evaluation mode.
            if not self._model.training:
                self._model.train()
            self._try_one_step()
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exit.close()

    def __call__(self, batch_size: int) -> Trial:
        """Try `batch_size` rows.

        Raises:
            RuntimeError: the trial failed for a reason other than memory.
            RankLostError: this rank ran out of memory while other ranks wait in a collective; its
                facts have the ``trial_rows``.
        """
        phase = f"a trial of {count(batch_size, 'row')}"
        try:
            if self._varying_steps is None:
                outcome = self._measure(lambda: self._forward_backward(batch_size), phase)
            else:
                outcome = self._try_steps(self._varying_steps(batch_size), phase)
        except RankLostError as lost:
            lost.facts["trial_rows"] = batch_size
            raise
        usage = outcome.usage
        if usage is None:
            return Trial(
                batch_size,
                False,
                None,
                self.optimizer_peak_bytes,
                retried=outcome.retried,
                held_bytes=outcome.held_bytes,
            )
        return Trial(batch_size, True, usage.peak_bytes, self.optimizer_peak_bytes, usage.trace)

    def time_runs(self, runs: Sequence[Callable[[], object]]) -> float | None:
        """Run functions in turn, and return their seconds on the slowest rank; None if they do not
        fit.
        """
        seconds = 0.0

        def run_all() -> None:
            nonlocal seconds
            start = time.perf_counter()
            for run in runs:
                run()
            # An accelerator runs kernels asynchronously.
            if self._memory.device.type != "cpu":
                torch.accelerator.synchronize()
            seconds = time.perf_counter() - start

        outcome = self._measure(run_all, "timing micro-batches", prepare=False, is_timed=True)
        self._drop_gradients()
        if outcome.usage is None:
            return None
        # distributed.maximum() takes integers.
        return distributed.maximum(int(1e9 * seconds)) / 1e9

    def _try_steps(self, steps: Iterator[TrialStep], phase: str) -> _Outcome:
        """Run steps as training does."""
        self._drop_gradients()

        def run_all() -> None:
            for step in steps:
                for forward_backward in step:
                    forward_backward()
                if not self._in_backward:
                    self._step()
                self._drop_gradients()

        return self._measure(run_all, phase, prepare=False)

    def evaluation(self, evaluate: Callable[[int], object], batch_size: int) -> Trial:
        """Try `batch_size` rows without gradients, as between two training steps.

        Args:
            evaluate: function that runs the forward of the given number of rows.
            batch_size: rows.
        """
        self._drop_gradients()
        phase = f"a trial of evaluating {count(batch_size, 'row')}"
        usage, *_ = self._measure(lambda: evaluate(batch_size), phase, prepare=False)
        if usage is None:
            return Trial(batch_size, False)
        return Trial(batch_size, True, usage.peak_bytes, None, usage.trace)

    def _try_one_step(self) -> None:
        """Run the fewest rows, the optimizer's step, and the fewest rows again, beside the state
        that the optimizer's first step creates.

        Raises:
            DoesNotFitError: a part does not fit.
        """
        self._run_fewest_rows()
        if not self._in_backward:
            name = "the optimizer's step"
            usage = self._measure(self._step, name, prepare=False).usage
            if usage is None:
                raise self._does_not_fit(name)
            self.optimizer_peak_bytes = usage.peak_bytes
        self._run_fewest_rows()
        self._prepare_gradients()
        # The block is empty: it measures the resident bytes.
        with self._memory.measure(self._resident(), budget_bytes=self.budget_bytes) as resident:
            pass
        self.resident_bytes = resident.resident_bytes

    def _run_fewest_rows(self) -> None:
        start = time.perf_counter()
        outcome = self._measure(
            lambda: self._forward_backward(self._min_rows), self._row, is_first=True
        )
        if outcome.usage is None:
            raise self._does_not_fit(self._row)
        self.min_rows_seconds = min(time.perf_counter() - start, self.min_rows_seconds)

    # --- measuring --------------------------------------------------------------------------------

    def _measure(
        self,
        run: Callable[[], object],
        part: str,
        *,
        prepare: bool = True,
        is_timed: bool = False,
        is_first: bool = False,
    ) -> _Outcome:
        """Measure a part of a trial. It does not fit after a retry of the allocator on some rank.

        Args:
            run: function to measure.
            part: name of the part in errors.
            prepare: whether to create the gradients that exist before a forward.
            is_timed: whether `run` measures time, so that memory must not be counted in Python.
            is_first: whether `run` may be the first to record the collectives of the ranks.

        Raises:
            DoesNotFitError: the first rows ran out of memory on one of several ranks.
            RankLostError: this rank ran out of memory while other ranks wait in a collective.
            RuntimeError: `run` failed for a reason other than memory.
        """
        # Counting, as on a CPU, runs Python code for each operation, which slows down a timed run.
        is_counted = not is_timed or self._memory.granularity_bytes > 1
        usage: Usage | None = None
        ran_out = False
        message = ""
        is_prepared = has_run = False
        try:
            if prepare:
                self._prepare_gradients()
            is_prepared = True
            measuring = self._memory.measure(self._resident(), budget_bytes=self.budget_bytes)
            with measuring if is_counted else nullcontext(Usage(0)) as usage:
                run()
                # No rank waits in a collective any more; this one may still be over its budget.
                has_run = True
        except AdaptiveBatchError:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise RuntimeError(f"{part} failed, not because of memory: {error}") from error
            ran_out = True
            message = str(error) or type(error).__name__
        # Clean up only after the except block: its traceback keeps tensors alive.
        retried = not ran_out and usage is not None and usage.retried
        held_bytes = usage.peak_bytes if ran_out and usage is not None else None
        # If a rank failed in the middle, the others wait in collectives that it has to complete.
        others_wait = not has_run and distributed.world_size() > 1
        if others_wait and not (is_prepared and self._sharding.can_finish):
            if is_first:
                raise self._does_not_fit(part)
            raise self._lost(part, message)
        fits = not (ran_out or retried)
        try:
            if not fits:
                self._drop_gradients()
                recover(self._memory)
                self._sharding.finish()
            any_ran_out, any_retried = map(
                bool, distributed.all_reduce_max([int(ran_out), int(retried)])
            )
        except Exception as error:
            if distributed.world_size() == 1 or not is_out_of_memory(error):
                raise
            raise self._lost(f"the cleanup after {part}", str(error)) from error
        if not (any_ran_out or any_retried):
            return _Outcome(usage, False, None)
        if fits:
            # The part does not fit on another rank.
            self._drop_gradients()
            self._memory.release()
        return _Outcome(None, not any_ran_out, held_bytes)

    def _lost(self, part: str, message: str) -> RankLostError:
        first_line, _, _ = message.partition("\n")
        return RankLostError(
            f"{part} ran out of memory on {self._memory.device} within"
            f" {format_bytes(self.budget_bytes)} while the other ranks wait in a collective:"
            f" {first_line}",
            {"doing": part, "error": message},
        )

    def _does_not_fit(self, part: str) -> DoesNotFitError:
        """Return the error for a part that needs more than the budget."""
        place = str(self._memory.device)
        if distributed.world_size() > 1:
            place = f"rank {distributed.rank()}"
        allowed = format_bytes(self.budget_bytes)
        return DoesNotFitError(
            f"{part} needs more than the {allowed} that {place} allows; {self._remedies}"
        )

    def _resident(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that training holds between two steps."""
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            yield tensor
            if tensor.grad is not None:
                yield tensor.grad
        for module in self._frozen_modules:
            yield from (*module.parameters(), *module.buffers())
        yield from self._sharding.kept_gradients()
        yield from optimizer_state_tensors(optimizer_list(self._optimizer))

    def _prepare_gradients(self) -> None:
        """Create the gradients that exist before a forward."""
        if self._keep_gradients:
            self._drop_gradients()
            self._keep_gradients()
            return
        for parameter in self._model.parameters():
            if not self._accumulates:
                parameter.grad = None
            # Gradients of the last trial stay: their values do not matter.
            elif parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _drop_gradients(self) -> None:
        """Remove all gradients."""
        self._sharding.reset()
        for parameter in self._model.parameters():
            parameter.grad = None


def _hold_state_until_step(optimizer: Optimizer) -> None:
    """Keep the state of trials alive until the first step, whose state takes its place in memory.

    Otherwise activations of the first step could take that place.
    """
    held = list(optimizer_state_tensors([optimizer]))

    def release(*_: object) -> None:
        held.clear()

    optimizer.register_step_pre_hook(release)
